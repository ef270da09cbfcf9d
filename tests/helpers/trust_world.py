"""A TLS server with authentication, and its clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.credentials import Authority, KeyRing
from helpers.local_server import DEADLINE_MS, LocalServer
from helpers.prompts import SMALL, chunks_of, keys_of

from kvstore.client import Access, Chunk, Client, ClientOptions
from kvstore.client.connection import Connection
from kvstore.client.options import TransportName
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.types import ChunkKey
from kvstore.server.security.audit_log import audit_files, read_chain

SERVICE = pb.DESCRIPTOR.services_by_name["KVStore"]


def chunks_for(client: Client, seed: int, count: int = 4) -> tuple[list[ChunkKey], list[Chunk]]:
    keys = keys_of(client, seed, count)
    return keys, chunks_of(client, keys)


class World:
    """A TLS server with authentication, and its clients."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.ca = Authority(folder)
        self.cert, self.key = self.ca.issue("server")
        self.ring = KeyRing(folder / "api-keys")
        self.acme, self.zeta = self.ring.make("acme"), self.ring.make("zeta")
        self.reader, self.admin = self.ring.make("acme", "read"), self.ring.make("ops", "admin")
        self.server = LocalServer(
            folder, "--tls-cert", str(self.cert), "--tls-key", str(self.key),
            "--auth-keys", str(self.ring.path), "--bulk", "127.0.0.1:0", *flags,
        )  # fmt: skip
        self._open: list[Client | Connection] = []

    @property
    def address(self) -> str:
        return f"localhost:{self.server.node.port}"

    def client(self, key: str, transport: TransportName = "grpc", tenant: str = "") -> Client:
        options = ClientOptions(
            transport,
            chunk_tokens=16,
            deadline_ms=DEADLINE_MS,
            access=Access(ca=self.ca.path, token=key),
            tenant=tenant,
        )
        client = Client(self.address, SMALL, options)
        self._open.append(client)
        return client

    def new_key(self, tenant: str, *roles: str) -> str:
        """Return a new key that the server has loaded."""
        key = self.ring.make(tenant, *roles)
        self.server.node.authorizer.authenticator.refresh()
        return key

    def dial(self, access: Access) -> Connection:
        connection = Connection(self.address, 1, access=access)
        self._open.append(connection)
        return connection

    def call(self, key: str, method: str, request: Any) -> Any:
        """Call any *method* as the holder of *key*; return its reply or replies."""
        connection = self.dial(Access(ca=self.ca.path, token=key))
        descriptor = SERVICE.methods_by_name[method]
        reply = getattr(pb, descriptor.output_type.name)
        if descriptor.client_streaming:
            return connection.upload(method, iter([request]), DEADLINE_MS, reply)
        if descriptor.server_streaming:
            return list(connection.stream(method, request, DEADLINE_MS))
        return connection.call(method, request, DEADLINE_MS, reply)

    def close(self) -> None:
        while self._open:
            self._open.pop().close()
        self.server.close()


class Audited(World):
    """A World with an audit log."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "audit"
        super().__init__(folder, "--audit-log", str(self.log), "--audit-reads")

    def lines(self) -> list[dict[str, Any]]:
        return [fields for fields, _ in read_chain(audit_files(self.log))]

    def has_line(self, **wanted: object) -> bool:
        return any(wanted.items() <= line.items() for line in self.lines())


def request_of(method: str, session_id: int, digests: bytes = b"") -> Any:
    """Return a request of *method* on a session, for chunks of the world's first prompt."""
    request = getattr(pb, SERVICE.methods_by_name[method].input_type.name)()
    fields = request.DESCRIPTOR.fields_by_name
    if "session_id" in fields:
        request.session_id = session_id
    if "digests" in fields:
        request.digests = digests
    if "ttl_ms" in fields:
        request.ttl_ms = 1000
    return request
