from __future__ import annotations

import math
import random
import re
import struct
from dataclasses import FrozenInstanceError, replace
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from contracts.chunks import make_representation
from golden.samples import FOLDER, REPRESENTATION, template, vectors
from golden.strategies import chunk_infos, layouts, representations
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.lookups import match_from_message
from kvstore.client.server_link import packed
from kvstore.proto import errors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    LayoutMismatchError,
    ModelError,
    revive,
)
from kvstore.proto.frame import MAX_COMPONENTS, check_frame
from kvstore.proto.keys import keys_of_digests, split_digests
from kvstore.proto.messages import (
    as_message,
    engine_from_message,
    engine_to_message,
    hints_from_message,
    hints_to_message,
    layout_from_message,
    layout_to_message,
    pack_info,
    representation_from_message,
    unpack_info,
)
from kvstore.proto.plans import (
    MAX_HINT_MS,
    MAX_PRIORITY,
    NO_HINTS,
    EngineTerms,
    Hints,
    LoadPlan,
    PlanRange,
    PrefillModel,
    Reuse,
)
from kvstore.proto.types import (
    ROOT,
    Accuracy,
    ChainDigest,
    ChunkInfo,
    ChunkKey,
    Component,
    DType,
    KVLayout,
    LayerGroup,
    LayerKind,
    Model,
    Namespace,
    RopeParameters,
    layer_order,
)

GROUP = LayerGroup(LayerKind.attention, DType.bfloat16, (0, 1), 2, 8)
ROPE = RopeParameters(1e4, 64, "yarn")
COMPONENT = Component(LayerKind.attention, DType.bfloat16, 2, 2, 8, 16)
LAYOUT = KVLayout((COMPONENT,))
INFO = ChunkInfo(ChunkKey(bytes(32)), ROOT, LAYOUT, 0, 100)

Row = tuple[Any, str, Any, str]
UNNAMED: list[Row] = [
    (REPRESENTATION, field, value, fix)
    for field, fix in {
        "model_id": "name the model",
        "model_revision": "give the commit or a digest of the weights",
        "adapter_digest": "give the LoRA's digest, or 'none'",
        "quantization": "name the KV quantisation, or 'none'",
        "tokenizer_digest": "give a digest of the tokenizer's files",
    }.items()
    for value in ("", "  ", None, 7)
]
INCOMPLETE: list[Row] = [
    *UNNAMED,
    (REPRESENTATION, "layout_version", 0, "use 1"),
    (REPRESENTATION, "layer_groups", (), "describe every layer that keeps KV"),
    (GROUP, "layer_ids", (), "name each layer of the group"),
    (GROUP, "layer_ids", (1, 1), "once, ascending"),
    (GROUP, "layer_ids", (2, 1), "once, ascending"),
    (GROUP, "kv_heads", 0, "give a positive count"),
    (GROUP, "kv_heads", 1 << 24, "positive count"),
    (GROUP, "head_dim", -1, "positive count"),
    (GROUP, "head_dim", 2.5, "a whole number below 2^24"),
    (GROUP, "window_tokens", 5, "positive for window layers, else 0"),
    (replace(GROUP, kind=LayerKind.window, window_tokens=9), "window_tokens", 0, "positive"),
    (ROPE, "scaling", "", "name the rule"),
    (ROPE, "factors", (("b", 1.0), ("a", 1.0)), "sort them by name"),
]


def test_incomplete_identity_is_refused_with_field_value_and_fix() -> None:
    for whole, field, value, fix in INCOMPLETE:
        name = f"rope.{field}" if whole is ROPE else field
        with pytest.raises(ModelError, match=re.escape(f"{name}={value!r}: ")) as caught:
            replace(whole, **{field: value})
        assert caught.value.field == name
        assert fix in str(caught.value)
    twice = (GROUP, replace(GROUP, layer_ids=(1, 2)))
    with pytest.raises(ModelError, match=r"layer_groups=\[0, 1, 1, 2\]: put each layer into one"):
        replace(REPRESENTATION, layer_groups=twice)
    with pytest.raises(ModelError, match=r"dtype='int4': use one of bfloat16, "):
        DType.parse("int4")


def test_dtypes_are_found_under_the_names_and_dtypes_of_torch_and_numpy() -> None:
    for dtype in DType:
        for name in (dtype.name, f"torch.{dtype.name}", dtype, getattr(torch, dtype.name)):
            assert DType.parse(name) is dtype
    for numpys in (np.float16, np.dtype(np.float16)):
        assert DType.parse(numpys) is DType.float16


