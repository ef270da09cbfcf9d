"""`kvstore doctor`: checks this machine and a server, with a fix for each problem."""

from __future__ import annotations

import os
import resource
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from kvstore.cli import app
from kvstore.cli.chunks import fetch_namespaces
from kvstore.cli.server import directory_line, fetch_status
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import KVStoreError

if TYPE_CHECKING:  # keeps --help fast
    from kvstore.client.server_state import ServerStatus
    from kvstore.server.settings.settings import Settings
    from kvstore.tiers.redis_client import RedisClient
    from kvstore.tiers.redis_connection import Command

MIN_FILES = 4096
PROBE_BYTES = 32 << 20
MIN_DISK_BYTES_PER_S = 100e6
LIST_ENDS_SOON = timedelta(days=1)
EXPIRES_SOON = timedelta(days=14)
SLOW_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "fuse", "overlay"}
MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}
MAX_SKEW_S = 2.0
"""Each machine checks tokens and certificates by its own clock."""
MAX_REDIS_MS = 5.0
PINGS = 20

OWN = {"tls_cert": "certificate", "redis_tls_cert": "certificate for Redis"}
"""Settings with the server's own certificates, and their names."""
AUTHORITIES = {
    "tls_client_ca": "authority of clients",
    "peer_ca": "authority of peers",
    "redis_tls_ca": "authority of Redis",
}
"""Settings with CA bundles that verify others: one valid certificate suffices."""
SECRET = (
    "tls_key", "redis_tls_key", "redis_password_file", "peer_key", "encryption_keys", "secret_file",
)  # fmt: skip
"""Settings with files whose readers can impersonate the server, or decrypt its data."""
TRUSTED = ("auth_keys", "jwt_key", "tls_client_ca", "peer_ca", "redis_tls_ca", "events_readers")
"""Settings with files whose writers can grant themselves access."""
_IDENTITY = ("model_revision", "adapter_digest", "quantization", "tokenizer_digest")

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; ``fix`` is empty if it is ok."""

    check: str
    state: State
    saw: str
    fix: str = ""


def judged(is_bad: bool, check: str, saw: str, fix: str, state: State = "warn") -> Finding:
    """Return the result of a check: *state* with the *fix* if it *is_bad*, else ok."""
    return Finding(check, state, saw, fix) if is_bad else Finding(check, "ok", saw)


@app.command("doctor", exits="0 1 2 3", example="--tiers cpu,disk", section="Look", as_server=True)
def doctor(address: str, context: typer.Context) -> app.Shown:
    """Check this machine, and the server if it runs; takes kvstore-server's flags, too.

    Pass the flags or the --config of that server. Exits with 1 if a check fails.
    """
    from kvstore.server.settings.settings import load_config

    config = load_config(context.args)
    found = [one for check in CHECKS for one in check(config)]
    found += check_server(address, config)
    rows = list(map(asdict, found))
    failed = any(one.state == "fail" for one in found)
    table = app.Grid(("check", "state", "finding", "fix"), (row.values() for row in rows), wraps=2)
    return app.Shown({"checks": rows, "failed": failed}, [table], held=not failed)


# --- the machine


def check_limits(config: Settings) -> Iterator[Finding]:
    """Check the limits of open files, locked memory and the container's memory, and the tiers."""
    from kvstore.server.settings.process_limits import PROCESS_BYTES, memory_limit_bytes
    from kvstore.server.settings.values import format_size

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # a server raises its soft limit
    fix = f"raise it to {MIN_FILES} or more: LimitNOFILE= of systemd, or ulimit -n"
    yield judged(0 < files < MIN_FILES, "open files", f"{files} at most", fix)
    if "gpu" in config.tiers:
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        fix = "set LimitMEMLOCK=infinity: memory is pinned for the GPU"
        yield judged(0 <= locked < config.cpu_size, "locked memory", _size(locked), fix)
    for name, tier in config.unused:
        yield Finding("tiers", "warn", f"{name} has no effect", f"add {tier} to --tiers")
    limit = memory_limit_bytes()
    needed = config.cpu_size + PROCESS_BYTES
    fix = f"give {format_size(needed)}, or a smaller --cpu"
    yield judged(limit < needed, "memory", f"{_size(limit)} available", fix, "fail")


