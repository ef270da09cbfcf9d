"""What the machine does at best: copies, sums, reads and transfers with no store around.

What a bar asks for beyond these figures is not to be had on the machine of the run. Run as a
program it is the other process of a ring, or of an exchange.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray
from xxhash import xxh3_64

from bench.lib.workload import (
    MIB,
)
from kvstore.client import Chunk
from kvstore.client.chunk import LayerTensors
from kvstore.proto.buffers import Bytes, copy_groups

STEP_BYTES = 1 << 19
"""Copied, then summed: it is in cache still."""
RING_BYTES = 16 * MIB
_WORDS_BYTES = mmap.PAGESIZE
"""How far the writer and the reader of a ring are, in bytes from the start, a word each."""
_THREADS = 2
_TOKEN_BYTES, _HEADS, _TOKENS = 256, 8, 256
_LOOKED_AT_BYTES = _HEADS * _TOKENS * _TOKEN_BYTES * 2 + 4096
"""One chunk of a mebibyte, K and V, and the page with its header."""


def parts_of(chunks: Sequence[Chunk]) -> list[Bytes]:
    """Return the bytes of all tensors of *chunks*, in steps."""
    return steps_of([chunk.tensors for chunk in chunks])


def steps_of(tensors: Sequence[LayerTensors]) -> list[Bytes]:
    """Return the bytes of all *tensors*, numpy's, in steps."""
    parts = [part for one in tensors for layers in one for parts in layers for part in parts]
    return [step for part in parts for step in in_steps(np.asarray(part))]


def in_steps(array: NDArray[Any]) -> list[Bytes]:
    """Return the bytes of *array* in steps."""
    data = array.reshape(-1).view(np.uint8)
    return [data[at : at + STEP_BYTES] for at in range(0, len(data), STEP_BYTES)]


