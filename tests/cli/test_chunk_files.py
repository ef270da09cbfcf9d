"""Chunk files: the bytes that are written, and that nothing but them is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prompts import SMALL, equal, frame_of, tensors_of
from safetensors import deserialize

from kvstore.cli.chunk_files import FRAME, SAFETENSORS, read_chunk, write_chunk
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.frame import check_frame
from kvstore.proto.types import Accuracy, ChunkKey

KEY = ChunkKey(bytes(range(32)))
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "chunk.safetensors"


def write(path: Path) -> bytes:
    frame = frame_of(KEY, SMALL)
    size = write_chunk(path, check_frame(frame), frame.tobytes(), SMALL)
    data = path.read_bytes()
    assert len(data) == size
    return data


def metadata(data: bytes) -> dict[str, str]:
    names: dict[str, str] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])[
        "__metadata__"
    ]
    return names


def test_what_is_written_is_what_was_and_is_read_as_it_was(tmp_path: Path) -> None:
    data, golden = write(tmp_path / f"c{SAFETENSORS}"), GOLDEN.read_bytes()
    assert metadata(data) == metadata(golden)  # the BLAKE3 of all is in it
    found, expected = map(deserialize, (data, golden))
    assert dict(found) == dict(expected)
    chunk = read_chunk(GOLDEN)
    assert (chunk.digest, chunk.parent, chunk.position) == (KEY[16:], bytes(16), 0)
    assert (chunk.accuracy, chunk.model) == (Accuracy.exact, SMALL)
    assert equal(chunk.tensors, tensors_of(KEY, SMALL, 16))


def test_a_frame_is_kept_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / f"c{FRAME}"
    assert write(path) == frame_of(KEY, SMALL).tobytes()
    assert equal(read_chunk(path).tensors, tensors_of(KEY, SMALL, 16))


def test_a_file_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "folder" / f"c{SAFETENSORS}"
    with pytest.raises(OSError, match="folder"):
        write(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [SAFETENSORS, FRAME])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_no_change_of_a_file_is_read_as_another_chunk(
    tmp_path: Path, suffix: str, data: st.DataObject
) -> None:
    path = tmp_path / f"c{suffix}"
    whole = write(path)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, min(len(whole), start + 8)))
    put = data.draw(st.binary(max_size=8))
    path.write_bytes(whole[:start] + put + whole[stop:])
    try:
        chunk = read_chunk(path)
    except InvalidRequestError:
        return
    assert equal(chunk.tensors, tensors_of(KEY, SMALL, 16))
    names = (chunk.digest, chunk.parent, chunk.content, chunk.position, chunk.prefill_flops)
    assert names == (KEY[16:], bytes(16), bytes(16), 0, 0.0)
    assert chunk.model in (None, SMALL)


@pytest.mark.parametrize("field", ["digest", "parent", "position", "representation", "fidelity"])
def test_a_file_that_names_another_chunk_is_refused(tmp_path: Path, field: str) -> None:
    path = tmp_path / f"c{SAFETENSORS}"
    whole = write(path)
    size = int.from_bytes(whole[:8], "little")
    rows = json.loads(whole[8 : 8 + size])
    value = rows["__metadata__"][field]
    rows["__metadata__"][field] = "bounded" if field == "fidelity" else value.replace("0", "1", 1)
    assert rows["__metadata__"][field] != value
    head = json.dumps(rows).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + whole[8 + size :])
    with pytest.raises(InvalidRequestError, match="not what was written"):
        read_chunk(path)
