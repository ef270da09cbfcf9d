"""Validation of messages, independent of the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from kvstore.codecs.base import boundless_codecs, codec_by_id
from kvstore.codecs.slices import shard_frame_bytes
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import messages
from kvstore.proto.blend import (
    ACCURACY_TAG,
    MAX_REQUESTED_CHUNKS,
    MAX_SEGMENTS,
    UNKNOWN,
    ContextMass,
    ShadowResult,
    check_number,
    check_tag,
)
from kvstore.proto.errors import InvalidRequestError, LayoutMismatchError, ModelError
from kvstore.proto.frame import raw_frame_bytes
from kvstore.proto.keys import keys_of_digests, split_digests
from kvstore.proto.types import (
    DIGEST_BYTES,
    MAX_CHUNK_TOKENS,
    MIN_CHUNK_TOKENS,
    ChunkInfo,
    ChunkKey,
    ChunkShard,
    KVLayout,
    Namespace,
)
from kvstore.server.blending.content_index import MAX_CONTEXT, MAX_VARIANTS, Measured, PromptChunk
from kvstore.server.blending.gates import Shadow
from kvstore.server.blending.resolver import PromptSegment, Question, Report
from kvstore.server.blending.scores import Context, Scores
from kvstore.server.security.sessions import Session
from kvstore.server.settings.values import MAX_DEADLINE_MS
from kvstore.server.store.parallel_writes import ChunkPart
from kvstore.server.store.reservations import PutResult
from kvstore.server.store.store import Store

MAX_REPORTED_MS = 3600e3
_SUM_SLACK = 1.01
"""Tolerance for attention weights of a row, which sum up to 1, in 16-bit precision."""


def require(is_met: object, field: str, value: object, fix: str) -> None:
    """Raise InvalidRequestError unless *is_met*."""
    if not is_met:
        raise InvalidRequestError(field, value, fix)


@dataclass(frozen=True, slots=True)
class Checks:
    """Validates messages against limits, which server/settings/settings.py documents.

    ``clock`` returns monotonic seconds.
    """

    max_batch_chunks: int
    max_frame_bytes: int
    default_deadline_ms: int
    clock: Callable[[], float]

    def deadline(self, deadline_ms: int) -> float:
        """Return the time *deadline_ms* from now; 0 means the default."""
        if deadline_ms > MAX_DEADLINE_MS:
            raise InvalidRequestError("deadline_ms", deadline_ms, f"at most {MAX_DEADLINE_MS}")
        return self.clock() + (deadline_ms or self.default_deadline_ms) / 1000

    def durable(self, store: Store) -> None:
        """Refuse a durable put if no tier survives a restart."""
        fix = "start the server with a disk tier whose codec is lossless"
        require(store.durable, "durable", True, fix)

    def keys(self, session: Session, digests: bytes) -> list[ChunkKey]:
        """Return the keys of packed digests in the session's namespace."""
        return keys_of_digests(digests, session.namespace, self.max_batch_chunks)

    def batch(self, field: str, count: int) -> None:
        """Refuse a batch over the limit."""
        if count > self.max_batch_chunks:
            raise InvalidRequestError(field, count, f"at most {self.max_batch_chunks}")

    def ranges(self, ranges: Sequence[pb.FrameRange], count: int) -> None:
        """Refuse ranges that are empty, of chunks outside the request, or too many."""
        self.batch("ranges", len(ranges))
        for one in ranges:
            if one.index >= count or one.start >= one.stop:
                fix = f"an index below {count}, and a start before the stop"
                raise InvalidRequestError("ranges", (one.index, one.start, one.stop), fix)

    def chunk(
        self,
        session: Session,
        info: ChunkInfo,
        shard: ChunkShard | None,
        streamed_bytes: int | None = None,
    ) -> tuple[ChunkInfo, ChunkPart | None]:
        """Return *info* if *session* may put the chunk; for a *shard* the info of its chunk, and
        the part.

        *streamed_bytes* is the frame's size as the stream states it. Raises ModelError for a key of
        another namespace, LayoutMismatchError for tensors of another model, InvalidRequestError for
        a wrong size, UnknownCodecError.
        """
        size_bytes, part = info.size_bytes, None
        if streamed_bytes not in (None, size_bytes):
            raise InvalidRequestError("frame_bytes", streamed_bytes, f"the header has {size_bytes}")
        if shard is not None:
            own_bytes = shard_frame_bytes(shard)
            fix = f"a raw shard like this has {own_bytes}"
            require(size_bytes == own_bytes, "frame_bytes", size_bytes, fix)
            part = ChunkPart(shard, size_bytes, is_streamed=streamed_bytes is not None)
            info = ChunkInfo(info.key, info.parent, shard.whole, 0, raw_frame_bytes(shard.whole))
        if info.key[:DIGEST_BYTES] != session.namespace:
            raise ModelError(
                "key", info.key.hex(),
                f"not in this session's namespace {session.namespace.hex()}; open a session "
                "with the Model of these tensors",
            )  # fmt: skip
        if not info.layout.is_of(session.representation):
            expected = KVLayout.of(session.representation, info.layout.tokens)
            raise LayoutMismatchError("layout", info.layout, f"this session's is {expected}")
        if info.size_bytes > self.max_frame_bytes:
            fix = f"at most {self.max_frame_bytes}"
            raise InvalidRequestError("frame_bytes", info.size_bytes, fix)
        codec_by_id(info.codec_id)
        return info, part

    def reserved(
        self, session: Session, request: pb.ReserveRequest
    ) -> list[tuple[ChunkInfo, ChunkPart | None]]:
        """Return the chunks and parts of a Reserve; a part with the info of its chunk."""
        keys = self.keys(session, request.digests)
        parents = split_digests(request.parents, self.max_batch_chunks)
        counts = {len(keys), len(parents), len(request.frame_bytes), len(request.layout)}
        fix = "give as many parents, frame_bytes and layout entries"
        require(len(counts) == 1, "digests", len(keys), fix)
        self.batch("layouts", len(request.layouts))
        layouts = [messages.layout_from_message(message) for message in request.layouts]
        last = max(request.layout, default=-1)
        require(last < len(layouts), "layout", last, "index into layouts")
        rows = zip(keys, parents, request.layout, request.frame_bytes, strict=True)
        return [
            self.chunk(session, ChunkInfo(key, parent, layouts[at][0], 0, size), layouts[at][1])
            for key, parent, at, size in rows
        ]

    # --- blending

    @property
    def _most_blended(self) -> int:
        return min(MAX_REQUESTED_CHUNKS, self.max_batch_chunks)

    def question(self, session: Session, request: pb.ResolveRequest) -> Question:
        """Return the query of *request*. Raises InvalidRequestError."""
        count, tag, variants = len(request.segments), request.tag, request.max_variants
        require(1 <= count <= MAX_SEGMENTS, "segments", count, f"give 1 to {MAX_SEGMENTS}")
        total, most = sum(len(one.tokens) for one in request.segments), self._most_blended
        require(total <= most, "segments.tokens", total, f"at most {most} chunks")
        fix = "use another: this tag is reserved for lossy copies"
        require(not tag.startswith(ACCURACY_TAG), "tag", tag, fix)
        require(variants <= MAX_VARIANTS, "max_variants", variants, f"at most {MAX_VARIANTS}")
        at, segments = 0, []
        for message in request.segments:
            wrong, fix = (message.start, message.stop), f"in order, none before {at}"
            require(at <= message.start < message.stop, "segments", wrong, fix)
            segments.append(self._segment(session.namespace, message))
            at = message.stop
        engine = messages.engine_from_message(request)
        return Question(
            tuple(segments),
            check_tag(tag),
            request.trial,
            self.deadline(request.deadline_ms),
            messages.accuracy_of(request.min_accuracy),
            variants or MAX_VARIANTS,
            engine.prefill if engine is not None else None,
        )

    def _segment(self, space: Namespace, message: pb.PromptSegment) -> PromptSegment:
        tokens = message.tokens
        contents = split_digests(message.contents, self._most_blended)
        chains = split_digests(message.chains, self._most_blended)
        wrong = (len(tokens), len(contents), len(chains))
        fits = len(contents) == len(tokens) and len(chains) in (0, len(tokens))
        fix = "give a content digest for each chunk, and a chain digest for each or for none"
        require(fits, "segments.contents", wrong, fix)
        least, most = MIN_CHUNK_TOKENS, MAX_CHUNK_TOKENS
        for count in tokens:
            fix = f"a chunk has {least} to {most} tokens"
            require(least <= count <= most, "segments.tokens", count, fix)
        wrong = (message.start, message.stop, sum(tokens))
        left = message.stop - message.start - sum(tokens)
        fix = f"its chunks cover it, up to {least - 1} tokens at its end"
        require(0 <= left < least, "segments.stop", wrong, fix)
        keys = [ChunkKey(space + digest) for digest in chains] or [ChunkKey(b"")] * len(tokens)
        chunks = tuple(map(PromptChunk, keys, contents, tokens))
        return PromptSegment(message.start, message.stop, chunks, message.approximate)

    def report(
        self,
        session: Session,
        request: pb.ReportReuseRequest,
        tokens_of: Callable[[Sequence[ChunkKey]], Sequence[int]],
    ) -> Report:
        """Return the report of *request*; *tokens_of* returns 0 for keys that are no variants.

        Raises InvalidRequestError.
        """
        count, digests = len(request.chunks), [one.digest for one in request.chunks]
        most = self._most_blended
        require(count <= most, "chunks", count, f"at most {most}")
        for digest in digests:
            require(len(digest) == DIGEST_BYTES, "chunks.digest", digest.hex(), "give 16 bytes")
        keys = [ChunkKey(session.namespace + digest) for digest in digests]
        tokens = tokens_of(keys)
        for digest, count in zip(digests, tokens, strict=True):
            fix = "not a variant, or evicted since; resolve again"
            require(count, "chunks.digest", digest.hex(), fix)
        ratio = check_number("ratio", request.ratio, 1.0)
        for name in ("load_ms", "compute_ms", "full_ms"):
            check_number(name, getattr(request, name), MAX_REPORTED_MS)
        spent_ms = max(request.load_ms, request.compute_ms)
        is_timed = request.compute_ms > 0 and request.full_ms > 0
        shadow = None
        if request.HasField("shadow"):
            one = messages.as_value(ShadowResult, request.shadow)
            shadow = Shadow(one.divergence, one.agreement, one.tokens, ratio)
        return Report(
            _check_report_tag(request.tag, shadow is not None),
            tuple(
                (key, *_measured(one, count))
                for key, one, count in zip(keys, request.chunks, tokens, strict=True)
            ),
            shadow,
            request.full_ms / spent_ms if is_timed else UNKNOWN,
        )


