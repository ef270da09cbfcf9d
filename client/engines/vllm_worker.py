"""The workers' half of the vLLM connector: one object a rank, loads and stores beside the engine.

Loads go straight into the engine's pages, by one thread. What is to be stored is copied at the
end of the step that filled it, as its blocks may be another request's in the next; another
thread sends the copies.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

import torch

from kvstore.client.chunk import Chunk
from kvstore.client.engines.base import Connector
from kvstore.client.engines.vllm_identity import EngineShape
from kvstore.client.engines.vllm_layout import BlockWriter, EnginePages, PageCopy
from kvstore.client.engines.vllm_orders import (
    LoadOrder,
    NamedChunk,
    StepOrders,
    StoreOrder,
    WorkerNews,
)
from kvstore.proto.errors import KVStoreError
from kvstore.proto.keys import chunk_key
from kvstore.proto.types import Representation

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

    def stop(self, within_s: float) -> None:
        """End the thread once it is through with its work, waiting *within_s* for that."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(within_s)


class VllmWorker:
    """Loads and stores for one rank. For the engine's thread; its own threads stay inside.

    Until ``register`` found out how pages are packed, and after it could not, every load is
    failed at once and nothing is stored.
    """

    def __init__(self, connector: Connector, shape: EngineShape, queue_bytes: int) -> None:
        self._connector = connector
        self._shape = shape
        self._chunk_blocks = connector.client.options.chunk_tokens // shape.block_tokens
        self._queue_bytes = queue_bytes
        self._pages: EnginePages | None = None
        self._loader, self._storer = WorkThread("kvstore-load"), WorkThread("kvstore-store")
        self._loading = 0
        self._storing = 0
        self._copies: list[PageCopy] = []
        self.counted: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self._done: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._short_loads: dict[str, int] = {}
        self._refusal = ""
        # Guards the fields above but for the threads; its waiters wait for a load to end.
        self._news = threading.Condition()

    def register(self, registered: Mapping[str, torch.Tensor], write: BlockWriter) -> str:
        """Take the engine's pages; return why they cannot be stored, or nothing."""
        representation: Representation = self._connector.client.representation
        try:
            self._pages = EnginePages.of(representation, self._shape, registered, write)
        except KVStoreError as error:
            self.refuse(str(error))
        return self._refusal

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
            self._loader.do(partial(self._load, order))

    def _load(self, order: LoadOrder) -> None:
        began = time.perf_counter()
        pages = self._pages
        read = self._connector.ask(lambda: self._read(pages, order), 0) if pages else 0
        first_bad = max(read * self._chunk_blocks, order.kept_blocks)
        with self._news:
            self._loading -= 1
            self._done.add(order.request_id)
            self._failed_blocks.update(order.block_ids[first_bad:])
            if read < len(order.digests):
                self._short_loads[order.request_id] = read
            self.counted["loaded_chunks"] += read
            self.counted["lost_chunks"] += len(order.digests) - read
            self.counted["load_us"] += round(1e6 * (time.perf_counter() - began))
            self._news.notify_all()

    def _read(self, pages: EnginePages, order: LoadOrder) -> int:
        size, kept = self._chunk_blocks, order.kept_blocks
        rooms = [
            order.block_ids[number * size : (number + 1) * size]
            for number in range(len(order.digests))
        ]
        if not rooms:
            return 0
        beside = PageCopy(pages, size) if kept else None
        out = [pages.room(ids) for ids in rooms]
        if beside is not None:
            out[0] = beside.tensors
        read = self._connector.read(order.digests, out)
        if beside is not None and read:
            beside.give(rooms[0][kept:], kept)
        return read

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

    # --- stores

    def store(self, orders: StepOrders) -> None:
        """Copy what is to be stored, as far as there is room for it, and have it sent."""
        if self._pages is not None:
            for order in orders.stores:
                self._store(self._pages, order)

    def _store(self, pages: EnginePages, order: StoreOrder) -> None:
        size = self._chunk_blocks
        most = max(1, self._queue_bytes // (size * pages.block_bytes))
        with self._news:
            # The first ones: later ones are of no use without them.
            chunks = order.chunks[: most - self._storing]
            self.counted["dropped_chunks"] += len(order.chunks) - len(chunks)
            self._storing += len(chunks)
            copies = [self._copies.pop() for _ in chunks[: len(self._copies)]]
        copies += [PageCopy(pages, size) for _ in chunks[len(copies) :]]
        for number, copied in enumerate(copies):
            copied.take(order.block_ids[number * size : (number + 1) * size])
        if chunks:
            self._storer.do(partial(self._send, chunks, copies))

    def _send(self, chunks: Sequence[NamedChunk], copies: Sequence[PageCopy]) -> None:
        time.sleep(BREATH_S)
        new = self._connector.write(lambda: self._chunks(chunks, copies))
        with self._news:
            self._storing -= len(chunks)
            self._copies += copies
            self.counted["stored_chunks"] += new
            self._news.notify_all()

    def _chunks(self, chunks: Sequence[NamedChunk], copies: Sequence[PageCopy]) -> list[Chunk]:
        space = self._connector.client.namespace
        return [
            Chunk(
                chunk_key(space, named.digest),
                copied.tensors,
                named.parent,
                position=named.position,
                content=named.content,
            )
            for named, copied in zip(chunks, copies, strict=True)
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
            refusal = self._refusal
        return WorkerNews(short, refusal) if short or refusal else None

    def counts(self) -> dict[str, int]:
        """Return what was counted since the last call; ``counted`` has all of it."""
        with self._news:
            new = self.counted - self._reported
            self._reported = self.counted.copy()
        return dict(new)

    def close(self) -> None:
        """End the threads, once they are through with what they have, and the client."""
        self.settled(SHUTDOWN_S)
        self._loader.stop(SHUTDOWN_S)
        self._storer.stop(SHUTDOWN_S)
        self._connector.client.close()


class RefusedWorker:
    """What stands in for a rank whose KV has no name: it fails every load and stores nothing.

    The scheduler, which may be on another host, learns of it with the first step.
    """

    def __init__(self, reason: str) -> None:
        self._refusal = reason
        self._loads: list[LoadOrder] = []
        self._failed_blocks: set[int] = set()

    def register(self, registered: Mapping[str, torch.Tensor], write: BlockWriter) -> str:
        """Return why there is no use for pages."""
        return self._refusal

    def load(self, orders: StepOrders) -> None:
        """Fail the loads of a step."""
        self._loads += orders.loads
        for order in orders.loads:
            self._failed_blocks.update(order.block_ids[order.kept_blocks :])

    def store(self, orders: StepOrders) -> None:
        """Store nothing."""

    def finished_loads(self, *, is_idle: bool) -> set[str]:
        """Return the requests whose loads failed since the last call."""
        loads, self._loads = self._loads, []
        return {order.request_id for order in loads}

    def failed_blocks(self) -> set[int]:
        """Return the blocks that they left without KV."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def news(self) -> WorkerNews:
        """Return the reason."""
        return WorkerNews(refusal=self._refusal)

    def counts(self) -> dict[str, int]:
        """Return no counts."""
        return {}

    def close(self) -> None:
        """Do nothing."""
