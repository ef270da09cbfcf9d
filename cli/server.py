"""Commands on a whole server: status, ping, sessions, events, scrub, drain and config."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from kvstore.cli import app
from kvstore.cli.calibrate import gate_line
from kvstore.cli.chunks import Namespace, Selection
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import PermissionDeniedError

if TYPE_CHECKING:  # keeps --help fast
    from kvstore.client.connection import Connection
    from kvstore.client.server_state import EventPage, ServerStatus

HIDDEN = "sessions, leases, sizes and counters are hidden: they need the role admin"
FAULTS = (
    "corrupt_chunks", "put_invalid_chunks", "lost_chunks", "failed_copies", "get_late_chunks",
    "put_refused_chunks", "unanswered_lookups", "shed_calls", "expired_leases", "peer_failures",
    "unreadable_chunks",
)  # fmt: skip
"""Counters of errors and full limits, as on the dashboard."""
CLEAR = "\x1b[2J\x1b[H"
MAX_DRAIN_S = 3600.0
SCRUB_POLL_S = 0.5


# --- status


def fetch_status(address: str) -> ServerStatus:
    """Return the state of the server at *address*. Raises KVStoreErrors within three seconds."""
    from kvstore.client.server_state import status_from_message

    return status_from_message(app.call(address, "Status"))


def look_at(address: str, now: ServerStatus, before: ServerStatus | None = None) -> dict[str, Any]:
    """Return the state of a server for JSON; hidden fields are null.

    The hit ratio and the rates cover the ``counted_s`` since the status *before*, or since the
    server's start if there is none or the server restarted.
    """
    then: Mapping[str, int] = {}
    seconds = now.uptime_s
    if before is not None and before.boot_id == now.boot_id:
        then, seconds = before.counters, now.uptime_s - before.uptime_s

    def counted(name: str) -> int:
        return now.counters.get(name, 0) - then.get(name, 0)

    named = counted("lookup_chunks")
    found: dict[str, Any] = {"address": address} | app.as_dict(now) | {"counted_s": seconds}
    found["hit_ratio"] = counted("lookup_ready_chunks") / named if named > 0 else None
    for name in ("lookups", "get_bytes", "put_bytes", "evicted_chunks"):
        found[f"{name}_per_s"] = counted(name) / seconds if seconds > 0 else 0.0
    del found["boot_id"]
    for tier in found["tiers"]:
        tier["what_if"] = {f"{one['scale']:g}": one["hit_ratio"] for one in tier["what_if"]}
    if not now.counters:
        shown = {"address", "version", "state", "uptime_s", "tiers"}
        found |= dict.fromkeys(found.keys() - shown)
        for tier in found["tiers"]:
            tier |= dict.fromkeys(("capacity_bytes", "used_bytes", "chunks"))
    return found


def status_text(found: dict[str, Any], everything: bool) -> Iterator[str | app.Grid]:
    """Yield one screen of a server's state, or *everything*."""
    counters, tiers = found["counters"], found["tiers"]
    held = "" if counters is None else f", {found['sessions']} sessions, {found['leases']} leases"
    age = app.readable_time(found["uptime_s"])
    yield f"{found['address']}: {found['state']}, version {found['version']}, up {age}{held}"
    if counters is not None:
        is_all = found["counted_s"] == found["uptime_s"]
        since = "since the start" if is_all else f"last {found['counted_s']:.0f} s"
        ratio, lookups = _percent(found["hit_ratio"]), found["lookups_per_s"]
        yield f"hit ratio {ratio}, {lookups:.1f} lookups/s ({since})"
        get, put = (app.readable_size(found[f"{name}_bytes_per_s"]) for name in ("get", "put"))
        yield f"get {get}/s, put {put}/s, {found['evicted_chunks_per_s']:.1f} chunks evicted/s"
        faults = [f"tier {tier['name']} is {tier['state']}" for tier in tiers if tier["reason"]]
        faults += [f"{name} {counters[name]}" for name in FAULTS if counters.get(name)]
        yield f"faults: {', '.join(faults) or 'none'}"
    rows = []
    for tier in tiers:
        state = f"{tier['state']}: {tier['reason']}" if tier["reason"] else tier["state"]
        sizes = map(app.readable_size, (tier["used_bytes"], tier["capacity_bytes"]))
        figures = ("-",) * 3 if counters is None else (*sizes, tier["chunks"])
        rows.append((tier["name"], *figures, tier["codec"], tier["policy"] or "-", state))
    yield app.Grid(("tier", "used", "of", "chunks", "codec", "policy", "state"), rows)
    if found["directory"] is not None:
        yield directory_line(found["directory"])
    if counters is None:
        yield HIDDEN
    elif everything:
        yield from _details(found)


