"""What the dashboard shows: looks at the server's counts, and one view of all of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from kvstore.proto.types import DIGEST_BYTES
from kvstore.server.eviction.quotas import PolicyReport
from kvstore.server.index.model_registry import ModelNamespace
from kvstore.server.index.results import UsedPrefix
from kvstore.server.security.sessions import SessionTable
from kvstore.server.store.store import SlotStatus, Store
from kvstore.server.telemetry.metrics import Counters, Finds, Times

LOOK_EVERY_S = 5.0
LOOKS_KEPT = 121
"""Ten minutes of them."""
RECENT_S = 60.0
"""What rates and quantiles are of."""
TOP_PREFIXES = 10
TOP_EVERY_S = 10.0
"""The whole index is gone through for them."""


class Look(NamedTuple):
    """Every count at one instant of the clock, in seconds."""

    at_s: float
    counters: Mapping[str, int]
    flows: Mapping[tuple[str, str], tuple[int, int]]
    finds: Finds
    times: Mapping[str, Times]

    def since(self, before: Look, name: str) -> int:
        """Return how much *name* was counted after *before*."""
        return self.counters[name] - before.counters[name]

    def hit_ratio(self, before: Look) -> float | None:
        """Return what share of the chunks asked for after *before* was found; None of none."""
        asked = self.since(before, "lookup_chunks")
        return self.since(before, "lookup_ready_chunks") / asked if asked > 0 else None


class NodeRow(NamedTuple):
    """A server of the fleet."""

    name: str
    address: str
    note: str


class TopPrefix(NamedTuple):
    """A prefix that lookups found often, and whose it is as far as that is known."""

    used: UsedPrefix
    space: ModelNamespace | None

    @property
    def digest(self) -> str:
        """The digits of its last chunk's digest."""
        return self.used.key[DIGEST_BYTES:].hex()


@dataclass(frozen=True, slots=True)
class View:
    """All that a page shows. ``recent`` is the look that rates are counted from."""

    version: str
    state: str
    uptime_s: float
    sessions: int
    leases: int
    chunks: int
    now: Look
    recent: Look
    ratios: Sequence[float | None]
    """Hit ratios between the looks of the last ``ratios_s``."""
    ratios_s: float
    tiers: Sequence[tuple[SlotStatus, PolicyReport]]
    prefixes: Sequence[TopPrefix]
    nodes: Sequence[NodeRow]

    @property
    def recent_s(self) -> float:
        """What rates are over."""
        return max(1e-3, self.now.at_s - self.recent.at_s)

    def per_s(self, name: str) -> float:
        """Return how often *name* was counted each second, lately."""
        return self.now.since(self.recent, name) / self.recent_s


@dataclass(frozen=True, slots=True)
class Subject:
    """The server that is looked at. *clock* returns monotonic seconds."""

    store: Store
    sessions: SessionTable
    counters: Counters
    version: str
    clock: Callable[[], float]


class Viewer:
    """Looks at a server now and then, and at all of it when asked. Thread-safe."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._born_s = subject.clock()
        self._lock = threading.Lock()  # guards the looks
        self._looks: deque[Look] = deque([self._look()], maxlen=LOOKS_KEPT)
        self._prefixes: Sequence[TopPrefix] = ()
        self._prefixes_s = -TOP_EVERY_S

    def _look(self) -> Look:
        counters = self._subject.counters
        return Look(
            self._subject.clock(), counters.snapshot(), counters.flows.snapshot(),
            counters.finds.snapshot(), counters.times.snapshot(),
        )  # fmt: skip

    def tick(self) -> None:
        """Keep a look if the last one is old. Called a few times a second; takes microseconds."""
        if self._subject.clock() - self._looks[-1].at_s >= LOOK_EVERY_S:
            look = self._look()
            with self._lock:
                self._looks.append(look)

    def view(self) -> View:
        """Return what there is to show now. For one thread at a time."""
        subject, now = self._subject, self._look()
        with self._lock:
            looks = [*self._looks, now]
        old = [look for look in looks if now.at_s - look.at_s >= RECENT_S]
        catalog = subject.store.catalog
        return View(
            subject.version,
            "draining" if subject.sessions.is_draining else "serving",
            now.at_s - self._born_s,
            len(subject.sessions),
            catalog.lease_count(),
            len(catalog),
            now,
            old[-1] if old else looks[0],
            [then.hit_ratio(before) for before, then in pairwise(looks)],
            now.at_s - looks[0].at_s,
            [
                (status, catalog.eviction.policy_report(status.name))
                for status in subject.store.slot_statuses()
            ],
            self._top_prefixes(now.at_s),
            self._nodes(),
        )

    def _top_prefixes(self, now_s: float) -> Sequence[TopPrefix]:
        if now_s - self._prefixes_s >= TOP_EVERY_S:
            store = self._subject.store
            found = store.catalog.queries.top_prefixes(TOP_PREFIXES)
            self._prefixes = [
                TopPrefix(one, store.spaces.of(one.key[:DIGEST_BYTES]))  # type: ignore[arg-type]
                for one in found
            ]
            self._prefixes_s = now_s
        return self._prefixes

    def _nodes(self) -> list[NodeRow]:
        directory = self._subject.store.directory
        if directory is None:
            return []
        report = directory.report()
        me = NodeRow(report.me.node_id, report.me.grpc_address, report.failure or "this one")
        return [me, *(NodeRow(one.node_id, one.grpc_address, "lives") for one in report.nodes)]
