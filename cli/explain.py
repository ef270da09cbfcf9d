"""`kvstore explain`: why chunks are hits or misses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from kvstore.cli.app import AsJson, Grid, as_dict, ask, call, command, connected, number, path, show
from kvstore.cli.chunks import (
    DEADLINE_MS,
    DIGEST_DIGITS,
    KEY_DIGITS,
    ModelFile,
    Namespace,
    Selection,
    check_digits,
    find,
    namespace_as_dict,
    open_session,
)
from kvstore.proto.errors import InvalidRequestError

if TYPE_CHECKING:  # help is to load none of the product
    from kvstore.proto import kvstore_pb2 as pb
    from kvstore.proto.blend import GateView

_BOTH = f"{DIGEST_DIGITS} of a digest, {KEY_DIGITS} of a key"


@command("explain", example="kvstore explain --recent 20", section="Look")
def explain(  # noqa: PLR0913 - each is an option
    address: str,
    model: ModelFile = None,
    namespace: Namespace = "",
    tokens: Annotated[Path | None, path("Token ids of a prompt.")] = None,
    keys: Annotated[list[str] | None, Option(metavar="HEX", help="Key, digest or prefix.")] = None,
    chunk_tokens: Annotated[int, number("Tokens of the engine's chunks.")] = 256,
    extra: Annotated[
        list[str] | None, Option(metavar="HEX", help="Cache salt or image hash.")
    ] = None,
    recent: Annotated[int, number("The last N misses, and the engines' counts.", 0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Explain why a prompt's chunks are hits or misses, or the latest misses.

    Without --model-representation it is answered on the server's host only.
    """
    if (tokens is not None) + bool(keys) + bool(recent) != 1:
        raise InvalidRequestError("explain", "", "give one of --tokens, --keys and --recent")
    selection = Selection(address, namespace, model)
    if recent:
        reply = call(address, "Explain", DEADLINE_MS, recent=recent)
    elif tokens is not None:
        digests = _digests_of(tokens, chunk_tokens, extra or [])
        reply = _explained(selection, _namespace_of(selection), digests)
    else:
        reply = _explained(selection, *_digests_named(selection, keys or []))
    show(_as_dict(address, reply), _text(reply), as_json)


# --- the question


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
        raise InvalidRequestError("tokens", len(tokens), "fewer than a chunk has")
    return found


def read_tokens(path: Path) -> list[int]:
    """Return the token ids in a file: a JSON list, or numbers with blanks or commas between."""
    words = path.read_text().replace(",", " ").replace("[", " ").replace("]", " ").split()
    try:
        return [int(word) for word in words]
    except ValueError as error:
        raise InvalidRequestError("tokens", str(path), f"only token ids: {error}") from None


def _digests_named(selection: Selection, names: Sequence[str]) -> tuple[bytes, list[bytes]]:
    """Return the namespace, if one is named, and the digests of the chunks called *names*."""
    size, space = DIGEST_DIGITS // 2, _namespace_of(selection)
    place = replace(selection, namespace=space.hex())
    keys = [_key_of(place, one) for one in names]
    spaces = {key[:-size] for key in keys if len(key) > size} | ({space} - {b""})
    if len(spaces) > 1:
        raise InvalidRequestError("keys", sorted(one.hex() for one in spaces), "of one namespace")
    return next(iter(spaces), b""), [key[-size:] for key in keys]


def _key_of(selection: Selection, text: str) -> bytes:
    """Return the digest or key that *text* is, or of the one chunk that it is the beginning of."""
    digits = check_digits("keys", text)
    if len(digits) in (DIGEST_DIGITS, KEY_DIGITS):
        return bytes.fromhex(digits)
    with selection.clients() as clients:
        found = find(clients, digits)
    if found is None:
        fix = f"begins no chunk that is there; give all digits of one that is not: {_BOTH}"
        raise InvalidRequestError("keys", text, fix)
    return found[1]


def _namespace_of(selection: Selection) -> bytes:
    """Return the one namespace that is meant, if any; one that is written out may be unknown."""
    digits = selection.namespace.lower()
    if 0 < len(digits) < DIGEST_DIGITS:
        return selection.only(selection.spaces()).key_namespace
    return bytes.fromhex(digits)


