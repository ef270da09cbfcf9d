"""The bare loops: what they move is there afterwards, and their other processes end with them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from bench.lib.bare import (
    CHUNK_BYTES,
    PART_BYTES,
    RING_BYTES,
    STEP_BYTES,
    Bring,
    bare_read,
    looked_at,
    raw_stream,
    raw_zmq,
    relayed,
    ring_put,
    steps_of,
    summed_get,
)  # fmt: skip

Way = Callable[[int], AbstractContextManager[Bring]]


def test_a_ring_takes_more_than_it_holds_and_its_reader_ends() -> None:
    before = len(psutil.Process().children())
    data = np.zeros(RING_BYTES + 2 * STEP_BYTES, np.uint8)
    with ring_put(steps_of([data])) as put:
        put()
        put()
        assert len(psutil.Process().children()) == before + 1
    assert len(psutil.Process().children()) == before


def test_reads_fill_every_step_with_what_the_file_has(tmp_path: Path) -> None:
    data = np.random.default_rng(1).integers(0, 256, 3 * STEP_BYTES + 100, dtype=np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        for threads, summed in ((2, True), (3, False)):
            out = np.zeros_like(data)
            with bare_read(descriptor, steps_of([out]), threads, summed=summed) as read:
                read()
            assert np.array_equal(out, data)
    finally:
        os.close(descriptor)


def test_a_get_without_a_store_fills_every_step() -> None:
    out = np.zeros(2 * STEP_BYTES + 64, np.uint8)
    with summed_get(steps_of([out])) as get, looked_at(2, 128, 256) as look:
        get()
        look()
        look()
    assert out.all()


@pytest.mark.parametrize(
    "way",
    [relayed, raw_zmq, raw_stream, partial(raw_stream, summed=True)],
    ids=["relayed", "zmq", "tcp", "tcp summed"],
)
def test_a_bare_transfer_ends_when_all_has_come_and_can_be_repeated(way: Way) -> None:
    size = CHUNK_BYTES + PART_BYTES + 1
    with way(size) as bring:
        assert [bring() for _ in range(2)] == [size] * 2
