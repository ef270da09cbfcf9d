"""Conversion between values and their protobuf messages, and the index rows of tiers."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import IntEnum
from functools import lru_cache, partial
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    ModelError,
)
from kvstore.proto.frame import MAX_COMPONENTS, pack_components, unpack_table
from kvstore.proto.plans import (
    NO_HINTS,
    EngineTerms,
    Hints,
    PrefillModel,
)
from kvstore.proto.types import (
    MAX_LAYER_GROUPS,
    MAX_LAYERS,
    MAX_ROPE_FACTORS,
    Accuracy,
    ChainDigest,
    ChunkInfo,
    ChunkKey,
    ChunkShard,
    Extent,
    KVLayout,
    Model,
    check_count,
)

T = TypeVar("T")
M = TypeVar("M", bound=Message)
V = TypeVar("V")

FEATURE_SHARED_MEMORY = 1
FEATURE_DURABLE_PUT = 2

MESSAGE_BYTES = 1 << 20
"""Payload of one streamed message; larger ones were slower in every gRPC measured."""

MAX_EXPLAINED = 1024
"""Chunks that a server explains in one request; they fit one reply."""

REFUSED = "refused: "
"""Prefix of an engine's counters whose names state why it runs without the store."""

ERROR_NAME = "kvstore-error"
"""Trailing metadata with the error's class, as gRPC itself also sends RESOURCE_EXHAUSTED."""

_INFO = struct.Struct("<BBHQd32s16s")
_INFO_VERSION = 1
_ACCURACY_OF = {accuracy.value: accuracy for accuracy in Accuracy}
_ACCURACIES = (Accuracy.exact, Accuracy.bounded, Accuracy.exact, Accuracy.approximate)


_NAMES = {
    "open": "is_open", "calibrated": "is_calibrated", "shadow": "is_shadow", "exact": "is_exact",
}  # fmt: skip
"""Message fields whose attribute has another name."""


def as_message(kind: type[M], value: object, /, **others: Any) -> M:
    """Return a message of *kind* whose fields are *value*'s attributes by name, and *others*.

    Nested values become messages too. A function among *others* also applies to nested values, and
    computes the field from the value that has it.
    """
    return kind(**_fields(kind.DESCRIPTOR, value, others))


def _fields(descriptor: Any, value: object, others: dict[str, Any]) -> dict[str, Any]:
    rows = _rows(descriptor)
    if type(value) is tuple:
        return {name: one for (name, *_), one in zip(rows, value, strict=True)}
    found, within = {}, {name: one for name, one in others.items() if callable(one)}
    for name, attribute, nested in rows:
        one = getattr(value, attribute, None)
        if name in others:
            found[name] = within[name](value) if name in within else others[name]
        elif one is None:
            continue
        elif nested is None:
            found[name] = one
        elif type(one) in (tuple, list):
            found[name] = [_fields(nested, each, within) for each in one]
        else:
            found[name] = _fields(nested, one, within)
    return found


@lru_cache(maxsize=64)
def _rows(descriptor: Any) -> list[tuple[str, str, Any]]:
    """Return each field's name, its attribute's name, and its message type, if any."""
    return [
        (f.name, f.name if f.message_type else _NAMES.get(f.name, f.name), f.message_type)
        for f in descriptor.fields
    ]


def as_value(kind: type[V], message: Message, /, **others: Any) -> V:
    """Return the dataclass *kind* from the fields of *message*, and *others*.

    Nested messages become values too. Raises what their constructors raise, and ValueError for a
    number that is no member of its enumeration.
    """
    for name, attribute, convert in _converters(cast("Any", kind), message.DESCRIPTOR):
        if attribute not in others:
            found = getattr(message, name)
            others[attribute] = found if convert is None else convert(found)
    return kind(**others)


@lru_cache(maxsize=64)
def _converters(kind: Any, descriptor: Any) -> list[tuple[str, str, Callable[[Any], Any] | None]]:
    hints = get_type_hints(kind)
    rows = [(name, attribute) for name, attribute, _ in _rows(descriptor) if attribute in hints]
    return [(name, attribute, _converter(hints[attribute])) for name, attribute in rows]


def _converter(hint: Any) -> Callable[[Any], Any] | None:
    """Return the function from a field's value to type *hint*; None: no conversion."""
    if get_origin(hint) is tuple:
        each, *rest = get_args(hint)
        one = _converter(each)
        if rest != [...]:
            return _row
        return tuple if one is None else lambda found: tuple(map(one, found))
    if is_dataclass(hint):
        return partial(as_value, cast("Any", hint))
    return hint if isinstance(hint, type) and issubclass(hint, IntEnum) else None


def _row(message: Message) -> tuple[Any, ...]:
    return tuple(getattr(message, field.name) for field in message.DESCRIPTOR.fields)


@contextmanager
def _known(error: type[InvalidRequestError | ModelError], field: str) -> Iterator[None]:
    try:
        yield
    except KVStoreError:
        raise
    except ValueError as reason:
        raise error(field, str(reason), "use a known kind and dtype") from None


