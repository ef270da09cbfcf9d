"""The cuda transport: frames from the server's GPU memory, and its CPU memory, into an engine's
pages on the same device.

Rows go from the mapped arena into the pages in one kernel, without a copy in between, which makes
the frame's checksums as they pass. Frames of CPU memory are copied to the device first, straight
out of the server's slabs. torch is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from threading import Lock
from typing import TypeVar

import structlog
import torch
from typing_extensions import override

from kvstore.client.arena import Arena, open_arena
from kvstore.client.device_pages import DevicePages
from kvstore.client.device_puts import DevicePutting
from kvstore.client.device_reads import (
    DeviceReader,
    Reading,
    Registration,
    Run,
)
from kvstore.client.forks import keep
from kvstore.client.frames import FrameAssembler
from kvstore.client.server_link import LeftMs, digest_batches, packed
from kvstore.client.session import Session
from kvstore.client.transports.base import (
    Arrival,
    ReadPlan,
    Transport,
    arrival_of,
    room_of,
    whole_frame,
)
from kvstore.client.transports.shared_memory import ATTACH_WITHIN_S, ShmTransport
from kvstore.codecs.paged import Paged
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes
from kvstore.proto.device import Device, Event, open_device
from kvstore.proto.errors import (
    KVStoreError,
    LeaseExpiredError,
    TierUnavailableError,
)
from kvstore.proto.frame import header_bytes, raw_frame_bytes
from kvstore.proto.types import Accuracy, ChunkKey, KVLayout
from kvstore.proto.unix_socket import Place, Reach, unpack_places

T = TypeVar("T")

logger = structlog.get_logger(__name__)


class CudaTransport(ShmTransport):
    """Shared memory, and the memory of the device that the server's gpu tier is on.

    Where the server shares none, or this process does not see its device, ``arena`` is None and
    ``without_arena`` says why: frames then come from CPU memory. What is mapped of the device
    stays so until the transport is closed and the last get that was at work then has ended: a
    kernel that reads what is mapped no more takes the engine's context with it.
    """

    name = "cuda"

    def __init__(self, session: Session, within_s: float = ATTACH_WITHIN_S) -> None:
        super().__init__(session, within_s)
        self._registration: Registration | None = None
        self._users = 1
        """Gets at work, and this transport itself until it is closed."""
        self._is_closed = False
        # Guards the three above.
        self._users_lock = Lock()
        self.arena: Arena | None = None
        self.without_arena = ""
        try:
            self.arena = open_arena(session.terms, self.slabs)
        except TierUnavailableError as error:
            self.without_arena = str(error)
            if session.terms.arena_device:
                logger.warning("the server's GPU memory is out of reach", reason=str(error))
        except KVStoreError:
            super().close()
            raise
        whole = KVLayout.of(session.representation, session.options.chunk_tokens)
        self.head_bytes = header_bytes(whole)
        """Of a raw frame, whatever its tokens."""

    def shares(self, device: torch.device) -> bool:
        """Whether the server's gpu tier is on *device*."""
        return self.arena is not None and self.arena.memory.device == device

    @contextmanager
    def get_on_device(
        self,
        digests: bytes,
        deadline_ms: int,
        reader: DeviceReader,
        least: Accuracy = Accuracy.exact,
    ) -> Iterator[Iterator[Run]]:
        """Enter to iterate frames as ``get`` does, those in memory where they lie."""
        is_shared = self.shares(reader.ring.device)
        via = pb.VIA_DEVICE if is_shared else pb.VIA_SHARED_MEMORY
        request = self.request(ReadPlan(digests, 0, deadline_ms, least), via)
        with self._mapped(), ExitStack() as stack:
            try:
                yield self._arriving_near(self.replies(stack, request), reader)
            finally:
                # What is queued may read memory of the lease, and writes into the caller's.
                reader.wait()

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        """Keep what is mapped until this is left. Raises LeaseExpiredError once it is closed."""
        with self._users_lock:
            if self._is_closed:
                raise LeaseExpiredError("the connection to the server was closed; ask once more")
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
        """Return what has *device* copy straight out of slabs."""
        with self._users_lock:
            if self._registration is None:
                self._registration = Registration(device)
            return self._registration

    def _arriving_near(
        self, replies: Iterator[pb.GetResponse], reader: DeviceReader
    ) -> Iterator[Run]:
        assembler = FrameAssembler(self.session.terms.max_frame_bytes, room_of())
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
                whole = whole_frame(assembler, arrival_of(reply))
                if whole is not None:
                    yield _run_of(whole)
            else:
                assembler.next_index = index

    def _in_memory(self, index: int, places: Sequence[Place], registration: Registration) -> Run:
        frames: list[Bytes] = []
        confirms: list[Callable[[], None]] = []
        for place in places:
            slab = self.slabs.slab(place.number)
            slab.check(place)
            registration.note(place.number, slab.data)
            frames.append(slab.data[place.offset : place.offset + place.size_bytes])
            confirms.append(partial(slab.confirm, place.offset, place.generation))
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


