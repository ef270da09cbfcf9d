"""A chunk as a file: its tensors as safetensors with all that names it, or its verified frame.

``.safetensors``: tensors ``layer.N.key`` and ``layer.N.value`` (one of ``latent`` or ``state``
where a layer keeps one), each (kv_heads, tokens, head_dim), N counting the layers of all
components. The metadata has the digests, the Model and a BLAKE3 of all that and the tensors in
the order of the layout, so that what is read is what was written. ``.frame``: the bytes of
docs/format.md as a tier has them; it names its model by a digest alone. Nothing in either is
run, and every size is checked against the file's before it is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3
from google.protobuf import json_format
from safetensors import SafetensorError, TensorSpec, deserialize, serialize

from kvstore.cli.selection import model_as_dict
from kvstore.codecs.base import ChunkTensors, Part, codec_by_id, empty_tensors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError, KVStoreError
from kvstore.proto.frame import MAX_FRAME_BYTES, FrameHeader, check_frame
from kvstore.proto.messages import (
    layout_from_message,
    layout_to_message,
    representation_from_message,
)
from kvstore.proto.types import Accuracy, Component, DType, KVLayout, LayerKind, Model

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
    """A chunk in a file. A frame has no ``model``, but its digest."""

    digest: bytes
    parent: bytes
    content: bytes
    position: int
    prefill_flops: float
    layout: KVLayout
    tensors: ChunkTensors
    accuracy: Accuracy
    model: Model | None = None
    model_digest: bytes = b""


def check_file(path: Path) -> None:
    """Raise InvalidRequestError unless *path* is called as one of the two forms, in a folder."""
    if path.suffix not in (SAFETENSORS, FRAME):
        fix = f"call it NAME{SAFETENSORS} or NAME{FRAME}"
        raise InvalidRequestError("file", str(path), fix)
    if not path.parent.is_dir():
        raise InvalidRequestError("file", str(path), "name a file in a folder that exists")


def write_chunk(path: Path, header: FrameHeader, frame: bytes, model: Model) -> int:
    """Write the chunk of a verified frame to *path*, whole or not at all; return its bytes.

    Raises KVStoreErrors for a codec that cannot decode it, OSError.
    """
    data = frame if path.suffix == FRAME else _safetensors(header, frame, model)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("xb") as file:
            file.write(data)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return len(data)


def _decoded(header: FrameHeader, frame: bytes) -> ChunkTensors:
    tensors = empty_tensors(header.layout)
    codec_by_id(header.codec_id).decode_into(header, np.frombuffer(frame, np.uint8), tensors)
    return tensors


def _safetensors(header: FrameHeader, frame: bytes, model: Model) -> bytes:
    tensors = _decoded(header, frame)
    layout = json_format.MessageToDict(
        layout_to_message(header.layout), preserving_proto_field_name=True
    )
    facts = {
        "format": FORMAT,
        "digest": header.key[16:].hex(),
        "parent": header.parent.hex(),
        "content": header.content.hex(),
        "position": str(header.position),
        "prefill_flops": repr(header.prefill_flops),
        "fidelity": header.accuracy.name,
        "representation": json.dumps(model_as_dict(model), sort_keys=True),
        "layout": json.dumps(layout, sort_keys=True),
    }
    specs = {
        name: TensorSpec(
            dtype=component.dtype.name,
            shape=component.shape,
            data_ptr=part.ctypes.data,
            data_len=part.nbytes,
        )
        for name, component, part in _named(header.layout, tensors)
    }
    return serialize(specs, facts | {"blake3": _sum(facts, header.layout, tensors)})


def _named(layout: KVLayout, tensors: ChunkTensors) -> Iterator[tuple[str, Component, Part]]:
    number = 0
    for component, layers in zip(layout.components, tensors, strict=True):
        for parts in layers:
            for name, part in zip(_PARTS[component.kind], parts, strict=True):
                yield f"layer.{number}.{name}", component, part
            number += 1


def _sum(facts: Mapping[str, str], layout: KVLayout, tensors: ChunkTensors) -> str:
    """Return the BLAKE3 of a file's metadata and tensors."""
    digest = blake3(json.dumps(dict(facts), sort_keys=True).encode())
    for _, _, part in _named(layout, tensors):
        digest.update(part.tobytes())
    return digest.hexdigest()


def read_chunk(path: Path) -> ChunkFile:
    """Return the chunk in a file. Raises InvalidRequestError that names it and what is wrong."""
    check_file(path)
    try:
        size = path.stat().st_size
        if size > MAX_FRAME_BYTES + MAX_HEADER_BYTES:
            raise ValueError(f"it has over {MAX_FRAME_BYTES} bytes")
        data = path.read_bytes()
        return _read_frame(data) if path.suffix == FRAME else _read_tensors(data)
    except OSError as error:
        raise InvalidRequestError("file", str(path), f"{error.strerror}; name another") from None
    except (
        KVStoreError, SafetensorError, ValueError, KeyError, TypeError, RecursionError
    ) as error:  # fmt: skip
        raise InvalidRequestError("file", str(path), f"is no chunk: {error}") from None


def _read_frame(data: bytes) -> ChunkFile:
    header = check_frame(np.frombuffer(data, np.uint8))
    return ChunkFile(
        header.key[16:], header.parent, header.content, header.position, header.prefill_flops,
        header.layout, _decoded(header, data), header.accuracy, None, header.representation,
    )  # fmt: skip


def _read_tensors(data: bytes) -> ChunkFile:
    # It checks the header's length, too.
    found = dict(deserialize(data))  # type: ignore[no-untyped-call]
    facts = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    if facts["format"] != FORMAT:
        raise ValueError(f"its format is {facts['format']!r}, and {FORMAT} is known")
    layout, _ = layout_from_message(json_format.Parse(facts["layout"], pb.Layout()))
    size = sum(len(tensor["data"]) for tensor in found.values())
    if layout.raw_bytes != size:
        raise ValueError(f"its layout has {layout.raw_bytes} bytes, and its tensors {size}")
    tensors = empty_tensors(layout)
    for name, component, part in _named(layout, tensors):
        tensor = found[name]
        form = (tensor["dtype"], tuple(tensor["shape"]))
        if form != (_TYPES[component.dtype], component.shape):
            raise ValueError(f"{name} is not what the layout says")
        part[...] = np.frombuffer(tensor["data"], part.dtype).reshape(part.shape)
    if facts.pop("blake3") != _sum(facts, layout, tensors):
        raise ValueError("it is not what was written")
    model = representation_from_message(
        json_format.Parse(facts["representation"], pb.Representation())
    )
    return ChunkFile(
        bytes.fromhex(facts["digest"]), bytes.fromhex(facts["parent"]),
        bytes.fromhex(facts["content"]), int(facts["position"]), float(facts["prefill_flops"]),
        layout, tensors, Accuracy[facts["fidelity"]], model,
    )  # fmt: skip
