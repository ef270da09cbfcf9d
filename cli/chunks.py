"""`kvstore ls`, `stat`, `pin`, `unpin` and `clear`: the chunks of a server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Argument, Option

from kvstore.cli.app import (
    EXIT_NOT_HELD,
    AsJson,
    TierName,
    Yes,
    ask,
    command,
    confirm,
    connected,
    fail,
    number,
)
from kvstore.cli.output import Grid, as_dict, progress, readable_size, readable_time, show
from kvstore.cli.selection import (
    DEADLINE_MS,
    DIGEST_DIGITS,
    EVERY_TENANT,
    ModelFile,
    Namespace,
    Selection,
    Tenant,
    check_digits,
    fetch_namespaces,
    find,
    list_chunks,
    model_as_dict,
    namespace_as_dict,
    namespace_table,
    open_session,
)
from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidFrameError,
    InvalidRequestError,
)

if TYPE_CHECKING:  # help is to load none of the product
    from kvstore.client.client import Client
    from kvstore.client.server_state import ChunkStat
    from kvstore.proto.frame import FrameHeader
    from kvstore.proto.types import ChunkKey

MAX_LISTED = 10_000
"""Chunks of one page."""
MAX_PREFIX_CHUNKS = 65_536
"""Chunks of one prefix; of more nothing is pinned."""
PIN_CHUNKS = 1024
"""Of one call."""
DAY_MS = 86_400_000
_DURATION = re.compile(r"([0-9]{1,9})(ms|s|min|m|h|d)")
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": DAY_MS}

Key = Annotated[str, Argument(metavar="KEY", help="Key or digest; a unique prefix is enough.")]
Keys = Annotated[list[str] | None, Argument(metavar="[KEY]...", help="Keys or their prefixes.")]
Prefix = Annotated[str, Option(metavar="HEX", help="All chunks with this digest prefix.")]


# --- ls


class Page(NamedTuple):
    """Chunks of a client's namespace, and whether more follow."""

    client: Client
    chunks: Sequence[ChunkStat]
    is_more: bool


@command("ls", example="kvstore ls --limit 20", section="Look")
def ls(  # noqa: PLR0913 - each is an option
    address: str,
    prefix: Annotated[str, Argument(metavar="[PREFIX]", help="First digits of the digests.")] = "",
    namespace: Namespace = "",
    model: ModelFile = None,
    tenant: Tenant = "",
    limit: Annotated[int, number("Chunks of a page.", 1, MAX_LISTED)] = 100,
    after: Annotated[str, Option(metavar="HEX", help="Continue after this digest.")] = "",
    spaces: Annotated[bool, Option("--spaces", help="List the namespaces only.")] = False,
    as_json: AsJson = False,
) -> None:
    """List chunks: their tiers, sizes, last use, hits and what holds them.

    Chunks come by namespace, in the order of their digests, a page at a time. With --spaces an
    admin may give --tenant '*' to see every tenant's.
    """
    if spaces:
        found = fetch_namespaces(address, tenant)
        rows = [namespace_as_dict(one) for one in found]
        show({"address": address, "spaces": rows}, [namespace_table(found)], as_json)
        return
    begun = check_digits("prefix", prefix) if prefix else ""
    last = check_digits("after", after) if after else ""
    with Selection(address, namespace, model, tenant).clients() as clients:
        pages = list(_pages(clients, begun, last, limit))
        data = [
            {
                "namespace": page.client.namespace.hex(),
                "model": page.client.model.model_id,
                "chunks": list(map(as_dict, page.chunks)),
                "after": page.chunks[-1].digest.hex() if page.is_more else None,
            }
            for page in pages
        ]
        show({"address": address, "spaces": data}, _page_text(pages), as_json)


