"""Checks: from messages to values that hold, and back. Nothing is asked of the store here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict, TypeVar

from google.protobuf.message import Message

from kvstore.codecs.base import codec_by_id, codec_name
from kvstore.codecs.portions import portion_frame_bytes
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import wire
from kvstore.proto.bulk import Range
from kvstore.proto.errors import (
    InvalidRequestError,
    LayoutMismatchError,
    RepresentationError,
)
from kvstore.proto.frame import FrameHeader, raw_frame_bytes
from kvstore.proto.row_mask import SkippedRows
from kvstore.proto.types import DIGEST_BYTES, ChainDigest, ChunkInfo, ChunkKey, Fidelity, KVLayout
from kvstore.server.index.results import ChunkDetails
from kvstore.server.security.sessions import Session
from kvstore.server.store.parallel_writes import ChunkPart
from kvstore.server.store.reservations import PutResult
from kvstore.server.store.store import SlotStatus

MAX_DEADLINE_MS = 600_000
MAX_PLAN_TTL_MS = 3600 * 1000

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """What messages are held to; server/settings/settings.py says what each is for."""

    max_batch_chunks: int
    max_frame_bytes: int
    default_deadline_ms: int


class Outcomes(TypedDict):
    """The fields in which replies say what became of each chunk."""

    outcomes: bytes
    reasons: list[str]


class Checks:
    """Checks messages against *limits*. *clock* returns monotonic seconds."""

    def __init__(self, limits: ServiceLimits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.clock = clock

    def deadline(self, deadline_ms: int) -> float:
        """Return the point in time *deadline_ms* from now; 0 means the default."""
        if deadline_ms > MAX_DEADLINE_MS:
            raise InvalidRequestError("deadline_ms", deadline_ms, f"at most {MAX_DEADLINE_MS}")
        return self.clock() + (deadline_ms or self.limits.default_deadline_ms) / 1000

    def durable(self, wanted: bool, *, is_possible: bool) -> None:
        """Refuse a durable put where nothing survives a restart."""
        if wanted and not is_possible:
            fix = "start the server with a disk tier whose codec loses nothing"
            raise InvalidRequestError("durable", True, fix)

    def keys(self, session: Session, digests: bytes) -> list[ChunkKey]:
        """Return the session's keys of packed digests."""
        return wire.keys_of_digests(digests, session.namespace, self.limits.max_batch_chunks)

    def plan_ttl_ms(self, ttl_ms: int) -> int:
        """Refuse to keep announced chunks for too long; 0 keeps nothing."""
        if ttl_ms > MAX_PLAN_TTL_MS:
            raise InvalidRequestError("ttl_ms", ttl_ms, f"at most {MAX_PLAN_TTL_MS}")
        return ttl_ms

    def batch(self, field: str, count: int) -> None:
        """Refuse a batch over the limit."""
        if count > self.limits.max_batch_chunks:
            raise InvalidRequestError(field, count, f"at most {self.limits.max_batch_chunks}")

    def ranges(self, ranges: Sequence[pb.FrameRange] | Sequence[Range], count: int) -> None:
        """Refuse ranges that are empty, of chunks that were not asked for, or too many."""
        self.batch("ranges", len(ranges))
        for one in ranges:
            if one.index >= count or one.start >= one.stop:
                wrong = (one.index, one.start, one.stop)
                fix = f"an index below {count}, and a start before the stop"
                raise InvalidRequestError("ranges", wrong, fix)

    def skipped(self, request: pb.GetRequest, count: int) -> SkippedRows | None:
        """Return the rows of *count* chunks that *request* does not want."""
        if request.skip_rows and not request.layer_major:
            raise InvalidRequestError("skip_rows", len(request.skip_rows), "with layer_major only")
        return SkippedRows.unpack(request.skip_rows, count)

    def info(self, session: Session, info: ChunkInfo) -> ChunkInfo:
        """Return *info* if it is a chunk that *session* may put.

        Raises RepresentationError for a key of another namespace, LayoutMismatchError for
        tensors of another model, InvalidRequestError over the limit, UnknownCodecError.
        """
        if info.key[:DIGEST_BYTES] != session.namespace:
            raise RepresentationError(
                "key", info.key.hex(),
                f"not in this session's namespace {session.namespace.hex()}; open a session "
                "with the Representation of these tensors",
            )  # fmt: skip
        if not wire.layout_fits(info.layout, session.representation):
            expected = KVLayout.of(session.representation, info.layout.tokens)
            raise LayoutMismatchError("layout", info.layout, f"this session's is {expected}")
        if info.size_bytes > self.limits.max_frame_bytes:
            raise InvalidRequestError(
                "frame_bytes", info.size_bytes, f"at most {self.limits.max_frame_bytes}"
            )
        codec_by_id(info.codec_id)
        return info

    def header(
        self, session: Session, header: FrameHeader, frame_bytes: int
    ) -> tuple[ChunkInfo, ChunkPart | None]:
        """Return the info of the chunk whose frame *session* may put, or a part of it."""
        if header.frame_bytes != frame_bytes:
            raise InvalidRequestError(
                "frame_bytes", frame_bytes, f"its header: {header.frame_bytes}"
            )
        portion = header.portion
        if portion is None:
            return self.info(session, header.info()), None
        part = ChunkPart(portion, frame_bytes, is_streamed=True)
        return self._whole(session, header.key, header.parent, part), part

    def _whole(
        self, session: Session, key: ChunkKey, parent: ChainDigest, part: ChunkPart
    ) -> ChunkInfo:
        """Return the info of the raw chunk that *part* is of."""
        if part.frame_bytes != portion_frame_bytes(part.portion):
            fix = f"a raw rectangle like this has {portion_frame_bytes(part.portion)}"
            raise InvalidRequestError("frame_bytes", part.frame_bytes, fix)
        whole = part.portion.whole
        return self.info(session, ChunkInfo(key, parent, whole, 0, raw_frame_bytes(whole)))

    def reserved(
        self, session: Session, request: pb.ReserveRequest
    ) -> list[tuple[ChunkInfo, ChunkPart | None]]:
        """Return what a Reserve asks room for; all of it or an error.

        A part comes with the info of the chunk that it is of.
        """
        keys = self.keys(session, request.digests)
        parents = wire.split_digests(request.parents, self.limits.max_batch_chunks)
        if not len(keys) == len(parents) == len(request.frame_bytes) == len(request.layout):
            raise InvalidRequestError(
                "digests", len(keys), "give as many parents, frame_bytes and layout entries"
            )
        self.batch("layouts", len(request.layouts))
        layouts = [wire.layout_from_message(message) for message in request.layouts]
        portions = [wire.portion_from_message(message) for message in request.layouts]
        if any(index >= len(layouts) for index in request.layout):
            raise InvalidRequestError("layout", max(request.layout), "index into layouts")
        found: list[tuple[ChunkInfo, ChunkPart | None]] = []
        rows = zip(keys, parents, request.layout, request.frame_bytes, strict=True)
        for key, parent, index, size in rows:
            portion = portions[index]
            if portion is None:
                info = ChunkInfo(key, parent, layouts[index], 0, size)
                found.append((self.info(session, info), None))
            else:
                part = ChunkPart(portion, size)
                found.append((self._whole(session, key, parent, part), part))
        return found


