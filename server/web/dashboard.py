"""The dashboard: the state and counters of a server as JSON, collected once a second for all
readers.

The page is ``dashboard.html``; ``dashboard.js`` derives rates from ``data`` and ``events``.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Mapping
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any

from kvstore.proto.types import DIGEST_BYTES, Namespace
from kvstore.server.api.service import Backend
from kvstore.server.telemetry.metrics import BOUNDS_S

EVERY_S = 1.0
"""Interval between two updates; none without readers."""
LOOK_EVERY_S = 5.0
LOOKS_KEPT = 121
"""Ten minutes of snapshots."""
RECENT_S = 60.0
"""Window of rates and quantiles."""
TOP_PREFIXES = 10
TOP_EVERY_S = 10.0
"""Interval of the top prefixes, which need a scan of the index."""
SHOWN_TENANTS = 16

MAX_PAGE_BYTES = 100_000
"""Size limit of the page with its resources."""
_FOLDER = Path(__file__).parent
MEDIA: Mapping[str, tuple[str, bytes]] = {
    path: (media_type, (_FOLDER / name).read_bytes())
    for path, name, media_type in (
        ("", "dashboard.html", "text/html"),
        ("dashboard.css", "dashboard.css", "text/css"),
        ("dashboard.js", "dashboard.js", "text/javascript"),
    )
}

Look = dict[str, Any]
"""A snapshot of all counts at one time, in seconds."""


class Dashboard:
    """Collects snapshots of a server, and once a second all data for its readers.

    ``text`` is for one event loop; it calls ``data`` in a thread.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._counters = backend.store.counters
        self._clock = backend.checks.clock
        self._lock = threading.Lock()  # guards the looks
        self._looks: deque[Look] = deque([self._look()], maxlen=LOOKS_KEPT)
        self._prefixes: list[list[object]] = []
        self._prefixes_s = -TOP_EVERY_S
        self._rendering = asyncio.Lock()  # one at a time
        self._text = ""
        self._text_s = 0.0

    def _look(self) -> Look:
        counters = self._counters
        return {
            "at_s": self._clock(),
            "counts": counters.snapshot(),
            "flows": [[*way, *moved] for way, moved in counters.moves().items()],
            "calls": {name: times.counts for name, times in counters.times().items()},
        }

    def tick(self) -> None:
        """Take a snapshot if one is due. Called a few times a second; takes microseconds."""
        if self._clock() - self._looks[-1]["at_s"] >= LOOK_EVERY_S:
            look = self._look()
            with self._lock:
                self._looks.append(look)

    async def text(self) -> str:
        """Return the data, at most a second old, as one line of JSON."""
        async with self._rendering:
            if not self._text or self._clock() - self._text_s >= EVERY_S:
                data = await asyncio.to_thread(self.data)
                self._text = json.dumps(data, separators=(",", ":"))
                self._text_s = self._clock()
            return self._text

    def data(self) -> dict[str, Any]:
        """Return the current data, and a snapshot of about a minute ago. Not thread-safe."""
        backend, store = self._backend, self._backend.store
        now, finds = self._look(), self._counters.finds()
        with self._lock:
            looks = [*self._looks, now]
        ages_s = [now["at_s"] - look["at_s"] for look in looks]
        recent = max(at for at, age_s in enumerate(ages_s) if age_s >= RECENT_S or not at)
        tenants = sorted(finds.asked, key=lambda name: -finds.asked[name])[:SHOWN_TENANTS]
        return {
            "state": "draining" if backend.sessions.is_draining else "serving",
            "version": backend.identity.version,
            "uptime_s": now["at_s"] - backend.identity.started_at,
            "chunks": len(store.catalog),
            "sessions": len(backend.sessions),
            "leases": len(store.catalog.leases),
            "now": now,
            "recent": looks[recent],
            "ratios": list(starmap(_hit_ratio, pairwise(looks))),
            "ratios_s": ages_s[0],
            "bounds_s": BOUNDS_S,
            "tiers": self._tiers(),
            "found": finds.tiers,
            "tenants": [[one, finds.ready.get(one, 0), finds.asked[one]] for one in tenants],
            "prefixes": self._top_prefixes(now["at_s"]),
            "nodes": self._nodes(),
        }

    def _tiers(self) -> list[dict[str, Any]]:
        store, tiers = self._backend.store, []
        for slot in store.tiers.slots.values():
            report, stats = store.catalog.eviction.policy_report(slot.name), slot.tier.stats()
            names = ("used_bytes", "capacity_bytes", "chunks")
            tier: dict[str, Any] = {name: getattr(stats, name) for name in names}
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
                digest = one.key[DIGEST_BYTES:].hex()[:12]
                layout = next(iter(one.copies.values())).layout
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


def _hit_ratio(before: Look, then: Look) -> float | None:
    """Return the hit ratio of chunks between two snapshots; None without lookups."""
    wanted, found = (
        then["counts"][name] - before["counts"][name]
        for name in ("lookup_chunks", "lookup_ready_chunks")
    )
    return found / wanted if wanted > 0 else None
