"""Check another implementation of docs/format.md: the frames that it writes, and its reader.

Writer: each frame is decoded by that page's rules; reserved bytes must be zeros. Reader: a command
gets the path of a frame, and must print its decoded bytes; for copies with one fault it must exit
with a status other than 0.
"""

from __future__ import annotations

import argparse
import shlex
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.assets import ASSETS, read_asset
from kvstore.codecs.base import codec_by_id, empty_tensors
from kvstore.proto.buffers import Bytes, as_bytes, checksum
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError, KVStoreError
from kvstore.proto.frame import (
    FrameHeader,
    check_identity,
    check_segment,
    pack_header,
    parse_header,
)
from kvstore.proto.types import Accuracy, DType

READ_WITHIN_S = 60.0
"""Time limit of a reader for one frame."""
_FLOATS = (DType.bfloat16, DType.float16, DType.float32)
_SUM = slice(184, 192)

Reader = Callable[[Path], bytes | None]
"""Maps a frame's file to its decoded bytes; None for one that it refuses."""


class Decoded(NamedTuple):
    """A frame's header, and its tensors' bytes: layer by layer, K before V, heads, tokens."""

    header: FrameHeader
    data: bytes


def decode(frame: Bytes) -> Decoded:
    """Verify *frame*, which may be a shard, and decode it.

    Raises InvalidFrameError, ChunkCorruptError or UnknownCodecError.
    """
    header = parse_header(frame, takes_shards=True)
    check_identity(header, len(frame), None)
    for index in range(len(header.segments)):
        check_segment(header, index, checksum(header.segment(frame, index)))
    tensors = empty_tensors(header.layout)
    codec_by_id(header.codec_id).decode_into(header, frame, tensors)
    parts = (part for layers in tensors for layer in layers for part in layer)
    return Decoded(header, b"".join(part.tobytes() for part in parts))


def check_written(frame: Bytes) -> Decoded:
    """Decode *frame*, and check the bytes that readers ignore.

    Raises as ``decode``, and InvalidFrameError for reserved bytes or gaps that are not zeros.
    """
    decoded = decode(frame)
    header = decoded.header
    if pack_header(header) != frame[: header.header_bytes].tobytes():
        raise InvalidFrameError("reserved bytes", "in the header", "write zeros")
    end = header.header_bytes
    for row in header.segments:
        if frame[end : int(row["offset"])].any():
            raise InvalidFrameError("gap", f"at {end}", "write zeros")
        end = int(row["offset"]) + int(row["stored_bytes"])
    return decoded


# --- what a reader must refuse


def _changes(header: FrameHeader) -> Iterator[tuple[str, int, bytes]]:
    """Yield faults of headers like *header*, by docs/format.md: name, offset and bytes.

    The checksum will be valid, but not the content.
    """

    def u(size: int, number: int) -> bytes:
        return (number % (1 << 8 * size)).to_bytes(size, "little")

    rows = 192 + 48 * len(header.layout.components)
    first = header.segments[0]
    yield from (
        ("another magic", 0, b"KVFS"),
        ("version 2", 4, u(2, 2)),
        ("an unknown flag", 6, u(2, 1 << 15)),
        ("header_bytes 64 too many", 8, u(4, header.header_bytes + 64)),
        ("no components", 12, u(2, 0)),
        ("65535 components", 12, u(2, -1)),
        ("a removed codec", 14, u(2, 1)),
        ("a future codec", 14, u(2, -1)),
        ("a future revision", 16, u(2, -1)),
        ("an unknown accuracy", 18, u(1, 3)),
        ("255 levels", 19, u(1, 255)),
        ("no segments", 20, u(4, 0)),
        ("2^32-1 segments", 20, u(4, -1)),
        ("frame_bytes one too many", 24, u(8, header.frame_bytes + 1)),
        ("frame_bytes 2^63", 24, u(8, 1 << 63)),
        ("raw_bytes one too many", 32, u(8, header.layout.raw_bytes + 1)),
        ("raw_bytes above the limit", 32, u(8, (1 << 30) + 1)),
        ("tokens one too many", 40, u(4, header.layout.tokens + 1)),
        ("a cost of NaN", 128, struct.pack("<d", float("nan"))),
        ("a negative cost", 128, struct.pack("<d", -1.0)),
        ("an infinite error bound", 136, struct.pack("<d", float("inf"))),
        ("an unknown asset", 144, b"\xff" * 16),
        ("an unknown kind", 192, u(1, 9)),
        ("an unknown dtype", 193, u(1, 99)),
        ("no parts", 194, u(1, 0)),
        ("no layers", 196, u(4, 0)),
        ("2^32-1 heads", 200, u(4, -1)),
        ("a rectangle", 212, u(4, 1)),
        ("a segment of another component", rows, u(2, 1)),
        ("a segment of an unknown level", rows + 2, u(2, 9)),
        ("a segment of another layer", rows + 4, u(4, 1)),
        ("a segment 64 bytes on", rows + 8, u(8, int(first["offset"]) + 64)),
        ("a segment at 2^63", rows + 8, u(8, 1 << 63)),
        ("a segment of 2^64-1 bytes", rows + 16, u(8, -1)),
    )


