"""The cuda transport with the CPU as the device of server and client: its logic, not its speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from contracts.chunks import make_representation
from gpu_twin import use_device
from local_server import DEADLINE_MS, LocalServer, eventually
from prompts import SMALL, chunks_of, keys_of, tensors_of, tokens

from kvstore.client import Chunk, ClientOptions, cuda
from kvstore.client.arena import Arena, open_arena
from kvstore.client.client import parents
from kvstore.client.cuda import MAX_BATCH_FRAMES, CudaClient, CudaTransport
from kvstore.client.device_pages import DevicePages
from kvstore.client.pages import PageAxes
from kvstore.client.session import Session
from kvstore.client.tensors import to_torch
from kvstore.codecs.paged import FrameKernels, HostKernels
from kvstore.proto.device import HostDevice
from kvstore.proto.errors import (
    InvalidRequestError,
    LayoutMismatchError,
    LeaseExpiredError,
    TierUnavailableError,
)
from kvstore.proto.types import ChainDigest, ChunkKey, DType, Representation
from kvstore.tiers.gpu import GpuTier

CHUNK_TOKENS, BLOCK_TOKENS = 16, 8
OPTIONS = ClientOptions(chunk_tokens=CHUNK_TOKENS, deadline_ms=DEADLINE_MS)
NHD = PageAxes.parse("layer part block token head dim")

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

    def connect(representation: Representation = SMALL) -> CudaClient:
        made.append(CudaClient(gpu_server.address, representation, OPTIONS))
        return made[-1]

    yield connect
    for client in made:
        client.close()


@pytest.fixture
def client(connect: Connect) -> CudaClient:
    return connect()


class Engine:
    """Pages of an engine with *blocks* blocks, full of sevens."""

    def __init__(self, representation: Representation, blocks: int) -> None:
        (group,) = representation.layer_groups
        dtype = getattr(torch, group.dtype.name)
        layers = len(group.layer_ids)
        shape = (layers, 2, blocks, BLOCK_TOKENS, group.kv_heads, group.head_dim)
        self.tensor = torch.full(shape, 7.0).to(dtype)
        self.dtype = group.dtype
        self.pages = DevicePages(representation, self.tensor, NHD)
        self.block_ids = list(reversed(range(blocks)))

    def slots(self, layer: int, part: int) -> torch.Tensor:
        """(kv_heads, slots, head_dim) in the order of the request's tokens."""
        ordered = self.tensor[layer, part, self.block_ids]
        return ordered.flatten(0, 1).transpose(0, 1)

    def has(self, key: ChunkKey, index: int, representation: Representation, size: int) -> bool:
        """Whether the chunk's tokens are where chunk *index* of the request belongs."""
        right = tensors_of(key, representation, size)
        start = index * CHUNK_TOKENS
        for layer, parts in enumerate(right[0]):
            for part, wanted in enumerate(parts):
                there = self.slots(layer, part)[:, start : start + size]
                if not torch.equal(_raw(there), _raw(to_torch(wanted, self.dtype))):
                    return False
        return True


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def blocks_for(chunks: int) -> int:
    return chunks * CHUNK_TOKENS // BLOCK_TOKENS


def store(client: CudaClient, seed: int, count: int) -> list[ChunkKey]:
    keys = keys_of(client, seed, count)
    client.put(chunks_of(client, keys))
    return keys


def warm(server: LocalServer, client: CudaClient, keys: Sequence[ChunkKey]) -> None:
    """Read chunks often enough for a place in GPU memory, and wait until they have it."""
    for _ in range(2):
        assert len(client.get(keys)) == len(keys)
    server.settled()
    assert {tier for s in client.stat(keys) for tier in [c.tier for c in s.copies]} >= {"gpu"}


def gpu_of(server: LocalServer) -> GpuTier:
    gpu = server.node.manager.transfers.gpu_tier
    assert gpu is not None
    return gpu


