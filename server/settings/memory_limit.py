"""How much memory this process may take: the limit of its cgroup and of those above, or all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.settings.settings import ServerConfig
from kvstore.server.settings.values import MIB, format_size

PROCESS_BYTES = 128 * MIB
"""What a server takes besides ``--cpu``."""


def cgroup_limit_bytes(root: Path = Path("/")) -> int | None:
    """Return the lowest limit of this process's cgroup and of those above; None without one."""
    limits = []
    for file in _limit_files(root):
        with suppress(OSError, ValueError):  # not there, or "max"
            limits.append(int(file.read_text()))
    return min(limits, default=None)


def _limit_files(root: Path) -> Iterator[Path]:
    """Yield where limits may stand, of cgroups v2 and v1 (cgroups(7))."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts, name = [mount, mount / "unified"], "memory.max"
        elif "memory" in controllers.split(","):
            mounts, name = [mount / "memory"], "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be the host's, which is not there: its own is the mount.
        own = PurePosixPath(path.strip("/"))
        yield from (base / folder / name for base in mounts for folder in (own, *own.parents))


def memory_limit_bytes() -> int:
    """Return what this process may take."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup_limit_bytes()
    return machine if limit is None else min(machine, limit)


def check_memory(config: ServerConfig) -> None:
    """Raise InvalidRequestError for a tier that the kernel would end the server for filling."""
    limit = cgroup_limit_bytes()
    if limit is None or config.cpu_size + PROCESS_BYTES <= limit:
        return
    most = max(0, limit - PROCESS_BYTES) // MIB * MIB
    fix = f"its cgroup may take {format_size(limit)}: give --cpu {format_size(most)} at most, "
    fix += "or raise the limit"
    raise InvalidRequestError("cpu_size", format_size(config.cpu_size), fix)
