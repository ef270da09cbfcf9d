"""All settings of a server, as one model; ``load_config`` fills it.

A setting can be given as a flag (``--redis-size``), an environment variable
(``KVSTORE_REDIS_SIZE``) or a YAML key (``redis_size:``). Flags override the environment, which
overrides the file, which overrides the default. An invalid value stops the start; the message lists
every such setting with its value, source and fix.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeAlias
from urllib.parse import quote, urlencode, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.frame import MAX_FRAME_BYTES
from kvstore.server.settings.loading import CONFLICT, load, user_folder
from kvstore.server.settings.rules import (
    DEFAULT_BUDGETS,
    DEFAULT_CODECS,
    DEFAULT_POLICIES,
    DEFAULT_WRITES,
    CategoryTerms,
    DiskFolder,
    DiskFolders,
    GpuConfig,
    SharedPools,
    TenantCodecs,
    TenantLimits,
    TenantQuotas,
    TierBudgets,
    TierCodecs,
    TierPolicies,
    TierWrites,
)
from kvstore.server.settings.values import (
    DIRECTORY,
    GIB,
    KIB,
    MAX_DEADLINE_MS,
    MAX_QUERIED_PEERS,
    MIB,
    POOL_PREFIX,
    TIER_NAMES,
    Checked,
    Count,
    GateTerms,
    Limits,
    Millis,
    OwnPath,
    Share,
    Size,
    StateRule,
    TierName,
    TierSize,
    absolute,
    format_size,
    is_loopback,
    parse_endpoint,
    read_password,
    slab_bytes,
    unresolved,
)
from kvstore.tiers.redis_url import DEFAULT_PREFIX, parse_redis_url

MIN_SECRET_BYTES = 16
SOCKET_PATH_BYTES = 107
"""Longest address of a Unix socket."""
REDIS_FIX = (
    "give --redis redis://host:6379/0, redis+sentinel://host:26379/service or"
    " redis+cluster://host:6379,host:6379, with rediss for TLS"
)
TLS_FILES = {
    "redis_tls_ca": "ssl_ca_certs",
    "redis_tls_cert": "ssl_certfile",
    "redis_tls_key": "ssl_keyfile",
}
"""Settings of TLS files for Redis, and the equivalent options of its URL."""
_CUDA_CONTROL = Path("/dev/nvidiactl")
_ANY_HOST = ("0.0.0.0", "::")  # noqa: S104 - compared with

Problems: TypeAlias = "Iterator[tuple[str, str]]"
"""Pairs of a setting and its fix."""


# --- addresses


def _off(value: object) -> object:
    return "off" if value is False else value  # YAML parses a bare off as False


def _or_off(check: Callable[[str], str]) -> AfterValidator:
    return AfterValidator(lambda value: value if value == "off" else check(value))


def _address(value: str) -> str:
    parse_endpoint(value)
    return value


def _event_address(value: str) -> str:
    path = value.removeprefix("ipc:")
    if path == value:
        return _address(value)
    if not os.path.isabs(path) or len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        raise ValueError(f"give ipc: and an absolute path of {SOCKET_PATH_BYTES} bytes at most")
    return value


def _socket_path(value: str) -> str:
    path = os.path.expanduser(value)
    if not os.path.isabs(path):
        raise ValueError("give an absolute path, or off for no shared memory")
    if len(os.fsencode(path.replace("{port}", "65535"))) > SOCKET_PATH_BYTES:
        raise ValueError(f"a socket's path has at most {SOCKET_PATH_BYTES} bytes; shorten it")
    return path


def _own_socket_path() -> str:
    folder = user_folder("XDG_RUNTIME_DIR", "/tmp")  # noqa: S108 - the socket makes it 0700
    return str(folder / f"kvstore-{os.getuid()}" / "{port}.sock")


def _collector(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.path.strip("/") or "@" in parts.netloc:
        raise ValueError("give http://host:port, or https://host:port for TLS")
    parse_endpoint(parts.netloc)
    return url


def _redis_url(url: str) -> str:
    try:
        parse_redis_url(url)
    except InvalidRequestError:
        raise ValueError(REDIS_FIX) from None
    return url


Listen = Annotated[str, BeforeValidator(_off), AfterValidator(_address), "HOST:PORT"]
Endpoint = Annotated[str, BeforeValidator(_off), _or_off(_address), "HOST:PORT"]
EventEndpoint = Annotated[str, BeforeValidator(_off), _or_off(_event_address), "HOST:PORT"]
SocketPath = Annotated[str, BeforeValidator(_off), _or_off(_socket_path), "PATH"]


# --- files


def _readable(path: Path) -> Path:
    path = absolute(path)
    if not (path.is_file() and os.access(path, os.R_OK)):
        raise ValueError("name a file that this user can read")
    return path


def _password_file(path: Path) -> Path:
    read_password(path)
    return path


def _secret_file(path: Path) -> Path:
    if path.stat().st_size < MIN_SECRET_BYTES:
        raise ValueError(f"put at least {MIN_SECRET_BYTES} random bytes into it")
    return path


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise ValueError("name a folder that exists")
    return absolute(path)


ReadableFile = Annotated[Path, AfterValidator(_readable)]
OwnFile = Annotated[ReadableFile | None, "PATH"]
PasswordFile = Annotated[Annotated[ReadableFile, AfterValidator(_password_file)] | None, "PATH"]
SecretFile = Annotated[Annotated[ReadableFile, AfterValidator(_secret_file)] | None, "PATH"]


# --- comma-separated names


def _names(value: object) -> object:
    """Split text at commas; return None for ``off``."""
    if _off(value) == "off":
        return None
    if not isinstance(value, str):
        return value
    return tuple(name.strip() for name in value.split(",") if name.strip())


def _tiers(tiers: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [name for name in tiers if name not in TIER_NAMES]
    if unknown or not tiers:
        raise ValueError("name tiers out of cpu, disk, redis, gpu, separated by commas")
    if len(set(tiers)) < len(tiers):
        raise ValueError("name each tier once")
    if "gpu" in tiers and not _CUDA_CONTROL.exists():
        raise ValueError(
            "'gpu' needs a CUDA device and this host has none; start with --tiers cpu,disk"
        )
    if "cpu" not in tiers:
        raise ValueError("add cpu: frames are always served from CPU memory")
    return tuple(name for name in TIER_NAMES if name in tiers)


def _peers(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if not names:
        return None
    addresses = [name for name in names if name != DIRECTORY]
    for address in addresses:
        if not parse_endpoint(address)[1]:
            raise ValueError("give each peer's port")
    if len(set(names)) < len(names) or len(addresses) > MAX_QUERIED_PEERS:
        most = f"{MAX_QUERIED_PEERS} at most; of more, use directory"
        raise ValueError(f"name each peer once, {most}")
    return names


NAMES = BeforeValidator(_names)


class Settings(Checked):
    """All settings of one server, validated. Built by ``load_config``, or directly in tests."""

    # --- the ten that matter first
    tiers: Annotated[tuple[str, ...], NAMES, AfterValidator(_tiers), "NAMES"] = ("cpu", "disk")
    """tiers to use, out of cpu, disk, redis, gpu"""
    cpu_size: TierSize = 4 * GIB
    """capacity of the cpu tier; memory is allocated as it fills"""
    disk: DiskFolders = Field(default_factory=lambda: (DiskFolder(),))
    """size and folder of the disk tier; either alone keeps the other's default; comma-separated for
    several"""
    redis_url: Annotated[Annotated[str, AfterValidator(_redis_url)] | None, "URL"] = Field(
        default=None, repr=False
    )
    """Redis URL of the redis tier; keep the password out of it"""
    listen: Listen = "127.0.0.1:7420"
    """address of the gRPC service"""
    bulk: Endpoint = "off"
    """address of the bulk channel (TCP), over which clients on other hosts and peers read and write
    chunks, or off"""
    http: Endpoint = "off"
    """address of the metrics page and dashboard, or off"""
    tls_cert: OwnFile = None
    """certificate chain of the gRPC service (PEM); reloaded on change"""
    tls_key: OwnFile = None
    """private key of --tls-cert (PEM); reloaded on change"""
    auth_keys: OwnFile = None
    """file of API keys, written by kvstore token; reloaded on change"""

    # --- tiers
    gpu: Annotated[GpuConfig, "SIZE:DEVICE"] = GpuConfig()
    """size of the gpu tier and CUDA device number"""
    disk_direct: bool = False
    """use direct I/O (O_DIRECT), bypassing the page cache"""
    redis_size: TierSize = 16 * GIB
    """capacity that this server may use in Redis"""
    redis_username: Annotated[str | None, Field(pattern=r"^[!-~]{1,128}$"), "NAME"] = None
    """Redis user, if --redis names none"""
    redis_password_file: PasswordFile = None
    """file with the Redis password, read at start"""
    redis_tls_ca: OwnFile = None
    """CA bundle (PEM) to verify Redis with; requires rediss://"""
    redis_tls_cert: OwnFile = None
    """client certificate (PEM) for Redis with mutual TLS"""
    redis_tls_key: OwnFile = None
    """private key of --redis-tls-cert (PEM)"""
    redis_prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9:_.-]{1,64}$"), "TEXT"] = DEFAULT_PREFIX
    """prefix of all Redis keys; the same on all nodes that share chunks"""
    redis_timeout_ms: Millis = 500
    """timeout of one Redis call"""

    # --- what is stored, and how
    codec: TierCodecs = DEFAULT_CODECS
    """codecs of frames, as CODEC for both tiers or TIER=CODEC, such as disk=auto,redis=kvq:2; auto:
    the one that loads fastest"""
    tenant_codecs: TenantCodecs = ()
    """codecs of single tenants' chunks, comma-separated"""
    assets: Annotated[Annotated[Path, AfterValidator(_folder)] | None, "PATH"] = None
    """folder of model assets, for codecs that need one; see kvstore calibrate"""
    write: TierWrites = DEFAULT_WRITES
    """when to copy chunks to disk and Redis: when stored (through), when evicted (evict), on the
    second request (selective), or when evicted and likely to be reused (auto); RULE,TIER=RULE to
    override one tier"""
    write_budget: TierBudgets = DEFAULT_BUDGETS
    """bytes per day to write to disk and to Redis; beyond it only durable puts and evicted chunks
    likely to be reused; 0: no limit"""
    disk_copies: Literal["inclusive", "exclusive"] = "inclusive"
    """whether a chunk promoted to memory keeps its copy on disk; exclusive holds more, writes more
    and refuses durable puts"""
    policy: TierPolicies = DEFAULT_POLICIES
    """eviction policy, as NAME, or NAME,TIER=NAME to override one tier"""
    state_admission: StateRule = "all"
    """which recurrent states to store: all, or (judicious) those at the end of a put, at branch
    points of prompts, or put a second time"""
    scrub_bytes_per_s: Annotated[Size, Field(ge=0)] = 0
    """rate of background scrubbing, which verifies stored chunks; 0: on request only"""
    scrub_tiers: Annotated[tuple[TierName, ...], NAMES, "NAMES"] = ("disk",)
    """tiers to scrub, out of cpu, disk, redis, gpu"""

    # --- tenants
    tenant_quotas: TenantQuotas = ()
    """capacity and guaranteed minimum of tenants on each tier, comma-separated"""
    tenant_limits: TenantLimits = ()
    """limits of tenants: chunks on each tier, requests per second and leases; *: all others"""
    shared_pools: SharedPools = ()
    """comma-separated pools of chunks that several tenants share"""
    category_terms: CategoryTerms = ()
    """TTL and capacity on each tier of chunk categories, comma-separated"""

    # --- addresses
    socket_path: SocketPath = Field(default_factory=_own_socket_path, validate_default=True)
    """Unix socket for shared memory; {port} becomes the bound port; or off"""
    health: Endpoint = "off"
    """address of a second health service, in plain text, or off"""
    events: EventEndpoint = "off"
    """address of the KV event publisher, compatible with vLLM, or ipc:PATH, or off"""
    events_replay: EventEndpoint = "off"
    """address for replay of missed events, or ipc:PATH, or off"""
    events_readers: OwnFile = None
    """file of CURVE public keys that may read the events of all tenants"""
    events_keys: OwnPath = Field(
        default_factory=lambda: user_folder("XDG_STATE_HOME", "~/.local/state") / "kvstore/events"
    )
    """folder of the publisher's CURVE key, generated at the first start with --events-readers"""

    # --- other servers
    peers: Annotated[tuple[str, ...] | None, NAMES, AfterValidator(_peers), "HOST:PORT"] = None
    """peers to read chunks from: comma-separated HOST:PORT of their --listen; directory to discover
    them through Redis; or off"""
    peer_key: OwnFile = None
    """file with the API key, of role peer, to authenticate to peers with"""
    peer_ca: OwnFile = None
    """CA bundle (PEM) to verify peers with; enables TLS to peers"""
    peer_name: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9_.-]{1,253}$"), "NAME"] = None
    """name in peers' certificates if it is not their address; with --peer-ca"""
    directory: bool = False
    """advertise this node's in-memory chunks in Redis and discover those of other nodes"""
    node_id: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9_.:\[\]-]{1,128}$"), "NAME"] = None
    """unique name of this node; default: host name and port"""
    advertise: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9_.:-]{1,100}$"), "HOST"] = None
    """host at which other nodes reach this one; default: that of --listen"""

    # --- who may call
    tls_client_ca: OwnFile = None
    """CA bundle (PEM) to verify client certificates with; clients then need one"""
    tls_crl: OwnFile = None
    """certificate revocation list (PEM) for client certificates; reloaded on change"""
    jwt_key: OwnFile = None
    """public keys, or the HS256 secret, to verify JWTs with"""
    jwt_algorithm: Literal["EdDSA", "ES256", "RS256", "HS256"] = "EdDSA"
    """the only accepted JWT algorithm"""
    jwt_audience: Annotated[str | None, "TEXT"] = None
    """required audience of JWTs"""
    jwt_issuer: Annotated[str | None, "TEXT"] = None
    """required issuer of JWTs; default: any"""
    audit_log: Annotated[OwnPath | None, "PATH"] = None
    """file of the audit log; default: none"""
    audit_reads: bool = False
    """audit successful lookups and gets too"""
    encryption_keys: OwnFile = None
    """file of keys to encrypt disk and Redis with, written by kvstore keys; reloaded on change"""
    secret_file: SecretFile = None
    """file whose bytes salt the namespaces; default: none, so that anyone who knows a model and a
    prompt can compute their chunk keys"""
    insecure: bool = False
    """allow other hosts to connect without TLS and authentication"""
    open_pages: bool = False
    """allow other hosts to read --http and --health, in plain text"""
    http_tls: bool = False
    """serve --http over TLS; on a public address to admins only"""

    # --- blending
    blend_contents: Annotated[int, Field(ge=0), "N"] = 1 << 16
    """limit of contents in the index for blending; 0: none"""
    blend_agreement: Share = GateTerms.min_agreement
    """share of tokens on which full prefill must agree, where its choice is clear, for a blending
    gate to open"""
    blend_divergence: Annotated[float, Field(gt=0.0, lt=100.0), "NATS"] = GateTerms.max_divergence
    """largest KL divergence per token from full prefill for a blending gate to open"""

    # --- limits
    max_frame_bytes: Annotated[Size, Field(ge=64 * KIB, le=MAX_FRAME_BYTES)] = 256 * MIB
    """largest chunk accepted"""
    max_sessions: Count = 1024
    """limit of open sessions"""
    lease_ttl_ms: Millis = 30_000
    """lifetime of a lease"""
    default_deadline_ms: Annotated[Millis, Field(le=MAX_DEADLINE_MS)] = 2000
    """deadline of calls that set none"""
    workers: Annotated[int, Field(ge=1, le=1024), "N"] = 32
    """threads that answer requests"""

    limits: Annotated[Limits, "NAME=VALUE"] = Limits()
    """rarely changed limits, comma-separated"""

    # --- logs
    log_format: Literal["console", "json"] = "console"
    """format of logs"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """lowest level that is logged"""
    tracing_endpoint: Annotated[Annotated[str, AfterValidator(_collector)] | None, "URL"] = None
    """OpenTelemetry collector for spans, over gRPC, such as http://127.0.0.1:4317; https for TLS;
    default: none"""
    tracing_share: Share = 0.01
    """sampling rate of calls whose caller does not trace them"""

    @model_validator(mode="after")
    def _check_together(self) -> Settings:
        problems = (_tier_problems, _caller_problems, _address_problems, _event_problems)
        found = [problem for each in problems for problem in each(self)]
        if found:  # the text contains no values: one may hold a password
            text = "; ".join(f"{name}: {fix}" for name, fix in found)
            raise PydanticCustomError(CONFLICT, text, {"problems": found})
        return self

    @property
    def authenticates_callers(self) -> bool:
        """Whether callers must authenticate."""
        return any((self.auth_keys, self.jwt_key, self.tls_client_ca))

    @property
    def unused(self) -> Iterator[tuple[str, str]]:
        """The settings that were given for a tier that is not used, and the tier."""
        for name, tier in {"disk": "disk", "gpu": "gpu", "redis_url": "redis"}.items():
            is_used = tier in self.tiers or (tier == "redis" and self.directory)
            if name in self.model_fields_set and not is_used:
                yield name, tier

    @property
    def cpu_slab_bytes(self) -> int:
        """Size of shared-memory slabs."""
        return self.limits.cpu_slab_bytes or slab_bytes(self.cpu_size)

    @property
    def codecs(self) -> dict[str, str]:
        """The codec of each tier; memory and peers have raw frames."""
        return dict.fromkeys(("gpu", "cpu", "peer"), "raw") | self.codec

    def node_id_for(self, port: int) -> str:
        """Return this node's name in the directory, with the gRPC service bound to *port*."""
        return self.node_id or f"{socket.gethostname()[:100]}:{port}"

    def socket_path_for(self, port: int) -> Path | None:
        """Return the path of the Unix socket of a server bound to *port*; None when it is off."""
        if self.socket_path == "off":
            return None
        return Path(self.socket_path.replace("{port}", str(port)))

    def redis_access(self, url: str) -> str:
        """Return *url* with the configured user, password (RedisClient masks it) and TLS files."""
        scheme, _, rest = url.partition("://")
        place, _, query = rest.partition("?")
        if self.redis_password_file is not None:
            name = quote(self.redis_username or "", safe="")
            place = f"{name}:{quote(read_password(self.redis_password_file), safe='')}@{place}"
        files = {option: getattr(self, name) for name, option in TLS_FILES.items()}
        options = [query, urlencode({name: path for name, path in files.items() if path})]
        query = "&".join(filter(None, options))
        return f"{scheme}://{place}" + (f"?{query}" if query else "")


