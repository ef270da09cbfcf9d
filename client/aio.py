"""The asyncio client: the blocking one, called in threads.

A call that reads or writes the caller's memory, or holds something on the server, is over once its
await has ended, cancelled or not. That takes the call's own deadline at most. Others go on unseen.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from kvstore.client.blend.segments import NamedSegment, SegmentRange
from kvstore.client.chunk import Chunk, PlannedChunk
from kvstore.client.client import Client
from kvstore.client.decode import Layer, Room, given
from kvstore.client.engine_calls import LAYERED_PUT_MS, check_out
from kvstore.client.events import EventPage, Place, followed
from kvstore.client.keeping import check_wait
from kvstore.client.layered_put import LayeredPut
from kvstore.client.lease import ChunkLease
from kvstore.client.levelled_get import Levelled
from kvstore.client.levels import PlanTerms
from kvstore.client.options import ClientOptions
from kvstore.client.pages import PagedKV
from kvstore.client.rectangle import Rectangle
from kvstore.client.resolving import Resolved, ResolveTerms
from kvstore.client.tensors import LayerTensors, TensorLike
from kvstore.client.transport import Put
from kvstore.codecs.base import ChunkTensors
from kvstore.codecs.block_part import BlockPart
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.blend import GateView
from kvstore.proto.errors import KVStoreError
from kvstore.proto.frame import FrameHeader
from kvstore.proto.plans import NO_HINTS, Hints, PlannedBatch, PrefillModel
from kvstore.proto.types import Accuracy, ChunkKey, KVLayout, Match, Model, Stated

MAX_WAITING = 2
"""Lookups of one client that wait on the server, a thread each; the rest look again and again."""
WAIT_MS = 500
"""What one of them waits for before it looks whether somebody still wants to know."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.005, 0.1
"""Between two looks: twice as long each time."""

T = TypeVar("T")


