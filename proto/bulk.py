"""The messages of the bulk channel, between a reader or writer of frames and a server over TCP.

A message is a header, here a word, whose length its kind fixes, and for some kinds a payload. The
table is in docs/format.md. Nothing here does I/O.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from xxhash import xxh3_64

from kvstore.proto.buffers import Bytes, copy_bytes, copy_summed
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError, KVStoreError, revive
from kvstore.proto.frame import pack_components
from kvstore.proto.keys import keys_of_digests
from kvstore.proto.messages import MESSAGE_BYTES, pack_info, unpack_info
from kvstore.proto.types import DIGEST_BYTES, ChunkInfo, ChunkKey, KVLayout, Namespace

MAGIC = b"KVSZ"
VERSION = 2
TOKEN_BYTES = 16
TIER_BYTES = 8

MAX_PAYLOAD_BYTES = MESSAGE_BYTES
"""Of one message."""

SILENCE_S = 6.0
"""A peer that takes or sends nothing of a request for so long is hung up on."""

DURABLE = 1
"""Flag of a put."""

LAYER_MAJOR = 1
"""Flag of a get: first the headers of all its frames, then their layers, in the model's order."""

SKIP_ROWS = 1 << 4
"""Flag of a get by layers: token rows that its payload names before the digests need not come."""

FIDELITY_SHIFT = 1
"""Two bits of a get's flags from here on: the minimum fidelity, as gRPC's requests state it."""

RANGES = 1 << 3
"""Flag of a get: of stored frames, only the bytes that its payload names behind the digests."""

PEER = 1 << 5
"""Flag of a get by another server: its digests follow their namespace, and only frames in memory
are meant."""

MAX_HINTS_BYTES = 4096

_HEAD = struct.Struct("<4sHHQ")
_COUNT = struct.Struct("<I")
_RANGE = struct.Struct("<IQQ")
_LENGTH = struct.Struct("<H")
_MAX_REASON_BYTES = 600


class Attach(NamedTuple):
    """First of a connection: whose it is. ``request`` is 0."""

    request: int
    session_id: int
    token: bytes


class Guest(NamedTuple):
    """The same of a client that another server, whose session it is, lets read one namespace.

    ``until_s``: seconds since that session began. ``token``: of ``guest_token``.
    """

    request: int
    session_id: int
    namespace: bytes
    until_s: int
    token: bytes


class Attached(NamedTuple):
    """The answer to either."""

    request: int


class Get(NamedTuple):
    """Payload: the digests. ``lease_id`` 0: the server takes a lease until it is done."""

    request: int
    session_id: int
    lease_id: int
    deadline_ms: int
    flags: int


class Find(NamedTuple):
    """Which chunks are in memory? Of another server. Payload: their namespace, then the digests.

    Answered by ``Done``, with the payload of ``pack_found``.
    """

    request: int
    session_id: int
    deadline_ms: int


class Put(NamedTuple):
    """Answered by ``Ready``; then frames follow in parts, then ``Finish``."""

    request: int
    session_id: int
    deadline_ms: int
    flags: int


class Hint(NamedTuple):
    """Of all chunks of a put, before the first. Payload: a ``Hints`` of kvstore.proto."""

    request: int


class Part(NamedTuple):
    """Payload: the bytes of frame number ``chunk`` of the request, from ``offset``.

    Parts of a frame follow each other, frames too, unless a get asked for layers. ``tier`` is
    where the frame was; zeros in a put.
    """

    request: int
    frame_bytes: int
    offset: int
    chunk: int
    tier: bytes

    @property
    def tier_name(self) -> str:
        """The tier's name."""
        return self.tier.rstrip(b"\0").decode("ascii", "replace")


class Ready(NamedTuple):
    """The frames of a put may come."""

    request: int


class Cancel(NamedTuple):
    """The client wants no more of a request; the server still answers ``Done``."""

    request: int