class CudaClient(DevicePutting):
    """A Client whose frames also go straight into pages on a device, ``get_device_pages``, and out
    of its memory, ``put_on_device``.

    That takes a server on this host, and is fastest where its gpu tier is on the same device.
    """

    shared_memory = CudaTransport
    _pages_reader: DeviceReader | None = None

    @property
    def is_gpu_tier_far(self) -> bool:
        """Whether the server has a gpu tier that is out of reach, as far as is known."""
        transport = self._link.transport
        return (
            isinstance(transport, CudaTransport)
            and transport.arena is None
            and bool(transport.session.terms.arena_device)
        )

    def get_device_pages(
        self,
        keys: Sequence[ChunkKey],
        paged: DevicePages,
        block_ids: Sequence[int],
        *,
        accuracy: Accuracy = Accuracy.exact,
    ) -> int:
        """Read the longest prefix of *keys* that is there in time straight into pages on the
        device, behind torch's current stream.

        *keys* are those of a request from its first token on, *block_ids* its blocks. Return
        how many chunks were read and verified: all work on them is done then. Slots of the
        chunks past them may have been written to and are not to be used. Below an exact
        *accuracy* any of them may be restored from a lossy copy, as in ``get``. Raises
        TierUnavailableError where the server is not on this host.
        """
        if self._pages_reader is None:
            layout = KVLayout.of(self.model, self.options.chunk_tokens)
            device = open_device(paged.pages[0].first.device)
            self._pages_reader = DeviceReader(device, raw_frame_bytes(layout))
        after = self._pages_reader.device.current_stream().record()
        place = paged.of(block_ids)
        return self.read_on_device(keys, place, self._pages_reader, after, accuracy=accuracy)

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
        """Do what ``get_device_pages`` does with a *reader* of the caller's, and its *paged*.

        No page is written before *after*. *arrived* is called for each run of frames that came.
        """

        def work(transport: Transport, left_ms: LeftMs) -> int:
            if not isinstance(transport, CudaTransport):
                raise TierUnavailableError("cuda", "the server is not on this host")
            with reader.lock:
                reading = Reading(transport, reader, keys, paged, after, accuracy)
                return self._read_with(transport, left_ms, reading, arrived)

        return self._link.run(work)

    def _read_with(
        self,
        transport: CudaTransport,
        left_ms: LeftMs,
        reading: Reading,
        arrived: Callable[[], None],
    ) -> int:
        try:
            with ExitStack() as stack:
                reading.run(_noted(self._arriving(stack, transport, left_ms, reading), arrived))
        except RuntimeError as error:  # what torch and cupy raise
            reason = str(error).partition("\n")[0]
            raise TierUnavailableError("cuda", f"{type(error).__name__}: {reason}") from error
        if reading.broken is not None:
            self._link.quarantine(transport, reading.broken, left_ms)
        return reading.done

    def _arriving(
        self, stack: ExitStack, transport: CudaTransport, left_ms: LeftMs, reading: Reading
    ) -> Iterator[Run]:
        """Yield what arrives, a batch at a time; the leases of all of them end with *stack*."""
        terms, count = transport.session.terms, 0
        digests = packed(reading.keys, terms.namespace)
        for first, some in digest_batches(digests, terms.max_batch_chunks):
            if count < first:
                return
            arriving = transport.get_on_device(some, left_ms(), reading.reader, reading.least)
            for one in stack.enter_context(arriving):
                count += len(one)
                yield replace(one, index=first + one.index) if first else one

    @override
    def _after_fork(self) -> None:
        super()._after_fork()
        keep(self._pages_reader)  # of a device, which no child can use
        self._pages_reader = None

    @override
    def close(self) -> None:
        super().close()
        if self._pages_reader is not None:
            self._pages_reader.close()
            self._pages_reader = None


def _run_of(arrived: Arrival) -> Run:
    return Run(arrived.index, (), [arrived.data[:]], [arrived.confirm])


def _noted(arriving: Iterator[T], arrived: Callable[[], None]) -> Iterator[T]:
    for one in arriving:
        arrived()
        yield one
