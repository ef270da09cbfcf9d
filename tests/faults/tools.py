"""Faults that the system makes: failing calls, other clocks, little memory, networks apart."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_FIU_LIBRARIES = Path("/usr/lib/fiu")
_FAKETIME = "libfaketimeMT.so.1"
_CGROUPS = Path("/sys/fs/cgroup")


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
    """Return what gives a process the wall clock of a file, by libfaketime; skip without it."""
    found = sorted(Path("/usr/lib").glob(f"*/faketime/{_FAKETIME}"))
    if not found:
        pytest.skip("libfaketime is missing: install Debian's libfaketime")
    set_clock(folder, 0)
    return {
        "LD_PRELOAD": str(found[0]),
        "FAKETIME_TIMESTAMP_FILE": str(folder / "clock"),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def set_clock(folder: Path, ahead_s: int) -> None:
    """Put the wall clock of ``faketime_environment`` so far ahead, or back."""
    (folder / "clock").write_text(f"{ahead_s:+d}\n")


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
    """Move a process into a cgroup."""
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


@contextmanager
def hosts_apart(names: Sequence[str]) -> Iterator[None]:
    """Make a network namespace for each name, all on one bridge; skip where nobody may.

    Host number i has the address 10.99.7.i + 1, the bridge 10.99.7.254; ``part`` and ``rejoin``
    take a host off the bridge and back.
    """
    needs("ip", "iproute2")
    bridge = f"kvb{os.getpid() % 10_000}"
    try:
        _ip("link", "add", bridge, "type", "bridge")
    except OSError as error:
        pytest.skip(f"network namespaces need root: {error}")
    try:
        _ip("addr", "add", "10.99.7.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for number, name in enumerate(names, 1):
            _ip("netns", "add", name)
            _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", name, "master", bridge, "up")
            for words in ("addr add 10.99.7.{}/24 dev eth0", "link set eth0 up", "link set lo up"):
                _ip("-n", name, *words.format(number).split())
        yield
    finally:
        for name in names:
            with suppress(OSError):
                _ip("netns", "del", name)
        _ip("link", "del", bridge)


def part(name: str) -> None:
    """Take a host off the bridge: nothing gets to it or from it."""
    _ip("link", "set", name, "nomaster")


def rejoin(name: str) -> None:
    """Put a host back on the bridge."""
    for line in _ip("-o", "link", "show", "type", "bridge").splitlines():
        bridge = line.split(": ")[1]
        if bridge == f"kvb{os.getpid() % 10_000}":
            _ip("link", "set", name, "master", bridge, "up")


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(done.stderr.strip())
    return done.stdout