class Finish(NamedTuple):
    """The last of a put: how many frames it had."""

    request: int
    frames: int


class Done(NamedTuple):
    """The end. So many frames were sent whole, or begun by layers, or are in the payload of the
    answer to a put or a find.
    """

    request: int
    frames: int


class Failed(NamedTuple):
    """The end by an error. Payload: its class's name, a zero byte, its text."""

    request: int


Word: TypeAlias = (
    Attach | Guest | Attached | Get | Put | Hint | Ready | Part | Cancel | Finish | Done | Failed
    | Find
)  # fmt: skip


class _Shape(NamedTuple):
    kind: type[Word]
    body: struct.Struct
    max_payload_bytes: int | None
    """None: the message has no payload."""


def _shape(kind: type[Word], body: str = "", max_payload_bytes: int | None = None) -> _Shape:
    return _Shape(kind, struct.Struct("<" + body), max_payload_bytes)


SHAPES: dict[int, _Shape] = {
    1: _shape(Attach, f"Q{TOKEN_BYTES}s"),
    2: _shape(Attached),
    3: _shape(Get, "QQII", MAX_PAYLOAD_BYTES),
    4: _shape(Put, "QII"),
    5: _shape(Part, f"QQI{TIER_BYTES}s", MAX_PAYLOAD_BYTES),
    7: _shape(Cancel),
    8: _shape(Finish, "I"),
    9: _shape(Done, "I", MAX_PAYLOAD_BYTES),
    10: _shape(Failed, "", 4096),
    11: _shape(Find, "QI", MAX_PAYLOAD_BYTES),
    12: _shape(Guest, f"Q{DIGEST_BYTES}sI{TOKEN_BYTES}s"),
    13: _shape(Hint, "", MAX_HINTS_BYTES),
    14: _shape(Ready),
}
"""By the number of the kind, which is never used again."""
_KINDS = {shape.kind: (number, shape.body) for number, shape in SHAPES.items()}


def pack(word: Word) -> bytes:
    """Return the header of a message."""
    number, body = _KINDS[type(word)]
    return _HEAD.pack(MAGIC, VERSION, number, word.request) + body.pack(*word[1:])


def unpack(header: bytes, payload_bytes: int | None = None) -> Word:
    """Parse a header; *payload_bytes* is the payload's length, None when there is none.

    Raises InvalidRequestError.
    """
    if len(header) < _HEAD.size:
        raise InvalidRequestError("header", len(header), f"at least {_HEAD.size} bytes")
    magic, version, kind, request = _HEAD.unpack_from(header)
    shape = SHAPES.get(kind)
    if magic != MAGIC or version != VERSION or shape is None:
        raise InvalidRequestError("header", (magic, version, kind), f"speak version {VERSION}")
    name, size = shape.kind.__name__.lower(), _HEAD.size + shape.body.size
    if len(header) != size:
        raise InvalidRequestError("header", len(header), f"{name} has {size} bytes")
    limit = shape.max_payload_bytes
    if (payload_bytes is None) != (limit is None):
        raise InvalidRequestError("payload", payload_bytes, f"{name} has one, or none")
    if limit is not None and payload_bytes is not None and payload_bytes > limit:
        raise InvalidRequestError("payload", payload_bytes, f"at most {limit} bytes")
    return shape.kind(request, *shape.body.unpack_from(header, _HEAD.size))


def tier_bytes(name: str) -> bytes:
    """Return a tier's name as parts carry it."""
    return name.encode("ascii", "replace")[:TIER_BYTES].ljust(TIER_BYTES, b"\0")


class Range(NamedTuple):
    """Bytes start to stop, the last not included, of the frame of digest ``index``."""

    index: int  # type: ignore[assignment]
    start: int
    stop: int


def pack_ranges(digests: bytes, ranges: Sequence[Range]) -> bytes:
    """Return the payload of a get of *ranges* of the frames of *digests*."""
    rows = b"".join(_RANGE.pack(*one) for one in ranges)
    return _COUNT.pack(len(ranges)) + rows + digests


