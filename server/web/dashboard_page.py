"""The dashboard as HTML: parts that are replaced one by one, and the page around them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvstore.server.web.dashboard import Sections
from kvstore.server.web.dashboard_charts import trend_chart, what_if_chart
from kvstore.server.web.dashboard_view import View
from kvstore.server.web.markup import Html, bar, joined, section, table, tag

PAGE_TITLE = "kvstore"
MAX_PAGE_BYTES = 100_000
"""Of the page with all that it loads."""
_FOLDER = Path(__file__).parent
MEDIA: Mapping[str, tuple[str, bytes]] = {
    name: (media_type, (_FOLDER / name).read_bytes())
    for name, media_type in (("dashboard.css", "text/css"), ("dashboard.js", "text/javascript"))
}
_SHOWN_FLOWS = 12
_SHOWN_TENANTS = 16

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


def sections_of(view: View) -> Sections:
    """Return the parts of the page that show *view*."""
    makers: Mapping[str, tuple[str, Callable[[View], Sequence[object]]]] = {
        "now": ("Now", _now),
        "tiers": ("Tiers", _tiers),
        "hits": ("Hit ratio", _hits),
        "flows": ("Flows between tiers", _flows),
        "latency": ("Latency", _latency),
        "what-if": ("What another size would hit", _what_if),
        "faults": ("Faults", _faults),
        "prefixes": ("Top prefixes", _prefixes),
        "nodes": ("Nodes", _nodes),
    }
    return {name: section(name, title, make(view)) for name, (title, make) in makers.items()}


def sections_as_json(sections: Sections) -> str:
    """Return the parts as one line of JSON, by their ids."""
    return json.dumps(dict(sections), separators=(",", ":"))


def page(sections: Sections) -> str:
    """Return the whole page. What it loads is of its own origin."""
    head = joined(
        [
            Html('<meta charset="utf-8">'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Html('<link rel="icon" href="data:,">'),  # or browsers ask for one
            Html('<link rel="stylesheet" href="dashboard.css">'),
            tag("title", PAGE_TITLE),
            Html('<script src="dashboard.js" defer></script>'),
        ]
    )
    title = tag("h1", PAGE_TITLE)
    live = tag("p", "as of when the page was loaded", id="live", role="status")
    body = joined([tag("header", joined([title, live])), tag("main", joined([*sections.values()]))])
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>'


# --- parts


def _now(view: View) -> list[object]:
    ratio = view.now.hit_ratio(view.recent)
    facts = [
        ("server", f"{view.state}, {view.version}"),
        ("up for", _time(view.uptime_s)),
        ("hit ratio", _percent(ratio)),
        ("lookups", f"{view.per_s('lookups'):.1f}/s"),
        ("delivered", f"{_size(view.per_s('get_bytes'))}/s"),
        ("stored", f"{_size(view.per_s('put_bytes'))}/s"),
        ("chunks known", f"{view.chunks:,}"),
        ("sessions", view.sessions),
        ("leases", view.leases),
        ("faults", sum(view.now.since(view.recent, name) for name in FAULTS)),
    ]
    cells = [joined([tag("dt", name), tag("dd", value, id=f"now-{name.replace(' ', '-')}")])
             for name, value in facts]  # fmt: skip
    note = f"Rates are those of the last {_time(view.recent_s)}."
    return [tag("dl", joined([tag("div", cell) for cell in cells])), tag("p", note, class_="note")]


def _tiers(view: View) -> list[object]:
    rows = []
    for status, report in view.tiers:
        stats = status.stats
        share = stats.used_bytes / stats.capacity_bytes if stats.capacity_bytes else None
        state = tag("span", status.reason or "serving", class_="bad" if status.reason else "good")
        speed = f"{_size(status.load_bytes_per_s)}/s" if status.load_bytes_per_s else "-"
        used = bar(share, _percent(share))
        rows.append(
            (status.name, used, state, _size(stats.used_bytes), _size(stats.capacity_bytes),
             f"{stats.chunks:,}", speed, status.codec, report.name)
        )  # fmt: skip
    heads = ("tier", "filled", "state", "used", "limit", "chunks", "load speed", "codec", "policy")
    return [table("Tiers, the fastest first", heads, rows, words=3)]


def _hits(view: View) -> list[object]:
    asked = view.now.counters["lookup_chunks"]
    finds = view.now.finds
    tiers = [
        (name, bar(finds.tiers.get(name, 0) / asked if asked else None, ""),
         f"{finds.tiers.get(name, 0):,}",
         _percent(finds.tiers.get(name, 0) / asked if asked else None))
        for name in (status.name for status, _ in view.tiers)
    ]  # fmt: skip
    missed = asked - view.now.counters["lookup_ready_chunks"]
    tiers.append(("not found", bar(missed / asked if asked else None, ""), f"{missed:,}",
                  _percent(missed / asked if asked else None)))  # fmt: skip
    tenants = sorted(finds.asked, key=lambda name: -finds.asked[name])[:_SHOWN_TENANTS]
    rows = []
    for name in tenants:
        ready, of = finds.ready.get(name, 0), finds.asked[name]
        ratio = ready / of if of else None
        rows.append((name, bar(ratio, ""), f"{ready:,}", f"{of:,}", _percent(ratio)))
    return [
        trend_chart(view.ratios, view.ratios_s),
        table("Where chunks were found first, since the start",
              ("tier", "share", "chunks", "of all asked for"), tiers, words=2),
        table("By tenant, since the start",
              ("tenant", "share", "found", "asked for", "hit ratio"), rows, words=2),
    ]  # fmt: skip


def _flows(view: View) -> list[object]:
    now, before = view.now.flows, view.recent.flows
    rates = {
        way: (moved[1] - before.get(way, (0, 0))[1]) / view.recent_s for way, moved in now.items()
    }
    rates["engines", "cpu"] = view.per_s("put_bytes")
    rates["tiers", "engines"] = view.per_s("get_bytes")
    chunks = {way: moved[0] for way, moved in now.items()}
    chunks["engines", "cpu"] = view.now.counters["put_stored_chunks"]
    chunks["tiers", "engines"] = view.now.counters["get_chunks"]
    most = max(rates.values(), default=0.0)
    ways = sorted(rates, key=lambda way: (-rates[way], -chunks[way]))[:_SHOWN_FLOWS]
    rows = [
        (f"{source} → {target}", bar(rates[source, target] / most if most else None, ""),
         f"{_size(rates[source, target])}/s", f"{chunks[source, target]:,}")
        for source, target in ways
    ]  # fmt: skip
    counts = view.now.counters
    note = (
        f"{counts['evicted_chunks']:,} chunks were evicted from a tier since the start, "
        f"{counts['dropped_victims']:,} of them for good."
    )
    heads = ("way", "share", "rate", "chunks")
    return [
        table("What is copied where; chunks since the start", heads, rows, words=2),
        tag("p", note, class_="note"),
    ]


def _latency(view: View) -> list[object]:
    rows = []
    for name, times in view.now.times.items():
        lately = times.since(view.recent.times[name])
        quantiles = [_millis(lately.quantile_s(share)) for share in (0.5, 0.9, 0.99)]
        rows.append((name, f"{lately.calls / view.recent_s:.1f}/s", *quantiles, f"{times.calls:,}"))
    heads = ("call", "rate", "p50", "p90", "p99", "calls")
    note = "Time in this server, of calls over gRPC and the Unix socket; calls since the start."
    return [table("Calls of engines, lately", heads, rows), tag("p", note, class_="note")]


def _what_if(view: View) -> list[object]:
    curves = {status.name: dict(report.curve) for status, report in view.tiers}
    scales = sorted({scale for curve in curves.values() for scale in curve})
    rows = [
        (tier, *(_percent(curve.get(scale)) for scale in scales))
        for tier, curve in curves.items()
        if curve
    ]
    if not rows:
        return [tag("p", "Not known until more was asked for.", class_="note")]
    heads = ("tier", *(f"{scale:g}x size" for scale in scales))
    return [what_if_chart(curves), table("Hit ratio by size of the tier", heads, rows)]


def _prefixes(view: View) -> list[object]:
    rows = []
    for one in view.prefixes:
        model = one.space.representation.model_id if one.space else "unknown"
        tenant = one.space.tenant if one.space else "unknown"
        tiers = ", ".join(one.used.tiers)
        row = (one.digest[:12], model, tenant, tiers, f"{one.used.tokens:,}", f"{one.used.hits:,}")
        rows.append(row)
    heads = ("ends with", "model", "tenant", "tiers", "tokens", "hits")
    return [table("Prefixes that lookups found most", heads, rows, words=4)]


def _faults(view: View) -> list[object]:
    down = [
        tag("li", f"{status.name} is left alone: {status.reason}", class_="bad")
        for status, _ in view.tiers
        if status.reason
    ]
    rows = []
    for name, what in FAULTS.items():
        lately, all_of_it = view.now.since(view.recent, name), view.now.counters[name]
        mark = tag("span", f"{lately:,}", class_="bad") if lately else "0"
        rows.append((what, mark, f"{all_of_it:,}"))
    rows.sort(key=lambda row: row[2] == "0")
    up = tag("p", "Every tier is in use.", class_="note")
    heads = ("what", "lately", "in all")
    return [tag("ul", joined(down)) if down else up, table("Faults since the start", heads, rows)]


def _nodes(view: View) -> list[object]:
    if not view.nodes:
        return [tag("p", "This server is in no directory.", class_="note")]
    return [table("Servers that are seen", ("node", "address", "state"), view.nodes, words=3)]


# --- values


def _size(size_bytes: float) -> str:
    value, unit = float(size_bytes), 0
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    while value >= 1024 and unit < len(units) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {units[unit]}" if unit else f"{value:.0f} B"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _millis(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.2g} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"


def _time(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
