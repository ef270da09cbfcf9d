"""`kvstore ls`, `stat`, `pin`, `unpin` and `clear`: the chunks of a server, and their ids.

Namespaces and chunks may be given by a prefix of their ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from google.protobuf import json_format
from typer import Argument, Option

from kvstore.cli import app
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import ChunkCorruptError, InvalidFrameError, InvalidRequestError
from kvstore.proto.types import Accuracy, ChunkKey

if TYPE_CHECKING:  # keeps --help fast
    from kvstore.client.client import Client
    from kvstore.client.connection import Connection
    from kvstore.client.server_state import ChunkStat

T = TypeVar("T")

MAX_LISTED = 10_000
"""Limit of chunks on one page."""
MAX_PREFIX_CHUNKS = 65_536
"""Limit of chunks under one prefix; beyond it nothing is pinned."""
MAX_PIN_S = 86_400
DEADLINE_MS = 10_000
DIGEST_DIGITS = 32
KEY_DIGITS = 64  # a namespace, then a digest
MIN_DIGITS = 4
"""Shortest id prefix."""
EVERY_TENANT = "*"
MAX_SEARCHED = 32
"""Limit of namespaces searched for a digest given without one."""
_DIGITS = "0123456789abcdef"

Namespace = Annotated[str, Option(metavar="HEX", help="A model's namespace, or its first digits.")]
_MODEL = "Instead of --namespace: the model as JSON, as ls --spaces --json prints it."
ModelFile = Annotated[Path | None, app.path(_MODEL, "--model-representation")]
Tenant = Annotated[str, Option(metavar="NAME", help="Default: your own; pool:NAME: shared.")]
Key = Annotated[str, Argument(metavar="KEY", help="Key or digest; a unique prefix is enough.")]
Keys = Annotated[list[str] | None, Argument(metavar="[KEY]...", help="Keys or their prefixes.")]
Prefix = Annotated[str, Option(metavar="HEX", help="All chunks with this digest prefix.")]


# --- namespaces, and chunks by id


@dataclass(frozen=True, slots=True)
class Selection:
    """Chunks of a server, of a *tenant* (empty: your own) or of ``pool:NAME``.

    *namespace* is a prefix of a namespace's digits, *model* a file with a model identity.
    """

    address: str
    namespace: str = ""
    model: Path | None = None
    tenant: str = ""

    def __post_init__(self) -> None:
        if self.namespace and self.model is not None:
            fix = "give --namespace or --model-representation, not both"
            raise InvalidRequestError("namespace", self.namespace, fix)
        if self.namespace:
            check_digits("namespace", self.namespace)

    def spaces(self) -> list[pb.KnownSpace]:
        """Return the selected namespaces, most chunks first. Raises KVStoreErrors."""
        begun = self.namespace.lower()
        known = fetch_namespaces(self.address, self.tenant)
        found = [one for one in known if one.key_namespace.hex().startswith(begun)]
        if begun and not found:
            fix = "no namespace begins with it; see kvstore ls --spaces"
            raise InvalidRequestError("namespace", self.namespace, fix)
        return sorted(found, key=lambda one: -one.chunks)

    def models(self) -> list[pb.Representation]:
        """Return the selected models, most chunks first. Raises KVStoreErrors."""
        if self.model is not None:
            return [_read_model(self.model)]
        return [one.representation for one in self.spaces()]

    def only(self, found: Sequence[T]) -> T:
        """Return the only one *found*. Raises InvalidRequestError unless there is exactly one."""
        if len(found) != 1:
            fix = f"matches {len(found)} namespaces; give more digits"
            raise InvalidRequestError("namespace", self.namespace, fix)
        return found[0]

    def client(self, model: pb.Representation) -> Client:
        """Return a client of *model*'s namespace, which the caller closes."""
        from kvstore.proto.messages import representation_from_message

        value, terms = representation_from_message(model), {"transport": "grpc", "name": "kvstore"}
        return app.client_of(self.address, value, DEADLINE_MS, tenant=self.tenant, **terms)

    @contextmanager
    def clients(self) -> Iterator[list[Client]]:
        """Open clients of the selected namespaces, at most MAX_SEARCHED, most chunks first."""
        with ExitStack() as opened:
            models = self.models()[:MAX_SEARCHED]
            yield [opened.enter_context(self.client(model)) for model in models]


