"""What `kvstore doctor` checks on this machine and in Redis: each check yields findings."""

from __future__ import annotations

import os
import resource
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

from cryptography import x509
from redis.exceptions import OutOfMemoryError

from kvstore.cli.doctor import Finding, State, judged
from kvstore.proto.errors import KVStoreError
from kvstore.server.security.certificates import parse_revocations
from kvstore.server.settings.process_limits import PROCESS_BYTES, memory_limit_bytes
from kvstore.server.settings.settings import Settings
from kvstore.server.settings.values import GIB, MIB, format_size
from kvstore.tiers.redis import check_health
from kvstore.tiers.redis_client import DIRECTORY_RIGHTS, TIER_RIGHTS, RedisClient
from kvstore.tiers.redis_connection import Command

MIN_FILES = 4096
PROBE_BYTES = 32 * MIB
MIN_DISK_BYTES_PER_S = 100e6
LIST_ENDS_SOON = timedelta(days=1)
EXPIRES_SOON = timedelta(days=14)
SLOW_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "fuse", "overlay"}
MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}
MAX_SKEW_S = 2.0
"""Tokens and certificates are judged by each machine's own clock."""
MAX_REDIS_MS = 5.0
PINGS = 20

OWN = {"tls_cert": "certificate", "redis_tls_cert": "certificate for Redis"}
"""Settings of certificates that are shown to others, and what they are called."""
AUTHORITIES = {
    "tls_client_ca": "authority of clients",
    "peer_ca": "authority of peers",
    "redis_tls_ca": "authority of Redis",
}
"""Settings of those that others are verified with: one that is valid will do of several."""
SECRET = (
    "tls_key", "redis_tls_key", "redis_password_file", "peer_key", "encryption_keys", "secret_file",
)  # fmt: skip
"""Settings with files whose readers can pass for the server, or read what it keeps."""
TRUSTED = ("auth_keys", "jwt_key", "tls_client_ca", "peer_ca", "redis_tls_ca", "events_readers")
"""Settings with files whose writers can let themselves in."""


# --- the machine


