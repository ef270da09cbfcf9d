"""A RangedGet: of each chunk's raw frame only the header and the layers that a rank needs.

Where chunks lie raw and of the usual length, the layout alone says where the layers are, so that
header and layers are asked for at once. Whatever else comes is read whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes, copy_bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.frame import ALIGN_BYTES, header_bytes, parse_header, raw_frame_bytes
from kvstore.proto.types import Shard

if TYPE_CHECKING:
    from kvstore.client.transport import Arrival


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes start to stop of a frame, the last not included."""

    start: int
    stop: int


class SparseFrame:
    """Some spans of a frame of ``len(frame)`` bytes, sliced like the array of all of them.

    A slice has to lie within one span. Raises InvalidFrameError for any other.
    """

    def __init__(self, spans: Sequence[Span], frame_bytes: int) -> None:
        self._spans = spans
        self._data = [np.empty(span.stop - span.start, np.uint8) for span in spans]
        self._frame_bytes = frame_bytes
        self.arrived_bytes = 0

    def __len__(self) -> int:
        return self._frame_bytes

    def __getitem__(self, piece: slice) -> Bytes:
        start, stop, _ = piece.indices(self._frame_bytes)
        for span, data in zip(self._spans, self._data, strict=True):
            if span.start <= start and stop <= span.stop:
                return data[start - span.start : stop - span.start]
        raise InvalidFrameError("frame", (start, stop), "these bytes were not asked for")

    def add(self, offset: int, data: Bytes) -> None:
        """Take the next piece; pieces come in order. Raises InvalidFrameError."""
        room = self[offset : offset + len(data)]
        if len(room) != len(data):
            raise InvalidFrameError("offset", offset, "beyond the frame's end")
        copy_bytes(room, data)
        self.arrived_bytes += len(data)


def layer_spans(shard: Shard) -> list[Span]:
    """Return where a raw frame of ``shard.whole`` has its header, and the layers of *shard*."""
    at = header_bytes(shard.whole)
    spans = [Span(0, at)]
    for component, extent in zip(shard.whole.components, shard.extents, strict=True):
        step = -(-component.layer_bytes // ALIGN_BYTES) * ALIGN_BYTES
        if extent is not None:
            last = at + (extent.layer_stop - 1) * step + component.layer_bytes
            spans.append(Span(at + extent.first_layer * step, last))
        at += component.layers * step
    return spans


class RangedGet:
    """One get of so many chunks' *shard*. Used once, by one thread."""

    def __init__(self, shard: Shard, chunks: int) -> None:
        self._shard = shard
        self._chunks = chunks
        self._spans = layer_spans(shard)
        self.read = 0
        """Chunks that came; the next one is not raw, or of another length, or did not come."""
        self.is_over = False
        """The next one did not come."""

    @property
    def ranges(self) -> list[pb.FrameRange]:
        """What to ask for."""
        return [
            pb.FrameRange(index=index, start=span.start, stop=span.stop)
            for index in range(self._chunks)
            for span in self._spans
        ]

    def frames(self, parts: Iterable[Arrival]) -> Iterator[tuple[str, SparseFrame]]:
        """Yield the tier and the frame of each chunk, up to one that has to be read whole."""
        wanted_bytes = sum(span.stop - span.start for span in self._spans)
        usual_bytes = raw_frame_bytes(self._shard.whole)
        frame = SparseFrame(self._spans, usual_bytes)
        for part in parts:
            if part.index != self.read:
                break  # this one did not come, or not all of it
            if part.frame_bytes != usual_bytes:
                return
            frame.add(part.offset, cast("Bytes", part.data))
            if frame.arrived_bytes < wanted_bytes:
                continue
            if not self._is_usual(frame):
                return
            self.read += 1
            yield part.tier, frame
            frame = SparseFrame(self._spans, usual_bytes)
        self.is_over = True

    def _is_usual(self, frame: SparseFrame) -> bool:
        try:
            header = parse_header(frame)
        except InvalidFrameError:
            return False  # of levels, or damaged: it shows when it is read whole
        return not header.codec_id and header.layout == self._shard.whole
