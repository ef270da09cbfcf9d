"""kvstore top: tiers, hit ratios, policies and why, as they are now."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rich.console import Group
from rich.live import Live
from rich.text import Text

from kvstore.cli.status import ask_figures, readable_size
from kvstore.cli.tables import Grid, open_console
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import printable


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened between two looks at a server, *seconds* apart; since the start at first."""

    seconds: float
    counts: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def between(cls, before: pb.StatusResponse | None, now: pb.StatusResponse) -> Rates:
        """Return the rates from *before*, another look at the same server or none, to *now*."""
        if before is None or before.server.boot_id != now.server.boot_id:
            return cls(now.uptime_s, dict(now.counters))
        seconds = now.uptime_s - before.uptime_s
        counts = {name: count - before.counters[name] for name, count in now.counters.items()}
        return cls(seconds, counts)

    def per_s(self, name: str) -> float:
        """Return how often *name* was counted each second."""
        return self.counts.get(name, 0) / self.seconds if self.seconds > 0 else 0.0

    @property
    def hit_ratio(self) -> float | None:
        """Chunks found ready of those that lookups asked for; None when none was."""
        asked = self.counts.get("lookup_chunks", 0)
        return self.counts.get("lookup_ready_chunks", 0) / asked if asked > 0 else None


def top_as_json(address: str, reply: pb.StatusResponse, rates: Rates) -> str:
    """Return one look as JSON."""
    return json.dumps(
        {
            "address": address,
            "state": reply.state,
            "uptime_s": reply.uptime_s,
            "sessions": reply.sessions,
            "leases": reply.leases,
            "ghosts": reply.ghosts,
            "hit_ratio": rates.hit_ratio,
            "lookups_per_s": rates.per_s("lookups"),
            "get_bytes_per_s": rates.per_s("get_bytes"),
            "put_bytes_per_s": rates.per_s("put_bytes"),
            "evicted_chunks_per_s": rates.per_s("evicted_chunks"),
            "tiers": [_tier_as_json(tier) for tier in reply.tiers],
        },
        indent=2,
    )


def _tier_as_json(tier: pb.TierStatus) -> dict[str, object]:
    return {
        "name": tier.name,
        "capacity_bytes": tier.capacity_bytes,
        "used_bytes": tier.used_bytes,
        "chunks": tier.chunks,
        "state": tier.state,
        "policy": tier.policy,
        "what_if": {f"{point.scale:g}": point.hit_ratio for point in tier.what_if},
        "partitions": [
            {
                "name": one.name,
                "used_bytes": one.used_bytes,
                "quota_bytes": one.quota_bytes,
                "guaranteed_bytes": one.guaranteed_bytes,
            }
            for one in tier.partitions
        ],
    }


def top_as_tables(address: str, reply: pb.StatusResponse, rates: Rates) -> Group:
    """Return one look as tables."""
    parts: list[Text | Grid] = [Text(printable(_head(address, reply, rates))), _tiers(reply)]
    if any(tier.what_if for tier in reply.tiers):
        parts.append(_what_if(reply))
    if any(tier.partitions for tier in reply.tiers):
        parts.append(_partitions(reply))
    return Group(*parts)


def _head(address: str, reply: pb.StatusResponse, rates: Rates) -> str:
    moved = (
        f"{name} {readable_size(round(rates.per_s(f'{name}_bytes')))}/s" for name in ("get", "put")
    )
    return (
        f"{address}: {reply.state}, hit ratio {_share(rates.hit_ratio)},"
        f" {rates.per_s('lookups'):.1f} lookups/s, {', '.join(moved)},"
        f" {rates.per_s('evicted_chunks'):.1f} evicted/s, {reply.ghosts} ghosts"
    )


def _tiers(reply: pb.StatusResponse) -> Grid:
    table = Grid("tier", "used", "of", "chunks", "policy", "state")
    for tier in reply.tiers:
        table.add_row(
            tier.name,
            readable_size(tier.used_bytes),
            readable_size(tier.capacity_bytes),
            str(tier.chunks),
            tier.policy,
            f"{tier.state}: {tier.reason}" if tier.reason else tier.state,
        )
    return table


def _what_if(reply: pb.StatusResponse) -> Grid:
    scales = sorted({point.scale for tier in reply.tiers for point in tier.what_if})
    table = Grid("tier", *(f"hits at {scale:g}x" for scale in scales))
    for tier in reply.tiers:
        curve = {point.scale: point.hit_ratio for point in tier.what_if}
        table.add_row(tier.name, *(_share(curve.get(scale)) for scale in scales))
    return table


def _partitions(reply: pb.StatusResponse) -> Grid:
    table = Grid("tier", "partition", "used", "quota", "guaranteed")
    for tier in reply.tiers:
        for one in tier.partitions:
            table.add_row(
                tier.name,
                one.name,
                readable_size(one.used_bytes),
                readable_size(one.quota_bytes) if one.quota_bytes else "-",
                readable_size(one.guaranteed_bytes) if one.guaranteed_bytes else "-",
            )
    return table


def _share(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"


def show_once(address: str, *, as_json: bool) -> None:
    """Print one look, with rates since the server's start. Raises KVStoreErrors."""
    reply = ask_figures(address)
    rates = Rates.between(None, reply)
    if as_json:
        print(top_as_json(address, reply, rates))
    else:
        open_console().print(top_as_tables(address, reply, rates))


def show_live(address: str, every_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show the server until the key that interrupts. Raises KVStoreErrors."""
    before = ask_figures(address)
    rates = Rates.between(None, before)
    first = top_as_tables(address, before, rates)
    with Live(first, console=open_console(), auto_refresh=False) as live:
        try:
            while True:
                sleep(every_s)
                now = ask_figures(address)
                rates = Rates.between(before, now)
                live.update(top_as_tables(address, now, rates), refresh=True)
                before = now
        except KeyboardInterrupt:
            return
