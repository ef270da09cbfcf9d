"""The peers' benchmark without the peers: parsed reports, and skipped peers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import psutil
import pytest
from bench.lib.processes import PINS, PeerSkippedError, end, last_line, line_process
from bench.lib.report import Report
from bench.peers import __main__ as peers
from bench.peers.__main__ import Run, Side, TierSide, make_frames
from bench.peers.lmcache import LMCache, parse_l2, parse_server
from bench.peers.mooncake import Mooncake

from kvstore.tiers.cpu import CpuTier

PEERS = ("lmcache", "mooncake", "zipnn")
L2_REPORT = """
[Store] Running 1 warmup + 3 measurement rounds...
  [Store] Round 1: 408.14 ms, success_keys=64/64
  [Store] Round 2: 328.92 ms, success_keys=64/64
  [Store] Round 3: 271.20 ms, success_keys=64/64
  [Lookup] Round 1: 0.41 ms, found=0/64
  [Load] Round 1: 26.84 ms, loaded=64/64
  [Load] Round 2: 17.96 ms, loaded=64/64
  [Load] Round 3: 23.67 ms, loaded=64/64
"""
SERVER_REPORT = """
  [seq 4/cold] LOOKUP: 0/2 chunks hit (2.7 ms)
  [seq 4/cold] CHECKSUM: 55fa87e74d89f8bc (2 chunks)
  [seq 4/cold] STORE: stored (512 tokens, 27.3 ms, 1 writers)
  [seq 4/warm] LOOKUP: 2/2 chunks hit (2.1 ms)
  [seq 4/warm] RETRIEVE: retrieved (512 tokens, 13.1 ms, 1 workers)
  [seq 4] CHECKSUM MATCH OK
"""


def test_a_run_of_some_parts_installs_only_the_peers_of_these(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed: list[str] = []

    def install(name: str) -> staticmethod[[Path, Path], object]:
        def refuse(venvs: Path, folder: Path) -> object:
            installed.append(name)
            raise PeerSkippedError(f"no {name} here")

        return staticmethod(refuse)

    for name, peer in (("LMCache", LMCache), ("Mooncake", Mooncake)):
        monkeypatch.setattr(peer, "install", install(name))
    run = Run(tmp_path, Report("peers"))
    peers.measure(run, tmp_path, ["disk"])
    assert installed == ["LMCache"]
    assert set(run.report.skipped) == set(peers.KEYS["disk"])
    peers.measure(run, tmp_path, ["mooncake"])
    assert installed == ["LMCache", "Mooncake"]
    assert set(run.report.skipped) >= set(peers.KEYS["mooncake"])


def test_reports_of_lmcache_are_read_but_for_the_rounds_that_warm_up() -> None:
    store_s, load_s = parse_l2(L2_REPORT)
    assert store_s == pytest.approx([0.32892, 0.2712])
    assert load_s == pytest.approx([0.01796, 0.02367])
    store_s, retrieve_s = parse_server(2 * SERVER_REPORT)
    assert store_s == pytest.approx([0.0273, 0.0273])
    assert retrieve_s == pytest.approx([0.0131, 0.0131])


def test_a_server_report_in_which_a_request_failed_is_no_figure() -> None:
    for right, wrong in [
        ("MATCH OK", "MISMATCH!"),
        ("STORE: stored", "STORE: store_failed"),
        ("RETRIEVE: retrieved", "RETRIEVE: timeout"),
    ]:
        for text in (SERVER_REPORT, SERVER_REPORT + SERVER_REPORT.replace("seq 4", "seq 5")):
            head, _, tail = text.rpartition(right)
            with pytest.raises(PeerSkippedError):
                parse_server(head + wrong + tail)


def test_a_report_of_another_form_skips_the_peer_with_its_last_line() -> None:
    for text in ["", "Traceback\nKeyError: 'x'", L2_REPORT[:200]]:
        for parse in (parse_l2, parse_server):
            with pytest.raises(PeerSkippedError, match=re.escape(f"report: {last_line(text)}")):
                parse(text)


def test_other_output_of_a_client_is_skipped_and_it_is_killed_if_it_ignores_sigterm(
    tmp_path: Path,
) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('banner'); print('{}', flush=True)\n"
        "for n in range(2): input(); print('log'); print('{\"n\": %d}' % n, flush=True)\n"
        "time.sleep(600)"
    )
    with line_process([sys.executable, "-c", code], tmp_path / "log") as program:
        assert [program.request("round"), program.request("round")] == [{"n": 0}, {"n": 1}]
        end(program.process, grace_s=0.1)
    assert not psutil.pid_exists(program.process.pid)


def test_our_side_stores_and_loads_its_frames() -> None:
    frames = make_frames(2, 1)
    side = TierSide(CpuTier(16 << 20, 8 << 20), frames)
    ours = Side("ours")
    side.run(ours, 2)
    side.close()
    assert len(ours.store_s) == len(ours.load_s) == 2
    assert min(ours.store_s + ours.load_s) > 0


def test_the_packages_of_a_peer_are_pinned_exactly() -> None:
    names = {path.name for path in PINS.glob("*.txt")}
    assert names == {f"{name}.txt" for name in PEERS}
    for name in names:
        lines = (PINS / name).read_text().splitlines()
        pins = [line for line in lines if not line.startswith("#")]
        assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[0-9][\w.]*", pin)] == []
