"""Reads of Redis in the benchmark's own process: the tier's, verified, and bare ones."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import numpy as np

from bench.loads import loading
from kvstore.proto.types import ChunkKey
from kvstore.tiers.redis import RedisTier


@contextmanager
def redis_gets(url: str, keys: Sequence[ChunkKey]) -> Iterator[Callable[[], None]]:
    """Yield a get of all *keys* from the Redis tier into memory of ours, each verified, as the
    server loads them.
    """
    with closing(RedisTier(url, 1 << 40, timeout_ms=5000)) as tier:
        infos = [info for info in tier.find(keys) if info is not None]
        assert len(infos) == len(keys)
        rooms = [np.empty(info.size_bytes, np.uint8) for info in infos]
        with loading(tier, list(zip(infos, rooms, strict=True))) as load_all:
            yield load_all


_PIECE_BYTES = 1 << 18
_ON_THEIR_WAY = 2
"""Pieces asked for and not yet here. In turns on a Xeon such a line had 4.3 GB/s; with more of them
on their way 1.9, and whole values over one to six lines 1.9 to 2.3: what Redis has copied, and the
kernel not yet delivered, leaves the caches.
"""


@contextmanager
def bare_gets(port: int, database: int, names: Sequence[bytes]) -> Iterator[Callable[[], None]]:
    """Yield a read of all *names* into ready memory over one bare socket, nothing verified.

    Each was asked for its size before: no reply is parsed while time is taken.
    """
    with socket.create_connection(("127.0.0.1", port)) as link:
        _exchange(link, _command(b"SELECT", b"%d" % database), 5)
        asks: list[bytes] = []
        rooms: list[memoryview] = []
        for name in names:
            size = int(_exchange(link, _command(b"STRLEN", name), 64)[1:])
            for first in range(0, size, _PIECE_BYTES):
                end = min(first + _PIECE_BYTES, size)
                asks.append(_command(b"GETRANGE", name, b"%d" % first, b"%d" % (end - 1)))
                rooms.append(np.zeros(len(b"$%d\r\n\r\n" % (end - first)) + end - first, "u1").data)

        def read() -> None:
            link.sendall(b"".join(asks[:_ON_THEIR_WAY]))
            for at, room in enumerate(rooms, _ON_THEIR_WAY):
                left = room
                while len(left):
                    left = left[link.recv_into(left, 0, socket.MSG_WAITALL) :]
                if at < len(asks):
                    link.sendall(asks[at])

        yield read


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)


def _exchange(link: socket.socket, command: bytes, size_bytes: int) -> bytes:
    link.sendall(command)
    return link.recv(size_bytes)
