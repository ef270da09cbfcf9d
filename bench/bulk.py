"""The bulk channel against a bare TCP stream of the same bytes, both over the loopback."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.report import paired
from bench.workload import MODEL, check, chunk_bytes, make_chunks, serving
from kvstore.client import Client, ClientOptions
from kvstore.codecs.base import empty_tensors
from kvstore.proto.types import KVLayout, PutOutcome

_SENDER = """
import socket, sys
import numpy as np
data = np.random.default_rng(1).integers(0, 256, int(sys.argv[1]), dtype=np.uint8)
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    link, _ = listener.accept()
    with link:
        while link.recv(1):
            link.sendall(data)
"""


@contextmanager
def raw_stream(size_bytes: int) -> Iterator[Callable[[], None]]:
    """Run a process that sends; yield what receives as many bytes into ready memory."""
    out = np.zeros(size_bytes, np.uint8).data
    command = [sys.executable, "-c", _SENDER, str(size_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with socket.create_connection(("127.0.0.1", port)) as link:

            def receive() -> None:
                link.sendall(b".")
                at = 0
                while at < size_bytes:
                    at += link.recv_into(out[at:])

            yield receive


def bulk_against_tcp(folder: Path, chunks: int, repeats: int) -> tuple[int, float, float, float]:
    """Return bytes, then the best seconds of a get, of a put and of the raw stream.

    Every byte of the gets is verified by the client, and compared in the end.
    """
    flags = ("--tiers", "cpu", "--cpu", "1GiB", "--bulk", "127.0.0.1:0")
    options = ClientOptions(transport="tcp", deadline_ms=20_000)
    with (
        serving(*flags, disk=folder / "none") as (address, _),
        Client(address, MODEL, options) as client,
    ):
        keys, sent = make_chunks(client, chunks, 6)
        size = chunk_bytes(sent)
        out = [empty_tensors(KVLayout.of(MODEL, 256)) for _ in sent]

        def put() -> None:
            client.delete(keys)
            assert all(put.outcome is PutOutcome.stored for put in client.put(sent))

        def get() -> None:
            assert len(client.get(keys, out)) == len(keys)

        with raw_stream(size) as receive:
            put_s, _ = paired(put, receive, max(1, repeats // 2))
            get_s, raw_s = paired(get, receive, repeats)
        check(sent, out)
    return size, get_s, put_s, raw_s


def main(argv: Sequence[str] | None = None) -> None:
    """Print the figures by themselves."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        size, get_s, put_s, raw_s = bulk_against_tcp(Path(name), 32, 11)
    for what, seconds in (("get", get_s), ("put", put_s), ("raw", raw_s)):
        print(f"{what} {size / seconds / 1e9:.2f} GB/s, {raw_s / seconds:.2f} of raw")


if __name__ == "__main__":
    main()