def unpack_ranges(payload: bytes) -> tuple[bytes, list[Range]]:
    """Parse it: the digests, and the ranges. Raises InvalidRequestError for one cut short."""
    if len(payload) < _COUNT.size:
        raise InvalidRequestError("payload", len(payload), "begins with the number of ranges")
    (number,) = _COUNT.unpack_from(payload)
    stop = _COUNT.size + number * _RANGE.size
    if stop > len(payload):
        raise InvalidRequestError("ranges", number, f"{len(payload)} bytes came")
    rows = _RANGE.iter_unpack(payload[_COUNT.size : stop])
    return payload[stop:], [Range(*row) for row in rows]


def pack_skipped(skip_rows: bytes, digests: bytes) -> bytes:
    """Return the payload of a get with SKIP_ROWS."""
    return _COUNT.pack(len(skip_rows)) + skip_rows + digests


def unpack_skipped(payload: bytes) -> tuple[bytes, bytes]:
    """Parse it: the digests, and the rows. Raises InvalidRequestError for one cut short."""
    size = _COUNT.unpack_from(payload)[0] if len(payload) >= _COUNT.size else len(payload)
    end = _COUNT.size + size
    if end > len(payload):
        raise InvalidRequestError("payload", len(payload), f"its rows end at {end}")
    return payload[end:], payload[_COUNT.size : end]


def pack_outcomes(outcomes: bytes, reasons: Sequence[str]) -> bytes:
    """Return the payload that answers a put: a byte for each frame, then a text for each."""
    texts = [reason.encode()[:_MAX_REASON_BYTES] for reason in reasons]
    return outcomes + b"".join(_LENGTH.pack(len(text)) + text for text in texts)


def unpack_outcomes(count: int, payload: bytes) -> tuple[bytes, list[str]]:
    """Parse the payload that answers a put. Raises InvalidRequestError."""
    outcomes, at = payload[:count], count
    reasons = []
    for _ in range(count):
        if at + _LENGTH.size > len(payload):
            raise InvalidRequestError("payload", len(payload), f"has {count} outcomes and reasons")
        (size,) = _LENGTH.unpack_from(payload, at)
        at += _LENGTH.size
        reasons.append(payload[at : at + size].decode(errors="replace"))
        at += size
    if at != len(payload):
        raise InvalidRequestError("payload", len(payload), f"has {at} bytes")
    return outcomes, reasons


def pack_failure(name: str, text: str) -> bytes:
    """Return the payload of ``Failed``."""
    return f"{name}\0{text}".encode()[:4096]


def unpack_failure(payload: bytes) -> KVStoreError:
    """Return the error that ``Failed`` carries."""
    name, _, text = payload.decode(errors="replace").partition("\0")
    return revive(name, text)


def pack_wanted(keys: Sequence[ChunkKey]) -> bytes:
    """Return the payload that names *keys* of one namespace: that, then their digests."""
    return b"".join([keys[0][:DIGEST_BYTES], *(key[DIGEST_BYTES:] for key in keys)])


def unpack_wanted(payload: bytes, limit: int) -> list[ChunkKey]:
    """Parse it. Raises InvalidRequestError for one cut short, and for more than *limit* keys."""
    if len(payload) < DIGEST_BYTES:
        raise InvalidRequestError("payload", len(payload), "begins with a namespace")
    space = Namespace(payload[:DIGEST_BYTES])
    return keys_of_digests(payload[DIGEST_BYTES:], space, limit)


def pack_found(infos: Iterable[ChunkInfo | None]) -> bytes:
    """Return the payload that answers a find: each chunk's index row behind its length, 0 for
    one that is not in memory. What does not fit one message is left out.
    """
    rows: list[bytes] = []
    size = 0
    layout: KVLayout | None = None
    components = b""
    for info in infos:
        if info is not None and info.layout is not layout:
            layout, components = info.layout, pack_components(info.layout)
        row = b"" if info is None else pack_info(info, components)
        size += _LENGTH.size + len(row)
        if size > MAX_PAYLOAD_BYTES:
            break
        rows += [_LENGTH.pack(len(row)), row]
    return b"".join(rows)