def check_limits(config: Settings) -> Iterator[Finding]:
    """Open files, locked memory, and the memory that a container may take."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # a server takes what it may
    fix = f"raise it to {MIN_FILES} or more: LimitNOFILE= of systemd, or ulimit -n"
    yield judged(0 < files < MIN_FILES, "open files", f"{files} at most", fix)
    if "gpu" in config.tiers:
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        fix = "set LimitMEMLOCK=infinity: memory is pinned for the GPU"
        yield judged(0 <= locked < config.cpu_size, "locked memory", _size(locked), fix)
    limit = memory_limit_bytes()
    needed = config.cpu_size + PROCESS_BYTES
    fix = f"give {format_size(needed)}, or a smaller --cpu"
    yield judged(limit < needed, "memory", f"{_size(limit)} may be used", fix, "fail")


def check_disk(config: Settings) -> Iterator[Finding]:
    """File system, free space and speed of each folder of the disk tier."""
    if "disk" not in config.tiers:
        return
    for folder in config.disk:
        place = next(path for path in (folder.path, *folder.path.parents) if path.exists())
        name = f"disk {folder.path}"
        kind = file_system_of(place)
        if kind in MEMORY_FILE_SYSTEMS:
            yield Finding(name, "warn", kind, "what lies there is lost at a restart: use a disk")
        elif kind in SLOW_FILE_SYSTEMS:
            yield Finding(name, "warn", kind, "use a local file system such as ext4 or xfs")
        if not os.access(place, os.W_OK):
            yield Finding(name, "fail", "not writable", "give the server's user the folder")
            continue
        disk = os.statvfs(place)
        files = (path for path in folder.path.rglob("*") if path.is_file())
        own = sum(path.stat().st_blocks * 512 for path in files)
        free = disk.f_bavail * disk.f_frsize + own
        if free < folder.capacity_bytes:
            fix = f"give at most {format_size(free // MIB * MIB)}, or free space"
            yield Finding(name, "fail", f"{_size(free)} free", fix)
            continue
        rate = disk_bytes_per_s(place)
        saw = f"{kind}, {_size(free)} free, {rate / 1e6:.0f} MB/s written and synced"
        fix = "use a faster disk, or --write evict"
        yield judged(rate < MIN_DISK_BYTES_PER_S, name, saw, fix)


def file_system_of(path: Path) -> str:
    """Return the kind of file system that *path* lies on."""
    found, kind = "", "unknown"
    real = os.path.realpath(path)
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, name, *_ = line.split()
        inside = where == "/" or real == where or real.startswith(where + "/")
        if inside and len(where) >= len(found):
            found, kind = where, name
    return kind


def disk_bytes_per_s(folder: Path) -> float:
    """Write and sync ``PROBE_BYTES`` below *folder*; return the rate. Nothing is left there."""
    path = folder / f".kvstore-doctor-{uuid4().hex}"
    data = os.urandom(MIB)
    try:
        with path.open("wb") as file:
            started = time.perf_counter()
            for _ in range(PROBE_BYTES // MIB):
                file.write(data)
            file.flush()
            os.fdatasync(file.fileno())
            return PROBE_BYTES / (time.perf_counter() - started)
    finally:
        path.unlink(missing_ok=True)


def check_revocations(config: Settings) -> Iterator[Finding]:
    """Whether the list of revoked certificates can be used, and for how long."""
    if config.tls_crl is None or config.tls_client_ca is None:
        return
    try:
        data, authorities = config.tls_crl.read_bytes(), config.tls_client_ca.read_bytes()
        found = parse_revocations(data, authorities)
    except (OSError, KVStoreError) as error:
        fix = "replace the file: no server starts with it, and one that runs keeps the last list"
        yield Finding("revocations", "fail", str(error), fix)
        return
    left = timedelta(seconds=min(found.until_s - time.time(), 1e9))
    fix = "replace the file; the server reads it again by itself"
    saw = f"{len(found.proofs)} certificates, the list is valid for {left.days} days"
    yield judged(left < LIST_ENDS_SOON, "revocations", saw, fix)


def check_gpu(config: Settings) -> Iterator[Finding]:
    """Whether the GPU of the gpu tier can be seen."""
    if "gpu" not in config.tiers:
        return
    if not Path("/dev/nvidiactl").exists():
        yield Finding("gpu", "fail", "no NVIDIA driver here", "leave gpu out of --tiers")
        return
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    fix = "name a device that is there in --gpu SIZE:DEVICE"
    yield judged(devices <= config.gpu.device, "gpu", f"{devices} devices", fix, "fail")


def _size(size_bytes: int) -> str:
    return "unlimited" if size_bytes < 0 else f"{size_bytes / GIB:.1f} GiB"


# --- certificates and secrets


def check_certificates(config: Settings) -> Iterator[Finding]:
    """How long each certificate that the settings name is valid."""
    for setting, name in (OWN | AUTHORITIES).items():
        path = getattr(config, setting)
        if path is not None:
            yield _finding(name, setting, path)


def _finding(name: str, setting: str, path: Path) -> Finding:
    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        fix = f"give --{setting.replace('_', '-')} a PEM file that can be read"
        return Finding(name, "fail", f"{path}: {error}", fix)
    best = found[0]
    if setting in AUTHORITIES:
        best = max(found, key=lambda one: one.not_valid_after_utc)
    now = datetime.now(UTC)
    if best.not_valid_before_utc > now:
        begins = best.not_valid_before_utc.isoformat(" ", "minutes")
        fix = "set the clock, or get another: it is refused before that"
        return Finding(name, "fail", f"valid from {begins}", fix)
    left = best.not_valid_after_utc - now
    state: State = "fail" if left < timedelta() else "warn" if left < EXPIRES_SOON else "ok"
    saw = f"expired {(-left).days} days ago" if state == "fail" else f"{left.days} days left"
    again = "restart the server" if "redis" in setting else "the server reads it again by itself"
    return Finding(name, state, saw, "" if state == "ok" else f"replace the file; {again}")


def check_files(config: Settings) -> Iterator[Finding]:
    """Whether every user of this machine may read a secret, or change whom the server trusts."""
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


def check_redis(config: Settings) -> Iterator[Finding]:
    """Whether Redis answers, how fast, what the user may do, and how its servers are."""
    if not ("redis" in config.tiers or config.directory):
        return
    try:
        link = _redis(config)
    except (KVStoreError, OSError, ValueError) as error:
        yield Finding("redis", "fail", str(error), "correct --redis and what belongs to it")
        return
    if link is None:
        return
    with closing(link):
        name = f"{config.redis_prefix}{{doctor}}".encode()
        try:
            yield _speed(link, name)
        except KVStoreError as error:
            yield Finding("redis", "fail", str(error), "start it, or correct --redis")
            return
        yield _rights(link, name, config)
        yield from _servers(link)


def _redis(config: Settings) -> RedisClient | None:
    if config.redis_url is None:
        return None
    url = config.redis_access(config.redis_url)
    return RedisClient("redis", url, config.redis_timeout_ms, 1)


def _speed(link: RedisClient, name: bytes) -> Finding:
    times = []
    for _ in range(PINGS):
        started = time.perf_counter()
        link.run(name, [[b"GETRANGE", name, b"0", b"0"]])
        times.append(1000 * (time.perf_counter() - started))
    median_ms = sorted(times)[PINGS // 2]
    fix = "move it nearer: each lookup that memory cannot answer waits for it"
    return judged(median_ms > MAX_REDIS_MS, "redis", f"{median_ms:.2f} ms an answer", fix)


def _trials(name: bytes, *, directory: bool) -> dict[str, Command]:
    """Return a harmless use of each command that is needed, on names that end in 10 s."""
    other = name + b":set"
    trials: dict[str, Command] = {
        "set": (b"SET", name, b"x", b"PX", 10_000),
        "expire": (b"EXPIRE", name, 10),
        "scan": (b"SCAN", 0, b"COUNT", 1),
        "eval": (b"EVAL", b"return 1", 1, name),
        "unlink": (b"UNLINK", name),
    }
    if directory:
        trials |= {
            "sadd": (b"SADD", other, 1),
            "srandmember": (b"SRANDMEMBER", other, 1),
            "srem": (b"SREM", other, 1),
            "hset": (b"HSET", name, b"f", b"v"),
            "hget": (b"HGET", name, b"f"),
            "hgetall": (b"HGETALL", name),
            "hdel": (b"HDEL", name, b"f"),
            "time": (b"TIME",),
        }
    return trials


def _rights(link: RedisClient, name: bytes, config: Settings) -> Finding:
    denied = {}
    for word, command in _trials(name, directory=config.directory).items():
        try:
            link.run(name, [command])
        except OutOfMemoryError:  # it may be used; that Redis is full is another finding
            continue
        except KVStoreError as error:
            if "NoPermissionError" in str(error):
                denied[word] = str(error).partition("; allow its user")[0]
            elif word == "set":
                return Finding("redis rights", "warn", f"cannot be tried: {error}", "fix that")
    words = TIER_RIGHTS + (DIRECTORY_RIGHTS if config.directory else ())
    rights = " ".join(f"+{word}" for word in words)
    fix = f"ACL SETUSER its user ~{config.redis_prefix}* {rights}"
    named = ", ".join(f"{word} ({why})" for word, why in denied.items())
    saw = f"denied: {named}" if denied else "every command that is needed"
    return judged(bool(denied), "redis rights", saw, fix, "fail")


def _servers(link: RedisClient) -> Iterator[Finding]:
    try:
        found = list(check_health(link))
    except KVStoreError as error:
        yield Finding("redis servers", "fail", str(error), "start them")
        return
    for one in found:
        yield Finding("redis servers", "fail" if one.is_loss else "warn", one.saw, one.fix)
    if not found:
        yield Finding("redis servers", "ok", "all answer and have free memory")


def check_clock(config: Settings, wall_clock: Callable[[], float] = time.time) -> Iterator[Finding]:
    """How far this machine's clock is from that of the Redis that nodes share.

    Nothing where Redis does not answer, which another check reports, or denies its user +time.
    """
    reply = None
    with suppress(KVStoreError, OSError, ValueError):
        link = _redis(config)
        if link is None:
            return
        with closing(link):
            before_s = wall_clock()
            reply = link.run(b"time", [[b"TIME"]])[0]
            after_s = wall_clock()
    match reply:
        case [bytes(seconds), bytes(micros)]:
            skew_s = (before_s + after_s) / 2 - (int(seconds) + int(micros) / 1e6)
        case _:
            return
    is_off = abs(skew_s) - (after_s - before_s) / 2 > MAX_SKEW_S
    fix = "have both machines follow NTP: tokens and certificates end by a clock"
    where = "ahead of" if skew_s > 0 else "behind"
    saw = f"{abs(skew_s):.1f} s {where} that of Redis"
    yield judged(is_off, "clock", saw, fix)


CHECKS: tuple[Callable[[Settings], Iterator[Finding]], ...] = (
    check_limits,
    check_disk,
    check_redis,
    check_clock,
    check_certificates,
    check_files,
    check_revocations,
    check_gpu,
)
