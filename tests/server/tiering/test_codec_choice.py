"""The codec that a tier gets at the start when the operator leaves it to the server."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

import pytest
from helpers.local_server import LocalServer, eventually
from helpers.prompts import assert_reads, store
from simulation.core import Core
from simulation.tiers import SimDisk, no_faults

from kvstore.codecs.speed import CodecSpeed, make_sample
from kvstore.proto.errors import UnknownCodecError
from kvstore.proto.types import KEY_BYTES, Accuracy, ChunkKey
from kvstore.server.tiering import codec_choice
from kvstore.server.tiering.codec_choice import (
    CALIBRATION_S,
    auto_codec,
    candidates,
    measure_codecs,
)

ServerMaker = Callable[..., LocalServer]
PROBE = ChunkKey(b"p" * KEY_BYTES)
DISK_BYTES = 8 << 20


def choose_for(core: Core) -> bool:
    return auto_codec(core.moves, core.slot("disk"), Accuracy.exact, PROBE)


def say(patch: pytest.MonkeyPatch, *speeds: CodecSpeed) -> None:
    patch.setattr(codec_choice, "measure_codecs", lambda *_: list(speeds))


@pytest.mark.parametrize(("copied", "looked_at"), [(1e-3, False), (1e15, True)])
def test_on_a_link_as_fast_as_memory_no_codec_is_looked_at(
    copied: float, looked_at: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = CodecSpeed("raw", "numpy", Accuracy.exact, 1.0, 1e9, copied)
    monkeypatch.setattr(codec_choice, "measure", lambda *_: raw)
    asked: list[list[str]] = []

    def measured(names: list[str], *_: object) -> list[CodecSpeed]:
        asked.append(names)
        return []

    monkeypatch.setattr(codec_choice, "measure_codecs", measured)
    with closing(Core([SimDisk(DISK_BYTES, no_faults())])) as core:
        choose_for(core)
        assert bool(asked[0]) == looked_at
        assert core.slot("disk").encoder.name == "raw (auto)"


def zplane(ratio: float, decode_bytes_per_s: float) -> CodecSpeed:
    return CodecSpeed("zplane", "numpy", Accuracy.exact, ratio, 1e9, decode_bytes_per_s)


def test_the_choice_is_used_shown_and_leaves_nothing_on_the_medium(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = SimDisk(DISK_BYTES, no_faults())
    with closing(Core([disk])) as core:
        say(monkeypatch, zplane(1.5, 1e15))
        assert choose_for(core)
        encoder = core.slot("disk").encoder
        assert (encoder.name, encoder.codec_id) == ("zplane (auto)", 2)
        assert core.slot("disk").encoder.of_tenant("red").name == "zplane"
        say(monkeypatch, zplane(1.5, 1.0))
        choose_for(core)
        assert core.slot("disk").encoder.name == "raw (auto)"
        assert (disk.stats().chunks, disk.stats().used_bytes) == (0, 0)
        assert len(core.catalog) == 0


@pytest.mark.parametrize("verb", ["reserve", "write", "seal", "read", "delete"])
def test_a_medium_that_fails_is_judged_by_the_first_guess(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimDisk(DISK_BYTES, no_faults())
    with closing(Core([disk])) as core:
        usual = getattr(disk, verb)

        def fail(*args: object, **named: object) -> object:
            disk.faults.fail = 1.0
            try:
                return usual(*args, **named)
            finally:
                disk.faults.fail = 0.0

        monkeypatch.setattr(disk, verb, fail)
        say(monkeypatch, zplane(1.5, 1e15))
        assert choose_for(core)
        assert core.slot("disk").encoder.name == "zplane (auto)"
        assert disk.stats().reservations == 0


def test_measuring_ends_in_time_whatever_the_clock_says_of_one_codec() -> None:
    ticks = iter(range(10_000))
    speeds = measure_codecs(["raw", "zplane"], make_sample(), lambda: next(ticks) * 0.1, 0.5)
    assert [one.name for one in speeds] == ["raw", "zplane"]
    assert next(ticks) < 100
    assert CALIBRATION_S <= 1


def test_a_codec_that_cannot_be_used_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> object:
        raise UnknownCodecError(name, "no tables for it")

    monkeypatch.setattr(codec_choice, "codec_by_name", fail)
    assert measure_codecs(["zplane"], make_sample(), time.monotonic, 0.1) == []


def test_only_codecs_within_the_allowed_loss_are_candidates() -> None:
    exact, every = candidates(Accuracy.exact), candidates(Accuracy.approximate)
    assert "zplane" in exact
    assert set(exact) <= set(every)
    assert "raw" not in every, "it is what remains"


def test_a_server_chooses_after_its_start_and_serves_meanwhile(make_server: ServerMaker) -> None:
    server = make_server("--codec", "disk=auto")
    client = server.connect()
    keys = store(client, 1, 4)
    assert_reads(client, keys)

    def is_chosen() -> bool:
        return server.node.store.tiers.slots["disk"].encoder.name.endswith(" (auto)")

    assert eventually(is_chosen)
    assert_reads(client, keys)
    server.settled()
