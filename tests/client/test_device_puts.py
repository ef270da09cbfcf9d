"""Puts out of device memory, with the CPU as the device of server and client."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ServerMaker
from helpers.device_engine import paged_in, read_pages
from helpers.device_frames import use_device
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import SMALL, chunks_of, frame_of, is_right, keys_of
from helpers.slow_device import LateDevice

from kvstore.client import Client, ClientOptions
from kvstore.client.chunk import DeviceChunk, parents
from kvstore.client.cuda import CudaClient, DeviceRing
from kvstore.client.transports.shared_memory import ShmTransport
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import unix_socket
from kvstore.proto.device import HostDevice, Imported
from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    LayoutMismatchError,
    ModelError,
    QuotaExceededError,
    TierUnavailableError,
)
from kvstore.proto.frame import FrameHeader, header_bytes, pack_header
from kvstore.proto.types import ChunkKey, KVLayout, PutOutcome
from kvstore.server.store import device_puts
from kvstore.server.store.device_puts import MAX_RING_BYTES, DevicePuts

TESTS = Path(__file__).resolve().parents[1]
CHUNK_TOKENS, BLOCK_TOKENS = 16, 8
OPTIONS = ClientOptions(chunk_tokens=CHUNK_TOKENS, deadline_ms=DEADLINE_MS)
SLOT_BYTES, SLOTS = 4096, 8
LAYOUT = KVLayout.of(SMALL, CHUNK_TOKENS)
HEAD_BYTES = header_bytes(LAYOUT)
STORED, EXISTS, REFUSED = PutOutcome.stored, PutOutcome.exists, PutOutcome.refused


@pytest.fixture
def device() -> LateDevice:
    """That of the server."""
    return LateDevice()


@pytest.fixture
def server(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: LateDevice
) -> LocalServer:
    use_device(monkeypatch, tmp_path, device)
    return make_server("--tiers", "gpu,cpu", "--gpu", "8MiB")


class Slots(DeviceRing):
    """A ring of SLOTS slots in memory of this process."""

    def __init__(self) -> None:
        host = HostDevice()
        super().__init__(host, host.allocate(SLOTS * SLOT_BYTES))
        self.memory.fill_(0xAB)  # what lay there before

    def write(self, keys: Sequence[ChunkKey]) -> list[DeviceChunk]:
        """Write the frames of a chain, without their headers."""
        chunks = []
        for at, (key, parent) in enumerate(zip(keys, parents(keys), strict=True)):
            start = at * SLOT_BYTES
            frame = torch.from_numpy(frame_of(key, SMALL))
            self.memory[start + HEAD_BYTES : start + len(frame)] = frame[HEAD_BYTES:]
            position = at * CHUNK_TOKENS
            chunks.append(DeviceChunk(key, start, LAYOUT, parent=parent, position=position))
        return chunks


@pytest.fixture
def ring() -> Iterator[Slots]:
    ring = Slots()
    yield ring
    ring.device.release(ring.memory)
    ring.memory = torch.empty(0)  # pytest keeps the ring for a while


@pytest.fixture
def client(server: LocalServer, ring: Slots) -> Iterator[CudaClient]:
    """Closed before the ring's memory goes."""
    with CudaClient(server.address, SMALL, OPTIONS) as client:
        yield client


def put(client: CudaClient, ring: Slots, chunks: Sequence[DeviceChunk]) -> list[PutOutcome]:
    written = ring.device.current_stream().record()
    return [one.outcome for one in client.put_on_device(ring, chunks, written)]


def tiers_of(client: Client, keys: Sequence[ChunkKey]) -> list[set[str]]:
    return [{copy.tier for copy in stat.copies} for stat in client.stat(keys=keys)]


def puts_of(server: LocalServer) -> DevicePuts:
    assert server.node.device_puts is not None
    return server.node.device_puts


def transport_of(client: Client) -> ShmTransport:
    transport = client._link.connected()
    assert isinstance(transport, ShmTransport)
    return transport


# --- there and back


