"""How blending travels: between its dataclasses and protobuf messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
from kvstore.proto.errors import KVStoreError
from kvstore.proto.types import DIGEST_BYTES, ChainDigest, Fidelity, RopeParameters

_COPIED = ("context_impact", "overlap", "fix_overhead", "deviation", "reports", "position")


def segments_to_messages(segments: Iterable[NamedSegment]) -> list[pb.PromptSegment]:
    """Return the protobuf form of *segments*."""
    return [
        pb.PromptSegment(
            start=one.start,
            stop=one.stop,
            chains=b"".join(chunk.digest for chunk in one.chunks),
            contents=b"".join(chunk.content for chunk in one.chunks),
            tokens=[chunk.tokens for chunk in one.chunks],
            approximate=one.approximate,
        )
        for one in segments
    ]


def gate_to_message(gate: GateView) -> pb.Gate:
    """Return the protobuf form of *gate*."""
    return pb.Gate(
        model=gate.model,
        tag=gate.tag,
        open=gate.is_open,
        ratio=gate.ratio,
        agreement=gate.agreement,
        divergence=gate.divergence,
        shadows=gate.shadows,
        why=gate.why,
        calibrated=gate.is_calibrated,
        speedup=gate.speedup,
        let_through=gate.let_through,
        kept_out=gate.kept_out,
        codecs=gate.codecs,
    )


def gate_from_message(message: pb.Gate) -> GateView:
    """Return the gate that *message* is of."""
    return GateView(
        message.open, message.ratio, message.agreement, message.divergence, message.shadows,
        message.why, message.calibrated, message.speedup, message.tag, message.model,
        message.let_through, message.kept_out, tuple(message.codecs),
    )  # fmt: skip


def shadow_from_message(message: pb.ShadowResult) -> ShadowResult:
    """Return the checked comparison. Raises InvalidRequestError."""
    return ShadowResult(message.divergence, message.agreement, message.tokens)


def resolution_to_message(
    found: Resolution, tier_names: Sequence[str], server: pb.Server
) -> pb.ResolveResponse:
    """Return the protobuf form of *found*; *tier_names* has all that variants lie on."""
    numbers = {name: number for number, name in enumerate(tier_names)}
    rope = found.rope
    return pb.ResolveResponse(
        server=server,
        segments=[
            pb.ResolvedSegment(
                chunks=[_chunk_to_message(chunk, numbers) for chunk in one.chunks],
                ratio=one.ratio,
                load_ms=one.load_ms,
                recompute_ms=one.recompute_ms,
            )
            for one in found.segments
        ],
        exact_prefix=found.exact_prefix,
        lease_id=found.lease_id,
        lease_ttl_ms=found.lease_ttl_ms,
        layer_order=found.layer_order,
        tier_names=tier_names,
        rope=pb.Rope(
            theta=rope.theta,
            rotary_dim=rope.rotary_dim,
            scaling=rope.scaling,
            factors=[pb.RopeFactor(name=name, value=value) for name, value in rope.factors],
        ),
        gate=gate_to_message(found.gate),
        shadow=found.is_shadow,
    )


def _chunk_to_message(chunk: ResolvedChunk, numbers: dict[str, int]) -> pb.ResolvedChunk:
    return pb.ResolvedChunk(
        exact=chunk.is_exact,
        variants=[
            pb.Variant(
                digest=one.digest,
                parent=one.parent,
                tier=numbers[one.tier],
                load_ms=one.load_ms,
                size_bytes=one.size_bytes,
                fidelity=one.fidelity,
                **{name: getattr(one, name) for name in _COPIED},
            )
            for one in chunk.variants
        ],
        priority=chunk.priority,
    )


def resolution_from_message(
    message: pb.ResolveResponse, asked: Sequence[NamedSegment]
) -> Resolution:
    """Return the answer about the segments *asked* for. Raises KVStoreError if it is none."""
    try:
        return _resolution(message, asked)
    except (ValueError, IndexError) as error:
        raise KVStoreError(f"the server's answer to a resolve is damaged: {error}") from None


def _resolution(message: pb.ResolveResponse, asked: Sequence[NamedSegment]) -> Resolution:
    names = tuple(message.tier_names)
    rope = message.rope
    return Resolution(
        segments=tuple(
            _segment(told, one, names) for told, one in zip(message.segments, asked, strict=True)
        ),
        exact_prefix=message.exact_prefix,
        gate=gate_from_message(message.gate),
        layer_order=tuple(message.layer_order),
        rope=RopeParameters(
            rope.theta, rope.rotary_dim, rope.scaling,
            tuple((factor.name, factor.value) for factor in rope.factors),
        ),
        is_shadow=message.shadow,
        lease_id=message.lease_id,
        lease_ttl_ms=message.lease_ttl_ms,
    )  # fmt: skip


def _segment(
    message: pb.ResolvedSegment, asked: NamedSegment, names: Sequence[str]
) -> ResolvedSegment:
    chunks = []
    for told, chunk in zip(message.chunks, asked.chunks, strict=True):
        if len(told.priority) not in (0, chunk.tokens):
            raise ValueError(f"{len(told.priority)} priorities for {chunk.tokens} tokens")
        variants = tuple(_variant(one, names) for one in told.variants)
        if told.exact and [one.digest for one in variants] != [chunk.digest]:
            raise ValueError("an exact chunk of another name")
        if variants and not (told.exact or asked.approximate):
            raise ValueError("variants where none were asked for")
        chunks.append(ResolvedChunk(told.exact, variants, told.priority))
    if not 0 <= message.ratio <= 1:
        raise ValueError(f"ratio {message.ratio}")
    return ResolvedSegment(tuple(chunks), message.ratio, message.load_ms, message.recompute_ms)


def _variant(message: pb.Variant, names: Sequence[str]) -> Variant:
    if len(message.digest) != DIGEST_BYTES or len(message.parent) != DIGEST_BYTES:
        raise ValueError("a digest of another length")
    return Variant(
        digest=ChainDigest(message.digest),
        parent=ChainDigest(message.parent),
        position=message.position,
        tier=names[message.tier],
        load_ms=message.load_ms,
        size_bytes=message.size_bytes,
        fidelity=Fidelity(message.fidelity),
        context_impact=message.context_impact,
        overlap=message.overlap,
        fix_overhead=message.fix_overhead,
        deviation=message.deviation,
        reports=message.reports,
    )
