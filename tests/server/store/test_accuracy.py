"""Lossy copies: who is given one, what it says of itself, and what it gives way to."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import pytest
from helpers.coarse_codec import ERROR_BOUND, coarse_codec
from helpers.core_chunks import drop
from simulation.clock import FakeClock
from simulation.core import Core, keys_of, prompt
from simulation.tiers import SimDisk, SimRedis, no_faults
from simulation.universe import Version

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.frame import FLAG_RESTORED, FrameHeader, check_frame, parse_header
from kvstore.proto.types import Accuracy, ChunkKey, PutOutcome
from kvstore.server.store.layered_reads import LayerwiseRead
from kvstore.server.store.reads import ReadTerms
from kvstore.server.tiering.tier_slot import TierCodec

TIER_BYTES = 1 << 20


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with coarse_codec():
        yield


def make_core(disk: str = "coarse", redis: str | None = None, **options: object) -> Core:
    """CPU memory for twelve frames, and tiers with those codecs."""
    tiers: list[SimDisk | SimRedis] = [SimDisk(TIER_BYTES, no_faults())]
    if redis is not None:
        tiers.append(SimRedis(TIER_BYTES, no_faults()))
    codecs = {"disk": disk, "redis": redis or "raw"}
    return Core(tiers, codecs=codecs, clock=FakeClock(), **options)  # type: ignore[arg-type]


@pytest.fixture
def core() -> Iterator[Core]:
    with closing(make_core()) as core:
        yield core


def forget(core: Core, version: Version, tier: str = "cpu") -> None:
    drop(core, [version], tier)
    core.settle()


def lower_to_disk(core: Core, count: int = 1) -> list[Version]:
    """Put chunks of which the lossy copy on disk is all that is left."""
    versions = prompt(count)
    core.put(versions)
    for version in versions:
        assert core.copy_down(version) is True
        forget(core, version)
    return versions


def read(core: Core, versions: list[Version], least: Accuracy) -> list[Bytes]:
    """Return the frames that a get delivers."""
    lease_id, known = core.store.open_get(core.session, keys_of(versions), 0)
    terms = ReadTerms(core.session, core.later(), least)
    frames = [one.data.copy() for one in core.store.reads.get(keys_of(versions)[:known], terms)]
    assert core.store.release(core.session, lease_id)
    return frames


def accuracy_on(core: Core, tier: str, key: ChunkKey) -> Accuracy:
    return core.catalog.copies(key)[tier].accuracy


def test_a_lossy_copy_that_is_being_read_does_not_go(core: Core) -> None:
    (version,) = lower_to_disk(core)
    read(core, [version], Accuracy.bounded)
    lease_id, _ = core.store.open_get(core.session, [version.info.key], 0)
    (result,) = core.put([version])
    assert result.outcome is PutOutcome.refused
    assert core.catalog.in_flight.writers.total() == 0
    core.store.release(core.session, lease_id)
    assert core.put([version])[0].outcome is PutOutcome.stored


def test_layers_of_too_low_accuracy_end_the_prefix_and_others_come(core: Core) -> None:
    versions = lower_to_disk(core, 2)

    def parts(least: Accuracy) -> list[int]:
        lease_id, known = core.store.open_get(core.session, keys_of(versions), 0)
        keys = keys_of(versions)[:known]
        get = LayerwiseRead(core.moves, keys, ReadTerms(core.session, core.later(), least))
        found = [part.chunk for part in get.parts() if not part.offset]
        core.store.release(core.session, lease_id)
        return found

    assert parts(Accuracy.exact) == []
    assert parts(Accuracy.bounded) == [0, 1]
    assert parts(Accuracy.exact) == [], "nor when they are in CPU memory"


def test_a_durable_put_needs_a_disk_that_loses_nothing(core: Core) -> None:
    assert core.store.durable is None
    with pytest.raises(InvalidRequestError, match="whose codec is lossless"):
        core.put(prompt(1), durable=True)
    core.slot("disk").encoder.use("raw", " (auto)")
    assert core.store.durable is core.slot("disk")


def test_a_frame_that_lies_about_its_accuracy_in_the_index_is_damage(core: Core) -> None:
    (version,) = lower_to_disk(core)
    info = core.catalog.copies(version.info.key)["disk"]
    exact = FrameHeader.info(parse_header(version.frame))
    core.catalog.note_sealed("disk", type(info)(
        info.key, info.parent, info.layout, info.codec_id, info.size_bytes, exact.accuracy,
        info.prefill_flops,
    ))  # fmt: skip
    assert read(core, [version], Accuracy.exact) == []
    assert core.counters["corrupt_chunks"] == 1
    assert core.tiers_of(version) == []


# --- schedules


VERBS = [*("put", "copy", "drop", "read", "read") * 5, "tick", "tick", "crowd", "forget", "delete"]


class Schedule:
    """Random puts, copies, losses and reads, each answer checked against the originals."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        disk, redis = self.draw.choice(
            [("coarse", "raw"), ("raw", "coarse"), ("coarse", "coarse"), ("lossless", "coarse")]
        )
        write = "through" if self.draw.random() < 0.5 else "evict"
        self.core = make_core(disk, redis, write=write, slabs=self.draw.choice([1, 4]))
        self.session = self.core.open_session()
        self.versions = prompt(3)
        self.coarse = {v.info.key: coarse_of(v.frame).tobytes() for v in self.versions}

    def run(self, steps: int) -> Counter[str]:
        """Take *steps* steps; return what was done."""
        core, done = self.core, Counter[str]()
        with closing(core):
            for _ in range(steps):
                verb = self.draw.choice(VERBS)
                done[verb] += 1
                getattr(self, verb)()
                if self.draw.random() < 0.5:
                    core.settle()
                self.check_catalog()
            core.settle()
            assert core.catalog.leases.pins.total() == core.catalog.in_flight.writers.total() == 0
            done.update({k: v for k, v in core.counters.snapshot().items() if v})
            assert not core.counters["corrupt_chunks"]
        return done

    def put(self) -> None:
        version = self.draw.choice(self.versions)
        had_exact = bool(self.core.catalog.holders(version.info.key, Accuracy.exact))
        (result,) = self.core.put([version])
        assert (result.outcome is PutOutcome.exists) == had_exact, "lossy copies are no reason"

    def copy(self) -> None:
        version, tier = self.draw.choice(self.versions), self.draw.choice(["disk", "redis"])
        best = self.core.catalog.holders(version.info.key, Accuracy.exact)
        if self.core.copy_down(version, tier) and best:
            wanted = self.core.slot(tier).encoder.of_tenant("red").accuracy
            assert accuracy_on(self.core, tier, version.info.key) >= wanted

    def drop(self) -> None:
        """Lose what is in memory, but for what a lower tier has."""
        version = self.draw.choice(self.versions)
        if self.core.catalog.holders(version.info.key)[:1] == ["cpu"]:
            self.copy()
            forget(self.core, version)

    def forget(self) -> None:
        version = self.draw.choice(self.versions)
        holders = self.core.catalog.holders(version.info.key)
        if holders:
            forget(self.core, version, self.draw.choice(holders))

    def read(self) -> None:
        start = self.draw.randrange(len(self.versions))
        versions = self.versions[start:]
        least = self.draw.choice([Accuracy.exact, Accuracy.bounded, Accuracy.bounded])
        expected = self.core.look_up(versions, min_accuracy=least).ready
        frames = read(self.core, versions, least)
        assert len(frames) == expected
        for version, frame in zip(versions, frames, strict=False):
            header = check_frame(frame, version.info.key)
            assert header.accuracy >= least
            raw = TierCodec("raw").encode(frame, "red").tobytes()
            exact = header.accuracy is Accuracy.exact
            if header.codec_id == 0:
                facts = (bool(header.flags & FLAG_RESTORED), header.error_bound)
                assert facts == ((False, 0.0) if exact else (True, ERROR_BOUND))
            assert raw == (version.frame.tobytes() if exact else self.coarse[version.info.key])

    def tick(self) -> None:
        self.core.clock.advance(1.0)  # type: ignore[attr-defined]
        self.core.store.tick()

    def crowd(self) -> None:
        """Put so many others that what is in memory has to go."""
        self.core.put(prompt(self.core.slabs * 3, seed=self.draw.randrange(1, 9)))

    def delete(self) -> None:
        self.core.store.delete([self.draw.choice(self.versions).info.key], self.core.later())

    def check_catalog(self) -> None:
        """What lies in memory is what the catalog says of it."""
        for version in self.versions:
            info = self.core.catalog.copies(version.info.key).get("cpu")
            frame = self.core.cpu.peek(version.info.key)
            if info is not None:
                assert frame is not None
                assert parse_header(frame).accuracy is info.accuracy


def coarse_of(frame: Bytes) -> Bytes:
    """Return what a raw frame is after it was coded with loss once."""
    coarse = TierCodec("coarse").encode(frame, "red")
    return TierCodec("raw").encode(coarse, "red")


def test_schedules_never_give_a_lossy_copy_to_who_asked_for_an_exact_one() -> None:
    seen: Counter[str] = Counter()
    for seed in range(200):
        seen.update(Schedule(seed).run(60))
    for name in ("replaced_copies", "lossless_instead", "lossy_victims", "read_throughs"):
        assert seen[name], name
