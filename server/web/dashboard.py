"""The dashboard: what a server has done and has, as JSON, looked at once a second for all readers.

The page is ``dashboard.html``; ``dashboard.js`` draws what ``data`` and ``events`` bring.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.proto.types import DIGEST_BYTES, Namespace
from kvstore.server.api.service import Backend
from kvstore.server.telemetry.metrics import Times

EVERY_S = 1.0
"""Between two looks while somebody reads; nobody reads: nothing is done."""
LOOK_EVERY_S = 5.0
LOOKS_KEPT = 121
"""Ten minutes of them."""
RECENT_S = 60.0
"""What rates and quantiles are of."""
TOP_PREFIXES = 10
TOP_EVERY_S = 10.0
"""The whole index is gone through for them."""
SHOWN_FLOWS = 12
SHOWN_TENANTS = 16
_SHOWN_OF_STATS = ("used_bytes", "capacity_bytes", "chunks")

MAX_PAGE_BYTES = 100_000
"""Of the page with all that it loads."""
_FOLDER = Path(__file__).parent
MEDIA: Mapping[str, tuple[str, bytes]] = {
    path: (media_type, (_FOLDER / name).read_bytes())
    for path, name, media_type in (
        ("", "dashboard.html", "text/html"),
        ("dashboard.css", "dashboard.css", "text/css"),
        ("dashboard.js", "dashboard.js", "text/javascript"),
    )
}

FAULTS: Mapping[str, str] = {
    "corrupt_chunks": "copies that failed verification, and were dropped",
    "put_invalid_chunks": "frames of puts that failed a check",
    "lost_chunks": "copies that a tier no longer had",
    "failed_copies": "copies to a lower tier that failed",
    "get_late_chunks": "chunks not loaded by their deadline",
    "put_refused_chunks": "chunks of puts that were refused",
    "unanswered_lookups": "lookups that Redis did not answer in time",
    "shed_calls": "calls refused, as too many waited",
    "expired_leases": "leases that ended by their time",
    "peer_failures": "requests that another server did not answer",
    "unreadable_chunks": "copies of a removed codec, or that only others can read",
}
"""Counters that say that something is wrong, or full."""


class Look(NamedTuple):
    """Every count at one instant of the clock, in seconds."""

    at_s: float
    counters: Mapping[str, int]
    flows: Mapping[tuple[str, str], tuple[int, int]]
    times: Mapping[str, Times]

    def since(self, before: Look, name: str) -> int:
        """Return how much *name* was counted after *before*."""
        return self.counters[name] - before.counters[name]

    def hit_ratio(self, before: Look) -> float | None:
        """Return what share of the chunks looked up after *before* was found; None of none."""
        wanted = self.since(before, "lookup_chunks")
        return self.since(before, "lookup_ready_chunks") / wanted if wanted > 0 else None

    def span_s(self, before: Look) -> float:
        """Return the time since *before*, never 0."""
        return max(1e-3, self.at_s - before.at_s)


class Dashboard:
    """Looks at a server now and then, and at all of it, once a second, for its readers.

    ``text`` is for one event loop; it calls ``data`` in a thread.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._counters = backend.store.counters
        self._clock = backend.checks.clock
        self._born_s = self._clock()
        self._lock = threading.Lock()  # guards the looks
        self._looks: deque[Look] = deque([self._look()], maxlen=LOOKS_KEPT)
        self._prefixes: list[list[object]] = []
        self._prefixes_s = -TOP_EVERY_S
        self._rendering = asyncio.Lock()  # one at a time
        self._text = ""
        self._text_s = 0.0

    def _look(self) -> Look:
        counters = self._counters
        return Look(self._clock(), counters.snapshot(), counters.moves(), counters.times())

    def tick(self) -> None:
        """Keep a look if the last one is old. Called a few times a second; takes microseconds."""
        if self._clock() - self._looks[-1].at_s >= LOOK_EVERY_S:
            look = self._look()
            with self._lock:
                self._looks.append(look)

    async def text(self) -> str:
        """Return what there is to show, a second old at most, as one line of JSON."""
        async with self._rendering:
            if not self._text or self._clock() - self._text_s >= EVERY_S:
                data = await asyncio.to_thread(self.data)
                self._text = json.dumps(data, separators=(",", ":"))
                self._text_s = self._clock()
            return self._text

    def data(self) -> dict[str, Any]:
        """Return what there is to show now, by sections of the page. For one thread at a time.

        Rates are per second, since a look about a minute ago; ratios are None where unknown.
        """
        now, finds = self._look(), self._counters.finds()
        with self._lock:
            looks = [*self._looks, now]
        recent = next(
            (look for look in reversed(looks) if now.at_s - look.at_s >= RECENT_S), looks[0]
        )
        tiers = self._tiers()
        tenants = sorted(finds.asked, key=lambda name: -finds.asked[name])[:SHOWN_TENANTS]
        return {
            "now": self._now(now, recent),
            "tiers": tiers,
            "hits": {
                "ratios": [then.hit_ratio(before) for before, then in pairwise(looks)],
                "ratios_s": now.at_s - looks[0].at_s,
                "asked": now.counters["lookup_chunks"],
                "tiers": [[one["name"], finds.tiers.get(one["name"], 0)] for one in tiers],
                "missed": now.counters["lookup_chunks"] - now.counters["lookup_ready_chunks"],
                "tenants": [[one, finds.ready.get(one, 0), finds.asked[one]] for one in tenants],
            },
            "flows": _flows(now, recent),
            "latency": _latency(now, recent),
            "what-if": [[one["name"], one["curve"]] for one in tiers if one["curve"]],
            "faults": {
                "down": [[one["name"], one["reason"]] for one in tiers if one["reason"]],
                "counts": [
                    [what, now.since(recent, name), now.counters[name]]
                    for name, what in FAULTS.items()
                ],
            },
            "prefixes": self._top_prefixes(now.at_s),
            "nodes": self._nodes(),
        }

    def _now(self, now: Look, recent: Look) -> dict[str, Any]:
        backend, span_s = self._backend, now.span_s(recent)
        rates = ("lookups", "get_bytes", "put_bytes")
        return {
            "state": "draining" if backend.sessions.is_draining else "serving",
            "version": backend.identity.version,
            "uptime_s": now.at_s - self._born_s,
            "recent_s": span_s,
            "hit_ratio": now.hit_ratio(recent),
            **{f"{name}_per_s": now.since(recent, name) / span_s for name in rates},
            "chunks": len(backend.store.catalog),
            "sessions": len(backend.sessions),
            "leases": len(backend.store.catalog.leases),
            "faults": sum(now.since(recent, name) for name in FAULTS),
        }

    def _tiers(self) -> list[dict[str, Any]]:
        store, tiers = self._backend.store, []
        for slot in store.tiers.slots.values():
            report, stats = store.catalog.eviction.policy_report(slot.name), slot.tier.stats()
            tier: dict[str, Any] = {name: getattr(stats, name) for name in _SHOWN_OF_STATS}
            tier |= {"name": slot.name, "codec": slot.encoder.name, "reason": slot.reason}
            tier |= {"load_bytes_per_s": slot.bytes_per_s, "policy": report.name}
            tiers.append(tier | {"curve": sorted(report.curve.items())})
        return tiers

    def _top_prefixes(self, now_s: float) -> list[list[object]]:
        if now_s - self._prefixes_s >= TOP_EVERY_S:
            store = self._backend.store
            self._prefixes_s, self._prefixes = now_s, []
            for one in store.catalog.queries.top_prefixes(TOP_PREFIXES):
                space = store.spaces.of(Namespace(one.key[:DIGEST_BYTES]))
                model = space.representation.model_id if space else "unknown"
                tenant = space.tenant if space else "unknown"
                digest, layout = (
                    one.key[DIGEST_BYTES:].hex()[:12],
                    next(iter(one.copies.values())).layout,
                )
                tokens, tiers = one.context_tokens + layout.tokens, ", ".join(one.copies)
                self._prefixes.append([digest, model, tenant, tiers, tokens, one.hits])
        return self._prefixes

    def _nodes(self) -> list[list[str]]:
        directory = self._backend.directory
        if directory is None:
            return []
        report, me = directory.report(), directory.me
        own = [me.node_id, me.grpc_address, report.failure or "this one"]
        return [own, *([one.node_id, one.grpc_address, "lives"] for one in report.nodes)]


