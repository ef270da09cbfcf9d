"""What the machine does at best: copies, sums, reads and transfers with no store around.

What a bar asks for beyond these figures is not to be had on the machine of the run. Run as a
program it is the other process of one of them: ``python -m bench.lib.bare WHAT ...``.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import IO, Any

import numpy as np
import zmq
from numpy.typing import NDArray
from xxhash import xxh3_64

from bench.lib.workload import MIB
from kvstore.proto.buffers import Bytes, copy_groups

STEP_BYTES = 1 << 19
"""Copied, then summed: it is in cache still."""
RING_BYTES = 16 * MIB
_WORDS_BYTES = mmap.PAGESIZE
"""How far the writer and the reader of a ring are, in bytes from the start, a word each."""
_HEADS, _TOKENS, _HEAD_DIM = 8, 256, 128
_LOOKED_AT_BYTES = _HEADS * _TOKENS * _HEAD_DIM * 4 + 4096
"""One chunk of a mebibyte, K and V, and the page with its header."""
CHUNK_BYTES, PART_BYTES = 8 * MIB, 1 << 18
_PIECE_BYTES, _ON_THEIR_WAY = 1 << 18, 2
"""Of Redis' values, asked for and not yet here: with more, what Redis copied leaves the caches."""
Work = Callable[[], object]
Bring = Callable[[], int]
"""Brings bytes here and returns how many."""


def steps_of(parts: Sequence[NDArray[Any]]) -> list[Bytes]:
    flat = [part.reshape(-1).view(np.uint8) for part in parts]
    return [data[at : at + STEP_BYTES] for data in flat for at in range(0, len(data), STEP_BYTES)]


def _child(stack: ExitStack, *words: object, descriptor: int = -1) -> tuple[IO[bytes], IO[bytes]]:
    """Run this module until *stack* ends; return its input and its output."""
    command = [sys.executable, "-m", "bench.lib.bare", *map(str, words)]
    handed = [descriptor] if descriptor >= 0 else []
    process = stack.enter_context(
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=handed)
    )
    stack.callback(process.kill)
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def _memory(size_bytes: int, descriptor: int = -1) -> tuple[int, Bytes]:
    if descriptor < 0:
        descriptor = os.memfd_create("bare")
        os.ftruncate(descriptor, size_bytes)
    return descriptor, np.frombuffer(mmap.mmap(descriptor, size_bytes), np.uint8)


def _slab(size_bytes: int) -> Bytes:
    descriptor, memory = _memory(size_bytes)
    os.close(descriptor)
    memory[:] = 1
    return memory


def _ring(descriptor: int = -1) -> tuple[int, memoryview, Bytes]:
    descriptor, memory = _memory(_WORDS_BYTES + RING_BYTES, descriptor)
    return descriptor, memory.data[:_WORDS_BYTES].cast("Q"), memory[_WORDS_BYTES:]


@contextmanager
def ring_put(parts: Sequence[Bytes]) -> Iterator[Work]:
    """Yield what copies *parts* into a ring, out of which another process copies and sums them.

    The least that a put through shared memory can do, as the server may not believe what others
    can still write to. The two wait for each other without messages and without sleep; between
    rounds the other process sleeps, or it would have half of a core that is measured.
    """
    descriptor, words, ring = _ring()
    with ExitStack() as stack:
        asks, tells = _child(stack, "ring", descriptor, sum(map(len, parts)), descriptor=descriptor)
        os.close(descriptor)
        assert tells.readline() == b"ready\n"

        def put() -> None:
            os.write(asks.fileno(), b".")
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

        yield put


def _take_from_ring(descriptor: int, size_bytes: int) -> None:
    """Copy and sum a round of *size_bytes* for each byte of the input, until that ends."""
    _, words, ring = _ring(descriptor)
    slab, taken = _slab(size_bytes), 0
    print("ready", flush=True)
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


