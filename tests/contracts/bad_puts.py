"""Puts of one frame whose parts are not what a put's parts are, whichever way they come."""

from __future__ import annotations

from collections.abc import Callable

from helpers.stream_messages import Sent, part

from kvstore.proto.buffers import Bytes

Parts = list[Sent]


def parts_of(frame: Bytes, request: int = 1, chunk: int = 0, cut: int = 1000) -> Parts:
    """Return *frame* in parts of *cut* bytes, as a put has them."""
    return [
        (part(request, len(frame), start, chunk), frame[start : start + cut].tobytes())
        for start in range(0, len(frame), cut)
    ]


def changed(sent: Sent, **fields: int) -> Sent:
    """Return a part with other *fields*."""
    message, data = sent
    of = message.part
    wanted = {"frame_bytes": of.frame_bytes, "offset": of.offset, "index": of.index, **fields}
    return part(message.request, tier=of.tier, **wanted), data


BAD_PUTS: dict[str, tuple[Callable[[Parts], Parts], int, str]] = {
    "out of order": (lambda p: [p[0], p[2], p[1]], 1, "InvalidFrameError: offset"),
    "the second frame first": (
        lambda p: [changed(one, index=1) for one in p], 1, "offset=(1, 0)",
    ),
    "a part twice": (lambda p: [p[0], p[0]], 1, "InvalidFrameError: offset"),
    "a start in the middle": (lambda p: p[1:], 1, "InvalidFrameError: offset=(0, 1000)"),
    "an offset of 2^63": (lambda p: [p[0], changed(p[1], offset=1 << 63)], 1, "offset"),
    "a frame of 2^63 bytes": (lambda p: [changed(p[0], frame_bytes=1 << 63)], 1, "frame_bytes"),
    "no data": (lambda p: [p[0], (p[1][0], b"")], 1, "InvalidFrameError: data"),
    "rubbish": (lambda p: [(p[0][0], bytes(1000))], 1, "InvalidFrameError: magic"),
    "an end inside the frame": (lambda p: p[:1], 1, "the stream ended inside it"),
    "fewer frames than it says": (lambda p: p, 2, "InvalidFrameError: frames=2: 1 came"),
    "a damaged byte": (
        lambda p: [*p[:-1], (p[-1][0], p[-1][1][:-1] + b"\xff")], 1, "ChunkCorruptError",
    ),
}  # fmt: skip
"""How they are changed, how many frames the put says it had, and what the server says to it."""
