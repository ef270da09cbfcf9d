"""Between values and the protobuf messages that carry them, and index rows of tiers."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import accumulate, pairwise
from typing import Any, TypeVar, cast

import numpy as np
from google.protobuf.message import Message

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.blend import (
    GateView,
    NamedSegment,
    Resolution,
    ResolvedChunk,
    ResolvedSegment,
    ShadowResult,
    Variant,
)
from kvstore.proto.errors import (
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    RepresentationError,
)
from kvstore.proto.frame import pack_components, unpack_components
from kvstore.proto.plans import (
    NO_HINTS,
    EngineTerms,
    Hints,
    LoadPlan,
    PlannedBatch,
    PlanRange,
    PrefillModel,
    Reuse,
)
from kvstore.proto.types import (
    DIGEST_BYTES,
    MAX_LAYER_GROUPS,
    MAX_LAYERS,
    MAX_ROPE_FACTORS,
    ChainDigest,
    ChunkInfo,
    ChunkKey,
    Component,
    DType,
    Extent,
    Fidelity,
    KVLayout,
    LayerGroup,
    LayerKind,
    Match,
    Representation,
    RopeParameters,
    Shard,
    check_count,
)

T = TypeVar("T")
M = TypeVar("M", bound=Message)
V = TypeVar("V")

FEATURE_SHARED_MEMORY = 1
FEATURE_DURABLE_PUT = 2

MESSAGE_BYTES = 1 << 20
"""Payload of one streamed message: larger ones are slower in every gRPC we measured."""

MAX_EXPLAINED = 1024
"""Chunks that a server explains in one request: one reply has room for all."""

REFUSED = "refused: "
"""How the names of an engine's counters begin that tell why it runs without its store."""

ERROR_NAME = "kvstore-error"
"""Trailing metadata with the error's class: gRPC itself also sends RESOURCE_EXHAUSTED."""

_INFO = struct.Struct("<BBHQd32s16s")
_INFO_VERSION = 1
_FIDELITY_OF = {fidelity.value: fidelity for fidelity in Fidelity}
_FIDELITIES = (Fidelity.exact, Fidelity.bounded, Fidelity.exact, Fidelity.none)


def as_message(kind: type[M], value: object, /, **others: Any) -> M:
    """Return the message of *kind* with what *value* has under its fields' names, and *others*."""
    same = (name for name in kind.DESCRIPTOR.fields_by_name if name not in others)
    return kind(**{name: getattr(value, name) for name in same if hasattr(value, name)}, **others)


def _value(kind: type[V], message: Message, /, **others: Any) -> V:
    """Return the dataclass *kind* of what *message* has under its fields' names, and *others*."""
    same = (one.name for one in fields(cast("Any", kind)) if one.name not in others)
    return kind(**{name: getattr(message, name) for name in same}, **others)


def pack_info(info: ChunkInfo, components: bytes | None = None) -> bytes:
    """Return *info* as an index row: what tiers keep beside a frame (docs/format.md).

    *components* is the table of its layout, for who has it: many rows have one layout.
    """
    fixed = _INFO.pack(
        _INFO_VERSION, info.fidelity, info.codec_id, info.size_bytes, info.prefill_flops,
        info.key, info.parent,
    )  # fmt: skip
    return fixed + (pack_components(info.layout) if components is None else components)


def unpack_info(row: bytes) -> ChunkInfo:
    """Parse an index row. Raises InvalidFrameError, also for versions from the future."""
    if len(row) < _INFO.size:
        raise InvalidFrameError("row", len(row), f"an index row has at least {_INFO.size} bytes")
    version, fidelity, codec_id, size_bytes, flops, key, parent = _INFO.unpack_from(row)
    known = _FIDELITY_OF.get(fidelity)
    if version != _INFO_VERSION or known is None:
        raise InvalidFrameError("row", (version, fidelity), f"this reader knows {_INFO_VERSION}")
    if not 0 <= flops < math.inf:
        raise InvalidFrameError("prefill_flops", flops, "must be finite, not negative")
    layout = unpack_components(row[_INFO.size :])
    return ChunkInfo(ChunkKey(key), ChainDigest(parent), layout, codec_id, size_bytes, known, flops)