def check_digits(field: str, text: str) -> str:
    """Return *text*, digits of an id, in lower case. Raises InvalidRequestError."""
    found = text.lower()
    if len(found) < MIN_DIGITS or found.strip(_DIGITS):
        fix = f"give at least {MIN_DIGITS} hexadecimal digits, as in kvstore ls"
        raise InvalidRequestError(field, text, fix)
    return found


def only_one(field: str, name: str, found: Sequence[T]) -> T | None:
    """Return the only one *found* by *name*, or None. Raises InvalidRequestError for several."""
    if len(found) > 1:
        fix = f"matches several: {', '.join(map(str, found[:4]))}; give more digits"
        raise InvalidRequestError(field, name, fix)
    return found[0] if found else None


def fetch_namespaces(address: str, tenant: str = "") -> list[pb.KnownSpace]:
    """Return the namespaces of *tenant* (``*``: of all tenants), latest first."""
    found: dict[bytes, pb.KnownSpace] = {}
    skip = 0
    with app.connected(address, DEADLINE_MS) as connection:
        while True:
            reply = app.rpc(connection, "Spaces", DEADLINE_MS, tenant=tenant, skip=skip)
            for one in reply.spaces:
                found.setdefault(one.key_namespace, one)  # a new session shifts the pages
            skip += len(reply.spaces)
            if not reply.left or not reply.spaces:
                return list(found.values())


def _read_model(path: Path) -> pb.Representation:
    from kvstore.proto.messages import representation_from_message

    try:
        message = json_format.Parse(path.read_text(), pb.Representation())
    except json_format.ParseError as error:
        raise InvalidRequestError("model_representation", str(path), str(error)) from None
    representation_from_message(message)  # raises with the reason
    return message


@contextmanager
def open_session(
    address: str, model: pb.Representation | None
) -> Iterator[tuple[Connection, dict[str, Any]]]:
    """Connect, and open a session of *model* if given; yield its id as a field of requests."""
    with app.connected(address, DEADLINE_MS) as connection:
        if model is None:
            yield connection, {}
            return
        fields: dict[str, Any] = {"representation": model, "client": "kvstore"}
        opened = app.rpc(connection, "OpenSession", DEADLINE_MS, **fields)
        try:
            yield connection, {"session_id": opened.session_id}
        finally:
            app.rpc(connection, "CloseSession", DEADLINE_MS, session_id=opened.session_id)


def find(clients: Sequence[Client], digits: str) -> tuple[Client, ChunkKey] | None:
    """Return the only chunk that begins with *digits*, or None. Raises InvalidRequestError."""
    begun = digits
    if len(digits) > DIGEST_DIGITS:
        namespace, begun = digits[:DIGEST_DIGITS], digits[DIGEST_DIGITS:]
        clients = [client for client in clients if client.namespace.hex() == namespace]
    found = {
        ChunkKey(client.namespace + one.digest): client
        for client in clients
        for one in list_chunks(client, begun, 2)
    }
    only_one("key", digits, [key.hex() for key in found])
    return next(((client, key) for key, client in found.items()), None)


def list_chunks(client: Client, digits: str, limit: int, after: bytes = b"") -> list[ChunkStat]:
    """Return chunks of *client* whose digests begin with *digits*, of any number."""
    if len(digits) > DIGEST_DIGITS:
        raise InvalidRequestError("key", digits, f"a digest has {DIGEST_DIGITS} digits")
    found: list[ChunkStat] = []
    for digit in _DIGITS if len(digits) % 2 else [""]:
        if len(found) < limit:
            prefix = bytes.fromhex(digits + digit)
            found += client.list(limit - len(found), after=after, prefix=prefix)
    return found


def namespace_as_dict(space: pb.KnownSpace) -> dict[str, Any]:
    """Return a namespace for JSON; --model-representation accepts its ``representation``."""
    kind = space.representation
    return {
        "namespace": space.key_namespace.hex(),
        "tenant": space.tenant,
        "model": kind.model_id,
        "revision": kind.model_revision,
        "client": space.client,
        "chunks": space.chunks,
        "representation": json_format.MessageToDict(kind, preserving_proto_field_name=True),
    }