class _Work:
    """What runs in a thread, unless it is cancelled before it begins."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._is_begun = False
        self._is_cancelled = False
        self._lock = threading.Lock()  # guards the two above

    def run(self) -> Any:
        """Do it."""
        with self._lock:
            if self._is_cancelled:
                return None
            self._is_begun = True
        return self._work()

    def cancel(self) -> bool:
        """Return whether it will never begin."""
        with self._lock:
            self._is_cancelled = True
            return not self._is_begun


async def settled(
    work: Callable[[], T],
    *,
    undo: Callable[[T], object] | None = None,
    stop: Callable[[], object] | None = None,
    always: bool = False,
) -> T:
    """Run *work* in a thread. Cancelled, it returns once *work* has ended, or will never begin.

    *stop* then makes it end sooner, and *undo* is called in a thread with what it returned, which
    nobody else gets. With *always* it does begin.
    """
    loop, task = asyncio.get_running_loop(), _Work(work)
    running: asyncio.Future[T] = loop.run_in_executor(None, copy_context().run, task.run)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if stop is not None:
            stop()
        if not always and task.cancel():
            raise
        while not running.done():
            with suppress(asyncio.CancelledError):  # once is enough
                await asyncio.wait([running])
        if running.exception() is None and undo is not None:
            await settled(partial(undo, running.result()), always=True)
        raise


class AsyncLayeredPut:
    """``LayeredPut`` for asyncio. See there."""

    def __init__(self, put: LayeredPut) -> None:
        self.sync = put

    @property
    def results(self) -> list[Put]:
        """What became of each chunk, once the block was left."""
        return self.sync.results

    async def layer(
        self, layer_id: int, tensors: Sequence[Sequence[TensorLike | BlockPart]]
    ) -> None:
        """Give one layer of all chunks."""
        await settled(partial(self.sync.layer, layer_id, tensors))

    async def __aenter__(self) -> AsyncLayeredPut:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await settled(partial(self.sync.__exit__, kind, error, trace), always=True)


class AsyncClient:
    """``Client`` for asyncio: the same calls, awaited. See there for what each does."""

    def __init__(
        self,
        address: str,
        representation: Model,
        options: ClientOptions | None = None,
    ) -> None:
        self.sync = Client(address, representation, options)
        self._waiting = threading.BoundedSemaphore(MAX_WAITING)

    def __reduce__(self) -> tuple[Any, ...]:
        """Have another process make a client of the same server."""
        return type(self), self.sync.__reduce__()[1]

    async def keys(self, tokens: Sequence[int], extra: Sequence[bytes] = ()) -> list[ChunkKey]:
        """Name the chunks of a prompt."""
        return await asyncio.to_thread(self.sync.keys, tokens, extra)

    async def put(
        self,
        chunks: Sequence[Chunk],
        *,
        durable: bool = False,
        hints: Hints = NO_HINTS,
        rectangle: Rectangle | None = None,
    ) -> list[Put]:
        """Store chunks, or what one rank has of them."""
        put = self.sync.put
        return await settled(
            partial(put, chunks, durable=durable, hints=hints, rectangle=rectangle)
        )

    async def lookup(
        self,
        keys: Sequence[ChunkKey],
        *,
        min_accuracy: Accuracy = Accuracy.exact,
        prefill: PrefillModel | None = None,
        prompt_tokens: int = 0,
        wait_ms: int = 0,
    ) -> Match:
        """Find the longest prefix of *keys* that can be read now, and plan its loads."""
        look = partial(
            self.sync.lookup,
            keys,
            min_accuracy=min_accuracy,
            prefill=prefill,
            prompt_tokens=prompt_tokens,
        )
        clock = asyncio.get_running_loop().time
        until, pause_s = clock() + check_wait(wait_ms) / 1000, FIRST_PAUSE_S
        while True:
            left_s = until - clock()
            match = await self._look(look, round(1000 * left_s))
            if not match.pending or left_s <= 0:
                return match
            await asyncio.sleep(max(0.0, min(pause_s, until - clock())))
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def _look(self, look: Callable[..., Match], wait_ms: int) -> Match:
        """Look once, and wait for a while where few others do: threads are for those who put."""
        waits = wait_ms > 0 and self._waiting.acquire(blocking=False)
        looking = asyncio.ensure_future(
            asyncio.to_thread(look, wait_ms=min(wait_ms, WAIT_MS) if waits else 0)
        )

        def end(looked: asyncio.Future[Match]) -> None:
            if waits:
                self._waiting.release()
            if not looked.cancelled():
                looked.exception()  # seen, whether or not somebody still wants to know

        looking.add_done_callback(end)
        return await asyncio.shield(looking)

    async def end_if_hung(self) -> bool:
        """Whether the server hangs; calls that wait for it fail then."""
        return await asyncio.to_thread(self.sync.end_if_hung)

    async def send_counts(self) -> None:
        """Tell the server what the engine counted."""
        await asyncio.to_thread(self.sync.send_counts)

    async def announce_puts(self, keys: Sequence[ChunkKey], within_ms: int) -> int:
        """Say that *keys* will be put within *within_ms*."""
        return await asyncio.to_thread(self.sync.announce_puts, keys, within_ms)

    async def plan(self, chains: Sequence[Sequence[ChunkKey]], ttl_ms: int = 0) -> PlannedBatch:
        """Announce a batch of prompts."""
        return await asyncio.to_thread(self.sync.plan, chains, ttl_ms)

    async def get(
        self,
        keys: Sequence[ChunkKey],
        out: Sequence[LayerTensors] | None = None,
        *,
        min_accuracy: Accuracy = Accuracy.exact,
        stated: list[Stated] | None = None,
        rectangle: Rectangle | None = None,
    ) -> list[ChunkTensors]:
        """Read the longest prefix of *keys* that is there in time, verified."""
        check_out(keys, out)
        return await self.get_into(
            keys,
            given(out),
            min_accuracy=min_accuracy,
            stated=stated,
            rectangle=rectangle,
        )

    async def get_into(
        self,
        keys: Sequence[ChunkKey],
        room: Room,
        *,
        min_accuracy: Accuracy = Accuracy.exact,
        stated: list[Stated] | None = None,
        rectangle: Rectangle | None = None,
    ) -> list[ChunkTensors]:
        """Read into what *room* gives for each chunk once its layout is known."""
        stopped = threading.Event()

        def place(index: int, layout: KVLayout) -> Any:
            if stopped.is_set():
                raise KVStoreError("the call was cancelled")
            return room(index, layout)

        get = partial(
            self.sync.get_into,
            min_accuracy=min_accuracy,
            stated=stated,
            rectangle=rectangle,
        )
        return await settled(partial(get, keys, place), stop=stopped.set)

    async def get_pages(
        self,
        keys: Sequence[ChunkKey],
        paged: PagedKV,
        block_ids: Sequence[int],
        *,
        min_accuracy: Accuracy = Accuracy.exact,
    ) -> int:
        """Read the longest prefix of *keys* straight into an engine's pages."""
        room = paged.room_of(block_ids, len(keys), self.sync.options.chunk_tokens)
        return len(await self.get_into(keys, room, min_accuracy=min_accuracy))

    async def put_pages(
        self,
        keys: Sequence[ChunkKey],
        paged: PagedKV,
        block_ids: Sequence[int],
        token_count: int,
        *,
        durable: bool = False,
        hints: Hints = NO_HINTS,
    ) -> list[Put]:
        """Store tokens straight from an engine's pages."""
        put = partial(self.sync.put_pages, durable=durable, hints=hints)
        return await settled(partial(put, keys, paged, block_ids, token_count))

    async def get_layers(
        self,
        keys: Sequence[ChunkKey],
        out: Sequence[LayerTensors] | None = None,
        *,
        min_accuracy: Accuracy = Accuracy.exact,
    ) -> AsyncGenerator[Layer, None]:
        """Yield each layer as soon as it is there. Use with ``contextlib.aclosing``."""
        layers = self.sync.get_layers(keys, out, min_accuracy=min_accuracy)
        try:
            while (layer := await settled(partial(next, layers, None))) is not None:
                yield layer
        finally:
            await settled(layers.close, always=True)

    async def get_levelled(
        self,
        keys: Sequence[ChunkKey],
        terms: PlanTerms,
        out: Sequence[LayerTensors] | None = None,
        compute: Callable[[range], None] | None = None,
    ) -> Levelled:
        """Read chunks at the levels that a deadline leaves time for; *compute* runs in a thread."""
        return await settled(partial(self.sync.get_levelled, keys, terms, out, compute))

    async def begin_put(
        self,
        chunks: Sequence[PlannedChunk],
        *,
        durable: bool = False,
        within_ms: int = LAYERED_PUT_MS,
        hints: Hints = NO_HINTS,
    ) -> AsyncLayeredPut:
        """Begin to store chunks whose layers come one by one: ``async with await begin_put()``."""
        begin = self.sync.begin_put
        put = await settled(
            partial(begin, chunks, durable=durable, within_ms=within_ms, hints=hints),
            undo=LayeredPut.abandon,
        )
        return AsyncLayeredPut(put)

    @asynccontextmanager
    async def lease(
        self, keys: Sequence[ChunkKey], *, min_accuracy: Accuracy = Accuracy.exact
    ) -> AsyncIterator[ChunkLease]:
        """Keep what is ready of *keys* from eviction inside ``async with``."""
        lease = await settled(
            partial(self.sync.lease, keys, min_accuracy=min_accuracy), undo=ChunkLease.release
        )
        try:
            yield lease
        finally:
            await settled(lease.release, always=True)

    async def name_segments(
        self, tokens: Sequence[int], ranges: Sequence[SegmentRange], extra: Sequence[bytes] = ()
    ) -> list[NamedSegment]:
        """Cut and name a prompt as ``resolve`` does."""
        return self.sync.name_segments(tokens, ranges, extra)

    @asynccontextmanager
    async def resolve(
        self,
        tokens: Sequence[int],
        ranges: Sequence[SegmentRange],
        terms: ResolveTerms | None = None,
    ) -> AsyncIterator[Resolved]:
        """Keep what there is of a prompt's segments inside ``async with``; layers block."""
        resolved = await settled(
            partial(self.sync.resolve, tokens, ranges, terms), undo=Resolved.release
        )
        try:
            yield resolved
        finally:
            await settled(resolved.release, always=True)

    async def report_reuse(self, report: pb.ReportReuseRequest) -> GateView:
        """Tell the server what one blended request was worth."""
        return await asyncio.to_thread(self.sync.report_reuse, report)

    async def pin(self, keys: Sequence[ChunkKey], ttl_ms: int) -> int:
        """Keep chunks from eviction for *ttl_ms*."""
        return await asyncio.to_thread(self.sync.pin, keys, ttl_ms)

    async def unpin(self, keys: Sequence[ChunkKey]) -> int:
        """End pins."""
        return await asyncio.to_thread(self.sync.unpin, keys)

    async def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Forget chunks on every tier."""
        return await asyncio.to_thread(self.sync.delete, keys)

    async def clear(self, tier: str = "", *, dry_run: bool = False) -> int:
        """Forget every chunk of this client's namespace, or the copies on *tier*."""
        return await asyncio.to_thread(self.sync.clear, tier, dry_run=dry_run)

    async def stat(self, keys: Sequence[ChunkKey], *, ranks: bool = False) -> list[pb.ChunkStat]:
        """Return what the server knows of those chunks that exist."""
        return await asyncio.to_thread(self.sync.stat, keys, ranks=ranks)

    async def list(
        self, limit: int = 0, *, after: bytes = b"", prefix: bytes = b""
    ) -> Sequence[pb.ChunkStat]:
        """Return the chunks of this client's namespace, a page of them."""
        return await asyncio.to_thread(self.sync.list, limit, after=after, prefix=prefix)

    async def frame(
        self, key: ChunkKey, *, min_accuracy: Accuracy = Accuracy.exact
    ) -> tuple[FrameHeader, bytes] | None:
        """Return a chunk's frame as it lies on a tier, all of it verified."""
        return await asyncio.to_thread(self.sync.frame, key, min_accuracy=min_accuracy)

    async def events(self, since: Place | None = None) -> AsyncGenerator[EventPage, None]:
        """Yield what the node gains and loses, read by a thread. Use with ``aclosing``."""
        async with aclosing(followed(self.sync.events(since))) as pages:
            async for page in pages:
                yield page

    async def status(self) -> pb.StatusResponse:
        """Return the server's state."""
        return await asyncio.to_thread(self.sync.status)

    async def drain(self) -> bool:
        """Have the server refuse new work and save what it holds."""
        return await asyncio.to_thread(self.sync.drain)

    async def close(self) -> None:
        """End the session and close the connection."""
        await settled(self.sync.close, always=True)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
