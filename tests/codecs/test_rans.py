from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.rans import NUMPY

from kvstore.codecs import rans
from kvstore.codecs.rans import SLOTS, Backend, ModelTable
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError
from kvstore.proto.native import paths

NAMES = ["numpy", *paths()]
SHAPES = [(1, 1, 64), (2, 3, 192), (5, 17, 128), (3, 40, 64), (1, 5, 1024)]


def backend_of(name: str) -> Backend:
    return NUMPY if name == "numpy" else rans.native_backend(name)


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> Backend:
    return backend_of(request.param)


def table_of(rng: np.random.Generator, models: int, symbols: int, skew: float) -> ModelTable:
    """Return models of any entropy: the larger *skew*, the flatter."""
    rows = rng.dirichlet(np.full(symbols, skew), models)
    frequencies = np.floor(rows * (SLOTS - symbols)).astype(np.uint16) + 1
    frequencies[:, 0] += (SLOTS - frequencies.sum(1)).astype(np.uint16)
    return ModelTable(np.minimum(frequencies, SLOTS - 1))


def drawn(rng: np.random.Generator, table: ModelTable, shape: tuple[int, int, int]) -> Any:
    """Return models and symbols that follow them."""
    tiles, tokens, channels = shape
    models = rng.integers(0, len(table.frequencies), (tiles, channels)).astype(np.uint8)
    slots = rng.integers(0, SLOTS, (tiles, tokens, channels))
    return models, (table.decode_slots[models[:, None], slots] & 0xFF).astype(np.uint8)


def test_every_backend_writes_the_words_of_the_reference_and_reads_them_back(
    backend: Backend,
) -> None:
    shapes = [
        *SHAPES,
        *((1 + n % 5, 1 + 7 * n % 33, 64 * (1 + n % 3)) for n in range(7)),
        (0, 4, 64),
    ]
    for seed, shape in enumerate(shapes):
        rng = np.random.default_rng(seed)
        table = table_of(rng, 200, 2 + 23 * seed % 255, 10.0 ** (seed % 4 - 2))
        models, symbols = drawn(rng, table, shape)
        expected = NUMPY.encode_tiles(symbols, models, table)
        found = backend.encode_tiles(symbols, models, table)
        assert all(np.array_equal(found[at], expected[at]) for at in range(3))
        out = np.full_like(symbols, 0xA5)
        backend.decode_tiles(*found, models, table, out)
        assert np.array_equal(out, symbols)


def test_reciprocals_give_the_quotient_or_one_less_for_every_frequency_and_state() -> None:
    frequencies = np.arange(1, SLOTS, dtype=np.uint64)
    rows = np.stack([frequencies, SLOTS - frequencies], 1).astype(np.uint16)
    entries = np.concatenate(
        [ModelTable(rows[at : at + 256]).encode_symbols[:, 0] for at in range(0, SLOTS - 1, 256)]
    )
    assert np.array_equal(entries & np.uint64(0xFFF), frequencies)
    rng = np.random.default_rng(0)
    for _ in range(40):
        quotient = rng.integers(0, 1 << 20, len(frequencies), np.uint64)
        for rest in (0 * frequencies, frequencies - 1):
            state = quotient * frequencies + rest
            guess = state * (entries >> np.uint64(32)) >> np.uint64(32)
            assert ((quotient - guess) <= 1).all()
    largest = (frequencies << np.uint64(20)) - 1
    guess = largest * (entries >> np.uint64(32)) >> np.uint64(32)
    assert (((1 << 20) - 1 - guess) <= 1).all()


# --- what is refused


def test_a_table_whose_rows_do_not_sum_up_is_refused() -> None:
    for rows in [
        [[4096, 0]],
        [[2048, 2047]],
        [[2048, 2049]],
        [[4096]],
        [[0, 0]],
        [[61440, 8192]],
        [[4095, 1]] * 257,
        np.full((1, 257), 16),
    ]:
        with pytest.raises(InvalidFrameError, match="frequencies"):
            ModelTable(np.array(rows, np.uint16))


