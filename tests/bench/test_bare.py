"""The bare loops transfer all bytes, and their child processes end with them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from bench.lib.bare import CHUNK_BYTES, PART_BYTES, Transfer, bare_read, raw_stream, raw_zmq

Way = Callable[[int], AbstractContextManager[Transfer]]


def test_reads_fill_every_step_with_the_bytes_of_the_file(tmp_path: Path) -> None:
    data = np.random.default_rng(1).integers(0, 256, 3 * PART_BYTES + 100, dtype=np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        for threads in (2, 3):
            out = np.zeros_like(data)
            steps = [out[at : at + PART_BYTES] for at in range(0, len(out), PART_BYTES)]
            with bare_read(descriptor, steps, threads) as read:
                read()
            assert np.array_equal(out, data)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    "way",
    [raw_zmq, raw_stream, partial(raw_stream, summed=True)],
    ids=["zmq", "tcp", "tcp summed"],
)
def test_a_bare_transfer_ends_with_the_last_byte_and_can_be_repeated(way: Way) -> None:
    before, size = len(psutil.Process().children()), CHUNK_BYTES + PART_BYTES + 1
    with way(size) as bring:
        assert [bring() for _ in range(2)] == [size] * 2
        assert len(psutil.Process().children()) == before + 1
    assert len(psutil.Process().children()) == before, "the sender has ended"
