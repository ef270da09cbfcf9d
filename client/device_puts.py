"""Puts out of device memory: the server copies, and the client only reports where frames lie.

torch is imported here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace

import torch

from kvstore.client.chunk import DeviceChunk
from kvstore.client.client import Client
from kvstore.client.server_link import LeftMs
from kvstore.client.transports.base import Put, Transport, read_outcomes
from kvstore.client.transports.shared_memory import ShmTransport
from kvstore.codecs.frame_kernels import open_kernels
from kvstore.codecs.paged import FrameAt, Sums
from kvstore.codecs.raw import raw_header
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import unix_socket
from kvstore.proto.device import Device, Event
from kvstore.proto.errors import InvalidRequestError, LayoutMismatchError
from kvstore.proto.frame import ALIGN_BYTES, FrameHeader, FrameTemplate, pack_header
from kvstore.proto.messages import hints_to_message
from kvstore.proto.plans import NO_HINTS, Hints
from kvstore.proto.types import PutOutcome

MAX_FRAMES = 64
"""Of one call; a put of more takes several."""


class DeviceRing:
    """Memory that puts go out of: what ``device.allocate`` returned. Thread-safe.

    Every server that it is put to maps it. It is released only once the clients that put out of
    it are closed.
    """

    def __init__(self, device: Device, memory: torch.Tensor) -> None:
        self.device = device
        self.memory = memory
        self.stream = device.stream()
        self._kernels = open_kernels(memory.device)
        self._answers: dict[int, str] = {}
        """By session, why its server does not map it; empty where it does."""
        self._lock = threading.Lock()

    def register(self, transport: ShmTransport) -> str:
        """Have the server map it, once a session; return why it does not, or nothing."""
        session_id = transport.session.terms.session_id
        with self._lock:
            reason = self._answers.get(session_id)
            if reason is None:
                reason = self._offer(transport)
                self._answers = {session_id: reason}  # one client, one session at a time
        return reason

    def _offer(self, transport: ShmTransport) -> str:
        terms, identity = transport.session.terms, self.device.identity
        if terms.arena_device != identity:
            there = f"on {terms.arena_device}" if terms.arena_device else "nowhere"
            return f"the server's gpu tier is {there}, the ring on {identity}"
        token = unix_socket.device_token(identity)
        exported = self.device.export(self.memory)
        try:
            answer = transport.slabs.give(
                unix_socket.Request(unix_socket.Op.ring, len(self.memory), token), exported
            )
        finally:
            os.close(exported)
        is_taken = answer is unix_socket.Reply.ok
        return "" if is_taken else f"the server does not take the ring: {answer.name}"

    def headers(
        self, representation: bytes, chunks: Sequence[DeviceChunk], written: Event
    ) -> list[FrameHeader]:
        """Return the headers of *chunks*, which are there once *written* is over.

        Waits until the device has summed them. Raises InvalidRequestError for a place outside.
        """
        bare = [raw_header(_template(representation, chunk)) for chunk in chunks]
        for chunk, header in zip(chunks, bare, strict=True):
            stop = chunk.offset + header.frame_bytes
            if chunk.offset < 0 or chunk.offset % ALIGN_BYTES or stop > len(self.memory):
                fix = f"a multiple of {ALIGN_BYTES}, within {len(self.memory)} bytes"
                raise InvalidRequestError("offset", (chunk.offset, stop), fix)
        frames = [FrameAt(c.offset, h, 0) for c, h in zip(chunks, bare, strict=True)]
        begun: list[Sums] = []
        self.stream.wait(written)
        self.stream.launch(lambda: begun.append(self._kernels.sums(self.memory, frames)))
        self.stream.record().synchronize()
        return [_summed(header, sums) for header, sums in zip(bare, begun[0](), strict=True)]


def _template(representation: bytes, chunk: DeviceChunk) -> FrameTemplate:
    return FrameTemplate(
        chunk.key, chunk.parent, representation, chunk.content, chunk.layout, chunk.position,
        chunk.prefill_flops,
    )  # fmt: skip


def _summed(header: FrameHeader, sums: Sequence[int]) -> FrameHeader:
    segments = header.segments.copy()
    segments["checksum"] = sums
    return replace(header, segments=segments)


class DevicePutting(Client):
    """The puts of a client out of device memory."""

    def end_session(self) -> None:
        """End the session, so that no server maps a ring any more; the next call opens another."""
        self._link.end_session()

    def put_on_device(
        self,
        ring: DeviceRing,
        chunks: Sequence[DeviceChunk],
        written: Event,
        hints: Hints = NO_HINTS,
    ) -> list[Put]:
        """Put *chunks* out of *ring*, which is written once *written* is over.

        Return what became of each. What the server has no room or no device for is ``refused``:
        put it through host memory. Once this returns the slots are free. After an error the
        server may still read them: what it copies then is refused, whatever they hold. Raises
        LayoutMismatchError before anything is sent.
        """
        for chunk in chunks:
            if not chunk.layout.is_of(self.model):
                fix = "make it with KVLayout.of this client's Model"
                raise LayoutMismatchError("layout", chunk.layout, fix)

        def work(transport: Transport, _: LeftMs) -> list[Put]:
            assert isinstance(transport, ShmTransport)
            reason = ring.register(transport)
            if reason:
                return [Put(PutOutcome.refused, reason)] * len(chunks)
            step = min(MAX_FRAMES, transport.session.terms.max_batch_chunks)
            results: list[Put] = []
            for start in range(0, len(chunks), step):
                batch = chunks[start : start + step]
                results += _put_batch(transport, ring, batch, written, hints)
            return results

        return self._link.run(work) if chunks else []


def _put_batch(
    transport: ShmTransport,
    ring: DeviceRing,
    chunks: Sequence[DeviceChunk],
    written: Event,
    hints: Hints,
) -> list[Put]:
    session = transport.session
    headers = ring.headers(session.representation_digest, chunks, written)
    event = ring.stream.record(shared=True)  # kept until the server has answered
    request = pb.PutDeviceRequest(
        session_id=session.terms.session_id,
        headers=[pack_header(header) for header in headers],
        offsets=[chunk.offset for chunk in chunks],
        event=event.handle(),
        deadline_ms=session.options.deadline_ms,
        hints=hints_to_message(hints),
    )
    reply = transport.calls.call("PutDevice", request, session.options.deadline_ms, pb.PutResponse)
    del event
    return read_outcomes(reply.outcomes, reply.reasons)
