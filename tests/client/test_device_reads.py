"""Reads into an engine's pages, with the CPU as the device of server and client."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ServerMaker
from contracts.chunks import make_frame, make_representation
from helpers.cpu_kernels import compile_kernels
from helpers.device_engine import CHUNK_TOKENS, Engine, blocks_for, raw_bytes, read_pages
from helpers.device_frames import frame_on_device, use_device
from helpers.disk_damage import flip_a_bit
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import SMALL, chunks_of, keys_of, steady_tensors, store, tensors_of, tokens

from kvstore.client import Chunk, Client, ClientOptions, device_reads
from kvstore.client.chunk import parents, to_torch
from kvstore.client.cuda import CudaClient, CudaTransport
from kvstore.client.device_reads import (
    BATCHES_AHEAD,
    MAX_BATCH_FRAMES,
    READ_SLOTS,
    DeviceDecoder,
    DeviceReader,
    Reading,
    Registration,
)
from kvstore.client.frames import FileFrame
from kvstore.client.session import Session
from kvstore.codecs.base import codec_by_name, codec_class
from kvstore.codecs.kvq_kernels import SOURCES, KvqKernels, Wait
from kvstore.codecs.paged import FrameAt, HostKernels, Paged, Sums
from kvstore.codecs.transcode import transcode
from kvstore.proto.buffers import Bytes
from kvstore.proto.device import HostDevice
from kvstore.proto.errors import (
    InvalidFrameError,
    InvalidRequestError,
    LayoutMismatchError,
    LeaseExpiredError,
    TierUnavailableError,
    UnknownCodecError,
)
from kvstore.proto.frame import FrameHeader, raw_frame_bytes
from kvstore.proto.types import DIGEST_BYTES, Accuracy, ChunkKey, DType, KVLayout, Model
from kvstore.tiers.gpu import GpuTier

OPTIONS = ClientOptions(chunk_tokens=CHUNK_TOKENS, deadline_ms=DEADLINE_MS)
WIDE = make_representation(layers=2, kv_heads=2, head_dim=64)
"""Its layers are large enough for kvq to make them smaller."""
COUNT = BATCHES_AHEAD + 2
KERNELS = ["kvq_open", "kvq_symbols", "kvq_numbers_bfloat16"]

Connect = Callable[..., CudaClient]
Serve = Callable[..., tuple[LocalServer, CudaClient, list[ChunkKey]]]


@pytest.fixture
def gpu_server(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> LocalServer:
    """A server whose gpu tier has the CPU as its device."""
    use_device(monkeypatch, tmp_path, HostDevice())
    return make_server("--tiers", "gpu,cpu", "--gpu", "8MiB")


@pytest.fixture
def connect() -> Iterator[Connect]:
    made: list[CudaClient] = []

    def connect(
        server: LocalServer, model: Model = SMALL, options: ClientOptions = OPTIONS
    ) -> CudaClient:
        made.append(CudaClient(server.address, model, options))
        return made[-1]

    yield connect
    for client in made:
        client.close()


@pytest.fixture
def client(gpu_server: LocalServer, connect: Connect) -> CudaClient:
    return connect(gpu_server)


@pytest.fixture
def reader() -> Iterator[DeviceReader]:
    made = DeviceReader(HostDevice(), 1 << 16)
    yield made
    made.close()


def warm(server: LocalServer, client: CudaClient, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
    """Read chunks often enough for a place in GPU memory, and wait until they have it."""
    for _ in range(2):
        assert len(client.get_chunks(keys)) == len(keys)
    server.settled()
    assert {tier for s in client.stat(keys=keys) for tier in [c.tier for c in s.copies]} >= {"gpu"}
    return list(keys)


def gpu_of(server: LocalServer) -> GpuTier:
    gpu = server.node.store.tiers.gpu_tier
    assert gpu is not None
    return gpu


def assert_reads_into_pages(
    client: CudaClient, keys: Sequence[ChunkKey], engine: Engine | None = None
) -> None:
    """Every chunk comes, right and where it belongs."""
    engine = engine or Engine(client.model, blocks_for(len(keys)))
    assert read_pages(client, keys, engine.paged()) == len(keys)
    found = [engine.has(key, i, client.model, CHUNK_TOKENS) for i, key in enumerate(keys)]
    assert found == [True] * len(keys)


# --- what comes


@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float8_e4m3fn])
def test_chunks_of_gpu_and_cpu_memory_land_in_the_pages(
    gpu_server: LocalServer, connect: Connect, dtype: DType
) -> None:
    client = connect(gpu_server, make_representation(dtype=dtype))
    assert client.transport_name == "cuda"
    keys = store(client, 1, 6)
    warm(gpu_server, client, keys[:2])
    warm(gpu_server, client, keys[3:5])
    assert_reads_into_pages(client, keys)
    gpu_server.settled()


def test_more_chunks_than_a_batch_or_the_ring_land_and_no_other_slot_is_touched(
    gpu_server: LocalServer, client: CudaClient
) -> None:
    assert_reads_into_pages(client, store(client, 2, 3 * READ_SLOTS + 1))
    count = MAX_BATCH_FRAMES + 3
    engine = Engine(SMALL, blocks_for(count) + 2)
    assert_reads_into_pages(client, warm(gpu_server, client, store(client, 1, count)), engine)
    for layer in range(2):
        rest = engine.slots(layer, 0)[:, count * CHUNK_TOKENS :]
        assert torch.equal(rest, torch.full_like(rest, 7.0))


def test_chunks_of_different_lengths_are_read_in_one_get(
    gpu_server: LocalServer, connect: Connect
) -> None:
    client = connect(gpu_server, options=replace(OPTIONS, chunk_tokens=32))
    keys, sizes = client.keys(tokens(3, 64 + 20)), [32, 32, 20]
    client.put_chunks([
        Chunk(key, tensors_of(key, SMALL, size), parent=parent, position=32 * at)
        for at, (key, size, parent) in enumerate(zip(keys, sizes, parents(keys), strict=True))
    ])  # fmt: skip
    warm(gpu_server, client, keys)
    engine = Engine(SMALL, 12)
    assert read_pages(client, keys, engine.paged()) == 3
    for at, (key, size) in enumerate(zip(keys, sizes, strict=True)):
        right = tensors_of(key, SMALL, size)[0][1][1]
        there = engine.slots(1, 1)[:, 32 * at : 32 * at + size]
        assert torch.equal(raw_bytes(there), raw_bytes(to_torch(right, DType.bfloat16)))


# --- what is wrong


@pytest.mark.parametrize(("damaged", "place"), [(0, -1), (3, -1), (1, 40)])
def test_a_frame_damaged_on_the_device_is_not_counted_and_is_dropped(
    gpu_server: LocalServer, client: CudaClient, damaged: int, place: int
) -> None:
    keys = warm(gpu_server, client, store(client, 1, 4))
    gpu = gpu_of(gpu_server)
    frame_on_device(gpu, keys[damaged])[place] ^= 1
    engine = Engine(SMALL, blocks_for(4))
    assert read_pages(client, keys, engine.paged()) == damaged
    assert eventually(lambda: gpu.find([keys[damaged]]) == [None])
    assert client.lookup(keys=keys).ready == 4, "the copy in memory below is sound, and stays"
    assert read_pages(client, keys, engine.paged()) == 4


def test_another_chunk_in_its_place_ends_a_prefix(
    gpu_server: LocalServer, client: CudaClient
) -> None:
    keys = warm(gpu_server, client, store(client, 1, 4))
    gpu = gpu_of(gpu_server)
    frame_on_device(gpu, keys[2])[:] = frame_on_device(gpu, keys[0])
    assert read_pages(client, keys, Engine(SMALL, blocks_for(4)).paged()) == 2


def drop_meanwhile(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch, key: ChunkKey
) -> list[ChunkKey]:
    """Have *key* leave GPU memory once, while frames are read; return it then."""
    moves, start = server.node.store.moves, HostKernels.start
    dropped: list[ChunkKey] = []

    def drop_one(self: HostKernels, *given: Any) -> Sums:
        if not dropped:
            dropped.append(key)
            assert moves.catalog.drop_copy("gpu", key, even_if_held=True)
            assert gpu_of(server).delete(key)  # at once: the queue's thread may come too late
        return start(self, *given)

    monkeypatch.setattr(HostKernels, "start", drop_one)
    return dropped


def test_a_place_that_was_reused_is_looked_up_again(
    gpu_server: LocalServer, client: CudaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = warm(gpu_server, client, store(client, 1, 2))
    dropped = drop_meanwhile(gpu_server, monkeypatch, keys[1])
    enter, entered = CudaTransport.get_on_device, []

    def noted(self: CudaTransport, *given: Any) -> Any:
        entered.append(1)
        return enter(self, *given)

    monkeypatch.setattr(CudaTransport, "get_on_device", noted)
    assert_reads_into_pages(client, keys)
    assert (dropped, len(entered)) == (keys[1:], 2)
    gpu_server.settled()


def test_the_generation_of_a_place_that_was_freed_before_its_head_was_read_is_seen(
    gpu_server: LocalServer, client: CudaClient, reader: DeviceReader
) -> None:
    keys = warm(gpu_server, client, store(client, 1, 1))
    transport = client._link.connected()
    assert isinstance(transport, CudaTransport)
    reading = Reading(transport, reader, keys, Engine(SMALL, blocks_for(1)).paged())
    with transport.get_on_device(keys[0][DIGEST_BYTES:], DEADLINE_MS, reader) as arriving:
        arrived = list(arriving)
        assert arrived[0].places
        gpu_of(gpu_server).delete(keys[0])
        with pytest.raises(LeaseExpiredError):
            reading.run(iter(arrived))


def test_pages_that_are_not_the_models_are_refused_and_nothing_is_held(
    gpu_server: LocalServer, client: CudaClient
) -> None:
    keys = warm(gpu_server, client, store(client, 1, 2))
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
    keys = warm(gpu_server, client, store(client, 1, 2))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nand more")

    monkeypatch.setattr(HostKernels, "sums", fail)
    with pytest.raises(TierUnavailableError, match=r"illegal memory access$"):
        read_pages(client, keys, Engine(SMALL, blocks_for(2)).paged())
    monkeypatch.undo()
    gpu_server.settled()
    assert_reads_into_pages(client, keys)


@contextmanager
def transport_to(server: LocalServer) -> Iterator[CudaTransport]:
    """A transport with a session of its own."""
    transport = CudaTransport(Session(server.dial(), SMALL, OPTIONS))
    yield transport
    transport.close()
    transport.session.close()


def test_what_is_mapped_stays_so_until_the_last_get_at_work_has_ended(
    gpu_server: LocalServer, client: CudaClient, reader: DeviceReader
) -> None:
    keys = warm(gpu_server, client, store(client, 1, 3))
    digests = b"".join(key[DIGEST_BYTES:] for key in keys)
    unmapped: list[bool] = []
    with transport_to(gpu_server) as bare:
        assert bare.arena is not None
        bare.arena = replace(bare.arena, close=lambda: unmapped.append(True))
        with (
            bare.get_on_device(digests, DEADLINE_MS, reader) as first,
            bare.get_on_device(digests, DEADLINE_MS, reader) as second,
        ):
            next(first), next(second)
            bare.close()
            bare.close()
            assert not unmapped
        assert unmapped == [True]
        with (
            pytest.raises(LeaseExpiredError, match="closed"),
            bare.get_on_device(digests, DEADLINE_MS, reader),
        ):
            pass
    gpu_server.settled()


# --- what cannot be mapped


def test_a_device_that_this_process_does_not_see_is_named_and_cpu_memory_serves(
    gpu_server: LocalServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, file = gpu_of(gpu_server), HostDevice()
    handle = file.allocate(64)
    monkeypatch.setattr(gpu.device, "identity", "cuda:GPU-elsewhere")
    monkeypatch.setattr(gpu, "arena_file", lambda: file.export(handle))
    client = connect(gpu_server)
    assert_reads_into_pages(client, store(client, 7, 3))
    transport = client._link.connected()
    assert isinstance(transport, CudaTransport)
    assert "GPU-elsewhere is not among" in transport.without_arena
    file.release(handle)


def test_a_client_of_a_server_without_a_socket_opens_one_session(
    make_server: ServerMaker, connect: Connect
) -> None:
    server = make_server("--socket", "off")
    client = connect(server)
    keys = store(client, 1, 2)
    assert client.transport_name != "cuda"
    assert len(server.node.sessions) == 1
    with pytest.raises(TierUnavailableError, match="not on this host"):
        read_pages(client, keys, Engine(SMALL, blocks_for(2)).paged())


def test_slabs_are_registered_by_a_thread_in_pieces_up_to_a_limit_and_no_copy_is_of_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_reads, "PIECE_BYTES", 4096)
    monkeypatch.setattr(device_reads, "MAX_SLABS", 2)
    device = HostDevice()
    slab, *others = (np.zeros(3 * 4096, np.uint8) for _ in range(3))
    registration = Registration(device)
    registration.add(7, slab)
    registration.add(7, slab)
    assert eventually(lambda: device.is_registered(slab[8192:]))
    assert device.is_registered(slab[4096:8192])
    assert not device.is_registered(slab), "three registrations, not one"
    cuts = [slab[100:9000][cut] for cut in registration.cuts(slab[100:9000])]
    assert [len(one) for one in cuts] == [3996, 4096, 808]
    for number, other in enumerate(others):
        registration.add(number, other)
    assert eventually(lambda: device.is_registered(others[0][8192:]))
    assert 1 not in registration._slabs
    registration.close()
    registration.close()
    assert not device.is_registered(slab[:4096])


# --- compressed frames


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> KvqKernels:
    """The CUDA source, compiled for the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("kvq")
    return KvqKernels(torch.device("cpu"), compile_kernels(folder, SOURCES, KERNELS, 64))