# --- conflicts between settings: files that come in pairs, addresses that other hosts can reach


def _tier_problems(config: Settings) -> Problems:
    if config.cpu_slab_bytes > config.cpu_size:
        size = format_size(config.cpu_size)
        yield "limits", f"cpu_slab_bytes: a slab must fit the cpu tier of {size}"
    if config.redis_url is None:
        if "redis" in config.tiers or config.directory:
            fix = f"the redis tier and the directory need a Redis URL: {REDIS_FIX}"
            yield "redis_url", fix
    elif fix := _redis_access(config, config.redis_url):
        yield "redis_url", fix
    if DIRECTORY in (config.peers or ()) and not config.directory:
        fix = "directory needs --directory and --redis; add them, or give addresses"
        yield "peers", fix
    if (config.redis_tls_cert is None) != (config.redis_tls_key is None):
        yield "redis_tls_key", "give both --redis-tls-cert and --redis-tls-key, or neither"


def _redis_access(config: Settings, url: str) -> str:
    """Return the conflict of *url* with other settings; empty if there is none."""
    parsed = parse_redis_url(url)
    if config.redis_username and not config.redis_password_file:
        return "--redis-username needs --redis-password-file"
    if config.redis_password_file and (parsed.login.username or parsed.login.password):
        return "it names a user, and so does --redis-password-file; leave one out"
    if any(getattr(config, name) for name in TLS_FILES):
        if parsed.tls is None:
            return "files for TLS are given; write rediss:// for redis://"
        if any(name in TLS_FILES.values() for name, _ in parsed.tls):
            return "it names files for TLS, and so do --redis-tls-...; leave one out"
    return ""


