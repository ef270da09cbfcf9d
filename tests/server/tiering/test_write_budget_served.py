"""A tier's daily budget of writes, in the server: what is still written once it is spent."""

from __future__ import annotations

from conftest import ServerMaker
from helpers.local_server import DEADLINE_MS
from helpers.prompts import MEDIUM, chunks_of, keys_of
from simulation.clock import FakeClock
from simulation.core import Core, prompt, settings
from simulation.tiers import SimDisk, no_faults
from simulation.universe import Version

from kvstore.client import ClientOptions
from kvstore.proto.types import PutOutcome
from kvstore.server.eviction.access_history import AccessHistory
from kvstore.server.eviction.reuse_statistics import ReuseForecast
from kvstore.server.index.hints import ChunkMetadata

FRAME = prompt(1)[0].info.size_bytes
A_DAY = 24 * 6 * FRAME
"""Six frames an hour."""


def make_core(clock: FakeClock, rule: str, a_day: int = A_DAY) -> Core:
    history = AccessHistory()
    return Core(
        [SimDisk(2 << 20, no_faults())],
        admissions={"disk": rule},
        metadata=ChunkMetadata(history, forecast=ReuseForecast(history)),
        clock=clock,
        config=settings(write_budget={"disk": a_day, "redis": 1}),
    )


def on_disk(core: Core, versions: list[Version]) -> int:
    return sum("disk" in core.tiers_of(version) for version in versions)


def left_bytes(core: Core) -> float:
    return core.store.moves.placement.budgets()["disk"][1]


def test_write_through_stops_at_the_budget_and_goes_on_as_time_passes() -> None:
    clock = FakeClock()
    core = make_core(clock, "through")
    session = core.open_session()
    core.put(session, prompt(9))
    core.settle()
    assert on_disk(core, prompt(9)) == 6
    assert core.counters["over_budget_copies"] == 3
    assert left_bytes(core) == 0
    clock.advance(1800.0)
    core.put(session, prompt(3, seed=2))
    core.settle()
    assert on_disk(core, prompt(3, seed=2)) == 3
    core.close()


def test_durable_puts_are_written_beyond_it_and_paid_back() -> None:
    clock = FakeClock()
    core = make_core(clock, "through")
    session = core.open_session()
    core.put(session, prompt(6))
    core.settle()
    later = core.put(session, prompt(6, seed=2), durable=True)
    assert {one.outcome for one in later} == {PutOutcome.stored}
    assert on_disk(core, prompt(6, seed=2)) == 6
    assert left_bytes(core) == -6 * FRAME
    clock.advance(3600.0)
    assert left_bytes(core) == 0
    core.close()


def test_beyond_it_only_what_is_likely_to_be_asked_for_again_leaves_memory_for_disk() -> None:
    clock = FakeClock()
    core = make_core(clock, "evict", 24 * FRAME)
    session = core.open_session()
    for seed in range(20):  # teach it that prompts like these do not come again
        core.put(session, prompt(6, seed=seed))
        clock.advance(1.0)
    core.settle()
    assert core.counters["copied_chunks"] < 12
    assert core.counters["over_budget_copies"] == core.counters["unworthy_copies"] > 80
    assert left_bytes(core) > -3 * 24 * FRAME
    core.close()


def test_a_copy_that_cannot_be_queued_costs_nothing() -> None:
    clock = FakeClock()
    core = make_core(clock, "through")
    core.slot("disk").breaker.fail("down")
    core.slot("disk").breaker.fail("down")
    core.slot("disk").breaker.fail("down")
    core.put(core.open_session(), prompt(3))
    assert core.counters["skipped_copies"] == 3
    assert left_bytes(core) == 6 * FRAME
    core.close()


def test_a_server_keeps_to_its_budget_and_shows_it(make_server: ServerMaker) -> None:
    server = make_server("--write-budget", "disk=24MiB", "--http", "127.0.0.1:0")
    options = ClientOptions("auto", chunk_tokens=64, deadline_ms=DEADLINE_MS)
    client = server.connect("auto", MEDIUM, options)
    chunks = chunks_of(client, keys_of(client, 1, 12))
    assert {one.outcome for one in client.put_chunks(chunks)} == {PutOutcome.stored}
    server.settled()
    stats = dict(server.usage().tiers)
    assert stats["disk"].chunks == 4, "of an hour's MiB, and no more than one frame beyond it"
    assert server.counter("over_budget_copies") == 8
    durable = client.put_chunks(chunks_of(client, keys_of(client, 2, 3)), durable=True)
    assert {one.outcome for one in durable} == {PutOutcome.stored}
    assert dict(server.settled().tiers)["disk"].chunks == 7
    (budget, left) = server.node.store.moves.placement.budgets()["disk"]
    assert budget == 24 << 20
    assert left < -2 * 256 * 1024