def summed_get(outs: Sequence[Bytes]) -> AbstractContextManager[Work]:
    """Yield what fills *outs* from shared memory with two threads, each step summed."""
    source = _slab(sum(map(len, outs)))
    return _filling(outs, lambda out, at: copy_groups([[(out, source[at : at + len(out)])]]))


def bare_read(
    descriptor: int, outs: Sequence[Bytes], threads: int = 2, *, summed: bool = False
) -> AbstractContextManager[Work]:

    def fill(out: Bytes, start: int) -> None:
        assert os.preadv(descriptor, [out.data], start) == len(out)
        if summed:  # while in cache
            xxh3_64(out)  # type: ignore[arg-type]

    return _filling(outs, fill, threads)


@contextmanager
def _filling(
    outs: Sequence[Bytes], fill: Callable[[Bytes, int], object], threads: int = 2
) -> Iterator[Work]:
    """Yield what has *outs*, which lie one behind the other, filled: a run of them per thread."""
    starts = np.cumsum([0, *map(len, outs)])[:-1].tolist()
    jobs = list(zip(outs, starts, strict=True))
    runs = [jobs[len(jobs) * n // threads : len(jobs) * (n + 1) // threads] for n in range(threads)]

    def work(run: Sequence[tuple[Bytes, int]]) -> None:
        for out, start in run:
            fill(out, start)

    with ThreadPoolExecutor(threads) as pool:
        yield lambda: deque(pool.map(work, runs), 0).clear()


@contextmanager
def looked_at(chunks: int, asked_bytes: int, answer_bytes: int) -> Iterator[Work]:
    """Yield a bare exchange of so many bytes, then a look at the start of each of *chunks*.

    The exchange is with another process over a socket like the server's; the look makes an
    array of what lies there and takes its first element, as an engine's first look does.
    """
    memory = _slab(chunks * _LOOKED_AT_BYTES)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asked = bytes(asked_bytes - 8) + answer_bytes.to_bytes(8, "little")
    with ours, ExitStack() as stack:
        _child(stack, "echo", theirs.fileno(), descriptor=theirs.fileno())
        theirs.close()

        def look() -> None:
            ours.send(asked)
            assert len(ours.recv(answer_bytes)) == answer_bytes
            for start in range(0, len(memory), _LOOKED_AT_BYTES):
                shape = (2, _HEADS, _TOKENS, _HEAD_DIM)
                np.ndarray(shape, np.uint16, memory.data, start)[0, 0, 0, 0]

        look()  # its start is over then
        yield look


def _echo(descriptor: int) -> None:
    """Answer each packet with as many bytes as it ends with the number of."""
    with socket.socket(fileno=descriptor) as link:
        while asked := link.recv(1 << 17):
            link.send(bytes(int.from_bytes(asked[-8:], "little")))


def _send(kind: str, size: int) -> None:
    """Send *size* bytes whenever asked; print the port first."""
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
        who, _ = router.recv_multipart()
        for at in range(0, size, MIB):
            router.send_multipart([who, data[at : at + MIB].data], copy=False)


def _take(port: int, shared: int, size: int) -> None:
    """Receive, sum and keep *size* bytes for each byte of the input; tell of each chunk."""
    _, room = _memory(size, shared)
    with socket.create_connection(("127.0.0.1", port)) as link:
        while sys.stdin.buffer.read(1):
            link.sendall(b"g")
            for start in range(0, size, CHUNK_BYTES):
                _receive_summed(link, room[start : start + CHUNK_BYTES])
                sys.stdout.buffer.write(b"k")
                sys.stdout.buffer.flush()


def _receive(link: socket.socket, out: Bytes, flags: int = socket.MSG_WAITALL) -> None:
    left = out.data
    while len(left):
        more = link.recv_into(left, 0, flags)
        if not more:
            raise RuntimeError("the sender has ended")
        left = left[more:]


def _receive_summed(link: socket.socket, out: Bytes) -> None:
    state = xxh3_64()
    for at in range(0, len(out), PART_BYTES):
        _receive(link, out[at : at + PART_BYTES], 0)
        state.update(out[at : at + PART_BYTES])  # type: ignore[arg-type]
    state.intdigest()


def _sender(stack: ExitStack, kind: str, size_bytes: int) -> int:
    """Run a process that sends *size_bytes* whenever it is asked; return its port."""
    return int(_child(stack, "send", kind, size_bytes)[1].readline())


@contextmanager
def relayed(size_bytes: int) -> Iterator[Bring]:
    """Yield what has another process receive, sum and keep *size_bytes* and copies them."""
    out = np.zeros(size_bytes, np.uint8)
    shared, room = _memory(size_bytes)
    with ExitStack() as stack:
        stack.callback(os.close, shared)
        port = _sender(stack, "tcp", size_bytes)
        asks, tells = _child(stack, "take", port, shared, size_bytes, descriptor=shared)

        def bring() -> int:
            asks.write(b"g")
            asks.flush()
            for at in range(0, size_bytes, CHUNK_BYTES):
                if not tells.read(1):
                    raise RuntimeError("the taker has ended")
                copy_groups([[(out[at : at + CHUNK_BYTES], room[at : at + CHUNK_BYTES])]])
            return at + len(out[at : at + CHUNK_BYTES])

        yield bring


@contextmanager
def raw_stream(size_bytes: int, *, summed: bool = False) -> Iterator[Bring]:
    """Run a process that sends over TCP; yield what receives as many bytes into ready memory."""
    out = np.zeros(size_bytes, np.uint8)
    with ExitStack() as stack:
        port = _sender(stack, "tcp", size_bytes)
        link = stack.enter_context(socket.create_connection(("127.0.0.1", port)))

        def receive() -> int:
            link.sendall(b".")
            if not summed:
                _receive(link, out, 0)
            for at in range(0, size_bytes if summed else 0, CHUNK_BYTES):
                _receive_summed(link, out[at : at + CHUNK_BYTES])
            return len(out)

        yield receive


@contextmanager
def raw_zmq(size_bytes: int) -> Iterator[Bring]:
    out = np.zeros(size_bytes, np.uint8)
    with ExitStack() as stack:
        link: zmq.Socket[bytes] = stack.enter_context(zmq.Context.instance().socket(zmq.DEALER))
        link.rcvhwm = link.linger = 0
        link.connect(f"tcp://127.0.0.1:{_sender(stack, 'zmq', size_bytes)}")

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
    """Yield a read of all *names* of a Redis over one bare socket, nothing verified.

    Each was asked for its size before: no reply is parsed while time is taken.
    """
    with socket.create_connection(("127.0.0.1", port)) as link:

        def exchange(*words: bytes) -> bytes:
            link.sendall(_command(*words))
            return link.recv(64)

        exchange(b"SELECT", b"%d" % database)
        asks: list[bytes] = []
        replies: list[Bytes] = []
        for name in names:
            size = int(exchange(b"STRLEN", name)[1:])
            for first in range(0, size, _PIECE_BYTES):
                end = min(first + _PIECE_BYTES, size)
                asks.append(_command(b"GETRANGE", name, b"%d" % first, b"%d" % (end - 1)))
                framing = len(b"$%d\r\n\r\n" % (end - first))
                replies.append(np.zeros(framing + end - first, np.uint8))

        def read() -> None:
            link.sendall(b"".join(asks[:_ON_THEIR_WAY]))
            for at, reply in enumerate(replies, _ON_THEIR_WAY):
                _receive(link, reply)
                if at < len(asks):
                    link.sendall(asks[at])

        yield read


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)


if __name__ == "__main__":
    does: dict[str, Callable[..., None]] = {
        "ring": _take_from_ring, "echo": _echo, "send": _send, "take": _take,
    }  # fmt: skip
    does[sys.argv[1]](*(int(word) if word.isdigit() else word for word in sys.argv[2:]))
