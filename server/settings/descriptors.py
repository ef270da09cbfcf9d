"""Who gets how many of the process's file descriptors: the tiers first, then ways in by shares."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

import structlog

from kvstore.server.settings.settings import ServerConfig

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


def taken(config: ServerConfig) -> int:
    """Return how many are open by now, with those of slabs that will be: a memfd and a map each."""
    return len(os.listdir("/proc/self/fd")) + 2 * (config.cpu_size // config.cpu_slab_bytes)


def share_of(share: int, taken: int, most: int) -> int:
    """Return one of *share* of those that are left besides *taken*, *most* at most."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return most
    return min(most, max(LEAST, (descriptors - taken - OTHERS) // share))
