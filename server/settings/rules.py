"""Settings that are more than one value, and the one way in which they are written as text."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from kvstore.codecs.base import CODECS, codec_by_name
from kvstore.codecs.base import REPLACED as REPLACED_CODECS
from kvstore.proto.errors import UnknownCodecError
from kvstore.proto.plans import MAX_CATEGORY_CHARS
from kvstore.proto.types import POLICIES, Fidelity, policy_instead_of
from kvstore.server.settings.loading import user_folder
from kvstore.server.settings.values import (
    BUCKETS,
    EVERY_OTHER,
    GIB,
    MAX_LIMIT,
    MIB,
    TIER_NAMES,
    Checked,
    OwnPath,
    Size,
    TierSize,
    check_tenant_name,
    checked_size,
    format_size,
)

AUTO = "auto"
CODED_TIERS = ("disk", "redis")
"""Tiers whose frames need not be raw."""
MAX_TENANT_CODECS = 1024
MAX_QUOTAS = 7
"""Of tenants, and of categories: what the policies have columns for."""
MAX_CATEGORIES = 1024
MAX_TTL_S = 30 * 24 * 3600
MAX_POOLS = 256
MAX_DISKS = 64

WRITE_RULES = ("through", "evict", "selective", "auto")

_TTL = re.compile(r"([0-9]{1,9})(s|min|h|d)?")
_SECONDS = {None: 1, "s": 1, "min": 60, "h": 3600, "d": 24 * 3600}


@dataclass(frozen=True, slots=True)
class ByTier:
    """How a setting of several tiers is written: ``VALUE`` for all, ``TIER=VALUE`` for one.

    With commas between them; ``comma`` matches one. ``check`` returns the value that a text is,
    or raises ValueError. What is not given is that of ``default``.
    """

    text: str
    default: dict[str, Any]
    check: Callable[[Any], Any]
    comma: str = ","

    def parse(self, value: object) -> object:
        """Return the value of every tier. Raises ValueError."""
        if value is None:
            return self.default
        if not isinstance(value, str | Mapping):
            raise ValueError(f"give {self.text}")
        found = self.split(value) if isinstance(value, str) else dict(value)
        plain = found.pop("", None)
        if not found.keys() <= self.default.keys():
            raise ValueError(f"name tiers out of {', '.join(self.default)}")
        every = self.default if plain is None else dict.fromkeys(self.default, plain)
        return {tier: self.check(one) for tier, one in (every | found).items()}

    def split(self, text: str) -> dict[str, object]:
        """Return the parts of *text* by tier, "" for all of them. Raises ValueError."""
        parts = [part.strip() for part in re.split(self.comma, text)]
        keyed = [re.fullmatch(r"(?s:(?:([a-z]+)=)?(.*))", part) for part in parts if part]
        named = [(match[1] or "", match[2]) for match in keyed if match]
        if not named or len([tier for tier, _ in named if not tier]) > 1:
            raise ValueError(f"give {self.text}")
        if len({tier for tier, _ in named}) < len(named):
            raise ValueError("name each tier once")
        return dict(named)


def _matched(pattern: str, text: str, fix: str) -> dict[str, object]:
    """Return the named parts of *text* that are there. Raises ValueError for another *pattern*."""
    match = re.fullmatch(pattern, text.strip(), re.DOTALL)
    if match is None:
        raise ValueError(f"give {fix}")
    return {name: part for name, part in match.groupdict().items() if part}


def _rules(pattern: str, text: str, each: str, most: int, comma: str = ",") -> WrapValidator:
    """Return what reads rules, ``PLACE=TERMS`` with commas between them, from text or a list.

    *pattern* names their fields, *text* says what to give, *each* what has one rule only, *most*
    how many there may be; *comma* matches one.
    """

    def read(value: Any, handler: ValidatorFunctionWrapHandler) -> tuple[Checked, ...]:
        rules = re.split(comma, value) if isinstance(value, str) else value
        if isinstance(rules, list | tuple):
            rules = tuple(
                _matched(pattern, rule, text) if isinstance(rule, str) else rule
                for rule in rules
                if rule
            )
        found: tuple[Checked, ...] = handler(() if rules is None else rules)
        if len({str(rule).partition("=")[0] for rule in found}) < len(found):
            raise ValueError(f"name each {each}")
        if len(found) > most:
            raise ValueError(f"give at most {most}")
        return found

    return WrapValidator(read)


# --- policies, and what is written below memory


def _policy(name: object) -> object:
    if name not in POLICIES:
        raise ValueError(f"use {policy_instead_of(str(name))}")
    return name


def _write_rule(rule: object) -> object:
    if rule not in WRITE_RULES:
        raise ValueError(f"use one of {', '.join(WRITE_RULES)}")
    return rule


def _daily_bytes(value: object) -> int:
    size_bytes = checked_size(value)
    if 0 < size_bytes < MIB:
        raise ValueError("give at least 1MiB a day, or 0 for no limit")
    return size_bytes


POLICY_FORM = ByTier(
    "NAME, or NAME,TIER=NAME, such as hit_density,gpu=lru",
    dict.fromkeys(TIER_NAMES, "hit_density"),
    _policy,
)
WRITE_FORM = ByTier(
    "RULE, or RULE,TIER=RULE, such as through,redis=selective",
    dict.fromkeys(CODED_TIERS, "through"),
    _write_rule,
)
BUDGET_FORM = ByTier(
    "SIZE, or TIER=SIZE, such as disk=500GiB", dict.fromkeys(CODED_TIERS, 0), _daily_bytes
)
TierPolicies = Annotated[dict[str, str], BeforeValidator(POLICY_FORM.parse), "NAME"]
TierWrites = Annotated[dict[str, str], BeforeValidator(WRITE_FORM.parse), "RULE,TIER=RULE"]
TierBudgets = Annotated[dict[str, int], BeforeValidator(BUDGET_FORM.parse), "TIER=SIZE"]


# --- codecs


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
    if plain in REPLACED_CODECS:
        raise ValueError(f"{plain} is gone; use {REPLACED_CODECS[plain]}")
    if plain not in CODECS:
        raise ValueError(f"unknown codec; use {AUTO} or one of {', '.join(CODECS)}")
    if colon:
        try:
            codec_by_name(name)
        except UnknownCodecError as error:
            known = str(error).partition("; known: ")[2]
            raise ValueError(f"{plain} does not know {terms!r}; use {known}") from None
    return name


CODEC_FORM = ByTier(
    "CODEC, or TIER=CODEC, such as disk=raw,redis=kvq:2",
    {"disk": "raw", "redis": "zplane"},
    lambda name: checked_codec(str(name)),
    f",(?=(?:{'|'.join(TIER_NAMES)})=)",  # a codec's terms may have commas: kvq:2,sinks=4
)
TierCodecs = Annotated[dict[str, str], BeforeValidator(CODEC_FORM.parse), "TIER=CODEC"]


class TenantCodec(Checked):
    """The codec of one tenant's chunks on one tier, in place of the tier's own."""

    tenant: str
    tier: str
    codec: Annotated[str, AfterValidator(checked_codec)]

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


TenantCodecs = Annotated[
    tuple[TenantCodec, ...],
    _rules(
        "(?P<tenant>[^/=]+)/(?P<tier>[^=]+)=(?P<codec>.+)",
        "TENANT/TIER=CODEC, such as acme/redis=kvq:2",
        "tenant once for each tier",
        MAX_TENANT_CODECS,
        ",(?=[^,=]*/)",  # as in CODEC_FORM
    ),
    "TENANT/TIER=CODEC",
]


# --- quotas and limits


class TenantQuota(Checked):
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
        tier = f"/{self.tier}" if self.tier else ""
        sure = f":{format_size(self.guaranteed)}" if self.guaranteed else ""
        return f"{self.tenant}{tier}={format_size(self.quota)}{sure}"


def parse_ttl(value: object) -> int:
    """Return seconds from a number or from text such as ``10min``. Raises ValueError."""
    match = _TTL.fullmatch(str(value).strip())
    seconds = -1 if match is None else int(match[1]) * _SECONDS[match[2]]
    if not 0 <= seconds <= MAX_TTL_S:
        raise ValueError("give a time to live as 90s, 10min, 2h or 7d, 30d at most; 0 for none")
    return seconds


class CategoryTerm(Checked):
    """How long chunks of a category live, and what they may take of each tier; 0: no limit."""

    category: str
    ttl_s: Annotated[int, BeforeValidator(parse_ttl)] = 0
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


Limit = Annotated[int, Field(ge=0, le=MAX_LIMIT)]


class TenantLimit(Checked):
    """What one tenant may have besides bytes, or each that is not named. 0: no limit."""

    tenant: str
    chunks: Limit = 0
    requests_per_s: Limit = 0
    leases: Limit = 0

    @model_validator(mode="after")
    def _check(self) -> TenantLimit:
        if self.tenant != EVERY_OTHER:
            check_tenant_name(self.tenant)
        elif self.chunks:
            raise ValueError("chunks are counted for tenants that are named; give *=0:RATE:LEASES")
        return self

    def __str__(self) -> str:
        return f"{self.tenant}={self.chunks}:{self.requests_per_s}:{self.leases}"


def _few_tenants(rules: tuple[TenantQuota, ...]) -> tuple[TenantQuota, ...]:
    if len({rule.tenant for rule in rules}) > MAX_QUOTAS:
        raise ValueError(f"give at most {MAX_QUOTAS} tenants")
    return rules


def _few_quotas(rules: tuple[CategoryTerm, ...]) -> tuple[CategoryTerm, ...]:
    if sum(rule.quota > 0 for rule in rules) > MAX_QUOTAS:
        raise ValueError(f"give at most {MAX_QUOTAS} with quotas")
    return rules


TenantQuotas = Annotated[
    tuple[TenantQuota, ...],
    _rules(
        "(?P<tenant>[^/=]+)(/(?P<tier>[^=]+))?=(?P<quota>[^:]+)(:(?P<guaranteed>.+))?",
        "TENANT=SIZE, TENANT=SIZE:GUARANTEED or TENANT/TIER=SIZE",
        "tenant once for each tier",
        MAX_QUOTAS * (1 + len(TIER_NAMES)),
    ),
    AfterValidator(_few_tenants),
    "TENANT=SIZE:GUARANTEED",
]
CategoryTerms = Annotated[
    tuple[CategoryTerm, ...],
    _rules(
        "(?P<category>[^=]+)=(?P<ttl_s>[^:]+)?(:(?P<quota>.+))?(?<!=)",
        "CATEGORY=TTL or CATEGORY=TTL:SIZE, such as batch=10min:1GiB",
        "category once",
        MAX_CATEGORIES,
    ),
    AfterValidator(_few_quotas),
    "CATEGORY=TTL:SIZE",
]
TenantLimits = Annotated[
    tuple[TenantLimit, ...],
    _rules(
        "(?P<tenant>[^=]+)=(?P<chunks>[^:]+):(?P<requests_per_s>[^:]+):(?P<leases>.+)",
        "TENANT=CHUNKS:REQUESTS_PER_S:LEASES, 0 for no limit",
        "tenant once",
        BUCKETS,
    ),
    "TENANT=CHUNKS:RATE:LEASES",
]


# --- shared pools


def _members(value: object) -> object:
    return tuple(filter(None, value.split("+"))) if isinstance(value, str) else value


Members = Annotated[tuple[str, ...], BeforeValidator(_members)]


class Pool(Checked):
    """Who may read a pool, and who may also put into it; ``*`` is every tenant."""

    name: str
    readers: Members = ()
    writers: Members = ()

    @model_validator(mode="after")
    def _check(self) -> Pool:
        for name in (self.name, *({*self.readers, *self.writers} - {EVERY_OTHER})):
            check_tenant_name(name)
        return self

    def roles(self, tenant: str) -> frozenset[str]:
        """Return what *tenant* may do here."""
        if {tenant, EVERY_OTHER} & {*self.writers}:
            return frozenset({"read", "write"})
        if {tenant, EVERY_OTHER} & {*self.readers}:
            return frozenset({"read"})
        return frozenset()

    def __str__(self) -> str:
        writers = f":{'+'.join(self.writers)}" if self.writers else ""
        return f"{self.name}={'+'.join(self.readers)}{writers}"


SharedPools = Annotated[
    tuple[Pool, ...],
    _rules(
        "(?P<name>[^=]+)=(?P<readers>[^:]+)?(:(?P<writers>.+))?(?<!=)",
        "POOL=READER+READER:WRITER, such as library=*:curator",
        "name once",
        MAX_POOLS,
    ),
    "POOL=READERS:WRITERS",
]


# --- disks and GPUs


def _disk_path() -> Path:
    return user_folder("XDG_CACHE_HOME", os.path.expanduser("~/.cache")) / "kvstore" / "disk"


class DiskFolder(Checked):
    """One folder of the disk tier and the bytes it may take."""

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
        first, *others = map(_folder, value.split(","))
        size: object = first.get("capacity_bytes", 4 * GIB)
        for one in others:
            if "path" not in one:
                raise ValueError("give each further disk as SIZE:PATH, such as 1TiB:/mnt/b")
            size = one.setdefault("capacity_bytes", size)
        return first | {"others": others}

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
    form = "(?P<capacity_bytes>[^:]+)(:(?P<path>.+))?"
    return _matched(form, text, "SIZE:PATH, SIZE or PATH, such as 100GiB:/var/lib/kvstore")


class GpuConfig(Checked):
    """How much memory the gpu tier takes, and on which device; also given as ``8GiB:1``.

    ``device`` counts as CUDA does, among the devices that CUDA_VISIBLE_DEVICES leaves.
    """

    capacity_bytes: TierSize = 4 * GIB
    device: Annotated[int, Field(ge=0, lt=64)] = 0

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        form = "(?P<capacity_bytes>[^:]+)(:(?P<device>[0-9]+))?"
        return _matched(form, value, "SIZE or SIZE:DEVICE, such as 8GiB:1")

    def __str__(self) -> str:
        return f"{format_size(self.capacity_bytes)}:{self.device}"
