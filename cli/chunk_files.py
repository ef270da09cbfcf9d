"""A chunk as a file: its tensors as safetensors with all that names it, or its verified frame.

``.safetensors``: tensors ``layer.N.key`` and ``layer.N.value`` (one of ``latent`` or ``state``
where a layer keeps one), each (kv_heads, tokens, head_dim), N counting the layers of all
components. The metadata has the digests, the Model and a BLAKE3 of all that and the
tensors, so that what is read is what was written. ``.frame``: the bytes of docs/format.md as a
tier has them; it names its model by a digest alone. Nothing in either is run, and every size is
checked against the file's before it is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from google.protobuf import json_format

from kvstore.codecs.base import ChunkTensors, codec_by_id, empty_tensors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError, KVStoreError
from kvstore.proto.frame import MAX_FRAME_BYTES, FrameHeader, check_frame
from kvstore.proto.messages import (
    layout_from_message,
    layout_to_message,
    representation_from_message,
)
from kvstore.proto.types import Accuracy, DType, KVLayout, LayerKind

MAX_HEADER_BYTES = 16 << 20
SAFETENSORS, FRAME = ".safetensors", ".frame"
FORMAT = "kvstore.chunk.1"
_TYPES = {
    DType.bfloat16: "BF16",
    DType.float16: "F16",
    DType.float32: "F32",
    DType.float8_e4m3fn: "F8_E4M3",
    DType.float8_e5m2: "F8_E5M2",
    DType.uint8: "U8",
    DType.int8: "I8",
}
_PARTS = {
    LayerKind.attention: ("key", "value"),
    LayerKind.window: ("key", "value"),
    LayerKind.mla: ("latent",),
    LayerKind.state: ("state",),
}


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """What a file says. ``representation`` None: a frame, which names it by ``model_digest``."""

    digest: bytes
    parent: bytes
    content: bytes
    position: int
    prefill_flops: float
    layout: KVLayout
    tensors: ChunkTensors
    accuracy: Accuracy
    representation: pb.Representation | None = None
    model_digest: bytes = b""


def check_suffix(path: Path) -> None:
    """Raise InvalidRequestError unless *path* is called as one of the two forms."""
    if path.suffix not in (SAFETENSORS, FRAME):
        fix = f"call it NAME{SAFETENSORS} or NAME{FRAME}"
        raise InvalidRequestError("file", str(path), fix)


def write_chunk(
    path: Path, header: FrameHeader, frame: bytes, representation: pb.Representation
) -> int:
    """Write the chunk of a verified frame to *path*, whole or not at all; return its bytes.

    Raises KVStoreErrors for a codec that cannot decode it, OSError.
    """
    check_suffix(path)
    if path.suffix == FRAME:
        return _replace(path, [frame])
    tensors = empty_tensors(header.layout)
    codec_by_id(header.codec_id).decode_into(header, np.frombuffer(frame, np.uint8), tensors)
    rows, blobs = _rows(header.layout, tensors)
    names = json_format.MessageToDict(representation, preserving_proto_field_name=True)
    layout = json_format.MessageToDict(
        layout_to_message(header.layout), preserving_proto_field_name=True
    )
    said = {
        "format": FORMAT,
        "digest": header.key[16:].hex(),
        "parent": header.parent.hex(),
        "content": header.content.hex(),
        "position": str(header.position),
        "prefill_flops": repr(header.prefill_flops),
        "fidelity": header.accuracy.name,
        "representation": json.dumps(names, sort_keys=True),
        "layout": json.dumps(layout, sort_keys=True),
    }
    rows["__metadata__"] = said | {"blake3": _sum(said, blobs)}
    head = json.dumps(rows).encode()
    head += b" " * (-len(head) % 8)  # tensors begin at a multiple of 8, as safetensors has it
    return _replace(path, [len(head).to_bytes(8, "little"), head, *blobs])


def _rows(layout: KVLayout, tensors: ChunkTensors) -> tuple[dict[str, Any], list[bytes]]:
    rows: dict[str, Any] = {}
    blobs: list[bytes] = []
    at = 0
    for name, dtype, shape, part in _named(layout, tensors):
        blob = np.ascontiguousarray(part).tobytes()
        rows[name] = {
            "dtype": _TYPES[dtype],
            "shape": list(shape),
            "data_offsets": [at, at + len(blob)],
        }
        blobs.append(blob)
        at += len(blob)
    return rows, blobs


def _named(
    layout: KVLayout, tensors: ChunkTensors
) -> Iterator[tuple[str, DType, tuple[int, int, int], Any]]:
    number = 0
    for component, layers in zip(layout.components, tensors, strict=True):
        for parts in layers:
            for name, part in zip(_PARTS[component.kind], parts, strict=True):
                yield f"layer.{number}.{name}", component.dtype, component.shape, part
            number += 1


def _sum(said: Mapping[str, str], blobs: Sequence[bytes]) -> str:
    """Return the BLAKE3 of what a file says of its chunk, and of the tensors."""
    digest = blake3(json.dumps(dict(said), sort_keys=True).encode())
    for blob in blobs:
        digest.update(blob)
    return digest.hexdigest()


def _replace(path: Path, parts: Sequence[bytes]) -> int:
    other = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with other.open("xb") as file:
            written = sum(file.write(part) for part in parts)
        other.replace(path)
    finally:
        other.unlink(missing_ok=True)
    return written


# --- reading


def read_chunk(path: Path) -> ChunkFile:
    """Return the chunk in a file. Raises InvalidRequestError that names it and what is wrong."""
    check_suffix(path)
    try:
        if path.stat().st_size > MAX_FRAME_BYTES + MAX_HEADER_BYTES:
            raise InvalidRequestError("file", str(path), f"has over {MAX_FRAME_BYTES} bytes")
        data = path.read_bytes()
        return _read_frame(data) if path.suffix == FRAME else _read_tensors(data)
    except OSError as error:
        raise InvalidRequestError("file", str(path), f"{error.strerror}; name another") from None
    except (KVStoreError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, InvalidRequestError) and error.args and "file=" in str(error):
            raise
        raise InvalidRequestError("file", str(path), f"is no chunk: {error}") from None


def _read_frame(data: bytes) -> ChunkFile:
    frame = np.frombuffer(data, np.uint8)
    header = check_frame(frame)
    tensors = empty_tensors(header.layout)
    codec_by_id(header.codec_id).decode_into(header, frame, tensors)
    return ChunkFile(
        header.key[16:], header.parent, header.content, header.position, header.prefill_flops,
        header.layout, tensors, header.accuracy, None, header.representation,
    )  # fmt: skip


def _read_tensors(data: bytes) -> ChunkFile:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= size <= min(MAX_HEADER_BYTES, len(data) - 8):
        raise ValueError("no safetensors file")
    rows: Mapping[str, Any] = json.loads(data[8 : 8 + size])
    body = data[8 + size :]
    said = dict(rows["__metadata__"])
    if said["format"] != FORMAT:
        raise ValueError(f"its format is {said['format']!r}, and {FORMAT} is known")
    if said.pop("blake3") != _sum(said, [body]):
        raise ValueError("it is not what was written")
    representation = pb.Representation()
    json_format.Parse(said["representation"], representation)
    representation_from_message(representation)
    message = pb.Layout()
    json_format.Parse(said["layout"], message)
    layout, _ = layout_from_message(message)
    if layout.raw_bytes != len(body):
        raise ValueError(f"its layout has {layout.raw_bytes} bytes, and the file {len(body)}")
    tensors = empty_tensors(layout)
    for name, dtype, shape, part in _named(layout, tensors):
        row = rows[name]
        start, stop = row["data_offsets"]
        is_right = row["dtype"] == _TYPES[dtype] and tuple(row["shape"]) == shape
        if not is_right or not 0 <= start <= stop <= len(body) or stop - start != part.nbytes:
            raise ValueError(f"{name} is not what the layout says")
        part[...] = np.frombuffer(body[start:stop], part.dtype).reshape(shape)
    return ChunkFile(
        bytes.fromhex(said["digest"]), bytes.fromhex(said["parent"]),
        bytes.fromhex(said["content"]), int(said["position"]), float(said["prefill_flops"]),
        layout, tensors, Accuracy[said["fidelity"]], representation,
    )  # fmt: skip