# --- ls


@app.command("ls", example="--limit 20", section="Look")
def ls(  # noqa: PLR0913 - each is an option
    address: str,
    prefix: Annotated[str, Argument(metavar="[PREFIX]", help="First digits of the digests.")] = "",
    namespace: Namespace = "",
    model: ModelFile = None,
    tenant: Tenant = "",
    limit: Annotated[int, app.number("Chunks of a page.", 1, MAX_LISTED)] = 100,
    after: Annotated[str, Option(metavar="HEX", help="Continue after this digest.")] = "",
    spaces: Annotated[bool, Option("--spaces", help="List the namespaces only.")] = False,
) -> app.Shown:
    """List chunks: their tiers, sizes, last use, hits and holders.

    Chunks are listed by namespace, in digest order, a page at a time. With --spaces an admin may
    give --tenant '*' for all tenants.
    """
    if spaces:
        found = fetch_namespaces(address, tenant)
        rows = [namespace_as_dict(one) for one in found]
        headings = ("namespace", "chunks", "tenant", "adapter", "client", "model and revision")
        cells = (
            (
                one.key_namespace.hex(), one.chunks, one.tenant or "-",
                one.representation.adapter_digest, one.client,
                f"{one.representation.model_id} {one.representation.model_revision}",
            )
            for one in found
        )  # fmt: skip
        table = app.Grid(headings, cells, wraps=3)
        return app.Shown({"address": address, "spaces": rows}, [table])
    begun = check_digits("prefix", prefix) if prefix else ""
    last = check_digits("after", after) if after else ""
    with Selection(address, namespace, model, tenant).clients() as clients:
        pages = list(_pages(clients, begun, last, limit))
    return app.Shown({"address": address, "spaces": pages}, _page_text(pages))


def _pages(
    clients: Sequence[Client], begun: str, last: str, limit: int
) -> Iterator[dict[str, Any]]:
    if last and len(clients) != 1:
        raise InvalidRequestError("after", last, "name the --namespace of the page")
    if last and len(last) < DIGEST_DIGITS:
        found = list_chunks(clients[0], last, 2)
        if len(found) != 1:
            fix = "give the last digest of the previous page, or a unique prefix of it"
            raise InvalidRequestError("after", last, fix)
        last = found[0].digest.hex()
    for client in clients:
        found = list_chunks(client, begun, limit + 1, bytes.fromhex(last))  # last may be deleted
        yield {
            "namespace": client.namespace.hex(),
            "model": client.model.model_id,
            "chunks": list(map(app.as_dict, found[:limit])),
            "after": found[limit - 1].digest.hex() if len(found) > limit else None,
        }
        limit -= min(limit, len(found))
        if not limit:
            return


def _page_text(pages: Sequence[dict[str, Any]]) -> Iterator[str | app.Grid]:
    shown = [page for page in pages if page["chunks"]]
    if not shown:
        yield "no chunks"
    for page in shown:
        yield f"namespace {page['namespace']}: {page['model']}"
        cells = (
            (
                one["digest"],
                ",".join(copy["tier"] for copy in one["copies"]),
                app.readable_size(sum(copy["size_bytes"] for copy in one["copies"])),
                "-" if one["idle_s"] is None else app.readable_time(one["idle_s"]),
                one["hits"],
                _held_by(one),
            )
            for one in page["chunks"]
        )
        yield app.Grid(("digest", "tiers", "size", "idle", "hits", "held by"), cells)
        if page["after"]:
            yield f"more: --namespace {page['namespace']} --after {page['after']}"


def _held_by(chunk: dict[str, Any]) -> str:
    why = [f"{chunk['leases']} leases"] if chunk["leases"] else []
    if chunk["pinned"]:
        why.append(f"pinned {app.readable_time(chunk['pinned_s'])}")
    return ", ".join(why) or "-"


# --- stat