def check_disk(config: Settings) -> Iterator[Finding]:
    """Check the file system, free space and speed of each folder of the disk tier."""
    from kvstore.server.settings.values import format_size
    from kvstore.tiers.disk_io import free_bytes

    if "disk" not in config.tiers:
        return
    for folder in config.disk:
        place = next(path for path in (folder.path, *folder.path.parents) if path.exists())
        name = f"disk {folder.path}"
        kind = file_system_of(place)
        if kind in MEMORY_FILE_SYSTEMS:
            yield Finding(name, "warn", kind, "data is lost at a restart: use a disk")
        elif kind in SLOW_FILE_SYSTEMS:
            yield Finding(name, "warn", kind, "use a local file system such as ext4 or xfs")
        if not os.access(place, os.W_OK):
            yield Finding(name, "fail", "not writable", "give the server's user write access")
            continue
        files = (path for path in folder.path.rglob("*") if path.is_file())
        free = free_bytes(place) + sum(path.stat().st_blocks * 512 for path in files)
        if free < folder.capacity_bytes:
            fix = f"give at most {format_size(free >> 20 << 20)}, or free space"
            yield Finding(name, "fail", f"{_size(free)} free", fix)
            continue
        rate = disk_bytes_per_s(place)
        saw = f"{kind}, {_size(free)} free, {rate / 1e6:.0f} MB/s written and synced"
        fix = "use a faster disk, or --write evict"
        yield judged(rate < MIN_DISK_BYTES_PER_S, name, saw, fix)


def file_system_of(path: Path) -> str:
    """Return the type of the file system of *path*."""
    found, kind, real = "", "unknown", path.resolve()
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, name, *_ = line.split()
        if real.is_relative_to(where) and len(where) >= len(found):
            found, kind = where, name
    return kind


