"""The bare loops: what they move is there afterwards, and their other processes end with them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import psutil
from bench.limits import (
    RING_BYTES,
    STEP_BYTES,
    bare_read,
    in_steps,
    looked_at,
    ring_put,
    summed_get,
    summed_read,
)


def test_a_ring_takes_more_than_it_holds_and_its_reader_ends() -> None:
    before = len(psutil.Process().children())
    data = np.zeros(RING_BYTES + 2 * STEP_BYTES, np.uint8)
    with ring_put(in_steps(data)) as put:
        put()
        put()
        assert len(psutil.Process().children()) == before + 1
    assert len(psutil.Process().children()) == before


def test_reads_fill_every_step_with_what_the_file_has(tmp_path: Path) -> None:
    data = np.random.default_rng(1).integers(0, 256, 3 * STEP_BYTES + 100, dtype=np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        out, other = np.zeros_like(data), np.zeros_like(data)
        with (
            summed_read(descriptor, in_steps(out)) as read,
            bare_read(descriptor, in_steps(other), 3) as read_other,
        ):
            read()
            read_other()
        assert np.array_equal(out, data)
        assert np.array_equal(other, data)
    finally:
        os.close(descriptor)


def test_a_get_without_a_store_fills_every_step() -> None:
    out = np.zeros(2 * STEP_BYTES + 64, np.uint8)
    with summed_get(in_steps(out)) as get:
        get()
    assert out.all()


def test_an_exchange_and_a_look_can_be_had_again_and_again() -> None:
    with looked_at(2, 128, 256) as look:
        look()
        look()
