"""Fixtures every room shares."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.local_server import LocalServer, eventually
from helpers.redis_process import RedisProcess
from helpers.server_process import ServerProcess
from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")  # a loaded machine is slow: time is no property of a test's input

collect_ignore = ["real_vllm", "real_sglang", "cluster"]
"""What needs an environment of its own: ``make test-vllm``, ``test-sglang``, ``cluster-test``."""

ServerMaker = Callable[..., LocalServer]
ProcessMaker = Callable[..., ServerProcess]

_SHARED_BY_ALL_CHANNELS = ("anon_inode:[eventpoll]", "anon_inode:[eventfd]")
"""What gRPC opens when it first needs it and never closes."""


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have servers with the default disk folder share nothing with earlier runs or a user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


OPTIONS: tuple[tuple[str, float, str], ...] = (
    ("--long-share", 1.0, "how much of the long forms' repetitions"),
    ("--sim-seeds", 2000, "schedules of tests/simulation/test_schedules.py"),
    ("--sim-steps", 0, "steps of tests/simulation/test_network.py"),
    ("--exact-values", 1 << 21, "values that tests/codecs/test_lossless.py takes through a codec"),
    ("--fuzz-frames", 10_000, "changed frames that tests/codecs/test_hostile_frames.py reads"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="the long forms of tests/faults")
    for name, default, what in OPTIONS:
        parser.addoption(name, type=type(default), default=default, help=what)


_LIVES_ON = "GarbageCollectorThread"
"""pyzmq's thread that learns which memory ZeroMQ has let go of: one a process, never ended."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest: one begun last keeps one core busy alone."""
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """Leave what importing the tests made out of every later collection: it stays anyway."""
    gc.collect()
    gc.freeze()


_left_open: Counter[str] = Counter()
"""What was open after the last test of ``no_leaks``."""


def _open_files() -> Counter[str]:
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue
        if target not in _SHARED_BY_ALL_CHANNELS:
            found[target.partition(":[")[0]] += 1
    return found


def _threads() -> set[threading.Thread]:
    return {
        thread
        for thread in threading.enumerate()
        if thread.is_alive() and type(thread).__name__ != _LIVES_ON
    }


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail when a test leaves threads or open files behind.

    A collection takes as long as many a test: it is made where something is not as it was.
    """
    if _open_files() != _left_open:
        gc.collect()
    files, threads = _open_files(), _threads()

    def is_clean() -> bool:
        if _threads() <= threads and _open_files() <= files:
            return True
        gc.collect()
        return False

    yield
    assert eventually(is_clean), (_threads() - threads, _open_files() - files)
    _left_open.clear()
    _left_open.update(_open_files())


@pytest.fixture
def make_server(tmp_path: Path, no_leaks: None) -> Iterator[ServerMaker]:
    """Start servers in this process, with *flags* after those for small tiers."""
    started: list[LocalServer] = []

    def make(*flags: str) -> LocalServer:
        started.append(LocalServer(tmp_path, *flags))
        return started[-1]

    yield make
    for server in reversed(started):
        server.close()
    shutil.rmtree(tmp_path / "disk", ignore_errors=True)  # pytest keeps folders for a while


@pytest.fixture
def server(make_server: ServerMaker) -> LocalServer:
    """A server in this process: 16 MiB of CPU memory, 32 MiB of disk."""
    return make_server()


@pytest.fixture
def server_process(tmp_path: Path) -> Iterator[ProcessMaker]:
    """Make real server processes that are killed in the end; each has a folder of its own."""
    made: list[ServerProcess] = []

    def make(*flags: str) -> ServerProcess:
        folder = tmp_path / f"server{len(made)}"
        folder.mkdir(mode=0o700)
        made.append(ServerProcess(folder, "--log-level", "error", *flags))
        return made[-1]

    yield make
    for process in made:
        process.kill()
        shutil.rmtree(process.socket_path.parent, ignore_errors=True)


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisProcess]:
    """A redis-server of this test alone, not yet started."""
    folder = tmp_path / "redis"
    folder.mkdir()
    process = RedisProcess(folder)
    yield process
    process.client.close()
    process.stop()


@pytest.fixture(scope="session")
def redis_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    """One redis-server for the whole run."""
    process = RedisProcess(tmp_path_factory.mktemp("redis"))
    process.start()
    yield process
    process.client.close()
    process.stop()
