"""A lossy codec for tests of access to its frames: the high half of each element."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from typing_extensions import override

from kvstore.codecs import base
from kvstore.codecs.base import EncodedLayer, LayerTerms, LossyCodec, Part
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError, LayoutMismatchError
from kvstore.proto.types import Accuracy, Component, RopeParameters

ERROR_BOUND = 0.5


class CoarseCodec(LossyCodec):
    """Keeps half of every element. Refuses models with a theta of 13."""

    name = "coarse"
    codec_id = 901
    revision = 1
    accuracy = Accuracy.bounded

    @override
    def max_segment_bytes(self, component: Component) -> int:
        return component.layer_bytes // 2

    @override
    def encode_layer(self, parts: Sequence[Part], layer: LayerTerms, out: Bytes) -> EncodedLayer:
        if layer.rope == RopeParameters(13.0, layer.component.head_dim):
            raise LayoutMismatchError("rope", 13.0, "not a number for an embedding")
        size = parts[0].dtype.itemsize // 2
        bits = [np.ascontiguousarray(part).view(f"u{2 * size}").reshape(-1) for part in parts]
        high = (np.concatenate(bits) >> 8 * size).astype(f"u{size}").view(np.uint8)
        out[: len(high)] = high
        bound = ERROR_BOUND if self.accuracy is Accuracy.bounded else 0.0
        return EncodedLayer(len(high), self.accuracy, bound)

    @override
    def decode_layer(
        self, data: Sequence[Bytes], component: Component, out: Sequence[Part], position: int | None
    ) -> None:
        if len(data[0]) != component.layer_bytes // 2:
            raise InvalidFrameError("stored_bytes", len(data[0]), "half of each element")
        size = out[0].dtype.itemsize // 2
        for part, high in zip(out, np.split(data[0], component.parts), strict=True):
            halves = high.view(f"u{size}").reshape(component.shape)
            part[:] = (halves.astype(f"u{2 * size}") << 8 * size).view(part.dtype)


class RoughCodec(CoarseCodec):
    """The same codec under another name."""

    name = "rough"
    codec_id = 902


@contextmanager
def coarse_codec() -> Iterator[None]:
    """Register the codecs while the block runs."""
    with pytest.MonkeyPatch.context() as patch:
        for codec in (CoarseCodec, RoughCodec):
            patch.setitem(base.CODECS, codec.name, f"{__name__}:{codec.__name__}")
            patch.setitem(base.NAMES_BY_ID, codec.codec_id, codec.name)
        yield