def _caller_problems(config: Settings) -> Problems:
    if (config.tls_cert is None) != (config.tls_key is None):
        yield "tls_key", "give both --tls-cert and --tls-key, or neither"
    if config.tls_client_ca and not config.tls_cert:
        yield "tls_client_ca", "client certificates need TLS: give --tls-cert too"
    if config.tls_crl and not config.tls_client_ca:
        yield "tls_crl", "it applies to client certificates: give --tls-client-ca too"
    if config.jwt_key and not config.jwt_audience:
        yield "jwt_audience", "give the audience, or tokens for other services are accepted"
    if config.http_tls and not config.tls_cert:
        yield "http_tls", "TLS needs a certificate: give --tls-cert and --tls-key"
    pools = {f"{POOL_PREFIX}{pool.name}" for pool in config.shared_pools}
    limited = {one.tenant for one in config.tenant_quotas if one.tenant.startswith(POOL_PREFIX)}
    if not limited <= pools:
        yield "tenant_quotas", "it names a pool that is not in --shared-pools"


def _address_problems(config: Settings) -> Problems:
    host, _ = parse_endpoint(config.listen)
    if config.directory and not config.advertise and host in _ANY_HOST:
        yield "listen", "other nodes need an address to reach this one: give --advertise HOST"
        return
    proves = config.authenticates_callers
    is_guarded = {
        "listen": config.tls_cert and proves,
        "http": config.open_pages or (config.http_tls and proves),
        "health": config.open_pages,
    }
    for name, fix in _FIX_FOR_OTHERS.items():
        address = getattr(config, name)
        if address != "off" and not (config.insecure or is_guarded[name]):
            host, _ = parse_endpoint(address)
            if not is_loopback(host):
                yield name, unresolved(host) or fix


