"""The grpc transport: frames in messages of 1 MB, between any hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
from typing_extensions import override

from kvstore.client.frames import FrameAssembler
from kvstore.client.transports.base import (
    Arrivals,
    Outgoing,
    Put,
    PutTerms,
    ReadPlan,
    Transport,
    arrival_of,
    read_outcomes,
)
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.messages import MESSAGE_BYTES


class StreamTransport(Transport):
    """Puts and gets through gRPC streams."""

    name = "grpc"

    @override
    def put(self, chunks: Sequence[Outgoing], terms: PutTerms) -> list[Put]:
        opening = terms.request(self.session)
        messages = self._messages(chunks, opening)
        reply = self.session.connection.upload("Put", messages, terms.within_ms, pb.PutResponse)
        return read_outcomes(reply.outcomes, reply.reasons)

    def _messages(
        self, chunks: Sequence[Outgoing], opening: pb.PutRequest
    ) -> Iterator[pb.PutRequest]:
        session_id, message = self.session.terms.session_id, opening
        scratch = np.empty(max((c.frame_bytes for c in chunks), default=0), np.uint8)
        for chunk in chunks:
            frame = scratch[: chunk.frame_bytes]
            chunk.encode(frame)
            for start in range(0, len(frame), MESSAGE_BYTES):
                message.frame_bytes = 0 if start else len(frame)
                message.data = frame[start : start + MESSAGE_BYTES].tobytes()
                yield message
                message = pb.PutRequest(session_id=session_id)

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
                limit_bytes = self.session.terms.max_frame_bytes
                frames = FrameAssembler(limit_bytes, plan.direct).frames(parts)
                yield Arrivals(frames, end=end)
        finally:
            end()
