"""Handmade messages to the service over a bare connection."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from helpers.local_server import DEADLINE_MS, LocalServer, open_session
from helpers.prompts import SMALL

from kvstore.client.connection import Connection
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes, as_bytes
from kvstore.proto.frame import FrameHeader, pack_header, parse_header
from kvstore.proto.keys import chunk_key
from kvstore.proto.messages import MESSAGE_BYTES, layout_to_message
from kvstore.proto.types import ChainDigest, ChunkKey, KVLayout, Namespace


@dataclass
class Wire:
    """A bare connection with a session of the small model."""

    connection: Connection
    terms: pb.OpenSessionResponse

    def call(self, method: str, request: Any) -> Any:
        if "session_id" in request.DESCRIPTOR.fields_by_name and not request.session_id:
            request.session_id = self.terms.session_id
        return self.connection.call(method, request, DEADLINE_MS, object)

    def stream(self, method: str, request: Any) -> list[Any]:
        request.session_id = self.terms.session_id
        return list(self.connection.stream(method, request, DEADLINE_MS))

    def put(self, *messages: pb.PutRequest) -> pb.PutResponse:
        """Stream *messages* of this session."""
        for message in messages:
            message.session_id = message.session_id or self.terms.session_id
        return self.connection.upload("Put", iter(messages), DEADLINE_MS, pb.PutResponse)

    def put_frame(self, frame: Bytes) -> pb.PutResponse:
        """Put one frame in messages of the size that clients use."""
        messages = [
            pb.PutRequest(data=frame[start : start + MESSAGE_BYTES].tobytes())
            for start in range(0, len(frame), MESSAGE_BYTES)
        ]
        messages[0].frame_bytes = len(frame)
        return self.put(*messages)

    def key(self, seed: int = 1) -> ChunkKey:
        return chunk_key(Namespace(self.terms.key_namespace), ChainDigest(bytes([seed]) * 16))

    def reserve(self, *sizes: int) -> pb.ReserveRequest:
        """Return a request that reserves space for chunks of 16 tokens with frames of *sizes*."""
        count = len(sizes)
        return pb.ReserveRequest(
            digests=b"".join(self.key(seed)[16:] for seed in range(1, count + 1)),
            parents=bytes(16 * count),
            frame_bytes=sizes,
            layout=[0] * count,
            layouts=[layout_to_message(KVLayout.of(SMALL, 16))],
        )


def wire_to(server: LocalServer) -> Wire:
    connection = server.dial()
    return Wire(connection, open_session(connection))


def reheaded(frame: Bytes, **changes: object) -> Bytes:
    """Return *frame* with changed header fields and a correct header checksum."""
    header: FrameHeader = replace(parse_header(frame), **changes)  # type: ignore[arg-type]
    packed = as_bytes(pack_header(header))
    return np.concatenate([packed, frame[len(packed) :]])
