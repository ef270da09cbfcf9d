"""Settings of several values, and their text form."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

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
from kvstore.proto.types import POLICIES, Accuracy, policy_instead_of
from kvstore.server.settings.loading import user_folder
from kvstore.server.settings.values import (
    BUCKETS,
    EVERY_OTHER,
    GIB,
    MAX_LIMIT,
    MIB,
    TIER_NAMES,
    AnyTenant,
    Checked,
    OwnPath,
    Size,
    Tenant,
    TenantOrPool,
    TierSize,
    checked_size,
    format_size,
    named_values,
)

AUTO = "auto"
CODED_TIERS = ("disk", "redis")
"""Tiers that can have a codec."""
MAX_TENANT_CODECS = 1024
MAX_QUOTAS = 7
"""Limit for tenants, and for categories, by the columns of the policies."""
MAX_CATEGORIES = 1024
MAX_TTL_S = 30 * 24 * 3600
MAX_POOLS = 256
MAX_DISKS = 64

_TTL = re.compile(r"([0-9]{1,9})(s|min|h|d)?")
_SECONDS = {None: 1, "s": 1, "min": 60, "h": 3600, "d": 24 * 3600}
_BEFORE_TIER = f",(?=(?:{'|'.join(TIER_NAMES)})=)"
_BEFORE_TENANT = ",(?=[^,=]*/)"
"""Commas between codecs, but not inside a codec's terms, as in kvq:2,sinks=4."""


def _one_of(names: Sequence[str], fix: str) -> Callable[[str], str]:
    def check(name: str) -> str:
        if name not in names:
            raise ValueError(fix.format(", ".join(names)))
        return name

    return check


def _by_tier(
    fix: str, default: Mapping[str, Any], check: Callable[[Any], Any], comma: str = ","
) -> BeforeValidator:
    """Return a validator of ``VALUE`` for all tiers and ``TIER=VALUE`` for one, over *default*.

    In a list later sources override earlier ones. *check* parses a value.
    """

    def read(value: object) -> dict[str, Any]:
        found = default
        for pairs in named_values(value, f"give {fix}", comma):
            given = dict(pairs)
            if not pairs or sum(not tier for tier, _ in pairs) > 1:
                raise ValueError(f"give {fix}")
            if len(given) < len(pairs):
                raise ValueError("name each tier once")
            if not given.keys() <= {"", *default}:
                raise ValueError(f"name tiers out of {', '.join(default)}")
            every = dict.fromkeys(default, given.pop("")) if "" in given else found
            found = {**every, **given}
        return {tier: check(one) for tier, one in found.items()}

    return BeforeValidator(read)


class Parts(Checked):
    """Values with a text form: ``_form`` is a pattern with a group for each."""

    _form: ClassVar[str]
    _fix: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        match = re.fullmatch(cls._form, value.strip(), re.DOTALL)
        if match is None:
            raise ValueError(f"give {cls._fix}")
        found = match.groupdict() | {"text": match[0]}
        return {name: part for name, part in found.items() if part and name in cls.model_fields}


class Rule(Parts):
    """One of several rules with a text form, which is kept."""

    text: str

    def __str__(self) -> str:
        return self.text


def _rules(each: str, most: int, comma: str = ",") -> WrapValidator:
    """Return a validator of at most *most* rules, as text or a list, one for *each*."""

    def read(value: Any, handler: ValidatorFunctionWrapHandler) -> tuple[Rule, ...]:
        texts = [one for one in re.split(comma, value) if one] if isinstance(value, str) else value
        found: tuple[Rule, ...] = handler(() if texts is None else texts)
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


def _daily_bytes(value: object) -> int:
    size_bytes = checked_size(value)
    if 0 < size_bytes < MIB:
        raise ValueError("give at least 1MiB a day, or 0 for no limit")
    return size_bytes


DEFAULT_POLICIES = dict.fromkeys(TIER_NAMES, "hit_density")
DEFAULT_WRITES = dict.fromkeys(CODED_TIERS, "through")
DEFAULT_BUDGETS = dict.fromkeys(CODED_TIERS, 0)
DEFAULT_CODECS = {"disk": "raw", "redis": "lossless"}

TierPolicies = Annotated[
    dict[str, str],
    _by_tier("NAME, or NAME,TIER=NAME, such as hit_density,gpu=lru", DEFAULT_POLICIES, _policy),
    "NAME",
]
TierWrites = Annotated[
    dict[str, str],
    _by_tier(
        "RULE, or RULE,TIER=RULE, such as through,redis=selective",
        DEFAULT_WRITES,
        _one_of(("through", "evict", "selective", "auto"), "use one of {}"),
    ),
    "RULE,TIER=RULE",
]
TierBudgets = Annotated[
    dict[str, int],
    _by_tier("SIZE, or TIER=SIZE, such as disk=500GiB", DEFAULT_BUDGETS, _daily_bytes),
    "TIER=SIZE",
]


