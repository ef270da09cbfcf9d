"""The registry of codecs, empty tensors, and what an engine says of the layers of a chunk."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from contracts.codec import SMALL, template
from contracts.ends import HYBRID
from contracts.lossy_codec import numbers

from kvstore.codecs.base import (
    CODECS,
    REPLACED,
    EncodeTerms,
    check_tensors,
    codec_by_id,
    codec_by_name,
    empty_tensors,
)
from kvstore.codecs.kvq import KvqCodec
from kvstore.proto.errors import LayoutMismatchError, UnknownCodecError
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
