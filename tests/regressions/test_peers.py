"""The same pains in LMCache itself, where they can be shown in a minute: ``make regressions-long``.

``python -m bench.peers`` makes its environment. Each test passes when the peer still fails: one
that does not any more is no longer ours to claim.
"""

from __future__ import annotations

import json
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from bench.lib.processes import PeerSkippedError, run
from bench.peers.lmcache import QUIET, LMCache, Server

ROOT = Path(__file__).resolve().parents[2]
VENVS = ROOT / "build" / "peers"
DRIVER = Path(__file__).with_name("lmcache_adapter.py")
OBJECTS = 32
BURST_CHUNKS = 600
"""Of 1 MiB each, into 128 MiB of memory above files."""
PATIENCE_S = 10.0


@pytest.fixture
def lmcache(request: pytest.FixtureRequest, tmp_path: Path) -> LMCache:
    """LMCache, in the environment that bench.peers made."""
    if not request.config.getoption("--peers", default=False):
        pytest.skip("make regressions-long runs it")
    python = VENVS / "lmcache" / "bin" / "python"
    if not python.exists():
        pytest.skip("no LMCache: python -m bench.peers makes its environment")
    return LMCache(python, tmp_path)


def drive(peer: LMCache, folder: Path, **settings: float) -> Any:
    """Store through its adapter of files, damage the files, load; return what it said."""
    spec = json.dumps({"type": "fs_native", "base_path": str(folder), **settings})
    text = run([*QUIET, peer.python, DRIVER, spec, str(OBJECTS), folder], 120)
    return json.loads(text.splitlines()[-1])


def test_lmcache_3388_damaged_files_are_loaded_as_hits(lmcache: LMCache, tmp_path: Path) -> None:
    """Pain 1: a bit of each file is flipped. What must hold here: test_wrong_bytes.py."""
    folder = tmp_path / "files"
    folder.mkdir()
    said = drive(lmcache, folder)
    assert said["stored"]
    assert said["loaded"] == said["wrong"] == OBJECTS


def test_lmcache_4725_files_pass_the_capacity_that_was_set(
    lmcache: LMCache, tmp_path: Path
) -> None:
    """Pain 4: 8 MiB under a ``max_capacity_gb`` of 4 MB. What must hold here: test_room.py."""
    folder = tmp_path / "files"
    folder.mkdir()
    assert drive(lmcache, folder, max_capacity_gb=0.004)["held_bytes"] > 8_000_000


@contextmanager
def serving(peer: LMCache, folder: Path) -> Iterator[Server]:
    folder.mkdir()
    adapter = {"type": "fs_native", "base_path": str(folder)}
    try:
        with peer.server(0.125, adapter) as server:
            yield server
    except PeerSkippedError as error:
        pytest.skip(str(error))


def test_lmcache_4817_much_of_a_burst_is_dropped(lmcache: LMCache, tmp_path: Path) -> None:
    """Pain 3: what is stored faster than its eviction keeps up is gone, without an error to who
    stored it. What must hold here: test_room.py, and the burst of bench.local."""
    with serving(lmcache, tmp_path / "files") as server, server.client(1000) as client:
        client.request(f"store 0 {BURST_CHUNKS}")
        read = client.request(f"read {BURST_CHUNKS} 0")
    assert read["reads"] == BURST_CHUNKS
    # How many is a matter of who gets how much of the machine: a third of them on a busy one.
    assert read["delivered"] < 0.9 * BURST_CHUNKS


def test_lmcache_4676_a_server_that_hangs_is_waited_for(lmcache: LMCache, tmp_path: Path) -> None:
    """Pain 7: its server is stopped, and a client that was connected waits on: ten seconds and
    more. What must hold here: test_time.py."""
    with serving(lmcache, tmp_path / "files") as server, server.client(1000) as client:
        assert client.request("store 0 4")["stored"] == 4
        stopped = [
            child
            for child in psutil.Process().children(recursive=True)
            if child.pid != client.process.pid
        ]
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        try:
            client.send("read 4 0")
            answers = client.process.stdout
            assert answers is not None
            assert select.select([answers], [], [], PATIENCE_S)[0] == []
        finally:
            for process in stopped:
                process.send_signal(signal.SIGCONT)
        client.answer()
