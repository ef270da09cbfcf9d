"""What the machine does at best: the copies, sums and exchanges of a benchmark with nothing around.

No store, no keys, no leases, nothing of a server: what a bar asks for beyond these figures is not
to be had on the machine of the run. Run as a program it is the other process of the first two.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from bench.workload import MIB
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
    command = [sys.executable, "-m", "bench.limits", "ring", str(descriptor), str(size_bytes)]
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
    command = [sys.executable, "-m", "bench.limits", "echo", str(theirs.fileno())]
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


if __name__ == "__main__":
    if sys.argv[1] == "ring":
        _take_from_ring(int(sys.argv[2]), int(sys.argv[3]))
    else:
        _echo(int(sys.argv[2]))
