"""The cuda transport with the CPU as the device of server and client: its logic, not its speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contracts.chunks import make_representation
from helpers.device_engine import (
    CHUNK_TOKENS,
    Engine,
    blocks_for,
    raw_bytes,
    read_pages,
)
from helpers.gpu_twin import frame_on_device, use_device
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import SMALL, chunks_of, keys_of, tensors_of, tokens
from helpers.slow_device import SlowDevice

from kvstore.client import Chunk, ClientOptions, device_reads
from kvstore.client.chunk import parents, to_torch
from kvstore.client.cuda import CudaClient, CudaTransport
from kvstore.client.device_reads import (
    MAX_BATCH_FRAMES,
    READ_SLOTS,
    DeviceReader,
    Reading,
    Registration,
)
from kvstore.client.session import Session
from kvstore.codecs.paged import FrameKernels, HostKernels, Sums
from kvstore.proto.device import HostDevice
from kvstore.proto.errors import (
    InvalidRequestError,
    LayoutMismatchError,
    LeaseExpiredError,
    TierUnavailableError,
)
from kvstore.proto.types import DIGEST_BYTES, ChunkKey, DType, Model
from kvstore.tiers.gpu import GpuTier

OPTIONS = ClientOptions(chunk_tokens=CHUNK_TOKENS, deadline_ms=DEADLINE_MS)

ServerMaker = Callable[..., LocalServer]


@pytest.fixture
def gpu_server(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> LocalServer:
    """A server whose gpu tier has the CPU as its device."""
    use_device(monkeypatch, tmp_path, HostDevice())
    return make_server("--tiers", "gpu,cpu", "--gpu", "8MiB")


Connect = Callable[..., CudaClient]


@pytest.fixture
def connect(gpu_server: LocalServer) -> Iterator[Connect]:
    made: list[CudaClient] = []

    def connect(representation: Model = SMALL) -> CudaClient:
        made.append(CudaClient(gpu_server.address, representation, OPTIONS))
        return made[-1]

    yield connect
    for client in made:
        client.close()


@pytest.fixture
def client(connect: Connect) -> CudaClient:
    return connect()


@pytest.fixture
def reader() -> Iterator[DeviceReader]:
    made = DeviceReader(HostDevice(), 1 << 16)
    yield made
    made.close()


def store(client: CudaClient, seed: int, count: int) -> list[ChunkKey]:
    keys = keys_of(client, seed, count)
    client.put_chunks(chunks_of(client, keys))
    return keys


def warm(server: LocalServer, client: CudaClient, keys: Sequence[ChunkKey]) -> None:
    """Read chunks often enough for a place in GPU memory, and wait until they have it."""
    for _ in range(2):
        assert len(client.get_chunks(keys)) == len(keys)
    server.settled()
    assert {tier for s in client.stat(keys=keys) for tier in [c.tier for c in s.copies]} >= {"gpu"}


def gpu_of(server: LocalServer) -> GpuTier:
    gpu = server.node.store.tiers.gpu_tier
    assert gpu is not None
    return gpu


@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float8_e4m3fn])
def test_chunks_of_gpu_and_cpu_memory_land_in_the_pages(
    gpu_server: LocalServer, connect: Connect, dtype: DType
) -> None:
    representation = make_representation(dtype=dtype)
    client = connect(representation)
    assert client.transport_name == "cuda"
    keys = store(client, 1, 6)
    warm(gpu_server, client, keys[:2])
    warm(gpu_server, client, keys[3:5])
    engine = Engine(representation, blocks_for(6))
    assert read_pages(client, keys, engine.paged()) == 6
    found = [engine.has(key, i, representation, CHUNK_TOKENS) for i, key in enumerate(keys)]
    assert found == [True] * 6
    gpu_server.settled()


def test_more_chunks_than_a_batch_land_and_no_other_slot_is_touched(
    gpu_server: LocalServer, client: CudaClient
) -> None:
    count = MAX_BATCH_FRAMES + 3
    keys = store(client, 1, count)
    warm(gpu_server, client, keys)
    engine = Engine(SMALL, blocks_for(count) + 2)
    assert read_pages(client, keys, engine.paged()) == count
    found = [engine.has(key, i, SMALL, CHUNK_TOKENS) for i, key in enumerate(keys)]
    assert found == [True] * count
    for layer in range(2):
        rest = engine.slots(layer, 0)[:, count * CHUNK_TOKENS :]
        assert torch.equal(rest, torch.full_like(rest, 7.0))


def test_chunks_of_different_lengths_are_read_in_one_get(
    gpu_server: LocalServer, make_server: ServerMaker
) -> None:
    options = ClientOptions(chunk_tokens=32, deadline_ms=DEADLINE_MS)
    with CudaClient(gpu_server.address, SMALL, options) as client:
        keys = client.keys(tokens(3, 64 + 20))
        sizes = [32, 32, 20]
        chunks = [
            Chunk(key, tensors_of(key, SMALL, size), parent=parent, position=32 * at)
            for at, (key, size, parent) in enumerate(zip(keys, sizes, parents(keys), strict=True))
        ]
        client.put_chunks(chunks)
        warm(gpu_server, client, keys)
        engine = Engine(SMALL, 12)
        assert read_pages(client, keys, engine.paged()) == 3
        for at, (key, size) in enumerate(zip(keys, sizes, strict=True)):
            right = tensors_of(key, SMALL, size)[0][1][1]
            there = engine.slots(1, 1)[:, 32 * at : 32 * at + size]
            assert torch.equal(raw_bytes(there), raw_bytes(to_torch(right, DType.bfloat16)))


def test_a_missing_chunk_ends_the_prefix(gpu_server: LocalServer, client: CudaClient) -> None:
    keys = store(client, 1, 2)
    warm(gpu_server, client, keys)
    others = keys_of(client, 2, 1)
    engine = Engine(SMALL, blocks_for(3))
    found = read_pages(client, [*keys, *others], engine.paged())
    assert found == 2
    assert read_pages(client, others, engine.paged()) == 0
    assert read_pages(client, [], engine.paged()) == 0
    gpu_server.settled()


@pytest.mark.parametrize(("damaged", "place"), [(0, -1), (3, -1), (1, 40)])
def test_a_frame_damaged_on_the_device_is_not_counted_and_is_dropped(
    gpu_server: LocalServer, client: CudaClient, damaged: int, place: int
) -> None:
    keys = store(client, 1, 4)
    warm(gpu_server, client, keys)
    gpu = gpu_of(gpu_server)
    frame_on_device(gpu, keys[damaged])[place] ^= 1
    engine = Engine(SMALL, blocks_for(4))
    assert read_pages(client, keys, engine.paged()) == damaged
    assert eventually(lambda: gpu.find([keys[damaged]]) == [None])
    assert client.lookup(keys=keys).ready == 4, "the copy in memory below is sound, and stays"
    assert read_pages(client, keys, engine.paged()) == 4


def test_a_place_with_another_chunk_ends_the_prefix(
    gpu_server: LocalServer, client: CudaClient
) -> None:
    keys = store(client, 1, 4)
    warm(gpu_server, client, keys)
    gpu = gpu_of(gpu_server)
    frame_on_device(gpu, keys[2])[:] = frame_on_device(gpu, keys[0])
    engine = Engine(SMALL, blocks_for(4))
    assert read_pages(client, keys, engine.paged()) == 2


def test_a_place_that_was_reused_is_looked_up_again(
    gpu_server: LocalServer, client: CudaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = store(client, 1, 2)
    warm(gpu_server, client, keys)
    dropped = drop_meanwhile(gpu_server, monkeypatch, keys[1])
    enter, entered = CudaTransport.get_on_device, []

    def noted(self: CudaTransport, *given: Any) -> Any:
        entered.append(1)
        return enter(self, *given)

    monkeypatch.setattr(CudaTransport, "get_on_device", noted)
    engine = Engine(SMALL, blocks_for(2))
    assert read_pages(client, keys, engine.paged()) == 2
    assert dropped
    assert len(entered) == 2
    assert all(engine.has(key, i, SMALL, CHUNK_TOKENS) for i, key in enumerate(keys))
    gpu_server.settled()


def drop_meanwhile(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch, key: ChunkKey
) -> list[ChunkKey]:
    """Have *key* leave GPU memory once, while frames are read; return it then."""
    moves, start = server.node.store.moves, HostKernels.start
    dropped: list[ChunkKey] = []

    def drop_one(self: HostKernels, *given: Any) -> Sums:
        if not dropped:
            dropped.append(key)
            assert moves.catalog.cast_out("gpu", key, even_if_held=True)
            assert gpu_of(server).delete(key)  # at once: the queue's thread may come too late
        return start(self, *given)

    monkeypatch.setattr(HostKernels, "start", drop_one)
    return dropped


@pytest.mark.parametrize("when", ["before its head is read", "while it is read"])
def test_the_generation_of_a_freed_place_is_seen(
    gpu_server: LocalServer,
    client: CudaClient,
    reader: DeviceReader,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    keys = store(client, 1, 1)
    warm(gpu_server, client, keys)
    transport = client._link.connected()
    assert isinstance(transport, CudaTransport)
    digests = b"".join(key[DIGEST_BYTES:] for key in keys)
    engine = Engine(SMALL, blocks_for(1))
    reading = Reading(transport, reader, keys, engine.paged())
    with transport.get_on_device(digests, DEADLINE_MS, reader) as arriving:
        arrived = list(arriving)
        assert arrived[0].places
        if when == "while it is read":
            drop_meanwhile(gpu_server, monkeypatch, keys[0])
        else:
            gpu_of(gpu_server).delete(keys[0])
        with pytest.raises(LeaseExpiredError):
            reading.run(iter(arrived))


def test_pages_that_are_not_the_models_are_refused_and_nothing_is_held(
    gpu_server: LocalServer, client: CudaClient
) -> None:
    keys = store(client, 1, 2)
    warm(gpu_server, client, keys)
    other = Engine(make_representation(layers=3), blocks_for(2))
    with pytest.raises(LayoutMismatchError):
        read_pages(client, keys, other.paged())
    engine = Engine(SMALL, blocks_for(2))
    for ids in ([0], [0, 1, 2, 9], [0, 0, 1, 2]):
        with pytest.raises(InvalidRequestError):
            read_pages(client, keys, engine.paged(ids))
    gpu_server.settled()


def test_a_device_that_fails_is_an_error_of_the_store_and_nothing_is_held(
    gpu_server: LocalServer, client: CudaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = store(client, 1, 2)
    warm(gpu_server, client, keys)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nand more")

    monkeypatch.setattr(HostKernels, "sums", fail)
    engine = Engine(SMALL, blocks_for(2))
    with pytest.raises(TierUnavailableError, match=r"illegal memory access$"):
        read_pages(client, keys, engine.paged())
    monkeypatch.undo()
    gpu_server.settled()
    assert read_pages(client, keys, engine.paged()) == 2


def a_reader_of_three(server: LocalServer, client: CudaClient) -> tuple[CudaTransport, bytes]:
    """Return a transport with a session of its own, and what it may ask for on the device."""
    keys = store(client, 1, 3)
    warm(server, client, keys)
    transport = CudaTransport(Session(server.dial(), SMALL, OPTIONS))
    return transport, b"".join(key[DIGEST_BYTES:] for key in keys)


def test_a_reader_that_dies_at_work_leaves_nothing_leased(
    gpu_server: LocalServer, client: CudaClient, reader: DeviceReader
) -> None:
    transport, digests = a_reader_of_three(gpu_server, client)
    with transport.get_on_device(digests, DEADLINE_MS, reader) as arriving:
        next(arriving)
        assert gpu_server.usage().leases == 1
        transport._socket.close()  # what the kernel does for a process that is killed
        assert eventually(lambda: gpu_server.usage().leases == 0)
    transport.close()
    transport.session.close()
    gpu_server.settled()


def test_what_is_mapped_stays_so_until_the_last_get_at_work_has_ended(
    gpu_server: LocalServer, client: CudaClient, reader: DeviceReader
) -> None:
    transport, digests = a_reader_of_three(gpu_server, client)
    unmapped: list[bool] = []
    assert transport.arena is not None
    transport.arena = replace(transport.arena, close=lambda: unmapped.append(True))
    with (
        transport.get_on_device(digests, DEADLINE_MS, reader) as first,
        transport.get_on_device(digests, DEADLINE_MS, reader) as second,
    ):
        next(first), next(second)
        transport.close()
        transport.close()
        assert not unmapped
    assert unmapped == [True]
    with (
        pytest.raises(LeaseExpiredError, match="closed"),
        transport.get_on_device(digests, DEADLINE_MS, reader),
    ):
        pass
    transport.session.close()
    gpu_server.settled()


def test_a_reader_whose_kernels_cannot_be_had_gives_its_memory_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released: list[int] = []

    class Counting(HostDevice):
        def release(self, arena: torch.Tensor) -> None:
            released.append(len(arena))
            super().release(arena)

    def cannot(device: torch.device) -> FrameKernels:
        raise TierUnavailableError("gpu", "cannot compile")

    monkeypatch.setattr(device_reads, "open_kernels", cannot)
    with pytest.raises(TierUnavailableError, match="cannot compile"):
        DeviceReader(Counting(), 1 << 16)
    assert released == [READ_SLOTS << 16]


def test_more_frames_of_cpu_memory_than_the_ring_has_slots_land_in_the_pages(
    gpu_server: LocalServer, client: CudaClient
) -> None:
    count = 3 * READ_SLOTS + 1
    keys = store(client, 1, count)
    engine = Engine(SMALL, blocks_for(count))
    assert read_pages(client, keys, engine.paged()) == count
    found = [engine.has(key, i, SMALL, CHUNK_TOKENS) for i, key in enumerate(keys)]
    assert found == [True] * count


# --- what cannot be mapped


def assert_read_without_arena(client: CudaClient, why: str) -> None:
    keys = store(client, 1, 3)
    engine = Engine(SMALL, blocks_for(3))
    assert read_pages(client, keys, engine.paged()) == 3
    assert all(engine.has(key, i, SMALL, CHUNK_TOKENS) for i, key in enumerate(keys))
    transport = client._link.connected()
    assert isinstance(transport, CudaTransport)
    assert why in transport.without_arena


def test_frames_on_disk_land_in_the_pages(make_server: ServerMaker) -> None:
    server = make_server("--tiers", "cpu,disk")
    with CudaClient(server.address, SMALL, OPTIONS) as client:
        keys = store(client, 1, 3)
        server.settled()
        server.leave_memory(keys)
        engine = Engine(SMALL, blocks_for(3))
        assert read_pages(client, keys, engine.paged()) == 3
        assert all(engine.has(key, i, SMALL, CHUNK_TOKENS) for i, key in enumerate(keys))
        assert_read_without_arena(client, "shares no GPU memory")


def test_a_device_that_this_process_does_not_see_is_named_and_cpu_memory_serves(
    gpu_server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = gpu_of(gpu_server)
    monkeypatch.setattr(gpu.device, "identity", "cuda:GPU-elsewhere")
    file = HostDevice()
    handle = file.allocate(64)
    monkeypatch.setattr(gpu, "arena_file", lambda: file.export(handle))
    with CudaClient(gpu_server.address, SMALL, OPTIONS) as client:
        assert_read_without_arena(client, "GPU-elsewhere is not among")
    file.release(handle)


def test_pages_are_written_behind_the_engines_work_and_reported_once_they_are(
    gpu_server: LocalServer, client: CudaClient
) -> None:
    keys = store(client, 1, 4)
    warm(gpu_server, client, keys[:2])
    device = SlowDevice()
    engine = Engine(SMALL, blocks_for(4))
    paged = engine.paged()
    reader = DeviceReader(device, 1 << 16)
    wiped: list[bool] = []

    def wipe() -> None:
        engine.tensor.zero_()
        wiped.append(True)

    device.compute.launch(wipe)  # the engine zeroes the blocks that it gives out
    after = device.compute.record()
    assert client.read_on_device(keys, paged, reader, after) == 4
    assert wiped == [True]
    assert all(engine.has(key, i, SMALL, CHUNK_TOKENS) for i, key in enumerate(keys))
    reader.close()


def test_a_session_registers_no_more_slabs_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_reads, "MAX_SLABS", 2)
    device = HostDevice()
    slabs = [np.zeros(4096, np.uint8) for _ in range(3)]
    registration = Registration(device)
    for number, slab in enumerate(slabs):
        registration.note(number, slab)
    assert eventually(lambda: device.is_registered(slabs[1]))
    registration.close()
    assert not device.is_registered(slabs[1])
    assert 2 not in registration._slabs


def test_a_client_of_a_server_without_a_socket_opens_one_session(make_server: ServerMaker) -> None:
    server = make_server("--socket", "off")
    with CudaClient(server.address, SMALL, OPTIONS) as client:
        keys = store(client, 1, 2)
        assert client.transport_name != "cuda"
        assert len(server.node.sessions) == 1
        engine = Engine(SMALL, blocks_for(2))
        with pytest.raises(TierUnavailableError, match="not on this host"):
            read_pages(client, keys, engine.paged())


def test_slabs_are_registered_by_a_thread_in_pieces_and_no_copy_is_of_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_reads, "PIECE_BYTES", 4096)
    device = HostDevice()
    slab = np.zeros(3 * 4096, np.uint8)
    registration = Registration(device)
    registration.note(7, slab)
    registration.note(7, slab)
    assert eventually(lambda: device.is_registered(slab[8192:]))
    assert device.is_registered(slab[4096:8192])
    assert not device.is_registered(slab), "three registrations, not one"
    cuts = [slab[100:9000][cut] for cut in registration.cuts(slab[100:9000])]
    assert [len(one) for one in cuts] == [3996, 4096, 808]
    registration.close()
    registration.close()
    assert not device.is_registered(slab[:4096])


def test_a_damaged_header_on_the_device_is_a_miss(
    gpu_server: LocalServer, client: CudaClient
) -> None:
    keys = store(client, 1, 2)
    warm(gpu_server, client, keys)
    gpu = gpu_of(gpu_server)
    frame_on_device(gpu, keys[1])[40] ^= 1
    engine = Engine(SMALL, blocks_for(2))
    assert read_pages(client, keys, engine.paged()) == 1
