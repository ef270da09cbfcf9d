"""The folders of one disk tier: each says which one it is, so that none is missing or another's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvstore.proto.errors import TierUnavailableError
from kvstore.tiers.disk_folder import TIER, ExtentFolder, refused, signed_line, write_durably

ID_BYTES = 16
_NAME = "DISK"
_VERSION = 1


class DiskShare(NamedTuple):
    """A further folder of the tier, and how much of it the tier takes."""

    path: Path
    capacity_bytes: int


class Identity(NamedTuple):
    """Which folder this is: number ``position``, from 0, of ``folders`` of the set ``set_id``."""

    set_id: str
    position: int
    folders: int

    def line(self) -> bytes:
        """Return what the folder's file says."""
        words = f"kvstore disk-set {_VERSION} {self.set_id} {self.position} {self.folders}"
        return signed_line(words)


def check_set(folders: Sequence[ExtentFolder]) -> None:
    """Refuse folders that are not those of one tier, in their order.

    New folders may come behind those the tier has. Raises TierUnavailableError, naming the
    folder that is missing or another's.
    """
    first, *others = (read_identity(folder.path) for folder in folders)
    paths = [folder.path for folder in folders]
    if first is not None and first.position:
        raise _wrong(paths[0], f"is disk {first.position} of its tier: give its disk 0 first")
    known = 1 if first is None else first.folders
    if first is not None and known > len(folders):
        raise _wrong(
            paths[0], f"is the first of {known} folders and {len(folders)} are given: give them all"
        )
    for position, (path, found) in enumerate(zip(paths[1:], others, strict=True), start=1):
        is_ours = first is not None and found is not None and found[:2] == (first[0], position)
        if position < known and not is_ours:
            what = "empty" if found is None else f"disk {found.position} of tier {found.set_id}"
            raise _wrong(path, f"should be disk {position} of the tier and is {what}: mount it")
        is_free = found is None and not (path / "index").exists()
        if position >= known and not (is_ours or is_free):
            raise refused(path, "belongs to another disk tier")


def mark_set(folders: Sequence[ExtentFolder], entropy: Callable[[int], bytes]) -> None:
    """Write into each folder which one it is, the first one last. Raises OSError.

    A single folder needs no mark. *entropy* returns so many random bytes.
    """
    first = read_identity(folders[0].path)
    if len(folders) == 1 and first is None:
        return
    set_id = entropy(ID_BYTES).hex() if first is None else first.set_id
    for position in reversed(range(len(folders))):
        folder = folders[position]
        identity = Identity(set_id, position, len(folders))
        found = read_identity(folder.path)
        if found != identity:
            if found is None:
                folder.note_made(folder.path / _NAME)
            write_durably(folder.path / _NAME, identity.line())


def read_identity(path: Path) -> Identity | None:
    """Return what the folder *path* says it is; None when it says nothing.

    Raises TierUnavailableError when that is damaged, or of an unknown version.
    """
    try:
        with (path / _NAME).open("rb") as stream:
            line = stream.read(256)
    except FileNotFoundError:
        return None
    words = line.decode(errors="replace").split()
    if words[:2] != ["kvstore", "disk-set"] or len(words) < 3:
        raise refused(path, f"has a {_NAME} that no disk tier wrote")
    if words[2] != str(_VERSION):
        raise refused(path, f"has a {_NAME} of version {words[2]}, this server knows {_VERSION}")
    if len(words) == 7 and words[4].isdecimal() and words[5].isdecimal():
        identity = Identity(words[3], int(words[4]), int(words[5]))
        if identity.line() == line:
            return identity
    raise refused(path, f"has a damaged {_NAME}")


def _wrong(path: Path, reason: str) -> TierUnavailableError:
    return TierUnavailableError(TIER, f"{path} {reason}; nothing was changed")
