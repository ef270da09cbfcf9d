"""Virtual hosts on one machine: network namespaces on a bridge, and calls from inside one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest

GATEWAY = "10.99.7.254"
"""This side of the bridge, for services that all hosts share."""

_PROBE = """
import sys
from helpers.prompts import SMALL, keys_of, store
from faults.oracle import fetched
from kvstore.client import Client, ClientOptions

address, puts, gets = sys.argv[1:]
with Client(address, SMALL, ClientOptions("grpc", 16, 5000)) as client:
    for seed in map(int, filter(None, puts.split(","))):
        store(client, seed, 3)
    for seed in map(int, filter(None, gets.split(","))):
        print(fetched(client, keys_of(client, seed, 3)))
"""


@contextmanager
def hosts_apart(names: Sequence[str]) -> Iterator[None]:
    """Make a network namespace for each name, all on one bridge; skip without permission.

    Host number i has the address 10.99.7.i + 1, the bridge 10.99.7.254; ``part`` and ``rejoin``
    take a host off the bridge and back.
    """
    if shutil.which("ip") is None:
        pytest.skip("ip is missing: install Debian's iproute2")
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
    """Take a host off the bridge: it is unreachable."""
    _ip("link", "set", name, "nomaster")


def rejoin(name: str) -> None:
    """Put a host back on the bridge."""
    for line in _ip("-o", "link", "show", "type", "bridge").splitlines():
        bridge = line.split(": ")[1]
        if bridge == f"kvb{os.getpid() % 10_000}":
            _ip("link", "set", name, "master", bridge, "up")


def address_of(number: int) -> str:
    """Return the address of host *number*, from 1 on."""
    return f"10.99.7.{number}"


def probed(host: str, address: str, puts: str, gets: str) -> list[int]:
    """Put and get prompts of three chunks at *address*, from inside *host*.

    *puts* and *gets* are comma-separated seeds. Return how many correct chunks each got.
    """
    command = ["ip", "netns", "exec", host, sys.executable, "-c", _PROBE, address]
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [*command, puts, gets], env={**os.environ, "PYTHONPATH": paths}, check=True, timeout=60,
        capture_output=True, text=True,
    )  # fmt: skip
    return [int(word) for word in done.stdout.split()]


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(done.stderr.strip())
    return done.stdout
