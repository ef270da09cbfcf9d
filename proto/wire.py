"""How values travel: between dataclasses and protobuf messages, and into index rows."""

from __future__ import annotations

import math
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import TypeVar, cast

import numpy as np

from kvstore.proto import kvstore_pb2 as pb
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
    KEY_BYTES,
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
    Namespace,
    Portion,
    Representation,
    RopeParameters,
    check_count,
)

FEATURE_SHARED_MEMORY = 1
FEATURE_DURABLE_PUT = 2

MESSAGE_BYTES = 1 << 20
"""Payload of one streamed message: larger ones are slower in every gRPC we measured."""

MAX_EXPLAINED = 1024
"""Chunks that a server explains in one request; all of them have room in one reply."""

REFUSED = "refused: "
"""In what an engine counted: how a name begins that says why it runs without its store."""

ERROR_NAME = "kvstore-error"
"""Trailing metadata with the error's class: gRPC itself also sends RESOURCE_EXHAUSTED."""

_INFO = struct.Struct("<BBHQd32s16s")
_INFO_VERSION = 1
_FIDELITY_OF = {fidelity.value: fidelity for fidelity in Fidelity}
_FIDELITIES = (Fidelity.exact, Fidelity.bounded, Fidelity.exact, Fidelity.none)
_DIGEST = struct.Struct(f"{DIGEST_BYTES}s")
_DIGESTS = struct.Struct(f"{DIGEST_BYTES}s" * 64)
"""A prompt's are unpacked by so many at once: a slice for each takes four times as long."""
_HALF_KEY = f"V{DIGEST_BYTES}"
"""Namespace or digest, as numpy moves them: a prompt has hundreds of keys."""


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
    """Return how requests state a minimum fidelity; what states none asks for exact."""
    return _FIDELITIES.index(least)


def fidelity_of(number: int) -> Fidelity | None:
    """Return the minimum fidelity that a request states by *number*; None for no such number."""
    return _FIDELITIES[number] if 0 <= number < len(_FIDELITIES) else None


def join_digests(digests: Iterable[bytes]) -> bytes:
    """Pack digests into one bytes field."""
    return b"".join(digests)


def split_digests(packed: bytes, limit: int) -> list[ChainDigest]:
    """Unpack at most *limit* digests. Raises InvalidRequestError on a ragged or long field."""
    _check_digests(packed, limit)
    return cast("list[ChainDigest]", list(_digests_of(packed)))


def _digests_of(packed: bytes) -> Iterator[bytes]:
    whole = len(packed) - len(packed) % _DIGESTS.size
    many, few = _DIGESTS.iter_unpack(packed[:whole]), _DIGEST.iter_unpack(packed[whole:])
    return chain.from_iterable(chain(many, few))


def _check_digests(packed: bytes, limit: int) -> None:
    count, rest = divmod(len(packed), DIGEST_BYTES)
    if rest:
        raise InvalidRequestError("digests", len(packed), f"give {DIGEST_BYTES} bytes per chunk")
    if count > limit:
        raise InvalidRequestError("digests", count, f"at most {limit} chunks in one batch")


def keys_of_digests(packed: bytes, space: Namespace, limit: int) -> list[ChunkKey]:
    """Unpack at most *limit* digests into the keys they are in *space*.

    Raises InvalidRequestError as ``split_digests`` does.
    """
    _check_digests(packed, limit)
    return cast("list[ChunkKey]", list(map(space.__add__, _digests_of(packed))))


