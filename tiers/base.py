"""The Tier interface: frames on one medium. A tier picks no victim and knows no codec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.proto.unix_socket import Place

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room for one frame that nobody can see yet: ``place`` is the tier's own word for where, and
    ``reserved_bytes`` what it accounts for it, allocator slack included.
    """

    info: ChunkInfo
    tenant: str
    reserved_bytes: int
    place: object

    def check(self, frame: Bytes) -> None:
        """Raise InvalidRequestError for a frame that is not of the size that was reserved."""
        if len(frame) != self.info.size_bytes:
            fix = f"write the whole frame of {self.info.size_bytes} bytes"
            raise InvalidRequestError("frame", len(frame), fix)

    def spent(self) -> InvalidRequestError:
        """Return the error for one that was sealed or aborted, or is another tier's."""
        return InvalidRequestError("reservation", self.info.key.hex(), "it is spent: reserve anew")


@dataclass(frozen=True, slots=True)
class TierStats:
    """A tier's own count of itself. ``used_bytes`` includes reservations and slack."""

    capacity_bytes: int
    used_bytes: int
    chunks: int
    reservations: int


class Tier(ABC):
    """One medium with a byte capacity.

    A chunk is reserved, written, then sealed or aborted; only sealed chunks are visible.
    Every method blocks and may be called from any thread; one reservation belongs to one
    thread at a time. The caller does not delete a chunk while it reads it. Media errors come
    as TierUnavailableError. A tier sets ``name``, ``capacity_bytes`` and ``max_frame_bytes``. A new
    one is done when it passes ``tests/contracts/tier.py``.
    """

    name: ClassVar[str]
    survives_restart: ClassVar[bool] = False
    """Whether ``scan`` finds after a restart what was sealed before it."""
    shared: ClassVar[bool] = False
    """Whether others put into the same medium, so that ``find`` may know more than the index."""
    read_only: ClassVar[bool] = False
    """Whether nothing can be put here."""
    reads_parts: ClassVar[bool] = True
    """Whether parts of a frame are worth reading one by one."""
    reads_ahead: ClassVar[bool] = False
    """Whether ``prefetch`` does anything."""
    shares_files: bool = True
    """Whether frames may lie in files as they are, for ``file_place`` to say where."""
    granule_bytes: ClassVar[int] = 1
    """A frame takes whole ones, ``overhead_bytes`` included."""
    overhead_bytes: ClassVar[int] = 0
    capacity_bytes: int
    max_frame_bytes: int
    """The largest frame that fits an empty tier."""
    dropped_rows: int = 0
    """What the tier had noted of its chunks and could not use when it started."""

    @property
    def write_error(self) -> str:
        """Why nothing can be put here now; empty while it can."""
        return ""

    def allocated_bytes(self, size_bytes: int) -> int:
        """Bytes a frame of *size_bytes* takes here, slack included."""
        return -(-(size_bytes + self.overhead_bytes) // self.granule_bytes) * self.granule_bytes

    @abstractmethod
    def reserve(self, info: ChunkInfo, tenant: str = DEFAULT_TENANT) -> Reservation:
        """Take room for a frame; of several of one key the first that is sealed wins. Raises
        TierFullError, leaving the tier as it was.
        """

    @abstractmethod
    def write(self, reservation: Reservation, frame: Bytes) -> None:
        """Put the whole frame, which stays as it is until it is sealed or aborted, into its room.
        Raises InvalidRequestError for a frame of another size and for a spent reservation.
        """

    @abstractmethod
    def seal(self, reservation: Reservation, *, durable: bool = False) -> bool:
        """Make the frame visible. False, freeing the room, when its key is already sealed here.

        With *durable* a tier that survives restarts returns only once the frame would survive a
        power cut; without it the frame may be lost then, never damaged. On TierUnavailableError
        the room is freed and nothing is visible.
        """

    @abstractmethod
    def abort(self, reservation: Reservation) -> None:
        """Free the room of a reservation that will not be sealed."""

    @abstractmethod
    def read(
        self, key: ChunkKey, out: Bytes, offset: int = 0, verifier: FrameVerifier | None = None
    ) -> bool:
        """Fill *out* with the frame's bytes from *offset*. False when *key* is absent.

        A whole frame is read with the *verifier* of *out*, from offset 0: it checks the bytes as
        they come, while they are in cache, and its ``finish`` raises what is wrong with them.
        Without one the bytes are as the medium gives them: the caller verifies what it read.
        Raises InvalidRequestError when *offset* and ``len(out)`` exceed the frame, and what the
        verifier's ``arriving`` raises.
        """

    def batch_key(self, key: ChunkKey) -> object:
        """Return what *key* shares with others best read in a row by one thread; None: nothing."""
        return None

    def expect(self, keys: Sequence[ChunkKey]) -> None:  # noqa: B027 - a medium may not care
        """Take note that this thread reads *keys* next, whole and in this order; none end its row.
        Reading otherwise costs time alone. Never raises.
        """

    def prefetch(self, keys: Sequence[ChunkKey]) -> None:  # noqa: B027 - a medium may not care
        """Read ahead in this order what there is room for; absent chunks are skipped."""

    @abstractmethod
    def find(self, keys: Sequence[ChunkKey]) -> list[ChunkInfo | None]:
        """Return what is known of each key, None for absent ones, in one round trip."""

    @abstractmethod
    def delete(self, key: ChunkKey) -> bool:
        """Forget *key* and free its room. Return whether it was there."""

    @abstractmethod
    def scan(self) -> Iterator[ChunkInfo]:
        """Yield every sealed chunk, least recently sealed first. Unknown versions are skipped."""

    @abstractmethod
    def stats(self) -> TierStats:
        """Count the tier."""

    def chunks_sharing_block(self, key: ChunkKey) -> list[ChunkKey]:
        """Return the sealed chunks that share *key*'s piece of the medium, in order of sealing.
        Freeing all of them frees the piece; empty where a medium has no such pieces.
        """
        return []

    def eviction_run(self, key: ChunkKey, size_bytes: int, tenant: str) -> list[ChunkKey]:
        """Return the sealed chunks beside *key*, itself included, that are in the way of a frame
        of *size_bytes* for *tenant*; empty where the tier cannot tell.
        """
        return []

    def file_place(self, key: ChunkKey) -> Place | None:
        """Return where *key*'s frame lies in a file that can be shared; None where it does not. The
        number never means another file; the bytes are the frame's while the chunk is not deleted.
        """
        return None

    def extent_file(self, extent: int, tenant: str) -> int:
        """Return a new, read-only descriptor of a file with *tenant*'s frames alone, to be closed.

        Raises InvalidRequestError for a file that is gone or not shared, PermissionDeniedError for
        another tenant's, TierUnavailableError.
        """
        raise InvalidRequestError("extent", extent, f"tier {self.name!r} shares no files")

    def tenant_of(self, key: ChunkKey) -> str:
        """Return whom a sealed chunk was reserved for, as far as the tier keeps that."""
        return DEFAULT_TENANT

    def load_s(self, key: ChunkKey, size_bytes: int) -> float | None:
        """Return the estimated seconds to read *key*; None where only its size decides."""
        return None

    def peer_place(self, key: ChunkKey, peers: Collection[int]) -> Place | None:
        """Return at which of *peers*, numbers of servers, a reader finds *key* itself."""
        return None

    def lenders(self, keys: Sequence[ChunkKey]) -> set[int]:
        """Return the numbers of the servers where readers may read some of *keys* themselves."""
        return set()

    def note_corrupt(self, key: ChunkKey) -> None:  # noqa: B027 - mostly nobody is to blame
        """Take note that what was read of *key* was not its frame."""

    def flush(self) -> None:  # noqa: B027 - a medium may have nothing to do
        """Make every sealed frame durable, as far as the medium does so at all."""

    @abstractmethod
    def close(self) -> None:
        """Release the medium. Idempotent."""


def check_range(frame_bytes: int, offset: int, size_bytes: int) -> None:
    """Raise InvalidRequestError for a range that leaves its frame."""
    if offset < 0 or offset + size_bytes > frame_bytes:
        raise InvalidRequestError(
            "offset", (offset, size_bytes), f"stay within the frame's {frame_bytes} bytes"
        )