def fidelity_number(least: Fidelity) -> int:
    """Return how requests state a minimum fidelity; one that states none means exact."""
    return _FIDELITIES.index(least)


def fidelity_of(number: int) -> Fidelity | None:
    """Return the minimum fidelity that a request states by *number*; None for no such number."""
    return _FIDELITIES[number] if 0 <= number < len(_FIDELITIES) else None


def match_from_message(message: pb.LookupResponse, asked: int) -> Match:
    """Return the answer to a lookup of *asked* chunks. Raises KVStoreError if it is none."""
    names, sources = tuple(message.tier_names), message.tiers
    ready = message.ready
    fits = len(sources) == ready and len(message.load_us) == 4 * ready <= 4 * asked
    if not fits or max(sources, default=-1) >= len(names):
        raise KVStoreError(f"the server's answer to a lookup of {asked} chunks is damaged")
    return Match(
        ready=ready,
        pending=message.pending,
        missing=asked - ready - message.pending,
        tier_names=names,
        sources=sources,
        loads=message.load_us,
        lease_id=message.lease_id,
        lease_ttl_ms=message.lease_ttl_ms,
        plan=plan_from_message(message, asked),
        shared=min(message.shared, asked),
    )


def representation_to_message(representation: Representation) -> pb.Representation:
    """Return the protobuf form of *representation*."""
    return as_message(
        pb.Representation,
        representation,
        rope=_rope_to_message(representation.rope),
        layer_groups=[as_message(pb.LayerGroup, group) for group in representation.layer_groups],
    )


def _rope_to_message(rope: RopeParameters) -> pb.Rope:
    factors = [pb.RopeFactor(name=name, value=value) for name, value in rope.factors]
    return as_message(pb.Rope, rope, factors=factors)


def _rope(message: pb.Rope) -> RopeParameters:
    factors = tuple((factor.name, factor.value) for factor in message.factors)
    return _value(RopeParameters, message, factors=factors)


def representation_from_message(message: pb.Representation) -> Representation:
    """Return the checked Representation. Raises RepresentationError naming the field."""
    if not message.HasField("rope"):
        raise RepresentationError("rope", None, "give the rope parameters, or scaling='none'")
    # Here too, before a value is made of each of them.
    check_count("rope.factors", len(message.rope.factors), MAX_ROPE_FACTORS)
    check_count("layer_groups", len(message.layer_groups), MAX_LAYER_GROUPS)
    for group in message.layer_groups:
        check_count("layer_ids", len(group.layer_ids), MAX_LAYERS)
    return _value(
        Representation,
        message,
        layer_groups=tuple(_group(group) for group in message.layer_groups),
        rope=_rope(message.rope),
    )


def _group(message: pb.LayerGroup) -> LayerGroup:
    kinds = _kinds(message, RepresentationError, "layer_groups")
    return _value(LayerGroup, message, **kinds, layer_ids=tuple(message.layer_ids))


def _kinds(
    message: pb.LayerGroup | pb.Component,
    error: type[InvalidRequestError | RepresentationError],
    field: str,
) -> dict[str, Any]:
    try:
        return {"kind": LayerKind(message.kind), "dtype": DType(message.dtype)}
    except ValueError as reason:
        raise error(field, str(reason), "use a kind and dtype we know") from None


def hints_to_message(hints: Hints | None) -> pb.Hints | None:
    """Return the protobuf form of *hints*; None where there are none."""
    if hints is None or hints == NO_HINTS:
        return None
    return as_message(pb.Hints, hints, reuse=f"REUSE_{hints.reuse.name.upper()}")


def hints_from_message(message: pb.Hints) -> Hints:
    """Return the checked hints; NO_HINTS for an empty message. Raises InvalidRequestError."""
    if not message.ByteSize():
        return NO_HINTS
    if int(message.reuse) not in list(map(int, Reuse)):
        fix = "use 0 (unknown), 1 (discard) or 2 (keep)"
        raise InvalidRequestError("hints.reuse", message.reuse, fix)
    return _value(Hints, message, reuse=Reuse(message.reuse))


