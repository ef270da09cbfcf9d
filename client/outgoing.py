"""An Outgoing: a checked chunk about to be put."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from typing_extensions import override

from kvstore.codecs.base import AnyTensors
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.shards import encode_shard, shard_frame_bytes
from kvstore.proto.buffers import Bytes
from kvstore.proto.frame import FrameTemplate, raw_frame_bytes, stated_header_bytes
from kvstore.proto.types import KVLayout, Shard

RAW = RawCodec()


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What is known of the frame, and the tensors to encode."""

    template: FrameTemplate
    tensors: AnyTensors

    @property
    def frame_bytes(self) -> int:
        """Size of its raw frame."""
        return raw_frame_bytes(self.template.layout)

    @property
    def extent(self) -> KVLayout | Shard:
        """The layout of the chunk, or what there is of it."""
        return self.template.layout

    def encode(self, out: Bytes, flags: int = 0) -> None:
        """Write the raw frame into *out*, with *flags* in its header."""
        template = replace(self.template, flags=flags) if flags else self.template
        RAW.encode(template, self.tensors, out)

    def pieces(self, room: Callable[[int], Bytes]) -> list[Bytes]:
        """Return the raw frame in pieces, the first of which is its header.

        They are what the tensors have; where that is strided or in blocks, it is encoded into
        *room* of so many bytes.
        """
        return RAW.pieces(self.template, self.tensors) or self._encoded(room)

    def _encoded(self, room: Callable[[int], Bytes]) -> list[Bytes]:
        frame = room(self.frame_bytes)
        self.encode(frame)
        return cut_header(frame)


@dataclass(frozen=True, slots=True)
class OutgoingShard(Outgoing):
    """The same of what one rank has: the template is the chunk's, the tensors are its own."""

    shard: Shard

    @property
    @override
    def frame_bytes(self) -> int:
        return shard_frame_bytes(self.shard)

    @property
    @override
    def extent(self) -> KVLayout | Shard:
        return self.shard

    @override
    def encode(self, out: Bytes, flags: int = 0) -> None:
        """Write the frame, always summed and without *flags*."""
        encode_shard(self.template, self.shard, self.tensors, out)

    @override
    def pieces(self, room: Callable[[int], Bytes]) -> list[Bytes]:
        """Return the frame in pieces, encoded into *room*."""
        return self._encoded(room)


def cut_header(frame: Bytes) -> list[Bytes]:
    """Return the header of a whole frame, and what follows."""
    end = stated_header_bytes(frame)
    return [frame[:end], frame[end:]]
