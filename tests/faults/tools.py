"""Faults that the system makes, such as failing calls and other clocks; what a process has."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_FIU_LIBRARIES = Path("/usr/lib/fiu")
_FAKETIME = "libfaketimeMT.so.1"
_CGROUPS = Path("/sys/fs/cgroup")
_REAL_SLEEP = """
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left)
{ return syscall(SYS_clock_nanosleep, clock, flags, until, left) ? errno : 0; }
"""


def needs(program: str, package: str) -> str:
    """Return the path of *program*; skip the test without it."""
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is missing: install Debian's {package}")
    return path


def fiu_environment(pipes: Path) -> dict[str, str]:
    """Return what makes a process's calls fail on command, by libfiu; skip without it."""
    needs("fiu-ctrl", "fiu-utils")
    libraries = [str(_FIU_LIBRARIES / f"fiu_{name}_preload.so") for name in ("run", "posix")]
    return {"LD_PRELOAD": " ".join(libraries), "FIU_CTRL_FIFO": str(pipes)}


def fiu(pipes: Path, pid: int, command: str) -> None:
    """Tell a process that was started with ``fiu_environment`` which calls fail from now on."""
    subprocess.run(
        ["fiu-ctrl", "-f", str(pipes), "-c", command, str(pid)],
        check=True, timeout=30, capture_output=True,
    )  # fmt: skip


def largest_file(pid: int, size_bytes: int = resource.RLIM_INFINITY) -> None:
    """Let writes of a process behind *size_bytes* of a file fail with EFBIG; without, none."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


def faketime_environment(folder: Path) -> dict[str, str]:
    """Return what gives a process the wall clock of a file, by libfaketime; skip without it.

    libfaketime 0.9.10 refuses each sleep of Python 3.11 with EINVAL (its issue 426), so sleeps go
    past it.
    """
    found = sorted(Path("/usr/lib").glob(f"*/faketime/{_FAKETIME}"))
    if not found:
        pytest.skip("libfaketime is missing: install Debian's libfaketime")
    set_clock(folder, 0)
    sleep = folder / "sleep.so"
    subprocess.run(
        [needs("cc", "gcc"), "-shared", "-fPIC", "-x", "c", "-", "-o", str(sleep)],
        input=_REAL_SLEEP.encode(), check=True, timeout=60,
    )  # fmt: skip
    return {
        "LD_PRELOAD": f"{sleep} {found[0]}",
        "FAKETIME_TIMESTAMP_FILE": str(folder / "clock"),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def set_clock(folder: Path, ahead_s: int) -> None:
    """Put the wall clock of ``faketime_environment`` so far ahead, or back."""
    new = folder / "clock.new"
    new.write_text(f"{ahead_s:+d}\n")
    new.replace(folder / "clock")  # it is read at any instant, and never half written


@contextmanager
def memory_limit(name: str, limit_bytes: int) -> Iterator[Path]:
    """Make a cgroup that may hold so much; yield its folder. Skip where nobody may."""
    is_v2 = (_CGROUPS / "cgroup.controllers").exists()
    folder = (_CGROUPS if is_v2 else _CGROUPS / "memory") / name
    file = "memory.max" if is_v2 else "memory.limit_in_bytes"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup of our own: {error.strerror}")
    try:
        try:
            (folder / file).write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"the memory controller is not delegated: {error.strerror}")
        yield folder
    finally:
        with suppress(OSError):  # somebody still ends in it
            folder.rmdir()


def join(group: Path, pid: int) -> None:
    (group / "cgroup.procs").write_text(str(pid))


def peak_bytes(group: Path) -> int:
    """Return the most that a cgroup ever held, page cache included."""
    for name in ("memory.peak", "memory.max_usage_in_bytes"):
        if (group / name).exists():
            return int((group / name).read_text())
    return 0


def kills(group: Path) -> int:
    """Return how many processes of a cgroup were killed for want of memory."""
    for name in ("memory.events", "memory.oom_control"):
        if (group / name).exists():
            rows = dict(line.split() for line in (group / name).read_text().splitlines())
            return int(rows.get("oom_kill", 0))
    return 0


def resident_bytes(pid: int) -> int:
    """Return the memory that a process has of its own and shares, slabs included."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def thread_count(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def descriptor_count(pid: int) -> int:
    """Return how many files, sockets and memfds a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def anonymous_bytes(pid: int) -> int:
    """Return the memory that a process alone has: without slabs, files and libraries."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    return 0
