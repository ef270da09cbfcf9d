"""Windows and states under lossy codecs: where a window's first token is, and what stays exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from contracts.codec import template
from contracts.ends import HYBRID
from contracts.lossy_codec import numbers

from kvstore.codecs.assets import ASSETS, AssetKind, pack_asset, parse_asset
from kvstore.codecs.base import EncodeTerms
from kvstore.codecs.cachegen import CachegenCodec
from kvstore.codecs.kvq import KvqCodec
from kvstore.codecs.profiles import cachegen_tables
from kvstore.proto.errors import LayoutMismatchError
from kvstore.proto.types import Accuracy, Component, DType, KVLayout, LayerKind, RopeParameters

WINDOW = Component(LayerKind.window, DType.bfloat16, 1, 2, 64, 64, 96)
STATE = Component(LayerKind.state, DType.float32, 1, 1, 700, 1, 96)
TERMS = EncodeTerms(rope=RopeParameters(10_000.0, 64))


def encoded(
    codec: Any, layout: KVLayout, tensors: Any, terms: EncodeTerms | None = None, **named: Any
) -> tuple[Any, Any]:
    out = np.zeros(codec.max_frame_bytes(layout), np.uint8)
    header = codec.encode(template(layout, **named), tensors, out, terms)
    return header, out[: header.frame_bytes]


def test_a_windows_keys_are_turned_back_from_where_its_first_token_is() -> None:
    tensors = numbers(KVLayout((WINDOW,)), seed=3)
    plain = KVLayout((replace(WINDOW, chunk_tokens=0),))
    window, frame = encoded(KvqCodec(), KVLayout((WINDOW,)), tensors, TERMS, position=100)
    whole, other = encoded(KvqCodec(), plain, tensors, TERMS, position=132)
    assert np.array_equal(window.segment(frame, 0), whole.segment(other, 0))


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


def test_tables_of_a_model_count_neither_states_nor_chunks_without_windows() -> None:
    codable = KVLayout((replace(WINDOW, layers=2),))
    samples = [numbers(codable, seed=seed) for seed in range(2)]
    tables = cachegen_tables(codable.components, samples)
    data = pack_asset(AssetKind.cachegen, template(codable).representation, 77, tables)
    codec = CachegenCodec(None, ASSETS, parse_asset(data))
    both = KVLayout((STATE, *codable.components))
    header, frame = encoded(codec, both, [[numbers(KVLayout((STATE,)))[0][0]], samples[0][0]])
    assert header.accuracy is Accuracy.bounded
    assert len(header.segment(frame, 0)) == 24 + STATE.layer_bytes
    with pytest.raises(LayoutMismatchError, match=r"layers=1.*tables for 2"):
        encoded(codec, KVLayout((WINDOW,)), numbers(KVLayout((WINDOW,))))
