"""The registry of codecs, empty tensors, what an engine says of layers; the conformance program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from contracts.codec import SMALL, template
from contracts.ends import HYBRID
from contracts.lossy_codec import numbers
from golden.samples import FOLDER

from kvstore.codecs.base import (
    CODECS,
    REPLACED,
    EncodeTerms,
    check_tensors,
    codec_by_id,
    codec_by_name,
    empty_tensors,
)
from kvstore.codecs.conformance import check_reader, check_written, decode, main
from kvstore.codecs.kvq import KvqCodec
from kvstore.proto.buffers import as_bytes, checksum
from kvstore.proto.errors import KVStoreError, LayoutMismatchError, UnknownCodecError
from kvstore.proto.types import Component, DType, KVLayout, LayerKind, RopeParameters


def test_an_unknown_name_or_number_is_refused_and_the_known_ones_named() -> None:
    with pytest.raises(UnknownCodecError, match=r"'gzip': unknown here; known: .*lossless, .*raw"):
        codec_by_name("gzip")
    for gone, successor in REPLACED.items():
        with pytest.raises(UnknownCodecError, match=f"{successor}, which replaces {gone}"):
            codec_by_name(f"{gone}:2")
        codec_by_name(successor.replace("N", "1"))
    for codec_id in (999, 65535, -1):
        with pytest.raises(UnknownCodecError, match=f"codec={codec_id}: unknown here; known: 0, 2"):
            codec_by_id(codec_id)


def test_a_codecs_module_is_imported_only_when_its_name_is_asked_for() -> None:
    script = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from kvstore.codecs.base import codec_by_name\n"
        "before = 'kvstore.codecs.kivi' in sys.modules\n"
        "codec_by_name('kivi')\n"
        "print(before, 'kvstore.codecs.kivi' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert run.stdout.split() == ["False", "True"]


def test_every_registered_codec_has_its_own_number_and_answers_to_its_name() -> None:
    codecs = [codec_by_name(name) for name in CODECS]
    assert [codec.name for codec in codecs] == list(CODECS)
    assert len({codec.codec_id for codec in codecs}) == len(codecs)
    assert [codec_by_id(codec.codec_id).name for codec in codecs] == list(CODECS)


WINDOW = Component(LayerKind.window, DType.bfloat16, 1, 2, 64, 64, 96)
TERMS = EncodeTerms(rope=RopeParameters(10_000.0, 64))


def test_a_window_takes_the_weights_of_its_own_tokens() -> None:
    weights = np.arange(96, dtype=np.float32)
    terms = list(EncodeTerms(importance=weights).layers(KVLayout((WINDOW,)), 7))
    assert (terms[0].position, terms[0].importance.tolist()) == (39, weights[32:].tolist())  # type: ignore[union-attr]


def test_terms_name_the_layers_that_a_chunk_has() -> None:
    for ends in [{}, {"state": False}, {"window": False, "state": False}]:
        layout = KVLayout.of(HYBRID, 16, **ends)
        terms = EncodeTerms.of(HYBRID, layout=layout)
        groups = [group for group in HYBRID.layer_groups if layout.has(group.kind)]
        assert terms.layer_ids == tuple(layer for group in groups for layer in group.layer_ids)
        assert [each.layer_id for each in terms.layers(layout, 0)] == list(terms.layer_ids)
        assert terms.model_layers == 5


def test_a_windows_keys_are_turned_back_from_where_its_first_token_is() -> None:
    tensors, segments = numbers(KVLayout((WINDOW,)), seed=3), []
    for component, position in ((WINDOW, 100), (replace(WINDOW, chunk_tokens=0), 132)):
        layout = KVLayout((component,))
        out = np.zeros(KvqCodec().max_frame_bytes(layout), np.uint8)
        header = KvqCodec().encode(template(layout, position=position), tensors, out, TERMS)
        segments.append(header.segment(out, 0))
    one, other = segments
    assert np.array_equal(one, other)


def test_empty_tensors_have_the_layout_they_were_made_for() -> None:
    layout = KVLayout((WINDOW, Component(LayerKind.mla, DType.float32, 3, 1, 5, 16)))
    tensors = empty_tensors(layout)
    check_tensors(layout, tensors)
    parts = [part for layers in tensors for parts in layers for part in parts]
    assert sum(part.nbytes for part in parts) == layout.raw_bytes
    with pytest.raises(LayoutMismatchError, match=r"^components=2"):
        check_tensors(SMALL, tensors)


pytestmark = pytest.mark.usefixtures("golden_assets")
FRAMES = sorted(FOLDER.glob("*.frame"))
RAW, SHARD, LOSSY = (FOLDER / f"{name}-r1.frame" for name in ("raw", "shard", "kivi-8"))


def own(path: Path) -> bytes | None:
    """Read as this project does."""
    try:
        decoded = decode(as_bytes(path.read_bytes()))
    except KVStoreError:
        return None
    return decoded.data if decoded.header.shard is None else None


def faults(read: Callable[[Path], bytes | None], path: Path, folder: Path) -> list[str]:
    decoded = check_written(as_bytes(path.read_bytes()))
    return list(check_reader(read, path, decoded, folder))


@pytest.mark.parametrize("path", FRAMES, ids=lambda path: path.stem)
def test_a_golden_frame_is_right_and_its_reader_refuses_every_damaged_copy(
    path: Path, tmp_path: Path
) -> None:
    seen: list[str] = []

    def read(copy: Path) -> bytes | None:
        seen.append(copy.name)
        return own(copy)

    assert faults(read, path, tmp_path) == []
    assert len(seen) > 60
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_takes_all_or_nothing_or_other_bytes_is_found_out(tmp_path: Path) -> None:
    data = own(RAW)
    assert data is not None
    everything = faults(lambda _: data, RAW, tmp_path)
    assert len(everything) > 60
    assert "accepts a copy with a fault: a future codec" in everything
    assert "accepts a copy with a fault: empty" in everything
    assert faults(lambda _: None, RAW, tmp_path) == ["refuses a valid frame"]
    one_more = bytes([data[0] + 1]) + data[1:]
    for wrong, fault in (
        (data[1:], "returns 2047 bytes, not 2048"),
        (one_more, "returns values that are 1 steps off"),
    ):
        answers = {RAW: wrong}
        assert faults(answers.get, RAW, tmp_path) == [fault]
    assert faults({SHARD: b""}.get, SHARD, tmp_path) == ["accepts a shard as a whole chunk"]


def test_a_lossy_frame_may_be_decoded_to_the_neighbours_of_its_values(tmp_path: Path) -> None:
    data = own(LOSSY)
    assert data is not None
    for steps, expected in ((1, []), (2, ["returns values that are 2 steps off"])):
        near = bytes([data[0] ^ steps]) + data[1:]
        assert faults({LOSSY: near}.get, LOSSY, tmp_path) == expected


@pytest.mark.parametrize("place", ["reserved", "gap"])
def test_a_writer_that_leaves_rubbish_where_zeros_belong_is_found_out(
    place: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    frame = bytearray((FOLDER / "lossless-r2.frame").read_bytes())
    header = decode(as_bytes(bytes(frame))).header
    if place == "reserved":
        frame[170] = 1
        frame[184:192] = bytes(8)
        frame[184:192] = checksum(bytes(frame[: header.header_bytes])).to_bytes(8, "little")
    else:
        first = header.segments[0]
        frame[int(first["offset"]) + int(first["stored_bytes"])] = 1
    path = tmp_path / "theirs.frame"
    path.write_bytes(frame)
    assert decode(as_bytes(bytes(frame))).data
    assert main([str(path)]) == 1
    out = capfd.readouterr().out
    assert out.startswith(f"wrong theirs.frame: {place}")
    assert "write zeros" in out


def test_the_command_prints_a_line_for_each_frame_and_runs_a_reader(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assets = map(str, FOLDER.glob("*.kvasset"))
    assert main([*map(str, FRAMES), "--asset", *assets]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"ok {path.name}" for path in FRAMES]
    assert main([str(RAW), "--reader", "false"]) == 1
    assert capfd.readouterr().out == "wrong raw-r1.frame: the reader refuses a valid frame\n"
    assert main([str(RAW), "--reader", "cat"]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "wrong raw-r1.frame: the reader returns 2368 bytes, not 2048"
    assert len(lines) > 60


def test_what_cannot_be_read_or_run_is_named_and_what_is_no_frame_is_wrong(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for arguments in (
        ["gone.frame"], [str(RAW), "--reader", "/no/such"], [str(RAW), "--asset", str(RAW)]
    ):  # fmt: skip
        assert main(arguments) == 2
        assert Path(arguments[-1]).name in capfd.readouterr().err
    path = tmp_path / "cut.frame"
    path.write_bytes(RAW.read_bytes()[:-1])
    assert main([str(path)]) == 1
    assert "cut.frame" in capfd.readouterr().out
    assert main([str(path), "--decode"]) == 1
    assert main([str(SHARD), "--decode"]) == 1
    found = capfd.readouterr()
    assert found.out == ""
    assert "a shard" in found.err


def test_decoded_bytes_are_written_as_they_are(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main([str(RAW), "--decode"]) == 0
    assert capfdbinary.readouterr().out == own(RAW)