_OPEN_PAGE = "other hosts could read it in plain text; use 127.0.0.1, or add --open-pages"
_FIX_FOR_OTHERS = {
    "listen": "other hosts could connect without TLS, or without authentication; give"
    " --tls-cert and one of --auth-keys, --jwt-key and --tls-client-ca, listen on 127.0.0.1, or"
    " add --insecure on a network you trust",
    "http": f"{_OPEN_PAGE}, or --http-tls with authentication",
    "health": _OPEN_PAGE,
}


def _event_problems(config: Settings) -> Problems:
    for name in ("events", "events_replay"):
        address = getattr(config, name)
        if address == "off":
            continue
        if not config.limits.events_kept:
            yield name, "with --limits events_kept=0 there is nothing to publish"
        elif address.startswith("ipc:") or config.events_readers or config.insecure:
            continue
        elif not is_loopback(parse_endpoint(address)[0]):
            fix = "other hosts could read which chunks all tenants have; give --events-readers, or"
            yield name, f"{fix} use 127.0.0.1 or ipc:PATH"
        elif config.authenticates_callers:
            fix = "every process of this host could read which chunks all tenants have; give"
            yield name, f"{fix} --events-readers, or use ipc:PATH"


def load_config(argv: Sequence[str]) -> Settings:
    """Return the settings for the flags *argv*. Raises InvalidRequestError, a line per fault."""
    return load(Settings, argv)[0]