def unpack_found(keys: Sequence[ChunkKey], payload: bytes) -> list[ChunkInfo | None]:
    """Parse the answer to a find of *keys*; None for those that are not there, or were left out.

    Raises InvalidFrameError, also when a row is of another chunk than was asked for.
    """
    found: list[ChunkInfo | None] = []
    at = 0
    while at < len(payload):
        if len(found) == len(keys) or at + _LENGTH.size > len(payload):
            raise InvalidFrameError("payload", len(payload), f"answers for {len(keys)} chunks")
        (size,) = _LENGTH.unpack_from(payload, at)
        at += _LENGTH.size
        if at + size > len(payload):
            raise InvalidFrameError("row", size, "ends behind the message")
        found.append(unpack_info(payload[at : at + size]) if size else None)
        at += size
    for key, info in zip(keys, found, strict=False):
        if info is not None and info.key != key:
            raise InvalidFrameError("key", info.key.hex(), f"asked for {key.hex()}")
    return found + [None] * (len(keys) - len(found))


GUEST_S = 300
"""A guest is let in for so long: a client that is revoked is out by then."""

_GUEST_TERMS = struct.Struct("<Q16sI")
_GUEST_PURPOSE = b"kvstore guest"


def guest_token(secret: bytes, session_id: int, namespace: bytes, until_s: int) -> bytes:
    """Return HMAC-SHA256 (RFC 2104), cut to 16 bytes, of what a guest may do under *secret*.

    The owner of a session at the other server makes one without a request to it.
    """
    terms = _GUEST_PURPOSE + _GUEST_TERMS.pack(session_id, namespace, until_s)
    return hmac.new(secret, terms, hashlib.sha256).digest()[:TOKEN_BYTES]


def is_genuine(guest: Guest, secret: bytes) -> bool:
    """Whether the owner of *secret* gave *guest* these terms."""
    token = guest_token(secret, guest.session_id, guest.namespace, guest.until_s)
    return hmac.compare_digest(token, guest.token)


# --- the reader of a get: frames out of parts


class PayloadReader(Protocol):
    """A part's payload that is still to come. All of it has to be had, in its order."""

    def __len__(self) -> int:
        """How many bytes it has in all."""

    def into(self, out: Bytes, /) -> None:
        """Fill *out* with the next of them."""

    def summed(self, out: Bytes, digest: xxh3_64, /) -> None:
        """Fill *out* with the next of them, and add what is there then to *digest*."""

    def skip(self, size_bytes: int, /) -> None:
        """Skip the next *size_bytes*."""


class BufferReader:
    """*data* that has come, had as what is still to come."""

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._at = 0

    def __len__(self) -> int:
        return len(self._data)

    def into(self, out: Bytes, /) -> None:
        """Copy the next bytes to *out*."""
        copy_bytes(out, self._data[self._at : self._at + len(out)])
        self._at += len(out)

    def summed(self, out: Bytes, digest: xxh3_64, /) -> None:
        """Copy the next bytes to *out*, and add what is there then to *digest*."""
        copy_summed(out, self._data[self._at : self._at + len(out)], digest)
        self._at += len(out)

    def skip(self, size_bytes: int, /) -> None:
        """Skip the next *size_bytes*."""
        self._at += size_bytes


Payload: TypeAlias = "Bytes | PayloadReader"


class Sink(Protocol):
    """What takes a frame's parts one after the other, instead of memory for all of it."""

    def take(self, offset: int, data: Payload, /) -> None:
        """Take the part at *offset*, whose memory is another's afterwards."""


Room = Callable[[int, int, Bytes], Bytes | Sink | None]
"""A frame's number in the request, its size and first part to where it goes; None: nowhere."""