def test_a_uniform_model_is_of_counts_and_a_dtype() -> None:
    sizes: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": torch.bfloat16}
    found = Model.uniform("m", "8f2c1d4", **sizes)
    assert found == Model.uniform("m", "8f2c1d4", **{**sizes, "dtype": "bfloat16"})
    for field, value in (("layers", "4"), ("head_dim", 2.5), ("dtype", None)):
        with pytest.raises(ModelError, match=f"{field}="):
            Model.uniform("m", "8f2c1d4", **{**sizes, field: value})


def test_numbers_in_frames_have_not_changed() -> None:
    assert [dtype.name for dtype in sorted(DType)] == [
        "bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8", "int8",
    ]  # fmt: skip
    assert [dtype.item_bytes for dtype in sorted(DType)] == [2, 2, 4, 1, 1, 1, 1]
    assert [kind.name for kind in sorted(LayerKind)] == ["attention", "mla", "window", "state"]
    assert [level.name for level in sorted(Accuracy)] == ["approximate", "bounded", "exact"]


def test_a_kind_has_its_number_of_parts() -> None:
    for kind, parts in zip(LayerKind, [2, 1, 2, 1], strict=True):
        component = replace(COMPONENT, kind=kind)
        assert component.parts == parts
        window = 9 if kind is LayerKind.window else 0
        assert replace(GROUP, kind=kind, window_tokens=window).parts == parts
        assert component.part_bytes == 2 * 16 * 8 * 2
        assert component.layer_bytes == parts * component.part_bytes
        assert component.shape == (2, 16, 8)


def test_counts_outside_the_limits_are_refused() -> None:
    for field in ["layers", "kv_heads", "head_dim", "tokens"]:
        for value in [-1, 0, 1 << 24]:
            with pytest.raises(LayoutMismatchError, match=f"^{field}={value}: give a positive"):
                replace(COMPONENT, kind=LayerKind.mla, **{field: value})  # type: ignore[arg-type]


def test_the_layout_of_a_chunk_follows_the_layer_groups() -> None:
    mla = LayerGroup(LayerKind.mla, DType.float8_e4m3fn, (2, 5, 9), 1, 576)
    hybrid = replace(REPRESENTATION, layer_groups=(mla, GROUP))
    assert KVLayout.of(hybrid, 200) == KVLayout(
        (
            Component(LayerKind.mla, DType.float8_e4m3fn, 3, 1, 576, 200),
            Component(LayerKind.attention, DType.bfloat16, 2, 2, 8, 200),
        )
    )
    assert KVLayout.of(REPRESENTATION, 16) == LAYOUT == template().layout
    with pytest.raises(LayoutMismatchError, match="at least one component"):
        KVLayout(())
    for tokens in [0, 15, 8193]:
        with pytest.raises(LayoutMismatchError, match=f"tokens={tokens}: a chunk has 16 to 8192"):
            KVLayout.of(REPRESENTATION, tokens)
    with pytest.raises(FrozenInstanceError):
        LAYOUT.components = ()  # type: ignore[misc]


STATE = replace(GROUP, kind=LayerKind.state, layer_ids=(2,), kv_heads=1, head_dim=600)
WINDOW = replace(GROUP, kind=LayerKind.window, layer_ids=(3, 5), window_tokens=40)
HYBRID = replace(REPRESENTATION, layer_groups=(GROUP, STATE, WINDOW))


def test_a_window_keeps_of_a_chunk_what_the_next_token_can_see() -> None:
    for width, tokens, kept in [(40, 64, 39), (40, 32, 32), (1, 64, 1)]:
        model = replace(REPRESENTATION, layer_groups=(replace(WINDOW, window_tokens=width),))
        layout = KVLayout.of(model, tokens)
        (component,) = layout.components
        assert (component.tokens, layout.tokens, component.parts) == (kept, tokens, 2)
        assert component.first_token == tokens - kept


def test_a_state_is_one_row_of_the_end_of_a_chunk() -> None:
    layout = KVLayout.of(HYBRID, 64)
    attention, state, window = layout.components
    assert (attention.tokens, state.tokens, window.tokens) == (64, 1, 39)
    assert (state.shape, state.parts, state.chunk_tokens) == ((1, 1, 600), 1, 64)
    assert layout.tokens == 64
    assert KVLayout.of(replace(HYBRID, layer_groups=(STATE,)), 64).tokens == 64


