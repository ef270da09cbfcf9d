"""What two servers and a client of this machine could reach at best: bare loops without a server.

One process sends; one receives into memory that others map, and sums; one copies out what has
been summed, chunk by chunk as it lands, and sums again. No index, leases, questions or answers,
and no more than those steps: bytes that another host sent are verified where they are kept, and
once more by who reads them from memory that another process could damage.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
from xxhash import xxh3_64

from kvstore.proto.buffers import Bytes, copy_groups

CHUNK_BYTES = 8 << 20
PART_BYTES = 1 << 20
STEP_BYTES = 1 << 18
KINDS = ("zmq", "tcp")

_SENDER = """
import socket
import sys
import numpy as np
import zmq
kind, size, part = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
data = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
if kind == "tcp":
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    link, _ = listener.accept()
    while link.recv(1):
        for at in range(0, size, part):
            link.sendall(data[at : at + part])
else:
    router = zmq.Context().socket(zmq.ROUTER)
    router.sndhwm = 0
    print(router.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    while True:
        who, word = router.recv_multipart()
        for at in range(0, size, part):
            router.send_multipart([who, data[at : at + part]], copy=False)
"""

_TAKER = """
import mmap
import socket
import sys
import numpy as np
import zmq
from xxhash import xxh3_64
from kvstore.proto.buffers import copy_summed
kind = sys.argv[1]
port, shared, size, chunk, part = map(int, sys.argv[2:])
room = np.frombuffer(mmap.mmap(shared, size), np.uint8)
if kind == "tcp":
    link = socket.create_connection(("127.0.0.1", port))
else:
    link = zmq.Context().socket(zmq.DEALER)
    link.rcvhwm = 0
    link.connect(f"tcp://127.0.0.1:{port}")


def take(out, state):
    if kind == "tcp":
        at = 0
        while at < len(out):
            at += link.recv_into(out[at:])
        state.update(out)
    else:
        copy_summed(out, np.frombuffer(link.recv(copy=False).buffer, np.uint8), state)


while sys.stdin.buffer.read(1):
    link.send(b"g")
    for start in range(0, size, chunk):
        state = xxh3_64()
        for at in range(start, min(start + chunk, size), part):
            take(room[at : min(at + part, size)], state)
        state.intdigest()
        sys.stdout.buffer.write(b"k")
        sys.stdout.buffer.flush()
"""


@contextmanager
def landing(kind: str, size_bytes: int) -> Iterator[Callable[[], int]]:
    """Run a sender and a taker over *kind*; yield what has *size_bytes* brought and copies them."""
    out = np.zeros(size_bytes, np.uint8)
    shared = os.memfd_create("limit")
    os.ftruncate(shared, size_bytes)
    room = np.frombuffer(mmap.mmap(shared, size_bytes), np.uint8)
    python = (sys.executable, "-c")
    with ExitStack() as stack:
        stack.callback(os.close, shared)
        sizes = [str(size_bytes), str(PART_BYTES)]
        sender = _run(stack, [*python, _SENDER, kind, *sizes], ())
        assert sender.stdout is not None
        port = sender.stdout.readline().decode().strip()
        sizes = [str(size_bytes), str(CHUNK_BYTES), str(PART_BYTES)]
        taker = _run(stack, [*python, _TAKER, kind, port, str(shared), *sizes], (shared,))
        asks, tells = taker.stdin, taker.stdout
        assert asks is not None
        assert tells is not None

        def bring() -> int:
            asks.write(b"g")
            asks.flush()
            at = 0
            while at < size_bytes:
                if not tells.read(1):
                    raise RuntimeError("the taker has ended")
                stop = min(at + CHUNK_BYTES, size_bytes)
                copy_groups([[(out[at:stop], room[at:stop])]])
                at = stop
            return at

        yield bring


@contextmanager
def straight(size_bytes: int) -> Iterator[Callable[[], int]]:
    """Run a sender over TCP; yield what receives *size_bytes* where the reader wants them, and
    sums: one process less, and one copy, and nothing is kept.
    """
    out = np.zeros(size_bytes, np.uint8)
    with ExitStack() as stack:
        sizes = [str(size_bytes), str(PART_BYTES)]
        sender = _run(stack, [sys.executable, "-c", _SENDER, "tcp", *sizes], ())
        assert sender.stdout is not None
        port = int(sender.stdout.readline())
        link = stack.enter_context(socket.create_connection(("127.0.0.1", port)))

        def bring() -> int:
            link.sendall(b"g")
            for start in range(0, size_bytes, CHUNK_BYTES):
                state = xxh3_64()
                for at in range(start, min(start + CHUNK_BYTES, size_bytes), STEP_BYTES):
                    step = out[at : min(at + STEP_BYTES, size_bytes)]
                    _fill(link, step)
                    state.update(step)  # type: ignore[arg-type,unused-ignore]
                state.intdigest()
            return size_bytes

        yield bring


def _fill(link: socket.socket, out: Bytes) -> None:
    left = out.data
    while len(left):
        more = link.recv_into(left, 0, socket.MSG_WAITALL)
        if not more:
            raise RuntimeError("the sender has ended")
        left = left[more:]


def _run(
    stack: ExitStack, command: list[str], descriptors: tuple[int, ...]
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=descriptors
    )

    def end() -> None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    stack.callback(end)
    return process
