from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace

import pytest
from contracts.chunks import make_representation
from golden.samples import REPRESENTATION, template

from kvstore.proto.errors import LayoutMismatchError, ModelError
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
    RopeParameters,
    layer_order,
)

GROUP = LayerGroup(LayerKind.attention, DType.bfloat16, (0, 1), 2, 8)
COMPONENT = Component(LayerKind.attention, DType.bfloat16, 2, 2, 8, 16)
LAYOUT = KVLayout((COMPONENT,))
INFO = ChunkInfo(ChunkKey(bytes(32)), ROOT, LAYOUT, 0, 100)

INCOMPLETE: dict[str, tuple[Callable[[], object], str, str, str]] = {
    f"{name} {value!r}": (
        lambda name=name, value=value: replace(REPRESENTATION, **{name: value}),
        name,
        repr(value),
        fix,
    )
    for name, fix in {
        "model_id": "name the model",
        "model_revision": "give the commit or a digest of the weights",
        "adapter_digest": "give the LoRA's digest, or 'none'",
        "quantization": "name the KV quantisation, or 'none'",
        "tokenizer_digest": "give a digest of the tokenizer's files",
    }.items()
    for value in ("", "  ", None, 7)
} | {
    "layout version 0": (
        lambda: replace(REPRESENTATION, layout_version=0), "layout_version", "0", "use 1",
    ),
    "no groups": (
        lambda: replace(REPRESENTATION, layer_groups=()),
        "layer_groups", "()", "describe every layer that keeps KV",
    ),
    "a layer in two groups": (
        lambda: replace(REPRESENTATION, layer_groups=(GROUP, replace(GROUP, layer_ids=(1, 2)))),
        "layer_groups", "[0, 1, 1, 2]", "put each layer into one group",
    ),
    "no layers": (
        lambda: replace(GROUP, layer_ids=()), "layer_ids", "()", "name each layer of the group",
    ),
    "a layer twice": (
        lambda: replace(GROUP, layer_ids=(1, 1)), "layer_ids", "(1, 1)", "once, ascending",
    ),
    "layers out of order": (
        lambda: replace(GROUP, layer_ids=(2, 1)), "layer_ids", "(2, 1)", "once, ascending",
    ),
    "no heads": (lambda: replace(GROUP, kv_heads=0), "kv_heads", "0", "give a positive count"),
    "too many heads": (
        lambda: replace(GROUP, kv_heads=1 << 24), "kv_heads", "16777216", "positive count",
    ),
    "no head_dim": (lambda: replace(GROUP, head_dim=-1), "head_dim", "-1", "positive count"),
    "a window layer without window": (
        lambda: replace(GROUP, kind=LayerKind.window),
        "window_tokens", "0", "positive for window layers, else 0",
    ),
    "a window on another kind": (
        lambda: replace(GROUP, window_tokens=5), "window_tokens", "5", "else 0",
    ),
    "no scaling": (lambda: RopeParameters(1e4, 64, ""), "rope.scaling", "''", "name the rule"),
    "factors out of order": (
        lambda: RopeParameters(1e4, 64, "yarn", (("b", 1.0), ("a", 1.0))),
        "rope.factors", "(('b', 1.0), ('a', 1.0))", "sort them by name",
    ),
    "an unknown dtype": (lambda: DType.parse("int4"), "dtype", "'int4'", "use one of bfloat16, "),
}  # fmt: skip


def test_incomplete_identity_is_refused_with_field_value_and_fix() -> None:
    for make, field, value, fix in INCOMPLETE.values():
        with pytest.raises(ModelError) as caught:
            make()
        assert caught.value.field == field
        assert str(caught.value).startswith(f"{field}={value}: ")
        assert fix in str(caught.value)


def test_dtypes_are_found_under_torchs_names() -> None:
    for name in [dtype.name for dtype in DType]:
        assert DType.parse(name) is DType.parse(f"torch.{name}") is DType[name]


def test_numbers_in_frames_have_not_changed() -> None:
    assert [dtype.name for dtype in sorted(DType)] == [
        "bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8", "int8",
    ]  # fmt: skip
    assert [dtype.item_bytes for dtype in sorted(DType)] == [2, 2, 4, 1, 1, 1, 1]
    assert [kind.name for kind in sorted(LayerKind)] == ["attention", "mla", "window", "state"]
    assert [level.name for level in sorted(Accuracy)] == ["approximate", "bounded", "exact"]


def test_a_kind_has_its_number_of_parts() -> None:
    for kind, parts in list(zip(LayerKind, [2, 1, 2, 1], strict=True)):
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
            with pytest.raises(
                LayoutMismatchError, match=f"^{field}={value}: give a positive count"
            ):
                Component(**{"kind": LayerKind.mla, "dtype": DType.int8, "layers": 1, "kv_heads": 1,
                             "head_dim": 1, "tokens": 1, field: value})  # type: ignore[arg-type]  # fmt: skip


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


def test_what_is_known_of_a_chunk_has_whole_digests() -> None:
    with pytest.raises(LayoutMismatchError, match=r"key='00'.*32 bytes"):
        replace(INFO, key=ChunkKey(b"\0"))
    with pytest.raises(LayoutMismatchError, match=r"parent='0000'.*16 bytes"):
        replace(INFO, parent=ChainDigest(b"\0\0"))


def test_the_parent_key_shares_the_namespace_and_the_root_has_none() -> None:
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
