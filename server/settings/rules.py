"""Settings that are more than one value: policies, quotas, shared pools, disks, a GPU."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from typing_extensions import override

from kvstore.proto.plans import MAX_CATEGORY_CHARS
from kvstore.server.eviction.quotas import MAX_PARTITIONS, Quota
from kvstore.server.eviction.registry import POLICIES, instead_of
from kvstore.server.settings.loading import user_folder
from kvstore.server.settings.rule_list import RuleList, check_tenant_name
from kvstore.server.settings.values import (
    GIB,
    TIER_NAMES,
    OwnPath,
    Size,
    TierSize,
    format_size,
)

MAX_QUOTAS = MAX_PARTITIONS // 2
"""Of tenants, and of categories."""
MAX_CATEGORIES = 1024
MAX_TTL_S = 30 * 24 * 3600
MAX_POOLS = 256
MAX_DISKS = 64
EVERYBODY = "*"
"""In a shared pool: every tenant."""

_TTL = re.compile(r"([0-9]{1,9})(s|min|h|d)?")
_SECONDS = {None: 1, "s": 1, "min": 60, "h": 3600, "d": 24 * 3600}


def parse_ttl(value: object) -> int:
    """Return seconds from a number or from text such as ``10min``. Raises ValueError."""
    match = _TTL.fullmatch(str(value).strip())
    seconds = -1 if match is None else int(match[1]) * _SECONDS[match[2]]
    if not 0 <= seconds <= MAX_TTL_S:
        raise ValueError("give a time to live as 90s, 10min, 2h or 7d, 30d at most; 0 for none")
    return seconds


def _known(name: str) -> str:
    if name not in POLICIES:
        raise ValueError(f"use {instead_of(name)}")
    return name


PolicyName = Annotated[str, AfterValidator(_known)]
Seconds = Annotated[int, BeforeValidator(parse_ttl)]


class _Rules(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class TierPolicies(_Rules):
    """The eviction policy of each tier. Also given as ``lru``, or ``hit_density,gpu=lru``."""

    everywhere: PolicyName = "hit_density"
    by_tier: dict[str, PolicyName] = {}

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        parts = [part.strip() for part in value.split(",") if part.strip()]
        plain = [part for part in parts if "=" not in part]
        if not parts or len(plain) > 1:
            raise ValueError("give NAME, or NAME,TIER=NAME, such as hit_density,gpu=lru")
        named = [part.partition("=") for part in parts if "=" in part]
        by_tier = {tier: name for tier, _, name in named}
        if len(by_tier) < len(named):
            raise ValueError("name each tier once")
        found: dict[str, object] = {"by_tier": by_tier}
        return found | ({"everywhere": plain[0]} if plain else {})

    @model_validator(mode="after")
    def _check(self) -> TierPolicies:
        if not set(self.by_tier) <= set(TIER_NAMES):
            raise ValueError(f"name tiers out of {', '.join(TIER_NAMES)}")
        return self

    def of_tier(self, tier: str) -> str:
        """Return the name of the policy of *tier*."""
        return self.by_tier.get(tier, self.everywhere)

    def __str__(self) -> str:
        return ",".join([self.everywhere, *(f"{t}={name}" for t, name in self.by_tier.items())])


class TenantQuota(_Rules):
    """What the chunks of one tenant may take of a tier, and are sure of; no tier: of each."""

    tenant: str
    tier: str = ""
    quota: Size
    guaranteed: Size = 0

    @model_validator(mode="after")
    def _check(self) -> TenantQuota:
        check_tenant_name(self.tenant)
        if self.tier and self.tier not in TIER_NAMES:
            raise ValueError(f"name one of {', '.join(TIER_NAMES)}, or no tier for each of them")
        if not 0 <= self.guaranteed <= self.quota or not self.quota:
            raise ValueError("give a quota, and guarantee no more than that")
        return self

    def __str__(self) -> str:
        place = f"{self.tenant}/{self.tier}" if self.tier else self.tenant
        sure = f":{format_size(self.guaranteed)}" if self.guaranteed else ""
        return f"{place}={format_size(self.quota)}{sure}"


class TenantQuotas(RuleList):
    """All of them. Also given as ``acme=2GiB:512MiB,zeta/disk=10GiB``."""

    rules: tuple[TenantQuota, ...] = ()

    @classmethod
    @override
    def parsed(cls, text: str) -> dict[str, Any]:
        return _tenant_quota(text)

    @model_validator(mode="after")
    def _check(self) -> TenantQuotas:
        places = [(rule.tenant, rule.tier) for rule in self.rules]
        if len(set(places)) < len(places):
            raise ValueError("name each tenant once for each tier")
        if len(self.tenants) > MAX_QUOTAS:
            raise ValueError(f"give at most {MAX_QUOTAS} tenants")
        return self

    @property
    def tenants(self) -> tuple[str, ...]:
        """The tenants that have a quota on some tier."""
        return tuple(dict.fromkeys(rule.tenant for rule in self.rules))

    def of_tier(self, tier: str) -> dict[str, Quota]:
        """Return the quotas on *tier*, by tenant: what is said of the tier comes first."""
        rules = sorted(self.rules, key=lambda rule: rule.tier != "")
        return {
            rule.tenant: Quota(rule.quota, rule.guaranteed)
            for rule in rules
            if rule.tier in ("", tier)
        }


class CategoryTerm(_Rules):
    """How long chunks of a category live, and what they may take of each tier; 0: no limit."""

    category: str
    ttl_s: Seconds = 0
    quota: Size = 0

    @model_validator(mode="after")
    def _check(self) -> CategoryTerm:
        name = self.category
        if not name.isprintable() or not 1 <= len(name) <= MAX_CATEGORY_CHARS:
            raise ValueError(f"a category has 1 to {MAX_CATEGORY_CHARS} printable characters")
        return self

    def __str__(self) -> str:
        quota = f":{format_size(self.quota)}" if self.quota else ""
        return f"{self.category}={self.ttl_s}s{quota}"


class CategoryTerms(RuleList):
    """All of them. Also given as ``batch=10min:1GiB,scratch=90s``."""

    rules: tuple[CategoryTerm, ...] = ()

    @classmethod
    @override
    def parsed(cls, text: str) -> dict[str, Any]:
        return _category_term(text)

    @model_validator(mode="after")
    def _check(self) -> CategoryTerms:
        names = [rule.category for rule in self.rules]
        if len(set(names)) < len(names):
            raise ValueError("name each category once")
        if len(self.quotas) > MAX_QUOTAS or len(names) > MAX_CATEGORIES:
            raise ValueError(f"give at most {MAX_CATEGORIES}, {MAX_QUOTAS} of them with quotas")
        return self

    @property
    def ttls_s(self) -> dict[str, float]:
        """The time to live of each category that has one, in seconds."""
        return {rule.category: float(rule.ttl_s) for rule in self.rules if rule.ttl_s}

    @property
    def quotas(self) -> dict[str, Quota]:
        """The quota of each category that has one, on every tier."""
        return {rule.category: Quota(rule.quota) for rule in self.rules if rule.quota}


def _tenant_quota(text: str) -> dict[str, str]:
    place, equals, sizes = text.partition("=")
    tenant, _, tier = place.partition("/")
    quota, colon, guaranteed = sizes.partition(":")
    if not (equals and tenant and quota) or (colon and not guaranteed):
        raise ValueError("give TENANT=SIZE, TENANT=SIZE:GUARANTEED or TENANT/TIER=SIZE")
    return {"tenant": tenant, "tier": tier, "quota": quota, "guaranteed": guaranteed or "0"}


def _category_term(text: str) -> dict[str, str]:
    category, equals, terms = text.partition("=")
    ttl, colon, quota = terms.partition(":")
    if not (equals and category and (ttl or quota)) or (colon and not quota):
        raise ValueError("give CATEGORY=TTL or CATEGORY=TTL:SIZE, such as batch=10min:1GiB")
    return {"category": category, "ttl_s": ttl or "0", "quota": quota or "0"}


class Pool(BaseModel):
    """Who may read a pool, and who may also put into it; ``*`` is every tenant."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str
    readers: tuple[str, ...] = ()
    writers: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Pool:
        for name in (self.name, *self.readers, *self.writers):
            if name != EVERYBODY or name == self.name:
                check_tenant_name(name)
        return self

    def roles(self, tenant: str) -> frozenset[str]:
        """Return what *tenant* may do here."""
        if tenant in self.writers or EVERYBODY in self.writers:
            return frozenset({"read", "write"})
        if tenant in self.readers or EVERYBODY in self.readers:
            return frozenset({"read"})
        return frozenset()

    def __str__(self) -> str:
        return f"{self.name}={'+'.join(self.readers)}:{'+'.join(self.writers)}"


