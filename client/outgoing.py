"""An Outgoing: a checked chunk about to be put."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvstore.codecs.base import AnyTensors
from kvstore.codecs.raw import RawCodec
from kvstore.proto.buffers import Bytes
from kvstore.proto.frame import FrameTemplate, raw_frame_bytes

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

    def encode(self, out: Bytes, flags: int = 0) -> None:
        """Write the raw frame into *out*, with *flags* in its header."""
        template = replace(self.template, flags=flags) if flags else self.template
        RAW.encode(template, self.tensors, out)
