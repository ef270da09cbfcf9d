"""Loads a prompt's prefix: whole, or while the model computes other chunks or layers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kvstore.client.chunk import LayerTensors, to_arrays
from kvstore.client.client import Client
from kvstore.client.decode import Layer
from kvstore.client.engines.base import Connector
from kvstore.client.engines.prefix import Allowed, Prefix, Span
from kvstore.client.engines.transformers import cache as caches
from kvstore.client.engines.transformers.cache import CacheShape, Held, Nested, copy
from kvstore.client.engines.transformers.identity import WeightsChange
from kvstore.client.planning import Deadline, LinkMeter
from kvstore.codecs.base import AnyTensors
from kvstore.proto.device import Device
from kvstore.proto.frame import raw_frame_bytes
from kvstore.proto.types import EXACT, Accuracy, ChunkKey, KVLayout, Stated, layer_order

RING_BYTES = 128 << 20
"""Host memory of a ring: as many chunks as fit, or one larger chunk."""
ALIGN_BYTES = 64
"""Alignment of each tensor of a chunk."""
UNSEEN_BYTES_PER_S = 1e12
"""Assumed rate of an unmeasured link: so fast that layer by layer gains nothing."""
LEAST_GAIN_S, LEAST_GAIN = 0.02, 0.125
"""Least saving for a load layer by layer, in seconds and as a share of load and forward: less is
not worth the risk of a late layer."""
WAITED_S = 0.001
"""A layer that takes longer is bound by the link, and measures its rate."""
T = TypeVar("T")


# --- between a device and the host: one copy for all layers of a chunk


class Staging:
    """Staging memory for chunks of *shape*, at most *tokens* each, to and from *where*.

    A ring of host memory and one device buffer. Copies are queued on the engine's compute stream.
    Hold ``lock`` while slots of the ring are in use.
    """

    def __init__(self, device: Device, where: torch.device, shape: CacheShape, tokens: int) -> None:
        self.lock = threading.RLock()
        self._device = device
        self._where = where
        self._slot_bytes = chunk_bytes(shape, tokens)
        self.slots = max(1, RING_BYTES // self._slot_bytes)
        self._last = 0

    @cached_property
    def _memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The ring's memory, uint8 (slots, slot bytes), and the device's, uint8 (slot bytes,)."""
        with torch.inference_mode(False):  # later users may be outside of it
            ring = self._device.staging(self.slots * self._slot_bytes)
            buffer = torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._where)
        return ring.view(self.slots, -1), buffer

    def to_host(self, tensors: LayerTensors) -> Nested:
        """Copy *tensors* into the ring's next slot, except those on the host; return them."""
        ring, buffer = self._memory
        self._last = (self._last + 1) % self.slots
        gathered, size = self._placed(buffer, tensors)
        found, _ = self._placed(ring[self._last], tensors)
        stream = self._device.current_stream()
        stream.launch(lambda: copy(gathered, tensors))
        stream.copy(ring[self._last, :size], buffer[:size])
        stream.record().synchronize()
        return found

    def read(
        self,
        client: Client,
        keys: Sequence[ChunkKey],
        out: Callable[[int, KVLayout], Nested],
        least: Accuracy,
    ) -> list[Stated]:
        """Read the longest run of *keys*, chunk i into ``out(i, layout)``; return each stated."""
        ring, buffer = self._memory
        found: list[Stated] = []
        for start in range(0, len(keys), self.slots):
            some, wanted = keys[start : start + self.slots], dict[int, Nested]()

            def place(
                index: int, layout: KVLayout, start: int = start, wanted: dict[int, Nested] = wanted
            ) -> AnyTensors:
                wanted[index] = out(start + index, layout)
                return to_arrays(self._placed(ring[index], wanted[index])[0])

            stated: list[Stated] = []
            client.get_chunks(some, place, accuracy=least, stated=stated)
            stream = self._device.current_stream()
            for index in range(len(stated)):
                arrived, size = self._placed(buffer, wanted[index])
                stream.copy(buffer[:size], ring[index, :size])
                stream.launch(partial(copy, wanted[index], arrived))
            stream.record().synchronize()
            found += stated
            if len(stated) < len(some):
                break
        return found

    def _placed(self, memory: torch.Tensor, tensors: LayerTensors) -> tuple[Nested, int]:
        """Return views of *memory*, uint8 (bytes,), like *tensors*, and their total bytes."""
        end = 0

        def place(like: Any) -> torch.Tensor:
            nonlocal end
            if like.device != self._where:
                return like  # type: ignore[no-any-return]
            start, end = end, end + _aligned(like.nbytes)
            return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)

        nested = [[[place(part) for part in parts] for parts in layers] for layers in tensors]
        return nested, end


