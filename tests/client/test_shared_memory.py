"""The shm transport: the contract, and chunks seen where they lie in the server's memory."""

from __future__ import annotations

import mmap
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ServerMaker
from contracts.bulk_channel import digests
from contracts.parallel import Connect
from contracts.transport import TransportContract
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import (
    SMALL,
    assert_reads,
    chunks_of,
    equal,
    is_right,
    keys_of,
    outcomes,
    store,
)
from helpers.socket_peer import Listener

from kvstore.client import Client, ClientOptions
from kvstore.client.frames import FileFrame
from kvstore.client.session import Session
from kvstore.client.transports.base import ReadPlan, Transport
from kvstore.client.transports.shared_memory import ShmTransport, SlabMap, Slabs
from kvstore.client.view import ChunkView, LeasedViews, geometry_of
from kvstore.codecs.base import ChunkTensors, empty_tensors
from kvstore.codecs.raw import RawCodec
from kvstore.proto import frame, unix_socket
from kvstore.proto.buffers import Pieces, copy_groups
from kvstore.proto.errors import (
    ChunkCorruptError,
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    TierUnavailableError,
)
from kvstore.proto.frame import FrameTemplate
from kvstore.proto.types import ROOT, ChunkKey, KVLayout
from kvstore.proto.unix_socket import NOWHERE, Place, Reach, pack_places


class TestShmTransport(TransportContract):
    transport = ShmTransport

    def test_place_that_another_chunk_took_is_detected(
        self, bare: Transport, client: Client, server: LocalServer
    ) -> None:
        keys = store(client, 1, 1)
        cpu = server.node.store.tiers.cpu_tier
        place = cpu.locate(keys[0])
        with bare.read(ReadPlan(digests(keys), 0, DEADLINE_MS)) as arriving:
            (held,) = arriving.frames
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

    @pytest.mark.parametrize("is_deleted", [False, True])
    def test_a_get_out_of_memory_takes_a_lease_only_once_a_chunk_went_under_it(
        self, client: Client, server: LocalServer, is_deleted: bool
    ) -> None:
        keys, other = store(client, 1, 3), server.connect(options=self.options())
        assert_reads(client, keys)
        server.settled()
        asked, boot_id = list[int](), client.boot_id

        def room(index: int, layout: KVLayout) -> ChunkTensors:
            asked.append(index)
            if asked.count(1) == index == 1:
                assert eventually(lambda: server.usage().leases == 0)
                if is_deleted:
                    assert other.delete(keys=keys[1:2]) == 1
                else:
                    server.leave_memory(keys[1:2])
            return empty_tensors(layout)

        found = client.get_chunks(keys, room)
        assert len(found) == (1 if is_deleted else 3)
        assert all(is_right(client, *one) for one in zip(keys, found, strict=False))
        assert asked.count(0) == 2, "from the start, under a lease"
        assert client.boot_id == boot_id
        assert server.settled().leases == 0
        if not is_deleted:
            return
        assert_reads(client, [keys[0]])
        assert client.lookup(keys=keys).ready == 1
        assert len(client.stat(keys=keys)) == 2, "what was not found wrong is still there"

    def test_chunk_larger_than_the_staging_memory_is_put_all_the_same(
        self, connect: Connect
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
            found = list(arriving.frames)
            assert [one.tier for one in found] == ["disk"] * 3
            assert all(isinstance(one.data, FileFrame) for one in found)
            assert server.usage().leases == 1, "room in a file is used again unnoticed"
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


# --- when memory cannot be shared


def test_auto_takes_grpc_when_the_server_refuses_the_staging_memory(server: LocalServer) -> None:
    too_much = ClientOptions("auto", 16, DEADLINE_MS, staging_bytes=2 << 30)
    client = server.connect(options=too_much)
    assert client.transport_name == "grpc"
    assert_reads(client, store(client, 1, 2))
    with pytest.raises(TierUnavailableError, match=r"tier 'shm': .*invalid"):
        server.connect(options=replace(too_much, transport="shm")).keys([])
    assert eventually(lambda: len(server.node.sessions) == 1)


# --- servers that lie or are silent on the socket


def answering(path: Path, token: bytes, *answers: bytes | None) -> closing[Listener]:
    """A server's end of the socket that gives these answers and then no more; None: a greeting."""

    def serve(peer: socket.socket) -> None:
        for answer in answers:
            message = peer.recv(64)
            if answer is None:
                hello = unix_socket.Request.unpack(message)
                nonces = (hello.token, bytes(16))
                proven = unix_socket.proof(token, unix_socket.Op.hello, hello.arg, nonces)
                answer = unix_socket.pack_greeting(nonces[1], proven)
            peer.send(answer)

    return closing(Listener(path, serve))


@pytest.fixture
def session(server: LocalServer, tmp_path: Path) -> Iterator[Session]:
    """A session whose server is said to listen elsewhere."""
    session = Session(server.dial(), SMALL, ClientOptions(chunk_tokens=16, deadline_ms=DEADLINE_MS))
    session.terms.socket_path = str(tmp_path / "other.sock")
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


def views(client: Client, keys: list[ChunkKey]) -> list[ChunkView]:
    lease = client.lease(keys=keys)
    found = [lease.view(index) for index in range(len(lease.keys))]
    assert all(view is not None for view in found)
    return [view for view in found if view is not None]


@pytest.mark.filterwarnings("error")
def test_views_show_what_was_put_where_it_lies_and_cannot_be_written_to(client: Client) -> None:
    keys = keys_of(client, 1, 3)
    chunks = chunks_of(client, keys)
    client.put_chunks(chunks)
    for view, chunk in zip(views(client, keys), chunks, strict=True):
        assert view.verify().key == view.key == chunk.key
        assert equal(view.tensors(), chunk.tensors)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="read-only"):
            view.frame[0] = 0
        for index in (0, 1):
            shown, tensor = view.layer(index), view.torch_layer(index)
            assert not shown.flags.owndata
            with pytest.raises(ValueError, match="read-only"):
                shown[...] = 0
            assert tensor.dtype is torch.bfloat16
            assert (tensor.data_ptr(), tensor.shape) == (shown.ctypes.data, shown.shape)
            assert np.array_equal(tensor.view(torch.int16).numpy(), shown.view(np.int16))
        for none in (-1, 9):
            with pytest.raises(InvalidRequestError, match=f"index={none}: the chunk has"):
                view.torch_layer(none)