class SharedPools(RuleList):
    """All of them. Also given as ``library=*:curator,team=acme+zeta:acme``."""

    rules: tuple[Pool, ...] = ()

    @classmethod
    @override
    def parsed(cls, text: str) -> dict[str, Any]:
        return _pool(text)

    @model_validator(mode="after")
    def _check(self) -> SharedPools:
        if len({rule.name for rule in self.rules}) < len(self.rules):
            raise ValueError("name each pool once")
        if len(self.rules) > MAX_POOLS:
            raise ValueError(f"give at most {MAX_POOLS} pools")
        return self


def _pool(text: str) -> dict[str, object]:
    name, equals, who = text.partition("=")
    readers, _, writers = who.partition(":")
    if not (equals and name and who.strip(":")):
        raise ValueError("give POOL=READER+READER:WRITER, such as library=*:curator")
    return {
        "name": name,
        "readers": [reader for reader in readers.split("+") if reader],
        "writers": [writer for writer in writers.split("+") if writer],
    }


def _disk_path() -> Path:
    return user_folder("XDG_CACHE_HOME", os.path.expanduser("~/.cache")) / "kvstore" / "disk"


class DiskFolder(BaseModel):
    """One folder of the disk tier and the bytes it may take."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    capacity_bytes: TierSize = 4 * GIB
    path: OwnPath = Field(default_factory=_disk_path)

    def __str__(self) -> str:
        return f"{format_size(self.capacity_bytes)}:{self.path}"


class DiskFolders(DiskFolder):
    """The first folder, which also holds the index, and ``others`` that extents are spread over.

    Also given as ``100GiB:/path``, as either half of it, or as several such pairs with commas
    between them; a path without a size then takes the size before it.
    """

    others: tuple[DiskFolder, ...] = ()

    @property
    def folders(self) -> tuple[DiskFolder, ...]:
        """All folders, the first one first."""
        return (self, *self.others)

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        first, *others = value.split(",")
        fields = _folder(first)
        size: object = fields.get("capacity_bytes", 4 * GIB)
        rest = []
        for text in others:
            if (more := _folder(text)).get("path") is None:
                raise ValueError("give each further disk as SIZE:PATH, such as 1TiB:/mnt/b")
            size = more.setdefault("capacity_bytes", size)
            rest.append(more)
        return fields | {"others": rest}

    @model_validator(mode="after")
    def _check_folders(self) -> DiskFolders:
        paths = [os.path.realpath(folder.path) for folder in self.folders]
        if len(set(paths)) < len(paths):
            raise ValueError("name each folder once")
        if len(paths) > MAX_DISKS:
            raise ValueError(f"give at most {MAX_DISKS} folders")
        return self

    def __str__(self) -> str:
        return ",".join(map(DiskFolder.__str__, self.folders))


def _folder(text: str) -> dict[str, object]:
    text = text.strip()
    if text.startswith(("/", "~", ".")):
        return {"path": text}
    size, colon, path = text.partition(":")
    if not size or (colon and not path):
        raise ValueError("give SIZE:PATH, SIZE or PATH, such as 100GiB:/var/lib/kvstore")
    return {"capacity_bytes": size, "path": path} if colon else {"capacity_bytes": size}


class GpuConfig(BaseModel):
    """How much memory the gpu tier takes, and on which device; also given as ``8GiB:1``.

    ``device`` counts as CUDA does, among the devices that CUDA_VISIBLE_DEVICES leaves.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    capacity_bytes: TierSize = 4 * GIB
    device: Annotated[int, Field(ge=0, lt=64)] = 0

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        size, colon, device = value.partition(":")
        if not size or (colon and not (device.isascii() and device.isdecimal())):
            raise ValueError("give SIZE or SIZE:DEVICE, such as 8GiB:1")
        return {"capacity_bytes": size} | ({"device": device} if colon else {})

    def __str__(self) -> str:
        return f"{format_size(self.capacity_bytes)}:{self.device}"