def _flows(now: Look, recent: Look) -> dict[str, Any]:
    """Return the ways with the most bytes a second: source, target, rate and chunks."""
    span_s, counts = now.span_s(recent), now.counters
    rows = [
        (*way, (size - recent.flows.get(way, (0, 0))[1]) / span_s, chunks)
        for way, (chunks, size) in now.flows.items()
    ]
    puts, gets = (now.since(recent, name) / span_s for name in ("put_bytes", "get_bytes"))
    rows.append(("engines", "cpu", puts, counts["put_stored_chunks"]))
    rows.append(("tiers", "engines", gets, counts["get_chunks"]))
    rows.sort(key=lambda row: row[2:], reverse=True)
    evicted, dropped = counts["evicted_chunks"], counts["dropped_victims"]
    return {"ways": rows[:SHOWN_FLOWS], "evicted": evicted, "dropped": dropped}


def _latency(now: Look, recent: Look) -> list[list[object]]:
    """Return for each call its name, rate, quantiles in seconds, and how many there were."""
    rows: list[list[object]] = []
    for name, times in now.times.items():
        lately = times.since(recent.times[name])
        quantiles = [lately.quantile_s(share) for share in (0.5, 0.9, 0.99)]
        rows.append([name, lately.calls / now.span_s(recent), *quantiles, times.calls])
    return rows
