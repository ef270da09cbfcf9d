from __future__ import annotations

import subprocess
import sys

import pytest
from contracts.codec import SMALL

from kvstore.codecs.base import (
    CODECS,
    REPLACED,
    check_tensors,
    codec_by_id,
    codec_by_name,
    empty_tensors,
)
from kvstore.proto.errors import LayoutMismatchError, UnknownCodecError
from kvstore.proto.types import Component, DType, KVLayout, LayerKind


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


def test_every_registered_codec_has_its_own_number_and_answers_to_its_name() -> None:
    codecs = [codec_by_name(name) for name in CODECS]
    assert [codec.name for codec in codecs] == list(CODECS)
    assert len({codec.codec_id for codec in codecs}) == len(codecs)
    assert [codec_by_id(codec.codec_id).name for codec in codecs] == list(CODECS)


def test_empty_tensors_have_the_layout_they_were_made_for() -> None:
    layout = KVLayout(
        (
            Component(LayerKind.mla, DType.float32, 3, 1, 5, 16),
            Component(LayerKind.attention, DType.float8_e5m2, 2, 4, 8, 16),
        )
    )
    tensors = empty_tensors(layout)
    check_tensors(layout, tensors)
    assert sum(part.nbytes for layers in tensors for parts in layers for part in parts) == (
        layout.raw_bytes
    )
    with pytest.raises(LayoutMismatchError, match=r"^components=2"):
        check_tensors(SMALL, tensors)


def test_a_module_is_imported_only_when_its_name_is_asked_for() -> None:
    script = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from kvstore.codecs.base import codec_by_name\n"
        "before = 'kvstore.codecs.kivi' in sys.modules\n"
        "codec_by_name('kivi')\n"
        "print(before, 'kvstore.codecs.kivi' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert run.stdout.split() == ["False", "True"]