def outcomes(results: Sequence[PutResult]) -> dict[str, Any]:
    """Return the reply fields for *results*."""
    return {
        "outcomes": bytes(map(attrgetter("outcome"), results)),
        "reasons": list(map(attrgetter("reason"), results)),
    }


def _check_report_tag(tag: str, is_compared: bool) -> str:
    """Return *tag*; a tag of lossy copies must name a codec if the report has a comparison."""
    head, is_of_codec, codec = tag.partition(f"{ACCURACY_TAG}:")
    if (is_of_codec and not head) or (tag == ACCURACY_TAG and is_compared):
        known = boundless_codecs()
        if codec not in known:
            fix = f"use {ACCURACY_TAG}:CODEC, of {', '.join(known)}"
            raise InvalidRequestError("tag", tag, fix)
    return check_tag(tag)


def _measured(message: pb.ChunkReport, tokens: int) -> tuple[Measured, Scores | None]:
    """Return the measurements of a chunk, and a score by token: deviation times attention, -1
    where the deviation was not measured."""
    scores, mean = None, UNKNOWN
    if packed := message.deviations:
        fix = f"two bytes for each of {tokens} tokens"
        require(len(packed) == 2 * tokens, "chunks.deviations", len(packed), fix)
        scores = np.frombuffer(packed, "<f2").astype(np.float32)
        are_known = (np.isfinite(scores) & ((scores >= 0) | (scores == UNKNOWN))).all()
        fix = "finite, not negative; -1 for tokens that were not measured"
        require(are_known, "chunks.deviations", "invalid", fix)
        if (scores >= 0).any():
            mean = float(scores[scores >= 0].mean())
    if packed := message.query_attention:
        fix = f"a byte for each of {tokens} tokens"
        require(len(packed) == tokens, "chunks.query_attention", len(packed), fix)
        attention = np.frombuffer(packed, np.uint8).astype(np.float32)
        if scores is not None:
            attention = np.where(scores >= 0, scores * attention, np.float32(UNKNOWN))
        scores = attention
    if packed := message.selected:
        fix = f"a bit for each of {tokens} tokens, in whole bytes"
        require(len(packed) == -(-tokens // 8), "chunks.selected", len(packed), fix)
        fix = f"no bits after the last of {tokens} tokens"
        require(not packed[-1] >> (tokens % 8 or 8), "chunks.selected", packed[-1], fix)
    return Measured(mean, _context(message, tokens), message.intra_mass), scores


def _context(message: pb.ChunkReport, tokens: int) -> tuple[Context, ...]:
    name, count = "chunks.context", len(message.context)
    require(count <= MAX_CONTEXT, name, count, f"at most the {MAX_CONTEXT} nearest")
    masses = [ContextMass(one.content, one.tokens, one.mass) for one in message.context]
    require(len({one.content for one in masses}) == count, name, count, "each content once")
    whole = check_number("chunks.intra_mass", message.intra_mass) + sum(m.mass for m in masses)
    fix = f"the weights of {tokens} rows sum up to {tokens} at most"
    require(whole <= _SUM_SLACK * tokens, name, whole, fix)
    return tuple(Context(one.content, one.tokens, one.mass) for one in masses)
