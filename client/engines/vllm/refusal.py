"""What stands in for the halves of the vLLM connector where an engine's KV has no name."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from kvstore.client.client import Client
from kvstore.client.engines.vllm.blocks import BlockWriter
from kvstore.client.engines.vllm.messages import BlockTables, LoadOrder, StepOrders, WorkerNews
from kvstore.client.engines.vllm.settings import VllmSettings
from kvstore.proto.errors import KVStoreError
from kvstore.proto.messages import REFUSED
from kvstore.proto.types import (
    DEFAULT_CHUNK_TOKENS,
    DType,
    LayerGroup,
    LayerKind,
    Model,
    RopeParameters,
)

REPORT_EVERY_S = 10.0
"""How often the reason is sent: a server may have started later, or again."""

MAX_REASON_CHARS = 1024
"""What is sent of one; the server keeps less."""


def client_of_refused(model: str, settings: VllmSettings, name: str) -> Client:
    """Return a client of an engine of *model* whose KV has no name, to say so.

    Raises what Access does of files that cannot be used.
    """
    group = LayerGroup(LayerKind.attention, DType.uint8, (0,), 1, 1)
    rope = RopeParameters(theta=1.0, rotary_dim=0)
    identity = Model(model, "refused", "none", "none", (group,), rope, "none")
    options = settings.options(DEFAULT_CHUNK_TOKENS, name)
    return Client(settings.address, identity, replace(options, transport="grpc", staging_bytes=1))


class RefusalReporter:
    """Sends a server the reason why an engine runs without it, in a thread: nobody waits for that.

    *counts* returns what is sent beside it.
    """

    def __init__(
        self, client: Client, reason: str, counts: Callable[[], Mapping[str, int]] = dict
    ) -> None:
        self._client = client
        name = f"{REFUSED}{' '.join(reason[:MAX_REASON_CHARS].split())}"
        client.counts = lambda: {**counts(), name: 1}
        self._is_over = threading.Event()
        threading.Thread(target=self._run, name="kvstore-refused", daemon=True).start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            with suppress(KVStoreError):
                self._client.send_counts()
            self._is_over.wait(REPORT_EVERY_S)

    def close(self) -> None:
        """Say nothing more, and close the client."""
        self._is_over.set()
        self._client.close()


class RefusedScheduler:
    """What stands in for the scheduler's half: every request is a counted miss, for *reason*."""

    events = None
    has_stores_waiting = False

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self.counted: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self._reporter: RefusalReporter | None = None

    def report(self, client: Client, text: str) -> None:
        """Send the server *text*, and what is counted."""
        self._reporter = RefusalReporter(client, text, self.counted.copy)

    def arrived(self, request: Any) -> None:
        """Count a miss."""
        self.counted.update(("lookups", f"miss_{self._reason}"))
        self.counted["prompt_tokens"] += request.num_tokens

    def matched_tokens(self, request: Any, computed_tokens: int) -> int:
        """Return that nothing can be loaded."""
        return 0

    def allocated(self, request: Any, loaded_tokens: int, tables: BlockTables) -> None:
        """Do nothing: nothing is loaded."""

    def finished(self, request: Any) -> None:
        """Do nothing: nothing is kept of requests."""

    def reset(self) -> None:
        """Do nothing: nothing is stored."""

    def orders(self, output: Any, tables_of: Callable[[str], BlockTables]) -> StepOrders:
        """Return that there is nothing to do."""
        return StepOrders()

    def learn(self, news: WorkerNews) -> None:
        """Do nothing: workers have nothing to say."""

    def counts(self) -> dict[str, int]:
        """Return what was counted since the last call; ``counted`` has all of it."""
        new = self.counted - self._reported
        self._reported = self.counted.copy()
        return dict(new)

    def close(self) -> None:
        """Tell the server nothing more."""
        if self._reporter is not None:
            self._reporter.close()


class RefusedWorker:
    """What stands in for a rank whose KV has no name: it fails every load and stores nothing.

    The scheduler, which may be on another host, learns of it with the first step.
    """

    def __init__(self, reason: str) -> None:
        self._refusal = reason
        self._loads: list[LoadOrder] = []
        self._failed_blocks: set[int] = set()
        self._failed_loads: set[str] = set()
        self._reporter: RefusalReporter | None = None

    def report(self, client: Client, text: str) -> None:
        """Send the server *text*."""
        self._reporter = RefusalReporter(client, text)

    def register(
        self, registered: Mapping[str, torch.Tensor], writer: Callable[[str], BlockWriter]
    ) -> str:
        """Return why there is no use for pages."""
        return self._refusal

    def drop_pages(self) -> bool:
        """Return that there are none."""
        return False

    def load(self, orders: StepOrders) -> None:
        """Fail the loads of a step."""
        self._loads += orders.loads
        for order in orders.loads:
            if order.all_or_nothing:
                self._failed_loads.add(order.request_id)
            else:
                self._failed_blocks.update(order.blocks_from(0))

    def begin(self, orders: StepOrders) -> None:
        """Do nothing: nothing waits to be copied."""

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

    def failed_loads(self) -> set[str]:
        """Return the requests of which vLLM has to compute all."""
        failed, self._failed_loads = self._failed_loads, set()
        return failed

    def news(self) -> WorkerNews:
        """Return the reason."""
        return WorkerNews(refusal=self._refusal)

    def counts(self) -> dict[str, int]:
        """Return no counts."""
        return {}

    def close(self) -> None:
        """Tell the server nothing more."""
        if self._reporter is not None:
            self._reporter.close()