def _details(found: dict[str, Any]) -> Iterator[str | app.Grid]:
    tiers, size, limits = found["tiers"], app.readable_size, ("quota_bytes", "guaranteed_bytes")
    scales = sorted({scale for tier in tiers for scale in tier["what_if"]}, key=float)
    curves = (
        (tier["name"], *(_percent(tier["what_if"].get(scale)) for scale in scales))
        for tier in tiers
        if tier["what_if"]
    )
    parts = [
        (
            tier["name"], one["name"], size(one["used_bytes"]),
            *(size(one[name]) if one[name] else "-" for name in limits),
        )
        for tier in tiers
        for one in tier["partitions"]
    ]  # fmt: skip
    yield f"{found['ghosts']} ghost entries of evicted chunks"
    if scales:
        yield app.Grid(("tier", *(f"hits at {scale}x" for scale in scales)), curves)
    if parts:
        yield app.Grid(("tier", "partition", "used", "quota", "guaranteed"), parts)
    yield app.Grid(("counter", "since the start"), found["counters"].items())
    yield from map(gate_line, found["gates"])


def directory_line(directory: dict[str, Any]) -> str:
    """Return a line on a server's state in the directory, and the nodes it sees."""
    nodes = ", ".join(f"{one['node_id']} at {one['grpc_address']}" for one in directory["nodes"])
    standing, failure = directory["standing"], directory["failure"]
    words = {"taken": "another node has its id", "full": "the directory is full"}
    state = f"not registered: {failure or words.get(standing, standing)}"
    if standing == "known" and not failure:
        state = f"{directory['announced']} chunks announced"
    return f"directory: {directory['node_id']}, {state}; sees {nodes or 'no other node'}"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"


@app.command("status", example="--json", section="Look", where=True)
def status(
    address: str,
    everything: Annotated[bool, Option("--all", help="Every counter, quota, curve, gate.")] = False,
    watch: Annotated[bool, Option("--watch", help="Refresh until interrupted.")] = False,
    every_s: Annotated[float, Option("--every", min=0.1, metavar="S", help="Refresh period.")] = 2,
    as_json: app.AsJson = False,
) -> None:
    """Show a server's hit ratio, faults and tiers on one screen."""
    if watch:
        watch_status(address, every_s, everything, as_json)
    else:
        found = look_at(address, fetch_status(address))
        app.show(app.Shown(found, status_text(found, everything)), as_json)


