"""What encryption at rest costs gets from disk: the same gets, encrypted and in plain.

Two servers of the same settings but for the keys take turns: 16 chunks of 8 MiB whose files the
page cache holds, in a memory of half as many, so that each get is a load from disk, a check of its
frame, and the way to the client. Through gRPC both servers do the same but for decrypting. With
shared memory a client of the plain one maps the file and copies each chunk once, while the
encrypted one has to load it into its memory first: a note, as it compares two ways, not two
codecs. A disk slower than the page cache makes both shares smaller.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from time import perf_counter, time

import numpy as np

from bench.report import Report, in_turns
from bench.workload import MODEL, check, chunk_bytes, make_chunks, serving
from kvstore.client import Client, ClientOptions
from kvstore.codecs.base import empty_tensors
from kvstore.proto.types import KVLayout
from kvstore.server.security.key_files import next_key, write_keys

CHUNKS = 16
ROUNDS = 15


def measure(report: Report, folder: Path) -> None:
    """Add ``encryption_cost_on_disk_gets``: the share of a get's time that encryption adds."""
    keys_file = folder / "keys"
    write_keys(keys_file, [next_key([], np.random.bytes, time())])
    for transport, name in (("grpc", "encryption_cost_on_disk_gets"), ("shm", "")):
        with ExitStack() as stack:
            plain = stack.enter_context(_DiskGets(folder / f"plain-{transport}", transport))
            flags = ("--encryption-keys", str(keys_file))
            hidden = stack.enter_context(
                _DiskGets(folder / f"hidden-{transport}", transport, *flags)
            )
            ratio, plain_s, hidden_s = in_turns(plain.run, hidden.run, ROUNDS)
            speeds = [plain.size / taken_s / 1e9 for taken_s in (plain_s, hidden_s)]
            told = "{:.2f} GB/s plain, {:.2f} encrypted".format(*speeds)
            if name:
                report.add(name, ratio - 1, f"{told}, through {transport}", "at most 0.15")
            else:
                report.note(f"disk gets, {transport}", f"{ratio - 1:.3f}", told)


class _DiskGets:
    """A server whose memory holds half of the chunks, so that each get reads the disk."""

    def __init__(self, folder: Path, transport: str, *flags: str) -> None:
        self._stack = ExitStack()
        folder.mkdir()
        memory = ("--cpu", "88MiB", "--limits", "cpu_slab_bytes=44MiB", "--policy", "lru")
        flags = (*memory, "--disk", f"1GiB:{folder / 'disk'}", *flags)
        address, _ = self._stack.enter_context(serving(*flags, disk=folder / "disk"))
        options = ClientOptions(transport, deadline_ms=20_000)  # type: ignore[arg-type]
        self._client = self._stack.enter_context(Client(address, MODEL, options))
        made = [make_chunks(self._client, 1, seed) for seed in range(CHUNKS)]
        self._keys = [key for keys, _ in made for key in keys]
        self._chunks = [chunk for _, chunks in made for chunk in chunks]
        for chunk in self._chunks:
            self._client.put_chunks([chunk], durable=True)
        self.size = chunk_bytes(self._chunks)
        self._out = [empty_tensors(KVLayout.of(MODEL, 256)) for _ in self._keys]
        self.run()
        check(self._chunks, self._out)

    def run(self) -> float:
        """Get one half and then the other, which takes its place in memory; return the seconds."""
        started = perf_counter()
        for half in (slice(0, CHUNKS // 2), slice(CHUNKS // 2, CHUNKS)):
            assert len(self._client.get_chunks(self._keys[half], self._out[half])) == CHUNKS // 2
        return perf_counter() - started

    def __enter__(self) -> _DiskGets:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
