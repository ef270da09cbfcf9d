"""Reads of Redis in the benchmark's own process: the tier's, verified, and bare ones."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import numpy as np

from kvstore.proto.frame import check_frame
from kvstore.proto.types import ChunkKey
from kvstore.server.manager_start import LOADS_AT_ONCE
from kvstore.tiers.redis import RedisTier


@contextmanager
def redis_gets(url: str, keys: Sequence[ChunkKey]) -> Iterator[Callable[[], None]]:
    """Yield a get of all *keys* from the Redis tier into memory of ours, each verified.

    As many at once as the server loads.
    """

    def read(key: ChunkKey) -> bool:
        found = tier.read_into(key, frames[key])
        check_frame(frames[key], key)
        return found

    with (
        closing(RedisTier(url, 1 << 40, timeout_ms=5000)) as tier,
        ThreadPoolExecutor(LOADS_AT_ONCE["redis"]) as pool,
    ):
        frames = {
            info.key: np.empty(info.size_bytes, np.uint8)
            for info in tier.find(keys)
            if info is not None
        }

        def get() -> None:
            assert all(pool.map(read, keys))

        yield get


BARE_LINES = 3
"""Redis answers on one while others are read from. In turns on a Xeon one had 1.9 GB/s in the
median, two 2.2, three and four 2.3, six 2.1.
"""


@contextmanager
def bare_gets(port: int, database: int, names: Sequence[bytes]) -> Iterator[Callable[[], None]]:
    """Yield a ``GET`` of all *names* into ready memory over bare sockets, nothing verified.

    A call of each name goes before, for its size: no reply is parsed while time is taken.
    """
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(BARE_LINES))
        links = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            for _ in range(BARE_LINES)
        ]
        for link in links:
            _exchange(link, _command(b"SELECT", b"%d" % database), 5)
        sizes = [_size(links[0], name) for name in names]
        rooms = [np.zeros(len(b"$%d\r\n\r\n" % size) + size, np.uint8) for size in sizes]

        def read(line: int) -> None:
            for name, room in zip(names[line::BARE_LINES], rooms[line::BARE_LINES], strict=True):
                links[line].sendall(_command(b"GET", name))
                left = room.data
                while len(left):
                    left = left[links[line].recv_into(left) :]

        yield lambda: list(pool.map(read, range(BARE_LINES))).clear()


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)


def _exchange(link: socket.socket, command: bytes, size_bytes: int) -> bytes:
    link.sendall(command)
    return link.recv(size_bytes)


def _size(link: socket.socket, name: bytes) -> int:
    return int(_exchange(link, _command(b"STRLEN", name), 64)[1:])
