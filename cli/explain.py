"""Why chunks are hits or misses: asked of a server, shown as tables or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from rich.console import Console

from kvstore.cli.access import dial
from kvstore.cli.blend_report import gate_as_dict, gate_line
from kvstore.cli.spaces import Where, find, hex_prefix, one_of, places, read_representation
from kvstore.cli.tables import Grid, open_console
from kvstore.client.batches import digest_batches
from kvstore.client.connection import Connection
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.blend import GateView
from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    TierUnavailableError,
)
from kvstore.proto.keys import chain_digests
from kvstore.proto.messages import MAX_EXPLAINED, REFUSED, as_value
from kvstore.proto.types import DIGEST_BYTES, KEY_BYTES

DEADLINE_MS = 10_000
CLIENT_NAME = "kvstore explain"
_DIGITS = f"{2 * DIGEST_BYTES} of a digest, {2 * KEY_BYTES} of a key"


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. *space* is the namespace, *representation* a file that stands for one."""

    representation: Path | None = None
    space: str | None = None
    tokens: Path | None = None
    keys: Sequence[str] = ()
    chunk_tokens: int = 256
    extra: Sequence[str] = ()
    recent: int = 0
    spaces: bool = False

    def __post_init__(self) -> None:
        if self.tokens is not None and self.keys:
            raise InvalidRequestError("keys", len(self.keys), "give tokens or keys, not both")
        if self.representation is not None and self.space is not None:
            fix = "give a namespace or a Model, not both"
            raise InvalidRequestError("namespace", self.space, fix)
        if self.names_chunks == (self.recent > 0 or self.spaces):
            fix = "give --tokens or --keys; or else --recent or --spaces"
            raise InvalidRequestError("tokens", self.tokens, fix)

    @property
    def names_chunks(self) -> bool:
        """Whether it is about chunks."""
        return self.tokens is not None or bool(self.keys)


def ask_explain(address: str, question: Question) -> pb.ExplainResponse:
    """Return the answer of the server at *address*.

    Raises InvalidRequestError for a question that cannot be asked, other KVStoreErrors when the
    server does not answer within ten seconds or refuses.
    """
    request, representation = _request(address, question)
    connection = dial(address, DEADLINE_MS)
    try:
        if representation is None:
            return _explained(connection, request)
        opening = pb.OpenSessionRequest(representation=representation, client=CLIENT_NAME)
        terms = connection.call("OpenSession", opening, DEADLINE_MS, pb.OpenSessionResponse)
        request.session_id = terms.session_id
        try:
            return _explained(connection, request)
        finally:
            closing = pb.CloseSessionRequest(session_id=terms.session_id)
            connection.call("CloseSession", closing, DEADLINE_MS, pb.CloseSessionResponse)
    except (TierUnavailableError, DeadlineError) as error:
        reason = str(error).rpartition(": ")[2]  # the end of gRPC's report of all it tried
        raise KVStoreError(f"no kvstore-server answers at {address}: {reason}") from None
    finally:
        connection.close()


def _explained(connection: Connection, request: pb.ExplainRequest) -> pb.ExplainResponse:
    """Return the answer, about a long prompt of several requests: each knows of its own gap."""
    whole = pb.ExplainResponse()
    gap: int | None = None
    for number, some in enumerate(digest_batches(request.digests, MAX_EXPLAINED)):
        request.digests, first = some, number * MAX_EXPLAINED
        reply = connection.call("Explain", request, DEADLINE_MS, pb.ExplainResponse)
        for at, one in enumerate(reply.chunks, first):
            if one.state not in ("ready", "no_end", "behind"):
                gap = at if gap is None else gap
            elif gap is not None and one.state != "no_end":
                one.state, one.reason = "behind", f"here, but chunk {gap} before it is not"
        if whole.near:
            del reply.near[:]
        hits = reply.hit_chunks if whole.hit_chunks == first else 0
        reply.hit_chunks, reply.left_out = whole.hit_chunks + hits, whole.left_out + reply.left_out
        whole.MergeFrom(reply)
    return whole


