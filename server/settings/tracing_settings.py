"""Settings of tracing: where spans go, and of how many calls there are any."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, field_validator

from kvstore.server.settings.values import parse_endpoint


class TracingSettings(BaseModel):
    """The part of a server's configuration that is about tracing."""

    tracing_endpoint: Annotated[str | None, "URL"] = Field(
        default=None,
        description="OpenTelemetry collector that spans go to, over gRPC, such as"
        " http://127.0.0.1:4317; https for TLS; default: none",
    )
    tracing_share: Annotated[float, "SHARE"] = Field(
        default=0.01,
        ge=0.0,
        le=1.0,
        description="share of calls that are traced, of those whose caller does not trace them",
    )

    @field_validator("tracing_endpoint")
    @classmethod
    def _check_collector(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.path.strip("/") or "@" in parts.netloc:
            raise ValueError("give http://host:port, or https://host:port for TLS")
        parse_endpoint(parts.netloc)
        return url
