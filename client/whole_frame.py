"""A whole frame as a tier has it, from the parts of a Get, verified."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import ChunkCorruptError, InvalidFrameError
from kvstore.proto.frame import MAX_FRAME_BYTES, FrameHeader, check_frame
from kvstore.proto.types import ChunkKey


def join_parts(replies: Iterable[pb.GetResponse]) -> bytes | None:
    """Return the frame that *replies* are the parts of; None when not all of it comes.

    Raises InvalidFrameError for parts that are none of one frame.
    """
    frame = bytearray()
    total = 0
    for reply in replies:
        part = reply.part
        total = total or part.frame_bytes
        if part.frame_bytes not in (0, total) or total > MAX_FRAME_BYTES:
            raise InvalidFrameError("frame_bytes", part.frame_bytes, f"at most {MAX_FRAME_BYTES}")
        if part.offset != len(frame) or len(frame) + len(part.data) > total:
            raise InvalidFrameError("offset", part.offset, "the parts do not follow each other")
        frame += part.data
    return bytes(frame) if frame and len(frame) == total else None


def checked(frame: bytes, key: ChunkKey, representation: bytes) -> FrameHeader:
    """Return the header of *frame* once all of it is verified.

    Raises ChunkCorruptError, InvalidFrameError.
    """
    header = check_frame(np.frombuffer(frame, np.uint8), key)
    if header.representation != representation:
        raise ChunkCorruptError(key, "it was stored for another Model")
    return header
