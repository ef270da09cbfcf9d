"""Traces against real servers: what they hit is what the simulator says, to the block."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from conftest import ProcessMaker
from helpers.server_process import ServerProcess

from kvstore.cli.__main__ import main
from kvstore.cli.server import fetch_status
from kvstore.cli.simulate import Terms, make_blocks, read_trace, replay_blocks
from kvstore.cli.trace import record, replay_trace

CHUNK_BYTES = 60 << 10
REQUESTS = 260


def make_trace(path: Path, seed: int) -> Path:
    """Conversations that grow by a block or three a turn, from one shared root; some come back."""
    rng = random.Random(seed)
    chats: list[list[int]] = [[0] for _ in range(24)]
    new = 1
    lines = []
    for turn in range(REQUESTS):
        at = min(int(rng.expovariate(0.15)), len(chats) - 1)
        if len(chats[at]) > 24:
            chats[at] = [0]
        for _ in range(rng.randrange(1, 4)):
            chats[at].append(new)
            new += 1
        lines.append(line_of(1000 * turn, chats[at]))
    path.write_text("".join(lines))
    return path


def line_of(at: int, blocks: list[int]) -> str:
    size = 512 * len(blocks)
    row = {"timestamp": at, "input_length": size, "output_length": 8, "hash_ids": blocks}
    return json.dumps(row) + "\n"


def fill(process: ServerProcess, folder: Path) -> int:
    """Put more chunks than fit; return how many did."""
    path = folder / "fill.jsonl"
    path.write_text("".join(line_of(at, [at]) for at in range(200)))
    done = replay_trace(process.address, path, CHUNK_BYTES)
    assert (done.stored, done.hit_blocks) == (200, 0)
    (tier,) = fetch_status(process.address).tiers
    return tier.chunks


def simulated(path: Path, policy: str, blocks: int) -> tuple[int, int]:
    """Return the blocks hit and asked for, on a tier of so many."""
    trace = make_blocks(read_trace(path))
    outcome = replay_blocks(trace, Terms(policy, str(512 * blocks), kv_bytes_per_token=1))
    asked = int(trace.known.sum())
    return round(outcome.block_hit_rate * asked), asked


def test_a_real_server_hits_what_the_simulator_says(
    server_process: ProcessMaker, tmp_path: Path
) -> None:
    sizes = ("--tiers", "cpu", "--cpu", "8MiB", "--policy", "lru")
    process = server_process(*sizes, "--limits", "load_headroom_percent=0")
    process.start()
    capacity = fill(process, tmp_path)
    assert 60 < capacity < 200
    path = make_trace(tmp_path / "trace.jsonl", 1)
    done = replay_trace(process.address, path, CHUNK_BYTES)
    hits, asked = simulated(path, "lru", capacity)
    more, _ = simulated(path, "lru", capacity + 8)
    assert 0.2 < hits / asked < 0.8
    assert more > hits, "a trace on which the size does not matter shows nothing"
    assert (done.hit_blocks, done.blocks, done.refused) == (hits, asked, 0)
    assert process.terminate() == 0


def test_what_is_recorded_from_a_server_is_the_trace_that_was_played(
    server_process: ProcessMaker,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    process = server_process("--tiers", "cpu", "--cpu", "8MiB")
    process.start()
    path, copy = make_trace(tmp_path / "trace.jsonl", 3), tmp_path / "copy.jsonl"
    now_s = [0.0]

    def play(_: float) -> None:
        """What happens while the recorder sleeps."""
        flags = ("--address", process.address, "--chunk-bytes", str(CHUNK_BYTES), "--json")
        with pytest.raises(SystemExit) as ended:
            main(["trace", "replay", str(path), *flags])
        assert not ended.value.code
        now_s[0] = 2.0

    made = record(process.address, copy, 1.0, 512, lambda: now_s[0], play)
    played = json.loads(capsys.readouterr().out)
    assert (made.lookups, made.lost) == (played["requests"], 0) == (REQUESTS, 0)
    mine, theirs = make_blocks(read_trace(path)), make_blocks(read_trace(copy))
    assert theirs.rows.tolist() == mine.rows.tolist()
    assert theirs.parents.tolist() == mine.parents.tolist()
    assert (theirs.times_s[1:] >= theirs.times_s[:-1]).all()
    assert simulated(copy, "lru", 90) == simulated(path, "lru", 90)
