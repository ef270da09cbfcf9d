"""`kvstore status`, `ping`, `sessions`, `events`, `scrub`, `drain` and `config`: a whole server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from kvstore.cli import app
from kvstore.cli.chunks import Namespace, Selection
from kvstore.proto.errors import PermissionDeniedError, printable

if TYPE_CHECKING:  # help is to load none of the product
    from kvstore.client.connection import Connection
    from kvstore.client.server_state import DirectoryStatus, EventPage, ServerStatus

HIDDEN = "sessions, leases, sizes and counters are hidden: they need the role admin"
FAULTS = (
    "corrupt_chunks", "put_invalid_chunks", "lost_chunks", "failed_copies", "get_late_chunks",
    "put_refused_chunks", "unanswered_lookups", "shed_calls", "expired_leases", "peer_failures",
    "unreadable_chunks",
)  # fmt: skip
"""Counters that say that something is wrong, or full; those of the dashboard."""
MAX_DRAIN_S = 3600.0
SCRUB_POLL_S = 0.5


# --- status


def fetch_status(address: str) -> ServerStatus:
    """Return the state of the server at *address*. Raises KVStoreErrors within three seconds."""
    from kvstore.client.server_state import status_from_message

    return status_from_message(app.call(address, "Status"))


@dataclass(frozen=True, slots=True)
class Look:
    """A look at a server: its state, and what was counted since the look *before*.

    That is since the server's start where there was none, or it was of another start.
    """

    address: str
    now: ServerStatus
    before: ServerStatus | None = None

    @property
    def _since(self) -> ServerStatus | None:
        is_same = self.before is not None and self.before.boot_id == self.now.boot_id
        return self.before if is_same else None

    def _counted(self, name: str) -> int:
        then = self._since.counters if self._since else {}
        return self.now.counters.get(name, 0) - then.get(name, 0)

    @property
    def seconds(self) -> float:
        """The time in which it was counted."""
        return self.now.uptime_s - (self._since.uptime_s if self._since else 0)

    def per_s(self, name: str) -> float:
        """Return how often *name* was counted each second."""
        return self._counted(name) / self.seconds if self.seconds > 0 else 0.0

    @property
    def hit_ratio(self) -> float | None:
        """Chunks found ready of those that lookups named; None when none was."""
        named = self._counted("lookup_chunks")
        return self._counted("lookup_ready_chunks") / named if named > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON; what is hidden is null."""
        names = ("lookups", "get_bytes", "put_bytes", "evicted_chunks")
        found = {"address": self.address} | app.as_dict(self.now) | {"hit_ratio": self.hit_ratio}
        found |= {f"{name}_per_s": self.per_s(name) for name in names}
        del found["boot_id"]
        for tier in found["tiers"]:
            tier["what_if"] = {f"{one['scale']:g}": one["hit_ratio"] for one in tier["what_if"]}
        if not self.now.counters:
            shown = {"address", "version", "state", "uptime_s", "tiers"}
            found |= dict.fromkeys(found.keys() - shown)
            for tier in found["tiers"]:
                tier |= dict.fromkeys(("capacity_bytes", "used_bytes", "chunks"))
        return found

    def text(self, everything: bool) -> Iterator[str | app.Grid]:
        """Yield one screen of it, or all of it."""
        now, is_shown = self.now, bool(self.now.counters)
        held = f", {now.sessions} sessions, {now.leases} leases" if is_shown else ""
        age = app.readable_time(now.uptime_s)
        yield f"{self.address}: {now.state}, version {now.version}, up {age}{held}"
        if is_shown:
            moved = [f"{n} {app.readable_size(self.per_s(f'{n}_bytes'))}/s" for n in ("get", "put")]
            since = f"last {self.seconds:.0f} s" if self._since else "since the start"
            lookups, evicted = (self.per_s(name) for name in ("lookups", "evicted_chunks"))
            yield f"hit ratio {_percent(self.hit_ratio)}, {lookups:.1f} lookups/s ({since})"
            yield f"{', '.join(moved)}, {evicted:.1f} chunks evicted/s"
            faults = [f"tier {tier.name} is {tier.state}" for tier in now.tiers if tier.reason]
            faults += [f"{n} {now.counters[n]}" for n in FAULTS if now.counters.get(n)]
            yield f"faults: {', '.join(faults) or 'none'}"
        rows = []
        for tier in now.tiers:
            state = f"{tier.state}: {tier.reason}" if tier.reason else tier.state
            sizes = (*map(app.readable_size, (tier.used_bytes, tier.capacity_bytes)), tier.chunks)
            figures = sizes if is_shown else ("-",) * 3
            rows.append((tier.name, *figures, tier.codec, tier.policy or "-", state))
        yield app.Grid(("tier", "used", "of", "chunks", "codec", "policy", "state"), rows)
        if now.directory is not None:
            yield directory_line(now.directory)
        if not is_shown:
            yield HIDDEN
        elif everything:
            yield from _details(now)


