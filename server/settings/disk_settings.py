"""The setting of the disk tier: which folders, and how much each of them takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from kvstore.server.settings.values import GIB, TierSize, format_size

MAX_DISKS = 64


def absolute(path: Path) -> Path:
    """Return *path* with the home folder and the working folder filled in."""
    return path.expanduser().absolute()


class DiskFolder(BaseModel):
    """One folder of the disk tier and the bytes it may take."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    capacity_bytes: TierSize = 4 * GIB
    path: Annotated[Path, AfterValidator(absolute)]

    def __str__(self) -> str:
        return f"{format_size(self.capacity_bytes)}:{self.path}"


class DiskFolders(DiskFolder):
    """The first folder, which also holds the index, and ``others`` that extents are spread over.

    Also given as ``100GiB:/path``, as either half of it, or as several such pairs with commas
    between them; a path without a size then takes the size before it.
    """

    others: tuple[DiskFolder, ...] = ()

    @property
    def folders(self) -> tuple[DiskFolder, ...]:
        """All folders, the first one first."""
        return (self, *self.others)

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        first, *others = value.split(",")
        fields = _parsed(first)
        size: object = fields.get("capacity_bytes", 4 * GIB)
        rest = []
        for text in others:
            if (more := _parsed(text)).get("path") is None:
                raise ValueError("give each further disk as SIZE:PATH, such as 1TiB:/mnt/b")
            size = more.setdefault("capacity_bytes", size)
            rest.append(more)
        return fields | {"others": rest}

    @model_validator(mode="after")
    def _check_folders(self) -> DiskFolders:
        paths = [os.path.realpath(folder.path) for folder in self.folders]
        if len(set(paths)) < len(paths):
            raise ValueError("name each folder once")
        if len(paths) > MAX_DISKS:
            raise ValueError(f"give at most {MAX_DISKS} folders")
        return self

    def __str__(self) -> str:
        return ",".join(map(DiskFolder.__str__, self.folders))


def _parsed(text: str) -> dict[str, object]:
    text = text.strip()
    if text.startswith(("/", "~", ".")):
        return {"path": text}
    size, colon, path = text.partition(":")
    if not size or (colon and not path):
        raise ValueError("give SIZE:PATH, SIZE or PATH, such as 100GiB:/var/lib/kvstore")
    return {"capacity_bytes": size, "path": path} if colon else {"capacity_bytes": size}
