"""The settings of codecs: which for a tier, which for a tenant's chunks on it."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from typing_extensions import override

from kvstore.codecs.base import CODECS, REPLACED, codec_by_name
from kvstore.proto.errors import UnknownCodecError
from kvstore.proto.types import Fidelity
from kvstore.server.settings.rule_list import RuleList, check_tenant_name

AUTO = "auto"
CODED_TIERS = ("disk", "redis")
"""Tiers whose frames need not be raw."""
MAX_TENANT_CODECS = 1024


def is_auto(name: str) -> bool:
    """Whether the codec *name* is to be chosen at the start."""
    return name.partition(":")[0] == AUTO


def auto_fidelity(name: str) -> Fidelity:
    """Return the least that ``auto`` or ``auto:FIDELITY`` may choose. Raises ValueError."""
    _, colon, least = name.partition(":")
    if not colon:
        return Fidelity.exact
    if least not in Fidelity.__members__:
        raise ValueError(f"give {AUTO}, or {AUTO}:bounded or {AUTO}:none to allow a loss")
    return Fidelity[least]


def checked_codec(name: str) -> str:
    """Return *name* if it is a codec, with or without its terms. Raises ValueError."""
    if is_auto(name):
        auto_fidelity(name)
        return name
    plain, colon, terms = name.partition(":")
    if plain in REPLACED:
        raise ValueError(f"{plain} is gone; use {REPLACED[plain]}")
    if plain not in CODECS:
        raise ValueError(f"unknown codec; use {AUTO} or one of {', '.join(CODECS)}")
    if colon:
        try:
            codec_by_name(name)
        except UnknownCodecError as error:
            known = str(error).partition("; known: ")[2]
            raise ValueError(f"{plain} does not know {terms!r}; use {known}") from None
    return name


CodecName = Annotated[str, AfterValidator(checked_codec), "CODEC"]


class TenantCodec(BaseModel):
    """The codec of one tenant's chunks on one tier, in place of the tier's own."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    tenant: str
    tier: str
    codec: CodecName

    @model_validator(mode="after")
    def _check(self) -> TenantCodec:
        check_tenant_name(self.tenant)
        if self.tier not in CODED_TIERS:
            raise ValueError(f"name one of {', '.join(CODED_TIERS)}: the others hold raw frames")
        if is_auto(self.codec):
            raise ValueError(f"{AUTO} is for whole tiers; name a codec")
        return self

    def __str__(self) -> str:
        return f"{self.tenant}/{self.tier}={self.codec}"


class TenantCodecs(RuleList):
    """All of them. Also given as ``acme/redis=kvq:2,acme/disk=zplane``."""

    rules: tuple[TenantCodec, ...] = ()

    @classmethod
    @override
    def texts(cls, value: str) -> list[str]:
        return re.split(",(?=[^,=]*/)", value)  # a codec's terms may have commas: kvq:2,sinks=4

    @classmethod
    @override
    def parsed(cls, text: str) -> dict[str, Any]:
        return _parsed(text)

    @model_validator(mode="after")
    def _check(self) -> TenantCodecs:
        places = [(rule.tenant, rule.tier) for rule in self.rules]
        if len(set(places)) < len(places):
            raise ValueError("name each tenant once for each tier")
        if len(places) > MAX_TENANT_CODECS:
            raise ValueError(f"give at most {MAX_TENANT_CODECS}")
        return self

    def of_tier(self, tier: str) -> dict[str, str]:
        """Return the codecs of those tenants that have their own on *tier*."""
        return {rule.tenant: rule.codec for rule in self.rules if rule.tier == tier}


def _parsed(text: str) -> dict[str, str]:
    place, equals, codec = text.partition("=")
    tenant, slash, tier = place.partition("/")
    if not (equals and slash):
        raise ValueError("give TENANT/TIER=CODEC, such as acme/redis=kvq:2")
    return {"tenant": tenant, "tier": tier, "codec": codec}
