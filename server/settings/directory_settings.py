"""Settings of the node directory: whether this node is in it, under which name and address."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field

from kvstore.server.settings.values import Count, Millis, parse_endpoint

_ANY_HOST = ("0.0.0.0", "::")  # noqa: S104 - compared with


class DirectorySettings(BaseModel):
    """The part of a server's configuration that is about other nodes."""

    directory: bool = Field(
        default=False,
        description="say in Redis what this node holds in memory, and learn what others do",
    )
    node_id: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9_.:\[\]-]{1,128}$"), "NAME"] = Field(
        default=None, description="this node's name among the others; default: host name and port"
    )
    advertise: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9_.:-]{1,100}$"), "HOST"] = Field(
        default=None, description="host that other nodes reach this one by; default: of --listen"
    )
    directory_ttl_ms: Annotated[Millis, Field(ge=500)] = Field(
        default=10_000, description="a node that is silent in the directory for so long is gone"
    )
    directory_chunks: Count = Field(
        default=1 << 18, description="chunks that this node names in the directory, at most"
    )


def check_advertised(listen: str, settings: Mapping[str, Any]) -> None:
    """Check that other nodes can be told how to reach *listen*. Raises ValueError."""
    needs_name = settings.get("directory") and not settings.get("advertise")
    if needs_name and parse_endpoint(listen)[0] in _ANY_HOST:
        raise ValueError("other nodes need an address to reach this one by: give --advertise HOST")
