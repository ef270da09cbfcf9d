from __future__ import annotations

import pytest
from contracts.codec import SMALL

from kvstore.codecs.base import CODECS, check_tensors, codec_by_id, codec_by_name, empty_tensors
from kvstore.proto.errors import LayoutMismatchError, UnknownCodecError
from kvstore.proto.types import Component, DType, KVLayout, LayerKind


def test_an_unknown_name_is_refused_and_the_known_ones_named() -> None:
    with pytest.raises(UnknownCodecError, match=r"'gzip': unknown here; known: .*raw, .*zplane"):
        codec_by_name("gzip")


@pytest.mark.parametrize("codec_id", [999, 65535, -1])
def test_an_unknown_number_is_refused_and_the_known_ones_named(codec_id: int) -> None:
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