def test_chunks_on_disk_and_of_a_released_lease_have_no_view(
    server: LocalServer, client: Client
) -> None:
    keys = store(client, 1, 2)
    server.settled()
    server.leave_memory(keys[:1])
    with client.lease(keys=keys) as lease:
        assert lease.match.tiers == ("disk", "cpu")
        assert lease.view(0) is None
        assert lease.view(1) is not None
        assert len(lease.get()) == 2
    with pytest.raises(LeaseExpiredError, match="released; lease again"):
        lease.view(1)


def test_memory_that_was_reused_is_noticed(server: LocalServer, client: Client) -> None:
    keys = store(client, 1, 1)
    (view,) = views(client, keys)
    view.confirm()
    assert server.node.store.tiers.cpu_tier.delete(keys[0])
    with pytest.raises(LeaseExpiredError, match="replaced while it was read"):
        view.confirm()
    with pytest.raises(LeaseExpiredError):
        view.verify()


WHOLE, SHORT = KVLayout.of(SMALL, 32), KVLayout.of(SMALL, 17)
KEYS = [ChunkKey(bytes([n]) * 32) for n in range(1, 6)]
SLAB, GONE = 3, 4
STEP = 2 * geometry_of(WHOLE).frame_bytes // 64 * 64


class OneSlab(Slabs):
    """One slab with a frame every STEP bytes, the last of them SHORT; another that is not given."""

    def __init__(self) -> None:
        link = socket.socket()
        link.close()
        super().__init__(link)
        memory = mmap.mmap(-1, STEP * (len(KEYS) + 1))
        data = np.frombuffer(memory, np.uint8)
        self.places = []
        for at, key in enumerate(KEYS):
            layout = SHORT if key == KEYS[-1] else WHOLE
            size, start = geometry_of(layout).frame_bytes, 64 + at * STEP
            template = FrameTemplate(key, ROOT, bytes(32), bytes(16), layout)
            tensors = empty_tensors(layout)
            for part in (part for parts in tensors[0] for part in parts):
                part[...] = at
            RawCodec().encode(template, tensors, data[start : start + size])
            data[start - 8 : start].view(np.uint64)[0] = 100 + at
            self.places.append(Place(SLAB, Reach.memory, 0, start, size, 100 + at))
        self.data = data
        self._slabs[SLAB] = SlabMap(memory)