def chunk_bytes(shape: CacheShape, tokens: int) -> int:
    """Return the most bytes a chunk of *tokens* tokens takes, with its windows and states."""
    held = Held.empty(shape, [(0, tokens)], torch.device("meta"))
    parts = [*chain.from_iterable(held.tokens.values()), *held.states.values()]
    return sum(_aligned(part.nbytes) for part in parts)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


# --- loads


class Call(NamedTuple):
    """What all prompts of a call share."""

    extra: Sequence[bytes]
    """Identifies them beside their tokens; includes the change of the weights."""
    weights: WeightsChange
    allowed: Allowed
    settings: Any = None
    """A GenerationConfig."""
    passed: Mapping[str, Any] = MappingProxyType({})
    """Other arguments of ``model.generate``."""
    deadline_ms: int = 0
    """Deadline of the first token, from ``began_s`` on; 0: none."""
    began_s: float = 0.0


@dataclass
class Link:
    """State shared by the loads of one connector. Thread-safe."""

    connector: Connector
    model: PreTrainedModel
    shape: CacheShape
    staging: Staging | None
    meter: LinkMeter = field(default_factory=lambda: LinkMeter(UNSEEN_BYTES_PER_S, time.monotonic))
    """Measures the rate of chunks, in bytes of raw frames."""
    layered: threading.Lock = field(default_factory=threading.Lock)
    """Held by the only load layer by layer: two would wait for each other's layers."""
    is_doubted: bool = False
    """Whether a load layer by layer failed, and no whole load has succeeded since."""


class _LayerLostError(Exception):
    """A layer arrived for fewer chunks than the first one."""