def cut_keys(keys: Sequence[ChunkKey], space: Namespace) -> bytes | None:
    """Return the packed digests of *keys*; None when any is no key of the namespace *space*."""
    try:
        joined = b"".join(keys)
    except TypeError:
        return None
    count = len(keys)
    if not set(map(len, keys)) <= {KEY_BYTES}:
        return None
    halves = np.ndarray((count, 2), _HALF_KEY, joined)
    return halves[:, 1].tobytes() if halves[:, 0].tobytes() == space * count else None


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
    rope = representation.rope
    return pb.Representation(
        model_id=representation.model_id,
        model_revision=representation.model_revision,
        adapter_digest=representation.adapter_digest,
        quantization=representation.quantization,
        tokenizer_digest=representation.tokenizer_digest,
        layout_version=representation.layout_version,
        rope=pb.Rope(
            theta=rope.theta,
            rotary_dim=rope.rotary_dim,
            scaling=rope.scaling,
            factors=[pb.RopeFactor(name=name, value=value) for name, value in rope.factors],
        ),
        layer_groups=[
            pb.LayerGroup(
                kind=group.kind,
                dtype=group.dtype,
                layer_ids=group.layer_ids,
                kv_heads=group.kv_heads,
                head_dim=group.head_dim,
                window_tokens=group.window_tokens,
            )
            for group in representation.layer_groups
        ],
    )


def representation_from_message(message: pb.Representation) -> Representation:
    """Return the checked Representation. Raises RepresentationError naming the field."""
    if not message.HasField("rope"):
        raise RepresentationError("rope", None, "give the rope parameters, or scaling='none'")
    # Here too, before a value is made of each of them.
    check_count("rope.factors", len(message.rope.factors), MAX_ROPE_FACTORS)
    check_count("layer_groups", len(message.layer_groups), MAX_LAYER_GROUPS)
    for group in message.layer_groups:
        check_count("layer_ids", len(group.layer_ids), MAX_LAYERS)
    return Representation(
        model_id=message.model_id,
        model_revision=message.model_revision,
        adapter_digest=message.adapter_digest,
        quantization=message.quantization,
        layer_groups=tuple(_group(group) for group in message.layer_groups),
        rope=RopeParameters(
            message.rope.theta,
            message.rope.rotary_dim,
            message.rope.scaling,
            tuple((factor.name, factor.value) for factor in message.rope.factors),
        ),
        tokenizer_digest=message.tokenizer_digest,
        layout_version=message.layout_version,
    )


def _group(message: pb.LayerGroup) -> LayerGroup:
    try:
        kind, dtype = LayerKind(message.kind), DType(message.dtype)
    except ValueError as error:
        raise RepresentationError(
            "layer_groups", str(error), "use a kind and dtype we know"
        ) from None
    return LayerGroup(
        kind, dtype, tuple(message.layer_ids), message.kv_heads, message.head_dim,
        message.window_tokens,
    )  # fmt: skip


def hints_to_message(hints: Hints | None) -> pb.Hints | None:
    """Return the protobuf form of *hints*; None when nothing is said."""
    if hints is None or hints == NO_HINTS:
        return None
    return pb.Hints(
        reuse=f"REUSE_{hints.reuse.name.upper()}",
        priority=hints.priority,
        ttl_ms=hints.ttl_ms,
        pin_ms=hints.pin_ms,
        category=hints.category,
        prompt_tokens=hints.prompt_tokens,
        handover_ms=hints.handover_ms,
    )


def hints_from_message(message: pb.Hints) -> Hints:
    """Return the checked hints; NO_HINTS for an empty message. Raises InvalidRequestError."""
    if not message.ByteSize():
        return NO_HINTS
    if int(message.reuse) not in list(map(int, Reuse)):
        fix = "use 0 (unknown), 1 (discard) or 2 (keep)"
        raise InvalidRequestError("hints.reuse", message.reuse, fix)
    return Hints(
        Reuse(message.reuse), message.priority, message.ttl_ms, message.pin_ms, message.category,
        message.prompt_tokens, message.handover_ms,
    )  # fmt: skip


def layout_to_message(layout: KVLayout) -> pb.Layout:
    """Return the protobuf form of *layout*."""
    return pb.Layout(
        components=[
            pb.Component(
                kind=c.kind,
                dtype=c.dtype,
                layers=c.layers,
                kv_heads=c.kv_heads,
                head_dim=c.head_dim,
                tokens=c.tokens,
                chunk_tokens=c.chunk_tokens,
            )
            for c in layout.components
        ]
    )


