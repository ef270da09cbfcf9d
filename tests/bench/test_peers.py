"""The peers' benchmark without the peers: what is read of their reports, and how one is skipped."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest
from bench import peers
from bench.charts import bar_chart
from bench.peer_lmcache import LMCache, parse_l2, parse_server
from bench.peer_mooncake import Mooncake
from bench.peer_ours import TierSide, make_frames
from bench.peer_process import (
    PINS,
    PeerSkippedError,
    asking,
    end,
    free_port,
    last_line,
    make_venv,
    run,
    serving_peer,
    shared_libraries,
)
from bench.peer_run import BARS, Run, Side
from bench.report import Report

from kvstore.tiers.cpu import CpuTier

ROOT = Path(__file__).resolve().parents[2]
ALL_KEYS = (
    *peers.DISK_KEYS,
    *peers.DISK_LIMIT_KEYS,
    *peers.REDIS_KEYS,
    *peers.SHM_KEYS,
    *peers.MOONCAKE_KEYS,
    *peers.MOONCAKE_LIMIT_KEYS,
    *peers.REDIS_LIMIT_KEYS,
    "redis_load_vs_plain_redis",
    "readable_under_writes",
    "burst_lost",
)


PEERS = ("lmcache", "mooncake", "zipnn", "blosc2")
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
    assert set(run.report.skipped) == {*peers.DISK_KEYS, *peers.DISK_LIMIT_KEYS}
    peers.measure(run, tmp_path, ["mooncake"])
    assert installed == ["LMCache", "Mooncake"]
    assert set(run.report.skipped) >= {*peers.MOONCAKE_KEYS, *peers.MOONCAKE_LIMIT_KEYS}


# --- what is read of their reports


def test_the_rounds_of_lmcaches_l2_report_are_read_but_for_those_that_warm_up() -> None:
    store_s, load_s = parse_l2(L2_REPORT)
    assert store_s == pytest.approx([0.32892, 0.2712])
    assert load_s == pytest.approx([0.01796, 0.02367])


def test_a_load_that_lost_keys_is_no_figure() -> None:
    with pytest.raises(PeerSkippedError, match="load did 63 of 64 keys"):
        parse_l2(L2_REPORT.replace("loaded=64", "loaded=63", 1))


def test_each_step_of_lmcaches_server_report_is_read() -> None:
    times = parse_server(2 * SERVER_REPORT)
    assert times.lookup_s == pytest.approx([0.0021, 0.0021])
    assert times.store_s == pytest.approx([0.0273, 0.0273])
    assert times.retrieve_s == pytest.approx([0.0131, 0.0131])


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("MATCH OK", "MISMATCH!"),
        ("STORE: stored", "STORE: store_failed"),
        ("RETRIEVE: retrieved", "RETRIEVE: timeout"),
    ],
)
def test_a_server_report_in_which_a_request_failed_is_no_figure(right: str, wrong: str) -> None:
    for text in (SERVER_REPORT, SERVER_REPORT + SERVER_REPORT.replace("seq 4", "seq 5")):
        head, _, tail = text.rpartition(right)
        with pytest.raises(PeerSkippedError):
            parse_server(head + wrong + tail)


@pytest.mark.parametrize("text", ["", "Traceback\nKeyError: 'x'", L2_REPORT[:200]])
def test_a_report_of_another_form_skips_the_peer_with_its_last_words(text: str) -> None:
    for parse in (parse_l2, parse_server):
        with pytest.raises(PeerSkippedError, match=re.escape(f"understood: {last_line(text)}")):
            parse(text)


# --- how a peer is skipped


def test_a_peer_that_does_not_start_is_skipped_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('first'); raise SystemExit('no such device')"]
    with (
        pytest.raises(PeerSkippedError, match=r"^did not start: no such device$"),
        serving_peer(command, [free_port()], tmp_path / "log"),
    ):
        pytest.fail("it did start")


def test_a_client_that_ends_before_it_answers_is_skipped_with_its_last_words(
    tmp_path: Path,
) -> None:
    code = "print('{\"ready\": 1}', flush=True); input(); raise SystemExit('setup answered -1')"
    with (
        pytest.raises(PeerSkippedError, match="setup answered -1"),
        asking([sys.executable, "-c", code], tmp_path / "log") as asked,
    ):
        asked.ask("round")


def test_a_client_answers_line_by_line_past_what_else_it_prints(tmp_path: Path) -> None:
    code = (
        "import sys; print('banner'); print('{}', flush=True)\n"
        "for n, _ in enumerate(sys.stdin): print('log'); print('{\"n\": %d}' % n, flush=True)"
    )
    with asking([sys.executable, "-c", code], tmp_path / "log") as asked:
        assert [asked.ask("round"), asked.ask("round")] == [{"n": 0}, {"n": 1}]


def test_a_peer_is_ended_even_when_it_does_not_want_to(tmp_path: Path) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('{}', flush=True); time.sleep(600)"
    )
    with asking([sys.executable, "-c", code], tmp_path / "log") as asked:
        process = asked.process
        end(process, grace_s=0.1)
    assert not psutil.pid_exists(process.pid)


def test_a_peer_that_cannot_be_installed_is_skipped_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PeerSkippedError) as caught:
        make_venv(tmp_path / "file", "mooncake")
    assert str(caught.value).count("\n") == 0


def test_a_virtual_environment_with_its_pins_is_not_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "mooncake"
    folder.mkdir()
    (folder / "installed.txt").write_text((PINS / "mooncake.txt").read_text())
    assert make_venv(tmp_path, "mooncake") == folder / "bin" / "python"
    assert sorted(folder.iterdir()) == [folder / "installed.txt"]


def test_a_program_that_is_missing_or_fails_or_hangs_skips_its_peer(tmp_path: Path) -> None:
    for command in ([tmp_path / "none"], [sys.executable, "-c", "raise SystemExit('broken')"]):
        with pytest.raises(PeerSkippedError):
            run(command, 60)
    with pytest.raises(PeerSkippedError, match="timed out"):
        run([sys.executable, "-c", "import time; time.sleep(600)"], 0.1)


def test_a_library_that_is_installed_is_not_unpacked_again(tmp_path: Path) -> None:
    assert shared_libraries(tmp_path, {"libc.so.6": "libc6"}) == ""
    assert list(tmp_path.iterdir()) == []


def test_the_keys_of_a_skipped_peer_are_absent_and_the_reason_stands_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Run, __: int) -> None:
        raise PeerSkippedError("its report is not understood")

    def work(run: Run, _: int) -> None:
        ours, theirs = Side("x", [4.0], [1.0, 9.0, 0.5]), Side("y", [2.0], [2.0])
        run.add_speeds(("c", "d"), 4_000_000_000, ours, theirs)

    run = Run(tmp_path, Report("peers"))
    peers.compare(run, ("a",), work, "cannot be installed")
    peers.compare(run, ("b",), fail, 1)
    peers.compare(run, ("c", "d"), work, 1)
    run.report.print(only_json=False)
    *table, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == {
        "bench": "peers",
        "values": {"c": 2.0, "d": 0.5},
        "skipped": {"a": "cannot be installed", "b": "its report is not understood"},
    }
    assert any(re.match(r"a +skipped +cannot be installed", line) for line in table)


# --- our side, the pins, the page and the plot


def test_our_side_stores_and_loads_what_it_was_given() -> None:
    frames = make_frames(2, 1)
    side = TierSide(CpuTier(16 << 20, 8 << 20), frames, 2)
    ours = Side("ours")
    side.run(ours, 2)
    side.close()
    assert len(ours.store_s) == len(ours.load_s) == 2
    assert min(ours.store_s + ours.load_s) > 0


def test_what_a_peer_needs_is_pinned_exactly() -> None:
    names = {path.name for path in PINS.glob("*.txt")}
    assert names == {f"{name}.txt" for name in PEERS}
    for name in names:
        lines = (PINS / name).read_text().splitlines()
        pins = [line for line in lines if not line.startswith("#")]
        assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[0-9][\w.]*", pin)] == []


def test_the_page_of_benchmarks_has_a_row_for_each_key() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    _, _, section = page.partition("\n## Peers\n")
    section = section.partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)`", section, re.M)) == sorted(ALL_KEYS)
    assert set(BARS) < set(ALL_KEYS)


def test_the_plot_is_a_drawing_with_one_bar_a_key(tmp_path: Path) -> None:
    bar_chart(tmp_path / "plot.svg", "a < b", [("one", 2.0, 1.0), ("two", 0.5, 1.0)])
    drawing = ElementTree.parse(tmp_path / "plot.svg").getroot()
    words = [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert words[:5] == ["a < b", "one", "2.00", "two", "0.50"]
    boxes = list(drawing.iter("{http://www.w3.org/2000/svg}rect"))
    assert len(boxes) == 3  # one is the ground
    assert float(boxes[1].attrib["width"]) == pytest.approx(4 * float(boxes[2].attrib["width"]))
