"""The worker side of the vLLM connector: one object per rank, loads and stores beside the engine.

One thread loads into the engine's pages, another copies and sends chunks to store. Pages in CPU
memory are copied before a step overwrites them; pages on a device are read on the engine's own
stream before a step's hooks return.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import takewhile
from typing import TYPE_CHECKING, TypeAlias

import torch

from kvstore.client.chunk import Chunk
from kvstore.client.engines.base import Connector, DaemonThreads
from kvstore.client.engines.prefix import exact_count
from kvstore.client.engines.vllm import blocks, messages
from kvstore.client.engines.vllm.identity import KVCacheShape
from kvstore.client.planning import LEAST_LEFT_S
from kvstore.proto.device import Device, Event
from kvstore.proto.errors import KVStoreError
from kvstore.proto.keys import chunk_key
from kvstore.proto.plans import Hints
from kvstore.proto.types import KVLayout, PutOutcome

if TYPE_CHECKING:
    from kvstore.client.engines.vllm.device import DeviceCopy, DeviceSide

Side: TypeAlias = "blocks.HostSide | DeviceSide"
Copy: TypeAlias = "blocks.BlockCopy | DeviceCopy"

IDLE_WAIT_S = 0.005
"""An idle step's wait for a load: it computes nothing, and would poll again at once."""
STORE_DELAY_S = 0.005
"""A store's delay before it begins: the step that filled its chunks still emits a token, and they
share the interpreter. Not between the batches of a backlog."""
SHUTDOWN_S = 5.0
"""The longest wait for stores in progress at shutdown."""
MOST_COPIES = 4096
"""Limit of chunks that wait to be stored, of any size."""
MOST_UNSTORED = 4096
"""Limit of unstored chunks in one report; beyond it the oldest are omitted."""
DEVICE_RING_BYTES = 1 << 30
"""Limit of device memory for chunks on their way to the store; also a 64th of the device's."""
QUIET_S = 0.01
"""A load without progress for so long is checked for a hung server. With the check, 20 ms at most,
and one step of the engine, a hung server costs less than 50 ms."""
AGAIN_S = 0.1
"""The interval of further checks of a load that is only slow."""


@dataclass(eq=False)
class _Save:
    """A computed chunk, and its copy once that has begun."""

    chunk: messages.ChunkName
    tables: messages.BlockTables
    hints: Hints
    copy: Copy = field(init=False)

    @cached_property
    def blocks(self) -> frozenset[int]:
        """Its blocks, cached: every step checks every waiting chunk."""
        return frozenset[int]().union(*self.tables) - {blocks.NULL_BLOCK}

    def lies_in(self, taken: frozenset[int] | None) -> bool:
        """Return whether it has any of the blocks *taken*; None: all blocks."""
        return taken is None or not self.blocks.isdisjoint(taken)


