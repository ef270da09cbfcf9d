"""The server's configuration: flags, else KVSTORE_* environment, else a YAML file, else defaults.

Nothing else in the project reads the environment. A setting has one name in three spellings:
``--disk-write``, ``KVSTORE_DISK_WRITE`` and ``disk_write:``. A value that cannot be used stops
the start; the message names every such field, its value, where it came from and what to give.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.frame import MAX_FRAME_BYTES
from kvstore.proto.wire import MESSAGE_BYTES
from kvstore.server.settings import placement_settings as placement
from kvstore.server.settings.admission_settings import AdmissionSettings
from kvstore.server.settings.blend_settings import BlendSettings
from kvstore.server.settings.codec_rules import CodecName, TenantCodecs
from kvstore.server.settings.directory_settings import DirectorySettings, check_advertised
from kvstore.server.settings.disk_settings import DiskFolders, absolute
from kvstore.server.settings.event_settings import EventSettings
from kvstore.server.settings.gpu_settings import GpuConfig
from kvstore.server.settings.loading import SHORT_NAMES, flag_of, parse_flags
from kvstore.server.settings.peer_settings import PeerSettings
from kvstore.server.settings.redis_settings import RedisSettings, check_access
from kvstore.server.settings.refusal import refusal
from kvstore.server.settings.rules import CategoryTerms, TenantQuotas, TierPolicies
from kvstore.server.settings.scrub_settings import ScrubSettings
from kvstore.server.settings.security_settings import TrustSettings, check_endpoint
from kvstore.server.settings.settings_file import read_settings
from kvstore.server.settings.tracing_settings import TracingSettings
from kvstore.server.settings.values import (
    GIB,
    KIB,
    MIB,
    SOCKET_PATH_BYTES,
    BulkEndpoint,
    Count,
    Endpoint,
    Millis,
    RedisConnections,
    Size,
    SocketPath,
    TierSize,
    Workers,
    format_size,
    is_redis_url,
    parse_endpoint,
    slab_bytes,
)

TIER_NAMES = ("gpu", "cpu", "disk", "redis")
"""From the fastest to the farthest."""

_PREFIX = "KVSTORE_"
_CUDA_CONTROL = Path("/dev/nvidiactl")
# Kubernetes puts these into every pod beside a service whose name starts with kvstore.
_FROM_KUBERNETES = re.compile(r"KVSTORE(_.*)?_(SERVICE_(HOST|PORT.*)|PORT(_.*)?)")


def _raw_only(name: str) -> str:
    if name != "raw":
        raise ValueError("use raw: frames are read in place from CPU memory")
    return name


def _user_folder(variable: str, otherwise: str) -> Path:
    value = os.environ.get(variable, "")
    return Path(value if os.path.isabs(value) else otherwise)


def _disk_path() -> Path:
    return _user_folder("XDG_CACHE_HOME", os.path.expanduser("~/.cache")) / "kvstore" / "disk"


def _keys_path() -> Path:
    return (
        _user_folder("XDG_STATE_HOME", os.path.expanduser("~/.local/state")) / "kvstore" / "events"
    )


def _socket_path() -> str:
    folder = _user_folder("XDG_RUNTIME_DIR", "/tmp")  # noqa: S108 - the socket makes it 0700
    return str(folder / f"kvstore-{os.getuid()}" / "{port}.sock")


class DiskConfig(DiskFolders):
    """Where the disk tier lives and how much it takes; also given as ``100GiB:/path``."""

    path: Annotated[Path, AfterValidator(absolute)] = Field(default_factory=_disk_path)


class ServerConfig(
    TracingSettings,
    EventSettings,
    TrustSettings,
    BlendSettings,
    AdmissionSettings,
    ScrubSettings,
    RedisSettings,
    DirectorySettings,
    PeerSettings,
):
    """Every setting of one server, checked. Built by ``load_config``, or directly in tests."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    max_message_bytes: ClassVar[int] = MESSAGE_BYTES
    """Payload of one streamed message; fixed by the protocol."""

    tiers: Annotated[tuple[str, ...], "NAMES"] = Field(
        default=("cpu", "disk"), description="tiers to use, out of cpu, disk, redis, gpu"
    )
    gpu: Annotated[GpuConfig, "SIZE:DEVICE"] = Field(
        default=GpuConfig(), description="size of the gpu tier and number of its CUDA device"
    )
    cpu_size: TierSize = Field(default=4 * GIB, description="memory that the cpu tier may fill")
    cpu_slab_bytes: Size = Field(
        default_factory=lambda values: slab_bytes(values["cpu_size"]),
        ge=64 * KIB,
        description="memory is shared in slabs of this size; default: from --cpu",
    )
    disk: Annotated[DiskConfig, "SIZE:PATH"] = Field(
        default_factory=DiskConfig,
        description="size and folder of the disk tier; either alone keeps the other's default;"
        " several with commas between them",
    )
    disk_direct: bool = Field(
        default=False, description="read and write the disk past the page cache"
    )
    redis_url: Annotated[str | None, "URL"] = Field(
        default=None,
        repr=False,
        validate_default=True,
        description="Redis of the redis tier; a password is better kept out of flags",
    )
    redis_size: TierSize = Field(
        default=16 * GIB, description="bytes this server may keep in Redis"
    )
    cpu_codec: Annotated[CodecName, AfterValidator(_raw_only)] = Field(
        default="raw", description="codec of frames in the cpu tier; only raw"
    )
    disk_codec: CodecName = Field(
        default="raw", description="codec of frames on disk, as NAME or NAME:TERMS; or auto"
    )
    redis_codec: CodecName = Field(
        default="zplane", description="codec of frames in Redis, as NAME or NAME:TERMS; or auto"
    )
    tenant_codecs: Annotated[TenantCodecs | None, "TENANT/TIER=CODEC"] = Field(
        default=None,
        description="other codecs for chunks of some tenants, with commas between them",
    )
    assets: Annotated[Path | None, "PATH"] = Field(
        default=None,
        description="folder of model assets, for codecs that need one; see kvstore calibrate",
    )
    disk_write: placement.WriteRule = placement.DISK_WRITE
    redis_write: placement.OtherWriteRule = placement.REDIS_WRITE
    disk_copies: placement.DiskCopies = placement.DISK_COPIES
    prefetch_bytes: Size = placement.PREFETCH_BYTES
    policy: Annotated[TierPolicies, "NAME"] = Field(
        default=TierPolicies(),
        description="whom to evict, as NAME, or NAME,TIER=NAME for tiers that differ",
    )
    ghost_limit: Count = Field(
        default=1 << 18, description="evicted chunks that the policies remember, at least"
    )
    tenant_quotas: Annotated[TenantQuotas | None, "TENANT=SIZE:GUARANTEED"] = Field(
        default=None,
        description="what tenants may take of each tier and are sure of, with commas between them",
    )
    category_terms: Annotated[CategoryTerms | None, "CATEGORY=TTL:SIZE"] = Field(
        default=None,
        description="how long chunks of categories live and what they may take of each tier",
    )

    listen: Endpoint = Field(default="127.0.0.1:7420", description="address of the gRPC service")
    socket_path: SocketPath = Field(
        default_factory=_socket_path,
        validate_default=True,
        description="Unix socket of the shared-memory path; {port} becomes the bound port; or off",
    )
    bulk: BulkEndpoint = Field(
        default="off",
        description="address of the bulk channel, over which clients of other hosts and other"
        " servers read and write chunks, or off",
    )
    events_keys: Annotated[Path, AfterValidator(absolute), "PATH"] = Field(
        default_factory=_keys_path,
        description="folder of the key of published events, made at the first start with"
        " --events-readers",
    )
    http: Endpoint = Field(default="off", description="address of the metrics page, or off")

    max_frame_bytes: Size = Field(
        default=256 * MIB,
        ge=64 * KIB,
        le=MAX_FRAME_BYTES,
        description="largest chunk that is taken",
    )
    max_batch_chunks: Count = Field(default=4096, description="chunks in one request")
    max_sessions: Count = Field(default=1024, description="sessions open at once")
    max_leases_per_session: Count = Field(default=1024, description="leases one session may hold")
    max_reservations_per_session: Count = Field(
        default=4096, description="unfinished puts one session may hold"
    )
    session_ttl_ms: Millis = Field(
        default=15_000, description="a silent session is closed after this"
    )
    lease_ttl_ms: Millis = Field(default=30_000, description="a lease ends after this")
    default_deadline_ms: Millis = Field(
        default=2000, description="deadline of calls that name none"
    )
    mover_queue: Count = Field(default=1024, description="background moves waiting in each lane")
    load_headroom_percent: Annotated[int, "N"] = Field(
        default=5, ge=0, lt=50, description="share of the cpu tier kept for loads"
    )
    workers: Workers = Field(default=32, description="threads that answer requests")
    redis_timeout_ms: Millis = Field(
        default=500, description="longest wait for one answer of Redis"
    )
    redis_connections: RedisConnections = Field(
        default=16, description="connections to each Redis server; further calls wait"
    )
    breaker_failures: Count = Field(
        default=3, description="failures in a row that put a tier aside"
    )
    breaker_retry_ms: Millis = Field(
        default=1000, description="a tier put aside is tried again after"
    )

    log_format: Literal["console", "json"] = Field(
        default="console", description="how logs are written"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least level that is logged"
    )

    @field_validator("tiers", mode="before")
    @classmethod
    def _split_tiers(cls, value: object) -> object:
        return [name.strip() for name in value.split(",")] if isinstance(value, str) else value

    @field_validator("tiers")
    @classmethod
    def _check_tiers(cls, tiers: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in tiers if name not in TIER_NAMES]
        if unknown or not tiers:
            raise ValueError("name tiers out of cpu, disk, redis, gpu, separated by commas")
        if len(set(tiers)) < len(tiers):
            raise ValueError("name each tier once")
        if "gpu" in tiers and not _CUDA_CONTROL.exists():
            raise ValueError(
                "'gpu' needs a CUDA device and this machine shows none; start with --tiers cpu,disk"
            )
        if "cpu" not in tiers:
            raise ValueError("add cpu: frames are served from CPU memory, whatever lies below it")
        return tuple(name for name in TIER_NAMES if name in tiers)

    @field_validator("cpu_slab_bytes")
    @classmethod
    def _check_slab(cls, slab_bytes: int, info: ValidationInfo) -> int:
        cpu_bytes = info.data.get("cpu_size", slab_bytes)
        if slab_bytes > cpu_bytes:
            raise ValueError(f"a slab must fit the cpu tier of {format_size(cpu_bytes)}")
        if slab_bytes % (4 * KIB):
            raise ValueError("give a multiple of 4KiB, the size of a page")
        return slab_bytes

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, url: str | None, info: ValidationInfo) -> str | None:
        fix = (
            "give --redis redis://host:6379/0, redis+sentinel://host:26379/service or"
            " redis+cluster://host:6379,host:6379, with rediss for TLS"
        )
        if url is None:
            if "redis" in info.data.get("tiers", ()) or info.data.get("directory"):
                raise ValueError(
                    f"the redis tier and the directory need to know their Redis: {fix}"
                )
            return None
        if not is_redis_url(url):
            raise ValueError(fix)
        check_access(url, info.data)
        return url

    @field_validator("listen", "http")
    @classmethod
    def _check_endpoint(cls, value: str, info: ValidationInfo) -> str:
        if info.field_name == "listen":
            check_advertised(value, info.data)
        return check_endpoint(value, info.field_name or "", info.data)

    @field_validator("socket_path")
    @classmethod
    def _check_socket_path(cls, value: str) -> str:
        if value == "off":
            return value
        path = os.path.expanduser(value)
        if not os.path.isabs(path):
            raise ValueError("give an absolute path, or off to do without shared memory")
        if len(os.fsencode(path.replace("{port}", "65535"))) > SOCKET_PATH_BYTES:
            raise ValueError(f"a socket's path has at most {SOCKET_PATH_BYTES} bytes; shorten it")
        return path

    @field_validator("assets")
    @classmethod
    def _check_assets(cls, path: Path | None) -> Path | None:
        if path is not None and not path.is_dir():
            raise ValueError("name a folder that exists")
        return None if path is None else absolute(path)

    @property
    def listen_address(self) -> tuple[str, int]:
        """Host and port of the gRPC service."""
        return parse_endpoint(self.listen)

    @property
    def http_address(self) -> tuple[str, int] | None:
        """Host and port of the metrics page; None when it is off."""
        return None if self.http == "off" else parse_endpoint(self.http)

    @property
    def codecs(self) -> dict[str, str]:
        """The codec of each tier, by name; GPU memory and peers have raw frames."""
        return {
            "gpu": "raw",
            "cpu": self.cpu_codec,
            "disk": self.disk_codec,
            "peer": "raw",
            "redis": self.redis_codec,
        }

    def socket_path_for(self, port: int) -> Path | None:
        """Path of the Unix socket of a server bound to *port*; None when it is off."""
        if self.socket_path == "off":
            return None
        return Path(self.socket_path.replace("{port}", str(port)))