# --- codecs


def is_auto(name: str) -> bool:
    """Whether the codec *name* is chosen at start."""
    return name.partition(":")[0] == AUTO


def auto_accuracy(name: str) -> Accuracy:
    """Return the least accuracy of ``auto`` or ``auto:ACCURACY``. Raises ValueError."""
    _, colon, least = name.partition(":")
    if not colon:
        return Accuracy.exact
    if least not in Accuracy.__members__:
        raise ValueError(f"give {AUTO}, or {AUTO}:bounded or {AUTO}:approximate to allow a loss")
    return Accuracy[least]


def checked_codec(name: object) -> str:
    """Return *name* if it is a codec, with or without terms. Raises ValueError."""
    name = str(name)
    if is_auto(name):
        auto_accuracy(name)
        return name
    plain, colon, terms = name.partition(":")
    if plain in REPLACED_CODECS:
        raise ValueError(f"{plain} was removed; use {REPLACED_CODECS[plain]}")
    if plain not in CODECS:
        raise ValueError(f"unknown codec; use {AUTO} or one of {', '.join(CODECS)}")
    if colon:
        try:
            codec_by_name(name)
        except UnknownCodecError as error:
            known = str(error).partition("; known: ")[2]
            raise ValueError(f"{plain} does not know {terms!r}; use {known}") from None
    return name


def _tenant_codec(name: str) -> str:
    if is_auto(name):
        raise ValueError(f"{AUTO} is for whole tiers; name a codec")
    return checked_codec(name)


class TenantCodec(Rule):
    """The codec of one tenant's chunks on one tier, instead of the tier's own."""

    _form = "(?P<tenant>[^/=]+)/(?P<tier>[^=]+)=(?P<codec>.+)"
    _fix = "TENANT/TIER=CODEC, such as acme/redis=kvq:2"
    tenant: Tenant
    tier: Annotated[
        str, AfterValidator(_one_of(CODED_TIERS, "name one of {}: the others hold raw frames"))
    ]
    codec: Annotated[str, AfterValidator(_tenant_codec)]


TierCodecs = Annotated[
    dict[str, str],
    _by_tier(
        "CODEC, or TIER=CODEC, such as disk=raw,redis=kvq:2",
        DEFAULT_CODECS,
        checked_codec,
        _BEFORE_TIER,
    ),
    "TIER=CODEC",
]
TenantCodecs = Annotated[
    tuple[TenantCodec, ...],
    _rules("tenant once for each tier", MAX_TENANT_CODECS, _BEFORE_TENANT),
    "TENANT/TIER=CODEC",
]


# --- quotas and limits


class TenantQuota(Rule):
    """The quota and guaranteed minimum of a tenant or pool on a tier; no tier: on each."""

    _form = "(?P<tenant>[^/=]+)(/(?P<tier>[^=]+))?=(?P<quota>[^:]+)(:(?P<guaranteed>.+))?"
    _fix = "TENANT=SIZE, TENANT=SIZE:GUARANTEED or TENANT/TIER=SIZE"
    tenant: TenantOrPool
    tier: Annotated[
        str, AfterValidator(_one_of(TIER_NAMES, "name one of {}, or no tier for each of them"))
    ] = ""
    quota: Size
    guaranteed: Size = 0

    @model_validator(mode="after")
    def _check(self) -> TenantQuota:
        if not 0 <= self.guaranteed <= self.quota or not self.quota:
            raise ValueError("give a quota, and guarantee no more than that")
        return self


def parse_ttl(value: object) -> int:
    """Return seconds from a number or from text such as ``10min``. Raises ValueError."""
    match = _TTL.fullmatch(str(value).strip())
    seconds = -1 if match is None else int(match[1]) * _SECONDS[match[2]]
    if not 0 <= seconds <= MAX_TTL_S:
        raise ValueError("give a time to live as 90s, 10min, 2h or 7d, 30d at most; 0 for none")
    return seconds


def _category(name: str) -> str:
    if not name.isprintable() or not 1 <= len(name) <= MAX_CATEGORY_CHARS:
        raise ValueError(f"a category has 1 to {MAX_CATEGORY_CHARS} printable characters")
    return name


class CategoryTerm(Rule):
    """The TTL of a category's chunks, and their quota on each tier; 0: no limit."""

    _form = "(?P<category>[^=]+)=(?P<ttl_s>[^:]+)?(:(?P<quota>.+))?(?<!=)"
    _fix = "CATEGORY=TTL or CATEGORY=TTL:SIZE, such as batch=10min:1GiB"
    category: Annotated[str, AfterValidator(_category)]
    ttl_s: Annotated[int, BeforeValidator(parse_ttl)] = 0
    quota: Size = 0


Limit = Annotated[int, Field(ge=0, le=MAX_LIMIT)]