def test_what_was_put_on_the_device_is_read_from_there_with_the_right_bytes(
    server: LocalServer, client: CudaClient, ring: Slots
) -> None:
    keys = keys_of(client, 1, 5)
    assert put(client, ring, ring.write(keys)) == [STORED] * 5
    assert tiers_of(client, keys) == [{"gpu"}] * 5
    (group,) = SMALL.layer_groups
    shape = (len(group.layer_ids), 2, 10, BLOCK_TOKENS, group.kv_heads, group.head_dim)
    pages = torch.zeros(shape, dtype=torch.bfloat16)
    assert read_pages(client, keys, paged_in(pages, list(range(10)))) == 5
    assert all(
        is_right(client, key, one) for key, one in zip(keys, client.get_chunks(keys), strict=True)
    )
    server.settled()
    assert tiers_of(client, keys) == [{"gpu", "cpu"}] * 5, "read through shared memory"


def test_a_chunk_that_is_there_already_exists_and_its_slot_is_free_again_for_a_new_client_too(
    server: LocalServer, client: CudaClient, ring: Slots
) -> None:
    keys = keys_of(client, 1, 2)
    client.put_chunks(chunks_of(client, keys[:1]))
    assert put(client, ring, ring.write(keys)) == [EXISTS, STORED]
    others = keys_of(client, 2, 2)
    assert put(client, ring, ring.write(others)) == [STORED] * 2
    assert is_right(client, others[0], client.get_chunks(others)[0])
    assert put(client, ring, []) == []
    client.close()
    assert not puts_of(server)._rings
    with CudaClient(server.address, SMALL, OPTIONS) as other:
        last = [*others, keys_of(other, 3, 1)[0]]
        assert put(other, ring, ring.write(last)) == [EXISTS, EXISTS, STORED]


# --- the event


def call(
    client: CudaClient, headers: Sequence[FrameHeader], offsets: Sequence[int], deadline_ms: int = 0
) -> pb.PutResponse:
    """Put as the client does, of whatever headers."""
    transport = transport_of(client)
    request = pb.PutDeviceRequest(
        session_id=transport.session.terms.session_id,
        headers=[pack_header(header) for header in headers],
        offsets=offsets,
        deadline_ms=deadline_ms or DEADLINE_MS,
    )
    return transport.calls.call("PutDevice", request, DEADLINE_MS, pb.PutResponse)


def headers_of(client: CudaClient, ring: Slots, chunks: Sequence[DeviceChunk]) -> list[FrameHeader]:
    transport = transport_of(client)
    assert ring.register(transport) == ""
    written = ring.device.current_stream().record()
    return ring.headers(transport.session.representation_digest, chunks, written)


