"""The shm transport: the contract, and what only shared memory has."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from contracts.transport import TransportContract
from helpers.disk_damage import flip_a_bit
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import (
    MEDIUM,
    SMALL,
    assert_reads,
    chunks_of,
    is_right,
    keys_of,
    outcomes,
    store,
)

from kvstore.client import Client, ClientOptions
from kvstore.client.frames import FileFrame
from kvstore.client.session import Session
from kvstore.client.transports.base import ReadPlan, Transport
from kvstore.client.transports.shared_memory import ShmTransport
from kvstore.proto import frame, unix_socket
from kvstore.proto.buffers import Pieces, copy_groups
from kvstore.proto.errors import DeadlineError, LeaseExpiredError, TierUnavailableError
from kvstore.proto.types import DIGEST_BYTES, ChunkKey, PutOutcome

ServerMaker = Callable[..., LocalServer]


class TestShmTransport(TransportContract):
    transport = ShmTransport

    def test_chunk_deleted_while_its_place_is_held_is_detected(
        self, bare: Transport, client: Client, server: LocalServer
    ) -> None:
        keys = store(client, 1, 2)
        cpu = server.node.store.tiers.cpu_tier
        with bare.read(ReadPlan(digests(keys), 0, DEADLINE_MS)) as arriving:
            first, second = arriving
            first.confirm()
            assert cpu.delete(keys[0])
            with pytest.raises(LeaseExpiredError, match="replaced while it was read; look it up"):
                first.confirm()
            second.confirm()

    def test_place_that_another_chunk_took_is_detected(
        self, bare: Transport, client: Client, server: LocalServer
    ) -> None:
        keys = store(client, 1, 1)
        cpu = server.node.store.tiers.cpu_tier
        place = cpu.locate(keys[0])
        with bare.read(ReadPlan(digests(keys), 0, DEADLINE_MS)) as arriving:
            (held,) = arriving
            assert server.node.store.catalog.forget("cpu", keys[0])
            assert cpu.delete(keys[0])
            other = store(client, 2, 1)
            taken = cpu.locate(other[0])
            assert place is not None
            assert taken is not None
            assert (taken.number, taken.offset) == (place.number, place.offset)
            with pytest.raises(LeaseExpiredError):
                held.confirm()
        assert_reads(client, other)

    def test_reader_cannot_write_what_it_reads(self, bare: Transport, client: Client) -> None:
        keys = store(client, 1, 1)
        with bare.read(ReadPlan(digests(keys), 0, DEADLINE_MS)) as arriving:
            frame = next(arriving).data
            assert isinstance(frame, np.ndarray)
            with pytest.raises(ValueError, match="read-only"):
                frame[0] = 0
            with pytest.raises(ValueError, match="WRITEABLE"):
                frame.flags.writeable = True

    def test_get_that_finds_nothing_of_what_it_leased_leaves_no_lease(
        self, make_server: ServerMaker
    ) -> None:
        server = make_server("--tiers", "cpu")
        client = server.connect("shm")
        keys = store(client, 1, 2)
        assert server.node.store.tiers.cpu_tier.delete(keys[0])
        assert client.get_chunks(keys) == []
        assert server.settled().leases == 0
        assert server.counter("expired_leases") == 0

    def test_chunks_stay_while_they_are_read_however_hard_others_push(
        self, make_server: ServerMaker
    ) -> None:
        server = make_server("--tiers", "cpu", "--cpu", "4MiB")
        reader, writer = (
            server.connect("shm", MEDIUM, self.options(chunk_tokens=64)) for _ in range(2)
        )
        keys = keys_of(reader, 1, 6)
        chunks = chunks_of(reader, keys)
        done = threading.Event()

        def push() -> None:
            seed = 2
            while not done.is_set():
                seed += 1
                writer.put_chunks(chunks_of(writer, keys_of(writer, seed, 6)))

        thread = threading.Thread(target=push)
        thread.start()
        whole = 0
        try:
            for _ in range(30):
                reader.put_chunks(chunks)
                found = reader.get_chunks(keys)
                assert all(is_right(reader, *pair) for pair in zip(keys, found, strict=False))
                whole += len(found) == len(keys)
        finally:
            done.set()
            thread.join()
        assert whole > 0
        assert server.counter("evicted_chunks") > 30

    def test_chunk_larger_than_the_staging_memory_is_put_all_the_same(
        self, connect: Callable[..., Client]
    ) -> None:
        client = connect(options=self.options(chunk_tokens=4096, staging_bytes=1))
        keys = store(client, 1, 6)
        assert_reads(client, keys)

    def test_what_lies_on_disk_is_read_where_it_lies_and_promoted_the_second_time(
        self, bare: Transport, client: Client, server: LocalServer
    ) -> None:
        keys = store(client, 1, 3)
        server.settled()
        server.leave_memory(keys)
        with bare.read(ReadPlan(digests(keys), 0, DEADLINE_MS)) as arriving:
            found = list(arriving)
            assert [one.tier for one in found] == ["disk"] * 3
            assert all(isinstance(one.data, FileFrame) for one in found)
        server.settled()
        assert server.counter("promoted_chunks") == 0
        assert_reads(client, keys)
        assert eventually(lambda: server.counter("promoted_chunks") == 3)
        assert client.lookup(keys=keys).tiers == ("cpu",) * 3

    def test_staging_memory_that_may_still_be_read_is_never_written_to_again(
        self, make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = make_server()
        client = server.connect(options=replace(self.options(), deadline_ms=300, retry_after_ms=1))
        (first,), (second,) = keys_of(client, 1, 1), keys_of(client, 2, 1)
        inside, go_on = threading.Event(), threading.Event()

        def stall_once(groups: Sequence[Pieces]) -> list[int]:
            if not inside.is_set():
                inside.set()
                assert go_on.wait(20)
            return copy_groups(groups)

        def is_connected() -> bool:
            with suppress(DeadlineError, TierUnavailableError):
                return bool(client.transport_name)
            return False

        assert eventually(is_connected)
        monkeypatch.setattr(frame, "copy_groups", stall_once)
        with pytest.raises(DeadlineError):
            client.put_chunks(chunks_of(client, [first]))
        assert inside.is_set()
        boot = client.boot_id

        def put_again() -> bool:
            with suppress(DeadlineError, TierUnavailableError):  # left alone after its silence
                return outcomes(client, chunks_of(client, [second])) != []
            return False

        assert eventually(put_again)
        go_on.set()
        assert client.boot_id == boot
        assert eventually(lambda: server.settled() is not None)
        patient = server.connect(options=self.options())
        for key in (first, second):
            for found in patient.get_chunks([key]):
                assert is_right(patient, key, found)
        assert len(patient.get_chunks([second])) == 1

    def test_a_file_that_was_damaged_is_a_miss_and_the_chunk_can_be_put_again(
        self, client: Client, server: LocalServer
    ) -> None:
        keys = store(client, 1, 3)
        server.settled()
        server.leave_memory(keys)
        flip_a_bit(Path(server.config.disk[0].path), keys[1])
        assert len(client.get_chunks(keys)) == 1
        assert outcomes(client, chunks_of(client, keys)) == [
            PutOutcome.exists, PutOutcome.stored, PutOutcome.exists
        ]  # fmt: skip
        assert_reads(client, keys)

    def test_session_whose_socket_broke_is_replaced(
        self, server: LocalServer, connect: Callable[..., Client]
    ) -> None:
        client = connect()
        keys = store(client, 1, 2)
        plane = server.node.unix_server
        assert plane is not None
        (peer,) = (peer for peer in plane._peers.values() if peer.staging)
        peer.connection.shutdown(socket.SHUT_RDWR)
        assert eventually(lambda: len(server.node.sessions) == 0)
        assert_reads(client, keys)
        assert outcomes(client, chunks_of(client, keys)) == [PutOutcome.exists] * 2


def digests(keys: list[ChunkKey]) -> bytes:
    return b"".join(key[DIGEST_BYTES:] for key in keys)


# --- when memory cannot be shared


def test_auto_takes_grpc_when_the_socket_is_gone(server: LocalServer) -> None:
    path = server.config.socket_path_for(server.node.port)
    assert path is not None
    path.unlink()
    client = server.connect("auto")
    assert client.transport_name == "grpc"
    assert_reads(client, store(client, 1, 2))
    with pytest.raises(TierUnavailableError, match=r"tier 'shm': .*s\.sock"):
        server.connect("shm").keys([])


def test_auto_takes_grpc_when_the_server_refuses_the_staging_memory(server: LocalServer) -> None:
    too_much = ClientOptions("auto", 16, DEADLINE_MS, staging_bytes=2 << 30)
    client = server.connect(options=too_much)
    assert client.transport_name == "grpc"
    assert_reads(client, store(client, 1, 2))
    with pytest.raises(TierUnavailableError, match=r"tier 'shm': .*invalid"):
        server.connect(options=replace(too_much, transport="shm")).keys([])
    assert eventually(lambda: len(server.node.sessions) == 1)


# --- servers that lie or are silent on the socket


@contextmanager
def answering(path: Path, token: bytes, *answers: bytes | None) -> Iterator[None]:
    """A server's end of the socket that gives these answers and then no more; None: a greeting."""
    done = threading.Event()

    def serve() -> None:
        peer, _ = listener.accept()
        with peer:
            for answer in answers:
                message = peer.recv(64)
                if answer is None:
                    hello = unix_socket.Request.unpack(message)
                    nonces = (hello.token, bytes(16))
                    proven = unix_socket.proof(token, unix_socket.Op.hello, hello.arg, nonces)
                    answer = unix_socket.pack_greeting(nonces[1], proven)
                peer.send(answer)
            done.wait(30)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield
        done.set()
        thread.join()