def _pages(clients: Sequence[Client], begun: str, last: str, limit: int) -> Iterator[Page]:
    if last and len(clients) != 1:
        raise InvalidRequestError("after", last, "name the --namespace of the page")
    if last and len(last) < DIGEST_DIGITS:
        found = list_chunks(clients[0], last, 2)
        if len(found) != 1:
            fix = "give the last digest of the page before, or digits that begin it alone"
            raise InvalidRequestError("after", last, fix)
        last = found[0].digest.hex()
    for client in clients:
        chunks = list_chunks(client, begun, limit + 1, bytes.fromhex(last))  # it may be gone by now
        yield Page(client, chunks[:limit], len(chunks) > limit)
        limit -= min(limit, len(chunks))
        if not limit:
            return


def _page_text(pages: Sequence[Page]) -> Iterator[str | Grid]:
    if not any(page.chunks for page in pages):
        yield "no chunks"
    for page in pages:
        if not page.chunks:
            continue
        namespace = page.client.namespace.hex()
        yield f"namespace {namespace}: {page.client.model.model_id}"
        table = Grid("digest", "tiers", "size", "idle", "hits", "held by")
        for one in page.chunks:
            size = readable_size(sum(copy.size_bytes for copy in one.copies))
            idle = "-" if one.idle_s is None else readable_time(one.idle_s)
            tiers = ",".join(copy.tier for copy in one.copies)
            table.add_row(one.digest.hex(), tiers, size, idle, one.hits, _kept(one))
        yield table
        if page.is_more:
            yield f"more: --namespace {namespace} --after {page.chunks[-1].digest.hex()}"


def _kept(chunk: ChunkStat) -> str:
    """Return what holds a chunk: leases and pins."""
    why = [f"{chunk.leases} leases"] if chunk.leases else []
    if chunk.pinned:
        why.append(f"pinned {readable_time(chunk.pinned_s)}")
    return ", ".join(why) or "-"


# --- stat


@command("stat", exits="0 1 2 3", example="kvstore stat 3fa95c --json", section="Look")
def stat(
    address: str,
    name: Key,
    namespace: Namespace = "",
    model: ModelFile = None,
    tenant: Tenant = "",
    as_json: AsJson = False,
) -> None:
    """Show all that is known of a chunk, and verify its bytes.

    Exits with 1 when it is not there, or is damaged; the server then drops it.
    """
    check_digits("key", name)
    with Selection(address, namespace, model, tenant).clients() as clients:
        found = find(clients, name)
        known = found[0].stat(keys=[found[1]], ranks=True) if found else []
        if not found or not known:
            fail(f"{name}: no such chunk here", EXIT_NOT_HELD)
        client, key = found
        header, damage = _verified(client, key)
        data = {"key": key.hex()} | as_dict(known[0])
        data |= {"verified": header is not None, "damage": damage or None}
        if header is not None:
            data |= {"position": header.position, "prefill_flops": header.prefill_flops}
            data["content"] = header.content.hex()
        data["representation"] = model_as_dict(client.model)
        show(data, _stat_text(data, known[0]), as_json, held=header is not None)


def _verified(client: Client, key: ChunkKey) -> tuple[FrameHeader | None, str]:
    """Return the header of a chunk's frame, all of it verified, or what is wrong with it."""
    from kvstore.proto.types import Accuracy

    try:
        frame = client.frame(key, accuracy=Accuracy.approximate)
    except (ChunkCorruptError, InvalidFrameError) as error:
        return None, str(error)
    return (frame[0], "") if frame is not None else (None, "not read in time")


