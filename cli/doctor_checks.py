"""What `kvstore doctor` looks at: each check says ok, warn or fail, what it saw and what to do."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

from kvstore.cli.doctor_certificates import check_certificates
from kvstore.cli.doctor_clock import check_clock
from kvstore.cli.doctor_files import check_files
from kvstore.cli.doctor_redis import check_redis
from kvstore.cli.finding import Check, Finding, State
from kvstore.proto.errors import KVStoreError
from kvstore.server.security.certificates import parse_revocations
from kvstore.server.settings.process_limits import PROCESS_BYTES, memory_limit_bytes
from kvstore.server.settings.settings import Settings
from kvstore.server.settings.values import GIB, MIB, format_size

MIN_FILES = 4096
PROBE_BYTES = 32 * MIB
MIN_DISK_BYTES_PER_S = 100e6
LIST_ENDS_SOON = timedelta(days=1)
SLOW_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "fuse", "overlay"}
MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}


def check_limits(config: Settings) -> Iterator[Finding]:
    """Open files, locked memory, and the memory that a container may take."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # a server takes what it may
    few = 0 < files < MIN_FILES
    fix = f"raise it to {MIN_FILES} or more: LimitNOFILE= of systemd, or ulimit -n" if few else ""
    yield Finding("open files", "warn" if few else "ok", f"{files} at most", fix)
    if "gpu" in config.tiers:
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        short = 0 <= locked < config.cpu_size
        fix = "set LimitMEMLOCK=infinity: memory is pinned for the GPU" if short else ""
        yield Finding("locked memory", "warn" if short else "ok", _size(locked), fix)
    limit = memory_limit_bytes()
    needed = config.cpu_size + PROCESS_BYTES
    short = limit < needed
    fix = f"give {format_size(needed)}, or a smaller --cpu" if short else ""
    yield Finding("memory", "fail" if short else "ok", f"{_size(limit)} may be used", fix)


def check_disk(config: Settings) -> Iterator[Finding]:
    """Kind, room and speed of each folder of the disk tier."""
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
        free, taken = os.statvfs(place), _taken_bytes(folder.path)
        room = free.f_bavail * free.f_frsize + taken
        if room < folder.capacity_bytes:
            fix = f"give at most {format_size(room // MIB * MIB)}, or free room"
            yield Finding(name, "fail", f"{_size(room)} of room", fix)
            continue
        rate = disk_bytes_per_s(place)
        slow = rate < MIN_DISK_BYTES_PER_S
        fix = "use a faster disk, or --write evict" if slow else ""
        saw = f"{kind}, {_size(room)} of room, {rate / 1e6:.0f} MB/s written and synced"
        yield Finding(name, "warn" if slow else "ok", saw, fix)


def _taken_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


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
        fix = "get the list anew: no server starts with this one, and one that runs keeps the last"
        yield Finding("revocations", "fail", str(error), fix)
        return
    left = timedelta(seconds=min(found.until_s - time.time(), 1e9))
    soon = left < LIST_ENDS_SOON
    fix = "replace the file; the server reads it again by itself" if soon else ""
    saw = f"{len(found.proofs)} certificates, the list is good for {left.days} days"
    yield Finding("revocations", "warn" if soon else "ok", saw, fix)


def check_gpu(config: Settings) -> Iterator[Finding]:
    """Whether the GPU of the gpu tier can be seen."""
    if "gpu" not in config.tiers:
        return
    if Path("/dev/nvidiactl").exists():
        devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
        state: State = "ok" if devices > config.gpu.device else "fail"
        fix = "" if state == "ok" else "name a device that is there in --gpu SIZE:DEVICE"
        yield Finding("gpu", state, f"{devices} devices", fix)
    else:
        yield Finding("gpu", "fail", "no NVIDIA driver here", "leave gpu out of --tiers")


def _size(size_bytes: int) -> str:
    return "unlimited" if size_bytes < 0 else f"{size_bytes / GIB:.1f} GiB"


CHECKS: tuple[Check, ...] = (
    check_limits,
    check_disk,
    check_redis,
    check_clock,
    check_certificates,
    check_files,
    check_revocations,
    check_gpu,
)