def test_a_chunk_may_be_without_what_is_of_its_end() -> None:
    without = KVLayout.of(HYBRID, 64, window=False, state=False)
    assert [c.kind for c in without.components] == [LayerKind.attention]
    middle = KVLayout.of(HYBRID, 64, state=False)
    assert [c.kind for c in middle.components] == [LayerKind.attention, LayerKind.window]
    for layout in (without, middle, KVLayout.of(HYBRID, 64)):
        assert layout.is_of(HYBRID)
        assert not layout.is_of(replace(REPRESENTATION, layer_groups=(STATE,)))


def test_rows_that_keep_more_or_less_than_their_kind_are_refused() -> None:
    for kind, tokens, chunk_tokens in [
        (LayerKind.attention, 8, 16),
        (LayerKind.window, 16, 8),
        (LayerKind.state, 1, 1 << 24),
    ]:
        with pytest.raises(LayoutMismatchError, match=f"chunk_tokens={chunk_tokens}"):
            replace(COMPONENT, kind=kind, tokens=tokens, chunk_tokens=chunk_tokens)
    window = replace(COMPONENT, kind=LayerKind.window)
    assert replace(window, chunk_tokens=window.tokens) == window
    with pytest.raises(LayoutMismatchError, match="keep nothing else"):
        KVLayout.of(replace(REPRESENTATION, layer_groups=(STATE,)), 64, state=False)


def test_a_chunk_and_its_parent_have_whole_digests_and_share_the_namespace() -> None:
    with pytest.raises(LayoutMismatchError, match=r"key='00'.*32 bytes"):
        replace(INFO, key=ChunkKey(b"\0"))
    with pytest.raises(LayoutMismatchError, match=r"parent='0000'.*16 bytes"):
        replace(INFO, parent=ChainDigest(b"\0\0"))
    assert INFO.parent_key is None
    child = replace(INFO, key=ChunkKey(b"n" * 16 + b"d" * 16), parent=ChainDigest(b"p" * 16))
    assert child.parent_key == b"n" * 16 + b"p" * 16


def test_layers_of_groups_that_alternate_are_found_by_their_number() -> None:
    groups = (
        LayerGroup(LayerKind.attention, DType.bfloat16, (0, 4, 9), 2, 8),
        LayerGroup(LayerKind.mla, DType.float16, (3, 5), 1, 24),
    )
    assert layer_order(make_representation(layers=3)) == ((0, 0), (1, 1), (2, 2))
    model = replace(make_representation(), layer_groups=groups)
    assert layer_order(model) == ((0, 0), (3, 3), (4, 1), (5, 4), (9, 2))


ROW = bytes.fromhex(vectors()["raw_index_row"])


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
    costs = [ROW[:12] + struct.pack("<d", cost) + ROW[20:] for cost in (math.nan, math.inf, -1.0)]
    unknown = [b"", ROW[:67], b"\0" + ROW[1:], b"\2" + ROW[1:], ROW[:1] + b"\3" + ROW[2:]]
    ragged = [ROW[:68], ROW[:-1], ROW + b"\0", ROW[:68] + ROW[68:] * (MAX_COMPONENTS + 1)]
    for field, rows in {
        "row": unknown, "components": ragged, "prefill_flops": costs,
        "component": [ROW[:68] + b"\x09" + ROW[69:]],
    }.items():  # fmt: skip
        for row in rows:
            with pytest.raises(InvalidFrameError) as caught:
                unpack_info(row)
            assert caught.value.field == field


def test_a_layout_fits_the_representation_it_was_made_from_and_no_other() -> None:
    group = REPRESENTATION.layer_groups[0]
    for tokens in (16, 200, 8192):
        assert KVLayout.of(REPRESENTATION, tokens).is_of(REPRESENTATION)
    others: list[dict[str, Any]] = [
        {"dtype": DType.float16}, {"kv_heads": 3}, {"head_dim": 9}, {"layer_ids": (0, 1, 2)},
    ]  # fmt: skip
    for other in others:
        model = replace(REPRESENTATION, layer_groups=(replace(group, **other),))
        assert not LAYOUT.is_of(model)
    ragged = KVLayout((LAYOUT.components[0], replace(LAYOUT.components[0], tokens=32)))
    two = (group, replace(group, layer_ids=(2, 3)))
    assert not ragged.is_of(replace(REPRESENTATION, layer_groups=two))


