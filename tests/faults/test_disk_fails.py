"""Row 4: a disk that is full, read-only or broken is set aside, the rest serves, and it returns.

And what a power cut leaves.
"""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from conftest import ProcessMaker
from contracts.chunks import make_frame
from contracts.shelf import assert_holds, put
from faults.media import PowerSwitch, small_memory_disk
from faults.oracle import verified
from faults.tools import fiu, fiu_environment, largest_file
from helpers.disk_process import SEALER_BYTES, is_whole, open_disk, record, sealer
from helpers.local_server import DEADLINE_MS, eventually
from helpers.prompts import SMALL, chunks_of, keys_of, store
from helpers.server_process import ServerProcess

from kvstore.client import Client, ClientOptions
from kvstore.proto.errors import KVStoreError
from kvstore.proto.types import PutOutcome
from kvstore.tiers.disk import DiskTier

CHUNKS = 4
OPTIONS = ClientOptions("grpc", 16, DEADLINE_MS)
FLAGS = ("--cpu", "16MiB", "--limits", "breaker_retry_ms=100")


def fill(path: Path) -> None:
    with path.open("wb") as file:
        while True:
            os.write(file.fileno(), bytes(1 << 16))


def disk_state(client: Client) -> str:
    (tier,) = (tier for tier in client.status().tiers if tier.name == "disk")
    return tier.state


def durable(client: Client, seed: int) -> bool:
    """Put a prompt as durable; return whether all of it was. It is readable either way."""
    keys = keys_of(client, seed, CHUNKS)
    puts = client.put_chunks(chunks_of(client, keys), durable=True)
    assert verified(client, keys) == CHUNKS
    return all(put.outcome is not PutOutcome.refused for put in puts)


def assert_fails_and_returns(
    process: ServerProcess, fail: Callable[[], None], mend: Callable[[], None]
) -> None:
    """Fail unless the disk is set aside between *fail* and *mend*, and used again after."""
    seeds = count(1)
    with Client(process.address, SMALL, OPTIONS) as client:
        kept = keys_of(client, 0, CHUNKS)
        assert durable(client, 0)
        fail()
        assert eventually(lambda: not durable(client, next(seeds)))
        assert eventually(lambda: durable(client, next(seeds)) or disk_state(client) == "degraded")
        store(client, next(seeds), CHUNKS)
        mend()
        assert eventually(lambda: durable(client, next(seeds)))
        assert eventually(lambda: disk_state(client) == "serving")
        last = next(seeds)
        assert durable(client, last)
        told = [kept, keys_of(client, last, CHUNKS)]
    process.kill()
    process.start()
    with Client(process.address, SMALL, OPTIONS) as client:
        assert [verified(client, keys) for keys in told] == [CHUNKS, CHUNKS]


def test_disk_whose_writes_fail_is_set_aside_and_used_again(server_process: ProcessMaker) -> None:
    process = server_process(*FLAGS, "--disk", "32MiB:disk")
    process.start()
    assert_fails_and_returns(
        process, lambda: largest_file(process.pid, 0), lambda: largest_file(process.pid)
    )


@pytest.mark.parametrize("call", ["posix/io/sync/fdatasync", "posix/io/rw/pwrite"])
def test_disk_whose_calls_fail_is_set_aside_and_used_again(
    server_process: ProcessMaker, tmp_path: Path, call: str
) -> None:
    pipes = tmp_path / "fiu"
    process = server_process(*FLAGS, "--disk", "32MiB:disk")
    process.environment = fiu_environment(pipes)
    process.start()
    pid = process.pid
    process.environment = {}
    assert_fails_and_returns(
        process,
        lambda: fiu(pipes, pid, f"enable name={call},failinfo=5"),
        lambda: fiu(pipes, pid, f"disable name={call}"),
    )


