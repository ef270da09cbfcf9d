"""Hypothesis strategies for the nouns: any value that their checks let pass."""

from __future__ import annotations

from hypothesis import strategies as st

from kvstore.proto.types import (
    MAX_LAYERS,
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
    RopeParameters,
)

counts = st.integers(1, (1 << 24) - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
costs = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
names = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=12)
ropes = st.builds(
    RopeParameters,
    theta=finite,
    rotary_dim=st.integers(0, (1 << 32) - 1),
    scaling=names,
    factors=st.dictionaries(
        st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=12), finite, max_size=3
    ).map(lambda d: tuple(sorted(d.items()))),
)


@st.composite
def layer_groups(draw: st.DrawFn) -> tuple[LayerGroup, ...]:
    """Up to three groups that share no layer."""
    ids = sorted(draw(st.sets(st.integers(0, MAX_LAYERS - 1), min_size=1, max_size=9)))
    group_count = draw(st.integers(1, min(3, len(ids))))
    groups = []
    for start in range(group_count):
        kind = draw(st.sampled_from(LayerKind))
        groups.append(
            LayerGroup(
                kind=kind,
                dtype=draw(st.sampled_from(DType)),
                layer_ids=tuple(ids[start::group_count]),
                kv_heads=draw(counts),
                head_dim=draw(counts),
                window_tokens=draw(counts) if kind is LayerKind.window else 0,
            )
        )
    return tuple(groups)


representations = st.builds(
    Model,
    model_id=names,
    model_revision=names.map(lambda name: f"{name}7"),  # no branch's name, which is refused
    adapter_digest=names,
    quantization=names,
    layer_groups=layer_groups(),
    rope=ropes,
    tokenizer_digest=names,
    layout_version=st.integers(1, (1 << 32) - 1),
)

kinds, dtypes = st.sampled_from(LayerKind), st.sampled_from(DType)
layouts = st.lists(
    st.builds(Component, kinds, dtypes, counts, counts, counts, counts), min_size=1, max_size=4
).map(lambda components: KVLayout(tuple(components)))

_few = st.integers(1, 9)
small_layouts = st.lists(
    st.builds(Component, kinds, dtypes, _few, _few, _few, _few), min_size=1, max_size=5
).map(lambda components: KVLayout(tuple(components)))
"""Layouts whose frames fit a test's memory."""

chunk_infos = st.builds(
    ChunkInfo,
    key=st.binary(min_size=32, max_size=32).map(ChunkKey),
    parent=st.binary(min_size=16, max_size=16).map(ChainDigest),
    layout=layouts,
    codec_id=st.integers(0, 65535),
    size_bytes=st.integers(0, (1 << 64) - 1),
    accuracy=st.sampled_from(Accuracy),
    prefill_flops=costs,
)
