"""Checks of blending's messages: from Resolve and ReportReuse to values that hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.codecs.base import boundless_codecs
from kvstore.proto import blend_wire, wire
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.blend import (
    ACCURACY_TAG,
    MAX_ASKED_CHUNKS,
    MAX_SEGMENTS,
    UNKNOWN,
    ContextMass,
    check_number,
    check_tag,
)
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import (
    DIGEST_BYTES,
    MAX_CHUNK_TOKENS,
    MIN_CHUNK_TOKENS,
    ChunkKey,
    Namespace,
)
from kvstore.server.api.validation import Checks, fidelity
from kvstore.server.blending.content_index import MAX_CONTEXT, MAX_VARIANTS, Measured
from kvstore.server.blending.contents import AskedChunk
from kvstore.server.blending.resolver import Question, Report
from kvstore.server.blending.scores import Context
from kvstore.server.blending.token_priority import Scores
from kvstore.server.blending.variant_choice import AskedSegment
from kvstore.server.security.sessions import Session

MAX_REPORTED_MS = 3600e3
_SUM_SLACK = 1.01
"""Attention weights of a row sum up to 1, in sixteen bits or so."""


class BlendChecks:
    """Checks messages against the limits of *checks*."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._limit = min(MAX_ASKED_CHUNKS, checks.limits.max_batch_chunks)

    # --- resolve

    def question(self, session: Session, request: pb.ResolveRequest) -> Question:
        """Return what *request* asks. Raises InvalidRequestError that names what is wrong."""
        if not 1 <= len(request.segments) <= MAX_SEGMENTS:
            count = len(request.segments)
            raise InvalidRequestError("segments", count, f"give 1 to {MAX_SEGMENTS}")
        total = sum(len(one.tokens) for one in request.segments)
        if total > self._limit:
            raise InvalidRequestError("segments.tokens", total, f"at most {self._limit} chunks")
        if request.tag.startswith(ACCURACY_TAG):
            fix = "use another: this is of lossy copies, which blending says nothing of"
            raise InvalidRequestError("tag", request.tag, fix)
        if request.max_variants > MAX_VARIANTS:
            fix = f"at most {MAX_VARIANTS}"
            raise InvalidRequestError("max_variants", request.max_variants, fix)
        at, segments = 0, []
        for message in request.segments:
            if not at <= message.start < message.stop:
                wrong = (message.start, message.stop)
                raise InvalidRequestError("segments", wrong, f"in order, none before {at}")
            segments.append(self._segment(session.namespace, message))
            at = message.stop
        engine = wire.engine_from_message(request)
        return Question(
            tuple(segments),
            check_tag(request.tag),
            request.trial,
            self._checks.deadline(request.deadline_ms),
            fidelity(request.min_fidelity),
            request.max_variants or MAX_VARIANTS,
            engine.prefill if engine is not None else None,
        )

    def _segment(self, space: Namespace, message: pb.PromptSegment) -> AskedSegment:
        tokens = message.tokens
        contents = wire.split_digests(message.contents, self._limit)
        chains = wire.split_digests(message.chains, self._limit)
        if len(contents) != len(tokens) or len(chains) not in (0, len(tokens)):
            wrong = (len(tokens), len(contents), len(chains))
            fix = "give a content digest for each chunk, and a chain digest for each or for none"
            raise InvalidRequestError("segments.contents", wrong, fix)
        for count in tokens:
            if not MIN_CHUNK_TOKENS <= count <= MAX_CHUNK_TOKENS:
                fix = f"a chunk has {MIN_CHUNK_TOKENS} to {MAX_CHUNK_TOKENS} tokens"
                raise InvalidRequestError("segments.tokens", count, fix)
        left = message.stop - message.start - sum(tokens)
        if not 0 <= left < MIN_CHUNK_TOKENS:
            wrong = (message.start, message.stop, sum(tokens))
            fix = f"its chunks cover it, up to {MIN_CHUNK_TOKENS - 1} tokens at its end"
            raise InvalidRequestError("segments.stop", wrong, fix)
        keys = [ChunkKey(space + digest) for digest in chains] or [ChunkKey(b"")] * len(tokens)
        chunks = tuple(map(AskedChunk, keys, contents, tokens))
        return AskedSegment(message.start, message.stop, chunks, message.approximate)

    # --- reports

    def report_keys(self, session: Session, request: pb.ReportReuseRequest) -> list[ChunkKey]:
        """Return the variants that *request* speaks of. Raises InvalidRequestError."""
        if len(request.chunks) > self._limit:
            raise InvalidRequestError("chunks", len(request.chunks), f"at most {self._limit}")
        keys = []
        for one in request.chunks:
            if len(one.digest) != DIGEST_BYTES:
                raise InvalidRequestError("chunks.digest", one.digest.hex(), "give 16 bytes")
            keys.append(ChunkKey(session.namespace + one.digest))
        return keys

    def report(
        self, request: pb.ReportReuseRequest, keys: Sequence[ChunkKey], tokens: Sequence[int]
    ) -> Report:
        """Return what *request* says of variants of so many *tokens*; 0 for what is none.

        Raises InvalidRequestError that names what cannot be.
        """
        for key, count in zip(keys, tokens, strict=True):
            if not count:
                fix = "no variant here, or gone since; resolve again"
                raise InvalidRequestError("chunks.digest", key[DIGEST_BYTES:].hex(), fix)
        ratio = check_number("ratio", request.ratio, 1.0)
        for name in ("load_ms", "compute_ms", "full_ms"):
            check_number(name, getattr(request, name), MAX_REPORTED_MS)
        spent_ms = max(request.load_ms, request.compute_ms)
        is_timed = request.compute_ms > 0 and request.full_ms > 0
        shadow = None
        if request.HasField("shadow"):
            shadow = blend_wire.shadow_from_message(request.shadow)
        return Report(
            _check_report_tag(request.tag, shadow is not None),
            tuple(
                (key, *_measured(one, count))
                for key, one, count in zip(keys, request.chunks, tokens, strict=True)
            ),
            ratio,
            shadow,
            request.full_ms / spent_ms if is_timed else UNKNOWN,
        )


