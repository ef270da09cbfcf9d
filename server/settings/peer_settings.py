"""Settings of peers: which other servers' memory is read, and what they may read of ours."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from kvstore.server.settings.security_settings import OwnFile
from kvstore.server.settings.values import Count, Millis, Size, parse_endpoint

DIRECTORY = "directory"
MAX_ASKED_PEERS = 16
"""In one lookup, and in a fixed list."""
GET_BYTES = 16 << 20
"""What one get is counted with: about what the sockets of both ends can hold of it."""


def _names(value: object) -> object:
    if value is False or value == "off":
        return None
    if not isinstance(value, str):
        return value
    return tuple(name.strip() for name in value.split(",") if name.strip())


def _checked(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if not names:
        return None
    addresses = [name for name in names if name != DIRECTORY]
    for address in addresses:
        if not parse_endpoint(address)[1]:
            raise ValueError("give each peer's port")
    if len(set(names)) < len(names) or len(addresses) > MAX_ASKED_PEERS:
        raise ValueError(f"name each peer once, {MAX_ASKED_PEERS} at most; of more, use directory")
    return names


class PeerSettings(BaseModel):
    """The part of a server's configuration that is about other servers."""

    peers: Annotated[
        tuple[str, ...] | None, BeforeValidator(_names), AfterValidator(_checked), "HOST:PORT"
    ] = Field(
        default=None,
        description="other servers whose memory is read, by their --listen, with commas between"
        " them; directory: those that share the Redis; or off",
    )
    peer_key: OwnFile = Field(
        default=None, description="file with the API key, of role peer, that peers are shown"
    )
    peer_ca: OwnFile = Field(
        default=None, description="who signs peers' certificates, in PEM; with it over TLS"
    )
    peer_name: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9_.-]{1,253}$"), "NAME"] = Field(
        default=None,
        description="name that peers' certificates have, where it is not that of their address;"
        " with --peer-ca",
    )
    peer_requests: Count = Field(
        default=8, description="requests of peers that are answered at once; more are misses"
    )
    peer_bytes: Size = Field(
        default=8 * GET_BYTES,
        ge=GET_BYTES,
        description="bytes that may be under way to peers at once",
    )
    peer_timeout_ms: Millis = Field(
        default=200, description="longest wait for one answer of a peer"
    )

    @property
    def peer_addresses(self) -> tuple[str, ...]:
        """The peers that are always asked."""
        return tuple(name for name in self.peers or () if name != DIRECTORY)

    @property
    def asks_directory(self) -> bool:
        """Whether peers are looked for in the node directory."""
        return DIRECTORY in (self.peers or ())