class PrefixLoad:
    """The load of one prompt into a cache, and the forward behind it. For one thread.

    With ``in_layers`` exact copies load layer by layer if that saves enough, by the rates of the
    link and the connector's ``learned``: it saves the shorter of transfer and compute. Each layer
    is verified before the model uses it.
    """

    def __init__(self, link: Link, call: Call, tokens: Sequence[int], cache: Cache) -> None:
        self.call = call
        self.tokens = tokens
        self.cache: Any = cache
        self.prefix = Prefix()
        self.ends: list[Held] = []
        """The cache's windows and states at each pause."""
        self.in_layers = False
        self.to_compare: Cache | None = None
        """The loaded cache, if it is to be compared with a full prefill."""
        self._link, self._connector = link, link.connector
        self._within: Deadline | None = None
        self._held: Held | None = None
        self._layers: Generator[Layer, None, None] | None = None
        self._counts: dict[int, int] = {}
        """Valid chunks of each layer that arrived."""
        self._reason = ""
        self._spans: Sequence[Span] = ()
        """The chunks requested."""
        self._sizes: Sequence[int] = ()
        """Their sizes as raw frames, in bytes."""
        self._arriving: dict[int, Any] = {}
        """The cache's layers that have not been waited for."""
        self.waited_s = self._began_s = 0.0

    def load(self) -> None:
        """Load the longest stored prefix into the cache, or start to.

        With a deadline the model computes chunks that load too slowly. Raises the model's errors.
        """
        link, call, cache, failed = self._link, self.call, self.cache, list[Exception]()
        is_plain = link.staging is None and not link.shape.has_ends
        can_wait, within = is_plain and isinstance(cache, DynamicCache), None
        if can_wait and call.deadline_ms:
            within = Deadline(call.deadline_ms / 1000, self._beside(failed), 0, call.began_s)
        self._within, self.in_layers = within, self.in_layers and can_wait and within is None
        with nullcontext() if link.staging is None else link.staging.lock:
            self.prefix, self._reason = self._connector.attempt(
                self.tokens, self._read, call.extra, call.allowed, link.shape.has_ends, within
            )
        prefix, held, self._held = self.prefix, self._held, None
        if held is not None and prefix.hit_tokens:
            held.fill(cache, link.shape, prefix.hit_tokens)
        if self._layers is not None and not prefix.hit_tokens:
            self._layers.close()
            self._layers, link.is_doubted = None, True
        if self._layers is None:
            self._count()
        else:  # counted once all layers arrived; each cache layer waits for its own
            self._arriving = {s.layer: cache.layers[s.layer] for s in link.shape.tokens}
            for number, layer in self._arriving.items():
                vars(layer)["update"] = partial(self._update, number)
        if failed:
            raise failed[-1]
        caches.notes_of(cache).exact_tokens = prefix.exact_tokens if prefix.lossy_tokens else None

    def _beside(self, failed: list[Exception]) -> Callable[[range], None]:
        """Return a function that computes chunks while others load; its errors go to *failed*."""
        model, chunk_tokens = self._link.model, self._connector.client.options.chunk_tokens
        ids = torch.tensor([self.tokens], device=model.device)[:, :-1]

        def compute(chunks: range) -> None:
            some = ids[:, chunks.start * chunk_tokens : chunks.stop * chunk_tokens]
            began_s = time.perf_counter()
            try:
                last = caches.forward(model, some, self.cache)
                float(last[0, 0])  # waits for a device
            except Exception as error:
                failed.append(error)
                raise
            self._connector.learned.observe(some.shape[1], time.perf_counter() - began_s)

        return compute

    def _read(
        self, keys: Sequence[ChunkKey], spans: Sequence[Span], first: int, least: Accuracy
    ) -> Sequence[Stated]:
        """Read the chunks of *keys* from index *first*, or start to; return their ``Stated``."""
        link, client, stated = self._link, self._connector.client, list[Stated]()
        shape, wanted, self._spans = link.shape, keys[first:], spans[first:]
        self._held = held = self._held or Held.empty(shape, spans, link.model.device)
        self._sizes = [raw_frame_bytes(self._layout(span)) for span in self._spans]
        self._began_s = time.monotonic()

        def out(at: int, layout: KVLayout) -> Nested:
            return shape.chunk(layout, partial(held.cut, span=spans[first + at]))

        def outs() -> list[Nested]:
            return [shape.chunk(self._layout(span), partial(held.cut, span=span)) for span in spans]

        if link.staging is not None:
            stated = link.staging.read(client, wanted, out, least)
        elif self._within is not None:
            terms = (first, least, self._within, len(self.tokens) - spans[-1][1])
            return self._connector._read_within(keys, outs(), *terms)
        elif not first and self._begins_layers(least):
            self._layers = self._layer_stream(keys, outs)
            self._next_layer()
            stated = [EXACT] * min(self._counts.values(), default=0)
        else:
            target = lambda at, layout: to_arrays(out(at, layout))  # noqa: E731
            client.get_chunks(wanted, target, accuracy=least, stated=stated)
            link.meter.observe(sum(self._sizes[: len(stated)]), time.monotonic() - self._began_s)
            link.is_doubted &= not stated
        # With windows or states a part is useless.
        return () if shape.has_ends and len(stated) < len(keys) else stated

    def _layout(self, span: Span) -> KVLayout:
        return KVLayout.of(self._connector.client.model, span[1] - span[0])

    # --- layer by layer

    def _begins_layers(self, least: Accuracy) -> bool:
        """Return whether to load layer by layer; if so ``link.layered`` is held."""
        client, prefill = self._connector.client, self._connector.learned.model()
        may = self.in_layers and least is Accuracy.exact and not self._link.is_doubted
        if not may or prefill is None or _is_compiled(self._link.model):
            return False
        transport = client._link.connected()
        if transport.name == "shm":  # all layers are available at once
            return False
        held = min(self._spans[-1][1], len(self.tokens) - 1)
        compute_s = prefill.seconds(len(self.tokens) - held, held)
        load_s = sum(self._sizes) / self._link.meter.estimate().mean_bytes_per_s
        return (
            min(load_s, compute_s) >= max(LEAST_GAIN_S, LEAST_GAIN * (load_s + compute_s))
            # A late layer loses every chunk; in a whole load only the late chunks are lost.
            and load_s <= client.options.deadline_ms / 2000
            and len(self._spans) <= transport.session.terms.max_batch_chunks
            and self._link.layered.acquire(blocking=False)
        )

    def _layer_stream(
        self, keys: Sequence[ChunkKey], outs: Callable[[], Sequence[LayerTensors]]
    ) -> Generator[Layer, None, None]:
        try:
            with closing(self._connector.client.get_chunk_layers(keys, outs())) as layers:
                yield from layers
        finally:
            self._link.layered.release()

    def _next_layer(self) -> bool:
        """Wait for the next layer; return whether one arrived. Raises KVStoreErrors."""
        assert self._layers is not None
        started_s = time.monotonic()
        try:
            layer = next(self._layers, None)
            if layer is not None:
                self._counts[layer.id] = len(layer.tensors)
            return layer is not None
        finally:
            now_s = time.monotonic()
            if now_s - started_s > WAITED_S:
                layers = len(layer_order(self._connector.client.model))
                arrived_bytes = sum(self._sizes) * len(self._counts) // layers
                self._link.meter.observe(arrived_bytes, now_s - self._began_s)

    def _update(self, number: int, *new: Any, **more: Any) -> Any:
        """Update the cache's layer with *new* keys and values, once its loaded ones arrived."""
        self._wait(number)
        return self.cache.layers[number].update(*new, **more)

    def _wait(self, number: int) -> None:
        """Wait for layer *number*. Raises _LayerLostError, which ends the forward, if lost."""
        began_s = time.perf_counter()
        while number not in self._counts and self._connector.guard(self._next_layer, False):
            pass
        self.waited_s += time.perf_counter() - began_s
        if self._counts.get(number, 0) < len(self.prefix.tiers):
            raise _LayerLostError(number)
        del vars(self._arriving.pop(number))["update"]
        if not self._arriving:
            assert self._layers is not None
            # Free the loaded tensors: the growing cache has copies.
            self._connector.guard(self._layers.close, None)

    def run(self, work: Callable[[], T]) -> T:
        """Return the result of *work*, the forward; ``prefix`` is then what the cache held.

        If a layer is lost, *work* is repeated after the valid chunks. Raises what *work* raises.
        """
        if self._layers is None:
            return work()
        with closing(self._layers):
            try:
                found = work()
                for number in [*self._arriving]:
                    self._wait(number)
            except _LayerLostError:
                self._cut()
            else:
                self._count()
                return found
        self.waited_s = 0.0
        return work()

    def _cut(self) -> None:
        """Cut the cache to the leading chunks that are valid in all layers."""
        self._link.is_doubted = True
        while self._connector.guard(self._next_layer, False):
            pass
        numbers, was = [shape.layer for shape in self._link.shape.tokens], self.prefix
        chunks = min(self._counts.get(number, 0) for number in numbers)
        spans, tiers = self._spans[:chunks], was.tiers[:chunks]
        self.prefix = Prefix.of(spans, tiers, len(self.tokens), was.shared_tokens)
        for layer in (self.cache.layers[number] for number in numbers):
            vars(layer).pop("update", None)
            left = (part[:, :, : self.prefix.hit_tokens] for part in (layer.keys, layer.values))
            layer.keys, layer.values = left
        self._reason = "lost"
        self._count(len(was.tiers) - chunks)

    def _count(self, lost_chunks: int = 0) -> None:
        self._connector.note_load(len(self.tokens), self.prefix, self._reason, lost_chunks)


def _is_compiled(model: torch.nn.Module) -> bool:
    """Return whether torch compiled any of *model*: such code does not wait for layers."""
    return any(
        module._compiled_call_impl is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in model.modules()
    )
