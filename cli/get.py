"""`kvstore get`: one chunk into a file, verified."""

from __future__ import annotations

from pathlib import Path

from kvstore.cli.chunk_files import check_suffix, write_chunk
from kvstore.cli.spaces import Where, find, hex_prefix, places
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.frame import FrameHeader
from kvstore.proto.messages import as_message
from kvstore.proto.types import Accuracy


def get_chunk(where: Where, name: str, out: Path, *, lossy: bool) -> tuple[FrameHeader, int] | None:
    """Write the chunk called *name* to *out*; return its header and the file's bytes.

    None when it is not there, or only with a loss and not *lossy*. Raises InvalidRequestError,
    ChunkCorruptError, KVStoreErrors, OSError; the file is written whole or not at all.
    """
    check_suffix(out)
    hex_prefix("key", name)
    with places(where) as opened:
        found = find(opened, name)
        if found is None:
            return None
        place, key = found
        frame = place.client.frame(key, accuracy=Accuracy.approximate if lossy else Accuracy.exact)
        if frame is None:
            return None
        header, data = frame
        kind = as_message(pb.Representation, place.client.model)
        return header, write_chunk(out, header, data, kind)
