"""The workers' half of the vLLM connector: one object a rank, loads and stores beside the engine.

Loads go into the engine's pages, by one thread. What is to be stored is copied and sent by
another. Of pages in CPU memory, what a step is about to overwrite is copied before it; pages on a
device are read on the engine's own stream before a step's hooks return.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from queue import SimpleQueue
from typing import TypeAlias

import torch

from kvstore.client.chunk import Chunk
from kvstore.client.engines.base import Connector
from kvstore.client.engines.prefix import exact_count
from kvstore.client.engines.vllm_copies import (
    BATCH_BYTES,
    MOST_COPIES,
    Batch,
    ChunkCopy,
    Copy,
    HostSide,
    LoadWork,
    Side,
    Whole,
)
from kvstore.client.engines.vllm_cost import PrefillCost
from kvstore.client.engines.vllm_layout import NULL_BLOCK, BlockWriter, EnginePages
from kvstore.client.engines.vllm_orders import (
    MISFITS,
    BlockTables,
    LoadOrder,
    NamedChunk,
    StepOrders,
    StoreOrder,
    WorkerNews,
)
from kvstore.client.engines.vllm_refused import RefusalReporter
from kvstore.client.engines.vllm_shape import EngineShape
from kvstore.client.engines.vllm_watch import QUIET_S, LoadWatch
from kvstore.client.prefill import LEAST_LEFT_S
from kvstore.proto.device import Device, Event
from kvstore.proto.errors import KVStoreError
from kvstore.proto.keys import chunk_key
from kvstore.proto.plans import Hints
from kvstore.proto.types import ChainDigest, KVLayout, PutOutcome

IDLE_WAIT_S = 0.002
"""What an idle step waits for a load: it has nothing to compute, and would ask again at once."""

BREATH_S = 0.005
"""What a store waits before it begins: the step that filled its chunks has a token to give out,
and would share the interpreter with it. Not between the batches of a backlog."""

SHUTDOWN_S = 5.0
"""What the end of an engine waits for stores that are under way."""

MOST_UNSTORED = 4096
"""Chunks of one message that were not stored; of more, the first are left out."""

DEVICE_RING_BYTES = 1 << 30
"""Device memory for what steps completed and is on its way to the store: so much, or a 64th."""

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


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A chunk that the engine has computed, and of which no copy was begun yet."""

    chunk: NamedChunk
    tables: BlockTables
    hints: Hints
    blocks: frozenset[int]
    """Where it lies."""

    @classmethod
    def of(cls, chunk: NamedChunk, tables: BlockTables, hints: Hints) -> _Waiting:
        """Return *chunk* as it lies in the blocks of *tables*."""
        return cls(chunk, tables, hints, frozenset().union(*tables) - {NULL_BLOCK})


