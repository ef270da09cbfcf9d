"""Dialling a peer: it is asked over gRPC, with this server's credentials, to let this one in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import kvstore_pb2_grpc
from kvstore.proto.errors import InvalidRequestError, TierUnavailableError
from kvstore.proto.frame import MAX_FRAME_BYTES
from kvstore.server.cluster.peer_connections import PeerTerms
from kvstore.server.settings.values import is_loopback, parse_endpoint

_OPTIONS = [("grpc.enable_http_proxy", 0)]


@dataclass(frozen=True, slots=True)
class LetIn:
    """A peer's answer: ``boot_id`` is of its present start."""

    boot_id: int
    terms: PeerTerms


Dial = Callable[[str, str, float], LetIn]
"""A peer's address, our node's id and the seconds that it may take."""


@dataclass(frozen=True, slots=True)
class PeerAccess:
    """``token_file`` has an API key of role peer. With ``ca`` only peers that it signed are
    believed, under ``name`` whatever their address where there is one; ``cert`` and ``key`` are our
    own, for peers that ask for one. ``insecure`` lets the
    key travel to other hosts in plain text.
    """

    token_file: Path | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    insecure: bool = False
    name: str = ""

    def dial(self, address: str, node_id: str, within_s: float) -> LetIn:
        """Have the peer at *address*, host:port, open a session for us.

        Raises TierUnavailableError when it does not, InvalidRequestError for credentials that
        cannot be used.
        """
        metadata = self._metadata(address)
        channel = self._channel(address)
        try:
            reply: pb.OpenPeerResponse = kvstore_pb2_grpc.KVStoreStub(channel).OpenPeer(
                pb.OpenPeerRequest(node_id=node_id), timeout=within_s, metadata=metadata
            )
        except grpc.RpcError as error:
            raise TierUnavailableError(
                "peer", f"{address}: {error.code().name}: {(error.details() or '')[:200]}"
            ) from None
        finally:
            channel.close()
        host = address.rpartition(":")[0]
        terms = PeerTerms(
            reply.bulk_address.replace("*", host),
            reply.bulk_certificate,
            reply.session_id,
            reply.attach_token,
            max(1, reply.heartbeat_ms),
            min(reply.max_frame_bytes, MAX_FRAME_BYTES),
            max(1, reply.max_batch_chunks),
        )
        if not terms.address.startswith("tcp://"):
            raise TierUnavailableError("peer", f"{address}: has no bulk channel")
        return LetIn(reply.server.boot_id, terms)

    def check(self, address: str) -> None:
        """Raise InvalidRequestError when the key may not be shown at *address*."""
        self._metadata(address)

    def _metadata(self, address: str) -> tuple[tuple[str, str], ...] | None:
        if self.token_file is None:
            return None
        if self.ca is None and not self.insecure and not is_loopback(parse_endpoint(address)[0]):
            fix = "the key would travel in plain text: give --peer-ca, or --insecure"
            raise InvalidRequestError("peer_key", address, fix)
        token = _read("peer_key", self.token_file).strip().decode("ascii", "replace")
        if not token.isascii() or not token.isprintable():
            raise InvalidRequestError("peer_key", str(self.token_file), "holds no API key")
        return (("authorization", f"Bearer {token}"),)

    def _channel(self, address: str) -> grpc.Channel:
        if self.ca is None:
            return grpc.insecure_channel(address, options=_OPTIONS)
        parts = (("peer_ca", self.ca), ("tls_key", self.key), ("tls_cert", self.cert))
        credentials = grpc.ssl_channel_credentials(
            *(None if path is None else _read(name, path) for name, path in parts)
        )
        named = [("grpc.ssl_target_name_override", self.name)] if self.name else []
        return grpc.secure_channel(address, credentials, options=[*_OPTIONS, *named])


def _read(field: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        fix = f"{error.strerror}; name a file that this user can read"
        raise InvalidRequestError(field, str(path), fix) from None
