"""The grpc transport: frames in messages of 1 MB, from anywhere to anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import numpy as np
from typing_extensions import override

from kvstore.client.frames import FrameAssembler
from kvstore.client.layer_sink import LayerSink, PutTerms
from kvstore.client.stream_sink import StreamSink
from kvstore.client.transport import (
    Arrival,
    Arrivals,
    Direct,
    Outgoing,
    Put,
    ReadPlan,
    Transport,
    arrival_of,
    read_outcomes,
    room_of,
    whole_frame,
)
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes
from kvstore.proto.frame import FrameTemplate
from kvstore.proto.messages import MESSAGE_BYTES, hints_to_message
from kvstore.proto.plans import NO_HINTS, Hints


class StreamTransport(Transport):
    """Puts and gets through gRPC streams."""

    name = "grpc"

    @override
    def put(
        self,
        chunks: Sequence[Outgoing],
        *,
        durable: bool,
        deadline_ms: int,
        hints: Hints = NO_HINTS,
    ) -> list[Put]:
        opening = pb.PutRequest(
            durable=durable, deadline_ms=deadline_ms, hints=hints_to_message(hints)
        )
        messages = self._messages(chunks, opening)
        reply = self.session.connection.upload("Put", messages, deadline_ms, pb.PutResponse)
        return read_outcomes(reply.outcomes, reply.reasons)

    def _messages(
        self, chunks: Sequence[Outgoing], opening: pb.PutRequest
    ) -> Iterator[pb.PutRequest]:
        session_id = self.session.terms.session_id
        scratch = np.empty(max((c.frame_bytes for c in chunks), default=0), np.uint8)
        for number, chunk in enumerate(chunks):
            frame = scratch[: chunk.frame_bytes]
            chunk.encode(frame)
            for start in range(0, len(frame), MESSAGE_BYTES):
                message = pb.PutRequest(
                    session_id=session_id, data=frame[start : start + MESSAGE_BYTES].tobytes()
                )
                if not start:
                    message.frame_bytes = len(frame)
                if not start and not number:
                    message.MergeFrom(opening)
                yield message

    @override
    @contextmanager
    def read(self, plan: ReadPlan) -> Iterator[Arrivals]:
        connection = self.session.connection
        call = connection.begin_stream("Get", self.request(plan, pb.VIA_STREAM), plan.deadline_ms)
        end = partial(connection.end_stream, call)
        try:
            parts = map(arrival_of, iter(partial(connection.next_of, call), None))
            if plan.layer_major or plan.ranges:
                yield Arrivals(parts, is_layered=plan.layer_major, end=end)
            else:
                yield Arrivals(self._whole(parts, plan.direct), end=end)
        finally:
            end()

    def _whole(self, parts: Iterator[Arrival], direct: Direct | None) -> Iterator[Arrival]:
        assembler = FrameAssembler(self.session.terms.max_frame_bytes, room_of(direct))
        for part in parts:
            frame = whole_frame(assembler, part, cast("Bytes", part.data))
            if frame is not None:
                yield frame

    @override
    def begin_put(self, templates: Sequence[FrameTemplate], terms: PutTerms) -> LayerSink:
        return StreamSink(self.session, templates, terms)

    @override
    def close(self) -> None:
        """Nothing is held between calls."""
