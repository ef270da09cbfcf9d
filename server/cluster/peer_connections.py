"""A StreamLink: one TCP connection to another server, over which its memory is asked and read."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from kvstore.proto import bulk
from kvstore.proto.buffers import Bytes
from kvstore.proto.bulk import pack_wanted, unpack_found
from kvstore.proto.errors import (
    DeadlineError,
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    TierUnavailableError,
)
from kvstore.proto.framing import FramedSocket, connect_wire
from kvstore.proto.types import ChunkInfo, ChunkKey

STEP_BYTES = 1 << 19
"""What is received before it is summed: larger steps have left the cache by then."""
MOST_SILENCES = 20
"""A read takes as many waits for its next bytes at most."""
MAX_GET_MS = 600_000
"""What servers take for a deadline."""
_LATE_S = 0.02
"""For an answer that has come when its time is up: others may have been waited for before."""


@dataclass(frozen=True, slots=True)
class PeerTerms:
    """What the other server said when it opened a session for this one.

    ``address`` is where its streams are, tcp://host:port; with a ``certificate``, in DER, they are
    encrypted.
    """

    address: str
    certificate: bytes
    session_id: int
    token: bytes
    heartbeat_ms: int
    max_frame_bytes: int
    max_batch_chunks: int


class StreamLink:
    """One request at a time. Not thread-safe; *clock* returns monotonic seconds.

    ``reach`` connects. A read that does not come to its end leaves the link closed.
    """

    def __init__(self, terms: PeerTerms, clock: Callable[[], float]) -> None:
        self.terms = terms
        self._clock = clock
        self._wire: FramedSocket | None = None
        self._requests = 0
        self._is_asking = False
        self._asked: list[ChunkInfo] = []
        """By the last request, in the order in which they come."""
        self._at = 0
        """Which of them was read last."""

    def reach(self, within_s: float) -> None:
        """Connect, and say whose connection it is.

        Raises TierUnavailableError, DeadlineError, the peer's own errors.
        """
        terms = self.terms
        if within_s <= 0:
            raise DeadlineError(f"{terms.address}: there is no time to connect")
        deadline = self._clock() + within_s
        wire = self._wire = connect_wire(terms.address, terms.certificate, deadline, self._clock)
        self._is_asking = True
        try:
            wire.set_timeout(max(0.001, deadline - self._clock()), deadline)
            wire.send(bulk.Attach(0, terms.session_id, terms.token))
            word, size_bytes = wire.receive()
            if isinstance(word, bulk.Failed):
                raise bulk.unpack_failure(wire.take(size_bytes))
            if not isinstance(word, bulk.Attached):
                raise InvalidRequestError("kind", type(word).__name__, "no answer to attach")
            self._is_asking = False
        finally:
            self._settle()

    def begin_find(self, keys: Sequence[ChunkKey], deadline: float) -> None:
        """Ask which of *keys*, of one namespace, are in the peer's memory; ``end_find`` waits.

        *deadline* is a point on the clock. Raises DeadlineError, LeaseExpiredError when the peer
        hung up since the last request.
        """
        left_s = max(_LATE_S, deadline - self._clock())
        wire = self._begin(left_s)
        self._asked = []
        word = bulk.Find(self._requests, self.terms.session_id, max(1, int(1000 * left_s)))
        try:
            self._say(wire, word, pack_wanted(keys))
        except KVStoreError:
            self.close()
            raise

    def end_find(self, keys: Sequence[ChunkKey], deadline: float) -> list[ChunkInfo | None]:
        """Return what the peer knows of the *keys* of ``begin_find``.

        Raises as ``begin_find``, the peer's own errors, and InvalidFrameError or
        InvalidRequestError for what is no answer to that.
        """
        wire, now = self._wire, self._clock()
        assert wire is not None
        wire.set_timeout(max(_LATE_S, deadline - now), max(deadline, now) + _LATE_S)
        try:
            part, _, found = self._answer(wire, 0)
            if part is not None:
                raise InvalidFrameError("kind", type(part).__name__, "not an answer to a find")
            return unpack_found(keys, found)
        finally:
            self._settle()

    def read(
        self,
        info: ChunkInfo,
        out: Bytes,
        offset: int,
        silence_s: float,
        following: Sequence[ChunkInfo] = (),
    ) -> Generator[int, None, None]:
        """Fill *out* with the frame of *info* from byte *offset*; yield how many bytes have come.

        Nothing is yielded when the peer does not have it in memory. The bytes are not verified.
        The whole frames *following* are asked for in the same request, and are to be read next,
        in that order, while ``coming`` names one. Raises DeadlineError when nothing comes for
        *silence_s*, or not all of it in MOST_SILENCES such times; LeaseExpiredError when the peer
        hung up since the last request, its own errors, and InvalidFrameError or
        InvalidRequestError for parts that are not of this.
        """
        if self._wire is not None and self._goes_on_with(info, out):
            self._wire.set_timeout(silence_s, self._clock() + MOST_SILENCES * silence_s)
            wire = self._wire
        else:
            wire = self._begin(silence_s)
            self._asked = [info, *following]
            self._at = -1
        self._at += 1
        arrived = 0
        is_whole = False
        try:
            if not self._at:
                self._ask(wire, bulk.Range(0, offset, offset + len(out)), silence_s)
            is_last = self._at == len(self._asked) - 1
            while self._is_asking and (is_last or arrived < len(out)):
                word, size_bytes, _ = self._answer(wire, arrived)
                if word is None:
                    continue
                self._check(word, size_bytes, offset + arrived, offset + len(out))
                for start in range(0, size_bytes, STEP_BYTES):
                    stop = min(start + STEP_BYTES, size_bytes)
                    wire.fill(out[arrived + start : arrived + stop])
                    yield arrived + stop
                arrived += size_bytes
            if arrived not in (0, len(out)):
                raise InvalidFrameError("frame_bytes", arrived, f"{len(out)} were asked for")
            is_whole = True
        finally:
            if not is_whole or self.coming is None:
                self._settle()

    @property
    def coming(self) -> ChunkKey | None:
        """The next frame of a request that goes on; None: none does."""
        is_more = self._is_asking and self._at + 1 < len(self._asked)
        return self._asked[self._at + 1].key if is_more else None

    def _goes_on_with(self, info: ChunkInfo, out: Bytes) -> bool:
        if self.coming != info.key:
            return False
        return len(out) == info.size_bytes == self._asked[self._at + 1].size_bytes

    def _begin(self, silence_s: float) -> FramedSocket:
        if self._is_asking or self._wire is None:
            raise InvalidRequestError("request", self._requests, "connect anew")
        self._requests += 1
        self._is_asking = True
        self._wire.set_timeout(silence_s, self._clock() + MOST_SILENCES * silence_s)
        return self._wire

    def _ask(self, wire: FramedSocket, first: bulk.Range, silence_s: float) -> None:
        most_s = len(self._asked) * MOST_SILENCES * silence_s
        deadline_ms = min(max(1, int(1000 * most_s)), MAX_GET_MS)
        sizes = [one.size_bytes for one in self._asked]
        spans = [first, *(bulk.Range(at, 0, sizes[at]) for at in range(1, len(sizes)))]
        flags = bulk.PEER | bulk.RANGES
        ask = bulk.Get(self._requests, self.terms.session_id, 0, deadline_ms, flags)
        keys = [one.key for one in self._asked]
        self._say(wire, ask, bulk.pack_ranges(pack_wanted(keys), spans))

    def _say(self, wire: FramedSocket, word: bulk.Word, payload: bytes) -> None:
        try:
            wire.send(word, payload)
        except TierUnavailableError as error:
            raise LeaseExpiredError(str(error)) from None

    def _answer(self, wire: FramedSocket, arrived: int) -> tuple[bulk.Part | None, int, bytes]:
        """Return the next part and its size; None for the end, and what was said with it."""
        try:
            word, size_bytes = wire.receive()
        except TierUnavailableError as error:
            if arrived:
                raise
            raise LeaseExpiredError(str(error)) from None
        if word.request != self._requests:
            raise InvalidFrameError("request", word.request, f"{self._requests} was asked")
        if isinstance(word, bulk.Part):
            return word, size_bytes, b""
        said = wire.take(size_bytes)
        if isinstance(word, bulk.Failed):
            self._is_asking = False
            raise bulk.unpack_failure(said)
        if not isinstance(word, bulk.Done):
            raise InvalidFrameError("kind", type(word).__name__, "not an answer to what was asked")
        self._is_asking = False
        return None, 0, said

    def _check(self, part: bulk.Part, size_bytes: int, at: int, end: int) -> None:
        """Raise InvalidFrameError unless *part* is what follows of the frame at byte *at*."""
        wanted = self._asked[self._at].size_bytes
        if part.frame_bytes != wanted:
            raise InvalidFrameError("frame_bytes", part.frame_bytes, f"{wanted}")
        is_next = (part.chunk, part.offset) == (self._at, at)
        if not is_next or not size_bytes or at + size_bytes > end:
            raise InvalidFrameError("offset", (part.chunk, part.offset), f"{at} was to follow")

    def _settle(self) -> None:
        """Hang up unless the last request has had its answer."""
        if self._is_asking:
            self.close()

    @property
    def is_open(self) -> bool:
        """Whether it may be used again as it is: connected, and nothing is being answered."""
        return self._wire is not None and not self._is_asking

    def hang_up(self) -> None:
        """Wake who waits in a read of it, from another thread; ``close`` is still due."""
        wire = self._wire
        if wire is not None:
            wire.hang_up()

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._is_asking = False
        if self._wire is not None:
            self._wire.close()
            self._wire = None