def _batches(begun: Sequence[tuple[_Waiting, Copy]], most: int) -> Iterator[Batch]:
    """Yield what is put together: copies with the same hints, so many at most."""
    for hints, some in groupby(begun, lambda one: one[0].hints):
        pairs = list(some)
        for at in range(0, len(pairs), most):
            cut = pairs[at : at + most]
            yield Batch([waiting.chunk for waiting, _ in cut], [copy for _, copy in cut], hints)


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
        device: Device | None = None,
    ) -> None:
        """*device*: where pages lie; None: where they say."""
        self._connector = connector
        self._clock = clock
        self._was_short = False
        """Whether the last load came short. For the thread that loads."""
        self._shape = shape
        self._chunk_blocks = connector.client.options.chunk_tokens // shape.block_tokens
        self._queue_bytes = queue_bytes
        self._device = device
        self._side: Side | None = None
        self._loader, self._storer = WorkThread("kvstore-load"), WorkThread("kvstore-store")
        self._opener, self._opened = WorkThread("kvstore-connect"), threading.Event()
        self._opened.set()
        self._watch = LoadWatch(lambda: connector.ask(connector.client.end_if_hung, False))
        self._is_down = False
        self._loading = 0
        self._storing: list[Copy] = []
        self._waiting: deque[_Waiting] = deque()
        """Chunks that no copy was begun of yet. For the engine's thread."""
        self._unsent: deque[Batch] = deque()
        """Bounded as ``_storing`` is."""
        self._is_behind = False
        """Whether more waited when a batch had been sent. For the thread that stores."""
        self.counted: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self._said_waiting = False
        """Whether the last news said that chunks wait. For the engine's thread."""
        self._done: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failed_loads: set[str] = set()
        self._short_loads: dict[str, int] = {}
        self._lossy_loads: dict[str, int] = {}
        self._gated_loads: set[str] = set()
        self._refusal = ""
        self._reporter: RefusalReporter | None = None
        self.cost = PrefillCost()
        self.tells_stores = False
        """Whether the scheduler is to learn of every chunk that is stored."""
        self._stored: list[ChainDigest] = []
        self._unstored: OrderedDict[ChainDigest, None] = OrderedDict()
        # Guards the fields above but for the threads; its waiters wait for a load to end.
        self._news = threading.Condition()

    def register(
        self, registered: Mapping[str, torch.Tensor], writer: Callable[[str], BlockWriter]
    ) -> str:
        """Take the engine's pages; return why they cannot be stored, or nothing.

        A session is opened meanwhile: a load that has one notices when the server hangs.
        """
        try:
            self._side = self._side_of(registered, writer)
        except (*MISFITS, KVStoreError, OSError) as error:
            self.refuse(f"{type(error).__name__}: {error}")
        if self._refusal:
            self._report_refusal()
        else:
            self._begin_session()
        return self._refusal

    def _report_refusal(self) -> None:
        if self._reporter is None:
            connector = self._connector
            self._reporter = RefusalReporter(connector.client, self._refusal, connector.counts)

    def _begin_session(self) -> None:
        with self._news:
            if self._opened.is_set():
                self._opened.clear()
                self._opener.do(self._open_session)

    def _open_session(self) -> None:
        self._connector.ask(self._connector.client.send_counts, None)
        self._opened.set()

    def _await_session(self) -> bool:
        """Whether there is a session; one that is being opened is waited for, not a hang."""
        client = self._connector.client
        if client.is_connected:
            return True
        self._begin_session()
        while not self._opened.wait(QUIET_S):
            if client.is_shut or self._connector.ask(client.end_if_hung, True):
                return False
        return client.is_connected

    def _side_of(
        self, registered: Mapping[str, torch.Tensor], writer: Callable[[str], BlockWriter]
    ) -> Side:
        kinds = {pages.device.type for pages in registered.values()}
        if self._device is None and kinds <= {"cpu"}:
            pages = EnginePages.of(self._shape, registered, writer)
            return HostSide(pages, self._connector, self._chunk_blocks)
        from kvstore.client.engines.vllm_device import DeviceSide, EngineDevicePages

        on_device = EngineDevicePages(self._shape, registered, writer)
        return DeviceSide(on_device, self._connector, DEVICE_RING_BYTES, self._device)

    def drop_pages(self) -> bool:
        """Let go of the engine's pages once nobody uses them; return whether there were any.

        Loads fail and nothing is stored until pages are registered again.
        """
        side, self._side = self._side, None
        lost, self._waiting = [*self._waiting], deque()
        self._note_gone(lost, "gone_chunks")
        if side is not None and self.settled(SHUTDOWN_S):
            self._connector.ask(side.close, None)
        return side is not None

    def refuse(self, reason: str) -> None:
        """Neither load nor store from now on, and have the scheduler told."""
        with self._news:
            self._refusal = reason

    @property
    def _usable(self) -> Side | None:
        return None if self._refusal else self._side

    # --- loads

    def load(self, orders: StepOrders) -> None:
        """Begin the loads of a step."""
        if not orders.loads:
            return
        after, side = None, self._usable
        if side is not None:
            after = self._connector.ask(side.mark, None)
        for order in orders.loads:
            with self._news:
                self._loading += 1
            self._loader.do(partial(self._load, order, self._clock(), after))

    def _load(self, order: LoadOrder, ordered_s: float, after: Event | None) -> None:
        began, side = self._clock(), self._usable
        # Loads that fail one after another would have those behind them wait for each.
        within_s = self._connector.client.options.deadline_ms / 1000
        is_late = self._was_short and began - ordered_s > within_s
        read = exact = gated = 0
        terms = order.terms
        if terms is not None:  # loads before it took some of its time
            left_s = max(terms.deadline_s - (began - ordered_s), LEAST_LEFT_S)
            terms = replace(terms, deadline_s=left_s)
        if side and not is_late:
            work = LoadWork(
                order.digests,
                self._cut(order.tables, len(order.digests)),
                order.kept_blocks,
                after,
                self._watch.note_arrival,
                lambda: self._clock() - began > within_s,
                terms=terms,
            )
            read = self._connector.ask(lambda: self._read(side, work), 0)
            exact = exact_count(work.stated[:read]) if work.stated else read
            gated = max(0, len(work.stated) - read)
            self._was_short = read + gated < len(order.digests)
        with self._news:
            self._loading -= 1
            self._done.add(order.request_id)
            if exact < read:
                self._lossy_loads[order.request_id] = exact
            if read < len(order.digests):
                self._short_loads[order.request_id] = read
                self._gated_loads |= {order.request_id} if gated else set()
                self._is_down = self._is_down or self._connector.client.is_shut
            if not order.all_or_nothing:
                self._failed_blocks.update(order.blocks_from(read * self._chunk_blocks))
            elif not order.digests or read < len(order.digests):
                self._failed_loads.add(order.request_id)
            self.counted["loaded_chunks"] += read
            short = "lost_chunks" if order.terms is None else "slow_chunks"
            self.counted[short] += len(order.digests) - read - gated
            self.counted["late_loads"] += is_late
            self.counted["far_gpu_loads"] += side is not None and side.is_gpu_tier_far
            self.counted["load_us"] += round(1e6 * (self._clock() - began))
            self._news.notify_all()

    def _read(self, side: Side, work: LoadWork) -> int:
        if not self._await_session():
            return 0
        with self._watch.over():
            return side.read(work)

    def _cut(self, tables: BlockTables, chunks: int) -> list[BlockTables]:
        """Return what *tables* have of each of so many chunks."""
        size = self._chunk_blocks
        return [
            [table[number * size : (number + 1) * size] for table in tables]
            for number in range(chunks)
        ]

    def finished_loads(self, *, is_idle: bool) -> set[str]:
        """Return requests whose loads ended since the last call, well or not.

        An *is_idle* step waits a moment for one. It has no hook for stores, and copies here what
        waits in its pages: on the engine's stream, as they are.
        """
        side = self._usable
        if is_idle and side is not None:
            self._begin_copies(side)
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
        taken = orders.taken_blocks
        lost = [one for one in self._waiting if taken is None or not taken.isdisjoint(one.blocks)]
        if lost:
            gone = set(lost)
            self._waiting = deque(one for one in self._waiting if one not in gone)
            self._note_gone(lost, "gone_chunks")
        if not self._storing:
            return
        with self._news:
            copies = [one for one in self._storing if isinstance(one, ChunkCopy)]
        for copy in copies:
            if copy.lies_in(taken):
                self._connector.ask(copy.make, None)

    def store(self, orders: StepOrders) -> None:
        """Have what the step completed copied and sent, as far as there is room for it."""
        side = self._usable
        if side is None:
            with self._news:
                for order in orders.stores:
                    self._note_unstored(order.chunks)
            return
        for order in orders.stores:
            self._await_room(side, order)
        self._begin_copies(side)

    def _begin_copies(self, side: Side) -> None:
        """Copy what waits, as much of it as there is room for. Within a hook alone."""
        if not self._waiting:
            return
        chunks = [one.tables for one in self._waiting]
        copies = self._connector.ask(lambda: side.copies(chunks), None)
        if copies is None:  # it will not be there for the next step either
            lost, self._waiting = [*self._waiting], deque()
            self._note_gone(lost, "dropped_chunks")
            return
        begun = [(self._waiting.popleft(), copy) for copy in copies]
        with self._news:
            self._storing += copies
            for batch in _batches(begun, max(1, BATCH_BYTES // side.chunk_bytes)):
                self._unsent.append(batch)
                self._storer.do(partial(self._send_next, side))

    def _await_room(self, side: Side, order: StoreOrder) -> None:
        """Line up the chunks of an order, the first ones: later ones are of no use without them."""
        most = MOST_COPIES
        if not side.waits_in_pages:
            most = min(most, max(1, self._queue_bytes // side.chunk_bytes))
        with self._news:
            room = max(0, most - len(self._storing) - len(self._waiting))
            dropped = order.chunks[room:]
            self.counted["dropped_chunks"] += len(dropped)
            self._note_unstored(dropped)
        cut = self._cut(order.tables, len(order.chunks) - len(dropped))
        pairs = zip(order.chunks, cut, strict=False)
        self._waiting += [_Waiting.of(chunk, tables, order.hints) for chunk, tables in pairs]

    def _note_gone(self, lost: Sequence[_Waiting], count: str) -> None:
        with self._news:
            self.counted[count] += len(lost)
            self._note_unstored([one.chunk for one in lost])

    def _send_next(self, side: Side) -> None:
        """Send what waits, as much of it as goes into one batch."""
        if not self._unsent:
            return  # it went with what was before it
        if not self._is_behind:
            time.sleep(BREATH_S)
        with self._news:
            batch = self._unsent.popleft()
            while self._unsent and (more := batch.joined(self._unsent[0], side.chunk_bytes)):
                batch = more
                self._unsent.popleft()
        self._send(side, batch)
        self._is_behind = bool(self._unsent)

    def _send(self, side: Side, batch: Batch) -> None:
        chunks, copies, hints = batch.chunks, batch.copies, batch.hints
        near = side.put_near(lambda: [self._chunk(chunk) for chunk in chunks], copies, hints)
        rest = [pair for at, pair in enumerate(zip(chunks, copies, strict=True)) if at not in near]
        for _, copy in rest:
            self._connector.ask(copy.begin, None)
        for _, copy in rest:
            self._connector.ask(copy.make, None)
        sent = [(chunk, copy.whole) for chunk, copy in rest if copy.whole is not None]
        outcomes = self._connector.write_each(
            lambda: [self._chunk(chunk, whole) for chunk, whole in sent], hints
        )
        for copy in copies:
            copy.free()
        told = zip(sent, outcomes, strict=False)
        held = [chunk.digest for (chunk, _), one in told if one is not PutOutcome.refused]
        held += [chunks[at].digest for at in near]
        with self._news:
            self._note_unstored([chunk for chunk in chunks if chunk.digest not in held])
            self._stored += held if self.tells_stores else ()
            over = set(copies)
            self._storing = [one for one in self._storing if one not in over]
            self.counted["stored_chunks"] += outcomes.count(PutOutcome.stored) + len(near)
            self.counted["gone_chunks"] += len(rest) - len(sent)
            self._news.notify_all()

    def _note_unstored(self, chunks: Sequence[NamedChunk]) -> None:
        """Put chunks that will not come into the next news. Called with the lock."""
        self._unstored.update(dict.fromkeys(chunk.digest for chunk in chunks))
        while len(self._unstored) > MOST_UNSTORED:
            self._unstored.popitem(last=False)

    def _chunk(self, named: NamedChunk, whole: Whole | None = None) -> Chunk:
        """Return a chunk to put; without its tensors where *whole* is None."""
        client = self._connector.client
        tokens = client.options.chunk_tokens
        has_windows = whole is None or whole.has_windows
        return Chunk(
            chunk_key(client.namespace, named.digest),
            () if whole is None else whole.tensors,
            named.parent,
            position=named.position,
            prefill_flops=self.cost.of_chunk(named.position, tokens),
            content=named.content,
            layout=KVLayout.of(client.model, tokens, window=has_windows),
        )

    def settled(self, within_s: float) -> bool:
        """Wait until nothing is being loaded or stored; return whether that is so."""
        with self._news:
            return self._news.wait_for(lambda: not self._loading and not self._storing, within_s)

    # --- news

    def news(self) -> WorkerNews | None:
        """Return what the scheduler has to learn, if anything happened since the last call."""
        is_waiting = bool(self._waiting) and self._usable is not None
        was_waiting, self._said_waiting = self._said_waiting, is_waiting
        with self._news:
            short, self._short_loads = self._short_loads, {}
            lossy, self._lossy_loads = self._lossy_loads, {}
            gated, self._gated_loads = frozenset(self._gated_loads), set()
            stored, self._stored = self._stored, []
            unstored, self._unstored = tuple(self._unstored), OrderedDict()
            refusal = self._refusal
            is_down, self._is_down = self._is_down, False
        told = dict.fromkeys(stored, 1)
        news = WorkerNews(short, refusal, is_down, unstored, told, is_waiting, lossy, gated)
        # Gated loads are among the short ones.
        said = (short, refusal, is_down, unstored, stored, is_waiting, was_waiting, lossy)
        return news if any(said) else None

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
        threads = (self._loader, self._storer, self._opener)
        is_over = [thread.stop(SHUTDOWN_S) for thread in threads]
        side, self._side = self._side, None
        if all(is_over) and side is not None:
            self._connector.ask(side.close, None)
        if self._reporter is not None:
            self._reporter.close()
        self._connector.client.close()
