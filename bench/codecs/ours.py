"""Our codecs on chunks: sizes, decoded tensors and speeds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bench.codecs.baselines import Coded, Speed
from bench.codecs.kv import Bits, bits_per_value, digest
from bench.lib.report import cpu_s
from kvstore.codecs.assets import ASSETS, AssetKind, pack_asset, parse_asset
from kvstore.codecs.base import (
    ChunkTensors,
    EncodeTerms,
    LossyCodec,
    codec_by_name,
    empty_tensors,
)
from kvstore.codecs.calibration import learn
from kvstore.proto.frame import FrameHeader, FrameTemplate
from kvstore.proto.keys import representation_digest
from kvstore.proto.types import (
    DIGEST_BYTES,
    KEY_BYTES,
    ROOT,
    Accuracy,
    ChunkKey,
    DType,
    KVLayout,
    LayerGroup,
    LayerKind,
    Model,
    RopeParameters,
)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The KV of a model, one chunk a window, each at position 0.

    ``importance``: of each window's tokens, f32 (windows, tokens), if the model has it.
    """

    bits: Bits
    model: Model
    importance: NDArray[np.float32] | None = None

    @classmethod
    def of(cls, name: str, bits: Bits, rope: RopeParameters) -> Chunks:
        """Return *bits* as chunks of a model called *name* that has only their layers.

        Their digest is its revision, so calibration tables are not shared.
        """
        _, layers, _, _, kv_heads, head_dim = bits.shape
        ids = tuple(range(layers))
        group = LayerGroup(LayerKind.attention, DType.bfloat16, ids, kv_heads, head_dim)
        return cls(bits, Model(name, f"{digest(bits):x}", "none", "none", (group,), rope, "none"))


class Coder:
    """One codec with its output memory: a frame, and the tensors of a chunk.

    *setting*: the codec's name, with options after a colon. Raises UnknownCodecError.
    """

    def __init__(self, setting: str, chunks: Chunks) -> None:
        self.setting = setting
        self.codec = codec_by_name(setting)
        self.terms = EncodeTerms.of(chunks.model)
        layout = KVLayout.of(chunks.model, chunks.bits.shape[3])
        self.template = FrameTemplate(
            ChunkKey(bytes(KEY_BYTES)), ROOT, representation_digest(chunks.model),
            bytes(DIGEST_BYTES), layout,
        )  # fmt: skip
        self.frame = np.zeros(self.codec.max_frame_bytes(layout), np.uint8)
        self.tensors = empty_tensors(layout)

    def code(self, bits: Bits, importance: NDArray[np.float32] | None = None) -> list[Coded]:
        """Encode and decode *bits*; return one result for each level of the frames, base first.

        *importance*: of their tokens. Raises ValueError if a frame with accuracy exact is not.
        """
        levels: list[tuple[list[int], Bits]] = []
        for number, window in enumerate(bits):
            if importance is not None:
                self.terms = replace(self.terms, importance=importance[number])
            header = self.encode(window)
            for level in range(header.levels + 1):
                if level == len(levels):
                    levels.append(([], np.empty_like(bits)))
                self.decode(header, level)
                levels[level][0].append(header.level_end(level))
                levels[level][1][number] = self._decoded()
            if header.accuracy is Accuracy.exact and not np.array_equal(self._decoded(), window):
                raise ValueError(f"{self.setting}: wrong bytes")
        return [
            Coded(
                self.setting, f"level {level}" if len(levels) > 1 else "",
                bits_per_value(sum(sizes), bits.size), decoded,
            )
            for level, (sizes, decoded) in enumerate(levels)
        ]  # fmt: skip

    def encode(self, window: Bits) -> FrameHeader:
        """Encode one chunk, (layers, 2, tokens, kv_heads, head_dim), to ``frame``."""
        return self.codec.encode(self.template, _parts(window), self.frame, self.terms)

    def decode(self, header: FrameHeader, level: int | None = None) -> None:
        """Decode ``frame`` to ``tensors``: all of it, or the base and *level* refinements."""
        frame = self.frame[: header.frame_bytes]
        if level is None or not isinstance(self.codec, LossyCodec):
            self.codec.decode_into(header, frame, self.tensors)
        else:
            self.codec.decode_prefix(header, frame, level, self.tensors)

    def time(self, window: Bits) -> Speed:
        headers: list[FrameHeader] = []
        encode_s = cpu_s(lambda: headers.append(self.encode(window)))
        decode_s = cpu_s(lambda: self.decode(headers[0]))
        return Speed(encode_s, decode_s)

    def _decoded(self) -> Bits:
        parts = [np.stack(layer) for layer in self.tensors[0]]
        return np.stack(parts).transpose(0, 1, 3, 2, 4)


def _parts(window: Bits) -> ChunkTensors:
    return [[[part.transpose(1, 0, 2) for part in layer] for layer in window]]


def calibrated(chunks: Chunks, samples: Bits) -> None:
    """Fit the calibration tables for the model of *chunks* on other KV of it.

    They are added to this process's assets.
    """
    layout = KVLayout.of(chunks.model, samples.shape[3])
    known = [(_parts(window), 0) for window in samples]
    for kind in AssetKind:
        tables = learn(kind, layout.components, known, chunks.model.rope)
        ASSETS.add(parse_asset(pack_asset(kind, representation_digest(chunks.model), 1, tables)))
