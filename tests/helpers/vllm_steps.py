"""Both halves of the vLLM connector, stepped as vLLM steps them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, TypeAlias

from helpers.local_server import DEADLINE_MS, eventually
from helpers.slow_device import SlowDevice
from helpers.vllm_pages import (
    BLOCK_TOKENS,
    BLOCKS,
    CHUNK_TOKENS,
    SHAPE,
    Tables,
    compute,
    empty_pages,
    holds,
    pages_of_rank,
    representation,
    shape_of_rank,
    tables_of,
    writer,
)
from helpers.vllm_stand_ins import FakeRequest, step

from kvstore.client import Client, ClientOptions
from kvstore.client.chunk import Shard
from kvstore.client.engines.base import Connector
from kvstore.client.engines.vllm.blocks import BLOCK_LAYOUTS, BlockLayout
from kvstore.client.engines.vllm.identity import KVCacheShape
from kvstore.client.engines.vllm.messages import BOTH, Role, StepPlan, WorkerReport
from kvstore.client.engines.vllm.scheduler import VllmScheduler
from kvstore.client.engines.vllm.worker import VllmWorker
from kvstore.proto.types import LayerKind, Model

Blocks: TypeAlias = "Sequence[int] | Tables"
"""Block ids of one table, or of several."""

QUEUE_BYTES = 64 << 20


def options(retry_after_ms: int = 1) -> ClientOptions:
    return ClientOptions(
        chunk_tokens=CHUNK_TOKENS, deadline_ms=DEADLINE_MS, retry_after_ms=retry_after_ms
    )


def positions(plan: StepPlan) -> list[int]:
    return [chunk.position for spec in plan.stores for chunk in spec.chunks]


class Engine:
    """vLLM around the connector: blocks, steps, and a forward pass derived from tokens.
    *ranks*: of a parallel engine, each with its layers and heads of the pages."""

    def __init__(
        self, address: str, identity: Model | None = None, packing: BlockLayout = BLOCK_LAYOUTS[0],
        queue_bytes: int = QUEUE_BYTES, opts: ClientOptions | None = None, role: Role = BOTH,
        shape: KVCacheShape = SHAPE, ranks: Sequence[Shard | None] = (None,),
        device: SlowDevice | None = None, client: type[Client] = Client, zeroes: bool = False,
        accuracy: str = "exact",
    ) -> None:  # fmt: skip
        """*device*: has the pages and runs the forward pass with a delay. *zeroes*: new blocks are
        zeroed before ``handle_preemptions``, as in vLLM's V2 runner."""
        opts = opts or options()
        self.shape = shape
        self.device, self._zeroes = device, zeroes
        self.packing = packing
        identity = identity or representation(shape=shape)
        lookups = Connector(Client(address, identity, opts), accuracy=accuracy)
        self.scheduler = VllmScheduler(lookups, shape, role=role)
        self.workers: list[Any] = []
        self.pages = [empty_pages(shape=shape)] * len(ranks)
        for rank, pages in zip(ranks, self.pages, strict=True):
            own_client = client(address, identity, replace(opts, shard=rank))
            connector = Connector(own_client, accuracy=accuracy)
            own_shape = shape_of_rank(shape, rank)
            self.workers.append(VllmWorker(connector, own_shape, queue_bytes, device=device))
            own = pages_of_rank(pages, shape, rank)
            assert self.workers[-1].register(own, writer(packing)) == ""
        self._next_block = 1

    def blocks(self, tokens: int) -> list[int]:
        """Allocate blocks of one table, in descending order."""
        count = -(-tokens // BLOCK_TOKENS)
        first, self._next_block = self._next_block, self._next_block + count
        assert self._next_block <= BLOCKS
        return list(reversed(range(first, first + count)))

    def blocks_for(self, tokens: int, computed: int = 0) -> Blocks:
        """Allocate blocks of each table; for windows only those within reach of the next token."""
        if not self.shape.has_ends:
            return self.blocks(tokens)
        tables = []
        for table in range(self.shape.tables):
            (group,) = [g for g in self.shape.groups if table in {x.table for x in g.layers}]
            ids = self.blocks(tokens)
            if group.kind is LayerKind.window:
                unseen = max(0, computed - (group.window_tokens - 1) + 1) // BLOCK_TOKENS
                ids[:unseen] = [0] * unseen
            tables.append(ids)
        return tables

    def arrived(
        self, name: str, tokens: Sequence[int], hit: int = 0, computed: int = 0, **fields: Any
    ) -> FakeRequest:
        """Add a prompt of which *hit* tokens can be loaded besides *computed* ones."""
        request = FakeRequest(name, list(tokens), **fields)
        self.scheduler.on_new_request(request)
        assert self.matched(request, computed) == hit
        return request

    def computed(
        self, name: str, tokens: Sequence[int], blocks: Blocks | None = None
    ) -> tuple[FakeRequest, Blocks]:
        """Compute a prompt without stored tokens in one step."""
        request = self.arrived(name, tokens)
        blocks = self.blocks(len(tokens)) if blocks is None else blocks
        self.step(request, blocks, len(tokens))
        return request, blocks

    @property
    def client(self) -> Client:
        client: Client = self.workers[0]._connector.client
        return client

    def matched(self, request: FakeRequest, computed: int = 0) -> int:
        """Return the matched tokens once the lookup is done."""
        found: list[int | None] = []

        def is_known() -> bool:
            found.append(self.scheduler.matched_tokens(request, computed))
            return found[-1] is not None

        assert eventually(is_known)
        return found[-1] or 0

    def step(self, request: FakeRequest, blocks: Blocks, tokens: int) -> StepPlan:
        """Run one step that computes *tokens* of the request in new *blocks*."""
        tables, start = tables_of(blocks), request.num_computed_tokens
        stop = start + tokens
        new = slice(start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS))
        plan = self.scheduler.build_plan(
            step([table[new] for table in tables], **{request.request_id: tokens}), lambda _: tables
        )
        if self._zeroes:
            self.wipe(tables, new)
        for worker in self.workers:
            worker.save_before_overwrite(plan)
        for worker, pages in zip(self.workers, self.pages, strict=True):
            worker.load(plan)
            known = request.all_token_ids[:stop]
            self._do(partial(compute, pages, self.packing, known, blocks, start, self.shape))
            worker.store(plan)
        request.num_computed_tokens = stop
        return plan

    def _do(self, work: Callable[[], object]) -> None:
        """Run the engine's work on pages: at once, or delayed on the device."""
        if self.device is None:
            work()
        else:
            self.device.compute.launch(work)

    def wipe(self, blocks: Blocks, new: slice = slice(None), value: float = 0.0) -> None:
        """Overwrite blocks, as for another request."""
        ids = [block for table in tables_of(blocks) for block in table[new] if block]

        def write() -> None:
            for pages in self.pages:
                for whole in pages.values():
                    whole[ids] = value

        self._do(write)

    def load(self, request: FakeRequest, blocks: Blocks, tokens: int) -> set[int]:
        """Load the matched tokens; return the failed blocks of all workers."""
        self.scheduler.on_alloc(request, tokens, tables_of(blocks))
        plan = self.scheduler.build_plan(step(), lambda _: [])
        failed: set[int] = set()
        for worker in self.workers:
            worker.save_before_overwrite(plan)
            worker.load(plan)
            assert worker.settled(20.0)
            assert worker.finished_loads(is_idle=True) == {request.request_id}
            failed |= worker.failed_blocks()
        self.collect_reports()
        return failed

    def collect_reports(self) -> None:
        """Pass the joined reports of workers to the scheduler, as vLLM does after a step."""
        reports = [report for worker in self.workers if (report := worker.report()) is not None]
        if reports:
            self.scheduler.on_report(reduce(WorkerReport.joined, reports))

    def idle(self) -> None:
        """Run a step that computes nothing, without the hook for stores, as vLLM does."""
        plan = self.scheduler.build_plan(step(), lambda _: [])
        for worker in self.workers:
            worker.save_before_overwrite(plan)
            worker.load(plan)
            assert worker.finished_loads(is_idle=True) == set()
        self.collect_reports()

    def run(self, name: str, tokens: list[int]) -> int:
        """Run a prompt from its arrival to its end; return the number of loaded tokens."""
        request = FakeRequest(name, list(tokens))
        self.scheduler.on_new_request(request)
        hit = self.matched(request)
        blocks = self.blocks_for(len(tokens), hit)
        tracked = self.scheduler._tracked[name]
        assert eventually(lambda: tracked.lookup.result is not None)
        if hit:
            assert self.load(request, blocks, hit) == set()
            assert self.workers[0].failed_loads() == set()
            request.num_computed_tokens = hit
        if hit < len(tokens):
            self.step(request, blocks, len(tokens) - hit)
        self.drain()
        assert all(holds(pages, self.packing, tokens, blocks, self.shape) for pages in self.pages)
        self.scheduler.finished(request)
        assert all(worker.settled(20.0) for worker in self.workers)
        return hit

    def drain(self) -> None:
        if self.device is not None:
            self.device.compute.run()

    def close(self) -> None:
        self.scheduler.close()
        for worker in self.workers:
            worker.close()
