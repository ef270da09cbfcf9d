"""What a process takes, as the kernel counts it."""

from __future__ import annotations

import os
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int) -> int:
    """Return the memory that a process has of its own and shares, slabs included."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def thread_count(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def descriptor_count(pid: int) -> int:
    """Return how many files, sockets and memfds a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def anonymous_bytes(pid: int) -> int:
    """Return the memory that a process alone has: without slabs, files and libraries."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    return 0
