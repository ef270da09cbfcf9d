"""What this process may take: memory, by its cgroup, and file descriptors, and who gets them.

Of descriptors the tiers come first, then the ways in by shares.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path, PurePosixPath

import structlog

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.settings.settings import Settings
from kvstore.server.settings.values import MIB, format_size

PROCESS_BYTES = 128 * MIB
"""What a server takes besides ``--cpu``."""
OTHERS = 48
"""For Redis, for pages and for what is opened for a moment."""
LEAST = 16
"""A way in has that many in any case."""
GRPC_SHARE = 2
"""One of so many that are left may be a connection of gRPC."""
SOCKET_SHARE = 4
"""The same of the Unix socket."""
BULK_SHARE = 8
"""The same of the bulk channel."""
PER_SESSION = 12
"""So many for each session let it have three at the socket, two of them for its memory."""

logger = structlog.get_logger(__name__)


def cgroup_limit_bytes(root: Path = Path("/")) -> int | None:
    """Return the lowest limit of this cgroup and those above, v2 or v1 (cgroups(7)), if any."""
    mount, limits = root / "sys/fs/cgroup", []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
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
        for file in (base / folder / name for base in mounts for folder in (own, *own.parents)):
            with suppress(OSError, ValueError):  # not there, or "max"
                limits.append(int(file.read_text()))
    return min(limits, default=None)


def memory_limit_bytes() -> int:
    """Return what this process may take."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup_limit_bytes()
    return machine if limit is None else min(machine, limit)


def check_memory(config: Settings) -> None:
    """Raise InvalidRequestError for a tier that the kernel would end the server for filling."""
    limit = cgroup_limit_bytes()
    if limit is None or config.cpu_size + PROCESS_BYTES <= limit:
        return
    most = max(0, limit - PROCESS_BYTES) // MIB * MIB
    fix = f"its cgroup may take {format_size(limit)}: give --cpu {format_size(most)} at most, "
    fix += "or raise the limit"
    raise InvalidRequestError("cpu_size", format_size(config.cpu_size), fix)


def raise_limit() -> None:
    """Let this process have as many as it may: the soft limit is often 1024 for select's sake."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # then it has as many as before
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_enough(sessions: int, taken: int) -> None:
    """Warn if that many sessions do not all find room beside those that are *taken*."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = taken + OTHERS + PER_SESSION * sessions
    if limit != resource.RLIM_INFINITY and limit < needed:
        logger.warning(
            "too few file descriptors for --max-sessions: some clients will find no room",
            limit=limit,
            max_sessions=sessions,
            fix=f"ulimit -n {needed}, LimitNOFILE= of systemd, or fewer --max-sessions",
        )


def taken(config: Settings) -> int:
    """Return how many are open by now, with those of slabs that will be: a memfd and a map each."""
    return len(os.listdir("/proc/self/fd")) + 2 * (config.cpu_size // config.cpu_slab_bytes)


def share_of(share: int, taken: int, most: int) -> int:
    """Return one of *share* of those that are left besides *taken*, *most* at most."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return most
    return min(most, max(LEAST, (descriptors - taken - OTHERS) // share))