def test_representations_and_layouts_with_a_field_left_out_or_unknown_are_refused() -> None:
    message = as_message(pb.Representation, REPRESENTATION)
    for field in message.DESCRIPTOR.fields_by_name:
        wrong = pb.Representation.FromString(message.SerializeToString())
        wrong.ClearField(field)
        with pytest.raises(ModelError) as caught:
            representation_from_message(wrong)
        assert caught.value.field == field
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
    with pytest.raises(LayoutMismatchError, match="at least one component"):
        layout_from_message(pb.Layout())
    layout = pb.Layout.FromString(layout_to_message(LAYOUT).SerializeToString())
    layout.components[0].tokens = 0
    with pytest.raises(LayoutMismatchError, match="tokens=0"):
        layout_from_message(layout)


# --- keys


@given(st.binary(min_size=16, max_size=16), st.integers(0, 20), st.randoms())
def test_keys_are_cut_into_digests_and_joined_again(
    space: bytes, count: int, draw: random.Random
) -> None:
    digests = [ChainDigest(draw.randbytes(16)) for _ in range(count)]
    keys = [ChunkKey(space + digest) for digest in digests]
    joined = packed(keys, Namespace(space))
    assert joined == b"".join(digests)
    assert split_digests(joined, 20) == digests
    assert keys_of_digests(joined, Namespace(space), 20) == keys


def test_keys_of_another_namespace_and_digests_ragged_or_too_many_are_refused() -> None:
    for keys in [
        [bytes(32), b"x" * 32], [bytes(31)], [bytes(31), bytes(33)], [b""],
        [bytes(16) + b"x" * 16, bytes(15) + b"x" * 17],
    ]:  # fmt: skip
        with pytest.raises(InvalidRequestError, match="not in this client's namespace"):
            packed([ChunkKey(key) for key in keys], Namespace(bytes(16)))
    assert len(split_digests(bytes(48), 3)) == 3
    for size in [1, 15, 17, 31]:
        with pytest.raises(InvalidRequestError, match=f"digests={size}: give 16 bytes per chunk"):
            keys_of_digests(bytes(size), Namespace(bytes(16)), 100)
    with pytest.raises(InvalidRequestError, match="digests=4: at most 3 chunks in one batch"):
        keys_of_digests(bytes(64), Namespace(bytes(16)), 3)


# --- answers to lookups, and plans

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
        with pytest.raises(KVStoreError, match="lookup of 4 chunks is invalid"):
            match_from_message(answer, 4)
    with pytest.raises(KVStoreError, match="lookup of 1 chunks is invalid"):
        match_from_message(ANSWER, 1)


PLAN = LoadPlan((PlanRange(0, 2, False, 1.5), PlanRange(2, 5, True, 2.5)), 3.0, 9.0)


def reply_of(plan: LoadPlan | None) -> pb.LookupResponse:
    reply = pb.LookupResponse()
    if plan is not None:
        ranges = [as_message(pb.PlanRange, one) for one in plan.ranges]
        reply = as_message(pb.LookupResponse, plan, plan=ranges)
    return pb.LookupResponse.FromString(reply.SerializeToString())


def test_a_plan_comes_out_as_it_went_in_and_with_gaps_is_damaged() -> None:
    assert PLAN.loaded == [2, 3, 4]
    for plan in [PLAN, LoadPlan((), 1.0, 1.0), None]:
        asked = plan.ranges[-1].stop if plan and plan.ranges else 0
        assert match_from_message(reply_of(plan), asked).plan == plan
    for bounds in [
        [(0, 2), (3, 5)], [(0, 2), (2, 4)], [(1, 5)], [(0, 5), (5, 5)], [(0, 6), (6, 5)]
    ]:  # fmt: skip
        ranges = tuple(PlanRange(first, stop, True, 1.0) for first, stop in bounds)
        with pytest.raises(KVStoreError, match="5 chunks is invalid"):
            match_from_message(reply_of(LoadPlan(ranges, 1.0, 1.0)), 5)


def test_engines_travel_with_a_lookup_and_those_that_cannot_be_are_refused() -> None:
    engine = EngineTerms(PrefillModel(0.1, 0.2, 0.3), 77)
    request = pb.LookupRequest(prefill=engine_to_message(engine))
    assert engine_from_message(request) == engine
    assert engine_from_message(pb.LookupRequest()) is None
    assert engine_to_message(None) is None
    for value in [-1.0, float("nan"), float("inf")]:
        for field in ("start_s", "token_s", "pair_s"):
            request = pb.LookupRequest(prefill=pb.Prefill())
            setattr(request.prefill, field, value)
            with pytest.raises(InvalidRequestError, match=field):
                engine_from_message(request)