@contextmanager
def waiting_put(
    server: LocalServer, device: LateDevice, work: Callable[[], object]
) -> Iterator[list[object]]:
    """Have *work* wait for the engine's event within; yield what it returned or raised, so far."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(work())
        except KVStoreError as error:
            found.append(error)

    device.is_over.clear()
    thread = threading.Thread(target=run)
    thread.start()
    assert eventually(lambda: any(r.users > 1 for r in puts_of(server)._rings.values()))
    yield found
    thread.join()


def test_the_server_copies_nothing_before_the_event_is_over_which_ends_with_the_deadline(
    server: LocalServer, client: CudaClient, ring: Slots, device: LateDevice
) -> None:
    keys = keys_of(client, 1, 2)
    chunks = ring.write(keys)
    headers = headers_of(client, ring, chunks)
    ring.memory.fill_(0)  # as before the engine's work
    offsets = [chunk.offset for chunk in chunks]
    device.is_over.clear()
    with server.unchanged(), pytest.raises(DeadlineError, match="event is late"):
        call(client, headers, offsets, deadline_ms=20)
    with waiting_put(server, device, lambda: call(client, headers, offsets)) as found:
        assert not found
        assert server.usage().pending_puts == 0, "and nothing is reserved for it"
        ring.write(keys)
        device.is_over.set()
    (reply,) = found
    assert isinstance(reply, pb.PutResponse)
    assert list(reply.outcomes) == [STORED] * 2
    assert is_right(client, keys[0], client.get_chunks(keys)[0])


def test_a_client_that_dies_in_between_leaves_nothing_reserved_and_nothing_mapped(
    server: LocalServer, client: CudaClient, ring: Slots, device: LateDevice
) -> None:
    ended: list[bool] = []
    import_memory = device.import_memory

    def watched(exported: np.ndarray, size_bytes: int) -> Imported:
        one = import_memory(exported, size_bytes)
        return Imported(one.memory, lambda: ended.append(True), one.mapping)

    device.import_memory = watched  # type: ignore[method-assign]
    chunks = ring.write(keys_of(client, 1, 1))
    headers = headers_of(client, ring, chunks)
    before = server.settled()
    with waiting_put(server, device, lambda: call(client, headers, [0])) as found:
        assert not ended
        transport_of(client)._socket.close()  # what the kernel does for a process that is killed
        assert eventually(lambda: bool(ended))
        assert eventually(lambda: server.usage() == before)
    assert isinstance(found[0], KVStoreError)


# --- what is wrong is refused


def test_a_frame_that_is_not_what_its_header_sums_up_is_refused_and_counted(
    server: LocalServer, client: CudaClient, ring: Slots
) -> None:
    keys = keys_of(client, 1, 3)
    chunks = ring.write(keys)
    headers = headers_of(client, ring, chunks)
    ring.memory[chunks[1].offset + 2000] ^= 1
    reply = call(client, headers, [c.offset for c in chunks])
    assert list(reply.outcomes) == [STORED, REFUSED, STORED]
    assert "fails its checksum" in reply.reasons[1]
    assert server.counter("put_invalid_chunks") == 1
    assert server.settled().tiers[0][1].chunks == 2
    assert client.lookup(keys=keys).ready == 1
    assert put(client, ring, ring.write(keys)) == [EXISTS, STORED, EXISTS]


def test_a_device_that_fails_while_it_copies_holds_nothing(
    server: LocalServer, client: CudaClient, ring: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = ring.write(keys_of(client, 1, 2))
    headers_of(client, ring, chunks)

    def fail(*_: object) -> None:
        raise TierUnavailableError("gpu", "fails on purpose")

    with monkeypatch.context() as patch, server.unchanged():
        patch.setattr(puts_of(server)._stream, "copy", fail)
        with pytest.raises(TierUnavailableError, match="fails on purpose"):
            put(client, ring, chunks)
    assert put(client, ring, chunks) == [STORED] * 2


def test_a_ring_on_another_device_is_refused_by_both_sides(
    server: LocalServer, client: CudaClient, ring: Slots
) -> None:
    ring.device.identity = "cuda:GPU-elsewhere"
    (one,) = client.put_on_device(
        ring, ring.write(keys_of(client, 1, 1)), ring.device.current_stream().record()
    )
    assert one.outcome is REFUSED
    assert one.reason == "the server's gpu tier is on cpu, the ring on cuda:GPU-elsewhere"
    assert offered(transport_of(client), len(ring.memory), ring) is unix_socket.Reply.invalid
    assert not puts_of(server)._rings


def offered(transport: ShmTransport, size_bytes: int, ring: Slots) -> unix_socket.Reply:
    exported = ring.device.export(ring.memory)
    token = unix_socket.device_token(ring.device.identity)
    try:
        return transport.slabs.send_descriptor(
            unix_socket.Request(unix_socket.Op.ring, size_bytes, token), exported
        )
    finally:
        os.close(exported)


def test_rings_that_are_not_as_large_as_they_say_may_shrink_or_are_a_second_one_are_refused(
    server: LocalServer, client: CudaClient, ring: Slots
) -> None:
    transport = transport_of(client)
    for size_bytes in (0, 4096, MAX_RING_BYTES + 1):
        assert offered(transport, size_bytes, ring) is unix_socket.Reply.invalid
    loose = unix_socket.create_memfd("ring", SLOT_BYTES)
    request = unix_socket.Request(unix_socket.Op.ring, SLOT_BYTES, unix_socket.device_token("cpu"))
    assert transport.slabs.send_descriptor(request, loose) is unix_socket.Reply.invalid
    os.close(loose)
    assert not puts_of(server)._rings
    assert offered(transport, len(ring.memory), ring) is unix_socket.Reply.ok
    assert offered(transport, len(ring.memory), ring) is unix_socket.Reply.invalid
    assert ring.register(transport) == "the server refused the ring: invalid"
    assert put(client, ring, ring.write(keys_of(client, 1, 1))) == [REFUSED]


def test_puts_without_a_ring_and_beyond_its_end_are_refused(
    server: LocalServer, client: CudaClient, ring: Slots
) -> None:
    chunks = ring.write(keys_of(client, 1, 1))
    transport = transport_of(client)
    written = ring.device.current_stream().record()
    headers = ring.headers(transport.session.representation_digest, chunks, written)
    with pytest.raises(InvalidRequestError, match="send a ring first"):
        call(client, headers, [0])
    assert ring.register(transport) == ""
    with server.unchanged(), pytest.raises(InvalidRequestError, match="within a ring of 32768"):
        call(client, headers, [len(ring.memory) - 2000])
    with pytest.raises(InvalidRequestError, match="offsets=2: give one for each header"):
        call(client, headers, [0, 0])
    for offset in (-64, 32, len(ring.memory)):
        outside = DeviceChunk(chunks[0].key, offset, LAYOUT)
        with pytest.raises(InvalidRequestError, match="a multiple of 64, within 32768"):
            put(client, ring, [outside])


def test_more_puts_at_once_than_a_session_may_have_are_refused(
    server: LocalServer,
    client: CudaClient,
    ring: Slots,
    device: LateDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_puts, "PUTS_AT_ONCE", 1)
    chunks = ring.write(keys_of(client, 1, 2))
    headers = headers_of(client, ring, chunks)
    with waiting_put(server, device, lambda: call(client, headers[:1], [0])) as found:
        with pytest.raises(QuotaExceededError, match="puts_at_once=1"):
            call(client, headers[1:], [SLOT_BYTES])
        device.is_over.set()
    assert isinstance(found[0], pb.PutResponse)


def test_headers_that_are_not_of_this_sessions_raw_chunks_are_refused(
    server: LocalServer, client: CudaClient, ring: Slots
) -> None:
    chunks = ring.write(keys_of(client, 1, 1))
    (header,) = headers_of(client, ring, chunks)
    foreign = ChunkKey(bytes(16) + header.key[16:])
    with server.unchanged():
        with pytest.raises(ModelError, match="not in this session's namespace"):
            call(client, [_changed(header, key=foreign)], [0])
        with pytest.raises(InvalidRequestError, match="the frame is of another model's KV"):
            call(client, [_changed(header, representation=bytes(16))], [0])
        with pytest.raises(KVStoreError):
            call(client, [_changed(header, codec_id=1)], [0])
    with pytest.raises(LayoutMismatchError):
        put(client, ring, [DeviceChunk(header.key, 0, KVLayout(LAYOUT.components * 2))])


def _changed(header: FrameHeader, **changes: object) -> FrameHeader:
    return replace(header, **changes)  # type: ignore[arg-type]


def test_the_arena_stays_read_only_to_clients_and_a_draining_server_takes_no_puts(
    server: LocalServer, client: CudaClient, ring: Slots
) -> None:
    chunks = ring.write(keys_of(client, 1, 1))
    assert put(client, ring, chunks) == [STORED]
    descriptor, size_bytes = transport_of(client).slabs._request(
        unix_socket.Op.slab, unix_socket.ARENA_SLAB
    )
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, size_bytes)
    os.close(descriptor)
    headers = headers_of(client, ring, chunks)
    server.node.store.writes.is_draining = True
    with pytest.raises(KVStoreError, match="draining"):
        call(client, headers, [0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_another_process_puts_out_of_cuda_memory_and_reads_it_back(tmp_path: Path) -> None:
    server = LocalServer(tmp_path, "--tiers", "gpu,cpu", "--gpu", "64MiB")
    folders = [TESTS.parent / "src", TESTS]
    with closing(server):  # CUDA leaves files open and threads behind
        done = subprocess.run(
            [sys.executable, str(TESTS / "helpers" / "cuda_putter.py"), server.address],
            env={**os.environ, "PYTHONPATH": ":".join(map(str, [*folders, *sys.path]))},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == ["stored " * 4 + "stored", "5 True"]
        assert eventually(lambda: not puts_of(server)._rings)
        tiers = dict(server.settled().tiers)
        assert (tiers["gpu"].chunks, tiers["cpu"].chunks) == (5, 0), "not by way of the host"