def test_disk_that_is_gone_altogether_costs_its_chunks_until_it_is_mended(
    server_process: ProcessMaker, tmp_path: Path
) -> None:
    power = PowerSwitch(tmp_path, 350 << 20)
    try:
        process = server_process(*FLAGS, "--disk", f"24MiB:{power.path / 'disk'}")
        process.start()
        with Client(process.address, SMALL, OPTIONS) as client:
            told = keys_of(client, 0, CHUNKS)
            assert durable(client, 0)
            power.cut()
            seeds = count(1)
            assert eventually(
                lambda: not durable(client, next(seeds)) and disk_state(client) == "degraded"
            )
            assert verified(client, told) == CHUNKS
            store(client, next(seeds), CHUNKS)
        assert process.terminate() == 0
        power.turn_off()
        power.turn_on()
        process.start()
        with Client(process.address, SMALL, OPTIONS) as client:
            assert verified(client, told) == CHUNKS
            assert durable(client, 100)
        process.kill()
    finally:
        power.close()


def test_disk_without_room_refuses_the_start_and_one_that_fills_up_later_does_no_harm(
    server_process: ProcessMaker, tmp_path: Path
) -> None:
    with small_memory_disk(tmp_path / "small", 320 << 20) as folder:
        process = server_process(*FLAGS, "--disk", f"512MiB:{folder / 'disk'}")
        with pytest.raises(RuntimeError, match="status 2"):
            process.start()
        assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 64
        process = server_process(*FLAGS, "--disk", f"32MiB:{folder / 'disk'}")
        process.start()
        with pytest.raises(OSError, match="No space"):
            fill(folder / "filler")
        with Client(process.address, SMALL, OPTIONS) as client:
            for seed in range(20):
                assert durable(client, seed)
            told = keys_of(client, 0, CHUNKS)
        assert process.terminate() == 0
        process.start()
        with Client(process.address, SMALL, OPTIONS) as client:
            assert verified(client, told) == CHUNKS
        process.kill()


def test_a_call_that_the_store_cannot_answer_is_an_error_of_its_own(
    server_process: ProcessMaker,
) -> None:
    """Descriptors run out: new connections fail, and the server goes on once they are back."""
    process = server_process(*FLAGS, "--disk", "32MiB:disk")
    process.start()
    with Client(process.address, SMALL, OPTIONS) as client:
        store(client, 1, CHUNKS)
        before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (8, before[1]))
        try:
            with Client(process.address, SMALL, ClientOptions("grpc", 16, 500)) as late:
                late.status()
        except KVStoreError:
            pass
        assert verified(client, keys_of(client, 1, CHUNKS)) == CHUNKS
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
        with Client(process.address, SMALL, OPTIONS) as late:
            store(late, 2, CHUNKS)


SEEDS_A_CUT = 500
FRESH_SEED = 31_000
"""Below 32,000, as names of frames repeat from there on: the model has no more tokens."""


@pytest.fixture
def power(tmp_path: Path) -> Iterator[PowerSwitch]:
    switch = PowerSwitch(tmp_path, 48 << 20)
    yield switch
    switch.close()


def give_up_one(tier: DiskTier) -> str:
    oldest = next(tier.scan())
    assert tier.delete(oldest.key)
    return oldest.key.hex()


def test_what_was_durable_survives_a_power_cut_and_the_rest_is_right_or_a_miss(
    power: PowerSwitch, amount: Callable[[int, int], int]
) -> None:
    draw = random.Random(2)
    owed: dict[str, int] = {}
    folder = power.path / "disk"
    for cut in range(amount(3, 60)):
        with sealer(folder, 1 + SEEDS_A_CUT * cut) as child:
            assert child.stdout is not None
            left = draw.randrange(5, 60)
            while left:
                left -= record(owed, child.stdout.readline())
            power.cut()
            child.kill()
            for line in child.stdout:
                record(owed, line)
        power.turn_off()
        power.turn_on()
        tier = open_disk(folder, SEALER_BYTES)
        for key, seed in owed.items():
            info, frame = make_frame(seed, tokens=16 + seed % 200)
            assert info.key.hex() == key
            assert_holds(tier, info, frame)
        damaged = [info for info in tier.scan() if not is_whole(tier, info)]
        for info in damaged:
            assert tier.delete(info.key)
        owed.pop(give_up_one(tier), None)  # it may have been full
        fresh, frame = make_frame(FRESH_SEED + cut, tokens=16)
        assert put(tier, fresh, frame, durable=True)
        tier.delete(fresh.key)
        tier.close()
    assert owed
