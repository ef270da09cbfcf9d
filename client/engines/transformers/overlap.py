"""Loads that the model computes beside: chunk by chunk for a deadline, or layer by layer.

A forward needs a layer's keys and values when it comes to that layer. Over a slow link the first
one is there long before the last one: what is computed meanwhile costs no time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvstore.client.decode import Layer
from kvstore.client.engines.base import Connector
from kvstore.client.engines.prefix import Prefix, Span
from kvstore.client.engines.transformers.cache import forward
from kvstore.client.planning import LinkMeter
from kvstore.client.tensors import LayerTensors
from kvstore.proto.frame import raw_frame_bytes
from kvstore.proto.types import EXACT, Accuracy, ChunkKey, KVLayout, Stated, layer_order

UNSEEN_BYTES_PER_S = 1e12
"""What is thought of a link before something came over it: that nothing is to be gained."""
LEAST_GAIN_S, LEAST_GAIN = 0.02, 0.125
"""What loading layer by layer has to save, in seconds and as a share of load and forward: less is
not worth a load that may end in the middle."""
WAITED_S = 0.001
"""A layer that took longer than this was waited for: by then the link had brought no more."""

T = TypeVar("T")


class Beside:
    """Computes chunks of a prompt into *cache* while others load; what it raises is in ``error``.

    The last token is left to generate from. *note* is told how many tokens took how many seconds.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: Cache,
        tokens: Sequence[int],
        chunk_tokens: int,
        note: Callable[[int, float], None],
    ) -> None:
        self._model, self._cache, self._note = model, cache, note
        self._ids = torch.tensor([tokens], device=model.device)
        self._chunk_tokens = chunk_tokens
        self.error: Exception | None = None

    def __call__(self, chunks: range) -> None:
        """Compute *chunks*, those behind what the cache has."""
        start = chunks.start * self._chunk_tokens
        some = self._ids[:, start : min(chunks.stop * self._chunk_tokens, self._ids.shape[1] - 1)]
        began_s = time.perf_counter()
        try:
            last = forward(self._model, some, self._cache)
            float(last[0, 0])  # the next is begun once this is done, on a device, too
        except Exception as error:
            self.error = error
            raise
        self._note(some.shape[1], time.perf_counter() - began_s)


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether any of *model* was compiled by torch: such code does not wait where Python would."""
    return any(
        module._compiled_call_impl is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in model.modules()
    )


@dataclass
class Link:
    """What the loads of one connector share. Any thread may use it."""

    meter: LinkMeter = field(default_factory=lambda: LinkMeter(UNSEEN_BYTES_PER_S, time.monotonic))
    """How fast chunks come, in bytes of raw frames."""
    layered: threading.Lock = field(default_factory=threading.Lock)
    """Held by the one load that is layer by layer: two would wait for each other's layers."""
    is_doubted: bool = False
    """Whether a load layer by layer was lost, and none that is whole has been seen since."""


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

    Layer by layer, where that saves enough by what *link* and the connector's ``learned`` say: the
    shorter of transfer and computing. Exact copies alone; one such load at a time; not where the
    client's deadline may end it, nor over shared memory, where all is in reach at once. Each layer
    is verified before the model sees it. When one is late or proves wrong the forward is given up,
    and done again behind the chunks that are right in all layers.
    """

    def __init__(self, connector: Connector, link: Link, prompt_tokens: int) -> None:
        self._connector = connector
        self._link = link
        self._prompt_tokens = prompt_tokens
        self._layers: Generator[Layer, None, None] | None = None
        self._counts: dict[int, int] = {}
        """Of each layer that came, the chunks that were right by then."""
        self._prefix, self._reason = Prefix(), ""
        self._spans: Sequence[Span] = ()
        self._own: dict[int, Any] = {}
        """The cache's own layers, which stand aside until the forward is done."""
        self._is_complete = False
        """Whether all of those came, with every chunk."""
        self._waited_s = 0.0
        self._began_s = 0.0
        self._size_bytes = 0
        """Of the chunks that were asked for, as raw frames."""

    def read(
        self,
        keys: Sequence[ChunkKey],
        out: Sequence[LayerTensors],
        spans: Sequence[Span],
        least: Accuracy,
    ) -> Sequence[Stated]:
        """Read the chunks of *keys* into *out*, or begin to; return what each states."""
        client, self._spans = self._connector.client, spans
        sizes = [raw_frame_bytes(KVLayout.of(client.model, stop - at)) for at, stop in spans]
        self._size_bytes, self._began_s = sum(sizes), time.monotonic()
        is_exact = least is Accuracy.exact
        if is_exact and self._pays() and self._link.layered.acquire(blocking=False):
            self._layers = self._held(keys, out)
            self._draw()
            return [EXACT] * min(self._counts.values(), default=0)
        stated: list[Stated] = []
        client.get_chunks(keys, out, accuracy=least, stated=stated)
        self._link.meter.observe(sum(sizes[: len(stated)]), time.monotonic() - self._began_s)
        self._link.is_doubted &= not stated
        return stated

    def is_on_its_way(self, prefix: Prefix, reason: str) -> bool:
        """Take note of what was loaded; return whether more than its first layer is to come.

        Such a prefix is counted once all of it came.
        """
        self._prefix, self._reason = prefix, reason
        if self._layers is not None and not prefix.hit_tokens:
            self._layers.close()
            self._layers, self._link.is_doubted = None, True
        return self._layers is not None

    def _pays(self) -> bool:
        client, prefill = self._connector.client, self._connector.learned.model()
        transport = client._link.connected()
        if transport.name == "shm" or prefill is None or self._link.is_doubted:
            return False
        held = min(self._spans[-1][1], self._prompt_tokens - 1)
        compute_s = prefill.seconds(self._prompt_tokens - held, held)
        load_s = self._size_bytes / self._link.meter.estimate().mean_bytes_per_s
        return (
            min(load_s, compute_s) >= max(LEAST_GAIN_S, LEAST_GAIN * (load_s + compute_s))
            # What is late then loses every chunk, of a whole load only those behind.
            and load_s <= client.options.deadline_ms / 2000
            and len(self._spans) <= transport.session.terms.max_batch_chunks
        )

    def _held(
        self, keys: Sequence[ChunkKey], out: Sequence[LayerTensors]
    ) -> Generator[Layer, None, None]:
        try:
            with closing(self._connector.client.get_chunk_layers(keys, out)) as layers:
                yield from layers
        finally:
            self._link.layered.release()

    def _draw(self) -> bool:
        """Wait for the next layer; return whether one came. Raises KVStoreErrors."""
        assert self._layers is not None
        asked_s = time.monotonic()
        try:
            layer = next(self._layers, None)
            if layer is not None:
                self._counts[layer.layer_id] = len(layer.tensors)
            return layer is not None
        finally:
            now_s = time.monotonic()
            if now_s - asked_s > WAITED_S:
                layers = len(layer_order(self._connector.client.model))
                came_bytes = self._size_bytes * len(self._counts) // layers
                self._link.meter.observe(came_bytes, now_s - self._began_s)

    def attach(self, cache: Cache) -> None:
        """Have the layers of *cache*, which holds the prefix, wait until they came."""
        layers: Sequence[Any] = cache.layers if self._layers is not None else ()
        for number, layer in enumerate(layers):
            if layer.is_initialized:
                self._own[number] = layer
                cache.layers[number] = _ArrivingLayer(layer, partial(self._wait, number))

    def _wait(self, number: int) -> None:
        """Return once layer *number* came. Raises what ends the forward, where it did not."""
        if self._is_complete:
            return
        began_s = time.perf_counter()
        while number not in self._counts and self._connector.ask(self._draw, False):
            pass
        self._waited_s += time.perf_counter() - began_s
        if self._counts.get(number, 0) < len(self._prefix.tiers):
            raise _LayerLostError(number)
        if all(self._counts.get(own, 0) >= len(self._prefix.tiers) for own in self._own):
            # Hold nothing twice: what came in all layers is not cut any more.
            assert self._layers is not None
            self._is_complete = True
            self._connector.ask(self._layers.close, None)
            for own in self._own.values():
                own.keys = own.values = None

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
                self._link.is_doubted = True
                while self._connector.ask(self._draw, False):
                    pass
                self._cut(cache, min(self._counts.get(number, 0) for number in self._own))
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

    def _cut(self, cache: Cache, chunks: int) -> None:
        """Have *cache* hold the first *chunks* alone, which are right in all layers."""
        was, spans = self._prefix, self._spans[:chunks]
        left = Prefix.of(spans, was.tiers[:chunks], self._prompt_tokens, was.shared_tokens)
        for number, own in self._own.items():
            cache.layers[number] = layer = DynamicLayer()  # type: ignore[no-untyped-call]
            if left.hit_tokens:
                keys, values = (part[:, :, : left.hit_tokens] for part in (own.keys, own.values))
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values = keys, values
        self._own.clear()
        self._prefix, self._reason = left, "lost"
        self._count(len(was.tiers) - chunks)

    def _count(self, lost_chunks: int = 0) -> Prefix:
        prefix, reason = self._prefix, self._reason
        return self._connector.note_load(self._prompt_tokens, prefix, reason, lost_chunks)