class ReceivedFrame(NamedTuple):
    """A frame that is whole, where it was sent. Nothing of what is in memory is verified."""

    chunk: int
    tier: str
    frame: Bytes | Sink


class PartReader:
    """The parts of a get as they come: feed it what the server sends. Used by one thread."""

    def __init__(self, request: int) -> None:
        self.request = request
        self.is_over = False
        """The server has sent the end of this request."""
        self.frames = 0
        """What the end counted."""

    def take(self, word: Word, payload: Payload | None) -> Part | None:
        """Take a message; return it if it is a part.

        Messages of earlier requests are skipped. Raises the error that the server sent,
        InvalidFrameError, InvalidRequestError for what answers no get.
        """
        if word.request != self.request:
            return None
        if isinstance(word, Failed):
            self.is_over = True
            raise unpack_failure(b"" if payload is None else here(payload).tobytes())
        if isinstance(word, Done):
            self.is_over, self.frames = True, word.frames
            return None
        if not isinstance(word, Part) or payload is None:
            raise InvalidFrameError("kind", type(word).__name__, "not an answer to a get")
        return word


class FrameAssembler:
    """Whole frames out of what the server sends, none over *limit_bytes*. Used by one thread."""

    def __init__(self, request: int, limit_bytes: int, room: Room) -> None:
        self.request = request
        self._pieces = PartReader(request)
        self._limit_bytes = limit_bytes
        self._room = room
        self._chunk = 0
        self._received_bytes = 0
        self._frame_bytes = 0
        self._frame: Bytes | Sink | None = None

    @property
    def is_over(self) -> bool:
        """Whether the server has sent the end of this request."""
        return self._pieces.is_over

    def take(self, word: Word, payload: Payload | None) -> ReceivedFrame | None:
        """Take a message; return the frame that it made whole.

        Raises as ``PartReader.take``, and InvalidFrameError when parts do not follow each other.
        """
        was_over = self.is_over
        part = self._pieces.take(word, payload)
        # A frame that was begun and did not become whole was late, or dropped.
        if self.is_over and not was_over and self._pieces.frames != self._chunk:
            raise InvalidFrameError("frames", self._pieces.frames, f"{self._chunk} came")
        return None if part is None or payload is None else self._add(part, payload)

    def _add(self, part: Part, data: Payload) -> ReceivedFrame | None:
        if not part.offset:
            if not 0 < part.frame_bytes <= self._limit_bytes:
                raise InvalidFrameError("frame_bytes", part.frame_bytes, "over the limit")
        elif part.frame_bytes != self._frame_bytes:
            raise InvalidFrameError("frame_bytes", part.frame_bytes, "must not change")
        stop = part.offset + len(data)
        follows = (part.chunk, part.offset) == (self._chunk, self._received_bytes)
        if not follows or not len(data) or stop > part.frame_bytes:
            raise InvalidFrameError("offset", part.offset, "parts must follow each other")
        if not part.offset:
            self._frame_bytes = part.frame_bytes
            data = here(data)
            self._frame = self._room(part.chunk, part.frame_bytes, data)
        coming = BufferReader(data) if isinstance(data, np.ndarray) else data
        if isinstance(self._frame, np.ndarray):
            coming.into(self._frame[part.offset : stop])
        elif self._frame is not None:
            self._frame.take(part.offset, data)
        else:
            coming.skip(len(data))
        self._received_bytes = stop % part.frame_bytes
        if self._received_bytes:
            return None
        self._chunk += 1
        frame, self._frame = self._frame, None
        return None if frame is None else ReceivedFrame(part.chunk, part.tier_name, frame)


def here(payload: Payload) -> Bytes:
    """Return a payload in memory of its own, or where it has come already."""
    if isinstance(payload, np.ndarray):
        return payload
    data = np.empty(len(payload), np.uint8)
    payload.into(data)
    return data