def _explained(selection: Selection, space: bytes, digests: Sequence[bytes]) -> pb.ExplainResponse:
    """Return the reply about a long prompt of several requests: each knows of its own gap."""
    from kvstore.proto import kvstore_pb2 as pb
    from kvstore.proto.messages import MAX_EXPLAINED

    if selection.model is None and not space:
        fix = "give --namespace or --model-representation, or keys of 64 digits"
        raise InvalidRequestError("namespace", None, fix)
    model = None if selection.model is None else selection.only(selection.models())
    whole = pb.ExplainResponse()
    gap: int | None = None
    with ExitStack() as stack:
        connection = stack.enter_context(connected(selection.address, DEADLINE_MS))
        terms: dict[str, Any] = {"key_namespace": space}
        if model is not None:
            terms = {"session_id": stack.enter_context(open_session(connection, model))}
        for first in range(0, len(digests), MAX_EXPLAINED):
            some = b"".join(digests[first : first + MAX_EXPLAINED])
            reply = ask(connection, "Explain", DEADLINE_MS, digests=some, **terms)
            for at, one in enumerate(reply.chunks, first):
                if one.state not in ("ready", "no_end", "behind"):
                    gap = at if gap is None else gap
                elif gap is not None and one.state != "no_end":
                    one.state, one.reason = "behind", f"here, but chunk {gap} before it is not"
            if whole.near:
                del reply.near[:]
            hits = reply.hit_chunks if whole.hit_chunks == first else 0
            reply.hit_chunks = whole.hit_chunks + hits
            reply.left_out += whole.left_out
            whole.MergeFrom(reply)
    return whole


# --- the answer


def _as_dict(address: str, reply: pb.ExplainResponse) -> dict[str, Any]:
    from kvstore.cli.calibrate import gate_as_dict
    from kvstore.proto.types import Accuracy

    found: dict[str, Any] = {"address": address, "left_out": reply.left_out}
    if reply.chunks:
        chunks = list(map(as_dict, reply.chunks))
        for copy in (copy for chunk in chunks for copy in chunk["copies"]):
            copy["accuracy"] = Accuracy(copy["accuracy"]).name
        near = [
            namespace_as_dict(one)
            | {"same_tokens": one.same_tokens, "differences": [*map(as_dict, one.differences)]}
            for one in reply.near
        ]
        return found | {"hit_chunks": reply.hit_chunks, "chunks": chunks, "near": near}
    engines = [
        as_dict(one) | {"refused": refused, "counts": counts}
        for one, refused, counts in _engines(reply)
    ]
    gates = [gate_as_dict(gate) for gate in _gates(reply)]
    return found | {"recent": [*map(as_dict, reply.recent)], "engines": engines, "gates": gates}


def _gates(reply: pb.ExplainResponse) -> Iterator[GateView]:
    from kvstore.proto.blend import GateView
    from kvstore.proto.messages import as_value

    return (as_value(GateView, one) for one in reply.gates)


def _engines(
    reply: pb.ExplainResponse,
) -> Iterator[tuple[pb.EngineReport, list[str], dict[str, int]]]:
    """Yield each engine, why it runs without the store if it does, and its other counts."""
    from kvstore.proto.messages import REFUSED

    for one in reply.engines:
        counts = dict(sorted(one.counts.items()))
        refused = [name for name in counts if name.startswith(REFUSED)]
        for name in refused:
            del counts[name]
        yield one, [name.removeprefix(REFUSED) for name in refused], counts


def _text(reply: pb.ExplainResponse) -> Iterator[str | Grid]:
    from kvstore.cli.calibrate import gate_line

    if reply.chunks:
        yield from _chunks_text(reply)
    if reply.recent:
        misses = (
            (
                f"{miss.ago_s:.0f} s", miss.client, miss.model_id,
                f"{miss.ready} of {miss.chunks}"
                + (f", {miss.pending} pending" if miss.pending else ""),
                miss.state, miss.reason,
            )
            for miss in reply.recent
        )  # fmt: skip
        yield Grid(("ago", "client", "model", "found", "state", "why"), misses)
    if reply.engines:
        engines = (
            (
                f"{one.ago_s:.0f} s ago", one.client, one.model_id,
                ", ".join(f"{name} {count}" for name, count in counts.items()),
            )
            for one, _, counts in _engines(reply)
        )  # fmt: skip
        yield Grid(("reported", "client", "model", "counts of its engine"), engines)
    for one, refused, _ in _engines(reply):
        name = one.client or "no name"
        yield from (f"{name} runs without the store: {reason}" for reason in refused)
    if reply.gates:
        yield "blending:"
        yield from (f"  {gate_line(gate)}" for gate in _gates(reply))
    if reply.left_out:
        yield f"{reply.left_out} more do not fit into one reply"
    if not (reply.chunks or reply.recent or reply.engines or reply.gates):
        yield "nothing: no misses and no reports of engines recorded"


def _chunks_text(reply: pb.ExplainResponse) -> Iterator[str | Grid]:
    yield f"hit: {reply.hit_chunks} of {len(reply.chunks)} chunks"
    cells = (
        (
            at, one.digest.hex(), one.state,
            ", ".join(f"{copy.tier} {copy.codec} {copy.size_bytes}" for copy in one.copies) or "-",
            one.reason,
        )
        for at, one in enumerate(reply.chunks)
    )  # fmt: skip
    yield Grid(("chunk", "digest", "state", "copies", "why"), cells, wraps=2)
    for near in reply.near:
        yield (
            f"{near.chunks} chunks under another identity"
            f"{', of these tokens too' if near.same_tokens else ''}"
            f" ({near.client or 'no name'}, {near.key_namespace.hex()}):"
        )
        for other in near.differences:
            yield f"  {other.field} differs: {other.stored} stored, {other.asked} asked"
