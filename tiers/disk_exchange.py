"""An extent of the disk tier from one tenant to another."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.proto.errors import TierUnavailableError
from kvstore.tiers.disk_folder import TIER
from kvstore.tiers.disk_space import DiskSpace
from kvstore.tiers.extents import Extents


def exchange(
    extents: Extents,
    space: DiskSpace,
    tenant: str,
    size_bytes: int,
    note_owner: Callable[[int, str | None], None],
) -> None:
    """Put a blank extent in the place of an empty one of another tenant's, if there is any.

    A new file and not the old one wiped: processes of the former tenant may still have that
    open, and would see whatever comes next. Until they close it the disk may lack the room for
    another; then the extent is missing, and made when there is. *note_owner* is called under
    the lock. Raises TierUnavailableError.
    """
    with extents.lock:
        idle = space.take_idle(tenant, size_bytes)
        if idle is not None:
            note_owner(idle.number, None)
            space.missing.append((idle.folder, idle.size_bytes))
    if idle is not None:
        try:
            extents.drop(idle)
        except OSError as error:
            raise TierUnavailableError(TIER, f"{idle.folder.path}: {error.strerror}") from error
    _make_missing(extents, space)


def _make_missing(extents: Extents, space: DiskSpace) -> None:
    with extents.lock:
        missing, space.missing = space.missing, []
    for at, (folder, size_bytes) in enumerate(missing):
        try:
            extent = extents.make(folder, size_bytes)
        except TierUnavailableError:
            with extents.lock:
                space.missing += missing[at:]
            return
        with extents.lock:
            space.add_blank(extent)
