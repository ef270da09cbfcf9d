"""Whose each extent of the disk tier is, what lies in it and what is free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.tiers.disk_folder import GRANULE_BYTES, ExtentFolder
from kvstore.tiers.extents import Extent
from kvstore.tiers.spot_table import NO_AREA, SpotTable


class Located(NamedTuple):
    """Where a sealed chunk lies."""

    extent: Extent
    offset: int
    size_bytes: int


class Neighbour(NamedTuple):
    """A sealed chunk among those of its extent."""

    offset: int
    size_bytes: int
    key: ChunkKey


class DiskSpace:
    """Room in the extents, handed out so that each extent has the frames of one tenant.

    An extent without an owner is blank: nothing was ever written to it. Folders are filled in
    proportion to their size. The tier's lock guards every call; none does I/O.
    """

    def __init__(
        self,
        folders: Sequence[ExtentFolder],
        by_number: Mapping[int, Extent],
        is_usable: Callable[[ExtentFolder], bool],
    ) -> None:
        self.capacity_bytes = sum(folder.capacity_bytes for folder in folders)
        self.used_bytes = 0
        self.missing: list[tuple[ExtentFolder, int]] = []
        """Extents that were deleted and could not be made anew yet."""
        self._sealed = SpotTable()
        """Areas are the numbers of extents and one: none has the number of no area."""
        self._by_number = by_number
        self._folders = list(folders)
        self._is_usable = is_usable
        self._used = dict.fromkeys(self._folders, 0)
        self._blank: dict[ExtentFolder, list[Extent]] = {folder: [] for folder in self._folders}
        self._owned: dict[tuple[str, ExtentFolder], list[Extent]] = {}
        self._last: dict[tuple[str, ExtentFolder], Extent] = {}
        """Where a tenant last found room: a commit then has few files to sync."""

    def add_blank(self, extent: Extent) -> None:
        """Let anyone have *extent*."""
        extent.owner = None
        self._blank[extent.folder].append(extent)

    def give(self, extent: Extent, tenant: str) -> None:
        """Make *tenant* the owner of an extent that is in no list yet."""
        extent.owner = tenant
        self._owned.setdefault((tenant, extent.folder), []).append(extent)

    def allocate(self, tenant: str, size_bytes: int) -> tuple[Extent, int, bool] | None:
        """Take room for a frame: the extent, the offset, and whether the extent is new to
        the tenant. None when there is none, however much is free elsewhere.
        """
        for folder in self._by_fill():
            extent = self._fitting(tenant, folder, size_bytes)
            is_new = extent is None
            if extent is None:
                extent = self._take_blank(tenant, folder, size_bytes)
            if extent is not None:
                offset = extent.holes.allocate(size_bytes)
                assert offset is not None
                self._count(extent, size_bytes)
                self._last[tenant, folder] = extent
                return extent, offset, is_new
        return None

    def _by_fill(self) -> list[ExtentFolder]:
        usable = [folder for folder in self._folders if self._is_usable(folder)]
        if len(usable) < 2:
            return usable
        return sorted(usable, key=lambda folder: self._used[folder] / folder.capacity_bytes)

    def _fitting(self, tenant: str, folder: ExtentFolder, size_bytes: int) -> Extent | None:
        last = self._last.get((tenant, folder))
        if last is not None and last.holes.largest_free_bytes >= size_bytes:
            return last
        for extent in self._owned.get((tenant, folder), ()):
            if extent.holes.largest_free_bytes >= size_bytes:
                return extent
        return None

    def _take_blank(self, tenant: str, folder: ExtentFolder, size_bytes: int) -> Extent | None:
        for at, extent in enumerate(self._blank[folder]):
            if extent.size_bytes >= size_bytes:
                del self._blank[folder][at]
                self.give(extent, tenant)
                return extent
        return None

    def take_idle(self, tenant: str, size_bytes: int) -> Extent | None:
        """Take an empty extent of another tenant out of use, to be replaced; None if there is
        none of at least *size_bytes*.
        """
        for (owner, folder), extents in self._owned.items():
            if owner == tenant or not self._is_usable(folder):
                continue
            for extent in extents:
                is_idle = not (extent.holes.used_bytes or extent.users)
                if is_idle and extent.size_bytes >= size_bytes:
                    self._disown(extent)
                    return extent
        return None

    def _disown(self, extent: Extent) -> None:
        assert extent.owner is not None
        name = (extent.owner, extent.folder)
        self._owned[name].remove(extent)
        if not self._owned[name]:
            del self._owned[name]
        if self._last.get(name) is extent:
            del self._last[name]

    def claim(self, extent: Extent, offset: int, size_bytes: int) -> bool:
        """Take exactly the range of a frame that was found; False if any of it is taken."""
        is_free = extent.holes.reserve_at(offset, size_bytes)
        if is_free:
            self._count(extent, extent.holes.rounded(size_bytes))
        return is_free

    def free(self, extent: Extent, offset: int, size_bytes: int) -> None:
        """Give back the room of a frame."""
        extent.holes.free_range(offset, size_bytes)
        self._count(extent, -extent.holes.rounded(size_bytes))

    def _count(self, extent: Extent, size_bytes: int) -> None:
        self.used_bytes += size_bytes
        self._used[extent.folder] += size_bytes

    # --- chunks

    def put(self, info: ChunkInfo, extent: Extent, offset: int) -> None:
        """A chunk is sealed there that was nowhere."""
        self._sealed.seal(info, extent.number + 1, offset)

    def locate(self, key: ChunkKey) -> Located | None:
        """Return where a sealed chunk lies; None when absent."""
        area, offset, size_bytes = self._sealed.spot(self._sealed.find(key))
        if area == NO_AREA:
            return None
        return Located(self._by_number[area - 1], offset, size_bytes)

    def info(self, key: ChunkKey) -> ChunkInfo | None:
        """Return the description of a sealed chunk; None when absent."""
        return self._sealed.info_of(key)

    def keys_in(self, extent: Extent) -> list[ChunkKey]:
        """Return the chunks of an extent, in order of sealing."""
        return self._sealed.keys_in(extent.number + 1)

    def neighbours(self, extent: Extent) -> list[Neighbour]:
        """Return the chunks of an extent with where they lie, in order of sealing."""
        spot = self._sealed.spot
        return [Neighbour(*spot(self._sealed.find(key))[1:], key) for key in self.keys_in(extent)]

    def remove(self, key: ChunkKey) -> bool:
        """Forget a chunk and free its room. Return whether it was there."""
        row = self._sealed.find(key)
        area, offset, size_bytes = self._sealed.spot(row)
        if area == NO_AREA:
            return False
        self._sealed.remove(row)
        self.free(self._by_number[area - 1], offset, size_bytes)
        return True

    def infos(self) -> list[ChunkInfo]:
        """Return every sealed chunk, in order of sealing."""
        return self._sealed.infos()

    def __contains__(self, key: ChunkKey) -> bool:
        return bool(self._sealed.find(key))

    def __len__(self) -> int:
        return len(self._sealed)


def side_by_side(
    chunks: Sequence[Neighbour], holes: Mapping[int, int], key: ChunkKey, size_bytes: int
) -> list[ChunkKey]:
    """Return *key* and the neighbours that, with the holes between them, are *size_bytes* long.

    *chunks* are an extent's, and *holes* its holes by offset. The run grows towards
    the smaller neighbour; it may stay too short, between reservations or the extent's ends.
    """
    found = sorted(
        (one.offset, -(-one.size_bytes // GRANULE_BYTES) * GRANULE_BYTES, one.key) for one in chunks
    )
    low = high = [chunk[2] for chunk in found].index(key)
    start, end = found[low][0], found[low][0] + found[low][1]
    ends = {offset + size: offset for offset, size in holes.items()}
    while True:
        start, end = ends.get(start, start), end + holes.get(end, 0)
        if end - start >= size_bytes:
            break
        before = found[low - 1] if low else None
        after = found[high + 1] if high + 1 < len(found) else None
        if before is not None and before[0] + before[1] != start:
            before = None
        if after is not None and after[0] != end:
            after = None
        if before is not None and (after is None or before[1] <= after[1]):
            low, start = low - 1, before[0]
        elif after is not None:
            high, end = high + 1, after[0] + after[1]
        else:
            break
    return [chunk[2] for chunk in found[low : high + 1]]
