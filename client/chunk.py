"""A chunk that a client puts, a rank's shard of chunks, and their tensors as codecs take them.

Nothing is copied on the way. numpy has no bfloat16 and no fp8: such tensors become unsigned
integers of the same size. torch is imported only for callers that pass its tensors.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, pairwise, repeat
from numbers import Real
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import AnyPart, AnyTensors, Part, check_tensors
from kvstore.codecs.block_part import BlockPart, BlockStack
from kvstore.proto.errors import (
    InvalidRequestError,
    LayoutMismatchError,
    is_whole,
)
from kvstore.proto.frame import FrameTemplate
from kvstore.proto.types import (
    DIGEST_BYTES,
    ROOT,
    ChainDigest,
    ChunkKey,
    ChunkShard,
    Component,
    DType,
    Extent,
    KVLayout,
    LayerGroup,
    LayerKind,
    Model,
)

if TYPE_CHECKING:
    import torch

    TensorLike: TypeAlias = "np.ndarray[Any, Any] | torch.Tensor"
else:
    TensorLike = Any

_MAX_WORK: Any = 10_000
"""Limit of the exact overlap check of two interleaved tensors: some milliseconds."""
_FORM = "give components, layers, parts of (kv_heads, tokens, head_dim)"
LayerTensors: TypeAlias = Sequence[Sequence[Sequence[TensorLike | BlockPart]]]
"""Components, then layers, then parts (K and V), each (kv_heads, tokens, head_dim)."""


def to_array(tensor: TensorLike) -> Part:
    """Return an array over the memory of *tensor*, numpy's or torch's on the CPU.

    Raises LayoutMismatchError for anything else.
    """
    if isinstance(tensor, np.ndarray):
        if not tensor.dtype.isnative:
            raise LayoutMismatchError("dtype", str(tensor.dtype), "give native byte order")
        return tensor
    if not (type(tensor).__module__.startswith("torch") and hasattr(tensor, "layout")):
        raise LayoutMismatchError("tensors", type(tensor).__name__, "give numpy or torch tensors")
    import torch

    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        found = f"{tensor.device}, {tensor.layout}"
        raise LayoutMismatchError("device", found, "copy it to a dense tensor on the CPU first")
    tensor = tensor.detach()
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.uint8)
    array: Part = tensor.numpy()
    return array


def is_on_device(tensor: object) -> bool:
    """Whether it is a torch tensor in memory of a GPU."""
    return getattr(getattr(tensor, "device", None), "type", "cpu") == "cuda"


def twin(tensor: Any) -> Any:
    """Return a one-element host tensor expanded to the shape and dtype of a GPU's *tensor*, for
    checks, also in lists and mappings; anything else as it is. Raises LayoutMismatchError.
    """
    if isinstance(tensor, Mapping):
        return {name: twin(one) for name, one in tensor.items()}
    if isinstance(tensor, Sequence):
        return list(map(twin, tensor))
    if not is_on_device(tensor):
        return tensor
    import torch

    if tensor.layout is not torch.strided:
        raise LayoutMismatchError("layout", str(tensor.layout), "give dense tensors")
    return torch.empty((), dtype=tensor.dtype).expand(tensor.shape)


def tensors_in(nested: Any) -> Iterator[Any]:
    """Yield the tensors of lists and mappings; *nested* itself if it is neither."""
    some = list(nested.values()) if isinstance(nested, Mapping) else nested
    if isinstance(some, str) or not isinstance(some, Sequence):
        yield some
    else:
        yield from chain.from_iterable(map(tensors_in, some))


def place_of(tensor: Any) -> NDArray[Any]:
    """Return an array at the addresses of a GPU's *tensor*, to be compared and never read."""
    place = {
        "data": (tensor.data_ptr(), False),
        "shape": tuple(tensor.shape),
        "strides": tuple(tensor.element_size() * stride for stride in tensor.stride()),
        "typestr": f"|u{tensor.element_size()}",
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=place))


def host_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return host memory, pinned where there is a GPU."""
    import torch

    return torch.empty(tuple(shape), dtype=dtype, pin_memory=torch.cuda.is_available())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return *tensor* viewed as integers of its size, which every operation supports."""
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(kinds[tensor.element_size()])


@contextmanager
def copying(*tensors: torch.Tensor) -> Iterator[None]:
    """Copy from or to the GPUs of *tensors*, in any thread and stream: the GPUs finish queued work
    on entry, and the copies on exit.

    Raises TierUnavailableError for errors of torch, out of memory included.
    """
    import torch

    from kvstore.proto.device import device_errors

    devices = {tensor.device for tensor in tensors} if torch.cuda.is_available() else ()
    with device_errors(), torch.inference_mode():  # else an engine's tensors are not writable
        for device in devices:
            torch.cuda.synchronize(device)
        yield
        for device in devices:
            torch.cuda.synchronize(device)