def damaged(header: FrameHeader, frame: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the fault and the bytes of damaged copies of the valid *frame* with *header*."""
    size = header.header_bytes
    yield "empty", b""
    for at in (1, 191, size - 1, size, len(frame) // 2, len(frame) - 1):
        yield f"cut at {at}", frame[:at]
    yield "a byte more", frame + b"\0"
    flips = [*range(0, size, size // 16)]
    for row in header.segments[[0, -1]]:
        start, stored = int(row["offset"]), int(row["stored_bytes"])
        flips += [start, start + stored - 1] if stored else []
    for at in flips:
        yield f"byte {at} changed", frame[:at] + bytes([frame[at] ^ 0x40]) + frame[at + 1 :]
    for name, offset, data in _changes(header):
        copy = bytearray(frame)
        copy[offset : offset + len(data)] = data
        copy[_SUM] = bytes(8)
        stated = int.from_bytes(copy[8:12], "little")
        copy[_SUM] = struct.pack("<Q", checksum(bytes(copy[:stated])))
        if copy != frame:
            yield name, bytes(copy)


def check_reader(read: Reader, path: Path, decoded: Decoded, folder: Path) -> Iterator[str]:
    """Yield faults of *read* with the frame in *path*, and with damaged copies in *folder*.

    Values of lossy frames may differ by one step of their dtype.
    """
    header, frame = decoded.header, path.read_bytes()
    found = read(path)
    if header.shard is not None:
        if found is not None:
            yield "accepts a shard as a whole chunk"
    elif found is None:
        yield "refuses a valid frame"
    elif len(found) != len(decoded.data):
        yield f"returns {len(found)} bytes, not {len(decoded.data)}"
    elif most := _steps_apart(header, found, decoded.data):
        yield f"returns values that are {most} steps off"
    for number, (name, data) in enumerate(damaged(header, frame)):
        copy = folder / f"{path.stem}-{number}.frame"
        copy.write_bytes(data)
        if read(copy) is not None:
            yield f"accepts a copy with a fault: {name}"
        copy.unlink()


def _steps_apart(header: FrameHeader, found: bytes, expected: bytes) -> int:
    """Return the distance of two chunks in steps of their dtypes; a lossy one's step is ignored."""
    most = at = 0
    for component in header.layout.components:
        stop = at + component.layers * component.layer_bytes
        one, other = (_ordered(data[at:stop], component.dtype) for data in (found, expected))
        most, at = max(most, int(np.abs(one - other).max())), stop
    return 0 if most <= (header.accuracy is not Accuracy.exact) else most


def _ordered(data: bytes, dtype: DType) -> NDArray[np.int64]:
    """Return elements as integers in numeric order, where neighbours differ by 1."""
    bits = np.frombuffer(data, f"<u{dtype.item_bytes}").astype(np.int64)
    if dtype not in _FLOATS:
        return bits
    sign = 1 << (8 * dtype.item_bytes - 1)
    return np.where(bits & sign, -(bits & (sign - 1)) - 1, bits)


def _reader_of(command: Sequence[str]) -> Reader:
    def read(path: Path) -> bytes | None:
        try:
            done = subprocess.run(  # noqa: S603 - the reader that the user named
                [*command, str(path)], capture_output=True, check=False, timeout=READ_WITHIN_S
            )
        except subprocess.TimeoutExpired:
            return b""
        except OSError as error:
            raise InvalidRequestError("--reader", command[0], str(error)) from None
        return done.stdout if done.returncode == 0 else None

    return read


# --- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line per frame; return 0 if all are valid, 1 if not, 2 if a file is unreadable."""
    parser = argparse.ArgumentParser("python -m kvstore.codecs.conformance", description=__doc__)
    parser.add_argument("frames", metavar="FRAME", nargs="+", type=Path)
    parser.add_argument("--asset", metavar="FILE", nargs="+", type=Path, default=[])
    parser.add_argument("--reader", metavar="COMMAND", help="is run with the path of a frame")
    parser.add_argument("--decode", action="store_true", help="write the decoded bytes: a reader")
    args = parser.parse_args(arguments)
    try:
        for path in args.asset:
            ASSETS.add(read_asset(path))
        if args.decode:
            return _decode(args.frames)
        read = _reader_of(shlex.split(args.reader)) if args.reader else None
        return max([_check(path, read) for path in args.frames])
    except (OSError, InvalidRequestError) as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _decode(paths: Sequence[Path]) -> int:
    for path in paths:
        try:
            decoded = decode(as_bytes(path.read_bytes()))
        except KVStoreError as error:
            sys.stderr.write(f"{path.name}: {error}\n")
            return 1
        if decoded.header.shard is not None:
            sys.stderr.write(f"{path.name}: a shard, not a whole chunk\n")
            return 1
        sys.stdout.buffer.write(decoded.data)
    return 0


def _check(path: Path, read: Reader | None) -> int:
    try:
        decoded = check_written(as_bytes(path.read_bytes()))
    except KVStoreError as error:
        sys.stdout.write(f"wrong {path.name}: {error}\n")
        return 1
    header = decoded.header
    faults: list[str] = []
    if read is not None:
        with tempfile.TemporaryDirectory() as folder:
            faults += check_reader(read, path, decoded, Path(folder))
    for fault in faults:
        sys.stdout.write(f"wrong {path.name}: the reader {fault}\n")
    codec = f"codec {header.codec_id} revision {header.codec_revision}"
    if not faults:
        sys.stdout.write(f"ok {path.name}: {codec}, {len(decoded.data)} bytes decoded\n")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
