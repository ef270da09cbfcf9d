"""Compressed frames into an engine's pages, with the CPU as the device of server and client."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from contracts.chunks import make_frame, make_representation
from helpers.cpu_kernels import compile_kernels
from helpers.device_engine import CHUNK_TOKENS, Engine, blocks_for, read_pages
from helpers.disk_damage import flip_a_bit
from helpers.gpu_twin import use_device
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import keys_of, steady_tensors

from kvstore.client import Chunk, Client, ClientOptions
from kvstore.client.chunk import parents
from kvstore.client.cuda import CudaClient, CudaTransport
from kvstore.client.device_reads import BATCHES_AHEAD, DeviceDecoder, DeviceReader
from kvstore.client.frames import FileFrame
from kvstore.codecs.base import codec_by_name, codec_class
from kvstore.codecs.kvq_kernels import SOURCES, KvqKernels, Wait
from kvstore.codecs.paged import FrameAt, HostKernels, Paged
from kvstore.codecs.transcode import transcode
from kvstore.proto.buffers import Bytes
from kvstore.proto.device import HostDevice
from kvstore.proto.errors import (
    InvalidFrameError,
    LeaseExpiredError,
    TierUnavailableError,
    UnknownCodecError,
)
from kvstore.proto.frame import FrameHeader, raw_frame_bytes
from kvstore.proto.types import Accuracy, ChunkKey, KVLayout, PutOutcome

MODEL = make_representation(layers=2, kv_heads=2, head_dim=64)
"""Its layers are large enough for kvq to make them smaller."""
OPTIONS = ClientOptions(chunk_tokens=CHUNK_TOKENS, deadline_ms=DEADLINE_MS)
COUNT = BATCHES_AHEAD + 2
KERNELS = ["kvq_open", "kvq_symbols", "kvq_numbers_bfloat16"]

ServerMaker = Callable[..., LocalServer]
Start = Callable[[str], LocalServer]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> KvqKernels:
    """The CUDA source, compiled for the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("kvq")
    return KvqKernels(torch.device("cpu"), compile_kernels(folder, SOURCES, KERNELS, 64))