@contextmanager
def ring_put(parts: Sequence[Bytes]) -> Iterator[Callable[[], None]]:
    """Yield what copies *parts* into a ring, out of which another process copies and sums them.

    The least that a put through shared memory can do, as the server may not believe what others
    can still write to. The two wait for each other without messages and without sleep; between
    rounds the other process sleeps, or it would have half of a core that is measured.
    """
    size_bytes = sum(map(len, parts))
    descriptor = os.memfd_create("ring")
    os.ftruncate(descriptor, _WORDS_BYTES + RING_BYTES)
    memory = mmap.mmap(descriptor, _WORDS_BYTES + RING_BYTES)
    words, ring = _halves(memory)
    command = [sys.executable, "-m", "bench.lib.bare", "ring", str(descriptor), str(size_bytes)]
    with subprocess.Popen(
        command, pass_fds=[descriptor], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        os.close(descriptor)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        start_round = process.stdin.fileno()

        def put() -> None:
            os.write(start_round, b".")
            written = words[0]
            for part in parts:
                while written + len(part) - words[1] > RING_BYTES:
                    os.sched_yield()
                start = written % RING_BYTES
                np.copyto(ring[start : start + len(part)], part)
                written += len(part)
                words[0] = written
            while words[1] < written:
                os.sched_yield()

        try:
            yield put
        finally:
            process.terminate()
            process.wait(10)


def _halves(memory: mmap.mmap) -> tuple[memoryview, Bytes]:
    return memoryview(memory)[:_WORDS_BYTES].cast("Q"), np.frombuffer(
        memory, np.uint8, RING_BYTES, _WORDS_BYTES
    )


def _take_from_ring(descriptor: int, size_bytes: int) -> None:
    """Copy and sum a round of *size_bytes* for each byte of the input, until that ends."""
    words, ring = _halves(mmap.mmap(descriptor, _WORDS_BYTES + RING_BYTES))
    slab = _shared(size_bytes)
    print("ready", flush=True)
    taken = 0
    while os.read(sys.stdin.fileno(), 1):
        end = taken + size_bytes
        while taken < end:
            start, at = taken % RING_BYTES, taken % size_bytes
            step = min(STEP_BYTES, words[0] - taken)
            if not step:
                os.sched_yield()
                continue
            copy_groups([[(slab[at : at + step], ring[start : start + step])]])
            taken += step
            words[1] = taken


def _shared(size_bytes: int) -> Bytes:
    """Return memory of the kind that slabs are of, all of it touched."""
    descriptor = os.memfd_create("slab")
    os.ftruncate(descriptor, size_bytes)
    memory = np.frombuffer(mmap.mmap(descriptor, size_bytes), np.uint8)
    os.close(descriptor)
    memory[:] = 1
    return memory


@contextmanager
def summed_get(outs: Sequence[Bytes]) -> Iterator[Callable[[], None]]:
    """Yield what fills *outs* from shared memory with two threads, each step summed."""
    source = _shared(sum(map(len, outs)))

    def fill(out: Bytes, start: int) -> None:
        copy_groups([[(out, source[start : start + len(out)])]])

    with _shared_out(outs, fill) as get:
        yield get


@contextmanager
def summed_read(descriptor: int, outs: Sequence[Bytes]) -> Iterator[Callable[[], None]]:
    """Yield what fills *outs* from a file with two threads, each step summed while in cache."""

    def fill(out: Bytes, start: int) -> None:
        assert os.preadv(descriptor, [out.data], start) == len(out)
        xxh3_64(out)  # type: ignore[arg-type]

    with _shared_out(outs, fill) as read:
        yield read


@contextmanager
def bare_read(descriptor: int, outs: Sequence[Bytes], threads: int) -> Iterator[Callable[[], None]]:
    """Yield what fills *outs* from a file with *threads* threads and looks at nothing."""

    def fill(out: Bytes, start: int) -> None:
        assert os.preadv(descriptor, [out.data], start) == len(out)

    with _shared_out(outs, fill, threads) as read:
        yield read


@contextmanager
def _shared_out(
    outs: Sequence[Bytes], fill: Callable[[Bytes, int], None], threads: int = _THREADS
) -> Iterator[Callable[[], None]]:
    """Yield what has *outs*, which lie one behind the other, filled: a run of them per thread."""
    starts = np.cumsum([0, *map(len, outs)])[:-1].tolist()
    jobs = list(zip(outs, starts, strict=True))
    runs = [jobs[len(jobs) * n // threads : len(jobs) * (n + 1) // threads] for n in range(threads)]

    def work(run: Sequence[tuple[Bytes, int]]) -> None:
        for out, start in run:
            fill(out, start)

    with ThreadPoolExecutor(threads) as pool:

        def work_all() -> None:
            list(pool.map(work, runs))

        yield work_all


@contextmanager
def looked_at(chunks: int, asked_bytes: int, answer_bytes: int) -> Iterator[Callable[[], None]]:
    """Yield a bare exchange of so many bytes, then a look at the start of each of *chunks*.

    The exchange is with another process over a socket like the server's; the look makes an
    array of what lies there and takes its first element, as an engine's first look does.
    """
    memory = _shared(chunks * _LOOKED_AT_BYTES)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "bench.lib.bare", "echo", str(theirs.fileno())]
    asked = bytes(asked_bytes - 8) + answer_bytes.to_bytes(8, "little")
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]):
        theirs.close()

        def look() -> None:
            ours.send(asked)
            assert len(ours.recv(answer_bytes)) == answer_bytes
            for number in range(chunks):
                start = number * _LOOKED_AT_BYTES
                shape = (2, _HEADS, _TOKENS, _TOKEN_BYTES // 2)
                np.ndarray(shape, np.uint16, memory, start)[0, 0, 0, 0]

        look()  # its start is over then
        yield look
        ours.shutdown(socket.SHUT_RDWR)


def _echo(descriptor: int) -> None:
    """Answer each packet with as many bytes as it ends with the number of."""
    with socket.socket(fileno=descriptor) as link:
        while asked := link.recv(1 << 17):
            link.send(bytes(int.from_bytes(asked[-8:], "little")))


CHUNK_BYTES = 8 << 20
PART_BYTES = 1 << 20
RECEIVE_BYTES = 1 << 18
KINDS = ("zmq", "tcp")

_SENDS = """
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
        port = str(_sender(stack, kind, size_bytes))
        sizes = [str(size_bytes), str(CHUNK_BYTES), str(PART_BYTES)]
        taker = _piped(stack, [*python, _TAKER, kind, port, str(shared), *sizes], (shared,))
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
        port = _sender(stack, "tcp", size_bytes)
        link = stack.enter_context(socket.create_connection(("127.0.0.1", port)))

        def bring() -> int:
            link.sendall(b"g")
            for start in range(0, size_bytes, CHUNK_BYTES):
                state = xxh3_64()
                for at in range(start, min(start + CHUNK_BYTES, size_bytes), RECEIVE_BYTES):
                    step = out[at : min(at + RECEIVE_BYTES, size_bytes)]
                    _fill(link, step)
                    state.update(step)  # type: ignore[arg-type,unused-ignore]
                state.intdigest()
            return size_bytes

        yield bring


def _sender(stack: ExitStack, kind: str, size_bytes: int, part_bytes: int = PART_BYTES) -> int:
    """Run a process that sends *size_bytes* whenever it is asked; return its port."""
    command = [sys.executable, "-c", _SENDS, kind, str(size_bytes), str(part_bytes)]
    process = _piped(stack, command, ())
    assert process.stdout is not None
    return int(process.stdout.readline())


def _fill(link: socket.socket, out: Bytes) -> None:
    left = out.data
    while len(left):
        more = link.recv_into(left, 0, socket.MSG_WAITALL)
        if not more:
            raise RuntimeError("the sender has ended")
        left = left[more:]


def _piped(
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


@contextmanager
def raw_stream(size_bytes: int) -> Iterator[Callable[[], None]]:
    """Run a process that sends; yield what receives as many bytes into ready memory."""
    out = np.zeros(size_bytes, np.uint8).data
    with ExitStack() as stack:
        port = _sender(stack, "tcp", size_bytes, size_bytes)
        link = stack.enter_context(socket.create_connection(("127.0.0.1", port)))

        def receive() -> None:
            link.sendall(b".")
            at = 0
            while at < size_bytes:
                at += link.recv_into(out[at:])

        yield receive


@contextmanager
def raw_zmq(size_bytes: int) -> Iterator[Callable[[], int]]:
    """Run a process that sends; yield what receives so many bytes into ready memory, and counts."""
    out = np.zeros(size_bytes, np.uint8)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with ExitStack() as stack:
        port = _sender(stack, "zmq", size_bytes)
        stack.callback(context.term)
        link = stack.enter_context(context.socket(zmq.DEALER))
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


if __name__ == "__main__":
    if sys.argv[1] == "ring":
        _take_from_ring(int(sys.argv[2]), int(sys.argv[3]))
    else:
        _echo(int(sys.argv[2]))