def _check_report_tag(tag: str, is_compared: bool) -> str:
    """Return *tag*; one of lossy copies is to name a codec, if a comparison came with it."""
    head, is_of_codec, codec = tag.partition(f"{ACCURACY_TAG}:")
    if (is_of_codec and not head) or (tag == ACCURACY_TAG and is_compared):
        known = boundless_codecs()
        if codec not in known:
            fix = f"use {ACCURACY_TAG}:CODEC, of {', '.join(known)}"
            raise InvalidRequestError("tag", tag, fix)
    return check_tag(tag)


def _measured(message: pb.ChunkReport, tokens: int) -> tuple[Measured, Scores | None]:
    deviations = _deviations(message.deviations, tokens)
    attention = _attention(message.query_attention, tokens)
    _check_selected(message.selected, tokens)
    context = _context(message, tokens)
    scores: Scores | None = deviations
    if attention is not None:
        scores = attention if deviations is None else _product(deviations, attention)
    mean = UNKNOWN
    if deviations is not None and (deviations >= 0).any():
        mean = float(deviations[deviations >= 0].mean())
    return Measured(mean, context, message.intra_mass), scores


def _deviations(packed: bytes, tokens: int) -> Scores | None:
    if not packed:
        return None
    if len(packed) != 2 * tokens:
        fix = f"two bytes for each of {tokens} tokens"
        raise InvalidRequestError("chunks.deviations", len(packed), fix)
    values = np.frombuffer(packed, "<f2").astype(np.float32)
    if not (np.isfinite(values) & ((values >= 0) | (values == UNKNOWN))).all():
        fix = "finite, not negative; -1 for tokens that were not measured"
        raise InvalidRequestError("chunks.deviations", "no such deviations", fix)
    return values


def _attention(packed: bytes, tokens: int) -> Scores | None:
    if not packed:
        return None
    if len(packed) != tokens:
        fix = f"a byte for each of {tokens} tokens"
        raise InvalidRequestError("chunks.query_attention", len(packed), fix)
    return np.frombuffer(packed, np.uint8).astype(np.float32)


def _product(deviations: Scores, attention: Scores) -> Scores:
    """Return deviation times attention, -1 where the deviation was not measured."""
    return np.where(deviations >= 0, deviations * attention, np.float32(UNKNOWN))


def _check_selected(packed: bytes, tokens: int) -> None:
    if not packed:
        return
    if len(packed) != -(-tokens // 8):
        fix = f"a bit for each of {tokens} tokens, in whole bytes"
        raise InvalidRequestError("chunks.selected", len(packed), fix)
    if tokens % 8 and packed[-1] >> tokens % 8:
        fix = f"no bits behind that of the last of {tokens} tokens"
        raise InvalidRequestError("chunks.selected", packed[-1], fix)


def _context(message: pb.ChunkReport, tokens: int) -> tuple[Context, ...]:
    if len(message.context) > MAX_CONTEXT:
        fix = f"at most the {MAX_CONTEXT} nearest"
        raise InvalidRequestError("chunks.context", len(message.context), fix)
    masses = [ContextMass(one.content, one.tokens, one.mass) for one in message.context]
    if len({one.content for one in masses}) < len(masses):
        raise InvalidRequestError("chunks.context", len(masses), "each content once")
    whole = check_number("chunks.intra_mass", message.intra_mass) + sum(m.mass for m in masses)
    if whole > _SUM_SLACK * tokens:
        fix = f"the weights of {tokens} rows sum up to {tokens} at most"
        raise InvalidRequestError("chunks.context", whole, fix)
    return tuple(Context(one.content, one.tokens, one.mass) for one in masses)