def fidelity(value: int) -> Fidelity:
    """Return the minimum fidelity a request states: 0 or 2 exact, 1 bounded, 3 any."""
    found = wire.fidelity_of(value)
    if found is None:
        raise InvalidRequestError("min_fidelity", value, "use 0 to 3")
    return found


def outcomes(results: Sequence[PutResult]) -> Outcomes:
    """Return the reply fields for *results*."""
    return {
        "outcomes": bytes(result.outcome for result in results),
        "reasons": [result.reason for result in results],
    }


def fitting(messages: Iterable[M], room_bytes: int) -> Iterator[M]:
    """Yield *messages* until one does not fit into what is left of *room_bytes*."""
    for message in messages:
        room_bytes -= message.ByteSize()
        if room_bytes < 0:
            return
        yield message


def chunk_stat(held: ChunkDetails) -> pb.ChunkStat:
    """Return what the catalog knows of a chunk as a message."""
    info = next(iter(held.copies.values()))
    return pb.ChunkStat(
        digest=held.key[DIGEST_BYTES:],
        parent=info.parent,
        tokens=info.layout.tokens,
        raw_bytes=info.layout.raw_bytes,
        copies=[
            pb.Copy(
                tier=tier,
                codec=codec_name(copy.codec_id),
                size_bytes=copy.size_bytes,
                fidelity=copy.fidelity,
            )
            for tier, copy in held.copies.items()
        ],
        leases=held.leases,
        pinned=held.is_pinned,
        hits=held.hits,
        idle_s=held.idle_s,
        pinned_s=held.pinned_s,
        expires_s=held.expires_s,
        priority=held.priority,
        context_tokens=held.context_tokens,
        components=wire.layout_to_message(info.layout).components,
    )


def tier_status(status: SlotStatus) -> pb.TierStatus:
    """Return a tier's state as a message."""
    return pb.TierStatus(
        name=status.name,
        capacity_bytes=status.stats.capacity_bytes,
        used_bytes=status.stats.used_bytes,
        chunks=status.stats.chunks,
        codec=status.codec,
        state="degraded" if status.reason else "serving",
        reason=status.reason,
    )
