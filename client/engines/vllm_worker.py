"""The workers' half of the vLLM connector: one object a rank, loads and stores beside the engine.

Loads go straight into the engine's pages, by one thread. What is to be stored is copied and sent
by another; what a step is about to overwrite is copied before it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

import torch

from kvstore.client.chunk import Chunk
from kvstore.client.engines.base import Connector
from kvstore.client.engines.vllm_copies import MOST_COPIES, Batch, ChunkCopy, CopyPool
from kvstore.client.engines.vllm_cost import PrefillCost
from kvstore.client.engines.vllm_layout import BlockWriter, EnginePages
from kvstore.client.engines.vllm_orders import (
    MISFITS,
    BlockTables,
    LoadOrder,
    NamedChunk,
    StepOrders,
    StoreOrder,
    WorkerNews,
)
from kvstore.client.engines.vllm_page_copy import PageCopy
from kvstore.client.engines.vllm_room import ChunkRoom
from kvstore.client.engines.vllm_shape import EngineShape
from kvstore.client.engines.vllm_watch import LoadWatch
from kvstore.codecs.base import AnyTensors
from kvstore.proto.errors import KVStoreError
from kvstore.proto.hints import Hints
from kvstore.proto.keys import chunk_key
from kvstore.proto.types import ChainDigest, KVLayout, PutOutcome

IDLE_WAIT_S = 0.002
"""What an idle step waits for a load: it has nothing to compute, and would ask again at once."""

BREATH_S = 0.005
"""What a store waits before it begins: the step that filled its chunks has a token to give out,
and would share the interpreter with it."""

SHUTDOWN_S = 5.0
"""What the end of an engine waits for stores that are under way."""

_Work: TypeAlias = Callable[[], None]


class WorkThread:
    """Does work in turn, in a thread that starts with the first of it. For one user."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def do(self, work: _Work) -> None:
        """Have *work* done after all that was given before; it must not raise."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._work.put(work)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def stop(self, within_s: float) -> bool:
        """End the thread once it is through with its work, waiting *within_s* for that.

        Return whether it has ended.
        """
        if self._thread is None:
            return True
        self._work.put(None)
        self._thread.join(within_s)
        return not self._thread.is_alive()


class VllmWorker:
    """Loads and stores for one rank. For the engine's thread; its own threads stay inside.

    Until ``register`` found out how pages are packed, and after it could not, every load is
    failed at once and nothing is stored.
    """

    def __init__(
        self,
        connector: Connector,
        shape: EngineShape,
        queue_bytes: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._connector = connector
        self._clock = clock
        self._was_short = False
        """Whether the last load came short. For the thread that loads."""
        self._shape = shape
        self._chunk_blocks = connector.client.options.chunk_tokens // shape.block_tokens
        self._queue_bytes = queue_bytes
        self._pages: EnginePages | None = None
        self._loader, self._storer = WorkThread("kvstore-load"), WorkThread("kvstore-store")
        self._watch = LoadWatch(lambda: connector.ask(connector.client.end_if_hung, False))
        self._is_down = False
        self._loading = 0
        self._pool: CopyPool | None = None
        self._storing: list[ChunkCopy] = []
        self._unsent: deque[Batch] = deque()
        """Bounded as ``_storing`` is."""
        self.counted: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self._done: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failed_loads: set[str] = set()
        self._short_loads: dict[str, int] = {}
        self._refusal = ""
        self.cost = PrefillCost()
        self.tells_stores = False
        """Whether the scheduler is to learn of every chunk that is stored."""
        self._stored: list[ChainDigest] = []
        self._unstored: list[ChainDigest] = []
        # Guards the fields above but for the threads; its waiters wait for a load to end.
        self._news = threading.Condition()

    def register(
        self, registered: Mapping[str, torch.Tensor], writer: Callable[[str], BlockWriter]
    ) -> str:
        """Take the engine's pages; return why they cannot be stored, or nothing."""
        try:
            self._pages = EnginePages.of(self._shape, registered, writer)
            self._pool = CopyPool(self._pages, self._chunk_blocks)
        except (*MISFITS, KVStoreError) as error:
            self.refuse(f"{type(error).__name__}: {error}")
        return self._refusal

    def drop_pages(self) -> bool:
        """Let go of the engine's pages once nobody uses them; return whether there were any.

        Loads fail and nothing is stored until pages are registered again.
        """
        (pages, pool), self._pages, self._pool = (self._pages, self._pool), None, None
        if self.settled(SHUTDOWN_S) and pool is not None:
            pool.close()
        return pages is not None

    def refuse(self, reason: str) -> None:
        """Neither load nor store from now on, and have the scheduler told."""
        self._pages = None
        with self._news:
            self._refusal = reason

    # --- loads

    def load(self, orders: StepOrders) -> None:
        """Begin the loads of a step."""
        for order in orders.loads:
            with self._news:
                self._loading += 1
            self._loader.do(partial(self._load, order, self._clock()))

    def _load(self, order: LoadOrder, ordered_s: float) -> None:
        began, pages = self._clock(), self._pages
        # Loads that fail one after another would have those behind them wait for each.
        waited_ms = 1000 * (began - ordered_s)
        is_late = self._was_short and waited_ms > self._connector.client.options.deadline_ms
        read = 0
        if pages and not is_late:
            read = self._connector.ask(lambda: self._read(pages, order), 0)
            self._was_short = read < len(order.digests)
        with self._news:
            self._loading -= 1
            self._done.add(order.request_id)
            if read < len(order.digests):
                self._short_loads[order.request_id] = read
                self._is_down = self._is_down or self._connector.client.is_shut
            if not order.all_or_nothing:
                self._failed_blocks.update(order.blocks_from(read * self._chunk_blocks))
            elif not order.digests or read < len(order.digests):
                self._failed_loads.add(order.request_id)
            self.counted["loaded_chunks"] += read
            self.counted["lost_chunks"] += len(order.digests) - read
            self.counted["late_loads"] += is_late
            self.counted["load_us"] += round(1e6 * (self._clock() - began))
            self._news.notify_all()

    def _read(self, pages: EnginePages, order: LoadOrder) -> int:
        rooms = [
            ChunkRoom(pages, tables, 0 if number else order.kept_blocks)
            for number, tables in enumerate(self._cut(order.tables, len(order.digests)))
        ]
        if not rooms:
            return 0

        def room(number: int, layout: KVLayout) -> AnyTensors:
            self._watch.note_arrival()
            return rooms[number].tensors(layout)

        with self._watch.over():
            read = self._connector.read_into(order.digests, room)
        for one in rooms[:read]:
            one.settle()
        return read

    def _cut(self, tables: BlockTables, chunks: int) -> list[BlockTables]:
        """Return what *tables* have of each of so many chunks."""
        size = self._chunk_blocks
        return [
            [table[number * size : (number + 1) * size] for table in tables]
            for number in range(chunks)
        ]

    def finished_loads(self, *, is_idle: bool) -> set[str]:
        """Return requests whose loads ended since the last call, well or not.

        An *is_idle* step waits a moment for one.
        """
        with self._news:
            if is_idle and self._loading and not self._done:
                self._news.wait(IDLE_WAIT_S)
            done, self._done = self._done, set()
        return done

    def failed_blocks(self) -> set[int]:
        """Return the blocks that the loads ended since the last call left without KV."""
        with self._news:
            failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def failed_loads(self) -> set[str]:
        """Return the requests of which vLLM has to compute all, where blocks are not enough."""
        with self._news:
            failed, self._failed_loads = self._failed_loads, set()
        return failed

    # --- stores

    def begin(self, orders: StepOrders) -> None:
        """Copy what is still to be stored of blocks that the step is about to write to."""
        if not self._storing:
            return
        with self._news:
            taken = [one for one in self._storing if one.lies_in(orders.taken_blocks)]
        for one in taken:
            self._connector.ask(one.make, None)

    def store(self, orders: StepOrders) -> None:
        """Have what the step completed copied and sent, as far as there is room for it."""
        if self._pages is not None and self._pool is not None:
            for order in orders.stores:
                self._store(self._pool, order)

    def _store(self, pool: CopyPool, order: StoreOrder) -> None:
        most = min(MOST_COPIES, max(1, self._queue_bytes // pool.chunk_bytes))
        with self._news:
            # The first ones: later ones are of no use without them.
            chunks = order.chunks[: max(0, most - len(self._storing))]
            self.counted["dropped_chunks"] += len(order.chunks) - len(chunks)
            self._note_unstored(order.chunks[len(chunks) :], order.hints)
            copies = [ChunkCopy(pool, tables) for tables in self._cut(order.tables, len(chunks))]
            self._storing += copies
            if chunks:
                self._unsent.append(Batch(chunks, copies, order.hints))
        if chunks:
            self._storer.do(partial(self._send_next, pool))

    def _send_next(self, pool: CopyPool) -> None:
        """Send what waits, as much of it as goes into one batch."""
        if not self._unsent:
            return  # it went with what was before it
        time.sleep(BREATH_S)
        with self._news:
            batch = self._unsent.popleft()
            while self._unsent and (more := batch.joined(self._unsent[0], pool.chunk_bytes)):
                batch = more
                self._unsent.popleft()
        self._send(batch)

    def _send(self, batch: Batch) -> None:
        chunks, copies, hints = batch.chunks, batch.copies, batch.hints
        for copy in copies:
            self._connector.ask(copy.make, None)
        whole = [(chunk, copy.whole) for chunk, copy in zip(chunks, copies, strict=True)]
        sent = [(chunk, copied) for chunk, copied in whole if copied is not None]
        outcomes = self._connector.write_each(lambda: self._chunks(sent), hints)
        for copy in copies:
            copy.free()
        told = zip(sent, outcomes, strict=False)
        held = [chunk.digest for (chunk, _), one in told if one is not PutOutcome.refused]
        with self._news:
            self._note_unstored([chunk for chunk in chunks if chunk.digest not in held], hints)
            self._stored += held if self.tells_stores else ()
            over = set(copies)
            self._storing = [one for one in self._storing if one not in over]
            self.counted["stored_chunks"] += outcomes.count(PutOutcome.stored)
            self.counted["gone_chunks"] += len(chunks) - len(sent)
            self._news.notify_all()

    def _note_unstored(self, chunks: Sequence[NamedChunk], hints: Hints) -> None:
        """Have those told who wait for chunks that will not come. Called with the lock."""
        if hints.handover_ms:
            self._unstored += [chunk.digest for chunk in chunks]

    def _chunks(self, copies: Sequence[tuple[NamedChunk, PageCopy]]) -> list[Chunk]:
        client = self._connector.client
        space, tokens = client.namespace, client.options.chunk_tokens
        return [
            Chunk(
                chunk_key(space, named.digest),
                copied.tensors,
                named.parent,
                position=named.position,
                prefill_flops=self.cost.of_chunk(named.position, tokens),
                content=named.content,
                layout=KVLayout.of(client.representation, tokens, window=copied.has_windows),
            )
            for named, copied in copies
        ]

    def settled(self, within_s: float) -> bool:
        """Wait until nothing is being loaded or stored; return whether that is so."""
        with self._news:
            return self._news.wait_for(lambda: not self._loading and not self._storing, within_s)

    # --- news

    def news(self) -> WorkerNews | None:
        """Return what the scheduler has to learn, if anything happened since the last call."""
        with self._news:
            short, self._short_loads = self._short_loads, {}
            stored, self._stored = self._stored, []
            unstored, self._unstored = tuple(self._unstored), []
            refusal = self._refusal
            is_down, self._is_down = self._is_down, False
        news = WorkerNews(short, refusal, is_down, unstored, dict.fromkeys(stored, 1))
        return news if any((short, refusal, is_down, unstored, stored)) else None

    def counts(self) -> dict[str, int]:
        """Return what was counted since the last call; ``counted`` has all of it."""
        with self._news:
            new = self.counted - self._reported
            self._reported = self.counted.copy()
        return dict(new)

    def close(self) -> None:
        """End the threads, once they are through with what they have, and the client."""
        self.settled(SHUTDOWN_S)
        self._watch.close()
        self._loader.stop(SHUTDOWN_S)
        if self._storer.stop(SHUTDOWN_S) and self._pool is not None:
            self._pool.close()
        self._connector.client.close()