def test_a_symbol_that_has_no_slot_is_refused(backend: Backend) -> None:
    table = ModelTable(np.array([[4000, 96, 0], [1, 4000, 95]], np.uint16))
    models = np.tile(np.array([0, 1], np.uint8), (3, 32))
    for place, symbol in ((0, 2), (126, 2), (66, 2), (5, 3), (7, 255)):
        symbols = np.ones((3, 2, 64), np.uint8)
        symbols.reshape(3, -1)[1, place] = symbol
        with pytest.raises(InvalidRequestError, match="frequency 0"):
            backend.encode_tiles(symbols, models, table)


def test_channels_that_are_no_multiple_of_64_are_refused() -> None:
    for shape in [(1, 4, 32), (1, 4, 0), (4, 64), (1, 4, 96)]:
        table = ModelTable(np.array([[4000, 96]], np.uint16))
        symbols = np.zeros(shape, np.uint8)
        with pytest.raises(InvalidRequestError, match="symbols"):
            rans.native_backend().encode_tiles(symbols, np.zeros((1, shape[-1]), np.uint8), table)


@cache
def _stream() -> tuple[ModelTable, dict[str, Any]]:
    rng = np.random.default_rng(8)
    table = table_of(rng, 5, 30, 0.5)
    models, symbols = drawn(rng, table, (3, 12, 64))
    states, counts, words = NUMPY.encode_tiles(symbols, models, table)
    out = np.empty_like(symbols)
    return table, {
        "states": states, "counts": counts, "words": words, "models": models, "out": out,
    }  # fmt: skip


def stream() -> dict[str, Any]:
    """What decoding takes, for a test to change."""
    table, arrays = _stream()
    return {"table": table, **{name: array.copy() for name, array in arrays.items()}}


def test_a_stream_that_contradicts_itself_is_refused(backend: Backend) -> None:
    right, last = stream(), np.array([0, 0, 1], np.uint32)
    words, counts = right["words"], right["counts"]
    model, state = right["models"].copy(), right["states"].copy()
    model[1, 7], state[2, 31] = 5, 0
    for wrong in (
        {"words": words[:-1], "counts": counts - last},
        {"words": np.append(words, np.uint16(7)), "counts": counts + last},
        {"counts": counts + np.array([1, 0xFFFFFFFF, 0], np.uint32)},
        {"counts": np.full_like(counts, 0xFFFFFFFF)},
        {"states": state[:2]},
        {"counts": counts[:2]},
        {"models": model},
        {"states": state},
    ):
        with pytest.raises(InvalidFrameError):
            backend.decode_tiles(**right | wrong)
    for wrong in (
        {"models": right["models"][:, :32]},
        {"out": np.empty((3, 64, 12), np.uint8).transpose(0, 2, 1)},
    ):
        with pytest.raises(InvalidRequestError):
            backend.decode_tiles(**right | wrong)


@settings(deadline=None, max_examples=250)
@given(st.integers(0, 2**32 - 1))
def test_backends_agree_on_rubbish_too(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for kind in ("flip", "states", "words", "counts", "all"):
        given_stream = stream()
        states, counts, words = (given_stream[name] for name in ("states", "counts", "words"))
        if kind == "flip":
            words[rng.integers(0, len(words))] ^= np.uint16(1 << rng.integers(0, 16))
        if kind in ("states", "all"):
            states[:] = rng.integers(0, 1 << 32, states.shape)
        if kind in ("words", "all"):
            words[:] = rng.integers(0, 1 << 16, len(words))
        if kind in ("counts", "all"):
            cuts = np.sort(rng.integers(0, len(words) + 1, 2))
            counts[:] = np.diff([0, *cuts, len(words)])
        answers = []
        for backend in map(backend_of, NAMES):
            out = given_stream["out"].copy()
            models, table = given_stream["models"], given_stream["table"]
            is_right = backend.decode(states, counts, words, models, table, out)
            answers.append((is_right, out.tobytes() if is_right else b""))
        assert len(set(answers)) == 1