@app.command("status", example="kvstore status --json", section="Look", where=True)
def status(
    address: str,
    everything: Annotated[bool, Option("--all", help="Every counter, quota, curve, gate.")] = False,
    watch: Annotated[bool, Option("--watch", help="Refresh until interrupted.")] = False,
    every_s: Annotated[
        float, Option("--every", min=0.1, metavar="S", help="Refresh interval.")
    ] = 2,
    as_json: app.AsJson = False,
) -> None:
    """Show a server's hit ratio, faults and tiers on one screen."""
    if watch:
        watch_status(address, every_s, everything, as_json)
    else:
        look = Look(address, fetch_status(address))
        app.show(look.as_dict(), look.text(everything), as_json)


def watch_status(
    address: str,
    every_s: float,
    everything: bool,
    as_json: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show the status until it is interrupted: in place on a terminal, else one after another."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    console, before = app.open_console(), None
    with Live(console=console, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        while True:
            look = Look(address, fetch_status(address), before)
            if not look.now.counters:
                raise PermissionDeniedError(f"{address}: {HIDDEN}")
            parts = look.text(everything)
            if as_json:
                print(json.dumps(look.as_dict()), flush=True)
            elif console.is_terminal:
                texts = (Text(printable(p)) if isinstance(p, str) else p for p in parts)
                live.update(Group(*texts), refresh=True)
            else:
                console.print(*parts, "", sep="\n")
            before = look.now
            sleep(every_s)


def _details(reply: ServerStatus) -> Iterator[str | app.Grid]:
    from kvstore.cli.calibrate import gate_as_dict, gate_line

    scales = sorted({point.scale for tier in reply.tiers for point in tier.what_if})
    curves, parts = [], []
    for tier in reply.tiers:
        ratios = {point.scale: point.hit_ratio for point in tier.what_if}
        if ratios:
            curves.append((tier.name, *(_percent(ratios.get(scale)) for scale in scales)))
        for one in tier.partitions:
            limits = (
                app.readable_size(n) if n else "-" for n in (one.quota_bytes, one.guaranteed_bytes)
            )
            parts.append((tier.name, one.name, app.readable_size(one.used_bytes), *limits))
    yield f"{reply.ghosts} evicted chunks are remembered"
    if curves:
        yield app.Grid(("tier", *(f"hits at {scale:g}x" for scale in scales)), curves)
    if parts:
        yield app.Grid(("tier", "partition", "used", "quota", "guaranteed"), parts)
    yield app.Grid(("counter", "since the start"), sorted(reply.counters.items()))
    yield from map(gate_line, map(gate_as_dict, reply.gates))


def directory_line(directory: DirectoryStatus) -> str:
    """Return how a server stands among other nodes, and whom it sees."""
    nodes = ", ".join(f"{node.node_id} at {node.grpc_address}" for node in directory.nodes)
    standing = {"taken": "another node has its id", "full": "the directory is full"}
    why = directory.failure or standing.get(directory.standing, directory.standing)
    is_up = directory.standing == "known" and not directory.failure
    state = f"{directory.announced} chunks named" if is_up else f"out of it: {why}"
    return f"directory: {directory.node_id}, {state}; sees {nodes or 'no other node'}"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"


@app.command("ping", exits="0 1 2 3", example="kvstore ping", section="Look", where=True)
def ping(address: str, as_json: app.AsJson = False) -> None:
    """Ask a server whether it serves; exits with 1 when it drains or a tier is degraded."""
    with app.connected(address) as connection:
        app.ask(connection, "Status")  # connects
        began = time.perf_counter()
        reply = app.ask(connection, "Status")
        took_ms = 1e3 * (time.perf_counter() - began)
    degraded = [tier.name for tier in reply.tiers if tier.state != "serving"]
    data = {"address": address, "state": reply.state, "degraded": degraded, "ms": took_ms}
    tiers = f", degraded: {', '.join(degraded)}" if degraded else ""
    text = f"{address}: {reply.state}{tiers}, {took_ms:.2f} ms"
    app.show(data, [text], as_json, held=not degraded and reply.state == "serving")


@app.command("sessions", example="kvstore sessions", section="Look", where=True)
def sessions(address: str, as_json: app.AsJson = False) -> None:
    """List the sessions of a server: who is connected, for which model; for admins."""
    reply = app.call(address, "Status", with_sessions=True)
    if not reply.counters:
        raise PermissionDeniedError(f"{address}: {HIDDEN}")
    rows, cells = [], []
    for one in reply.session_list:
        row = app.as_dict(one)
        rows.append(row | {"namespace": row.pop("key_namespace"), "model": row.pop("model_id")})
        model = "another server" if one.is_peer else one.model_id
        ages = map(app.readable_time, (one.open_s, one.idle_s))
        space = one.key_namespace.hex()
        cells.append((one.client or "-", one.tenant, one.owner, *ages, one.leases, space, model))
    headings = ("client", "tenant", "owner", "open", "idle", "leases", "namespace", "model")
    text = app.Grid(headings, cells) if cells else "no sessions"
    app.show({"address": address, "sessions": rows}, [text], as_json)


# --- events


@app.command("events", example="kvstore events --follow", section="Look")
def events(
    address: str,
    follow: Annotated[bool, Option("--follow", help="Print changes from now on.")] = False,
    namespace: Namespace = "",
    as_json: Annotated[bool, Option("--json", help="Print a JSON object a line.")] = False,
) -> None:
    """Print the copies that a server's tiers have, or follow those that come and go.

    One line each: stored or removed, tier, key. Hints: a chunk may be gone when it is read.
    Without --namespace for admins.
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
        is_past = True  # what is there already comes first
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
    """Yield pages of every namespace: without a session, for admins."""
    from kvstore.client.server_state import CALL_MS, page_from_message
    from kvstore.proto import kvstore_pb2 as pb

    request = pb.EventsRequest()
    while True:  # the server ends each call after a while
        for message in connection.stream("Events", request, CALL_MS):
            page = page_from_message(message)
            request.boot_id, request.cursor = page.place or (0, 0)
            yield page


# --- scrub and drain


@app.command(
    "scrub",
    exits="0 1 2 3",
    example="kvstore scrub --tiers disk --rate 100MiB",
    section="Change",
    where=True,
)
def scrub(
    address: str,
    tiers: Annotated[str, app.chosen("Tiers to verify, or the server's", app.TIER_NAMES)] = "",
    rate: Annotated[int, app.size("Bytes a second at most; 0: no limit.")] = 0,
    as_json: app.AsJson = False,
) -> None:
    """Verify what a server's tiers hold, once; exits with 1 when it found damage."""
    names = [name.strip() for name in tiers.split(",") if name.strip()]
    with app.connected(address) as connection, app.progress("scrubbing") as report:
        reply = app.ask(connection, "Scrub", begin=True, tiers=names, bytes_per_s=rate)
        while reply.running:
            report(reply.checked_chunks, reply.total_chunks)
            time.sleep(SCRUB_POLL_S)
            reply = app.ask(connection, "Scrub")
    text = (
        f"{reply.checked_chunks} of {reply.total_chunks} chunks, "
        f"{reply.checked_bytes / 2**20:.1f} MiB: {reply.damaged_chunks} damaged, "
        f"{reply.unread_chunks} not read"
    )
    app.show(app.as_dict(reply), [text], as_json, held=not reply.damaged_chunks)


@app.command("drain", exits="0 1 2 3", example="kvstore drain --within 20", section="Change")
def drain(
    address: str,
    deadline_s: Annotated[
        float,
        Option("--within", min=0.001, max=MAX_DRAIN_S, metavar="S", help="Seconds to wait for it."),
    ] = 20.0,
) -> None:
    """Stop accepting new work and save what only memory has; exits with 1 if not all was saved."""
    deadline_ms = max(1, round(deadline_s * 1000))
    if not app.call(address, "Drain", deadline_ms, deadline_ms=deadline_ms).clean:
        print("drained, but not all is saved: kvstore status says what the tiers hold")
        raise typer.Exit(app.EXIT_NOT_HELD)
    print("drained: everything that was in memory is on disk")


# --- config

app.group("config", "Administer", "Check and print the settings of kvstore-server.")


@app.command("config show", exits="0 2", example="kvstore config show --cpu 8GiB", as_server=True)
def config_show(context: typer.Context) -> None:
    """Print each setting as YAML with where it came from. Takes kvstore-server's flags."""
    from kvstore.server.settings.loading import load, show
    from kvstore.server.settings.settings import Settings

    print(show(*load(Settings, context.args)), end="")


@app.command(
    "config validate",
    exits="0 2",
    example="kvstore config validate --config kvstore.yaml",
    as_server=True,
)
def config_validate(context: typer.Context) -> None:
    """Print ok, or exit with 2 and what is wrong. Takes kvstore-server's flags."""
    from kvstore.server.settings.settings import load_config

    load_config(context.args)
    print("ok")


@app.command("config schema", exits="0 2", example="kvstore config schema")
def config_schema() -> None:
    """Print the JSON schema of the YAML file, for editors and for what generates such files."""
    from kvstore.server.settings.loading import SHORT_NAMES, settings_schema
    from kvstore.server.settings.settings import Settings

    schema = settings_schema(Settings)
    known = schema["properties"]
    known |= {short: known[name] for short, name in SHORT_NAMES.items()}
    print(json.dumps(schema, indent=2))