@pytest.fixture
def serve(
    make_server: ServerMaker, connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Serve:
    """Start a server with a gpu tier, and store a prompt of which only copies by *codec* on its
    disk are left.
    """
    use_device(monkeypatch, tmp_path, HostDevice())

    def serve(codec: str, count: int = COUNT) -> tuple[LocalServer, CudaClient, list[ChunkKey]]:
        terms = ("--gpu", "8MiB", "--codec", f"disk={codec}")
        server = make_server("--tiers", "gpu,cpu,disk", *terms)
        client = connect(server, WIDE)
        keys = keys_of(client, 1, count)
        client.put_chunks([
            replace(chunk, tensors=steady_tensors(chunk.key, WIDE, CHUNK_TOKENS))
            for chunk in chunks_of(client, keys)
        ])  # fmt: skip
        assert eventually(lambda: server.node.store.catalog.eviction.count_on("disk") == count)
        server.settled()
        server.leave_memory(keys)
        return server, client, keys

    return serve


class Watched:
    """Kernels whose frames are counted; those of the token ``refused`` are found wrong."""

    def __init__(self, kernels: KvqKernels) -> None:
        self._kernels = kernels
        self.refused = -1
        self.frames = 0

    def decode(self, memory: torch.Tensor, frame: FrameAt, paged: Paged, data: Bytes) -> Wait:
        self.frames += 1
        wait = self._kernels.decode(memory, frame, paged, data)

        def checked() -> None:
            wait()
            if frame.first_token == self.refused:
                raise InvalidFrameError("escapes", "layer 0", "not as many as coded")

        return checked


@pytest.fixture
def decoding(reader: DeviceReader, kernels: KvqKernels) -> tuple[DeviceReader, Watched]:
    """A reader that has the kernels which a device would have."""
    watched = Watched(kernels)
    reader.decoder.__dict__["kvq"] = watched
    assert reader.frame_bytes >= raw_frame_bytes(KVLayout.of(WIDE, CHUNK_TOKENS))
    return reader, watched


Decoding = tuple[DeviceReader, Watched]


def codecs_on_disk(server: LocalServer, keys: Sequence[ChunkKey]) -> set[int]:
    return {server.node.store.catalog.copies(key)["disk"].codec_id for key in keys}


def read(
    client: CudaClient, keys: Sequence[ChunkKey], engine: Engine, reader: DeviceReader | None = None
) -> int:
    return read_pages(client, keys, engine.paged(), Accuracy.approximate, reader)


@pytest.mark.parametrize(
    ("codec", "has_kernels"),
    [("kvq:3", True), ("kvq:3", False), ("kvq:layered", True), ("kivi:8", True), ("raw", True)],
)
def test_kvq_is_decoded_on_the_device_and_what_has_no_kernels_on_the_host(
    serve: Serve, decoding: Decoding, codec: str, has_kernels: bool
) -> None:
    server, client, keys = serve(codec)
    assert codecs_on_disk(server, keys) == {codec_by_name(codec).codec_id}
    engine = Engine(WIDE, blocks_for(COUNT))
    reader, watched = decoding
    if codec != "raw":
        assert read_pages(client, keys, engine.paged(), reader=reader) == 0, "who says nothing"
        assert (engine.tensor == 7.0).all()
        assert watched.frames == 0
    assert read(client, keys, engine, reader if has_kernels else None) == COUNT
    assert watched.frames == (COUNT if codec == "kvq:3" and has_kernels else 0)
    with Client(server.address, WIDE, OPTIONS) as plain:
        found = plain.get_chunks(keys, accuracy=Accuracy.approximate)
    assert [engine.holds(each, at) for at, each in enumerate(found)] == [True] * COUNT
    server.settled()


@pytest.mark.parametrize(("codec", "damaged"), [("kvq:3", 1), ("lossless", 0), ("raw", COUNT - 1)])
def test_a_damaged_frame_ends_the_prefix_and_is_dropped(
    serve: Serve, decoding: Decoding, codec: str, damaged: int, tmp_path: Path
) -> None:
    server, client, keys = serve(codec)
    flip_a_bit(tmp_path / "disk", keys[damaged])
    assert read(client, keys, Engine(WIDE, blocks_for(COUNT)), decoding[0]) == damaged
    copies = server.node.store.catalog.copies
    assert eventually(lambda: "disk" not in copies(keys[damaged]))
    assert all("disk" in copies(key) for key in keys if key != keys[damaged])
    server.settled()


def test_contents_that_only_the_kernels_find_wrong_end_the_prefix_and_are_asked_to_be_dropped(
    serve: Serve, decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client, keys = serve("kvq:3", 3)
    reader, watched = decoding
    watched.refused = CHUNK_TOKENS
    dropped: list[ChunkKey] = []
    monkeypatch.setattr(client._link, "quarantine", lambda _, key, __: dropped.append(key))
    assert read(client, keys, Engine(WIDE, blocks_for(3)), reader) == 1
    assert dropped == [keys[1]]


@pytest.mark.parametrize("codec", ["kvq:3", "lossless"])
def test_memory_that_was_reused_is_said_before_what_is_wrong_in_it(
    kernels: KvqKernels, codec: str
) -> None:
    _, raw = make_frame(1, CHUNK_TOKENS, representation=WIDE)
    room = np.empty(2 * len(raw), np.uint8)
    header = transcode(raw, codec_by_name(codec), room)
    frame = room[: header.frame_bytes]
    frame[int(header.segments[0]["offset"])] = 0xFF
    decoder = DeviceDecoder(HostKernels(), torch.device("cpu"))
    decoder.__dict__["kvq"] = kernels

    def confirm() -> None:
        raise LeaseExpiredError("the chunk was replaced")

    with pytest.raises(LeaseExpiredError):
        decoder.begin(FrameAt(0, header, 0), frame, confirm, Engine(WIDE, blocks_for(1)).paged())


def test_a_frame_of_a_codec_to_come_or_that_states_less_than_was_asked_for_is_missing_and_stays(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client, keys = serve("kivi:8", 2)
    engine = Engine(WIDE, blocks_for(2))

    def refuse(self: object, header: FrameHeader) -> None:
        raise UnknownCodecError("6 revision 2", "kivi:8 is 6 revision 1")

    with monkeypatch.context() as patch:
        patch.setattr(codec_class("kivi"), "check_header", refuse)
        assert read(client, keys, engine) == 0
    transport = client._link.connected()
    assert isinstance(transport, CudaTransport)
    request = transport.request
    monkeypatch.setattr(
        transport,
        "request",
        lambda plan, via: request(replace(plan, minimum=Accuracy.approximate), via),
    )
    assert read_pages(client, keys, engine.paged()) == 0
    assert (engine.tensor == 7.0).all()
    server.settled()
    assert codecs_on_disk(server, keys) == {codec_by_name("kivi:8").codec_id}


@pytest.mark.parametrize("readable", [0, 1])
def test_a_file_that_cannot_be_read_ends_the_prefix_and_is_an_error_at_its_start(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, readable: int
) -> None:
    server, client, keys = serve("lossless", 3)
    engine = Engine(WIDE, blocks_for(3))
    read_file, left = FileFrame._bytes, [readable]

    def fail(self: FileFrame, first: int, last: int) -> Bytes:
        left[0] -= 1
        if left[0] < 0:
            raise TierUnavailableError("disk", "its file cannot be read")
        return read_file(self, first, last)

    monkeypatch.setattr(FileFrame, "_bytes", fail)
    if readable:
        assert read(client, keys, engine) == readable
    else:
        with pytest.raises(TierUnavailableError, match="cannot be read"):
            read(client, keys, engine)
    monkeypatch.undo()
    assert codecs_on_disk(server, keys) == {codec_class("lossless").codec_id}