@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float8_e4m3fn, DType.float32])
def test_chunks_of_gpu_and_cpu_memory_land_in_the_pages(
    gpu_server: LocalServer, connect: Connect, dtype: DType
) -> None:
    representation = make_representation(dtype=dtype)
    client = connect(representation)
    keys = store(client, 1, 6)
    warm(gpu_server, client, keys[:2])
    warm(gpu_server, client, keys[3:5])
    engine = Engine(representation, blocks_for(6))
    assert client.get_device_pages(keys, engine.pages, engine.block_ids) == 6
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
    assert client.get_device_pages(keys, engine.pages, engine.block_ids) == count
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
            Chunk(key, tensors_of(key, SMALL, size), parent, position=32 * at)
            for at, (key, size, parent) in enumerate(zip(keys, sizes, parents(keys), strict=True))
        ]
        client.put(chunks)
        warm(gpu_server, client, keys)
        engine = Engine(SMALL, 12)
        assert client.get_device_pages(keys, engine.pages, engine.block_ids) == 3
        for at, (key, size) in enumerate(zip(keys, sizes, strict=True)):
            right = tensors_of(key, SMALL, size)[0][1][1]
            there = engine.slots(1, 1)[:, 32 * at : 32 * at + size]
            assert torch.equal(_raw(there), _raw(to_torch(right, DType.bfloat16)))


def test_a_missing_chunk_ends_the_prefix(gpu_server: LocalServer, client: CudaClient) -> None:
    keys = store(client, 1, 2)
    warm(gpu_server, client, keys)
    others = keys_of(client, 2, 1)
    engine = Engine(SMALL, blocks_for(3))
    found = client.get_device_pages([*keys, *others], engine.pages, engine.block_ids)
    assert found == 2
    assert client.get_device_pages(others, engine.pages, engine.block_ids) == 0
    assert client.get_device_pages([], engine.pages, engine.block_ids) == 0
    gpu_server.settled()


@pytest.mark.parametrize("damaged", [0, 1, 3])
def test_a_frame_damaged_on_the_device_is_not_counted_and_is_dropped(
    gpu_server: LocalServer, client: CudaClient, damaged: int
) -> None:
    keys = store(client, 1, 4)
    warm(gpu_server, client, keys)
    gpu = gpu_of(gpu_server)
    with gpu.lend(keys[damaged], gpu.device.stream()) as frame:
        assert frame is not None
        frame[-1] ^= 1
    engine = Engine(SMALL, blocks_for(4))
    assert client.get_device_pages(keys, engine.pages, engine.block_ids) == damaged
    assert eventually(lambda: gpu.find([keys[damaged]]) == [None])
    assert client.lookup(keys).ready == 4, "the copy in memory below is sound, and stays"
    assert client.get_device_pages(keys, engine.pages, engine.block_ids) == 4


def test_a_damaged_header_on_the_device_is_a_miss(
    gpu_server: LocalServer, client: CudaClient
) -> None:
    keys = store(client, 1, 2)
    warm(gpu_server, client, keys)
    gpu = gpu_of(gpu_server)
    with gpu.lend(keys[1], gpu.device.stream()) as frame:
        assert frame is not None
        frame[40] ^= 1
    engine = Engine(SMALL, blocks_for(2))
    assert client.get_device_pages(keys, engine.pages, engine.block_ids) == 1