class _Environment(ServerConfig, BaseSettings):
    model_config = SettingsConfigDict(env_prefix=_PREFIX, enable_decoding=False)


def load_config(argv: Sequence[str]) -> ServerConfig:
    """Return the configuration for the flags in *argv* (without the program's name).

    Raises InvalidRequestError whose message has one line for each setting that is wrong.
    """
    return load_with_origins(argv)[0]


def load_with_origins(argv: Sequence[str]) -> tuple[ServerConfig, dict[str, str]]:
    """Like ``load_config``, and say where each setting that is not a default came from."""
    flags = dict(parse_flags(ServerConfig.model_fields, argv))
    path = flags.pop("config", None) or os.environ.get("KVSTORE_CONFIG")
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    if path:
        values = _by_full_name(read_settings(Path(str(path))))
        origins = dict.fromkeys(values, str(path))
    environment = _read_environment()
    values |= _by_full_name(dict(environment))
    origins |= {SHORT_NAMES.get(name, name): _PREFIX + name.upper() for name in environment}
    values |= flags
    origins |= {name: flag_of(name) for name in flags}
    try:
        return ServerConfig.model_validate(values), origins
    except ValidationError as error:
        raise refusal(error, values, origins, ServerConfig.model_fields) from None


def _by_full_name(given: dict[str, object]) -> dict[str, object]:
    """Return settings by their full names. Raises InvalidRequestError for one given by both."""
    for short in given.keys() & SHORT_NAMES.keys():
        name, value = SHORT_NAMES[short], given.pop(short)
        if name in given:
            shown = "***" if name == "redis_url" else value
            raise InvalidRequestError(short, shown, f"is {name} too; give one of the two")
        given[name] = value
    return given


def _read_environment() -> dict[str, object]:
    found: dict[str, object] = dict(EnvSettingsSource(_Environment)())
    for variable, value in os.environ.items():
        name = variable.removeprefix(_PREFIX).lower()
        ours = variable.startswith(_PREFIX) and not _FROM_KUBERNETES.fullmatch(variable)
        if ours and name not in (*ServerConfig.model_fields, "config"):
            found[name] = value  # a misspelt setting: refused with the others
    return found
