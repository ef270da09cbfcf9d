"""How a disk tier begins: its folders, owned and known, and what they hold."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.proto.errors import TierUnavailableError
from kvstore.tiers.base import DEFAULT_TENANT
from kvstore.tiers.disk_folder import TIER, ExtentFolder
from kvstore.tiers.disk_index import DiskIndex, IndexRow
from kvstore.tiers.disk_set import DiskShare, check_set, mark_set
from kvstore.tiers.disk_space import DiskSpace
from kvstore.tiers.extents import Extents


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """What a disk tier need not be told.

    *others* are further folders. *is_direct* reads and writes past the page cache.
    *largest_frame_bytes* is what an extent of a new tier can hold at least.
    """

    others: tuple[DiskShare, ...] = ()
    is_direct: bool = False
    largest_frame_bytes: int = 256 << 20


def own_folders(
    shares: Sequence[DiskShare], extent_bytes: int, index_bytes: int
) -> list[ExtentFolder]:
    """Own every folder and check that they are those of one tier.

    *index_bytes* must be free in the first one besides. Raises TierUnavailableError.
    """
    folders: list[ExtentFolder] = []
    try:
        for share in shares:
            if folders:
                extent_bytes, index_bytes = folders[0].extent_bytes, 0
            folders.append(ExtentFolder(*share, extent_bytes, index_bytes))
        check_set(folders)
    except TierUnavailableError:
        for folder in reversed(folders):
            folder.discard()
        raise
    return folders


def recover(index: DiskIndex, extents: Extents, space: DiskSpace) -> int:
    """Open index and extents and put everything where it belongs; return the next sequence.

    A file that nobody owns is blank, or made anew. One with chunks and no owner is from before
    extents had owners, or its owner's row was lost: it serves them, and is never shared.
    Raises TierUnavailableError; what was made is then taken back.
    """
    try:
        rows = _recover(index, extents, space)
        mark_set(extents.folders, os.urandom)
    except (OSError, TierUnavailableError) as error:
        index.discard()
        extents.discard()
        if isinstance(error, OSError):
            path = extents.folders[0].path
            raise TierUnavailableError(TIER, f"{path}: {error.strerror}") from error
        raise
    for row in rows:
        space.put(row.info, extents.by_number[row.extent], row.offset)
    return rows[-1].sequence + 1 if rows else 0


def _recover(index: DiskIndex, extents: Extents, space: DiskSpace) -> list[IndexRow]:
    def claim(row: IndexRow) -> bool:
        extent = extents.by_number.get(row.extent)
        return extent is not None and space.claim(extent, row.offset, row.info.size_bytes)

    rows = index.open(claim)
    found = set(extents.by_number)
    extents.open(index.owners)
    for extent in list(extents.by_number.values()):
        owner = index.owners.get(extent.number)
        if owner is not None:
            space.give(extent, owner)
        elif extent.holes.used_bytes:
            extent.is_known = False
            space.give(extent, DEFAULT_TENANT)
        elif extent.number not in found or extents.is_blank(extent):
            space.add_blank(extent)
        else:
            extents.drop(extent)
            space.add_blank(extents.make(extent.folder, extent.size_bytes))
    return rows