def to_host(tensor: Any) -> Any:
    """Return a copy of a GPU's *tensor* in host memory; anything else as it is."""
    if not is_on_device(tensor):
        return tensor
    with copying(tensor):
        return tensor.cpu()


def check_apart(name: str, tensors: Iterable[TensorLike]) -> None:
    """Raise InvalidRequestError when elements of *tensors*, the argument *name*, share memory.

    Of interleaved tensors only neighbours by address are compared.
    """
    places = [place_of(one) if is_on_device(one) else to_array(one) for one in tensors]
    arrays = [array for array in places if array.size]
    spans = sorted((*_span(name, array), number) for number, array in enumerate(arrays))
    for (_, end, one), (start, _, other) in pairwise(spans):
        if start >= end:
            continue
        with suppress(np.exceptions.TooHardError):
            if np.shares_memory(arrays[one], arrays[other], max_work=_MAX_WORK):
                fix = "give tensors that do not share memory"
                raise InvalidRequestError(name, "overlapping", fix)


def _span(name: str, array: Part) -> tuple[int, int]:
    start, size = array.__array_interface__["data"][0], array.itemsize
    axes = list(zip(array.strides, array.shape, strict=True))
    for stride, count in sorted((abs(stride), count) for stride, count in axes):
        if count > 1:
            if stride < size:
                fix = "give memory without overlapping elements"
                raise InvalidRequestError(name, array.strides, fix)
            size += (count - 1) * stride
    before = sum((count - 1) * min(0, stride) for stride, count in axes)
    return start + before, start + before + size


def to_arrays(tensors: LayerTensors, components: Sequence[Component] = ()) -> AnyTensors:
    """Return the arrays of a whole chunk's tensors; those in an engine's blocks are not copied.

    Raises LayoutMismatchError, also for other types than those of *components*.
    """
    for some in (tensors, *tensors) if isinstance(tensors, Sequence) else (tensors,):
        if not isinstance(some, Sequence):
            raise LayoutMismatchError("tensors", type(some).__name__, _FORM)
    found: list[Any] = []
    for layers, component in zip(tensors, chain(components, repeat(None)), strict=False):
        dtype = None if component is None else component.dtype
        is_stack = isinstance(layers, BlockStack)
        some = layers[:1] if is_stack else layers  # those of a stack are alike
        arrays = [layer_arrays(parts, dtype) for parts in some]
        found.append(layers if is_stack else arrays)
    return found


def layer_arrays(
    parts: Sequence[TensorLike | BlockPart], dtype: DType | None = None
) -> list[AnyPart]:
    """Return the arrays of one layer's tensors.

    Raises LayoutMismatchError for anything but a tensor, or one of another type than *dtype*.
    """
    if not isinstance(parts, Sequence):
        raise LayoutMismatchError("tensors", type(parts).__name__, _FORM)
    found: list[AnyPart] = []
    for part in parts:
        found.append(part if isinstance(part, BlockPart) else to_array(part))
        if dtype is not None:
            stated = stated_dtype(part.dtype)
            if stated is not None and stated is not dtype:
                raise LayoutMismatchError("dtype", stated.name, f"give {dtype.name}")
    return found


def arrays_of(layout: KVLayout, tensors: LayerTensors) -> AnyTensors:
    """Return the arrays of a chunk's tensors.

    Raises LayoutMismatchError unless they have *layout*.
    """
    found = to_arrays(tensors, layout.components)
    check_tensors(layout, found)
    return found


@lru_cache(maxsize=64)
def stated_dtype(dtype: Hashable) -> DType | None:
    """Return the DType that numpy's or torch's *dtype* names, else None.

    Unsigned integers name none: they hold the types that numpy lacks.
    """
    name = str(dtype).removeprefix("torch.")
    return DType.__members__.get(name) if name != "uint8" else None


def group_array(name: str, tensor: Any, group: LayerGroup) -> Part:
    """Return the array of *tensor*, the argument *name*.

    Raises LayoutMismatchError unless it has the dtype of *group*.
    """
    try:
        array = to_array(tensor)
    except LayoutMismatchError as error:
        fix = "give a tensor on the CPU, in native byte order"
        raise LayoutMismatchError(name, str(error), fix) from None
    stated = stated_dtype(tensor.dtype)
    if stated is not None and stated is not group.dtype:
        raise LayoutMismatchError(name, stated.name, f"give {group.dtype.name}")
    if array.dtype.itemsize != group.dtype.item_bytes or array.dtype.kind not in "uif":
        raise LayoutMismatchError(name, str(array.dtype), f"give {group.dtype.name}")
    return array


