"""Settings of events: where they are published, to whom, and how many are kept."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, ValidationInfo, field_validator

from kvstore.server.settings.security_settings import OwnFile, asks_who_calls
from kvstore.server.settings.values import EventEndpoint, is_loopback, parse_endpoint


class EventSettings(BaseModel):
    """The part of a server's configuration that is about events."""

    events_kept: Annotated[int, "N"] = Field(
        default=1 << 16,
        ge=0,
        le=1 << 20,
        description="latest events that readers may have missed; 0: no events at all",
    )
    events_readers: OwnFile = Field(
        default=None,
        description="file of the CURVE public keys that may read published events of all tenants",
    )
    events: EventEndpoint = Field(
        default="off",
        validate_default=True,
        description="address that events are published at, as vLLM's are, ipc:PATH, or off",
    )
    events_replay: EventEndpoint = Field(
        default="off", description="address that missed ones are asked for at, ipc:PATH, or off"
    )

    @field_validator("events", "events_replay")
    @classmethod
    def _check_events(cls, value: str, info: ValidationInfo) -> str:
        if value == "off":
            return value
        if not info.data.get("events_kept", 1):
            raise ValueError("with --events-kept 0 there is nothing to publish")
        is_guarded = value.startswith("ipc:") or info.data.get("events_readers")
        if is_guarded or info.data.get("insecure"):
            return value
        if not is_loopback(parse_endpoint(value)[0]):
            raise ValueError(
                "other hosts could read which chunks all tenants have; give --events-readers, or"
                " use 127.0.0.1 or ipc:PATH"
            )
        if asks_who_calls(info.data):
            raise ValueError(
                "every process of this host could read which chunks all tenants have; give"
                " --events-readers, or use ipc:PATH"
            )
        return value