def watch_status(
    address: str,
    every_s: float,
    everything: bool,
    as_json: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show the status until interrupted: in place on a terminal, else appended."""
    before = None
    with suppress(KeyboardInterrupt):
        while True:
            now = fetch_status(address)
            if not now.counters:
                raise PermissionDeniedError(f"{address}: {HIDDEN}")
            found = look_at(address, now, before)
            lines = [*app.lines_of(status_text(found, everything)), ""]
            if as_json:
                lines = [json.dumps(found)]
            elif sys.stdout.isatty():
                lines = [CLEAR, *lines[: shutil.get_terminal_size().lines - 2]]
            print(*lines, sep="\n", flush=True)
            before = now
            sleep(every_s)


@app.command("ping", exits="0 1 2 3", section="Look", where=True)
def ping(address: str) -> app.Shown:
    """Check that a server is serving; exits with 1 if it drains or a tier is degraded."""
    with app.connected(address) as connection:
        app.rpc(connection, "Status")  # connects
        began = time.perf_counter()
        reply = app.rpc(connection, "Status")
        took_ms = 1e3 * (time.perf_counter() - began)
    degraded = [tier.name for tier in reply.tiers if tier.state != "serving"]
    data = {"address": address, "state": reply.state, "degraded": degraded, "ms": took_ms}
    tiers = f", degraded: {', '.join(degraded)}" if degraded else ""
    text = f"{address}: {reply.state}{tiers}, {took_ms:.2f} ms"
    return app.Shown(data, [text], held=not degraded and reply.state == "serving")


@app.command("sessions", section="Look", where=True)
def sessions(address: str) -> app.Shown:
    """List a server's sessions, with their clients and models; for admins."""
    reply = app.call(address, "Status", with_sessions=True)
    if not reply.counters:
        raise PermissionDeniedError(f"{address}: {HIDDEN}")
    rows = app.as_dict(reply.session_list)
    for row in rows:
        row |= {"namespace": row.pop("key_namespace"), "model": row.pop("model_id")}
    headings = ("client", "tenant", "owner", "open", "idle", "leases", "namespace", "model")
    cells = (
        (
            row["client"] or "-", row["tenant"], row["owner"], app.readable_time(row["open_s"]),
            app.readable_time(row["idle_s"]), row["leases"], row["namespace"],
            "another server" if row["is_peer"] else row["model"],
        )
        for row in rows
    )  # fmt: skip
    text = app.Grid(headings, cells) if rows else "no sessions"
    return app.Shown({"address": address, "sessions": rows}, [text])


# --- events


@app.command("events", example="--follow", section="Look")
def events(
    address: str,
    follow: Annotated[bool, Option("--follow", help="Print changes from now on.")] = False,
    namespace: Namespace = "",
    as_json: Annotated[bool, Option("--json", help="Print a JSON object a line.")] = False,
) -> None:
    """Print the copies on a server's tiers, or follow changes.

    One line each: stored or removed, tier, key. A printed chunk may be evicted before it is read.
    Without --namespace for admins only.
    """
    with suppress(KeyboardInterrupt):
        for event in _events(address, namespace, follow):
            words = filter(None, event.values())
            print(json.dumps(event) if as_json else " ".join(words), flush=True)


def _events(address: str, namespace: str, follow: bool) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        if namespace:
            selection = Selection(address, namespace)
            client = stack.enter_context(selection.client(selection.only(selection.models())))
            pages: Iterable[EventPage] = stack.enter_context(client.events())
        else:
            pages = _pages_of_all(stack.enter_context(app.connected(address)))
        is_past = True  # existing copies come first
        for page in pages:
            if page.cleared and not is_past:
                yield {"event": "cleared", "tier": "", "key": ""}
            if follow != is_past:
                for one in page.events:
                    kind = "stored" if one.is_stored else "removed"
                    yield {"event": kind, "tier": one.tier, "key": one.key.hex()}
            if page.place is not None:
                is_past = False
                if not follow:
                    return


def _pages_of_all(connection: Connection) -> Iterator[EventPage]:
    """Yield pages of all namespaces: without a session, for admins."""
    from kvstore.client.server_state import CALL_MS, page_from_message

    request = pb.EventsRequest()
    while True:  # the server ends each call after some time
        for message in connection.stream("Events", request, CALL_MS):
            page = page_from_message(message)
            request.boot_id, request.cursor = page.place or (0, 0)
            yield page


# --- scrub and drain


@app.command("scrub", exits="0 1 2 3", example="--tiers disk", section="Change", where=True)
def scrub(
    address: str,
    tiers: Annotated[str, app.chosen("Tiers to verify, or the server's", app.TIER_NAMES)] = "",
    rate: Annotated[int, app.size("Bytes a second at most; 0: no limit.")] = 0,
) -> app.Shown:
    """Verify all copies on a server's tiers once; exits with 1 if any is damaged."""
    names = [name.strip() for name in tiers.split(",") if name.strip()]
    with app.connected(address) as connection, app.progress("scrubbing") as report:
        reply = app.rpc(connection, "Scrub", begin=True, tiers=names, bytes_per_s=rate)
        while reply.running:
            report(reply.checked_chunks, reply.total_chunks)
            time.sleep(SCRUB_POLL_S)
            reply = app.rpc(connection, "Scrub")
    text = (
        f"{reply.checked_chunks} of {reply.total_chunks} chunks, "
        f"{reply.checked_bytes / 2**20:.1f} MiB: {reply.damaged_chunks} damaged, "
        f"{reply.unread_chunks} not read"
    )
    return app.Shown(app.as_dict(reply), [text], held=not reply.damaged_chunks)


@app.command("drain", exits="0 1 2 3", example="--within 20", section="Change")
def drain(
    address: str,
    deadline_s: Annotated[
        float, Option("--within", min=0.001, max=MAX_DRAIN_S, metavar="S", help="Time to wait.")
    ] = 20.0,
) -> None:
    """Stop accepting new work and flush memory-only chunks; exits with 1 if not all were saved."""
    deadline_ms = max(1, round(deadline_s * 1000))
    if not app.call(address, "Drain", deadline_ms, deadline_ms=deadline_ms).clean:
        print("drained, but not all chunks were saved: the server's log says why")
        raise typer.Exit(app.EXIT_NOT_HELD)
    print("drained: everything that was in memory is on disk or in Redis")


# --- config

app.group("config", "Administer", "Check and print the settings of kvstore-server.")


@app.command("config show", exits="0 2", example="--cpu 8GiB", as_server=True)
def config_show(context: typer.Context) -> None:
    """Print each setting as YAML with its source. Takes kvstore-server's flags."""
    from kvstore.server.settings.loading import load, show
    from kvstore.server.settings.settings import Settings

    print(show(*load(Settings, context.args)), end="")


@app.command("config validate", exits="0 2", example="--config kvstore.yaml", as_server=True)
def config_validate(context: typer.Context) -> None:
    """Print ok, or the error and exit with 2. Takes kvstore-server's flags."""
    from kvstore.server.settings.settings import load_config

    load_config(context.args)
    print("ok")


@app.command("config schema", exits="0 2")
def config_schema() -> None:
    """Print the JSON schema of the YAML file, for editors and generators."""
    from kvstore.server.settings.loading import SHORT_NAMES, settings_schema
    from kvstore.server.settings.settings import Settings

    schema = settings_schema(Settings)
    known = schema["properties"]
    known |= {short: known[name] for short, name in SHORT_NAMES.items()}
    print(json.dumps(schema, indent=2))
