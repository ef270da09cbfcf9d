"""A server under load in its own process, with all locks traced.

``python lock_watch.py FOLDER`` prints a line for each pair of places in the server or its tiers
where a thread acquired the second lock while it held the first, then ``done``.
"""

from __future__ import annotations

import concurrent.futures.thread
import sys
import threading
from pathlib import Path
from typing import Any

import structlog

_WATCHED = ("kvstore/server/", "kvstore/tiers/")
_lock = threading.Lock
_here = threading.local()
_nested: set[tuple[str, str]] = set()


class WatchedLock:
    """A lock that records which locks its thread holds when it is acquired."""

    def __init__(self) -> None:
        self._lock = _lock()
        frame: Any = sys._getframe(1)
        while frame.f_code.co_filename in (__file__, threading.__file__):
            frame = frame.f_back
        self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        is_taken = self._lock.acquire(blocking, timeout)
        if is_taken:
            held: list[WatchedLock] = _here.__dict__.setdefault("held", [])
            _nested.update((other.place, self.place) for other in held)
            if any(part in self.place for part in _WATCHED):
                held.append(self)
        return is_taken

    def release(self) -> None:
        held: list[WatchedLock] = _here.__dict__.setdefault("held", [])
        if self in held:
            held.remove(self)
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


def load(folder: Path) -> None:
    """Put, get, lease, pin, evict and delete from several threads, over every transport."""
    from helpers.local_server import LocalServer
    from helpers.prompts import chunks_of, keys_of

    sizes = ("--cpu", "4MiB", "--disk", f"8MiB:{folder / 'disk'}", "--bulk", "127.0.0.1:0")
    server = LocalServer(folder, *sizes, "--tenant-quotas", "default=512KiB")
    clients = [server.connect(name) for name in ("grpc", "shm", "tcp")]

    def work(number: int) -> None:
        client = clients[number % len(clients)]
        for seed in range(1000 * number, 1000 * number + 20):
            keys = keys_of(client, seed, 8)
            client.put_chunks(chunks_of(client, keys), durable=seed % 10 == 0)
            client.get_chunks(keys_of(client, seed // 2, 8))
            with client.lease(keys=keys) as lease:
                lease.get()
            if seed % 4 == 0:
                client.pin(keys=keys[:1], ttl=0.1)
                client.delete(keys=keys[1:3])
                client.status()

    with concurrent.futures.thread.ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    server.close()


if __name__ == "__main__":
    threading.Lock = WatchedLock  # type: ignore[assignment]
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    load(Path(sys.argv[1]))
    print(*sorted(" -> ".join(places) for places in _nested), "done", sep="\n")
