"""The Tier interface: frames on one medium. A tier selects no victims and knows no codec."""

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
    """Space for one frame that is not visible yet: ``place`` is its location, in the tier's own
    form, and ``reserved_bytes`` its accounted size, allocator slack included.
    """

    info: ChunkInfo
    tenant: str
    reserved_bytes: int
    place: object

    def check(self, frame: Bytes) -> None:
        """Raise InvalidRequestError unless *frame* has the reserved size."""
        if len(frame) != self.info.size_bytes:
            fix = f"write the whole frame of {self.info.size_bytes} bytes"
            raise InvalidRequestError("frame", len(frame), fix)

    def spent(self) -> InvalidRequestError:
        """Return the error for a reservation that was sealed or aborted, or is another tier's."""
        return InvalidRequestError("reservation", self.info.key.hex(), "it is spent: reserve again")


@dataclass(frozen=True, slots=True)
class TierStats:
    """A tier's usage. ``used_bytes`` includes reservations and slack."""

    capacity_bytes: int
    used_bytes: int
    chunks: int
    reservations: int


class Tier(ABC):
    """One medium with a byte capacity.

    A chunk is reserved, written, then sealed or aborted; only sealed chunks are visible.
    Every method blocks and may be called from any thread; one reservation belongs to one
    thread at a time. The caller does not delete a chunk while it reads it. Media errors raise
    TierUnavailableError. A tier sets ``name``, ``capacity_bytes`` and ``max_frame_bytes``. A new
    one must pass ``tests/contracts/tier.py``.
    """

    name: ClassVar[str]
    survives_restart: ClassVar[bool] = False
    """Whether ``scan`` after a restart finds chunks sealed before it."""
    shared: ClassVar[bool] = False
    """Whether other nodes put into the same medium, so that ``find`` may find unindexed chunks."""
    read_only: ClassVar[bool] = False
    """Whether puts are impossible."""
    reads_parts: ClassVar[bool] = True
    """Whether it pays to read parts of a frame separately."""
    reads_ahead: ClassVar[bool] = False
    """Whether ``prefetch`` does anything."""
    shares_files: bool = True
    """Whether frames may lie unencrypted in files, so that ``file_place`` may locate them."""
    granule_bytes: ClassVar[int] = 1
    """A frame takes whole granules, ``overhead_bytes`` included."""
    overhead_bytes: ClassVar[int] = 0
    capacity_bytes: int
    max_frame_bytes: int
    """The largest frame that fits an empty tier."""
    dropped_rows: int = 0
    """Stored metadata that was unusable at start."""

    @property
    def write_error(self) -> str:
        """Why puts are impossible now; empty if they are possible."""
        return ""

    def allocated_bytes(self, size_bytes: int) -> int:
        """Return the bytes that a frame of *size_bytes* takes, slack included."""
        return -(-(size_bytes + self.overhead_bytes) // self.granule_bytes) * self.granule_bytes

    @abstractmethod
    def reserve(self, info: ChunkInfo, tenant: str = DEFAULT_TENANT) -> Reservation:
        """Reserve space for a frame; of several for one key the first sealed wins. Raises
        TierFullError without changing the tier.
        """

    @abstractmethod
    def write(self, reservation: Reservation, frame: Bytes) -> None:
        """Write the whole frame, which the caller keeps unchanged until it is sealed or aborted.
        Raises InvalidRequestError for a frame of another size and for a spent reservation.
        """

    @abstractmethod
    def seal(self, reservation: Reservation, *, durable: bool = False) -> bool:
        """Make the frame visible. False, freeing the space, when its key is already sealed here.

        With *durable* a tier that survives restarts returns only once the frame would survive a
        power cut; without it a power cut may lose the frame, never damage it. On
        TierUnavailableError the space is freed and the frame is not visible.
        """

    @abstractmethod
    def abort(self, reservation: Reservation) -> None:
        """Free the space of a reservation that will not be sealed."""

    @abstractmethod
    def read(
        self, key: ChunkKey, out: Bytes, offset: int = 0, verifier: FrameVerifier | None = None
    ) -> bool:
        """Fill *out* with the frame's bytes from *offset*. False when *key* is absent.

        A whole frame is read with the *verifier* of *out*, from offset 0: it checks the bytes as
        they arrive, while they are in cache, and its ``finish`` raises if the check failed.
        Without one the bytes are unchecked, and the caller verifies them. Raises
        InvalidRequestError when *offset* and ``len(out)`` exceed the frame, and what the
        verifier's ``arriving`` raises.
        """

    def batch_key(self, key: ChunkKey) -> object:
        """Return an id shared by keys that one thread should read in sequence; None: no such."""
        return None

    def expect(self, keys: Sequence[ChunkKey]) -> None:  # noqa: B027 - optional
        """Announce that this thread reads *keys* next, whole and in this order; empty: the end.
        Other reads are only slower. Never raises.
        """

    def prefetch(self, keys: Sequence[ChunkKey]) -> None:  # noqa: B027 - optional
        """Read ahead in this order as far as space permits; absent chunks are skipped."""

    @abstractmethod
    def find(self, keys: Sequence[ChunkKey]) -> list[ChunkInfo | None]:
        """Return the metadata of each key, None for absent ones, in one round trip."""

    @abstractmethod
    def delete(self, key: ChunkKey) -> bool:
        """Delete *key* and free its space. Return whether it was present."""

    @abstractmethod
    def scan(self) -> Iterator[ChunkInfo]:
        """Yield every sealed chunk, least recently sealed first. Unknown versions are skipped."""

    @abstractmethod
    def stats(self) -> TierStats:
        """Return the tier's usage."""

    def chunks_sharing_block(self, key: ChunkKey) -> list[ChunkKey]:
        """Return the sealed chunks in *key*'s block of the medium, in order of sealing. Freeing
        all of them frees the block; empty if a medium has no blocks.
        """
        return []

    def eviction_run(self, key: ChunkKey, size_bytes: int, tenant: str) -> list[ChunkKey]:
        """Return *key* and adjacent sealed chunks whose eviction makes room for a frame of
        *size_bytes* of *tenant*; empty if the tier cannot compute it.
        """
        return []

    def file_place(self, key: ChunkKey) -> Place | None:
        """Return the location of *key*'s frame in a shareable file; None if there is none. The file
        number is never reused; the bytes are the frame's until the chunk is deleted.
        """
        return None

    def extent_file(self, extent: int, tenant: str) -> int:
        """Return a new, read-only descriptor of a file with only *tenant*'s frames; the caller
        closes it.

        Raises InvalidRequestError for a file that is gone or not shared, PermissionDeniedError for
        another tenant's, TierUnavailableError.
        """
        raise InvalidRequestError("extent", extent, f"tier {self.name!r} shares no files")

    def tenant_of(self, key: ChunkKey) -> str:
        """Return the tenant of a sealed chunk, if the tier stores it."""
        return DEFAULT_TENANT

    def load_s(self, key: ChunkKey, size_bytes: int) -> float | None:
        """Return the estimated seconds to read *key*; None if it depends on its size only."""
        return None

    def peer_place(self, key: ChunkKey, peers: Collection[int]) -> Place | None:
        """Return the place of *key* on one of *peers*, server numbers that the reader can read."""
        return None

    def lenders(self, keys: Sequence[ChunkKey]) -> set[int]:
        """Return the numbers of the servers from which readers may read some of *keys*."""
        return set()

    def note_corrupt(self, key: ChunkKey) -> None:  # noqa: B027 - optional
        """Record that the bytes read for *key* were not its frame."""

    def flush(self) -> None:  # noqa: B027 - optional
        """Make every sealed frame durable, if the medium can."""

    @abstractmethod
    def close(self) -> None:
        """Release the medium. Idempotent."""


def check_range(frame_bytes: int, offset: int, size_bytes: int) -> None:
    """Raise InvalidRequestError for a range outside its frame."""
    if offset < 0 or offset + size_bytes > frame_bytes:
        raise InvalidRequestError(
            "offset", (offset, size_bytes), f"stay within the frame's {frame_bytes} bytes"
        )