def _request(
    address: str, question: Question
) -> tuple[pb.ExplainRequest, pb.Representation | None]:
    """Return the request, and the Model to open a session with, if any is named."""
    request = pb.ExplainRequest(recent=question.recent, spaces=question.spaces)
    if not question.names_chunks:
        return request, None
    space, digests = _digests(address, question)
    request.digests = b"".join(digests)
    if question.representation is not None:
        return request, read_representation(question.representation)
    if not space:
        fix = "give --namespace or --model-representation, or keys of 64 digits"
        raise InvalidRequestError("namespace", question.space, fix)
    request.key_namespace = space
    return request, None


def _digests(address: str, question: Question) -> tuple[bytes, list[bytes]]:
    """Return the namespace, if one is named, and the chunks' digests in it."""
    space = b"" if question.space is None else _space_of(address, question.space)
    if question.tokens is not None:
        extra = [_bytes("extra", one) for one in question.extra]
        tokens = read_tokens(question.tokens)
        found = [bytes(one) for one in chain_digests(tokens, question.chunk_tokens, extra)]
        if not found:
            raise InvalidRequestError("tokens", len(tokens), "fewer than a chunk has")
        return space, found
    where = Where(address, space.hex(), question.representation)
    keys = [_key_of(where, one) for one in question.keys]
    spaces = {key[:DIGEST_BYTES] for key in keys if len(key) == KEY_BYTES} | ({space} - {b""})
    if len(spaces) > 1:
        raise InvalidRequestError("keys", sorted(one.hex() for one in spaces), "of one namespace")
    return next(iter(spaces), b""), [key[-DIGEST_BYTES:] for key in keys]


def _space_of(address: str, text: str) -> bytes:
    """Return the one namespace that begins with *text*; one that is written out may be unknown."""
    digits = hex_prefix("namespace", text)
    if len(digits) == 2 * DIGEST_BYTES:
        return bytes.fromhex(digits)
    known = [one.key_namespace for one in ask_explain(address, Question(spaces=True)).spaces]
    found = one_of("namespace", digits, sorted(one.hex() for one in known))
    if found is None:
        fix = "begins none that is known there; kvstore explain --spaces shows them"
        raise InvalidRequestError("namespace", text, fix)
    return bytes.fromhex(found)


def _key_of(where: Where, text: str) -> bytes:
    """Return the digest or key that *text* is, or of the one chunk that it is the beginning of."""
    digits = hex_prefix("keys", text)
    if len(digits) in (2 * DIGEST_BYTES, 2 * KEY_BYTES):
        return bytes.fromhex(digits)
    with places(where) as opened:
        found = find(opened, digits)
    if found is None:
        fix = f"begins no chunk that is there; give all digits of one that is not: {_DIGITS}"
        raise InvalidRequestError("keys", text, fix)
    return found[1]