# --- hints

HINTS = st.builds(
    Hints,
    st.sampled_from(Reuse),
    st.integers(0, MAX_PRIORITY),
    st.integers(0, MAX_HINT_MS),
    st.integers(0, MAX_HINT_MS),
    st.text(st.characters(categories=["L", "N"]), max_size=64),
    st.integers(0, MAX_HINT_MS),
)


@given(HINTS)
def test_hints_arrive_as_they_were_given_and_none_takes_no_byte(hints: Hints) -> None:
    message = hints_to_message(hints) or pb.Hints()
    assert hints_from_message(pb.Hints.FromString(message.SerializeToString())) == hints
    assert (hints_to_message(hints) is None) == (hints == NO_HINTS)
    assert hints_from_message(pb.Hints()) is NO_HINTS


def test_hints_that_cannot_be_are_refused_by_name() -> None:
    for message, why in [
        (pb.Hints(reuse=3), "hints.reuse=3"),  # type: ignore[arg-type]
        (pb.Hints(priority=101), "hints.priority=101: use 0 to 100"),
        (pb.Hints(category="x" * 65), "at most 64 printable"),
        (pb.Hints(category="a\nb"), "at most 64 printable"),
    ]:
        with pytest.raises(InvalidRequestError, match=why.replace(".", r"\.")):
            hints_from_message(message)
    wrong: list[tuple[str, Any]] = [("reuse", 7)]
    numbers = ["priority", "ttl_ms", "pin_ms", "prompt_tokens"]
    for name, value in [*wrong, *((one, bad) for one in numbers for bad in (-1, 1 << 32, 0.5))]:
        with pytest.raises(InvalidRequestError, match=rf"hints\.{name}="):
            Hints(**{name: value})


# --- errors

EXAMPLES: list[KVStoreError] = [
    KVStoreError("plain"),
    errors.InvalidRequestError("limit", 7, "at most 5"),
    errors.InvalidFrameError("magic", b"\0", "expected KVFR"),
    errors.ModelError("model_id", "", "name the model"),
    errors.LayoutMismatchError("shape", (1, 2), "give (2, 1)"),
    errors.UnknownCodecError("gzip", "raw, lossless"),
    errors.LeaseExpiredError("lease 5"),
    errors.TierFullError("cpu", 100, 50),
    errors.QuotaExceededError("max_leases", 10, "session 3"),
    errors.ChunkCorruptError(bytes(32), "layer 3 fails its checksum"),
    errors.TierUnavailableError("redis", "connection refused"),
    errors.DeadlineError("5 ms passed"),
    errors.ShuttingDownError("draining"),
    errors.UnauthenticatedError("no token"),
    errors.PermissionDeniedError("not an admin"),
]


def test_every_error_that_travelled_is_the_same_class_and_message() -> None:
    public = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, KVStoreError) and not name.startswith("_")
    }
    assert {type(error).__name__ for error in EXAMPLES} == public
    for error in EXAMPLES:
        revived = revive(type(error).__name__, str(error))
        assert type(revived) is type(error)
        assert str(revived) == str(error) != ""
        assert revived.status == error.status in grpc.StatusCode.__members__
        assert error.status not in ("OK", "CANCELLED", "UNKNOWN")
    for name in ["FutureError", "", "Exception", "SystemExit"]:
        revived = revive(name, "from a newer server")
        assert type(revived) is KVStoreError
        assert str(revived) == "from a newer server"


def test_errors_carry_what_their_caller_decides_by_and_cut_long_values() -> None:
    assert issubclass(InvalidFrameError, ValueError)
    assert issubclass(InvalidRequestError, ValueError)
    assert issubclass(errors.DeadlineError, TimeoutError)
    error = InvalidRequestError("tokens", list(range(10000)), "too many")
    assert re.fullmatch(r"tokens=\[0, 1, 2.{,120}\.\.\.: too many", str(error))
    full, _, corrupt, away = EXAMPLES[7:11]
    assert (full.tier, full.need_bytes, full.free_bytes) == ("cpu", 100, 50)  # type: ignore[attr-defined]
    assert (corrupt.key, away.tier) == (bytes(32), "redis")  # type: ignore[attr-defined]
    assert (error.field, EXAMPLES[8].limit) == ("tokens", "max_leases")  # type: ignore[attr-defined]
