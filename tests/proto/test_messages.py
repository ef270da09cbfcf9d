from __future__ import annotations

import random
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden.samples import FOLDER, REPRESENTATION, template, vectors
from golden.strategies import chunk_infos, layouts, representations
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.lookups import match_from_message
from kvstore.client.server_link import packed
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    LayoutMismatchError,
    ModelError,
)
from kvstore.proto.frame import MAX_COMPONENTS, check_frame
from kvstore.proto.keys import keys_of_digests, split_digests
from kvstore.proto.messages import (
    as_message,
    layout_from_message,
    layout_to_message,
    pack_info,
    representation_from_message,
    unpack_info,
)
from kvstore.proto.types import (
    ChainDigest,
    ChunkInfo,
    ChunkKey,
    DType,
    KVLayout,
    Model,
    Namespace,
)

ROW = bytes.fromhex(vectors()["raw_index_row"])
LAYOUT = template().layout


@given(representations)
def test_a_representation_arrives_as_it_was_sent(representation: Model) -> None:
    sent = as_message(pb.Representation, representation).SerializeToString()
    assert representation_from_message(pb.Representation.FromString(sent)) == representation


@given(layouts)
def test_a_layout_arrives_as_it_was_sent(layout: KVLayout) -> None:
    sent = layout_to_message(layout).SerializeToString()
    assert layout_from_message(pb.Layout.FromString(sent)) == (layout, None)


@given(chunk_infos)
def test_an_index_row_is_read_back(info: ChunkInfo) -> None:
    assert unpack_info(pack_info(info)) == info


@given(st.integers(0, len(ROW) - 1), st.integers(0, 255))
def test_a_changed_row_is_read_or_refused(at: int, value: int) -> None:
    row = bytearray(ROW)
    row[at] = value
    try:
        info = unpack_info(bytes(row))
    except InvalidFrameError:
        return
    assert unpack_info(pack_info(info)) == info


def test_the_golden_frame_has_the_row_of_the_format_page() -> None:
    frame = np.fromfile(FOLDER / "raw-r1.frame", np.uint8)
    info = check_frame(frame).info()
    assert pack_info(info) == ROW
    assert unpack_info(ROW) == info
    assert struct.unpack_from("<BBHQd32s16s", ROW) == (
        1, 2, 0, len(frame), 1.5e9, template().key, template().parent,
    )  # fmt: skip


def test_bad_rows_are_refused() -> None:
    for row, field in [
        (b"", "row"),
        (ROW[:67], "row"),
        (ROW[:68], "components"),
        (ROW[:-1], "components"),
        (ROW + b"\0", "components"),
        (ROW[:68] + ROW[68:] * (MAX_COMPONENTS + 1), "components"),
        (b"\x00" + ROW[1:], "row"),
        (b"\x02" + ROW[1:], "row"),
        (ROW[:1] + b"\x03" + ROW[2:], "row"),
        (ROW[:12] + struct.pack("<d", float("nan")) + ROW[20:], "prefill_flops"),
        (ROW[:12] + struct.pack("<d", float("inf")) + ROW[20:], "prefill_flops"),
        (ROW[:12] + struct.pack("<d", -1.0) + ROW[20:], "prefill_flops"),
        (ROW[:68] + b"\x09" + ROW[69:], "component"),
    ]:
        with pytest.raises(InvalidFrameError) as caught:
            unpack_info(row)
        assert caught.value.field == field


@given(st.lists(st.binary(min_size=16, max_size=16).map(ChainDigest), max_size=20))
def test_digests_are_joined_and_split_again(digests: list[ChainDigest]) -> None:
    assert split_digests(b"".join(digests), 20) == digests


def test_more_digests_than_the_limit_are_refused() -> None:
    assert len(split_digests(bytes(48), 3)) == 3
    with pytest.raises(InvalidRequestError, match="digests=4: at most 3 chunks in one batch"):
        split_digests(bytes(64), 3)


@given(st.binary(min_size=16, max_size=16), st.integers(0, 20), st.randoms())
def test_keys_are_cut_into_digests_and_joined_again(
    space: bytes, count: int, draw: random.Random
) -> None:
    digests = [draw.randbytes(16) for _ in range(count)]
    keys = [ChunkKey(space + digest) for digest in digests]
    assert packed(keys, Namespace(space)) == b"".join(digests)
    assert keys_of_digests(b"".join(digests), Namespace(space), 20) == keys


def test_keys_that_are_none_of_the_namespace_are_not_cut() -> None:
    for keys in [
        [bytes(32), b"x" * 32],
        [bytes(31)],
        [bytes(31), bytes(33)],
        [b""],
        [bytes(16) + b"x" * 16, bytes(15) + b"x" * 17],
    ]:
        with pytest.raises(InvalidRequestError, match="not in this client's namespace"):
            packed([ChunkKey(key) for key in keys], Namespace(bytes(16)))