@pytest.fixture
def session(server: LocalServer, tmp_path: Path) -> Iterator[Session]:
    """A session whose server is said to listen elsewhere."""
    session = Session(server.dial(), SMALL, ClientOptions(chunk_tokens=16, deadline_ms=DEADLINE_MS))
    session.terms = replace(session.terms, socket_path=str(tmp_path / "other.sock"))
    yield session
    session.close()


def test_garbage_from_the_socket_is_a_transport_that_is_unavailable(
    session: Session, tmp_path: Path
) -> None:
    denied = unix_socket.pack_reply(unix_socket.Reply.denied)
    garbage: list[list[bytes | None]] = [
        [b""],
        [b"x"],
        [bytes(64)],
        [denied],
        [unix_socket.pack_greeting(bytes(16), bytes(16))],
        [None, b""],
        [None, b"x" * 32],
        [None, denied],
    ]
    for answers in garbage:
        with (
            answering(tmp_path / "other.sock", session.terms.attach_token, *answers),
            pytest.raises(TierUnavailableError, match=r"tier 'shm': .*other\.sock"),
        ):
            ShmTransport(session)
        (tmp_path / "other.sock").unlink()


def test_slab_that_never_comes_is_an_error_and_its_late_answer_is_not_taken_for_another(
    session: Session, server: LocalServer, tmp_path: Path
) -> None:
    client = server.connect("grpc")
    keys = keys_of(client, 1, 1)
    client.put_chunks(chunks_of(client, keys))
    token = session.terms.attach_token
    with answering(
        tmp_path / "other.sock", token, None, unix_socket.pack_reply(unix_socket.Reply.ok)
    ):
        transport = ShmTransport(session)
        for _ in range(2):
            with (
                transport.read(ReadPlan(digests(keys), 0, DEADLINE_MS)) as arriving,
                pytest.raises(TierUnavailableError, match="the server hung up"),
            ):
                next(arriving)
        assert transport._socket.fileno() == -1
        transport.close()
    assert server.settled().leases == 0
