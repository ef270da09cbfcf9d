"""`kvstore explain`: why chunks are hits or misses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from kvstore.cli import app, chunks
from kvstore.cli.calibrate import gate_as_dict, gate_line
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import Accuracy


@app.command("explain", example="--recent 20", section="Look")
def explain(  # noqa: PLR0913 - each is an option
    address: str,
    model: chunks.ModelFile = None,
    namespace: chunks.Namespace = "",
    tokens: Annotated[Path | None, app.path("Token ids of a prompt.")] = None,
    keys: Annotated[list[str] | None, Option(metavar="HEX", help="Key, digest or prefix.")] = None,
    chunk_tokens: Annotated[int, app.number("Tokens of the engine's chunks.")] = 256,
    extra: Annotated[list[str] | None, Option(metavar="HEX", help="Salt or image hash.")] = None,
    recent: Annotated[int, app.number("The last N misses, and the engines' counts.", 0)] = 0,
) -> app.Shown:
    """Explain why a prompt's chunks are hits or misses, or the latest misses.

    Without --model-representation it works on the server's host only.
    """
    if (tokens is not None) + bool(keys) + bool(recent) != 1:
        raise InvalidRequestError("explain", "", "give one of --tokens, --keys and --recent")
    selection = chunks.Selection(address, namespace, model)
    if recent:
        reply = app.call(address, "Explain", chunks.DEADLINE_MS, recent=recent)
    elif tokens is not None:
        digests = _digests_of(tokens, chunk_tokens, extra or [])
        reply = _explained(selection, _namespace_of(selection), digests)
    else:
        reply = _explained(selection, *_digests_named(selection, keys or []))
    found = _as_dict(address, reply)
    return app.Shown(found, _text(found))


# --- request


def _digests_of(path: Path, chunk_tokens: int, extra: Sequence[str]) -> list[bytes]:
    from kvstore.proto.keys import chain_digests

    try:
        salts = [bytes.fromhex(one) for one in extra]
    except ValueError:
        fix = "write hexadecimal digits"
        raise InvalidRequestError("extra", " ".join(extra), fix) from None
    tokens = read_tokens(path)
    found = [bytes(one) for one in chain_digests(tokens, chunk_tokens, salts)]
    if not found:
        raise InvalidRequestError("tokens", len(tokens), "give at least one chunk's tokens")
    return found


def read_tokens(path: Path) -> list[int]:
    """Return the token ids in a file: a JSON list, or numbers separated by blanks or commas."""
    words = path.read_text().replace(",", " ").replace("[", " ").replace("]", " ").split()
    try:
        return [int(word) for word in words]
    except ValueError as error:
        raise InvalidRequestError("tokens", str(path), f"only token ids: {error}") from None


def _digests_named(selection: chunks.Selection, names: Sequence[str]) -> tuple[bytes, list[bytes]]:
    """Return the namespace, if any is given, and the digests of the chunks called *names*."""
    size, space = chunks.DIGEST_DIGITS // 2, _namespace_of(selection)
    place = replace(selection, namespace=space.hex())
    keys = [_key_of(place, one) for one in names]
    spaces = {key[:-size] for key in keys if len(key) > size} | ({space} - {b""})
    if len(spaces) > 1:
        raise InvalidRequestError("keys", sorted(one.hex() for one in spaces), "give one namespace")
    return next(iter(spaces), b""), [key[-size:] for key in keys]


def _key_of(selection: chunks.Selection, text: str) -> bytes:
    """Return the digest or key *text*, or the key of the only chunk with that prefix."""
    digits = chunks.check_digits("keys", text)
    if len(digits) in (chunks.DIGEST_DIGITS, chunks.KEY_DIGITS):
        return bytes.fromhex(digits)
    with selection.clients() as clients:
        found = chunks.find(clients, digits)
    if found is None:
        fix = "no stored chunk begins with it; for a missing one give all 32 or 64 digits"
        raise InvalidRequestError("keys", text, fix)
    return found[1]


def _namespace_of(selection: chunks.Selection) -> bytes:
    """Return the selected namespace, if any; one given in full may be unknown."""
    digits = selection.namespace.lower()
    if 0 < len(digits) < chunks.DIGEST_DIGITS:
        return selection.only(selection.spaces()).key_namespace
    return bytes.fromhex(digits)


def _explained(
    selection: chunks.Selection, space: bytes, digests: Sequence[bytes]
) -> pb.ExplainResponse:
    """Merge the replies of several requests for a long prompt: each covers only its own gap."""
    from kvstore.proto.messages import MAX_EXPLAINED

    if selection.model is None and not space:
        fix = "give --namespace or --model-representation, or keys of 64 digits"
        raise InvalidRequestError("namespace", None, fix)
    model = None if selection.model is None else selection.models()[0]
    whole = pb.ExplainResponse()
    gap: int | None = None
    with chunks.open_session(selection.address, model) as (connection, session):
        terms = session or {"key_namespace": space}
        for first in range(0, len(digests), MAX_EXPLAINED):
            some = b"".join(digests[first : first + MAX_EXPLAINED])
            reply = app.rpc(connection, "Explain", chunks.DEADLINE_MS, digests=some, **terms)
            for at, one in enumerate(reply.chunks, first):
                if one.state not in ("ready", "no_end", "behind"):
                    gap = at if gap is None else gap
                elif gap is not None and one.state != "no_end":
                    one.state, one.reason = "behind", f"cached, but the earlier chunk {gap} is not"
            if whole.near:
                del reply.near[:]
            hits = reply.hit_chunks if whole.hit_chunks == first else 0
            reply.hit_chunks = whole.hit_chunks + hits
            reply.left_out += whole.left_out
            whole.MergeFrom(reply)
    return whole


# --- reply


def _as_dict(address: str, reply: pb.ExplainResponse) -> dict[str, Any]:
    from kvstore.proto.messages import REFUSED

    found: dict[str, Any] = {"address": address, "left_out": reply.left_out}
    if reply.chunks:
        rows = app.as_dict(reply.chunks)
        for copy in (copy for row in rows for copy in row["copies"]):
            copy["accuracy"] = Accuracy(copy["accuracy"]).name
        near = [
            chunks.namespace_as_dict(one)
            | {"same_tokens": one.same_tokens, "differences": app.as_dict(one.differences)}
            for one in reply.near
        ]
        return found | {"hit_chunks": reply.hit_chunks, "chunks": rows, "near": near}
    engines = app.as_dict(reply.engines)
    for one in engines:
        counts = one["counts"]
        refused = [name for name in counts if name.startswith(REFUSED)]
        one["refused"] = [name.removeprefix(REFUSED) for name in refused]
        one["counts"] = {name: counts[name] for name in counts if name not in refused}
    gates = list(map(gate_as_dict, reply.gates))
    return found | {"recent": app.as_dict(reply.recent), "engines": engines, "gates": gates}


def _text(found: dict[str, Any]) -> Iterator[str | app.Grid]:
    yield from _chunks_text(found) if "chunks" in found else _recent_text(found)
    if found["left_out"]:
        yield f"{found['left_out']} more omitted"


def _recent_text(found: dict[str, Any]) -> Iterator[str | app.Grid]:
    misses = [
        (
            f"{miss['ago_s']:.0f} s", miss["client"], miss["model_id"],
            f"{miss['ready']} of {miss['chunks']}"
            + (f", {miss['pending']} pending" if miss["pending"] else ""),
            miss["state"], miss["reason"],
        )
        for miss in found["recent"]
    ]  # fmt: skip
    if misses:
        yield app.Grid(("ago", "client", "model", "found", "state", "why"), misses)
    engines = [
        (
            f"{one['ago_s']:.0f} s ago", one["client"], one["model_id"],
            ", ".join(f"{name} {count}" for name, count in one["counts"].items()),
        )
        for one in found["engines"]
    ]  # fmt: skip
    if engines:
        yield app.Grid(("reported", "client", "model", "counts of its engine"), engines)
    for one in found["engines"]:
        name = one["client"] or "no name"
        yield from (f"{name} runs without the store: {reason}" for reason in one["refused"])
    if found["gates"]:
        yield "blending:"
        yield from (f"  {gate_line(gate)}" for gate in found["gates"])
    if not (misses or engines or found["gates"]):
        yield "no misses and no reports of engines recorded"


def _chunks_text(found: dict[str, Any]) -> Iterator[str | app.Grid]:
    yield f"hit: {found['hit_chunks']} of {len(found['chunks'])} chunks"
    cells = (
        (
            at, one["digest"], one["state"],
            ", ".join(f"{c['tier']} {c['codec']} {c['size_bytes']}" for c in one["copies"]) or "-",
            one["reason"],
        )
        for at, one in enumerate(found["chunks"])
    )  # fmt: skip
    yield app.Grid(("chunk", "digest", "state", "copies", "why"), cells, wraps=2)
    for near in found["near"]:
        yield (
            f"{near['chunks']} chunks under another identity"
            f"{', also of these tokens' if near['same_tokens'] else ''}"
            f" ({near['client'] or 'no name'}, {near['namespace']}):"
        )
        for other in near["differences"]:
            stored, requested = other["stored"], other["asked"]
            yield f"  {other['field']} differs: stored {stored}, requested {requested}"