def to_torch(array: Part, dtype: DType) -> torch.Tensor:
    """Return a torch tensor over the memory of *array*, whose elements are of *dtype*."""
    import torch

    signed = array.view(f"i{array.dtype.itemsize}") if array.dtype.itemsize > 1 else array
    return torch.from_numpy(signed).view(getattr(torch, dtype.name))


Span: TypeAlias = tuple[int, int]
"""The first number, and the one after the last."""
_WHOLE_KINDS = (LayerKind.mla, LayerKind.state)
"""Kinds that a single span of heads does not split: a latent or state has one row for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Naming:
    """The fields of a chunk's frame header beside its layout.

    ``parent`` is the chain digest of the chunk before this one. ``position`` is the index of
    the first token in its prompt.
    """

    key: ChunkKey = field(kw_only=False)
    parent: ChainDigest = ROOT
    position: int = 0
    prefill_flops: float = 0.0
    content: bytes = bytes(DIGEST_BYTES)

    def __post_init__(self) -> None:
        for name in ("parent", "content"):
            value = getattr(self, name)
            if not isinstance(value, bytes) or len(value) != DIGEST_BYTES:
                raise InvalidRequestError(name, getattr(self, name), f"give {DIGEST_BYTES} bytes")
        if not is_whole(self.position) or not 0 <= self.position < 1 << 32:
            raise InvalidRequestError("position", self.position, "a token index is in 0..2^32-1")
        is_number = isinstance(self.prefill_flops, Real)
        if not is_number or not 0 <= self.prefill_flops < math.inf:
            fix = "must be finite, not negative"
            raise InvalidRequestError("prefill_flops", self.prefill_flops, fix)

    def template(self, representation: bytes, layout: KVLayout) -> FrameTemplate:
        """Return the template of its frame of *layout*."""
        return FrameTemplate(
            self.key, self.parent, representation, self.content, layout, self.position,
            self.prefill_flops,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chunk(_Naming):
    """Tensors under the key that names them.

    ``tensors``: components, then layers, then parts (K and V), each (kv_heads, tokens,
    head_dim), numpy or torch on the CPU, any strides, or in blocks (``PagedCache``).
    ``layout`` states which window or state layers the chunk has (``KVLayout.of``); None: all, over
    the tokens of its attention layers.
    ``importance``, f32 (tokens,), finite and not negative, ranks the tokens: codecs with
    ``importance`` (``kvq:N,importance``) spend more bits on the higher ones.
    """

    tensors: LayerTensors
    layout: KVLayout | None = field(default=None, kw_only=True)
    importance: NDArray[np.float32] | None = field(default=None, kw_only=True)

    def weights(self, tokens: int) -> bytes:
        """Return a rank for each token, 1 to 255, or 0 for no importance; empty without any.

        Raises InvalidRequestError unless ``importance`` is None or valid for *tokens* tokens.
        """
        given = self.importance
        if given is None:
            return b""
        fix = f"give float32 ({tokens},), one number a token"
        if not isinstance(given, np.ndarray):
            raise InvalidRequestError("importance", type(given).__name__, fix)
        if given.shape != (tokens,) or given.dtype != np.float32:
            raise InvalidRequestError("importance", (given.shape, str(given.dtype)), fix)
        if not (np.isfinite(given) & (given >= 0)).all():
            raise InvalidRequestError("importance", float(given.min()), "finite, not negative")
        order = np.empty(tokens, np.intp)
        # Of equals the first ranks higher, as in codecs.
        order[np.argsort(-given, kind="stable")] = np.arange(tokens)
        ranks = 255 - order * 254 // max(1, tokens - 1)
        return np.where(given > 0, ranks, 0).astype(np.uint8).tobytes()


@dataclass(frozen=True, slots=True)
class PlannedChunk(_Naming):
    """A chunk whose tensors are not computed yet: a Chunk without them."""

    tokens: int

    def __post_init__(self) -> None:
        super(PlannedChunk, self).__post_init__()
        if not is_whole(self.tokens):
            raise InvalidRequestError("tokens", self.tokens, "give a whole number")


@dataclass(frozen=True, slots=True)
class DeviceChunk(_Naming):
    """A chunk whose raw frame begins at byte ``offset`` of a ring, a multiple of 64.

    Its segments lie where a raw frame of ``layout`` has them. The header's bytes are not read: the
    header sent to the server is made of these fields, as for a ``Chunk``.
    """

    offset: int
    layout: KVLayout


def parents(keys: Sequence[ChunkKey]) -> Sequence[ChainDigest]:
    """Return the parent digest of each key of a chain."""
    return [ROOT, *(ChainDigest(key[DIGEST_BYTES:]) for key in keys[:-1])][: len(keys)]


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that one rank of a parallel engine holds; the default is all of it.

    ``layers``: a span of the model's layer numbers. ``kv_heads``: a span for each layer group, or
    one for all groups with heads. A client's Model stays the whole one: any ranks read the chunks
    that any others put.
    """

    layers: Span | None = None
    kv_heads: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        for name, span in (("layers", self.layers), *(("kv_heads", one) for one in self.kv_heads)):
            if span is None:
                continue
            is_span = isinstance(span, Sequence) and len(span) == 2 and all(map(is_whole, span))
            if not is_span or not 0 <= span[0] < span[1]:
                raise InvalidRequestError(name, span, "give (first, one after the last)")
        if self.layers is not None:  # tuples, to be hashable
            object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "kv_heads", tuple(map(tuple, self.kv_heads)))

    @classmethod
    def of_rank(cls, model: Model, rank: int, ranks: int, layers: Span | None = None) -> Shard:
        """Return the shard of tensor-parallel *rank* of *ranks*, in the pipeline stage of *layers*.

        Heads are split as evenly as possible; with more ranks than heads, ranks share heads.
        """
        if not is_whole(ranks) or ranks < 1:
            raise InvalidRequestError("ranks", ranks, "give a positive whole number")
        if not is_whole(rank) or not 0 <= rank < ranks:
            raise InvalidRequestError("rank", rank, f"0 to {ranks - 1}")
        spans = []
        for group in model.layer_groups:
            first = rank * group.kv_heads // ranks
            spans.append((first, max(first + 1, (rank + 1) * group.kv_heads // ranks)))
        return cls(layers, tuple(spans))

    def part_of(self, model: Model) -> Model:
        """Return *model* with only the layers and heads of the shard: the model of the rank's KV.

        Raises LayoutMismatchError, ModelError when the shard has nothing of the model.
        """
        groups = []
        for group, (first, stop) in zip(model.layer_groups, self.heads_of(model), strict=True):
            ids = group.layer_ids
            if self.layers is not None:
                ids = tuple(one for one in ids if self.layers[0] <= one < self.layers[1])
            if ids:
                groups.append(replace(group, layer_ids=ids, kv_heads=stop - first))
        return replace(model, layer_groups=tuple(groups))

    def heads_of(self, model: Model) -> list[Span]:
        """Return the KV heads of each layer group. Raises LayoutMismatchError."""
        groups, spans = model.layer_groups, self.kv_heads
        if len(spans) > 1 and len(spans) != len(groups):
            fix = f"give one span, or {len(groups)}"
            raise LayoutMismatchError("kv_heads", len(spans), fix)
        if len(spans) > 1:
            return list(spans)
        return [
            spans[0] if spans and group.kind not in _WHOLE_KINDS else (0, group.kv_heads)
            for group in groups
        ]

    def has_any(self, model: Model, layout: KVLayout) -> bool:
        """Whether it has any layer of a chunk of *layout*: a stage of window layers alone has none
        of a chunk without windows.
        """
        groups = [group for group in model.layer_groups if layout.has(group.kind)]
        return self.layers is None or any(has_any(group, self.layers) for group in groups)

    @lru_cache(maxsize=64)  # noqa: B019 - a value, as small as its key
    def in_chunk(self, model: Model, layout: KVLayout) -> ChunkShard:
        """Return its layers and heads of a chunk of *layout*.

        Raises LayoutMismatchError when it exceeds the model, or has nothing of the chunk.
        """
        extents: list[Extent | None] = []
        for group, heads in zip(model.layer_groups, self.heads_of(model), strict=True):
            if not layout.has(group.kind):
                continue
            first, stop = 0, len(group.layer_ids)
            if self.layers is not None:
                first, stop = (bisect_left(group.layer_ids, at) for at in self.layers)
            extents.append(None if first == stop else Extent(first, stop, *heads))
        return ChunkShard(layout, tuple(extents))


def has_any(group: LayerGroup, layers: Span) -> bool:
    """Whether any layer of *group* is among *layers*."""
    return any(layers[0] <= layer < layers[1] for layer in group.layer_ids)