@app.command("stat", exits="0 1 2 3", example="3fa95c --json", section="Look")
def stat(
    address: str, name: Key, namespace: Namespace = "", model: ModelFile = None, tenant: Tenant = ""
) -> app.Shown:
    """Show a chunk's metadata, and verify its bytes.

    Exits with 1 if it is not found, or is damaged; the server then drops it.
    """
    from kvstore.proto.messages import as_message

    digits = check_digits("key", name)
    with Selection(address, namespace, model, tenant).clients() as clients:
        found = find(clients, digits)
        known = found[0].stat(keys=[found[1]], ranks=True) if found else []
        if not found or not known:
            app.fail(f"{name}: no such chunk", app.EXIT_NOT_HELD)
        client, key = found
        header, damage = None, "not read in time"
        try:
            if frame := client.frame(key, accuracy=Accuracy.approximate):
                header, damage = frame[0], ""
        except (ChunkCorruptError, InvalidFrameError) as error:
            damage = str(error)
        data = {"key": key.hex()} | app.as_dict(known[0])
        data |= {"verified": header is not None, "damage": damage or None}
        if header is not None:
            data |= {"position": header.position, "prefill_flops": header.prefill_flops}
            data["content"] = header.content.hex()
        model_message = as_message(pb.Representation, client.model)
        data["representation"] = json_format.MessageToDict(
            model_message, preserving_proto_field_name=True
        )
    return app.Shown(data, _stat_text(data), held=header is not None)


def _stat_text(chunk: dict[str, Any]) -> Iterator[str | app.Grid]:
    kind, parent, idle_s = chunk["representation"], chunk["parent"], chunk["idle_s"]
    rows = {
        "key": chunk["key"],
        "parent": parent if parent.strip("0") else "none: first of a prompt",
        "model": f"{kind.get('model_id', '')}, revision {kind.get('model_revision', '')}",
        "adapter": kind.get("adapter_digest"),
        "quantization": kind.get("quantization"),
        "tokens": f"{chunk['tokens']}, after {chunk['context_tokens']} stored ones",
        "position": f"token {chunk.get('position', '?')} of its prompt",
        "raw size": app.readable_size(chunk["raw_bytes"]),
        "frame": chunk["damage"] or "verified",
        "last use": "unknown" if idle_s is None else f"{app.readable_time(idle_s)} ago",
        "hits": chunk["hits"],
        "held by": _held_by(chunk),
        "time to live": app.readable_time(chunk["expires_s"]) if chunk["expires_s"] else "none",
        "priority": chunk["priority"],
    }
    yield from (f"{name + ':':<15}{value}" for name, value in rows.items())
    copies = (
        (
            one["tier"], one["codec"], one["accuracy"], app.readable_size(one["size_bytes"]),
            f"{'at least ' if one['at_least'] else ''}{one['before']} others", one["policy"],
        )
        for one in chunk["copies"]
    )  # fmt: skip
    yield app.Grid(("tier", "codec", "accuracy", "size", "evicted after", "policy"), copies)
    names = ("layers", "kind", "dtype", "kv_heads", "head_dim", "tokens")
    parts = ([part[name] for name in names] for part in chunk["components"])
    yield app.Grid(("layers", "kind", "dtype", "KV heads", "head dim", "tokens"), parts)


# --- pin and unpin


@app.command("pin", exits="0 1 2 3", example="3fa95c --for 2h", section="Change")
def pin(
    address: str,
    keys: Keys = None,
    prefix: Prefix = "",
    namespace: Namespace = "",
    tenant: Tenant = "",
    duration: Annotated[str, Option("--for", metavar="TIME", help="30s, 2h; at most 24h.")] = "1h",
) -> app.Shown:
    """Protect chunks from eviction for a time; exits with 1 unless all are stored.

    The server limits pins, and drops them when it stops.
    """
    from kvstore.server.settings.rules import parse_ttl

    try:
        ttl_s = parse_ttl(duration)
    except ValueError:
        ttl_s = 0
    if not 0 < ttl_s <= MAX_PIN_S:
        fix = "give a time such as 30s, 10min or 2h; at most 24h"
        raise InvalidRequestError("for", duration, fix)
    selection = Selection(address, namespace, tenant=tenant)
    return _keep(selection, keys or [], prefix, lambda c, some: c.pin(keys=some, ttl=ttl_s))


@app.command("unpin", exits="0 1 2 3", example="--prefix 3fa9", section="Change")
def unpin(
    address: str,
    keys: Keys = None,
    prefix: Prefix = "",
    namespace: Namespace = "",
    tenant: Tenant = "",
) -> app.Shown:
    """End the pins of chunks; exits with 1 unless all had one."""
    selection = Selection(address, namespace, tenant=tenant)
    return _keep(selection, keys or [], prefix, lambda c, some: c.unpin(keys=some))


