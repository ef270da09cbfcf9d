"""A prefix whose layers load while the model computes those before them.

A forward needs a layer's keys and values when it comes to that layer. Over a slow link the first
one is there long before the last one: what is computed meanwhile costs no time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from kvstore.client.engines.accuracy import Allowed
from kvstore.client.engines.base import Connector
from kvstore.client.engines.prefix import Asked, Prefix, Room, Span
from kvstore.client.layers import Layer
from kvstore.client.link_meter import LinkMeter
from kvstore.client.tensors import LayerTensors
from kvstore.proto.frame import raw_frame_bytes
from kvstore.proto.types import EXACT, ChunkKey, Fidelity, KVLayout, Stated

UNSEEN_BYTES_PER_S = 1e12
"""What is thought of a link before something came over it: that nothing is to be gained."""
LEAST_GAIN_S, LEAST_GAIN = 0.02, 0.125
"""What loading layer by layer has to save, in seconds and as a share of load and forward: less is
not worth a load that may end in the middle."""

T = TypeVar("T")


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether any of *model* was compiled by torch: such code does not wait where Python would."""
    return any(
        module._compiled_call_impl is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def new_link() -> LinkMeter:
    """Return what learns from whole loads how fast chunks come, in bytes of raw frames."""
    return LinkMeter(UNSEEN_BYTES_PER_S, time.monotonic)


class _LayerLostError(Exception):
    """A layer came of fewer chunks than the first one."""


class _ArrivingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer of a cache that waits for its keys and values when they are first looked at."""

    def __init__(self, plain: Any, wait: Callable[[], None]) -> None:
        self._wait: Callable[[], None] = lambda: None
        super().__init__()  # type: ignore[no-untyped-call]
        self.lazy_initialization(plain.keys, plain.values)
        self.keys, self.values = plain.keys, plain.values
        self._wait = wait

    @property
    def keys(self) -> Any:
        """K, (1, kv_heads, tokens, head_dim)."""
        self._wait()
        return self._keys

    @keys.setter
    def keys(self, keys: Any) -> None:
        self._keys = keys

    @property
    def values(self) -> Any:
        """V, alike."""
        self._wait()
        return self._values

    @values.setter
    def values(self, values: Any) -> None:
        self._values = values


class LayerLoad:
    """The load of one prompt into a DynamicCache, and the forward behind it. For one thread.

    Layer by layer, where that saves enough by what *link* and the connector's ``learned`` say: as
    much as the transfer and the computing of what is left overlap, the shorter of both. Exact
    copies alone; not over shared memory, where all is in reach at once. Each layer is verified
    before the model sees it. When one is late or proves wrong the forward is given up, and done
    again behind the chunks that are right in all layers.
    """

    def __init__(self, connector: Connector, link: LinkMeter) -> None:
        self._connector = connector
        self._link = link
        self._layers: Generator[Layer, None, None] | None = None
        self._counts: dict[int, int] = {}
        """Of each layer that came, the chunks that were right by then."""
        self._prefix, self._reason = Prefix(), ""
        self._spans: Sequence[Span] = ()
        self._prompt_tokens = 0
        self._own: dict[int, Any] = {}
        """The cache's own layers, which stand aside until all came."""
        self._waited_s = 0.0

    def load_chunks(
        self, tokens: Sequence[int], room: Room, extra: Sequence[bytes], allowed: Allowed
    ) -> Prefix:
        """Do what ``Connector.load_chunks`` does; a prefix that is on its way is counted later."""
        self._prompt_tokens = len(tokens)

        def read(keys: Sequence[ChunkKey], spans: Sequence[Span]) -> Sequence[Stated]:
            self._spans = spans
            sizes = [raw_frame_bytes(self._layout(span)) for span in spans]
            if allowed.least is Fidelity.exact and self._pays(sum(sizes)):
                return self._begin(keys, room(spans))
            stated: list[Stated] = []
            began_s = time.monotonic()
            client = self._connector.client
            client.get(keys, room(spans), min_fidelity=allowed.least, stated=stated)
            self._link.observe(sum(sizes[: len(stated)]), time.monotonic() - began_s)
            return stated

        self._prefix, self._reason = self._connector.attempt(
            tokens, read, extra, allowed, Asked(len(tokens))
        )
        if self._layers is not None and not self._prefix.hit_tokens:
            self._layers.close()
            self._layers = None
        return self._count() if self._layers is None else self._prefix

    def _layout(self, span: Span) -> KVLayout:
        return KVLayout.of(self._connector.client.representation, span[1] - span[0])

    def _pays(self, size_bytes: int) -> bool:
        prefill = self._connector.learned.model()
        if prefill is None:
            return False
        held = min(self._spans[-1][1], self._prompt_tokens - 1)
        compute_s = prefill.seconds(self._prompt_tokens - held, held)
        load_s = size_bytes / self._link.estimate().mean_bytes_per_s
        transport = self._connector.client._connected()
        return (
            min(load_s, compute_s) >= max(LEAST_GAIN_S, LEAST_GAIN * (load_s + compute_s))
            and transport.name != "shm"
            and len(self._spans) <= transport.session.terms.max_batch_chunks
        )

    def _begin(self, keys: Sequence[ChunkKey], out: Sequence[LayerTensors]) -> Sequence[Stated]:
        """Return what the chunks state of which the first layer came."""
        self._layers = self._connector.client.get_layers(keys, out)
        self._draw()
        return [EXACT] * min(self._counts.values(), default=0)

    def _draw(self) -> bool:
        """Wait for the next layer; return whether one came. Raises KVStoreErrors."""
        assert self._layers is not None
        layer = next(self._layers, None)
        if layer is not None:
            self._counts[layer.layer_id] = len(layer.tensors)
        return layer is not None

    def attach(self, cache: DynamicCache) -> None:
        """Have the layers of *cache*, which holds the prefix, wait until they came."""
        layers: Sequence[Any] = cache.layers if self._layers is not None else ()
        for number, layer in enumerate(layers):
            if layer.is_initialized:
                self._own[number] = layer
                cache.layers[number] = _ArrivingLayer(layer, partial(self._wait, number))

    def _wait(self, number: int) -> None:
        """Return once layer *number* came. Raises what ends the forward, where it did not."""
        began_s = time.perf_counter()
        while number not in self._counts and self._connector.ask(self._draw, False):
            pass
        self._waited_s += time.perf_counter() - began_s
        if self._counts.get(number, 0) < len(self._prefix.tiers):
            raise _LayerLostError(number)

    def note(self, tokens: int, seconds: float) -> None:
        """Tell the connector that *tokens* took so many seconds, some of which were waited."""
        self._connector.learned.observe(tokens, seconds - self._waited_s)

    def run(self, cache: Cache, prefix: Prefix, work: Callable[[], T]) -> tuple[T, Prefix]:
        """Return what *work*, the forward, makes of *cache*, and what of *prefix* was in it.

        Where a layer did not come, *work* is done again behind what is right. Raises what it does.
        """
        if self._layers is None:
            return work(), prefix
        with closing(self._layers):
            try:
                found = work()
                self._finish(cache)
            except _LayerLostError:
                self._cut(cache, self._whole_chunks())
            else:
                return found, self._count()
        self._waited_s = 0.0
        return work(), self._prefix

    def _finish(self, cache: Cache) -> None:
        """Give *cache* its own layers back."""
        for number in self._own:
            self._wait(number)
        for number, own in self._own.items():
            grown: Any = cache.layers[number]
            own.keys, own.values = grown.keys, grown.values
            cache.layers[number] = own

    def _whole_chunks(self) -> int:
        """Return how many chunks are right in all layers, once no more come."""
        while self._connector.ask(self._draw, False):
            pass
        return min(self._counts.get(number, 0) for number in self._own)

    def _cut(self, cache: Cache, chunks: int) -> None:
        """Have *cache* hold the first *chunks* alone."""
        was, spans = self._prefix, self._spans[:chunks]
        left = Prefix.of(spans, was.tiers[:chunks], self._prompt_tokens, was.shared_tokens)
        for number, own in self._own.items():
            cache.layers[number] = layer = DynamicLayer()  # type: ignore[no-untyped-call]
            if left.hit_tokens:
                keys, values = (part[:, :, : left.hit_tokens] for part in (own.keys, own.values))
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values = keys, values
        self._prefix, self._reason = left, "lost"
        self._count(len(was.tiers) - chunks)

    def _count(self, lost_chunks: int = 0) -> Prefix:
        prefix, reason = self._prefix, self._reason
        return self._connector.note_load(self._prompt_tokens, prefix, reason, lost_chunks)
