"""The machine's upper bounds: reads and transfers without a store.

No store on the same machine can exceed these figures. Run as a program it is the sender of one of
them: ``python -m bench.lib.bare tcp|zmq BYTES``.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import zmq
from xxhash import xxh3_64

from bench.lib.processes import child
from bench.lib.workload import MIB
from kvstore.proto.buffers import Bytes

CHUNK_BYTES, PART_BYTES = 8 * MIB, 1 << 18
_PIECE_BYTES, _IN_FLIGHT = 1 << 18, 2
"""Pieces of Redis values in flight: with more, the data that Redis copied leaves the caches."""
Work = Callable[[], object]
Transfer = Callable[[], int]
"""Transfers bytes and returns how many."""


@contextmanager
def bare_read(descriptor: int, outs: Sequence[Bytes], threads: int) -> Iterator[Work]:
    """Yield a function that fills *outs* from consecutive parts of a file, a run a thread."""
    starts = np.cumsum([0, *map(len, outs)])[:-1].tolist()
    jobs = list(zip(outs, starts, strict=True))
    runs = [jobs[len(jobs) * n // threads : len(jobs) * (n + 1) // threads] for n in range(threads)]

    def work(run: Sequence[tuple[Bytes, int]]) -> None:
        for out, start in run:
            assert os.preadv(descriptor, [out.data], start) == len(out)

    with ThreadPoolExecutor(threads) as pool:
        yield lambda: deque(pool.map(work, runs), 0).clear()


def _send(kind: str, size: int) -> None:
    """Print the port, then send *size* bytes for each request."""
    data = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    if kind == "tcp":
        listener = socket.create_server(("127.0.0.1", 0))
        print(listener.getsockname()[1], flush=True)
        link, _ = listener.accept()
        while link.recv(1):
            link.sendall(data.data)
        return
    router: zmq.Socket[bytes] = zmq.Context().socket(zmq.ROUTER)
    router.sndhwm = 0
    print(router.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    while True:
        peer, _ = router.recv_multipart()
        for at in range(0, size, MIB):
            router.send_multipart([peer, data[at : at + MIB].data], copy=False)


@contextmanager
def _sender(kind: str, size_bytes: int) -> Iterator[int]:
    """Run a process that sends *size_bytes* for each request; yield its port."""
    with child(sys.executable, "-m", "bench.lib.bare", kind, str(size_bytes)) as (_, line):
        yield int(line)


def _receive(link: socket.socket, out: Bytes, flags: int = socket.MSG_WAITALL) -> None:
    left = out.data
    while len(left):
        more = link.recv_into(left, 0, flags)
        if not more:
            raise RuntimeError("the sender has ended")
        left = left[more:]


@contextmanager
def raw_stream(size_bytes: int, *, summed: bool = False) -> Iterator[Transfer]:
    """Run a process that sends over TCP; yield a receiver into allocated memory."""
    out = np.zeros(size_bytes, np.uint8)
    step = PART_BYTES if summed else size_bytes
    with (
        _sender("tcp", size_bytes) as port,
        socket.create_connection(("127.0.0.1", port)) as link,
    ):

        def receive() -> int:
            link.sendall(b".")
            state = xxh3_64()
            for at in range(0, size_bytes, step):
                _receive(link, out[at : at + step], 0)
                if summed:
                    state.update(out[at : at + step])  # type: ignore[arg-type]
            return len(out)

        yield receive


@contextmanager
def raw_zmq(size_bytes: int) -> Iterator[Transfer]:
    out = np.zeros(size_bytes, np.uint8)
    link: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    with _sender("zmq", size_bytes) as port, link:
        link.rcvhwm = link.linger = 0
        link.connect(f"tcp://127.0.0.1:{port}")

        def receive() -> int:
            link.send(b"go")
            at = 0
            while at < size_bytes:
                part = np.frombuffer(link.recv(copy=False).buffer, np.uint8)
                out[at : at + len(part)] = part
                at += len(part)
            return at

        yield receive


@contextmanager
def bare_gets(port: int, database: int, names: Sequence[bytes]) -> Iterator[Work]:
    """Yield a read of all *names* from Redis over one plain socket, without verification.

    Their sizes are fetched first, so that no reply is parsed while timed.
    """
    with socket.create_connection(("127.0.0.1", port)) as link:

        def exchange(*arguments: bytes) -> bytes:
            link.sendall(_command(*arguments))
            return link.recv(64)

        exchange(b"SELECT", b"%d" % database)
        commands: list[bytes] = []
        replies: list[Bytes] = []
        for name in names:
            size = int(exchange(b"STRLEN", name)[1:])
            for first in range(0, size, _PIECE_BYTES):
                end = min(first + _PIECE_BYTES, size)
                commands.append(_command(b"GETRANGE", name, b"%d" % first, b"%d" % (end - 1)))
                framing = len(b"$%d\r\n\r\n" % (end - first))
                replies.append(np.zeros(framing + end - first, np.uint8))

        def read() -> None:
            link.sendall(b"".join(commands[:_IN_FLIGHT]))
            for at, reply in enumerate(replies, _IN_FLIGHT):
                _receive(link, reply)
                if at < len(commands):
                    link.sendall(commands[at])

        yield read


def _command(*arguments: bytes) -> bytes:
    return b"*%d\r\n" % len(arguments) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in arguments)


if __name__ == "__main__":
    _send(sys.argv[1], int(sys.argv[2]))
