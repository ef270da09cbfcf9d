from __future__ import annotations

import numpy as np
import pytest
import xxhash

from kvstore.proto.buffers import (
    BLOCK_BYTES,
    as_bytes,
    checksum,
    copy_bytes,
    copy_groups,
)

SIZES = [0, 1, 63, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 77]


def noise(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


def test_a_checked_copy_arrives_whole_and_its_checksum_is_that_of_the_whole() -> None:
    for size in SIZES:
        data, out = noise(size), np.zeros(size + 2, np.uint8)
        (found,) = copy_groups([[(out[1:-1], data)]])
        assert np.array_equal(out[1:-1], data)
        assert (out[0], out[-1]) == (0, 0)
        assert found == checksum(data) == xxhash.xxh3_64_intdigest(data.tobytes())


def test_a_copy_into_another_length_is_refused() -> None:
    for size in [10, BLOCK_BYTES + 10]:
        out, data = np.zeros(size - 3, np.uint8), noise(size)
        with pytest.raises(ValueError, match="broadcast"):
            copy_bytes(out, data)
        with pytest.raises(ValueError, match="broadcast"):
            copy_groups([[(out, data)]])


def test_checksums_have_not_changed() -> None:
    assert checksum(b"") == 0x2D06800538D394C2
    assert checksum(memoryview(b"kvstore")) == checksum(as_bytes(b"kvstore"))
    assert checksum(b"kvstore") == xxhash.xxh3_64_intdigest(b"kvstore", seed=0)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_of_any_buffer_share_its_memory(kind) -> None:  # type: ignore[no-untyped-def]
    buffer = kind(b"\x01\x02\x03")
    view = as_bytes(buffer)
    assert view.tolist() == [1, 2, 3]
    assert view.flags.writeable == (kind is bytearray)
    if kind is bytearray:
        view[0] = 9
        assert buffer[0] == 9


def test_bytes_of_an_array_share_its_memory() -> None:
    array = np.zeros((2, 3), np.uint16)
    as_bytes(array)[2] = 7  # type: ignore[arg-type]
    assert array[0, 1] == 7
    assert len(as_bytes(array)) == 12  # type: ignore[arg-type]
