"""Zero-copy transfers of one request over a stream.

Each is used once, by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import TypeAlias

import numpy as np

from kvstore.proto import bulk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import DeadlineError, InvalidFrameError, InvalidRequestError, KVStoreError
from kvstore.proto.framing import STEP_BYTES, FramedSocket, message_of
from kvstore.server.api.put_stream import PutStream
from kvstore.server.security.sessions import SessionTable
from kvstore.server.store.reads import LayerPart

FIRST_PART_BYTES = 1 << 16
"""Size of a frame's first part for a client, whose header tells it where the rest goes."""


TAKES_S = 0.05
"""Time a thread waits for a slow reader before it parks the connection."""

Sending: TypeAlias = Generator[float, None, None]
"""Sends while it is iterated. When the reader stalls it yields the time at which to end it;
any thread may resume or close it."""


def send_parts(
    wire: FramedSocket,
    request: int,
    parts: Generator[LayerPart, None, None],
    deadline: float,
    first_bytes: int,
    pause: Callable[[], None],
) -> Generator[float, None, int | None]:
    """Send *parts* in answer to get number *request* until the end or a cancel. Return how many
    frames were begun.

    None: the reader is gone or late within a frame: nothing more can be sent. *deadline* is on the
    clock of the wire; *pause* is called before each message. The first message of a frame has at
    most *first_bytes*. A part is no longer used when the next is taken.
    """
    frames = 0
    wire.set_timeout(TAKES_S, deadline)
    with closing(parts):
        for part in parts:
            head = pb.StreamPart(index=part.chunk, frame_bytes=part.frame_bytes, tier=part.tier)
            message = pb.StreamMessage(request=request, part=head)
            stop = 0
            while stop < len(part.data):
                pause()
                start, at = stop, part.offset + stop
                stop += bulk.MAX_PAYLOAD_BYTES if at else first_bytes
                message.part.offset = at
                try:
                    if wire.has_more():
                        wire.set_timeout(bulk.SILENCE_S, deadline)
                        word, _ = wire.receive()
                        return frames if word.cancel and word.request == request else None
                    left = message_of(message, [part.data[start:stop]])
                    while left:
                        try:
                            wire.send_some(left)
                        except DeadlineError:
                            now = wire.clock()
                            if now >= deadline:
                                return None
                            yield min(now + bulk.SILENCE_S, deadline)
                except KVStoreError:
                    return None
            frames += not part.offset
    return frames


def receive_put(
    wire: FramedSocket, message: pb.StreamMessage, stream: PutStream, sessions: SessionTable
) -> None:
    """Receive the frames of put *message* directly into *stream*.

    Raises InvalidFrameError, InvalidRequestError, and as PutStream and FramedSocket do.
    """
    request, session_id = message.request, message.put.session_id
    skipped = np.empty(STEP_BYTES, np.uint8)
    frames = 0
    while True:
        message, size_bytes = wire.receive()
        kind = message.WhichOneof("body")
        if message.request != request:
            raise InvalidFrameError("request", message.request, f"{request} is a put")
        if kind == "finish":
            break
        if kind != "part":
            raise InvalidRequestError("kind", kind, "a put has parts")
        part = message.part
        if (part.index, part.offset) != stream.position:
            wrong = (part.index, part.offset)
            raise InvalidFrameError("offset", wrong, "parts must follow each other")
        frames = part.index + 1
        session = sessions.get(session_id)
        if not part.offset:  # the first part of a frame, with its header
            head = np.empty(size_bytes, np.uint8)
            wire.fill(head)
            stream.take(session, part.frame_bytes, head)
            continue
        for start in range(0, max(1, size_bytes), STEP_BYTES):
            step_bytes = min(size_bytes - start, STEP_BYTES)
            buffer = stream.buffer(step_bytes)
            wire.fill(skipped[:step_bytes] if buffer is None else buffer)
            stream.landed(step_bytes)
    if frames != message.finish:
        raise InvalidFrameError("frames", message.finish, f"{frames} came")
