"""The grpc transport: frames in messages of 1 MB, from anywhere to anywhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
from typing_extensions import override

from kvstore.client.frames import FrameAssembler, shard_frames, shard_ranges
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
from kvstore.proto.types import Shard


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
        with ExitStack() as stack:
            if plan.shard is None:
                yield self._begin(stack, plan)
            else:
                yield Arrivals(self._of_shard(stack, plan.shard, replace(plan, shard=None)))

    def _begin(self, stack: ExitStack, plan: ReadPlan) -> Arrivals:
        """Begin a stream for *plan*, which *stack* ends."""
        connection = self.session.connection
        call = connection.begin_stream("Get", self.request(plan, pb.VIA_STREAM), plan.deadline_ms)
        end = partial(connection.end_stream, call)
        stack.callback(end)
        parts = map(arrival_of, iter(partial(connection.next_of, call), None))
        if plan.layer_major or plan.ranges:
            return Arrivals(parts, is_layered=plan.layer_major, end=end)
        return Arrivals(self._whole(parts, plan.direct), end=end)

    def _whole(self, parts: Iterator[Arrival], direct: Direct | None) -> Iterator[Arrival]:
        assembler = FrameAssembler(self.session.terms.max_frame_bytes, room_of(direct))
        for part in parts:
            frame = whole_frame(assembler, part, cast("Bytes", part.data))
            if frame is not None:
                yield frame

    def _of_shard(self, stack: ExitStack, shard: Shard, plan: ReadPlan) -> Iterator[Arrival]:
        """Yield frames of the layers of *shard*, and from one on that is not raw, whole ones."""
        first: int | None = 0
        until_s = time.monotonic() + plan.deadline_ms / 1000
        ranges = shard_ranges(shard, len(plan.digests))
        if len(ranges) <= self.session.terms.max_batch_chunks:
            parts = self._begin(stack, replace(plan, ranges=ranges))
            first = yield from shard_frames(shard, parts)
            parts.end()
        if first is not None and first < len(plan.digests):
            left_ms = max(1, round(1000 * (until_s - time.monotonic())))
            rest = replace(plan, digests=plan.digests[first:], deadline_ms=left_ms)
            for arrived in self._begin(stack, rest):
                yield replace(arrived, index=arrived.index + first)

    @override
    def begin_put(self, templates: Sequence[FrameTemplate], terms: PutTerms) -> LayerSink:
        return StreamSink(self.session, templates, terms)

    @override
    def close(self) -> None:
        """Nothing is held between calls."""
