"""The grpc transport: frames in messages of 1 MB, from anywhere to anywhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
from typing_extensions import override

from kvstore.client.frames import FrameAssembler, shard_frames, shard_ranges
from kvstore.client.layer_sink import LayerSink, PutTerms
from kvstore.client.layer_stream import LayerStream
from kvstore.client.stream_sink import StreamSink
from kvstore.client.transport import (
    Arrived,
    Direct,
    Outgoing,
    Put,
    Transport,
    read_outcomes,
)
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.frame import FrameTemplate
from kvstore.proto.messages import MESSAGE_BYTES, hints_to_message
from kvstore.proto.plans import NO_HINTS, Hints
from kvstore.proto.row_mask import SkippedRows
from kvstore.proto.types import Accuracy, ChainDigest, Shard


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
    def get(
        self,
        digests: Sequence[ChainDigest],
        lease_id: int,
        deadline_ms: int,
        least: Accuracy = Accuracy.exact,
    ) -> Iterator[Iterator[Arrived]]:
        request = self.get_request(digests, lease_id, deadline_ms, pb.VIA_STREAM, least)
        with closing(self.session.connection.stream("Get", request, deadline_ms)) as replies:
            yield self._assembled(replies)

    @override
    @contextmanager
    def get_layers(
        self,
        digests: Sequence[ChainDigest],
        lease_id: int,
        deadline_ms: int,
        least: Accuracy = Accuracy.exact,
        skipped: SkippedRows | None = None,
    ) -> Iterator[Iterator[Arrived]]:
        request = self.get_request(digests, lease_id, deadline_ms, pb.VIA_STREAM, least)
        request.layer_major = True
        if skipped is not None:
            request.skip_rows = skipped.pack()
        limit_bytes, is_cut = self.session.terms.max_frame_bytes, skipped is not None
        connection = self.session.connection
        call = connection.begin_stream("Get", request, deadline_ms)
        end = partial(connection.end_stream, call)
        try:
            replies = iter(partial(connection.next_of, call), None)
            yield LayerStream(replies, limit_bytes, is_cut=is_cut, end=end).arriving()
        finally:
            end()

    @override
    @contextmanager
    def get_layers_of(
        self,
        shard: Shard | None,
        digests: Sequence[ChainDigest],
        lease_id: int,
        deadline_ms: int,
        least: Accuracy = Accuracy.exact,
        direct: Direct | None = None,
    ) -> Iterator[Iterator[Arrived]]:
        with ExitStack() as stack:
            yield self._ranged(stack, shard, digests, lease_id, deadline_ms, least)

    def _ranged(
        self,
        stack: ExitStack,
        shard: Shard | None,
        digests: Sequence[ChainDigest],
        lease_id: int,
        deadline_ms: int,
        least: Accuracy,
    ) -> Iterator[Arrived]:
        """Yield frames of the layers of *shard*, and from one on that is not raw, whole ones."""
        first: int | None = 0
        until_s = time.monotonic() + deadline_ms / 1000
        request = self.get_request(digests, lease_id, deadline_ms, pb.VIA_STREAM, least)
        ranges = [] if shard is None else shard_ranges(shard, len(digests))
        if shard is not None and len(ranges) <= self.session.terms.max_batch_chunks:
            request.ranges.extend(ranges)
            with closing(self.session.connection.stream("Get", request, deadline_ms)) as replies:
                first = yield from shard_frames(shard, replies)
        if first is not None and first < len(digests):
            left_ms = max(1, round(1000 * (until_s - time.monotonic())))
            rest = self.get(digests[first:], lease_id, left_ms, least)
            for arrived in stack.enter_context(rest):
                yield replace(arrived, index=arrived.index + first)

    @override
    def begin_put(self, templates: Sequence[FrameTemplate], terms: PutTerms) -> LayerSink:
        return StreamSink(self.session, templates, terms)

    def _assembled(self, replies: Iterator[pb.GetResponse]) -> Iterator[Arrived]:
        assembler = FrameAssembler(self.session.terms.max_frame_bytes)
        for reply in replies:
            frame = assembler.take_message(reply)
            if frame is not None:
                yield Arrived(reply.index, reply.tier, frame)

    @override
    def close(self) -> None:
        """Nothing is held between calls."""