def test_a_place_that_was_reused_is_looked_up_again(
    gpu_server: LocalServer, client: CudaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = store(client, 1, 2)
    warm(gpu_server, client, keys)
    confirm = CudaTransport.confirm
    raised: list[LeaseExpiredError] = []

    def reused_once(self: CudaTransport, places: Sequence[object]) -> None:
        if not raised:
            raised.append(LeaseExpiredError("replaced on purpose"))
            raise raised[0]
        confirm(self, places)  # type: ignore[arg-type]

    monkeypatch.setattr(CudaTransport, "confirm", reused_once)
    engine = Engine(SMALL, blocks_for(2))
    assert client.get_device_pages(keys, engine.pages, engine.block_ids) == 2
    gpu_server.settled()


def test_the_generation_of_a_freed_place_is_seen(
    gpu_server: LocalServer, client: CudaClient
) -> None:
    keys = store(client, 1, 1)
    warm(gpu_server, client, keys)
    transport = client._connected()
    assert isinstance(transport, CudaTransport)
    digests = [client._digest(key) for key in keys]
    with transport.get_on_device(digests, DEADLINE_MS) as arriving:
        (arrived,) = arriving
        transport.confirm([arrived.place])  # type: ignore[union-attr]
        gpu_of(gpu_server).delete(keys[0])
        with pytest.raises(LeaseExpiredError):
            transport.confirm([arrived.place])  # type: ignore[union-attr]


def test_pages_that_are_not_the_models_are_refused_and_nothing_is_held(
    gpu_server: LocalServer, client: CudaClient
) -> None:
    keys = store(client, 1, 2)
    warm(gpu_server, client, keys)
    other = Engine(make_representation(layers=3), blocks_for(2))
    with pytest.raises(LayoutMismatchError):
        client.get_device_pages(keys, other.pages, other.block_ids)
    engine = Engine(SMALL, blocks_for(2))
    for ids in ([0], [0, 1, 2, 9], [0, 0, 1, 2]):
        with pytest.raises(InvalidRequestError):
            client.get_device_pages(keys, engine.pages, ids)
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
        client.get_device_pages(keys, engine.pages, engine.block_ids)
    monkeypatch.undo()
    gpu_server.settled()
    assert client.get_device_pages(keys, engine.pages, engine.block_ids) == 2


def test_the_rest_of_a_client_works_as_through_shared_memory(client: CudaClient) -> None:
    keys = store(client, 1, 3)
    assert client.transport_name == "cuda"
    assert len(client.get(keys)) == 3
    assert client.delete(keys) == 3


def a_reader_of_three(
    server: LocalServer, client: CudaClient
) -> tuple[CudaTransport, list[ChainDigest]]:
    """Return a transport with a session of its own, and what it may ask for on the device."""
    keys = store(client, 1, 3)
    warm(server, client, keys)
    transport = CudaTransport(Session(server.dial(), SMALL, OPTIONS))
    return transport, [client._digest(key) for key in keys]


def test_a_reader_that_dies_at_work_leaves_nothing_leased(
    gpu_server: LocalServer, client: CudaClient
) -> None:
    transport, digests = a_reader_of_three(gpu_server, client)
    with transport.get_on_device(digests, DEADLINE_MS) as arriving:
        next(arriving)
        assert gpu_server.usage().leases == 1
        transport._socket.close()  # what the kernel does for a process that is killed
        assert eventually(lambda: gpu_server.usage().leases == 0)
    transport.close()
    transport.session.close()
    gpu_server.settled()


def test_what_is_mapped_stays_so_until_the_last_get_at_work_has_ended(
    gpu_server: LocalServer, client: CudaClient
) -> None:
    transport, digests = a_reader_of_three(gpu_server, client)
    unmapped: list[bool] = []
    transport.arena = replace(transport.arena, close=lambda: unmapped.append(True))
    with (
        transport.get_on_device(digests, DEADLINE_MS) as first,
        transport.get_on_device(digests, DEADLINE_MS) as second,
    ):
        next(first), next(second)
        transport.close()
        transport.close()
        assert not unmapped
    assert unmapped == [True]
    with (
        pytest.raises(LeaseExpiredError, match="closed"),
        transport.get_on_device(digests, DEADLINE_MS),
    ):
        pass
    transport.session.close()
    gpu_server.settled()


def test_a_transport_whose_kernels_cannot_be_had_leaves_nothing_mapped(
    gpu_server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmapped: list[bool] = []

    def mapped(*given: object) -> Arena:
        return replace(open_arena(*given), close=lambda: unmapped.append(True))  # type: ignore[arg-type]

    def cannot(device: torch.device) -> FrameKernels:
        raise TierUnavailableError("gpu", "cannot compile")

    monkeypatch.setattr(cuda, "open_arena", mapped)
    monkeypatch.setattr(cuda, "open_kernels", cannot)
    with (
        CudaClient(gpu_server.address, SMALL, OPTIONS) as client,
        pytest.raises(TierUnavailableError, match="cannot compile"),
    ):
        client.keys([1] * 16)
    assert unmapped == [True]
    assert eventually(lambda: len(gpu_server.node.sessions) == 0)


# --- what cannot be mapped


def test_a_server_without_gpu_memory_is_refused_with_the_fix(make_server: ServerMaker) -> None:
    server = make_server()
    with (
        CudaClient(server.address, SMALL, OPTIONS) as client,
        pytest.raises(TierUnavailableError, match="shares no GPU memory"),
    ):
        client.keys([1] * 16)
    assert eventually(lambda: len(server.node.sessions) == 0)


def test_a_device_that_this_process_does_not_see_is_refused_by_name(
    gpu_server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = gpu_of(gpu_server)
    monkeypatch.setattr(gpu.device, "identity", "cuda:GPU-elsewhere")
    file = HostDevice()
    handle = file.allocate(64)
    monkeypatch.setattr(gpu, "arena_file", lambda: file.export(handle))
    with (
        CudaClient(gpu_server.address, SMALL, OPTIONS) as client,
        pytest.raises(TierUnavailableError, match="GPU-elsewhere is not among"),
    ):
        client.keys([1] * 16)
    file.release(handle)
