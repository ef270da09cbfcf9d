"""The LayerSink: where the layers of a put go as an engine finishes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from kvstore.client.outgoing import Outgoing, cut_header
from kvstore.client.retry import countdown
from kvstore.codecs.base import AnyPart
from kvstore.codecs.raw import RawCodec, raw_header
from kvstore.proto.buffers import Bytes, as_bytes, copy_bytes
from kvstore.proto.frame import FrameTemplate, pack_header
from kvstore.proto.plans import NO_HINTS, Hints

if TYPE_CHECKING:
    from kvstore.client.transport import Put, Transport

RAW = RawCodec()
ABANDON_S = 2.0
"""How long we wait for a server to say that it kept nothing; the call's deadline ends it."""


@dataclass(frozen=True, slots=True)
class PutTerms:
    """How a put is to be done. All of it has to be over within ``within_ms``."""

    durable: bool
    within_ms: int
    hints: Hints = NO_HINTS


class LayerSink(ABC):
    """Takes checked layers of the chunks of one put. For one thread."""

    @abstractmethod
    def write(self, segment: int, layers: Sequence[Sequence[AnyPart]]) -> None:
        """Take one segment of every chunk: ``layers[i]`` are the parts of chunk i.

        They are the caller's again on return. Each segment comes once, in any order.
        """

    @abstractmethod
    def commit(self) -> list[Put]:
        """Make the chunks visible, all segments of which came; return what became of each."""

    @abstractmethod
    def abandon(self, within_s: float = ABANDON_S) -> None:
        """Leave nothing behind; wait *within_s* at most until it is so. Idempotent; does nothing
        after ``commit``.
        """


@dataclass(frozen=True, slots=True)
class EncodedChunk(Outgoing):
    """A chunk whose frame is there already, checksums and all."""

    frame: Bytes

    @override
    def encode(self, out: Bytes, flags: int = 0) -> None:
        copy_bytes(out, self.frame)

    @override
    def pieces(self, room: Callable[[int], Bytes]) -> list[Bytes]:
        """Return the frame as it is; *room* is not needed."""
        return cut_header(self.frame)


class RawFrames:
    """Raw frames of *templates* that become whole segment by segment, in any order."""

    def __init__(self, templates: Sequence[FrameTemplate]) -> None:
        self.templates = templates
        self.headers = [raw_header(template) for template in templates]
        self._sums = [[0] * len(header.segments) for header in self.headers]

    def encode(self, chunk: int, segment: int, parts: Sequence[AnyPart], out: Bytes) -> None:
        """Copy one segment to *out*, and keep its checksum."""
        row = self.headers[chunk].segments[segment]
        component = self.headers[chunk].layout.components[int(row["component"])]
        _, self._sums[chunk][segment] = RAW.encode_checked(parts, component, out)

    def extent(self, chunk: int, segment: int) -> slice:
        """Return which bytes of the frame a segment has."""
        row = self.headers[chunk].segments[segment]
        start = int(row["offset"])
        return slice(start, start + int(row["stored_bytes"]))

    def header(self, chunk: int) -> bytes:
        """Return the header of a frame all of whose segments were encoded."""
        return pack_header(raw_header(self.templates[chunk], self._sums[chunk]))


class BufferedSink(LayerSink):
    """Keeps the frames in memory of its own until they are whole, then puts them.

    What a transport offers that does no better: no more than the frames are held.
    """

    def __init__(
        self, transport: Transport, templates: Sequence[FrameTemplate], terms: PutTerms
    ) -> None:
        self._transport = transport
        self._terms = terms
        self._left_ms = countdown(terms.within_ms)
        self._raw = RawFrames(templates)
        self._frames = [np.zeros(header.frame_bytes, np.uint8) for header in self._raw.headers]

    @override
    def write(self, segment: int, layers: Sequence[Sequence[AnyPart]]) -> None:
        for chunk, parts in enumerate(layers):
            room = self._frames[chunk][self._raw.extent(chunk, segment)]
            self._raw.encode(chunk, segment, parts, room)

    @override
    def commit(self) -> list[Put]:
        frames, self._frames = self._frames, []
        whole = []
        for chunk, (template, frame) in enumerate(zip(self._raw.templates, frames, strict=True)):
            header = as_bytes(self._raw.header(chunk))
            copy_bytes(frame[: len(header)], header)
            whole.append(EncodedChunk(template, (), frame))
        terms = self._terms
        return self._transport.put(
            whole, durable=terms.durable, deadline_ms=self._left_ms(), hints=terms.hints
        )

    @override
    def abandon(self, within_s: float = ABANDON_S) -> None:
        self._frames = []