def _bytes(field: str, text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InvalidRequestError(field, text, "write hexadecimal digits") from None


def read_tokens(path: Path) -> list[int]:
    """Return the token ids in a file: a JSON list, or numbers with blanks or commas between."""
    words = path.read_text().replace(",", " ").replace("[", " ").replace("]", " ").split()
    try:
        return [int(word) for word in words]
    except ValueError as error:
        raise InvalidRequestError("tokens", str(path), f"only token ids: {error}") from None


# --- showing


def explain_as_json(address: str, reply: pb.ExplainResponse) -> str:
    """Return *reply* as JSON; digests and namespaces as hexadecimal digits."""
    parts: dict[str, Any] = {"address": address}
    if reply.chunks:
        chunks = [
            {
                "digest": one.digest.hex(),
                "state": one.state,
                "reason": one.reason,
                "copies": [_copy(copy) for copy in one.copies],
            }
            for one in reply.chunks
        ]
        parts |= {"hit_chunks": reply.hit_chunks, "chunks": chunks}
        parts["near"] = [_space(one) for one in reply.near]
    else:
        parts["recent"] = [json_format.MessageToDict(one, True, True) for one in reply.recent]
        parts["engines"] = [
            {"client": one.client, "model_id": one.model_id, "ago_s": one.ago_s}
            | {"refused": _reasons(one), "counts": dict(_counts(one))}
            for one in reply.engines
        ]
        parts["gates"] = [gate_as_dict(as_value(GateView, one)) for one in reply.gates]
        parts["spaces"] = [_space(one) for one in reply.spaces]
    return json.dumps(parts | {"left_out": reply.left_out}, indent=2)


def _reasons(engine: pb.EngineReport) -> list[str]:
    """Return why an engine runs without its store."""
    return sorted(name.removeprefix(REFUSED) for name in engine.counts if name.startswith(REFUSED))


def _counts(engine: pb.EngineReport) -> list[tuple[str, int]]:
    return sorted(pair for pair in engine.counts.items() if not pair[0].startswith(REFUSED))


def _copy(copy: pb.Copy) -> dict[str, object]:
    fields = ("tier", "codec", "size_bytes", "accuracy")
    return {name: getattr(copy, name) for name in fields}


def _space(space: pb.KnownSpace) -> dict[str, object]:
    return {
        "key_namespace": space.key_namespace.hex(),
        "client": space.client,
        "chunks": space.chunks,
        "same_tokens": space.same_tokens,
        "differences": [
            {"field": one.field, "stored": one.stored, "asked": one.asked}
            for one in space.differences
        ],
        "representation": json_format.MessageToDict(
            space.representation, preserving_proto_field_name=True
        ),
    }


def print_explain(reply: pb.ExplainResponse) -> None:
    """Print *reply* as tables."""
    console = open_console()
    if reply.chunks:
        _print_chunks(console, reply)
    if reply.recent or reply.engines:
        _print_recent(console, reply)
    if reply.gates:
        console.print("blending:")
        for one in reply.gates:
            line = f"  {gate_line(as_value(GateView, one))}"
            console.print(line)
    if reply.spaces:
        _print_spaces(console, reply.spaces)
    if reply.left_out:
        console.print(f"{reply.left_out} more do not fit into one reply")
    if not (reply.chunks or reply.recent or reply.engines or reply.spaces or reply.gates):
        console.print("nothing: no lookup has missed, no engine has reported, no session opened")


def _print_chunks(console: Console, reply: pb.ExplainResponse) -> None:
    count = len(reply.chunks)
    console.print(f"hit: {reply.hit_chunks} of {count} chunks")
    table = Grid("chunk", "digest", "state", "copies", "why", wraps=2)
    for at, one in enumerate(reply.chunks):
        copies = ", ".join(f"{copy.tier} {copy.codec} {copy.size_bytes}" for copy in one.copies)
        table.add_row(str(at), one.digest.hex(), one.state, copies or "-", one.reason)
    console.print(table)
    for near in reply.near:
        console.print(
            f"{near.chunks} chunks under another identity"
            f"{', of these tokens too' if near.same_tokens else ''}"
            f" ({near.client or 'no name'}, {near.key_namespace.hex()}):",
        )
        for other in near.differences:
            text = f"  {other.field} differs: {other.stored} stored, {other.asked} asked"
            console.print(text)


def _print_recent(console: Console, reply: pb.ExplainResponse) -> None:
    misses = Grid("ago", "client", "model", "found", "state", "why")
    for miss in reply.recent:
        pending = f", {miss.pending} pending" if miss.pending else ""
        misses.add_row(
            f"{miss.ago_s:.0f} s", miss.client, miss.model_id,
            f"{miss.ready} of {miss.chunks}{pending}", miss.state, miss.reason,
        )  # fmt: skip
    if reply.recent:
        console.print(misses)
    engines = Grid("heard", "client", "model", "what its engine counted")
    for one in reply.engines:
        counts = ", ".join(f"{name} {count}" for name, count in _counts(one))
        engines.add_row(f"{one.ago_s:.0f} s ago", one.client, one.model_id, counts)
    if reply.engines:
        console.print(engines)
    for one in reply.engines:
        for reason in _reasons(one):
            console.print(f"{one.client or 'no name'} runs without the store: {reason}")


def _print_spaces(console: Console, spaces: Sequence[pb.KnownSpace]) -> None:
    table = Grid("namespace", "chunks", "adapter", "client", "model and revision", wraps=3)
    for one in spaces:
        kind = one.representation
        table.add_row(
            one.key_namespace.hex(), str(one.chunks), kind.adapter_digest, one.client,
            f"{kind.model_id} {kind.model_revision}",
        )  # fmt: skip
    console.print(table)
