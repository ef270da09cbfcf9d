"""The codec that a tier gets at the start when the operator leaves it to the server."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing

import pytest
from helpers.local_server import LocalServer, eventually
from helpers.prompts import assert_reads, store
from hypothesis import given
from hypothesis import strategies as st
from simulation.core import Core
from simulation.tiers import SimDisk, no_faults

from kvstore.codecs.speed import CodecSpeed, make_sample
from kvstore.proto.errors import InvalidRequestError, UnknownCodecError
from kvstore.proto.types import KEY_BYTES, Accuracy, ChunkKey
from kvstore.server.tiering import codec_choice
from kvstore.server.tiering.codec_choice import (
    CALIBRATION_S,
    auto_codec,
    candidates,
    choose_codec,
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


def lossless(ratio: float, decode_bytes_per_s: float) -> CodecSpeed:
    return CodecSpeed("lossless", "numpy", Accuracy.exact, ratio, 1e9, decode_bytes_per_s)


def test_the_choice_is_used_shown_and_leaves_nothing_on_the_medium(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = SimDisk(DISK_BYTES, no_faults())
    with closing(Core([disk])) as core:
        say(monkeypatch, lossless(1.5, 1e15))
        assert choose_for(core)
        encoder = core.slot("disk").encoder
        assert (encoder.name, encoder.codec_id) == ("lossless (auto)", 2)
        assert core.slot("disk").encoder.of_tenant("red").name == "lossless"
        say(monkeypatch, lossless(1.5, 1.0))
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
        say(monkeypatch, lossless(1.5, 1e15))
        assert choose_for(core)
        assert core.slot("disk").encoder.name == "lossless (auto)"
        assert disk.stats().reservations == 0


def test_measuring_ends_in_time_whatever_the_clock_says_of_one_codec() -> None:
    ticks = iter(range(10_000))
    speeds = measure_codecs(["raw", "lossless"], make_sample(), lambda: next(ticks) * 0.1, 0.5)
    assert [one.name for one in speeds] == ["raw", "lossless"]
    assert next(ticks) < 100
    assert CALIBRATION_S <= 1


def test_a_codec_that_cannot_be_used_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> object:
        raise UnknownCodecError(name, "no tables for it")

    monkeypatch.setattr(codec_choice, "codec_by_name", fail)
    assert measure_codecs(["lossless"], make_sample(), time.monotonic, 0.1) == []


def test_only_codecs_within_the_allowed_loss_are_candidates() -> None:
    exact, every = candidates(Accuracy.exact), candidates(Accuracy.approximate)
    assert "lossless" in exact
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


# --- the break-even rule


def speed(
    name: str, ratio: float, decode_gb: float, accuracy: Accuracy = Accuracy.exact
) -> CodecSpeed:
    return CodecSpeed(name, "numpy", accuracy, ratio, 1e9, decode_gb * 1e9)


LOSSLESS = speed("lossless", 1.47, 3.4)
QUICK = speed("quick", 1.33, 6.0)
KVQ = speed("kvq", 5.2, 1.4, Accuracy.bounded)
KIVI = speed("kivi:2", 5.3, 3.0, Accuracy.approximate)
EVERY = (LOSSLESS, QUICK, KVQ, KIVI)


def chosen(link_gb: float, least: Accuracy = Accuracy.exact) -> str:
    found = choose_codec(EVERY, link_gb * 1e9, least)
    return "raw" if found is None else found.name


def test_a_slow_link_gets_the_ratio_and_a_fast_one_raw_frames() -> None:
    for link_gb, name in [(0.1, "lossless"), (1.0, "lossless"), (1.2, "quick"), (1.5, "raw")]:
        assert chosen(link_gb) == name


def test_the_figures_are_those_of_the_break_even_table() -> None:
    assert LOSSLESS.break_even_bytes_per_s == pytest.approx(1.087e9, rel=1e-3)
    assert KVQ.break_even_bytes_per_s == pytest.approx(1.131e9, rel=1e-3)
    assert KVQ.full_gain_bytes_per_s == pytest.approx(0.269e9, rel=1e-2)
    assert KVQ.load_bytes_per_s(0.1e9) == pytest.approx(0.52e9)
    assert KVQ.load_bytes_per_s(10e9) == KVQ.decode_bytes_per_s
    assert speed("grown", 0.9, 1).break_even_bytes_per_s == 0


def test_figures_that_were_not_measured_are_refused() -> None:
    for value in [0.0, -1.0, math.inf, math.nan]:
        with pytest.raises(InvalidRequestError, match="ratio"):
            speed("none", value, 1.0)


@given(
    st.floats(1e6, 1e11),
    st.lists(st.tuples(st.floats(0.5, 20), st.floats(0.01, 100)), max_size=6),
)
def test_the_choice_is_never_slower_than_raw_frames_even_for_one_chunk(
    link: float, figures: list[tuple[float, float]]
) -> None:
    offered = [speed(str(at), *one) for at, one in enumerate(figures)]
    found = choose_codec(offered, link, Accuracy.exact)
    if found is None:
        assert all(one.break_even_bytes_per_s <= link for one in offered)
        return
    serial_s = 1 / (link * found.ratio) + 1 / found.decode_bytes_per_s
    assert serial_s <= 1 / link * (1 + 1e-9)
    assert found.load_bytes_per_s(link) >= link * (1 - 1e-9)
