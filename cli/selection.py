"""Namespaces of a server, and chunks as people name them: by the first digits of their ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from kvstore.cli.app import ask, connected, given_access
from kvstore.cli.output import Grid
from kvstore.proto.errors import InvalidRequestError

if TYPE_CHECKING:  # help is to load none of the product
    from kvstore.client.client import Client
    from kvstore.client.connection import Connection
    from kvstore.client.server_state import ChunkStat
    from kvstore.proto import kvstore_pb2 as pb
    from kvstore.proto.types import ChunkKey, Model

DEADLINE_MS = 10_000
DIGEST_DIGITS = 32
KEY_DIGITS = 64  # a namespace's, then a digest's
MIN_DIGITS = 4
"""Of an id that is not written out."""
EVERY_TENANT = "*"
MAX_SEARCHED = 32
"""Namespaces that are searched for a key that names none."""
_DIGITS = "0123456789abcdef"

Namespace = Annotated[
    str, Option(metavar="HEX", help="Namespace of one model; a prefix of it is enough.")
]
ModelFile = Annotated[
    Path | None,
    Option(
        "--model-representation",
        metavar="FILE",
        help="Instead of --namespace: the model as JSON, as ls --spaces --json prints it.",
    ),
]
Tenant = Annotated[
    str, Option(metavar="NAME", help="pool:NAME for a shared pool; default: your own.")
]


@dataclass(frozen=True, slots=True)
class Selection:
    """A server, and of it the chunks of a *tenant* (empty: one's own), or ``pool:NAME``.

    *namespace* begins the digits of a namespace, *model* is a file that stands for one.
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

    @property
    def is_narrow(self) -> bool:
        """Whether it names a namespace."""
        return bool(self.namespace) or self.model is not None

    def models(self) -> list[Model]:
        """Return the models it names, that with the most chunks first. Raises KVStoreErrors."""
        from kvstore.proto.messages import representation_from_message

        if self.model is not None:
            return [read_model(self.model)]
        begun = self.namespace.lower()
        known = fetch_namespaces(self.address, self.tenant)
        found = [one for one in known if one.key_namespace.hex().startswith(begun)]
        if begun and not found:
            fix = "is not known there; kvstore ls --spaces shows those that are"
            raise InvalidRequestError("namespace", self.namespace, fix)
        found.sort(key=lambda one: -one.chunks)
        return [representation_from_message(one.representation) for one in found]

    def only_model(self) -> Model:
        """Return the one model it names. Raises InvalidRequestError when it names several."""
        found = self.models()
        if len(found) != 1:
            fix = f"stands for {len(found)} namespaces; give more digits"
            raise InvalidRequestError("namespace", self.namespace, fix)
        return found[0]

    def client(self, model: Model) -> Client:
        """Return a client of *model*'s namespace; close it."""
        from kvstore.client.client import Client
        from kvstore.client.options import ClientOptions

        options = ClientOptions(
            "grpc",
            deadline_ms=DEADLINE_MS,
            access=given_access(),
            name="kvstore",
            tenant=self.tenant,
        )
        return Client(self.address, model, options)

    @contextmanager
    def clients(self) -> Iterator[list[Client]]:
        """Open clients of the namespaces it names, of those with the most chunks."""
        with ExitStack() as opened:
            models = self.models()[:MAX_SEARCHED]
            yield [opened.enter_context(self.client(model)) for model in models]


def check_digits(field: str, text: str) -> str:
    """Return *text* in small letters if it is digits of an id. Raises InvalidRequestError."""
    found = text.lower()
    if len(found) < MIN_DIGITS or found.strip(_DIGITS):
        fix = f"write at least {MIN_DIGITS} hexadecimal digits, as kvstore ls shows them"
        raise InvalidRequestError(field, text, fix)
    return found


def only_one(field: str, begun: str, ids: Iterable[str]) -> str | None:
    """Return the one of *ids* that is *begun* or begins with it; None when none does.

    Raises InvalidRequestError when several do.
    """
    found = [one for one in ids if one.startswith(begun)]
    if begun in found:
        return begun
    if len(found) > 1:
        fix = f"stands for several: {', '.join(found[:4])}; give more digits"
        raise InvalidRequestError(field, begun, fix)
    return found[0] if found else None


def fetch_namespaces(address: str, tenant: str = "") -> list[pb.KnownSpace]:
    """Return the namespaces of *tenant* (``*``: of every one), the latest first."""
    found: dict[bytes, pb.KnownSpace] = {}
    skip = 0
    with connected(address, DEADLINE_MS) as connection:
        while True:
            reply = ask(connection, "Spaces", DEADLINE_MS, tenant=tenant, skip=skip)
            for one in reply.spaces:
                found.setdefault(one.key_namespace, one)  # a session that opens moves the rest
            skip += len(reply.spaces)
            if not reply.left or not reply.spaces:
                return list(found.values())


def read_model(path: Path) -> Model:
    """Return the model in a JSON file. Raises InvalidRequestError, ModelError, OSError."""
    from google.protobuf import json_format

    from kvstore.proto import kvstore_pb2 as pb
    from kvstore.proto.messages import representation_from_message

    try:
        message = json_format.Parse(path.read_text(), pb.Representation())
    except json_format.ParseError as error:
        raise InvalidRequestError("model_representation", str(path), str(error)) from None
    return representation_from_message(message)


def model_as_dict(model: Model | pb.Representation) -> dict[str, Any]:
    """Return a model as --model-representation reads it."""
    from google.protobuf import json_format

    from kvstore.proto import kvstore_pb2 as pb
    from kvstore.proto.messages import as_message

    if not isinstance(model, pb.Representation):
        model = as_message(pb.Representation, model)
    return json_format.MessageToDict(model, preserving_proto_field_name=True)


@contextmanager
def open_session(connection: Connection, model: Model) -> Iterator[int]:
    """Open a session of *model*'s namespace; yield its id."""
    from kvstore.proto import kvstore_pb2 as pb
    from kvstore.proto.messages import as_message

    fields = {"representation": as_message(pb.Representation, model), "client": "kvstore"}
    session_id = ask(connection, "OpenSession", DEADLINE_MS, **fields).session_id
    try:
        yield session_id
    finally:
        ask(connection, "CloseSession", DEADLINE_MS, session_id=session_id)


def find(clients: Sequence[Client], name: str) -> tuple[Client, ChunkKey] | None:
    """Return the chunk whose digest begins with *name*, or whose key does; None without one.

    Raises InvalidRequestError when the name stands for several.
    """
    from kvstore.proto.keys import chunk_key
    from kvstore.proto.types import ChainDigest, ChunkKey

    digits = check_digits("key", name)
    if len(digits) > DIGEST_DIGITS:
        namespace, digits = digits[:DIGEST_DIGITS], digits[DIGEST_DIGITS:]
        clients = [client for client in clients if client.namespace.hex() == namespace]
    found = {
        chunk_key(client.namespace, ChainDigest(one.digest)).hex(): client
        for client in clients
        for one in list_chunks(client, digits, 2)
    }
    key = only_one("key", "", found)
    return None if key is None else (found[key], ChunkKey(bytes.fromhex(key)))


def list_chunks(client: Client, digits: str, limit: int, after: bytes = b"") -> list[ChunkStat]:
    """Return chunks of *client* whose digests begin with *digits*, an odd number of them or not."""
    if len(digits) > DIGEST_DIGITS:
        raise InvalidRequestError("key", digits, f"a digest has {DIGEST_DIGITS} digits")
    found: list[ChunkStat] = []
    for digit in _DIGITS if len(digits) % 2 else [""]:
        if len(found) < limit:
            prefix = bytes.fromhex(digits + digit)
            found += client.list(limit - len(found), after=after, prefix=prefix)
    return found


def namespace_as_dict(space: pb.KnownSpace) -> dict[str, Any]:
    """Return a namespace for JSON; its ``representation`` is what --model-representation reads."""
    kind = space.representation
    return {
        "namespace": space.key_namespace.hex(),
        "tenant": space.tenant,
        "model": kind.model_id,
        "revision": kind.model_revision,
        "client": space.client,
        "chunks": space.chunks,
        "representation": model_as_dict(kind),
    }


def namespace_table(spaces: Iterable[pb.KnownSpace]) -> Grid:
    """Return namespaces as a table."""
    headings = ("namespace", "chunks", "tenant", "adapter", "client", "model and revision")
    table = Grid(*headings, wraps=3)
    for one in spaces:
        kind = one.representation
        table.add_row(
            one.key_namespace.hex(), one.chunks, one.tenant or "-", kind.adapter_digest,
            one.client, f"{kind.model_id} {kind.model_revision}",
        )  # fmt: skip
    return table