def layout_to_message(layout: KVLayout) -> pb.Layout:
    """Return the protobuf form of *layout*."""
    return pb.Layout(components=[as_message(pb.Component, one) for one in layout.components])


def shard_to_message(shard: Shard) -> pb.Layout:
    """Return the protobuf form of *shard*."""
    message = layout_to_message(shard.whole)
    for extent in shard.extents:
        message.extents.append(pb.Extent() if extent is None else as_message(pb.Extent, extent))
    return message


def shard_from_message(message: pb.Layout) -> Shard | None:
    """Return the shard that *message* is of; None for a whole chunk.

    Raises InvalidRequestError or LayoutMismatchError.
    """
    whole = layout_from_message(message)
    if not message.extents:
        return None
    extents = tuple(_value(Extent, one) if one.ByteSize() else None for one in message.extents)
    shard = Shard(whole, extents)
    return None if shard.is_whole else shard


def layout_from_message(message: pb.Layout) -> KVLayout:
    """Return the checked layout. Raises InvalidRequestError or LayoutMismatchError."""
    return KVLayout(
        tuple(
            _value(Component, one, **_kinds(one, InvalidRequestError, "layout"))
            for one in message.components
        )
    )


def engine_to_message(engine: EngineTerms | None) -> pb.Prefill | None:
    """Return the protobuf form of *engine*."""
    if engine is None:
        return None
    return as_message(pb.Prefill, engine.prefill, tokens=engine.prompt_tokens)


def engine_from_message(request: pb.LookupRequest | pb.ResolveRequest) -> EngineTerms | None:
    """Return the engine's speed, if the request has it. Raises InvalidRequestError."""
    if not request.HasField("prefill"):
        return None
    return EngineTerms(_value(PrefillModel, request.prefill), request.prefill.tokens)


def add_plan(reply: pb.LookupResponse, plan: LoadPlan | None) -> None:
    """Put a plan into the answer to a lookup."""
    if plan is None:
        return
    reply.plan_ms, reply.recompute_ms = plan.plan_ms, plan.recompute_ms
    for one in plan.ranges:
        reply.plan.append(as_message(pb.PlanRange, one))


def plan_from_message(message: pb.LookupResponse, asked: int) -> LoadPlan | None:
    """Return the plan over *asked* chunks; None without one. Raises KVStoreError."""
    if not message.plan and not message.recompute_ms:
        return None
    ranges = tuple(_value(PlanRange, one) for one in message.plan)
    bounds = [0, *(one.stop for one in ranges)]
    is_whole = bounds[-1] == asked and [one.first for one in ranges] == bounds[:-1]
    if not is_whole or any(first >= stop for first, stop in pairwise(bounds)):
        raise KVStoreError(f"the server's plan for {asked} chunks is damaged")
    return LoadPlan(ranges, message.plan_ms, message.recompute_ms)


def chains_of(digests: Sequence[T], lengths: Sequence[int]) -> list[Sequence[T]]:
    """Cut *digests* into chains of these *lengths*. Raises InvalidRequestError."""
    ends = [0, *accumulate(lengths)]
    if ends[-1] != len(digests):
        raise InvalidRequestError("lengths", ends[-1], f"as many as chains has, {len(digests)}")
    return [digests[first:stop] for first, stop in pairwise(ends)]


def pack_uses(uses: Sequence[int]) -> bytes:
    """Return counts as four bytes each, little-endian."""
    return np.asarray(uses, "<u4").tobytes()


def batch_from_message(message: pb.PlanResponse, lengths: Sequence[int]) -> PlannedBatch:
    """Return the answer to the announcement of chains of these *lengths*. Raises KVStoreError."""
    ends = [0, *accumulate(lengths)]
    if len(message.uses) != 4 * ends[-1] or sorted(message.order) != list(range(len(lengths))):
        raise KVStoreError(f"the server's plan for {len(lengths)} chains is damaged")
    uses = np.frombuffer(message.uses, "<u4").tolist()
    return PlannedBatch(
        tuple(message.order),
        tuple(tuple(uses[first:stop]) for first, stop in pairwise(ends)),
        message.kept,
        message.peak_chunks,
    )