def _stat_text(data: dict[str, Any], chunk: ChunkStat) -> Iterator[str | Grid]:
    kind = data["representation"]
    rows = {
        "key": data["key"],
        "parent": chunk.parent.hex() if any(chunk.parent) else "none: it begins a prompt",
        "model": f"{kind.get('model_id', '')}, revision {kind.get('model_revision', '')}",
        "adapter, quantization": f"{kind.get('adapter_digest')}, {kind.get('quantization')}",
        "tokens": f"{chunk.tokens}, after {chunk.context_tokens} that are stored",
        "position": f"token {data.get('position', '?')} of its prompt",
        "raw size": readable_size(chunk.raw_bytes),
        "frame": data["damage"] or "verified",
        "last use": "unknown" if chunk.idle_s is None else f"{readable_time(chunk.idle_s)} ago",
        "hits": chunk.hits,
        "held by": _kept(chunk),
        "time to live": readable_time(chunk.expires_s) if chunk.expires_s else "none",
        "priority": chunk.priority,
    }
    yield from (f"{name + ':':<23}{value}" for name, value in rows.items())
    copies = Grid("tier", "codec", "accuracy", "size", "evicted after", "policy")
    for one in chunk.copies:
        before = f"{'at least ' if one.at_least else ''}{one.before} others"
        size = readable_size(one.size_bytes)
        copies.add_row(one.tier, one.codec, one.accuracy.name, size, before, one.policy)
    yield copies
    parts = Grid("layers", "kind", "dtype", "KV heads", "head dim", "tokens")
    for part in data["components"]:
        names = ("layers", "kind", "dtype", "kv_heads", "head_dim", "tokens")
        parts.add_row(*(part[name] for name in names))
    yield parts


# --- pin and unpin


@command("pin", exits="0 1 2 3", example="kvstore pin 3fa95c --for 2h", section="Change")
def pin(  # noqa: PLR0913 - each is an option
    address: str,
    keys: Keys = None,
    prefix: Prefix = "",
    namespace: Namespace = "",
    tenant: Tenant = "",
    duration: Annotated[str, Option("--for", metavar="TIME", help="30s, 2h; at most 24h.")] = "1h",
    as_json: AsJson = False,
) -> None:
    """Keep chunks from eviction for a time; exits with 1 unless all are there.

    Pins are within the server's limit of them, and end with the server.
    """
    ttl_s = parse_duration_ms(duration) / 1000
    selection = Selection(address, namespace, tenant=tenant)
    _keep(selection, keys or [], prefix, lambda c, some: c.pin(keys=some, ttl=ttl_s), as_json)


@command("unpin", exits="0 1 2 3", example="kvstore unpin --prefix 3fa9", section="Change")
def unpin(
    address: str,
    keys: Keys = None,
    prefix: Prefix = "",
    namespace: Namespace = "",
    tenant: Tenant = "",
    as_json: AsJson = False,
) -> None:
    """End the pins of chunks; exits with 1 unless all had one."""
    selection = Selection(address, namespace, tenant=tenant)
    _keep(selection, keys or [], prefix, lambda client, some: client.unpin(keys=some), as_json)


def parse_duration_ms(text: str) -> int:
    """Return the milliseconds of a text such as ``90s`` or ``2h``. Raises InvalidRequestError."""
    matched = _DURATION.fullmatch(text)
    if matched is None:
        raise InvalidRequestError("for", text, "write it as 30s, 10min, 2h or 1d")
    found = int(matched[1]) * _UNIT_MS[matched[2]]
    if not 0 < found <= DAY_MS:
        raise InvalidRequestError("for", text, "more than 0, at most 24h")
    return found


def _keep(
    selection: Selection,
    names: Sequence[str],
    prefix: str,
    work: Callable[[Client, Sequence[ChunkKey]], int],
    as_json: bool,
) -> None:
    """Do *work* for the chunks called *names*, or those whose digests begin with *prefix*."""
    from kvstore.proto.keys import chunk_key
    from kvstore.proto.types import ChainDigest

    if bool(names) == bool(prefix):
        raise InvalidRequestError("keys", len(names), "give keys, or --prefix")
    for name in names:
        check_digits("key", name)
    begun = check_digits("prefix", prefix) if prefix else ""
    count = done = 0
    with selection.clients() as clients:
        found = filter(None, (find(clients, name) for name in names))
        chosen = [(client, [key]) for client, key in found]
        for client in clients if prefix else ():
            chunks = list_chunks(client, begun, MAX_PREFIX_CHUNKS + 1)
            if len(chunks) > MAX_PREFIX_CHUNKS:
                fix = f"stands for over {MAX_PREFIX_CHUNKS} chunks; give more digits"
                raise InvalidRequestError("prefix", prefix, fix)
            space = client.namespace
            chosen.append((client, [chunk_key(space, ChainDigest(one.digest)) for one in chunks]))
        for client, keys in chosen:
            count += len(keys)
            for start in range(0, len(keys), PIN_CHUNKS):
                done += work(client, keys[start : start + PIN_CHUNKS])
    count = max(count, len(names))
    text = f"{done} of {count} chunks"
    show({"done": done, "named": count}, [text], as_json, held=done >= count > 0)


