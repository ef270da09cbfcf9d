"""Layered gets: headers, then layer by layer, read from below as they are asked for."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from contracts.chunks import make_representation
from helpers.core_chunks import leased, put_low
from simulation.clock import FakeClock
from simulation.core import Core, frames_of, settings
from simulation.tiers import GatedDisk, SimDisk, no_faults
from simulation.universe import Version, salt, write_frame

from kvstore.proto.frame import FrameTemplate, parse_header
from kvstore.proto.keys import (
    chain_digest,
    chunk_key,
    namespace,
    representation_digest,
    tokens_le32,
)
from kvstore.proto.types import (
    ROOT,
    ChainDigest,
    ChunkInfo,
    DType,
    KVLayout,
    LayerGroup,
    LayerKind,
    layer_order,
)
from kvstore.server.store.layered_reads import READ_AHEAD_SEGMENTS, LayerwiseRead, StreamingLoad
from kvstore.server.store.reads import LayerPart, Loads, ReadTerms

TIER_BYTES = 1 << 20


MODEL = replace(
    make_representation(),
    layer_groups=(
        LayerGroup(LayerKind.attention, DType.bfloat16, (0, 2), 1, 4),
        LayerGroup(LayerKind.mla, DType.bfloat16, (1, 3), 1, 8),
    ),
)
"""Frames of 1.5 KB: two fit a slab. Its layers do not lie in the order in which they are used."""


def prompt(length: int) -> list[Version]:
    """A chain of chunks of MODEL."""
    versions: list[Version] = []
    parent = ROOT
    for seed in range(length):
        template = FrameTemplate(
            key=chunk_key(namespace(salt("red"), MODEL), chain_digest(parent, tokens_le32([seed]))),
            parent=parent,
            representation=representation_digest(MODEL),
            content=bytes(16),
            layout=KVLayout.of(MODEL, 16),
        )
        frame = write_frame(template, seed)
        info = ChunkInfo(template.key, parent, template.layout, 0, len(frame))
        versions.append(Version(info, frame, info, frame, frame))
        parent = ChainDigest(template.key[16:])
    return versions


class CountingDisk(SimDisk):
    """Counts its reads, and can lose a chunk at one of them."""

    reads = 0

    def read(self, *args):  # type: ignore[no-untyped-def]
        self.reads += 1
        return super().read(*args)


@pytest.fixture
def disk() -> CountingDisk:
    return CountingDisk(TIER_BYTES, no_faults())


@pytest.fixture
def core(disk: SimDisk) -> Iterator[Core]:
    with closing(Core([disk], model=MODEL, slabs=8, clock=FakeClock())) as core:
        yield core


def parts_of(
    core: Core, versions: list[Version], seconds: float = 60.0
) -> Generator[LayerPart, None, None]:
    """A layered get under a lease of its own."""
    with leased(core, versions) as keys:
        get = LayerwiseRead(core.moves, keys, ReadTerms(core.session, core.later(seconds)))
        yield from get.parts()


def read(core: Core, versions: list[Version], seconds: float = 60.0) -> list[LayerPart]:
    """What such a get delivers, with copies of the bytes: its own are gone when it is over."""
    parts = parts_of(core, versions, seconds)
    return [part._replace(data=part.data.copy()) for part in parts]


def whole(parts: list[LayerPart], versions: list[Version]) -> int:
    """Return how many chunks came whole, all bytes of which must be right."""
    missing = [np.ones(version.info.size_bytes, bool) for version in versions]
    for part in parts:
        frame = np.frombuffer(frames_of(versions)[part.chunk], np.uint8)
        assert part.frame_bytes == len(frame)
        stop = part.offset + len(part.data)
        assert np.array_equal(part.data, frame[part.offset : stop])
        missing[part.chunk][part.offset : stop] = False
    for version, left in zip(versions, missing, strict=True):
        header = parse_header(np.frombuffer(version.frame, np.uint8))
        end = header.header_bytes
        for row in header.segments:
            left[end : int(row["offset"])] = False  # padding does not travel
            end = int(row["offset"] + row["stored_bytes"])
    return sum(not left.any() for left in missing)


@pytest.mark.parametrize("low", [False, True], ids=["memory", "disk"])
def test_headers_come_first_then_each_layer_of_all_chunks(core: Core, low: bool) -> None:
    versions = prompt(5)
    if low:
        put_low(core, versions)
    else:
        core.put(versions)
    parts = read(core, versions)
    header = parse_header(np.frombuffer(versions[0].frame, np.uint8))
    order = [segment for _, segment in layer_order(core.session.representation)]
    offsets = [0, *(int(header.segments[segment]["offset"]) for segment in order)]
    assert [(part.offset, part.chunk) for part in parts] == [
        (offset, chunk) for offset in offsets for chunk in range(5)
    ]
    assert whole(parts, versions) == 5
    assert {part.tier for part in parts} == {"disk" if low else "cpu"}
    assert core.counters["get_chunks"] == 5
    assert core.counters["promoted_chunks"] == (5 if low else 0)
    assert core.catalog.leases.pins.total() == 0
    assert core.cpu.stats().reservations == 0


def test_a_layer_is_sent_before_the_next_is_read(core: Core, disk: CountingDisk) -> None:
    versions = prompt(3)
    put_low(core, versions)
    disk.reads = 0
    parts = parts_of(core, versions)
    with closing(parts):
        for _ in range(3):
            assert next(parts).offset == 0
        assert disk.reads == 3
        assert next(parts).chunk == 0
        assert disk.reads == 4
        assert 0 < core.work_queue.depth()["load-disk"] <= READ_AHEAD_SEGMENTS


def test_what_was_read_to_the_end_is_in_memory_and_half_a_get_leaves_nothing(core: Core) -> None:
    versions = prompt(3)
    put_low(core, versions)
    before = core.cpu.stats()
    for count in (0, 1, 3, 5, 9):
        parts = parts_of(core, versions)
        with closing(parts):
            for _ in range(count):
                next(parts)
        assert core.work_queue.depth()["load-disk"] == 0, "nothing is read ahead for nobody"
        core.settle()
        assert core.cpu.stats() == before
        assert core.catalog.leases.pins.total() == 0
    assert whole(read(core, versions), versions) == 3
    assert [core.tiers_of(version) for version in versions] == [["cpu", "disk"]] * 3
    assert core.get(versions) == frames_of(versions)


@pytest.mark.parametrize("what", ["header", "last layer", "lost"])
def test_a_damaged_chunk_ends_the_prefix_and_is_dropped(
    core: Core, disk: CountingDisk, what: str
) -> None:
    versions = prompt(3)
    put_low(core, versions)
    key, size = versions[1].info.key, versions[1].info.size_bytes
    if what == "lost":
        disk.lose(key)
    else:
        disk.flip(key, 8 * (60 if what == "header" else size - 1))
    parts = read(core, versions)
    assert whole(parts, versions) == 1
    assert core.tiers_of(versions[1]) == []
    assert core.cpu.stats().reservations == 0
    assert core.put([versions[1]])[0].reason == ""


def test_a_get_that_is_over_while_a_layer_is_read_gives_its_room_back_then() -> None:
    gated = GatedDisk(TIER_BYTES)
    with closing(Core([gated], model=MODEL, slabs=8, workers=1)) as core:
        versions = prompt(2)
        put_low(core, versions)
        parts = parts_of(core, versions)
        assert next(parts).offset == 0
        gated.shut()
        parts.close()
        gated.gate.set()
        core.work_queue.close()
        assert core.catalog.leases.pins.total() == 0
        assert core.cpu.stats().reservations == 0


def test_memory_full_of_leases_ends_the_prefix(disk: CountingDisk) -> None:
    config = settings(max_frame_bytes=0)
    with closing(Core([disk], model=MODEL, slabs=1, config=config, clock=FakeClock())) as core:
        versions = prompt(5)
        for version in versions:
            put_low(core, [version])
        parts = read(core, versions)
        assert whole(parts, versions) == 2, "as many as a slab holds"
        assert core.cpu.stats().reservations == 0


def test_a_read_that_begins_once_its_get_is_over_reads_nothing(
    core: Core, disk: CountingDisk
) -> None:
    (version,) = versions = prompt(1)
    put_low(core, versions)
    with leased(core, versions):
        loads = Loads(core.moves, ReadTerms(core.session, core.later()))
        copy = core.catalog.copies(version.info.key)["disk"]
        load, reads = StreamingLoad(loads, core.slot("disk"), copy), disk.reads
        load.close()
        assert load.submit(None) is not None
        core.settle()
    assert disk.reads == reads