def pack_info(info: ChunkInfo, components: bytes | None = None) -> bytes:
    """Return *info* as an index row, which tiers store with a frame (docs/format.md).

    *components* is its layout's component table, if the caller has it.
    """
    fixed = _INFO.pack(
        _INFO_VERSION, info.accuracy, info.codec_id, info.size_bytes, info.prefill_flops,
        info.key, info.parent,
    )  # fmt: skip
    return fixed + (components or pack_components(info.layout))


def unpack_info(row: bytes) -> ChunkInfo:
    """Parse an index row. Raises InvalidFrameError, also for newer versions."""
    if len(row) < _INFO.size:
        raise InvalidFrameError("row", len(row), f"an index row has at least {_INFO.size} bytes")
    version, accuracy, codec_id, size_bytes, flops, key, parent = _INFO.unpack_from(row)
    known = _ACCURACY_OF.get(accuracy)
    if version != _INFO_VERSION or known is None:
        raise InvalidFrameError("row", (version, accuracy), f"this reader supports {_INFO_VERSION}")
    if not 0 <= flops < math.inf:
        raise InvalidFrameError("prefill_flops", flops, "must be finite, not negative")
    layout, shard = unpack_table(row[_INFO.size :])
    if shard is not None:
        raise InvalidFrameError("rectangle", shard.extents, "only whole chunks are accepted")
    return ChunkInfo(ChunkKey(key), ChainDigest(parent), layout, codec_id, size_bytes, known, flops)


def accuracy_number(least: Accuracy) -> int:
    """Return the wire number of a minimum accuracy; 0, the default, means exact.

    Raises InvalidRequestError if *least* is no Accuracy.
    """
    if least not in _ACCURACIES:
        raise InvalidRequestError("accuracy", least, "give an Accuracy")
    return _ACCURACIES.index(least)


def accuracy_of(number: int) -> Accuracy:
    """Return the minimum accuracy of a wire number. Raises InvalidRequestError."""
    if not 0 <= number < len(_ACCURACIES):
        raise InvalidRequestError("min_accuracy", number, "use 0 to 3")
    return _ACCURACIES[number]


def representation_from_message(message: pb.Representation) -> Model:
    """Return the checked Model. Raises ModelError naming the field."""
    if not message.HasField("rope"):
        raise ModelError("rope", None, "give the rope parameters, or scaling='none'")
    # Checked here too, before values are built from them.
    check_count("rope.factors", len(message.rope.factors), MAX_ROPE_FACTORS)
    check_count("layer_groups", len(message.layer_groups), MAX_LAYER_GROUPS)
    for group in message.layer_groups:
        check_count("layer_ids", len(group.layer_ids), MAX_LAYERS)
    with _known(ModelError, "layer_groups"):
        return as_value(Model, message)


@lru_cache(maxsize=64)
def hints_to_message(hints: Hints) -> pb.Hints | None:
    """Return *hints* as a shared, read-only message; None if there are none."""
    if hints == NO_HINTS:
        return None
    return as_message(pb.Hints, hints)


def hints_from_message(message: pb.Hints) -> Hints:
    """Return the checked hints; NO_HINTS for an empty message. Raises InvalidRequestError."""
    return as_value(Hints, message, reuse=message.reuse) if message.ByteSize() else NO_HINTS


@lru_cache(maxsize=64)
def layout_to_message(layout: KVLayout | ChunkShard) -> pb.Layout:
    """Return *layout*, or a shard of a chunk, as a shared, read-only message."""
    if not isinstance(layout, ChunkShard):
        return as_message(pb.Layout, layout)
    extents = [as_message(pb.Extent, extent) for extent in layout.extents]
    return as_message(pb.Layout, layout.whole, extents=extents)


def layout_from_message(message: pb.Layout) -> tuple[KVLayout, ChunkShard | None]:
    """Return the checked layout of the chunk, and the shard; None: the whole chunk.

    Raises InvalidRequestError or LayoutMismatchError.
    """
    count = max(len(message.components), len(message.extents))
    if count > MAX_COMPONENTS:  # sizes of layouts are remembered
        raise InvalidRequestError("layout", count, f"at most {MAX_COMPONENTS} components")
    with _known(InvalidRequestError, "layout"):
        whole = as_value(KVLayout, message)
    if not message.extents:
        return whole, None
    extents = (Extent(*_row(one)) if one.ByteSize() else None for one in message.extents)
    shard = ChunkShard(whole, tuple(extents))
    return whole, None if shard.is_whole else shard


def engine_to_message(engine: EngineTerms | None) -> pb.Prefill | None:
    """Return *engine* as a message."""
    if engine is None:
        return None
    return as_message(pb.Prefill, engine.prefill, tokens=engine.prompt_tokens)


def engine_from_message(request: pb.LookupRequest | pb.ResolveRequest) -> EngineTerms | None:
    """Return the engine's speed, if the request states it. Raises InvalidRequestError."""
    if not request.HasField("prefill"):
        return None
    return EngineTerms(as_value(PrefillModel, request.prefill), request.prefill.tokens)