def segments_to_messages(segments: Iterable[NamedSegment]) -> list[pb.PromptSegment]:
    """Return the protobuf form of *segments*."""
    return [
        as_message(
            pb.PromptSegment,
            one,
            chains=b"".join(chunk.digest for chunk in one.chunks),
            contents=b"".join(chunk.content for chunk in one.chunks),
            tokens=[chunk.tokens for chunk in one.chunks],
        )
        for one in segments
    ]


def gate_to_message(gate: GateView) -> pb.Gate:
    """Return the protobuf form of *gate*."""
    return as_message(pb.Gate, gate, open=gate.is_open, calibrated=gate.is_calibrated)


def gate_from_message(message: pb.Gate) -> GateView:
    """Return the gate of *message*."""
    return _value(
        GateView, message, is_open=message.open, is_calibrated=message.calibrated,
        codecs=tuple(message.codecs),
    )  # fmt: skip


def shadow_from_message(message: pb.ShadowResult) -> ShadowResult:
    """Return the checked comparison. Raises InvalidRequestError."""
    return _value(ShadowResult, message)


def resolution_to_message(found: Resolution, tier_names: Sequence[str]) -> pb.ResolveResponse:
    """Return the protobuf form of *found*; *tier_names* has all that variants lie on."""
    numbers = {name: number for number, name in enumerate(tier_names)}

    def chunk_of(chunk: ResolvedChunk) -> pb.ResolvedChunk:
        variants = [as_message(pb.Variant, one, tier=numbers[one.tier]) for one in chunk.variants]
        return pb.ResolvedChunk(exact=chunk.is_exact, variants=variants, priority=chunk.priority)

    segments = [
        as_message(pb.ResolvedSegment, one, chunks=list(map(chunk_of, one.chunks)))
        for one in found.segments
    ]
    return as_message(
        pb.ResolveResponse,
        found,
        segments=segments,
        tier_names=tier_names,
        rope=_rope_to_message(found.rope),
        gate=gate_to_message(found.gate),
        shadow=found.is_shadow,
    )


def resolution_from_message(
    message: pb.ResolveResponse, asked: Sequence[NamedSegment]
) -> Resolution:
    """Return the answer about the segments *asked* for. Raises KVStoreError if it is none."""
    names = tuple(message.tier_names)
    try:
        pairs = zip(message.segments, asked, strict=True)
        return _value(
            Resolution,
            message,
            segments=tuple(_segment(one, wanted, names) for one, wanted in pairs),
            gate=gate_from_message(message.gate),
            layer_order=tuple(message.layer_order),
            rope=_rope(message.rope),
            is_shadow=message.shadow,
            more_leases=(),
        )
    except (ValueError, IndexError) as error:
        raise KVStoreError(f"the server's answer to a resolve is damaged: {error}") from None


def _segment(
    message: pb.ResolvedSegment, asked: NamedSegment, names: Sequence[str]
) -> ResolvedSegment:
    chunks = []
    for one, chunk in zip(message.chunks, asked.chunks, strict=True):
        if len(one.priority) not in (0, chunk.tokens):
            raise ValueError(f"{len(one.priority)} priorities for {chunk.tokens} tokens")
        variants = tuple(_variant(variant, names) for variant in one.variants)
        if one.exact and [variant.digest for variant in variants] != [chunk.digest]:
            raise ValueError("an exact chunk of another name")
        if variants and not (one.exact or asked.approximate):
            raise ValueError("variants where none were asked for")
        chunks.append(ResolvedChunk(one.exact, variants, one.priority))
    if not 0 <= message.ratio <= 1:
        raise ValueError(f"ratio {message.ratio}")
    return ResolvedSegment(tuple(chunks), message.ratio, message.load_ms, message.recompute_ms)


def _variant(message: pb.Variant, names: Sequence[str]) -> Variant:
    if len(message.digest) != DIGEST_BYTES or len(message.parent) != DIGEST_BYTES:
        raise ValueError("a digest of another length")
    return _value(Variant, message, tier=names[message.tier], fidelity=Fidelity(message.fidelity))