class TenantLimit(Rule):
    """Limits of one tenant, or of each other one, besides bytes. 0: no limit."""

    _form = "(?P<tenant>[^=]+)=(?P<chunks>[^:]+):(?P<requests_per_s>[^:]+):(?P<leases>.+)"
    _fix = "TENANT=CHUNKS:REQUESTS_PER_S:LEASES, 0 for no limit"
    tenant: AnyTenant
    chunks: Limit = 0
    requests_per_s: Limit = 0
    leases: Limit = 0

    @model_validator(mode="after")
    def _check(self) -> TenantLimit:
        if self.tenant == EVERY_OTHER and self.chunks:
            raise ValueError("chunks are only limited for named tenants; give *=0:RATE:LEASES")
        return self


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
    _rules("tenant once for each tier", MAX_QUOTAS * (1 + len(TIER_NAMES))),
    AfterValidator(_few_tenants),
    "TENANT=SIZE:GUARANTEED",
]
CategoryTerms = Annotated[
    tuple[CategoryTerm, ...],
    _rules("category once", MAX_CATEGORIES),
    AfterValidator(_few_quotas),
    "CATEGORY=TTL:SIZE",
]
TenantLimits = Annotated[
    tuple[TenantLimit, ...], _rules("tenant once", BUCKETS), "TENANT=CHUNKS:RATE:LEASES"
]


# --- shared pools


def _members(value: object) -> object:
    return tuple(filter(None, value.split("+"))) if isinstance(value, str) else value


Members = Annotated[tuple[AnyTenant, ...], BeforeValidator(_members)]


class Pool(Rule):
    """The tenants that may read a pool, and those that may also write; ``*`` is every tenant."""

    _form = "(?P<name>[^=]+)=(?P<readers>[^:]+)?(:(?P<writers>.+))?(?<!=)"
    _fix = "POOL=READER+READER:WRITER, such as library=*:curator"
    name: Tenant
    readers: Members = ()
    writers: Members = ()

    def roles(self, tenant: str) -> frozenset[str]:
        """Return the roles of *tenant* in the pool."""
        if {tenant, EVERY_OTHER} & {*self.writers}:
            return frozenset({"read", "write"})
        if {tenant, EVERY_OTHER} & {*self.readers}:
            return frozenset({"read"})
        return frozenset()


SharedPools = Annotated[tuple[Pool, ...], _rules("name once", MAX_POOLS), "POOL=READERS:WRITERS"]


# --- disks and GPUs


class DiskFolder(Parts):
    """One folder of the disk tier and its capacity."""

    _form = "(?P<capacity_bytes>[^:]+)(:(?P<path>.+))?"
    _fix = "SIZE:PATH, SIZE or PATH, such as 100GiB:/var/lib/kvstore"
    capacity_bytes: TierSize = 4 * GIB
    path: OwnPath = Field(
        default_factory=lambda: user_folder("XDG_CACHE_HOME", "~/.cache") / "kvstore/disk"
    )

    def __str__(self) -> str:
        return f"{format_size(self.capacity_bytes)}:{self.path}"


def _disk_texts(value: object) -> object:
    """Split text at commas; a path without a size has the size of the one before."""
    if not isinstance(value, str):
        return [value] if isinstance(value, Mapping) else value
    texts: list[str] = []
    for part in value.split(","):
        text = part.strip()
        if text.startswith(("/", "~", ".")):
            size = texts[-1].partition(":")[0] if texts else "4GiB"
            text = f"{size}:{text}"
        elif text and ":" not in text and texts:
            raise ValueError("give each further disk as SIZE:PATH, such as 1TiB:/mnt/b")
        texts.append(text)
    return texts


def _apart(folders: tuple[DiskFolder, ...]) -> tuple[DiskFolder, ...]:
    paths = [Path(os.path.realpath(folder.path)) for folder in folders]
    if len(set(paths)) < len(paths):
        raise ValueError("name each folder once")
    if any(one in other.parents for one in paths for other in paths):
        raise ValueError("a folder is inside another: name folders apart, such as /mnt/a,/mnt/b")
    if not 1 <= len(folders) <= MAX_DISKS:
        raise ValueError(f"give at most {MAX_DISKS} folders")
    return folders


DiskFolders = Annotated[
    tuple[DiskFolder, ...], BeforeValidator(_disk_texts), AfterValidator(_apart), "SIZE:PATH"
]
"""The first one also holds the index; extents are spread over all."""


class GpuConfig(Parts):
    """Capacity and device of the gpu tier.

    ``device`` is the CUDA index among the devices in CUDA_VISIBLE_DEVICES.
    """

    _form = "(?P<capacity_bytes>[^:]+)(:(?P<device>[0-9]+))?"
    _fix = "SIZE or SIZE:DEVICE, such as 8GiB:1"
    capacity_bytes: TierSize = 4 * GIB
    device: Annotated[int, Field(ge=0, lt=64)] = 0

    def __str__(self) -> str:
        return f"{format_size(self.capacity_bytes)}:{self.device}"
