"""Connections to a peer: gRPC opens a session there, its memory is read over TCP."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import grpc

from kvstore.proto import bulk, kvstore_pb2_grpc
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    DeadlineError,
    InvalidFrameError,
    InvalidRequestError,
    LeaseExpiredError,
    TierUnavailableError,
)
from kvstore.proto.frame import MAX_FRAME_BYTES
from kvstore.proto.framing import FramedSocket, connect_wire
from kvstore.proto.types import DIGEST_BYTES, ChunkInfo, ChunkKey
from kvstore.server.settings.settings import Settings
from kvstore.server.settings.values import is_loopback, parse_endpoint

STEP_BYTES = 1 << 19
"""Bytes received before they are summed: larger steps would leave the cache."""
MOST_SILENCES = 20
"""Time limit of a read, in timeouts for its next bytes."""
MAX_GET_MS = 600_000
"""Largest deadline that servers accept."""
_LATE_S = 0.02
"""Grace for an answer that has arrived by its deadline but is read after those of other peers."""


Dial = Callable[[str, str, float], pb.OpenPeerResponse]
"""(peer's address, this node's id, timeout in seconds) -> session there."""


def dial_peer(config: Settings, address: str, node_id: str, within_s: float) -> pb.OpenPeerResponse:
    """Open a session at *address*, host:port. Raises TierUnavailableError, InvalidRequestError."""
    metadata = key_metadata(config, address)
    with _channel(config, address) as channel:
        try:
            reply: pb.OpenPeerResponse = kvstore_pb2_grpc.KVStoreStub(channel).OpenPeer(
                pb.OpenPeerRequest(node_id=node_id), timeout=within_s, metadata=metadata
            )
        except grpc.RpcError as error:
            why = f"{address}: {error.code().name}: {(error.details() or '')[:200]}"
            raise TierUnavailableError("peer", why) from None
    reply.bulk_address = reply.bulk_address.replace("*", address.rpartition(":")[0])
    if not reply.bulk_address.startswith("tcp://"):
        raise TierUnavailableError("peer", f"{address}: has no bulk channel")
    reply.heartbeat_ms = max(1, reply.heartbeat_ms)
    reply.max_frame_bytes = min(reply.max_frame_bytes, MAX_FRAME_BYTES)
    reply.max_batch_chunks = max(1, reply.max_batch_chunks)
    return reply


def key_metadata(config: Settings, address: str) -> tuple[tuple[str, str], ...] | None:
    """Return the credentials for *address*, if any. Raises InvalidRequestError on plain text."""
    path = config.peer_key
    if path is None:
        return None
    if not (config.peer_ca or config.insecure or is_loopback(parse_endpoint(address)[0])):
        fix = "the key would be sent in plain text: give --peer-ca, or --insecure"
        raise InvalidRequestError("peer_key", address, fix)
    token = _read("peer_key", path).strip().decode("ascii", "replace")
    if not token.isascii() or not token.isprintable():
        raise InvalidRequestError("peer_key", str(path), "holds no API key")
    return (("authorization", f"Bearer {token}"),)


def _channel(config: Settings, address: str) -> grpc.Channel:
    """Return a channel to *address*, encrypted if there is a CA for peers."""
    options: list[tuple[str, object]] = [("grpc.enable_http_proxy", 0)]
    if config.peer_ca is None:
        return grpc.insecure_channel(address, options)
    if config.peer_name:
        options.append(("grpc.ssl_target_name_override", config.peer_name))
    names = ("peer_ca", "tls_key", "tls_cert")
    files = [_read(name, path) if (path := getattr(config, name)) else None for name in names]
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(*files), options)


def _read(field: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        fix = f"{error.strerror}; name a file that this user can read"
        raise InvalidRequestError(field, str(path), fix) from None


class StreamLink:
    """One TCP connection to a peer, one request at a time. Not thread-safe.

    An incomplete read closes the link. *clock* returns monotonic seconds.
    """

    def __init__(self, session: pb.OpenPeerResponse, clock: Callable[[], float]) -> None:
        self.session = session
        self._clock = clock
        self._wire: FramedSocket | None = None
        self._requests = 0
        self._is_pending = False  # whether the answer to the last request is incomplete
        self._wanted: list[ChunkInfo] = []  # by the last request, in order of arrival
        self._at = 0  # index of the last one read

    def connect(self, within_s: float) -> None:
        """Connect and attach. Raises TierUnavailableError, DeadlineError, the peer's own errors."""
        session = self.session
        if within_s <= 0:
            raise DeadlineError(f"{session.bulk_address}: no time left to connect")
        deadline = self._clock() + within_s
        wire = connect_wire(session.bulk_address, session.bulk_certificate, deadline, self._clock)
        self._wire, self._is_pending = wire, True
        try:
            wire.set_timeout(max(0.001, deadline - self._clock()), deadline)
            attach = pb.StreamAttach(session_id=session.session_id, token=session.attach_token)
            wire.send(pb.StreamMessage(attach=attach))
            answer, _ = wire.receive()
            if answer.HasField("failed"):
                raise bulk.error_of(answer.failed)
            if not answer.ready:
                kind = answer.WhichOneof("body")
                raise InvalidRequestError("kind", kind, "not an answer to attach")
            self._is_pending = False
        finally:
            self._close_if_pending()

    def begin_find(self, keys: Sequence[ChunkKey], deadline: float) -> None:
        """Request which of *keys*, of one namespace, are in the peer's memory by *deadline*.

        Raises DeadlineError, LeaseExpiredError when the peer has hung up since the last request.
        """
        left_s = max(_LATE_S, deadline - self._clock())
        find = pb.FindRequest(deadline_ms=max(1, int(1000 * left_s)), **self._naming(keys))
        self._wanted = []
        self._begin(pb.StreamMessage(find=find), left_s)

    def end_find(self, keys: Sequence[ChunkKey], deadline: float) -> list[ChunkInfo | None]:
        """Return the peer's chunks among the *keys* of ``begin_find``. Raises as that, the peer's
        own errors, and InvalidFrameError or InvalidRequestError for an invalid answer.
        """
        wire, now = self._wire, self._clock()
        assert wire is not None
        wire.set_timeout(max(_LATE_S, deadline - now), max(deadline, now) + _LATE_S)
        try:
            answer, _ = self._receive(wire, 0)
            if not answer.HasField("found"):
                kind = answer.WhichOneof("body")
                raise InvalidFrameError("kind", kind, "not an answer to a find")
            self._is_pending = False
            return bulk.found_infos(keys, answer.found)
        finally:
            self._close_if_pending()

    def read(
        self,
        info: ChunkInfo,
        out: Bytes,
        offset: int,
        silence_s: float,
        following: Sequence[ChunkInfo] = (),
    ) -> Generator[int, None, None]:
        """Fill *out* with the frame of *info* from byte *offset*; yield how many bytes arrived.

        Nothing is yielded when the peer does not have it in memory. The bytes are not verified.
        The whole frames *following* are part of the same request, and must be read next, in
        order, while ``coming`` names one. Raises as ``end_find``; DeadlineError when no byte
        arrives for *silence_s*, or not all within MOST_SILENCES times that.
        """
        end, arrived, is_whole = offset + len(out), 0, False
        sizes = {len(out), info.size_bytes}
        if self.coming == info.key and sizes == {self._wanted[self._at + 1].size_bytes}:
            self._at += 1
        else:
            wanted = [info, *following]
            most_s = len(wanted) * MOST_SILENCES * silence_s
            ranges = [pb.FrameRange(index=at, stop=one.size_bytes) for at, one in enumerate(wanted)]
            ranges[0] = pb.FrameRange(start=offset, stop=end)
            deadline_ms = min(max(1, int(1000 * most_s)), MAX_GET_MS)
            names = self._naming([one.key for one in wanted])
            get = pb.GetRequest(deadline_ms=deadline_ms, ranges=ranges, **names)
            self._begin(pb.StreamMessage(get=get), silence_s)
            self._wanted, self._at = wanted, 0
        wire = self._wire
        assert wire is not None
        wire.set_timeout(silence_s, self._clock() + MOST_SILENCES * silence_s)
        try:
            while self._is_pending and (self.coming is None or arrived < len(out)):
                answer, size_bytes = self._receive(wire, arrived)
                if answer.HasField("done"):
                    self._is_pending = False
                    break
                self._check(answer, size_bytes, offset + arrived, end)
                for start in range(0, size_bytes, STEP_BYTES):
                    stop = min(start + STEP_BYTES, size_bytes)
                    wire.fill(out[arrived + start : arrived + stop])
                    yield arrived + stop
                arrived += size_bytes
            if arrived not in (0, len(out)):
                raise InvalidFrameError("frame_bytes", arrived, f"{len(out)} were requested")
            is_whole = True
        finally:
            if not is_whole or self.coming is None:
                self._close_if_pending()

    @property
    def coming(self) -> ChunkKey | None:
        """The next frame of the current request; None if there is none."""
        is_more = self._is_pending and self._at + 1 < len(self._wanted)
        return self._wanted[self._at + 1].key if is_more else None

    def _naming(self, keys: Sequence[ChunkKey]) -> dict[str, Any]:
        return {
            "session_id": self.session.session_id,
            "key_namespace": keys[0][:DIGEST_BYTES],
            "digests": b"".join(key[DIGEST_BYTES:] for key in keys),
        }

    def _begin(self, message: pb.StreamMessage, silence_s: float) -> None:
        """Send a request; close the link if that fails."""
        if self._is_pending or self._wire is None:
            raise InvalidRequestError("request", self._requests, "connect anew")
        self._requests += 1
        message.request = self._requests
        self._is_pending = True
        self._wire.set_timeout(silence_s, self._clock() + MOST_SILENCES * silence_s)
        try:
            self._wire.send(message)
        except TierUnavailableError as error:
            self.close()
            raise LeaseExpiredError(str(error)) from None
        except DeadlineError:
            self.close()
            raise

    def _receive(self, wire: FramedSocket, arrived: int) -> tuple[pb.StreamMessage, int]:
        """Return the next message of the answer, and the size of its payload."""
        try:
            message, size_bytes = wire.receive()
        except TierUnavailableError as error:
            if arrived:
                raise
            raise LeaseExpiredError(str(error)) from None
        if message.request != self._requests:
            raise InvalidFrameError("request", message.request, f"{self._requests} was requested")
        if message.HasField("failed"):
            self._is_pending = False
            raise bulk.error_of(message.failed)
        return message, size_bytes

    def _check(self, answer: pb.StreamMessage, size_bytes: int, at: int, end: int) -> None:
        """Raise InvalidFrameError unless *answer* continues the frame at byte *at*."""
        if not answer.HasField("part"):
            kind = answer.WhichOneof("body")
            raise InvalidFrameError("kind", kind, "not an answer to the request")
        part, wanted = answer.part, self._wanted[self._at].size_bytes
        if part.frame_bytes != wanted:
            raise InvalidFrameError("frame_bytes", part.frame_bytes, f"{wanted}")
        is_next = (part.index, part.offset) == (self._at, at)
        if not is_next or not size_bytes or at + size_bytes > end:
            raise InvalidFrameError("offset", (part.index, part.offset), f"expected {at}")

    def _close_if_pending(self) -> None:
        if self._is_pending:
            self.close()

    @property
    def is_open(self) -> bool:
        """Whether it can be reused: connected, without a pending answer."""
        return self._wire is not None and not self._is_pending

    def hang_up(self) -> None:
        """Wake a thread that reads from it; ``close`` is still required."""
        if (wire := self._wire) is not None:
            wire.hang_up()

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._is_pending = False
        if self._wire is not None:
            self._wire.close()
            self._wire = None