@pytest.fixture
def start(make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    """Starts a server with a gpu tier, whose disk keeps frames by the codec given."""
    use_device(monkeypatch, tmp_path, HostDevice())
    return lambda codec: make_server(
        "--tiers", "gpu,cpu,disk", "--gpu", "8MiB", "--codec", f"disk={codec}"
    )


@pytest.fixture
def connect() -> Iterator[Callable[[LocalServer], CudaClient]]:
    made: list[CudaClient] = []

    def connect(server: LocalServer) -> CudaClient:
        made.append(CudaClient(server.address, MODEL, OPTIONS))
        return made[-1]

    yield connect
    for client in made:
        client.close()
        if (reader := READERS.pop(client, None)) is not None:
            reader.close()


Connect = Callable[[LocalServer], CudaClient]


class Watched:
    """Kernels whose frames are counted; those of the token ``refused`` are found wrong."""

    def __init__(self, kernels: KvqKernels, refused: int = -1) -> None:
        self._kernels = kernels
        self._refused = refused
        self.frames = 0

    def decode(self, memory: torch.Tensor, frame: FrameAt, paged: Paged, data: Bytes) -> Wait:
        self.frames += 1
        wait = self._kernels.decode(memory, frame, paged, data)

        def checked() -> None:
            wait()
            if frame.first_token == self._refused:
                raise InvalidFrameError("escapes", "layer 0", "not as many as coded")

        return checked


READERS: dict[CudaClient, DeviceReader] = {}
"""Those that some clients read with."""


def decode_by(client: CudaClient, kernels: KvqKernels, refused: int = -1) -> Watched:
    """Give *client* the kernels that a device would have."""
    reader = DeviceReader(HostDevice(), raw_frame_bytes(KVLayout.of(MODEL, CHUNK_TOKENS)))
    watched = Watched(kernels, refused)
    reader.decoder.__dict__["kvq"] = watched
    READERS[client] = reader
    return watched


def store(server: LocalServer, client: Client, count: int = COUNT) -> list[ChunkKey]:
    """Store a prompt of which only the copies on disk are left."""
    keys = keys_of(client, 1, count)
    chunks = [
        Chunk(
            key, steady_tensors(key, MODEL, CHUNK_TOKENS), parent=parent, position=CHUNK_TOKENS * at
        )
        for at, (key, parent) in enumerate(zip(keys, parents(keys), strict=True))
    ]
    assert {put.outcome for put in client.put_chunks(chunks)} == {PutOutcome.stored}
    assert eventually(lambda: server.node.store.catalog.eviction.count_on("disk") == count)
    server.settled()
    server.leave_memory(keys)
    return keys


def codecs_on_disk(server: LocalServer, keys: Sequence[ChunkKey]) -> set[int]:
    return {server.node.store.catalog.copies(key)["disk"].codec_id for key in keys}


def assert_as_read_on_the_host(
    server: LocalServer, engine: Engine, keys: Sequence[ChunkKey]
) -> None:
    """What is in the pages is what a client without a device reads."""
    with Client(server.address, MODEL, OPTIONS) as client:
        found = client.get_chunks(keys, accuracy=Accuracy.approximate)
    assert len(found) == len(keys)
    assert [engine.holds(each, at) for at, each in enumerate(found)] == [True] * len(keys)


def read(client: CudaClient, keys: Sequence[ChunkKey], engine: Engine) -> int:
    return read_pages(client, keys, engine.paged(), Accuracy.approximate, READERS.get(client))


def test_kvq_frames_are_decoded_on_the_device_for_who_accepts_them(
    start: Start, connect: Connect, kernels: KvqKernels
) -> None:
    server = start("kvq:3")
    client = connect(server)
    keys = store(server, client)
    assert codecs_on_disk(server, keys) == {codec_class("kvq").codec_id}
    watched = decode_by(client, kernels)
    engine = Engine(MODEL, blocks_for(COUNT))
    assert read(client, keys, engine) == COUNT
    assert watched.frames == COUNT
    assert_as_read_on_the_host(server, engine, keys)
    server.settled()


def test_who_says_nothing_is_given_nothing_lossy(
    start: Start, connect: Connect, kernels: KvqKernels
) -> None:
    server = start("kvq:3")
    client = connect(server)
    keys = store(server, client)
    watched = decode_by(client, kernels)
    engine = Engine(MODEL, blocks_for(COUNT))
    assert read_pages(client, keys, engine.paged(), reader=READERS[client]) == 0
    assert (engine.tensor == 7.0).all()
    assert watched.frames == 0


@pytest.mark.parametrize("codec", ["kvq:3", "kvq:layered", "kivi:8", "raw"])
def test_what_has_no_kernels_is_decoded_on_the_host(
    start: Start, connect: Connect, kernels: KvqKernels, codec: str
) -> None:
    server = start(codec)
    client = connect(server)
    keys = store(server, client)
    watched = decode_by(client, kernels) if codec != "kvq:3" else None  # which the CPU has not
    engine = Engine(MODEL, blocks_for(COUNT))
    assert read(client, keys, engine) == COUNT
    assert_as_read_on_the_host(server, engine, keys)
    assert watched is None or watched.frames == 0
    server.settled()


@pytest.mark.parametrize(("codec", "damaged"), [("kvq:3", 1), ("lossless", 0), ("raw", COUNT - 1)])
def test_a_damaged_frame_ends_the_prefix_and_is_dropped(
    start: Start, connect: Connect, kernels: KvqKernels, codec: str, damaged: int, tmp_path: Path
) -> None:
    server = start(codec)
    client = connect(server)
    keys = store(server, client)
    decode_by(client, kernels)
    flip_a_bit(tmp_path / "disk", keys[damaged])
    engine = Engine(MODEL, blocks_for(COUNT))
    assert read(client, keys, engine) == damaged
    copies = server.node.store.catalog.copies
    assert eventually(lambda: "disk" not in copies(keys[damaged]))
    assert all("disk" in copies(key) for key in keys if key != keys[damaged])
    server.settled()


def test_contents_that_only_the_kernels_find_wrong_end_the_prefix_and_are_asked_to_be_dropped(
    start: Start, connect: Connect, kernels: KvqKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start("kvq:3")
    client = connect(server)
    keys = store(server, client, 3)
    decode_by(client, kernels, refused=CHUNK_TOKENS)
    dropped: list[ChunkKey] = []
    monkeypatch.setattr(client._link, "quarantine", lambda _, key, __: dropped.append(key))
    engine = Engine(MODEL, blocks_for(3))
    assert read(client, keys, engine) == 1
    assert dropped == [keys[1]]


@pytest.mark.parametrize("codec", ["kvq:3", "lossless"])
def test_memory_that_was_reused_is_said_before_what_is_wrong_in_it(
    kernels: KvqKernels, codec: str
) -> None:
    _, raw = make_frame(1, CHUNK_TOKENS, representation=MODEL)
    room = np.empty(2 * len(raw), np.uint8)
    header = transcode(raw, codec_by_name(codec), room)
    frame = room[: header.frame_bytes]
    frame[int(header.segments[0]["offset"])] = 0xFF
    decoder = DeviceDecoder(HostKernels(), torch.device("cpu"))
    decoder.__dict__["kvq"] = kernels

    def confirm() -> None:
        raise LeaseExpiredError("the chunk was replaced")

    engine = Engine(MODEL, blocks_for(1))
    with pytest.raises(LeaseExpiredError):
        decoder.begin(FrameAt(0, header, 0), frame, confirm, engine.paged())


def test_a_frame_of_a_codec_to_come_ends_the_prefix_and_stays(
    start: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start("kivi:8")
    client = connect(server)
    keys = store(server, client, 2)

    def refuse(self: object, header: FrameHeader) -> None:
        raise UnknownCodecError("6 revision 2", "kivi:8 is 6 revision 1")

    monkeypatch.setattr(codec_class("kivi"), "check_header", refuse)
    engine = Engine(MODEL, blocks_for(2))
    assert read(client, keys, engine) == 0
    server.settled()
    assert codecs_on_disk(server, keys) == {codec_by_name("kivi:8").codec_id}


@pytest.mark.parametrize("readable", [0, 1])
def test_a_file_that_cannot_be_read_ends_the_prefix_and_is_an_error_at_its_start(
    start: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch, readable: int
) -> None:
    server = start("lossless")
    client = connect(server)
    keys = store(server, client, 3)
    read_file, left = FileFrame._bytes, [readable]

    def fail(self: FileFrame, first: int, last: int) -> Bytes:
        left[0] -= 1
        if left[0] < 0:
            raise TierUnavailableError("disk", "its file cannot be read")
        return read_file(self, first, last)

    monkeypatch.setattr(FileFrame, "_bytes", fail)
    engine = Engine(MODEL, blocks_for(3))
    if readable:
        assert read(client, keys, engine) == readable
    else:
        with pytest.raises(TierUnavailableError, match="cannot be read"):
            read(client, keys, engine)
    monkeypatch.undo()
    assert codecs_on_disk(server, keys) == {codec_class("lossless").codec_id}


def test_a_frame_that_states_less_than_was_asked_for_is_missing(
    start: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start("kivi:8")
    client = connect(server)
    keys = store(server, client, 2)
    transport = client._link.connected()
    assert isinstance(transport, CudaTransport)
    request = transport.request
    monkeypatch.setattr(
        transport,
        "request",
        lambda plan, via: request(replace(plan, minimum=Accuracy.approximate), via),
    )
    engine = Engine(MODEL, blocks_for(2))
    assert read_pages(client, keys, engine.paged()) == 0
    assert (engine.tensor == 7.0).all()
