"""The cuda transport: frames from the server's GPU or CPU memory into pages on an engine's device.

One kernel moves rows from the mapped arena into the pages, without a copy in between, and computes
the frame's checksums on the way. Frames of CPU memory are first copied to the device, directly
from the server's slabs. torch is imported here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from threading import Lock

import structlog
import torch
from typing_extensions import override

from kvstore.client.chunk import DeviceChunk
from kvstore.client.client import Client
from kvstore.client.device_reads import DeviceReader, Reading, Registration, Run
from kvstore.client.frames import Arrival, FrameAssembler
from kvstore.client.server_link import LeftMs, batches, digest_batches, packed
from kvstore.client.session import Session
from kvstore.client.transports.base import (
    Put,
    ReadPlan,
    Transport,
    arrival_of,
    read_outcomes,
)
from kvstore.client.transports.shared_memory import ShmTransport, Slabs
from kvstore.client.transports.unix_rpc import ENTER_WITHIN_S
from kvstore.codecs.frame_kernels import open_kernels
from kvstore.codecs.paged import FrameAt, Paged
from kvstore.codecs.raw import raw_header
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import unix_socket
from kvstore.proto.buffers import Bytes
from kvstore.proto.device import Device, Event, Imported, device_errors, open_device
from kvstore.proto.errors import (
    InvalidRequestError,
    KVStoreError,
    LayoutMismatchError,
    LeaseExpiredError,
    TierUnavailableError,
)
from kvstore.proto.frame import ALIGN_BYTES, FrameHeader, header_bytes, pack_header
from kvstore.proto.messages import hints_to_message
from kvstore.proto.plans import NO_HINTS, Hints
from kvstore.proto.types import Accuracy, ChunkKey, KVLayout, PutOutcome
from kvstore.proto.unix_socket import ARENA_SLAB, Place, Reach, unpack_places

MAX_FRAMES = 64
"""Limit of one PutDevice call; a larger put takes several."""

logger = structlog.get_logger(__name__)


def open_arena(terms: pb.OpenSessionResponse, slabs: Slabs) -> Imported:
    """Map the memory of the server's gpu tier.

    Raises TierUnavailableError when it has none, or its device is not visible here.
    """
    identity, found = terms.arena_device, torch.device("cpu")  # a test's stand-in for a device
    if not identity:
        raise TierUnavailableError("cuda", "the server shares no GPU memory: add tier gpu")
    if identity != "cpu":
        numbers = range(torch.cuda.device_count())
        seen = [f"cuda:{torch.cuda.get_device_properties(at).uuid}" for at in numbers]
        if identity not in seen:
            raise TierUnavailableError(
                "cuda", f"the server's device {identity} is not among {seen or 'none'}:"
                " run on it, or use another transport",
            )  # fmt: skip
        found = torch.device("cuda", seen.index(identity))
    return open_device(found).import_memory(slabs.slab(ARENA_SLAB).data, terms.arena_bytes)


class DeviceRing:
    """Memory of ``device.allocate`` that puts read from. Thread-safe.

    Each server that is put to maps it. Release it only once the clients that put from it are
    closed.
    """

    def __init__(self, device: Device, memory: torch.Tensor) -> None:
        self.device = device
        self.memory = memory
        self.stream = device.stream()
        self._kernels = open_kernels(memory.device)
        self._answers: dict[int, str] = {}
        """By session, why its server does not map the ring; empty if it does."""
        self._lock = threading.Lock()

    def register(self, transport: ShmTransport) -> str:
        """Request, once a session, that the server map it; return why it does not, or ""."""
        session_id = transport.session.terms.session_id
        with self._lock:
            if session_id not in self._answers:  # one client, one session at a time
                self._answers = {session_id: self._offer(transport)}
            return self._answers[session_id]

    def _offer(self, transport: ShmTransport) -> str:
        terms, identity = transport.session.terms, self.device.identity
        if terms.arena_device != identity:
            there = f"on {terms.arena_device}" if terms.arena_device else "nowhere"
            return f"the server's gpu tier is {there}, the ring on {identity}"
        token = unix_socket.device_token(identity)
        request = unix_socket.Request(unix_socket.Op.ring, len(self.memory), token)
        exported = self.device.export(self.memory)
        try:
            answer = transport.slabs.send_descriptor(request, exported)
        finally:
            os.close(exported)
        is_taken = answer is unix_socket.Reply.ok
        return "" if is_taken else f"the server refused the ring: {answer.name}"

    def headers(
        self, representation: bytes, chunks: Sequence[DeviceChunk], written: Event
    ) -> list[FrameHeader]:
        """Return the headers of *chunks*, which are in the ring once *written* is done.

        Waits until the device has summed them. Raises InvalidRequestError for an offset outside.
        """
        bare = [raw_header(chunk.template(representation, chunk.layout)) for chunk in chunks]
        for chunk, header in zip(chunks, bare, strict=True):
            stop = chunk.offset + header.frame_bytes
            if chunk.offset < 0 or chunk.offset % ALIGN_BYTES or stop > len(self.memory):
                fix = f"give a multiple of {ALIGN_BYTES}, within {len(self.memory)} bytes"
                raise InvalidRequestError("offset", (chunk.offset, stop), fix)
        frames = [FrameAt(c.offset, h, 0) for c, h in zip(chunks, bare, strict=True)]
        self.stream.wait(written)
        begun = self.stream.launched(partial(self._kernels.sums, self.memory, frames))
        self.stream.record().synchronize()
        return list(map(raw_header, bare, begun[0]()))


class CudaTransport(ShmTransport):
    """Shared memory, and the device memory of the server's gpu tier.

    If the server shares none, or its device is not visible here, ``arena`` is None and
    ``without_arena`` is the reason: frames then come from CPU memory. Device memory stays mapped
    until the transport is closed and its last get has ended: a kernel that reads unmapped memory
    destroys the engine's CUDA context.
    """

    name = "cuda"

    def __init__(self, session: Session, within_s: float = ENTER_WITHIN_S) -> None:
        super().__init__(session, within_s)
        self._registration: Registration | None = None
        self._users = 1
        """Gets in progress, and this transport itself until it is closed."""
        self._is_closed = False
        # Guards the three above.
        self._users_lock = Lock()
        self.arena: Imported | None = None
        self.without_arena = ""
        try:
            self.arena = open_arena(session.terms, self.slabs)
        except TierUnavailableError as error:
            self.without_arena = str(error)
            if session.terms.arena_device:
                logger.warning("cannot map the server's GPU memory", reason=str(error))
        except KVStoreError:
            super().close()
            raise
        whole = KVLayout.of(session.representation, session.options.chunk_tokens)
        self.head_bytes = header_bytes(whole)
        """Header size of a raw frame of any number of tokens."""

    @contextmanager
    def get_on_device(
        self,
        digests: bytes,
        deadline_ms: int,
        reader: DeviceReader,
        least: Accuracy = Accuracy.exact,
    ) -> Iterator[Iterator[Run]]:
        """Enter to iterate frames as ``read`` does, those in memory in place."""
        is_shared = self.arena is not None and self.arena.memory.device == reader.ring.device
        via = pb.VIA_DEVICE if is_shared else pb.VIA_SHARED_MEMORY
        request = self.request(ReadPlan(digests, 0, deadline_ms, least), via)
        with self._mapped(), ExitStack() as stack:
            try:
                yield self._arriving_near(self.replies(stack, request), reader)
            finally:
                # Queued work may read leased memory, and writes to the caller's.
                reader.wait()

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        """Keep memory mapped while entered. Raises LeaseExpiredError once it is closed."""
        with self._users_lock:
            if self._is_closed:
                raise LeaseExpiredError("the connection to the server was closed; retry")
            self._users += 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._users_lock:
            self._users -= 1
            is_last = not self._users
        if is_last:
            if self._registration is not None:
                self._registration.close()
            if self.arena is not None:
                self.arena.close()

    def registration_for(self, device: Device) -> Registration:
        """Return the registration of slabs with *device*."""
        with self._users_lock:
            if self._registration is None:
                self._registration = Registration(device)
            return self._registration

    def _arriving_near(
        self, replies: Iterator[pb.GetResponse], reader: DeviceReader
    ) -> Iterator[Run]:
        assembler = FrameAssembler(self.session.terms.max_frame_bytes)
        registration = self.registration_for(reader.device)
        for reply in replies:
            names = reply.places.tier_names
            places = unpack_places(reply.places.rows)
            index = reply.index
            for reach, run in groupby(places, key=attrgetter("reach")):
                some = list(run)
                first, index = index, index + len(some)
                if reach == Reach.device:
                    yield Run(first, some)
                elif reach == Reach.memory:
                    yield self._in_memory(first, some, registration)
                else:
                    for at, place in enumerate(some, first):
                        yield _run_of(self._arrival(at, names[place.tier], place))
            if reply.HasField("part"):
                whole = assembler.take(arrival_of(reply))
                if whole is not None:
                    yield _run_of(whole)
            else:
                assembler.next_index = index

    def _in_memory(self, index: int, places: Sequence[Place], registration: Registration) -> Run:
        frames: list[Bytes] = []
        confirms: list[Callable[[], None]] = []
        for place in places:
            slab = self.slabs.slab_of(place)
            confirms.append(partial(slab.confirm, place.offset, place.generation))
            confirms[-1]()
            registration.add(place.number, slab.data)
            frames.append(slab.data[place.offset : place.offset + place.size_bytes])
        return Run(index, (), frames, confirms)

    @override
    def close(self) -> None:
        with self._users_lock:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            try:
                super().close()
            finally:
                self._leave()


class CudaClient(Client):
    """A Client that also reads frames into pages on a device, ``read_on_device``, and puts from
    its memory, ``put_on_device``.

    Both need a server on this host, and are fastest if its gpu tier is on the same device.
    """

    shared_memory = CudaTransport

    @property
    def is_gpu_tier_far(self) -> bool:
        """Whether the server has a gpu tier that cannot be mapped here, as last known."""
        transport = self._link.transport
        return (
            isinstance(transport, CudaTransport)
            and transport.arena is None
            and bool(transport.session.terms.arena_device)
        )

    def end_session(self) -> None:
        """End the session, so that no server maps a ring; the next call opens another."""
        self._link.end_session()

    def put_on_device(
        self,
        ring: DeviceRing,
        chunks: Sequence[DeviceChunk],
        written: Event,
        hints: Hints = NO_HINTS,
    ) -> list[Put]:
        """Put *chunks* from *ring*, which is complete once *written* is done.

        Return the outcome of each. A chunk is ``refused`` when the server has no space or no device
        for it: put it through host memory. On return the slots are free. After an error the
        server may still read them, and refuses what it copies then, whatever they hold. Raises
        LayoutMismatchError before anything is sent.
        """
        for chunk in chunks:
            if not chunk.layout.is_of(self.model):
                fix = "make it with KVLayout.of this client's Model"
                raise LayoutMismatchError("layout", chunk.layout, fix)

        def work(transport: Transport, left_ms: LeftMs) -> list[Put]:
            assert isinstance(transport, ShmTransport)
            reason = ring.register(transport)
            if reason:
                return [Put(PutOutcome.refused, reason)] * len(chunks)
            session, results = transport.session, list[Put]()
            for _, some in batches(chunks, min(MAX_FRAMES, session.terms.max_batch_chunks)):
                deadline_ms = left_ms()
                headers = ring.headers(session.representation_digest, some, written)
                event = ring.stream.record(shared=True)  # kept until the server has replied
                request = pb.PutDeviceRequest(
                    session_id=session.terms.session_id,
                    headers=map(pack_header, headers),
                    offsets=[chunk.offset for chunk in some],
                    event=event.handle(),
                    deadline_ms=deadline_ms,
                    hints=hints_to_message(hints),
                )
                reply = transport.calls.call("PutDevice", request, deadline_ms, pb.PutResponse)
                results += read_outcomes(reply.outcomes, reply.reasons)
            return results

        return self._link.run(work) if chunks else []

    def read_on_device(
        self,
        keys: Sequence[ChunkKey],
        paged: Paged,
        reader: DeviceReader,
        after: Event | None = None,
        arrived: Callable[[], None] = lambda: None,
        *,
        accuracy: Accuracy = Accuracy.exact,
    ) -> int:
        """Read the longest prefix of *keys* that arrives in time into pages on the device.

        *keys* are those of a request from its first token on. Return how many chunks were read
        and verified: all work on them is done. Slots of later chunks may have been written to; do
        not use them. No page is written before *after*. *arrived* is called for each run of frames
        received. Below an exact *accuracy* any chunk may be restored from a lossy copy, as in
        ``get``. Raises TierUnavailableError if the server is not on this host.
        """

        def work(transport: Transport, left_ms: LeftMs) -> int:
            if not isinstance(transport, CudaTransport):
                raise TierUnavailableError("cuda", "the server is not on this host")
            with reader.lock:
                reading = Reading(transport, reader, keys, paged, after, accuracy)
                with device_errors(), ExitStack() as stack:
                    reading.run(_arriving(stack, transport, left_ms, reading, arrived))
                if reading.broken is not None:
                    self._link.quarantine(transport, reading.broken, left_ms)
                return reading.done

        return self._link.run(work)


def _arriving(
    stack: ExitStack,
    transport: CudaTransport,
    left_ms: LeftMs,
    reading: Reading,
    arrived: Callable[[], None],
) -> Iterator[Run]:
    """Yield frames as they arrive, a batch at a time; *stack* ends the leases of all."""
    session, count = transport.session, 0
    digests = packed(reading.keys, session.namespace)
    for first, some in digest_batches(digests, session.terms.max_batch_chunks):
        if count < first:
            return
        arriving = transport.get_on_device(some, left_ms(), reading.reader, reading.least)
        for one in stack.enter_context(arriving):
            count += len(one)
            arrived()
            yield replace(one, index=first + one.index) if first else one


def _run_of(arrived: Arrival) -> Run:
    return Run(arrived.index, (), [arrived.data[:]], [arrived.confirm])