def test_a_mapped_slab_does_not_wait_for_the_server(tmp_path: Path) -> None:
    path, is_asked, is_over = tmp_path / "s.sock", threading.Event(), threading.Event()

    def serve(peer: socket.socket) -> None:
        peer.recv(64)
        is_asked.set()
        is_over.wait(60)
        peer.close()

    slabs = OneSlab()
    with closing(Listener(path, serve)), ThreadPoolExecutor(2) as pool:
        slabs._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        slabs._socket.connect(str(path))
        other = pool.submit(slabs.slab, GONE)
        assert is_asked.wait(60)
        mapped = pool.submit(slabs.slab, SLAB)
        try:
            assert len(mapped.result(10).data)
        finally:
            is_over.set()
        with pytest.raises(TierUnavailableError):
            other.result()


def views_of(slabs: OneSlab, places: list[Place]) -> LeasedViews:
    return LeasedViews(slabs, geometry_of(WHOLE), pack_places(places), KEYS)


def test_all_chunks_are_seen_the_shorter_last_one_too() -> None:
    slabs = OneSlab()
    see = views_of(slabs, slabs.places)
    for at, key in enumerate(KEYS):
        view = see(at)
        assert view is not None
        assert (view.key, int(view.layer(1)[1, 0, 0, 0])) == (key, at)
        assert view.verify().key == key
    last = see(-1)
    assert last is not None
    assert last.layout.tokens == 17


WRONG: list[tuple[Callable[[Place], Place], type[KVStoreError]]] = [
    (lambda p: p._replace(generation=1), LeaseExpiredError),
    (lambda p: p._replace(offset=p.offset + STEP, generation=p.generation + 1), ChunkCorruptError),
    (lambda p: p._replace(offset=p.offset + 4), InvalidRequestError),
    (lambda p: p._replace(offset=0), InvalidRequestError),
    (lambda p: p._replace(offset=1 << 40), InvalidRequestError),
    (lambda p: p._replace(offset=2**64 - 8), InvalidRequestError),
    (lambda p: p._replace(size_bytes=p.size_bytes - 64), ChunkCorruptError),
    (lambda p: p._replace(number=GONE), TierUnavailableError),
]
"""An older generation, another chunk's place, off the words, the slab's start, behind it, 2^64,
another size, a slab that is gone."""


def test_what_is_wrong_with_one_place_is_told_of_that_chunk_alone() -> None:
    for change, error in WRONG:
        slabs = OneSlab()
        places = list(slabs.places)
        places[1] = change(places[1])
        see = views_of(slabs, places)
        for at in (0, 2, 3, 4):
            view = see(at)
            assert view is not None
            assert int(view.layer(0)[0, 0, 0, 0]) == at
        with pytest.raises(error):
            see(1)


def test_chunks_elsewhere_or_without_a_place_have_no_view() -> None:
    slabs = OneSlab()
    places = [NOWHERE, slabs.places[1], slabs.places[2]._replace(reach=Reach.file)]
    see = views_of(slabs, places)
    assert [see(at) is None for at in range(len(KEYS))] == [True, False, True, True, True]


def test_rows_that_are_cut_are_refused() -> None:
    slabs = OneSlab()
    stand_in: object = slabs
    rows = pack_places(slabs.places)[:-1]
    with pytest.raises(InvalidRequestError, match="send rows of 32 bytes"):
        LeasedViews(stand_in, geometry_of(WHOLE), rows, KEYS)  # type: ignore[arg-type]
