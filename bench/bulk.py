"""The bulk channel against a bare TCP stream of the same bytes, and beside readers that stall."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from bench.report import best_s, paired
from bench.workload import MODEL, check, chunk_bytes, make_chunks, serving
from kvstore.client import Client, ClientOptions
from kvstore.client.transports.tcp import Entrance, FrameStream
from kvstore.codecs.base import empty_tensors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.types import DIGEST_BYTES, ChunkKey, KVLayout, PutOutcome

STALLED_READERS = 64
SESSIONS = 5
"""That these are of: one may have 16 streams."""

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
            client.delete(keys=keys)
            assert all(put.outcome is PutOutcome.stored for put in client.put_chunks(sent))

        def get() -> None:
            assert len(client.get_chunks(keys, out)) == len(keys)

        with raw_stream(size) as receive:
            put_s, _ = paired(put, receive, max(1, repeats // 2))
            get_s, raw_s = paired(get, receive, repeats)
        check(sent, out)
    return size, get_s, put_s, raw_s


@contextmanager
def stalled_readers(clients: Sequence[Client], keys: Sequence[ChunkKey]) -> Iterator[None]:
    """Have gets of *keys* whose readers take nothing, which last for six seconds at most."""
    with ExitStack() as stack:
        for number in range(STALLED_READERS):
            session = clients[number % len(clients)]._link.connected().session
            entrance = Entrance.of(session.terms, session.connection.address)
            stream = FrameStream(entrance, lambda: False, 5.0)
            stack.callback(stream.close)
            get = pb.GetRequest(
                session_id=session.terms.session_id,
                digests=b"".join(key[DIGEST_BYTES:] for key in keys),
                deadline_ms=60_000,
            )
            stream.begin(pb.StreamMessage(get=get), time.monotonic() + 5.0)
            time.sleep(0.01)  # one thread each until it stalls
        time.sleep(0.3)
        assert clients[0].status().leases == STALLED_READERS
        yield


def beside_stalled_readers(folder: Path, chunks: int, rounds: int) -> tuple[float, float]:
    """Return how much longer a get and a put take beside readers that take nothing."""
    flags = ("--tiers", "cpu", "--cpu", "1GiB", "--bulk", "127.0.0.1:0")
    options = ClientOptions(transport="tcp", deadline_ms=20_000)
    with ExitStack() as stack:
        address, _ = stack.enter_context(serving(*flags, disk=folder / "none"))
        client, *others = (
            stack.enter_context(Client(address, MODEL, options)) for _ in range(SESSIONS + 1)
        )
        keys, sent = make_chunks(client, chunks, 6)
        more, fresh = make_chunks(client, chunks // 2, 7)
        client.put_chunks(sent)
        out = [empty_tensors(KVLayout.of(MODEL, 256)) for _ in sent]

        def get() -> None:
            assert len(client.get_chunks(keys, out)) == len(keys)

        def put() -> None:
            client.delete(keys=more)
            assert all(put.outcome is PutOutcome.stored for put in client.put_chunks(fresh))

        free, beside = [], []
        for _ in range(rounds):
            free.append((best_s(get, 10), best_s(put, 10)))
            with stalled_readers(others, keys):
                beside.append((best_s(get, 10), best_s(put, 10)))
    get_s, put_s = map(min, zip(*free, strict=True))
    beside_get_s, beside_put_s = map(min, zip(*beside, strict=True))
    return beside_get_s / get_s, beside_put_s / put_s


def main(argv: Sequence[str] | None = None) -> None:
    """Print the figures by themselves."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        size, get_s, put_s, raw_s = bulk_against_tcp(Path(name), 32, 11)
        slower_get, slower_put = beside_stalled_readers(Path(name), 8, 5)
    for what, seconds in (("get", get_s), ("put", put_s), ("raw", raw_s)):
        print(f"{what} {size / seconds / 1e9:.2f} GB/s, {raw_s / seconds:.2f} of raw")
    print(f"beside stalled readers: get {slower_get:.2f}, put {slower_put:.2f}")


if __name__ == "__main__":
    main()