def test_ragged_digests_make_no_keys() -> None:
    for size in [1, 15, 17, 31]:
        with pytest.raises(InvalidRequestError, match=f"digests={size}: give 16 bytes per chunk"):
            keys_of_digests(bytes(size), Namespace(bytes(16)), 100)
        with pytest.raises(InvalidRequestError, match="digests=4: at most 3 chunks in one batch"):
            keys_of_digests(bytes(64), Namespace(bytes(16)), 3)


ANSWER = pb.LookupResponse(
    ready=2, pending=1, tiers=b"\x01\x00", tier_names=["cpu", "disk"], lease_id=7, lease_ttl_ms=30,
    load_us=struct.pack("<2I", 5, 70_000),
)  # fmt: skip


def test_the_answer_to_a_lookup_names_holders_and_times() -> None:
    match = match_from_message(ANSWER, 4)
    assert (match.ready, match.pending, match.missing) == (2, 1, 1)
    assert (match.tiers, match.load_us) == (("disk", "cpu"), (5, 70_000))
    assert (match.lease_id, match.lease_ttl_ms) == (7, 30)
    nothing = match_from_message(pb.LookupResponse(), 3)
    assert (nothing.missing, nothing.tiers, nothing.load_us) == (3, (), ())


def test_an_answer_to_a_lookup_that_contradicts_itself_is_an_error() -> None:
    changes: list[tuple[str, Any]] = [
        ("ready", 1), ("tiers", b"\x02\x00"), ("tiers", b""), ("load_us", bytes(7)),
        ("load_us", b""),
    ]  # fmt: skip
    for name, value in changes:
        answer = pb.LookupResponse()
        answer.CopyFrom(ANSWER)
        setattr(answer, name, value)
        with pytest.raises(KVStoreError, match="lookup of 4 chunks is damaged"):
            match_from_message(answer, 4)
        with pytest.raises(KVStoreError, match="lookup of 1 chunks is damaged"):
            match_from_message(ANSWER, 1)


def test_a_representation_without_rope_is_refused() -> None:
    message = as_message(pb.Representation, REPRESENTATION)
    message.ClearField("rope")
    with pytest.raises(ModelError, match="rope=None: give the rope parameters"):
        representation_from_message(message)


def test_a_representation_with_a_field_left_out_is_refused() -> None:
    for field, named in [
        ("model_id", "model_id"),
        ("model_revision", "model_revision"),
        ("adapter_digest", "adapter_digest"),
        ("quantization", "quantization"),
        ("tokenizer_digest", "tokenizer_digest"),
        ("layout_version", "layout_version"),
        ("layer_groups", "layer_groups"),
    ]:
        message = as_message(pb.Representation, REPRESENTATION)
        message.ClearField(field)
        with pytest.raises(ModelError) as caught:
            representation_from_message(message)
        assert caught.value.field == named


def test_unknown_kinds_and_dtypes_are_refused() -> None:
    for field in ["kind", "dtype"]:
        for value in [7, 255, (1 << 32) - 1]:
            message = as_message(pb.Representation, REPRESENTATION)
            setattr(message.layer_groups[0], field, value)
            with pytest.raises(ModelError, match=f"{value} is not a valid"):
                representation_from_message(message)
            layout = pb.Layout.FromString(layout_to_message(LAYOUT).SerializeToString())
            setattr(layout.components[0], field, value)
            with pytest.raises(InvalidRequestError, match=f"{value} is not a valid"):
                layout_from_message(layout)


def test_bad_layouts_are_refused() -> None:
    with pytest.raises(LayoutMismatchError, match="at least one component"):
        layout_from_message(pb.Layout())
    layout = pb.Layout.FromString(layout_to_message(LAYOUT).SerializeToString())
    layout.components[0].tokens = 0
    with pytest.raises(LayoutMismatchError, match="tokens=0"):
        layout_from_message(layout)


def test_a_layout_fits_the_representation_it_was_made_from_and_no_other() -> None:
    group = REPRESENTATION.layer_groups[0]
    for tokens in (16, 200, 8192):
        assert KVLayout.of(REPRESENTATION, tokens).is_of(REPRESENTATION)
    for other in (
        replace(group, dtype=DType.float16),
        replace(group, kv_heads=3),
        replace(group, head_dim=9),
        replace(group, layer_ids=(0, 1, 2)),
    ):
        assert not LAYOUT.is_of(replace(REPRESENTATION, layer_groups=(other,)))
    ragged = KVLayout((LAYOUT.components[0], replace(LAYOUT.components[0], tokens=32)))
    assert not ragged.is_of(replace(REPRESENTATION, layer_groups=(group, replace(
        group, layer_ids=(2, 3))),
    ))  # fmt: skip
