"""Rows cut out of raw layers: the same rows at the other end, and nothing else passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from contracts.codec import encoded, filled, layouts, strided, template
from golden.samples import FOLDER, vectors
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.base import codec_by_name, empty_tensors
from kvstore.codecs.slices import copy_kept, cut_bytes, cut_rows, kept_rows, place_cut
from kvstore.proto.buffers import Bytes, as_bytes
from kvstore.proto.errors import ChunkCorruptError
from kvstore.proto.frame import FrameHeader, parse_header
from kvstore.proto.row_mask import Rows, SkippedRows
from kvstore.proto.types import DType

RAW = codec_by_name("raw")
LAYOUT = layouts(DType.bfloat16)["gqa"]
TENSORS = filled(LAYOUT)
FRAME = encoded(RAW, TENSORS, LAYOUT)
HEADER = parse_header(FRAME)
KEPT: Rows = np.array([0, 1, 5, 63])


def segment(index: int, frame: Bytes = FRAME) -> Bytes:
    return HEADER.segment(frame, index)


@given(st.sets(st.integers(0, 63)).map(sorted), st.sampled_from(["mha", "gqa", "mla"]))
def test_rows_that_are_kept_arrive_and_the_others_stay(rows: list[int], name: str) -> None:
    layout = layouts(DType.float16)[name]
    tokens = layout.tokens
    kept = np.array([row for row in rows if row < tokens], np.intp)
    tensors = filled(layout)
    frame = encoded(RAW, tensors, layout)
    header = parse_header(frame)
    for way in ("cut", "whole"):
        out = strided(filled(layout, seed=9))
        before = [[[part.copy() for part in parts] for parts in layers] for layers in out]
        index = 0
        for number, layers in enumerate(out):
            for layer, parts in enumerate(layers):
                data = header.segment(frame, index)
                if way == "cut":
                    sent = cut_rows(header, index, data, kept)
                    assert len(sent) == cut_bytes(header, index, kept)
                    place_cut(header, index, sent, kept, parts)
                else:
                    copy_kept(header, index, data, kept, parts)
                others = np.setdiff1d(np.arange(tokens), kept)
                wanted, old = tensors[number][layer], before[number][layer]
                for part, right, was in zip(parts, wanted, old, strict=True):
                    assert np.array_equal(part[:, kept], right[:, kept])
                    assert np.array_equal(part[:, others], was[:, others])
                index += 1


def test_a_damaged_layer_is_neither_cut_nor_copied() -> None:
    """Also where the damage is in rows that nobody wants."""
    damaged = FRAME.copy()
    segment(1, damaged)[-1] ^= 1
    kept = np.array([0])
    out = empty_tensors(LAYOUT)[0][1]
    with pytest.raises(ChunkCorruptError, match="layer 1 fails its checksum"):
        cut_rows(HEADER, 1, segment(1, damaged), kept)
    with pytest.raises(ChunkCorruptError, match="layer 1 fails its checksum"):
        copy_kept(HEADER, 1, segment(1, damaged), kept, out)


def _other_layer(sent: Bytes) -> tuple[FrameHeader, int, Bytes, Rows]:
    return HEADER, 2, sent, KEPT


def _other_rows(sent: Bytes) -> tuple[FrameHeader, int, Bytes, Rows]:
    return HEADER, 1, sent, np.array([0, 1, 6, 63])


def _other_chunk(sent: Bytes) -> tuple[FrameHeader, int, Bytes, Rows]:
    segments = HEADER.segments.copy()
    segments["checksum"] += 1
    return replace(HEADER, segments=segments), 1, sent, KEPT


def _flipped(sent: Bytes) -> tuple[FrameHeader, int, Bytes, Rows]:
    sent[100] ^= 1
    return HEADER, 1, sent, KEPT


def _short(sent: Bytes) -> tuple[FrameHeader, int, Bytes, Rows]:
    return HEADER, 1, sent[:-1], KEPT


def _nothing(sent: Bytes) -> tuple[FrameHeader, int, Bytes, Rows]:
    return HEADER, 1, sent[:0], KEPT


@pytest.mark.parametrize(
    "change", [_other_layer, _other_rows, _other_chunk, _flipped, _short, _nothing]
)
def test_what_was_cut_passes_as_itself_only_and_leaves_the_room_as_it_was(change: object) -> None:
    assert callable(change)
    header, index, data, kept = change(cut_rows(HEADER, 1, segment(1), KEPT))
    out = filled(LAYOUT, seed=3)[0][1]
    before = [part.copy() for part in out]
    with pytest.raises(ChunkCorruptError, match="rows of segment"):
        place_cut(header, index, data, kept, out)
    assert all(map(np.array_equal, out, before))


def test_only_raw_layers_with_a_row_for_each_token_are_cut() -> None:
    skipped = SkippedRows.of({0: [1]})
    assert kept_rows(HEADER, skipped, 0) is not None
    assert kept_rows(HEADER, skipped, 1) is None
    assert kept_rows(HEADER, None, 0) is None
    coded = parse_header(encoded(codec_by_name("lossless"), TENSORS, LAYOUT))
    assert kept_rows(coded, skipped, 0) is None
    ended = layouts(DType.bfloat16)["several"]
    header = parse_header(encoded(RAW, filled(ended), ended))
    assert kept_rows(header, skipped, 0) is None
    assert template(LAYOUT).layout == HEADER.layout


def test_the_cut_of_the_page_is_what_is_sent() -> None:
    frame = as_bytes((FOLDER / "raw-r1.frame").read_bytes())
    header = parse_header(frame)
    kept = SkippedRows.of({0: [*range(1, 9), *range(10, 16)]}).kept(0, 16)
    assert kept is not None
    sent = cut_rows(header, 1, header.segment(frame, 1), kept)
    assert sent.tobytes().hex() == vectors()["cut_layer"]
