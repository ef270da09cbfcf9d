"""Who gets how many of the process's file descriptors: the tiers first, then ways in by shares."""

from __future__ import annotations

import os
import resource

from kvstore.server.config import ServerConfig

OTHERS = 48
"""For Redis, for pages and for what is opened for a moment."""
LEAST = 16
"""A way in has that many in any case."""
GRPC_SHARE = 2
"""One of so many that are left may be a connection of gRPC."""
SOCKET_SHARE = 4
"""The same of the Unix socket. The bulk channel has an eighth of all."""


def taken(config: ServerConfig) -> int:
    """Return how many are open by now, with those of slabs that will be: a memfd and a map each."""
    return len(os.listdir("/proc/self/fd")) + 2 * (config.cpu_size // config.cpu_slab_bytes)


def share_of(share: int, taken: int, most: int) -> int:
    """Return one of *share* of those that are left besides *taken*, *most* at most."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return most
    return min(most, max(LEAST, (descriptors - taken - OTHERS) // share))