# --- clear


@dataclass(frozen=True, slots=True)
class Scope:
    """What goes: of one namespace, one tenant or every one; ``tier`` narrows it to copies there."""

    selection: Selection
    tenant: str = ""
    tier: str = ""
    everything: bool = False

    def __post_init__(self) -> None:
        named = self.selection.is_narrow
        if self.everything + bool(self.tenant) + named > 1:
            fix = "give one of --namespace, --tenant and --all"
            raise InvalidRequestError("scope", self.tenant or self.selection.namespace, fix)
        if not (self.everything or self.tenant or named or self.tier):
            fix = "choose what to clear: --namespace, --tenant, --tier or --all"
            raise InvalidRequestError("scope", "", fix)

    def __str__(self) -> str:
        what = "every chunk of every tenant" if self.everything else "your tenant's chunks"
        if self.tenant:
            what = f"the chunks of tenant {self.tenant}"
        elif self.selection.is_narrow:
            what = f"the chunks of namespace {self.selection.namespace or self.selection.model}"
        return f"{what} on {self.tier}" if self.tier else what


@command("clear", exits="0 1 2 3", example="kvstore clear --tier disk --dry-run", section="Change")
def clear(  # noqa: PLR0913 - each is an option
    address: str,
    namespace: Namespace = "",
    model: ModelFile = None,
    tenant: Annotated[str, Option(metavar="NAME", help="All chunks of a tenant.")] = "",
    tier: Annotated[TierName | None, Option(help="Only the copies on this tier.")] = None,
    everything: Annotated[bool, Option("--all", help="Chunks of all tenants (admins).")] = False,
    yes: Yes = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Only count what would be deleted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete the chunks of a namespace, a tenant, a tier or all, but those in use or pinned.

    --tier alone takes your tenant's copies on it; --tenant of another is for admins. Asks before
    it deletes, unless --yes.
    """
    scope = Scope(Selection(address, namespace, model), tenant, tier or "", everything)
    if not (yes or dry_run):
        confirm(f"{_cleared_text(run_clear(scope, dry_run=True))}: {scope}. Continue?")
    data = run_clear(scope, dry_run=dry_run)
    show(data, [_cleared_text(data)], as_json)


def run_clear(scope: Scope, *, dry_run: bool) -> dict[str, Any]:
    """Clear *scope*; return what went, or would go, and how much is in use and stays."""
    deleted = deleted_bytes = 0
    fields: dict[str, Any] = {"tenant": EVERY_TENANT if scope.everything else scope.tenant}
    fields |= {"tier": scope.tier, "dry_run": dry_run, "deadline_ms": DEADLINE_MS}
    with ExitStack() as stack:
        model = scope.selection.only_model() if scope.selection.is_narrow else None
        connection = stack.enter_context(connected(scope.selection.address, DEADLINE_MS))
        if model is not None:
            fields["session_id"] = stack.enter_context(open_session(connection, model))
        report = stack.enter_context(progress("clearing"))
        while True:
            reply = ask(connection, "Clear", 2 * DEADLINE_MS, **fields)
            deleted += reply.deleted
            deleted_bytes += reply.deleted_bytes
            report(deleted, deleted + reply.left)
            if not reply.left or not reply.deleted or dry_run:
                break
    found = {"deleted": deleted, "deleted_bytes": deleted_bytes, "in_use": reply.leased}
    return {"dry_run": dry_run} | found


def _cleared_text(data: dict[str, Any]) -> str:
    verb = "would delete" if data["dry_run"] else "deleted"
    skipped = f"; skipped {data['in_use']} (in use or pinned)" if data["in_use"] else ""
    return f"{verb} {data['deleted']} chunks, {readable_size(data['deleted_bytes'])}{skipped}"
