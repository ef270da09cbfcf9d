"""Limits of this process: memory, by its cgroup, and file descriptors with their shares.

Tiers get descriptors first; each transport gets a share of the rest.
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
"""Memory of a server besides ``--cpu``."""
OTHERS = 48
"""Descriptors for Redis, HTTP and short-lived files."""
LEAST = 16
"""Minimum per transport."""
GRPC_SHARE = 2
"""gRPC may use one in this many of the remaining descriptors."""
SOCKET_SHARE = 4
"""As GRPC_SHARE, for the Unix socket."""
BULK_SHARE = 8
"""As GRPC_SHARE, for the bulk channel."""
PER_SESSION = 12
"""Descriptors per session that leave it three at the Unix socket, two of them for its memory."""

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
        # In a container the path may be the host's and missing: then the mount is its cgroup.
        own = PurePosixPath(path.strip("/"))
        for file in (base / folder / name for base in mounts for folder in (own, *own.parents)):
            with suppress(OSError, ValueError):  # missing, or "max"
                limits.append(int(file.read_text()))
    return min(limits, default=None)


def memory_limit_bytes() -> int:
    """Return the memory available to this process."""
    limit = cgroup_limit_bytes()
    return machine_bytes() if limit is None else min(machine_bytes(), limit)


def machine_bytes() -> int:
    """Return the memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(config: Settings) -> None:
    """Raise InvalidRequestError for a cpu tier larger than the cgroup allows (OOM kill), warn of
    one larger than the machine's memory: it may have swap, or never fill the tier.
    """
    limit, machine = cgroup_limit_bytes(), machine_bytes()
    needed = config.cpu_size + PROCESS_BYTES
    if limit is not None and needed > limit:
        fix = f"its cgroup allows {format_size(limit)}: give --cpu {_most(limit)} at most, "
        fix += "or raise the limit"
        raise InvalidRequestError("cpu_size", format_size(config.cpu_size), fix)
    if needed > machine:
        logger.warning(
            "--cpu does not fit the machine's memory: the kernel may end the server",
            cpu=format_size(config.cpu_size),
            memory=format_size(machine),
            fix=f"give --cpu {_most(machine)} at most",
        )


def _most(memory_bytes: int) -> str:
    return format_size(max(0, memory_bytes - PROCESS_BYTES) // MIB * MIB)


def raise_limit() -> None:
    """Raise the soft limit of descriptors, often 1024 because of select(), to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # then the soft limit stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_enough(sessions: int, taken: int) -> None:
    """Warn if there are too few descriptors for *sessions* beside those *taken*."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = taken + OTHERS + PER_SESSION * sessions
    if limit != resource.RLIM_INFINITY and limit < needed:
        logger.warning(
            "too few file descriptors for --max-sessions: some clients will be refused",
            limit=limit,
            max_sessions=sessions,
            fix=f"ulimit -n {needed}, LimitNOFILE= of systemd, or fewer --max-sessions",
        )


def taken(config: Settings) -> int:
    """Return the descriptors open now, plus a memfd and a map for each slab to come."""
    return len(os.listdir("/proc/self/fd")) + 2 * (config.cpu_size // config.cpu_slab_bytes)


def share_of(share: int, taken: int, most: int) -> int:
    """Return 1/*share* of the descriptors besides *taken*, at most *most*."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return most
    return min(most, max(LEAST, (descriptors - taken - OTHERS) // share))