class VllmWorker:
    """Loads and stores for one rank. For the engine's thread; it has threads of its own. Until
    ``register`` succeeds, or after a ``refuse``, every load fails at once and nothing is stored."""

    def __init__(
        self,
        connector: Connector,
        shape: KVCacheShape,
        queue_bytes: int,
        device: Device | None = None,
    ) -> None:
        """*device*: the device of the pages; None: the one they state."""
        self._connector = connector
        self._clock = time.perf_counter
        self._was_short = False  # the last load was partial; for the loading thread
        self._shape = shape
        self._chunk_blocks = connector.client.options.chunk_tokens // shape.block_tokens
        self._queue_bytes = queue_bytes
        self._device = device
        self._side: Side | None = None
        self._loader, self._storer, self._watcher = (
            DaemonThreads(f"kvstore-{name}") for name in ("load", "store", "watch")
        )
        self._arrived = 0  # grows as data of a load arrives
        # Of the engine's thread: chunks whose copy has not begun, and if the last report had any.
        self._waiting: list[_Save] = []
        self._was_waiting = False
        self.cost = messages.FlopsModel()
        self.reports_stores = False
        """Whether every stored chunk is reported to the scheduler."""
        self.counted: Counter[str] = Counter()
        self._refusal = ""
        self._loading = 0
        self._storing: list[_Save] = []  # copied, or about to be; the first ones are being sent
        self._done: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failed_loads: set[str] = set()
        self._report = messages.WorkerReport()
        # Guards the eight fields above; notified when loads and stores end.
        self._changed = threading.Condition()

    def register(
        self, registered: Mapping[str, torch.Tensor], writer: Callable[[str], blocks.BlockWriter]
    ) -> str:
        """Register the engine's pages; return why they cannot be stored, or ""."""
        client = self._connector.client
        if not self._refusal:
            try:
                self._side = self._side_of(registered, writer)
            except (*messages.INCOMPATIBLE, KVStoreError, OSError) as error:
                self.refuse(f"{type(error).__name__}: {error}")
            else:  # a load detects a hung server only within a session
                opens = partial(self._connector.guard, client.send_counts, None)
                self._loader.submit(opens)
        return self._refusal

    def _side_of(
        self, registered: Mapping[str, torch.Tensor], writer: Callable[[str], blocks.BlockWriter]
    ) -> Side:
        if self._device is None and {pages.device.type for pages in registered.values()} <= {"cpu"}:
            pages = blocks.EnginePages(self._shape, registered, writer)
            return blocks.HostSide(pages, self._connector, self._chunk_blocks)
        from kvstore.client.engines.vllm.device import DeviceSide, EngineDevicePages

        on_device = EngineDevicePages(self._shape, registered, writer)
        return DeviceSide(on_device, self._connector, DEVICE_RING_BYTES, self._device)

    def drop_pages(self) -> bool:
        """Release the engine's pages until others are registered; return whether there were any."""
        side, self._side = self._side, None
        self._drop([one.chunk for one in self._waiting], "gone_chunks")
        self._waiting = []
        if side is not None and self.settled(SHUTDOWN_S):
            self._connector.guard(side.close, None)
        return side is not None

    def refuse(self, reason: str) -> None:
        """Stop loads and stores, and report *reason* to the scheduler and the server."""
        self._refusal, self._side = reason, None
        self._connector.report_refusal(reason)

    # --- loads

    def _watch(self, load: Future[None]) -> None:
        """Abort *load* if the server hangs, long before its deadline."""
        client = self._connector.client

        def watch() -> None:
            wait_s = QUIET_S
            while not load.done():
                arrived = self._arrived
                wait([load], wait_s)
                if self._arrived == arrived and not load.done():
                    self._connector.guard(client.end_if_hung, False)
                    wait_s = AGAIN_S

        self._watcher.submit(watch)

    def _note_arrival(self) -> None:
        self._arrived += 1

    def load(self, plan: messages.StepPlan) -> None:
        """Start the loads of a step."""
        if not plan.loads:
            return
        side = self._side
        after = self._connector.guard(side.mark, None) if side is not None else None
        for spec in plan.loads:
            with self._changed:
                self._loading += 1
            load = self._loader.submit(partial(self._load, spec, self._clock(), after))
            load.add_done_callback(partial(self._fail_cancelled, spec))
            self._watch(load)

    def _fail_cancelled(self, spec: messages.LoadSpec, load: Future[None]) -> None:
        """End a load that ``close`` cancelled: without pages it reads nothing."""
        if load.cancelled():
            self._load(spec, self._clock(), None)

    def _load(self, spec: messages.LoadSpec, ordered_s: float, after: Event | None) -> None:
        began, side, client = self._clock(), self._side, self._connector.client
        # After a failed load, skip those that waited past their deadline.
        within_s = client.options.deadline_ms / 1000
        is_late = self._was_short and began - ordered_s > within_s
        wanted = len(spec.digests)
        if spec.terms is not None:  # earlier loads used some of its time
            left_s = max(spec.terms.deadline_s - (began - ordered_s), LEAST_LEFT_S)
            spec = replace(spec, terms=replace(spec.terms, deadline_s=left_s))
        chunks = self._cut(spec.tables, wanted)
        is_over = lambda: self._clock() - began > within_s  # noqa: E731
        job = blocks.LoadJob(spec, chunks, after, self._note_arrival, is_over)
        if side is not None and not is_late:
            self._connector.guard(partial(side.read, job), None)
            self._was_short = max(job.read, len(job.stated)) < wanted
        with self._changed:
            self._note_loaded(job)
            self.counted["late_loads"] += is_late
            self.counted["far_gpu_loads"] += getattr(client, "is_gpu_tier_far", False)
            self.counted["load_us"] += round(1e6 * (self._clock() - began))
            self._changed.notify_all()

    def _note_loaded(self, job: blocks.LoadJob) -> None:
        """Report and count the result of a load. Called with the lock."""
        spec, report, read = job.spec, self._report, job.read
        id_, wanted = spec.request_id, len(spec.digests)
        exact = exact_count(job.stated[:read]) if job.stated else read
        gated = max(0, len(job.stated) - read)
        self._loading -= 1
        self._done.add(id_)
        if exact < read:
            report.lossy_loads[id_] = exact
        if read < wanted:
            report.short_loads[id_] = read
            report.gated_loads |= {id_} if gated else set()
            report.is_down = report.is_down or self._connector.client.is_shut
        if not spec.all_or_nothing:
            first = max(read * self._chunk_blocks, spec.kept_blocks)
            self._failed_blocks.update(spec.tables[0][first:])
        elif not wanted or read < wanted:
            self._failed_loads.add(id_)
        self.counted["loaded_chunks"] += read
        lost = "lost_chunks" if spec.terms is None else "slow_chunks"
        self.counted[lost] += wanted - read - gated

    def _cut(self, tables: messages.BlockTables, chunks: int) -> list[messages.BlockTables]:
        size = self._chunk_blocks
        return [[table[at * size : (at + 1) * size] for table in tables] for at in range(chunks)]

    def finished_loads(self, *, is_idle: bool) -> set[str]:
        """Return requests whose loads ended since the last call, successful or not.

        An *is_idle* step waits briefly for one. It has no hook for stores, so chunks waiting in
        the pages are copied here, on the engine's stream.
        """
        if is_idle:
            self._begin_copies()
        with self._changed:
            if is_idle and self._loading and not self._done:
                self._changed.wait(IDLE_WAIT_S)
            done, self._done = self._done, set()
        return done

    def failed_blocks(self) -> set[int]:
        """Return the blocks left without KV by loads that ended since the last call."""
        with self._changed:
            failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def failed_loads(self) -> set[str]:
        """Return the requests that vLLM has to recompute as a whole, not by blocks."""
        with self._changed:
            failed, self._failed_loads = self._failed_loads, set()
        return failed

    # --- stores

    def save_before_overwrite(self, plan: messages.StepPlan) -> None:
        """Copy chunks still to be stored from blocks that the step is about to overwrite."""
        taken = plan.taken_blocks
        if lost := [one for one in self._waiting if one.lies_in(taken)]:
            self._waiting = [one for one in self._waiting if not one.lies_in(taken)]
            self._drop([one.chunk for one in lost], "gone_chunks")
        if not self._storing:
            return
        with self._changed:
            storing = [*self._storing]
        for one in storing:
            if isinstance(one.copy, blocks.BlockCopy) and one.lies_in(taken):
                self._connector.guard(one.copy.run, None)

    def store(self, plan: messages.StepPlan) -> None:
        """Copy and send the step's completed chunks, as far as limits allow."""
        for spec in plan.stores:
            self._enqueue(spec)
        self._begin_copies()

    def _enqueue(self, spec: messages.SaveSpec) -> None:
        """Queue the leading chunks that fit: later ones are useless without them."""
        side, most = self._side, MOST_COPIES
        if side is None:
            self._drop(spec.chunks)
            return
        if not side.waits_in_pages:
            most = min(most, max(1, self._queue_bytes // side.chunk_bytes))
        free = max(0, most - len(self._storing) - len(self._waiting))
        self._drop(spec.chunks[free:], "dropped_chunks")
        some = spec.chunks[:free]
        pairs = zip(some, self._cut(spec.tables, len(some)), strict=True)
        self._waiting += [_Save(chunk, tables, spec.hints) for chunk, tables in pairs]

    def _begin_copies(self) -> None:
        """Copy as many waiting chunks as fit. Only within a hook."""
        side, waiting = self._side, self._waiting
        if side is None or not waiting:
            return
        chunks = [one.tables for one in waiting]
        nothing: Sequence[Copy] | None = None
        copies = self._connector.guard(lambda: side.copies(chunks), nothing)
        if copies is None:  # they would fail in the next step, too
            self._waiting = []
            self._drop([one.chunk for one in waiting], "dropped_chunks")
            return
        begun, self._waiting = waiting[: len(copies)], waiting[len(copies) :]
        for one, copy in zip(begun, copies, strict=True):
            one.copy = copy
        if begun:
            with self._changed:
                self._storing += begun
            self._storer.submit(self._send_all)

    def _drop(self, chunks: Sequence[messages.ChunkName], count: str = "") -> None:
        """Report chunks that will not be stored; count them under *count* if given."""
        with self._changed:
            self._note_unstored(chunks)
            if count:
                self.counted[count] += len(chunks)

    def _send_all(self) -> None:
        if self._storing:  # else an earlier call sent them
            time.sleep(STORE_DELAY_S)
        while batch := self._next_batch():
            try:
                self._connector.guard(partial(self._send, batch), None)
            finally:
                with self._changed:
                    del self._storing[: len(batch)]
                    self._changed.notify_all()

    def _next_batch(self) -> list[_Save]:
        """Return the next chunks to put together: of one side and hints, up to a limit."""
        with self._changed:
            if not self._storing:
                return []
            side, hints = self._storing[0].copy.side, self._storing[0].hints
            some = self._storing[: blocks.batch_chunks(side.chunk_bytes)]
        return [*takewhile(lambda one: one.copy.side is side and one.hints == hints, some)]

    def _send(self, batch: Sequence[_Save]) -> None:
        hints, copies = batch[0].hints, [one.copy for one in batch]
        named = lambda: [self._chunk(one.chunk) for one in batch]  # noqa: E731
        near = copies[0].side.put_near(named, copies, hints)
        rest = [(batch[at].chunk, copy) for at, copy in enumerate(copies) if at not in near]
        for _, copy in rest:
            self._connector.guard(copy.begin, None)
        for _, copy in rest:
            self._connector.guard(copy.run, None)
        sent = [(chunk, copy.result) for chunk, copy in rest if copy.result is not None]
        outcomes = self._connector.write_each(
            lambda: [self._chunk(chunk, result) for chunk, result in sent], hints
        )
        for copy in copies:
            copy.free()
        ended = zip(sent, outcomes, strict=False)
        held = [chunk.digest for (chunk, _), one in ended if one is not PutOutcome.refused]
        held += [batch[at].chunk.digest for at in near]
        with self._changed:
            self._note_unstored([one.chunk for one in batch if one.chunk.digest not in held])
            if self.reports_stores:
                self._report.stored |= Counter(dict.fromkeys(held, 1))  # events keep their order
            self.counted["stored_chunks"] += outcomes.count(PutOutcome.stored) + len(near)
            self.counted["gone_chunks"] += len(rest) - len(sent)

    def _note_unstored(self, chunks: Sequence[messages.ChunkName]) -> None:
        """Add chunks that will not be stored to the next report. Called with the lock."""
        unstored = self._report.unstored
        unstored.update(dict.fromkeys(chunk.digest for chunk in chunks))
        while len(unstored) > MOST_UNSTORED:
            unstored.popitem(last=False)

    def _chunk(self, named: messages.ChunkName, staged: blocks.Staged | None = None) -> Chunk:
        """Return a chunk to put; without tensors unless it is *staged*."""
        client = self._connector.client
        tokens = client.options.chunk_tokens
        has_windows = staged is None or staged.has_windows
        return Chunk(
            chunk_key(client.namespace, named.digest),
            () if staged is None else staged.tensors,
            parent=named.parent,
            position=named.position,
            prefill_flops=self.cost.of_chunk(named.position, tokens),
            content=named.content,
            layout=KVLayout.of(client.model, tokens, window=has_windows),
        )

    def settled(self, within_s: float) -> bool:
        """Wait until no load or store is in progress; return False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._loading and not self._storing, within_s)

    # --- reports

    def report(self) -> messages.WorkerReport | None:
        """Return the report since the last call; None if there is nothing to report."""
        is_waiting = bool(self._waiting) and self._side is not None
        was_waiting, self._was_waiting = self._was_waiting, is_waiting
        with self._changed:
            report, self._report = self._report, messages.WorkerReport()
        report.refusal, report.is_waiting = self._refusal, is_waiting
        return report if was_waiting or report != messages.WorkerReport() else None

    def close(self) -> None:
        """Finish work in progress, within SHUTDOWN_S, then stop the threads and the client."""
        self.drop_pages()
        for threads in (self._loader, self._storer, self._watcher):
            threads.close()
        self._connector.close()
