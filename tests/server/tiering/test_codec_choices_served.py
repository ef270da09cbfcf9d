"""The break-even rule: which codec a link is worth."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.speed import CodecSpeed
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import Accuracy
from kvstore.server.tiering.codec_choice import choose_codec


def speed(
    name: str, ratio: float, decode_gb: float, accuracy: Accuracy = Accuracy.exact
) -> CodecSpeed:
    return CodecSpeed(name, "numpy", accuracy, ratio, 1e9, decode_gb * 1e9)


ZPLANE = speed("zplane", 1.47, 3.4)
QUICK = speed("quick", 1.33, 6.0)
KVQ = speed("kvq", 5.2, 1.4, Accuracy.bounded)
GQ2 = speed("gq2", 5.3, 3.0, Accuracy.approximate)
EVERY = (ZPLANE, QUICK, KVQ, GQ2)


def chosen(link_gb: float, least: Accuracy = Accuracy.exact) -> str:
    found = choose_codec(EVERY, link_gb * 1e9, least)
    return "raw" if found is None else found.name


def test_a_slow_link_gets_the_ratio_and_a_fast_one_raw_frames() -> None:
    for link_gb, name in [(0.1, "zplane"), (1.0, "zplane"), (1.2, "quick"), (1.5, "raw")]:
        assert chosen(link_gb) == name


def test_the_figures_are_those_of_the_break_even_table() -> None:
    assert ZPLANE.break_even_bytes_per_s == pytest.approx(1.087e9, rel=1e-3)
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
    candidates = [speed(str(at), *one) for at, one in enumerate(figures)]
    found = choose_codec(candidates, link, Accuracy.exact)
    if found is None:
        assert all(one.break_even_bytes_per_s <= link for one in candidates)
        return
    serial_s = 1 / (link * found.ratio) + 1 / found.decode_bytes_per_s
    assert serial_s <= 1 / link * (1 + 1e-9)
    assert found.load_bytes_per_s(link) >= link * (1 - 1e-9)
