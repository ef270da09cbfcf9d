"""Layers that kvq keeps bit by bit: those it must not quantise, or cannot within its promise."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from kvstore.codecs.base import Codec, Part, codec_by_id, codec_by_name
from kvstore.codecs.kvq_body import AS_IT_IS, EXACT_HEAD
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.types import Accuracy, Component

_WRITER = "zplane"


@lru_cache(maxsize=1)
def _writer() -> Codec:
    return codec_by_name(_WRITER)


def max_exact_bytes(component: Component) -> int:
    """Upper bound of such a layer."""
    return EXACT_HEAD.size + _writer().max_segment_bytes(component)


def encode_exact(parts: Sequence[Part], component: Component, out: Bytes) -> int:
    """Write *parts* under a lossless codec behind its number and revision."""
    codec = _writer()
    head = EXACT_HEAD.pack(AS_IT_IS, 0, codec.codec_id, codec.revision, 0)
    out[: EXACT_HEAD.size] = np.frombuffer(head, np.uint8)
    return EXACT_HEAD.size + codec.encode_segment(parts, component, out[EXACT_HEAD.size :])


def decode_exact(data: Bytes, component: Component, out: Sequence[Part]) -> None:
    """Read what ``encode_exact`` wrote. Raises InvalidFrameError, UnknownCodecError."""
    if len(data) < EXACT_HEAD.size:
        raise InvalidFrameError("stored_bytes", len(data), f"at least {EXACT_HEAD.size}")
    method, zero, codec_id, revision, rest = EXACT_HEAD.unpack(data[: EXACT_HEAD.size].tobytes())
    if method != AS_IT_IS or zero or rest:
        raise InvalidFrameError("method", method, "this reader knows 0 and 1, then zeros")
    codec = codec_by_id(codec_id)
    if codec.accuracy is not Accuracy.exact or not codec.reads(revision):
        raise InvalidFrameError("codec", (codec_id, revision), "name a lossless one")
    codec.decode_segment(data[EXACT_HEAD.size :], component, out)