def portion_to_message(portion: Portion) -> pb.Layout:
    """Return the protobuf form of *portion*."""
    message = layout_to_message(portion.whole)
    for extent in portion.extents:
        message.extents.append(
            pb.Extent()
            if extent is None
            else pb.Extent(
                first_layer=extent.first_layer,
                layer_stop=extent.layer_stop,
                first_head=extent.first_head,
                head_stop=extent.head_stop,
            )
        )
    return message


def portion_from_message(message: pb.Layout) -> Portion | None:
    """Return the portion that *message* is of; None for a whole chunk.

    Raises InvalidRequestError or LayoutMismatchError.
    """
    whole = layout_from_message(message)
    if not message.extents:
        return None
    extents = [
        Extent(one.first_layer, one.layer_stop, one.first_head, one.head_stop)
        if one.ByteSize()
        else None
        for one in message.extents
    ]
    portion = Portion(whole, tuple(extents))
    return None if portion.is_whole else portion


def layout_from_message(message: pb.Layout) -> KVLayout:
    """Return the checked layout. Raises InvalidRequestError or LayoutMismatchError."""
    components = []
    for c in message.components:
        try:
            kind, dtype = LayerKind(c.kind), DType(c.dtype)
        except ValueError as error:
            raise InvalidRequestError(
                "layout", str(error), "use a kind and dtype we know"
            ) from None
        components.append(
            Component(kind, dtype, c.layers, c.kv_heads, c.head_dim, c.tokens, c.chunk_tokens)
        )
    return KVLayout(tuple(components))


def layout_fits(layout: KVLayout, representation: Representation) -> bool:
    """Whether *layout* is a chunk of *representation*."""
    return layout.is_of(representation)


T = TypeVar("T")


def engine_to_message(engine: EngineTerms | None) -> pb.Prefill | None:
    """Return the protobuf form of what an engine takes."""
    if engine is None:
        return None
    prefill = engine.prefill
    return pb.Prefill(
        start_s=prefill.start_s,
        token_s=prefill.token_s,
        pair_s=prefill.pair_s,
        tokens=engine.prompt_tokens,
    )


def engine_from_message(request: pb.LookupRequest | pb.ResolveRequest) -> EngineTerms | None:
    """Return what the engine takes, if the request says. Raises InvalidRequestError."""
    if not request.HasField("prefill"):
        return None
    given = request.prefill
    return EngineTerms(PrefillModel(given.start_s, given.token_s, given.pair_s), given.tokens)


def add_plan(reply: pb.LookupResponse, plan: LoadPlan | None) -> None:
    """Put a plan into the answer to a lookup."""
    if plan is None:
        return
    reply.plan_ms, reply.recompute_ms = plan.plan_ms, plan.recompute_ms
    for one in plan.ranges:
        reply.plan.add(first=one.first, stop=one.stop, load=one.load, ms=one.ms)


def plan_from_message(message: pb.LookupResponse, asked: int) -> LoadPlan | None:
    """Return the plan over the chunks *asked* for; None without one. Raises KVStoreError."""
    if not message.plan and not message.recompute_ms:
        return None
    ranges = tuple(PlanRange(one.first, one.stop, one.load, one.ms) for one in message.plan)
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
    packed = array("I", uses)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def batch_from_message(message: pb.PlanResponse, lengths: Sequence[int]) -> PlannedBatch:
    """Return the answer to the announcement of chains of these *lengths*. Raises KVStoreError."""
    ends = [0, *accumulate(lengths)]
    if len(message.uses) != 4 * ends[-1] or sorted(message.order) != list(range(len(lengths))):
        raise KVStoreError(f"the server's plan for {len(lengths)} chains is damaged")
    uses = array("I", message.uses)
    if sys.byteorder == "big":
        uses.byteswap()
    return PlannedBatch(
        tuple(message.order),
        tuple(tuple(uses[first:stop]) for first, stop in pairwise(ends)),
        message.kept,
        message.peak_chunks,
    )