def disk_bytes_per_s(folder: Path) -> float:
    """Write and sync ``PROBE_BYTES`` in *folder*, remove them, and return the rate."""
    from tempfile import NamedTemporaryFile

    data = os.urandom(1 << 20)
    with NamedTemporaryFile(dir=folder, prefix=".kvstore-doctor-") as file:
        started = time.perf_counter()
        for _ in range(PROBE_BYTES // len(data)):
            file.write(data)
        file.flush()
        os.fdatasync(file.fileno())
        return PROBE_BYTES / (time.perf_counter() - started)


def check_revocations(config: Settings) -> Iterator[Finding]:
    """Check that the certificate revocation list is valid, and for how long."""
    if config.tls_crl is None or config.tls_client_ca is None:
        return
    from kvstore.server.security.certificates import parse_revocations

    try:
        data, authorities = config.tls_crl.read_bytes(), config.tls_client_ca.read_bytes()
        found = parse_revocations(data, authorities)
    except (OSError, KVStoreError) as error:
        fix = "replace the file: a server cannot start with it; a running one keeps the last list"
        yield Finding("revocations", "fail", str(error), fix)
        return
    left = timedelta(seconds=min(found.until_s - time.time(), 1e9))
    fix = "replace the file; the server reloads it"
    saw = f"{len(found.proofs)} certificates, the list is valid for {left.days} days"
    yield judged(left < LIST_ENDS_SOON, "revocations", saw, fix)


def check_gpu(config: Settings) -> Iterator[Finding]:
    """Check that the GPU of the gpu tier is present."""
    if "gpu" not in config.tiers:
        return
    if not Path("/dev/nvidiactl").exists():
        yield Finding("gpu", "fail", "no NVIDIA driver here", "leave gpu out of --tiers")
        return
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    fix = "give an existing device in --gpu SIZE:DEVICE"
    yield judged(devices <= config.gpu.device, "gpu", f"{devices} devices", fix, "fail")


def _size(size_bytes: int) -> str:
    return "unlimited" if size_bytes < 0 else app.readable_size(size_bytes)


# --- certificates and secrets


def check_certificates(config: Settings) -> Iterator[Finding]:
    """Check how long each certificate in the settings is valid."""
    for setting, name in (OWN | AUTHORITIES).items():
        path = getattr(config, setting)
        if path is not None:
            yield _certificate(name, setting, path)


def _certificate(name: str, setting: str, path: Path) -> Finding:
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        fix = f"give --{setting.replace('_', '-')} a readable PEM file"
        return Finding(name, "fail", f"{path}: {error}", fix)
    best = max(found if setting in AUTHORITIES else found[:1], key=lambda c: c.not_valid_after_utc)
    now = datetime.now(UTC)
    if best.not_valid_before_utc > now:
        begins = best.not_valid_before_utc.isoformat(" ", "minutes")
        fix = "set the clock, or get another: it is refused until then"
        return Finding(name, "fail", f"valid from {begins}", fix)
    left = best.not_valid_after_utc - now
    again = "restart the server" if "redis" in setting else "the server reloads it"
    fix = f"replace the file; {again}"
    if left < timedelta():
        return Finding(name, "fail", f"expired {(-left).days} days ago", fix)
    return judged(left < EXPIRES_SOON, name, f"{left.days} days left", fix)


def check_files(config: Settings) -> Iterator[Finding]:
    """Check whether every user may read a secret file, or write a file that the server trusts."""
    secret = {*SECRET, "jwt_key"} if config.jwt_algorithm == "HS256" else {*SECRET}
    for setting in (*SECRET, *TRUSTED):
        path: Path | None = getattr(config, setting)
        mode = 0 if path is None else path.stat().st_mode
        can = [
            what
            for what, bit in (("read", stat.S_IROTH), ("change", stat.S_IWOTH))
            if mode & bit and (what == "change" or setting in secret)
        ]
        if can:
            saw = f"every user may {' and '.join(can)} {path}"
            yield Finding(setting.replace("_", " "), "warn", saw, f"chmod o-rwx {path}")


# --- Redis


def check_redis(config: Settings, wall_clock: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Check Redis: its latency, the user's permissions, its servers' health, and its clock."""
    from kvstore.tiers.redis_client import RedisClient

    if config.redis_url is None or not ("redis" in config.tiers or config.directory):
        return
    try:
        access = config.redis_access(config.redis_url)
        link = RedisClient("redis", access, config.redis_timeout_ms, 1)
    except (KVStoreError, OSError, ValueError) as error:
        yield Finding("redis", "fail", str(error), "correct --redis and the other Redis settings")
        return
    with closing(link):
        name = f"{config.redis_prefix}{{doctor}}".encode()
        times_s = []
        try:
            for _ in range(PINGS):
                started = time.perf_counter()
                link.run(name, [[b"GETRANGE", name, b"0", b"0"]])
                times_s.append(time.perf_counter() - started)
        except KVStoreError as error:
            yield Finding("redis", "fail", str(error), "start it, or correct --redis")
            return
        median_ms = 1000 * sorted(times_s)[PINGS // 2]
        fix = "move it nearer: each lookup that misses in memory waits for it"
        yield judged(median_ms > MAX_REDIS_MS, "redis", f"latency {median_ms:.2f} ms", fix)
        yield _rights(link, name, config)
        yield from _servers(link)
        with suppress(KVStoreError, TypeError, ValueError):  # its user may lack TIME
            yield _clock(link, wall_clock)


def _rights(link: RedisClient, name: bytes, config: Settings) -> Finding:
    """Try each command that is needed, on keys that expire in 10 s."""
    from redis.exceptions import OutOfMemoryError

    from kvstore.tiers.redis_client import DIRECTORY_RIGHTS, TIER_RIGHTS

    other = name + b":set"
    trials: list[Command] = [
        (b"SET", name, b"x", b"PX", 10_000), (b"EXPIRE", name, 10), (b"SCAN", 0, b"COUNT", 1),
        (b"EVAL", b"return 1", 1, name), (b"UNLINK", name),
    ]  # fmt: skip
    if config.directory:
        trials += [
            (b"SADD", other, 1), (b"SRANDMEMBER", other, 1), (b"SREM", other, 1),
            (b"HSET", name, b"f", b"v"), (b"HGET", name, b"f"), (b"HGETALL", name),
            (b"HDEL", name, b"f"), (b"TIME",),
        ]  # fmt: skip
    denied = []
    for one in trials:
        word = bytes(one[0]).decode().lower()
        try:
            link.run(name, [one])
        except OutOfMemoryError:  # permitted; a full Redis is another finding
            continue
        except KVStoreError as error:
            if "NoPermissionError" in str(error):
                denied.append(f"{word} ({str(error).partition('; allow its user')[0]})")
            elif word == "set":
                return Finding("redis rights", "warn", f"cannot be tried: {error}", "fix that")
    words = TIER_RIGHTS + (DIRECTORY_RIGHTS if config.directory else ())
    rights = " ".join(f"+{word}" for word in words)
    fix = f"ACL SETUSER its user ~{config.redis_prefix}* {rights}"
    saw = f"denied: {', '.join(denied)}" if denied else "all required commands"
    return judged(bool(denied), "redis rights", saw, fix, "fail")


def _servers(link: RedisClient) -> Iterator[Finding]:
    from kvstore.tiers.redis import check_health

    try:
        found = list(check_health(link))
    except KVStoreError as error:
        yield Finding("redis servers", "fail", str(error), "start them")
        return
    for one in found:
        yield Finding("redis servers", "fail" if one.is_loss else "warn", one.saw, one.fix)
    if not found:
        yield Finding("redis servers", "ok", "all respond and have free memory")


def _clock(link: RedisClient, wall_clock: Callable[[], float]) -> Finding:
    """Compare this machine's clock with that of Redis, which nodes share."""
    before_s = wall_clock()
    seconds, micros = map(int, link.run(b"time", [[b"TIME"]])[0])
    after_s = wall_clock()
    skew_s = (before_s + after_s) / 2 - (seconds + micros / 1e6)
    is_off = abs(skew_s) - (after_s - before_s) / 2 > MAX_SKEW_S
    fix = "sync both machines by NTP: tokens and certificates expire by the clock"
    saw = f"{abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} that of Redis"
    return judged(is_off, "clock", saw, fix)


CHECKS: tuple[Callable[[Settings], Iterator[Finding]], ...] = (
    check_limits, check_disk, check_redis, check_certificates, check_files, check_revocations,
    check_gpu,
)  # fmt: skip


# --- the server


def check_server(address: str, config: Settings) -> Iterator[Finding]:
    """Check that a server responds, its tiers' state, and that engines share identities."""
    try:
        status = fetch_status(address)
    except KVStoreError as error:
        yield Finding("server", "warn", str(error), "start kvstore-server, or give --address")
        return
    yield Finding("server", "ok", f"{status.state}, version {status.version}")
    yield from check_settings(status, config)
    for tier in status.tiers:
        name, saw = f"tier {tier.name}", tier.reason or tier.state
        yield judged(bool(tier.reason), name, saw, "fix the cause; the tier recovers by itself")
    damaged = status.counters.get("corrupt_chunks", 0)
    if damaged:
        yield Finding("damage", "warn", f"{damaged} damaged copies", "check the media")
    if status.directory is not None:
        fixes = {
            "taken": "give each node its own --node-id",
            "unknown": "fix the cause; the server joins by itself",
            "full": "split the nodes by --redis-prefix",
        }
        fix = fixes.get(status.directory.standing, "")
        fix = fix or (fixes["unknown"] if status.directory.failure else "")
        saw = directory_line(app.as_dict(status.directory)).removeprefix("directory: ")
        yield judged(bool(fix), "directory", saw, fix)
    try:
        yield from _identities(fetch_namespaces(address))
    except KVStoreError as error:
        yield Finding("engines", "ok", f"not shown: {error}")


def check_settings(status: ServerStatus, config: Settings) -> Iterator[Finding]:
    """Check that the server has the tiers that the machine was checked for."""
    disk_bytes = sum(folder.capacity_bytes for folder in config.disk)
    known = {"cpu": config.cpu_size, "disk": disk_bytes}
    differ = sorted({tier.name for tier in status.tiers} ^ set(config.tiers))
    differ += [
        tier.name
        for tier in status.tiers
        if tier.name in config.tiers and tier.capacity_bytes and known.get(tier.name)
        and not 0.8 < tier.capacity_bytes / known[tier.name] < 1.25
    ]  # fmt: skip
    if differ:
        saw = f"the checked settings differ from the server's: {', '.join(differ)}"
        yield Finding("settings", "warn", saw, "give doctor the server's flags, or its --config")


def _identities(spaces: list[pb.KnownSpace]) -> Iterator[Finding]:
    by_model: dict[str, list[pb.Representation]] = defaultdict(list)
    for space in spaces:
        by_model[space.representation.model_id].append(space.representation)
    fix = "give engines that should share the same values; kvstore ls --spaces"
    for model, kinds in by_model.items():
        fields = [name for name in _IDENTITY if len({getattr(k, name) for k in kinds}) > 1]
        differ = ", ".join(fields) or "layers, data types or rope"
        several = f"{len(kinds)} identities, which share nothing: {differ} differ"
        saw = several if len(kinds) > 1 else "one identity"
        yield judged(len(kinds) > 1, f"engines of {model}", saw, fix)
