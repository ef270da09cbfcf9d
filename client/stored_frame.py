"""A StoredFrame: the first bytes of a frame as it lies on a tier, and what it gives."""

from __future__ import annotations

import numpy as np

from kvstore.client.levels import MISSING, LevelledChunk
from kvstore.codecs.base import AnyTensors, codec_by_id
from kvstore.codecs.lossy import LossyCodec
from kvstore.proto.buffers import Bytes, copy_bytes
from kvstore.proto.errors import ChunkCorruptError
from kvstore.proto.frame import FrameHeader, check_frame, parse_header
from kvstore.proto.types import Accuracy, ChunkKey, KVLayout

MAX_LEVELS = 4
"""Of frames whose headers are asked for in one go; frames of more levels are computed."""
_PER_LEVEL = 9.0
"""A refinement cuts a step into three, and so the squared error into nine."""


class StoredFrame:
    """The first bytes of a chunk's frame, as they come. ``chunk`` is what they promise."""

    def __init__(self, key: ChunkKey, layout: KVLayout) -> None:
        self.key = key
        self.layout = layout
        self.header: FrameHeader | None = None
        self.chunk = LevelledChunk(layout.tokens, layout.raw_bytes)
        self.data: Bytes = np.empty(0, np.uint8)
        self.arrived_bytes = 0
        self._levels: tuple[int, ...] = ()

    def open(self, head: Bytes, representation: bytes) -> None:
        """Read the header at the start of *head*. Raises InvalidFrameError, ChunkCorruptError."""
        header = parse_header(head)
        if header.key != self.key or header.representation != representation:
            raise ChunkCorruptError(self.key, f"its frame is of {header.key.hex()}")
        if header.levels > MAX_LEVELS:
            return
        top = header.levels
        is_exact = header.accuracy is Accuracy.exact
        levels = [top] if is_exact else list(range(top + 1))
        ends = [header.level_end(level) for level in levels]
        self.header, self._levels = header, tuple(levels)
        self.chunk = LevelledChunk(
            header.layout.tokens,
            header.layout.raw_bytes,
            tuple(ends),
            (header.accuracy,) * len(levels),
            tuple(0.0 if is_exact else _PER_LEVEL ** (top - level) for level in levels),
        )
        self.data = np.empty(ends[-1], np.uint8)
        self.add(0, head)

    def add(self, offset: int, data: Bytes) -> None:
        """Take bytes that begin at *offset*; only what follows those that are here is of use."""
        if offset == self.arrived_bytes:
            data = data[: len(self.data) - offset]
            copy_bytes(self.data[offset : offset + len(data)], data)
            self.arrived_bytes += len(data)

    def reached(self) -> int:
        """Return the highest level that is here whole, as the plan counts them; else MISSING."""
        count = sum(end <= self.arrived_bytes for end in self.chunk.end_bytes)
        return count - 1 if count else MISSING

    def decode(self, reached: int, out: AnyTensors) -> int:
        """Verify and decode what is here into *out*; return the frame's own number of the level.

        Raises ChunkCorruptError, InvalidFrameError, UnknownCodecError, ModelError.
        """
        assert self.header is not None
        prefix = self.data[: self.chunk.end_bytes[reached]]
        level = self._levels[reached]
        codec = codec_by_id(self.header.codec_id)
        if isinstance(codec, LossyCodec):
            header = check_frame(prefix, self.key, level)
            codec.decode_prefix(header, prefix, level, out)
        else:
            codec.decode_into(check_frame(prefix, self.key), prefix, out)
        return level
