"""The grpc transport: frames in messages of 1 MB, from anywhere to anywhere."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
from typing_extensions import override

from kvstore.client.forks import EndedByForkError
from kvstore.client.frames import FrameAssembler
from kvstore.client.session import Session
from kvstore.client.transports.base import (
    ABANDON_S,
    Arrivals,
    LayerSink,
    Outgoing,
    Put,
    PutTerms,
    RawFrames,
    ReadPlan,
    Transport,
    arrival_of,
    read_outcomes,
    room_of,
    whole_frames,
)
from kvstore.codecs.base import AnyPart
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import DeadlineError, KVStoreError, LeaseExpiredError
from kvstore.proto.frame import FLAG_UNSUMMED, FrameTemplate, pack_header
from kvstore.proto.messages import MESSAGE_BYTES, hints_to_message
from kvstore.proto.plans import NO_HINTS, Hints

MAX_WAITING_MESSAGES = 8
"""Of 1 MiB, on their way to gRPC; the next layer waits."""


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
                limit_bytes = self.session.terms.max_frame_bytes
                assembler = FrameAssembler(limit_bytes, room_of(plan.direct))
                yield Arrivals(whole_frames(parts, assembler), end=end)
        finally:
            end()

    @override
    def begin_put(self, templates: Sequence[FrameTemplate], terms: PutTerms) -> LayerSink:
        return StreamSink(self.session, templates, terms)

    @override
    def close(self) -> None:
        """Nothing is held between calls."""


class StreamSink(LayerSink):
    """One upload, in a thread of its own until the put is over."""

    def __init__(
        self, session: Session, templates: Sequence[FrameTemplate], terms: PutTerms
    ) -> None:
        self._session = session
        self._terms = terms
        self._deadline = time.monotonic() + terms.within_ms / 1000
        self._raw = RawFrames(templates)
        self._waiting: deque[pb.PutRequest] = deque()
        self._is_whole = False
        self._reply: pb.PutResponse | None = None
        self._error: KVStoreError | None = None
        # Guards the four above.
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._upload, name="kvstore-put", daemon=True)
        self._thread.start()
        try:
            for chunk, header in enumerate(self._raw.headers):
                unsummed = pack_header(replace(header, flags=header.flags | FLAG_UNSUMMED))
                self._send(chunk, 0, unsummed, header.frame_bytes)
        except KVStoreError:
            self.abandon()
            raise

    @override
    def write(self, segment: int, layers: Sequence[Sequence[AnyPart]]) -> None:
        for chunk, parts in enumerate(layers):
            extent = self._raw.extent(chunk, segment)
            data = np.empty(extent.stop - extent.start, np.uint8)
            self._raw.encode(chunk, segment, parts, data)
            for start in range(0, len(data), MESSAGE_BYTES):
                piece = data[start : start + MESSAGE_BYTES].tobytes()
                self._send(chunk, extent.start + start, piece)

    @override
    def commit(self) -> list[Put]:
        for chunk in range(len(self._raw.headers)):
            self._send(chunk, 0, self._raw.header(chunk))
        with self._changed:
            self._is_whole = True
            self._changed.notify_all()
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._reply is not None
        return read_outcomes(self._reply.outcomes, self._reply.reasons)

    @override
    def abandon(self, within_s: float = ABANDON_S) -> None:
        with self._changed:
            self._is_whole = True  # the server finds it is not, and keeps nothing
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join(within_s)

    def _send(self, chunk: int, offset: int, data: bytes, frame_bytes: int = 0) -> None:
        message = pb.PutRequest(
            session_id=self._session.terms.session_id,
            frame=chunk,
            frame_bytes=frame_bytes,
            offset=offset,
            data=data,
            layer_major=True,
            durable=self._terms.durable,
            hints=hints_to_message(self._terms.hints) if frame_bytes and not chunk else None,
            deadline_ms=self._terms.within_ms,
        )
        with self._changed:
            while len(self._waiting) >= MAX_WAITING_MESSAGES and self._thread.is_alive():
                left_s = self._deadline - time.monotonic()
                if left_s <= 0:
                    raise DeadlineError("the server did not take the layers in time")
                self._changed.wait(left_s)
            if self._error is not None:
                raise self._error
            self._waiting.append(message)
            self._changed.notify_all()

    # --- the thread

    def _upload(self) -> None:
        try:
            self._reply = self._session.connection.upload(
                "Put", self._messages(), self._terms.within_ms, pb.PutResponse
            )
        except EndedByForkError:
            self._error = LeaseExpiredError(
                "the put was ended, as this process was forked: begin it again, after the fork"
            )
        except KVStoreError as error:
            self._error = error
        with self._changed:
            self._is_whole = True
            self._changed.notify_all()

    def _messages(self) -> Iterator[pb.PutRequest]:
        while True:
            with self._changed:
                while not self._waiting and not self._is_whole:
                    self._changed.wait()
                if not self._waiting:
                    return
                message = self._waiting.popleft()
                self._changed.notify_all()
            yield message
