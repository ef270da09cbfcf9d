"""Namespaces of a server, and chunks as people name them: by some digits of their keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import json_format

from kvstore.cli.access import dial, given_access
from kvstore.client.client import Client
from kvstore.client.options import ClientOptions
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    TierUnavailableError,
)
from kvstore.proto.keys import chunk_key
from kvstore.proto.messages import representation_from_message
from kvstore.proto.types import DIGEST_BYTES, ChainDigest, ChunkKey

DEADLINE_MS = 10_000
LEAST_DIGITS = 4
"""Of a key that is not written out."""
MAX_SEARCHED = 32
"""Namespaces that are searched for a key that names none."""


@dataclass(frozen=True, slots=True)
class Where:
    """Which server, and of it whose chunks: ``tenant`` empty for one's own, or ``pool:NAME``.

    ``space`` begins the digits of a namespace, ``representation`` is a file that stands for one.
    """

    address: str
    space: str = ""
    representation: Path | None = None
    tenant: str = ""

    def __post_init__(self) -> None:
        if self.space and self.representation is not None:
            fix = "give a namespace or a Model, not both"
            raise InvalidRequestError("namespace", self.space, fix)
        if self.space:
            hex_prefix("namespace", self.space)


@dataclass(frozen=True, slots=True)
class Place:
    """A namespace, and a client of it. ``model`` is its name; the client is closed elsewhere."""

    client: Client
    model: str


def hex_prefix(field: str, text: str) -> str:
    """Return *text* in small letters if it is digits of a key. Raises InvalidRequestError."""
    found = text.lower()
    if len(found) < LEAST_DIGITS or set(found) - set("0123456789abcdef"):
        fix = f"write at least {LEAST_DIGITS} hexadecimal digits, as kvstore ls shows them"
        raise InvalidRequestError(field, text, fix)
    return found


def one_of(field: str, begun: str, ids: Sequence[str]) -> str | None:
    """Return the one of *ids* that is *begun* or begins with it; None when none does.

    Raises InvalidRequestError when several do.
    """
    found = [begun] if begun in ids else [one for one in ids if one.startswith(begun)]
    if len(found) > 1:
        raise several(field, begun, found)
    return found[0] if found else None


def several(field: str, begun: str, found: Sequence[str]) -> InvalidRequestError:
    """Return the error of an id that begins all of *found*."""
    fix = f"stands for several: {', '.join(found[:4])}; give more digits"
    return InvalidRequestError(field, begun, fix)


def ask_spaces(address: str, tenant: str = "") -> list[pb.KnownSpace]:
    """Return the namespaces of a tenant that the server at *address* knows, the latest first."""
    connection = dial(address, DEADLINE_MS)
    found: dict[bytes, pb.KnownSpace] = {}
    try:
        request = pb.SpacesRequest(tenant=tenant)
        while True:
            reply = connection.call("Spaces", request, DEADLINE_MS, pb.SpacesResponse)
            for one in reply.spaces:
                found.setdefault(one.key_namespace, one)  # a session that opens moves the rest
            request.skip += len(reply.spaces)
            if not reply.left or not reply.spaces:
                return list(found.values())
    except (TierUnavailableError, DeadlineError) as error:
        reason = str(error).rpartition(": ")[2]  # the end of gRPC's report of all it tried
        raise KVStoreError(f"no kvstore-server answers at {address}: {reason}") from None
    finally:
        connection.close()


def read_representation(path: Path) -> pb.Representation:
    """Return the Model in a JSON file, as ``kvstore explain --spaces --json`` prints it.

    Raises InvalidRequestError, ModelError.
    """
    message = pb.Representation()
    try:
        json_format.Parse(path.read_text(), message)
    except json_format.ParseError as error:
        raise InvalidRequestError("model_representation", str(path), str(error)) from None
    representation_from_message(message)
    return message


@contextmanager
def places(where: Where) -> Iterator[list[Place]]:
    """Open clients of the namespaces that *where* names, of those with the most chunks.

    Raises InvalidRequestError for a namespace that is not known there, KVStoreErrors.
    """
    opened: list[Place] = []
    try:
        kinds = representations(where)[:MAX_SEARCHED]
        opened += [Place(client_of(where, kind), kind.model_id) for kind in kinds]
        yield opened
    finally:
        for place in opened:
            place.client.close()


def representations(where: Where) -> list[pb.Representation]:
    """Return what the namespaces that *where* names stand for, that with the most chunks first."""
    if where.representation is not None:
        return [read_representation(where.representation)]
    return [one.representation for one in sorted(_named(where), key=lambda one: -one.chunks)]


def representation(where: Where) -> pb.Representation:
    """Return what the only namespace that *where* names stands for."""
    if where.representation is not None:
        return read_representation(where.representation)
    known = {one.key_namespace.hex(): one.representation for one in _named(where)}
    return known[one_of("namespace", where.space.lower(), list(known)) or ""]


def _named(where: Where) -> list[pb.KnownSpace]:
    """Return the namespaces that *where* names, some at least if it names any."""
    spaces = [
        one
        for one in ask_spaces(where.address, where.tenant)
        if one.key_namespace.hex().startswith(where.space.lower())
    ]
    if where.space and not spaces:
        fix = "is not known there; kvstore ls --spaces shows those that are"
        raise InvalidRequestError("namespace", where.space, fix)
    return spaces


def client_of(where: Where, kind: pb.Representation) -> Client:
    """Return a client of the namespace of *kind*; whoever asked closes it."""
    options = ClientOptions(
        "grpc", deadline_ms=DEADLINE_MS, access=given_access(), name="kvstore", tenant=where.tenant
    )
    return Client(where.address, representation_from_message(kind), options)


def find(opened: Sequence[Place], name: str) -> tuple[Place, ChunkKey] | None:
    """Return the chunk that *name* is the beginning of, or the digest of; None when there is none.

    A key of 64 digits is looked for in its own namespace. Raises InvalidRequestError when the name
    stands for several.
    """
    digits = hex_prefix("key", name)
    if len(digits) > 2 * DIGEST_BYTES:
        space, digits = digits[: 2 * DIGEST_BYTES], digits[2 * DIGEST_BYTES :]
        opened = [place for place in opened if place.client.namespace.hex() == space]
    found = {
        chunk_key(place.client.namespace, digest): place
        for place in opened
        for digest in digests_from(place, digits, 2)
    }
    if len(found) > 1:
        raise several("key", name, [key.hex() for key in found])
    return next(((place, key) for key, place in found.items()), None)


def digests_from(place: Place, digits: str, limit: int) -> list[ChainDigest]:
    """Return the digests of *place* that begin with *digits*, *limit* at most unless 0."""
    if len(digits) > 2 * DIGEST_BYTES:
        raise InvalidRequestError("key", digits, f"a digest has {2 * DIGEST_BYTES} digits")
    odd = len(digits) % 2
    prefix = bytes.fromhex(digits[: len(digits) - odd])
    chunks = place.client.list(0 if odd else limit, prefix=prefix)
    found = [ChainDigest(one.digest) for one in chunks if one.digest.hex().startswith(digits)]
    return found[: limit or None]