def _keep(
    selection: Selection,
    names: Sequence[str],
    prefix: str,
    work: Callable[[Client, Sequence[ChunkKey]], int],
) -> app.Shown:
    """Run *work* on the chunks called *names*, or those whose digests begin with *prefix*."""
    if bool(names) == bool(prefix):
        raise InvalidRequestError("keys", len(names), "give keys, or --prefix")
    named = [check_digits("key", name) for name in names]
    begun = check_digits("prefix", prefix) if prefix else ""
    with selection.clients() as clients:
        found = filter(None, (find(clients, digits) for digits in named))
        chosen = [(client, [key]) for client, key in found]
        for client in clients if prefix else ():
            chunks = list_chunks(client, begun, MAX_PREFIX_CHUNKS + 1)
            if len(chunks) > MAX_PREFIX_CHUNKS:
                fix = f"matches over {MAX_PREFIX_CHUNKS} chunks; give more digits"
                raise InvalidRequestError("prefix", prefix, fix)
            chosen.append((client, [ChunkKey(client.namespace + one.digest) for one in chunks]))
        done = sum(work(client, keys) for client, keys in chosen)
    count = len(names) or sum(len(keys) for _, keys in chosen)
    text = f"{done} of {count} chunks"
    return app.Shown({"done": done, "named": count}, [text], held=done >= count > 0)


# --- clear


@app.command("clear", exits="0 1 2 3", example="--tier disk --dry-run", section="Change")
def clear(  # noqa: PLR0913 - each is an option
    address: str,
    namespace: Namespace = "",
    model: ModelFile = None,
    tenant: Annotated[str, Option(metavar="NAME", help="All chunks of a tenant.")] = "",
    tier: Annotated[app.TierName | None, Option(help="Only the copies on this tier.")] = None,
    everything: Annotated[bool, Option("--all", help="Chunks of all tenants (admins).")] = False,
    yes: app.Yes = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Only count what would be deleted.")] = False,
) -> app.Shown:
    """Delete the chunks of a namespace, a tenant, a tier or all, except those in use or pinned.

    --tier alone deletes your tenant's copies on it; another --tenant is for admins. Prompts for
    confirmation unless --yes is given.
    """
    selection = Selection(address, namespace, model)
    named = bool(namespace or model)
    if everything + bool(tenant) + named > 1:
        fix = "give one of --namespace, --tenant and --all"
        raise InvalidRequestError("scope", tenant or namespace, fix)
    if not (everything or tenant or named or tier):
        fix = "choose what to clear: --namespace, --tenant, --tier or --all"
        raise InvalidRequestError("scope", "", fix)
    scope = "every chunk of every tenant" if everything else "your tenant's chunks"
    if tenant:
        scope = f"the chunks of tenant {tenant}"
    elif named:
        scope = f"the chunks of namespace {namespace or model}"
    fields = {"tenant": EVERY_TENANT if everything else tenant, "tier": tier or ""}
    if not (yes or dry_run):
        would = _cleared_text(_run_clear(selection, fields, dry_run=True))
        app.confirm(f"{would}: {scope}{f' on {tier}' if tier else ''}. Continue?")
    data = _run_clear(selection, fields, dry_run=dry_run)
    return app.Shown(data, [_cleared_text(data)])


def _run_clear(selection: Selection, scope: dict[str, str], *, dry_run: bool) -> dict[str, Any]:
    """Clear *scope*; return how many chunks were, or would be, deleted, and how many are in use."""
    deleted = deleted_bytes = 0
    fields: dict[str, Any] = {**scope, "dry_run": dry_run, "deadline_ms": DEADLINE_MS}
    is_narrow = selection.namespace or selection.model
    model = selection.only(selection.models()) if is_narrow else None
    with (
        open_session(selection.address, model) as (connection, session),
        app.progress("clearing") as report,
    ):
        while True:
            reply = app.rpc(connection, "Clear", 2 * DEADLINE_MS, **fields, **session)
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
    return f"{verb} {data['deleted']} chunks, {app.readable_size(data['deleted_bytes'])}{skipped}"
