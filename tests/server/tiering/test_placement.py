"""Which copies a tier is given: rules, prices, budgets and breakers; what is promoted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from conftest import ServerMaker
from helpers.local_server import DEADLINE_MS
from helpers.prompts import MEDIUM, chunks_of
from helpers.prompts import keys_of as names_of
from hypothesis import given
from hypothesis import strategies as st
from simulation.clock import FakeClock
from simulation.core import Core, frames_of, keys_of, prompt, settings
from simulation.tiers import SimDisk, SimRedis, no_faults
from simulation.universe import Version
from structlog.testing import capture_logs

from kvstore.client import ClientOptions
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.plans import EngineTerms, PrefillModel
from kvstore.proto.types import ChunkKey, PutOutcome
from kvstore.server.eviction.access_history import AccessHistory
from kvstore.server.eviction.reuse_statistics import ReuseForecast
from kvstore.server.index.hints import ChunkMetadata
from kvstore.server.settings.settings import Settings
from kvstore.server.store.reads import ReadTerms
from kvstore.server.tiering.admission import (
    ADMISSIONS,
    BURSTS_A_DAY,
    BY_VALUE,
    DAY_S,
    FIRST_PRICE,
    LEAST_CHANCE,
    LEAST_SHARE,
    MAX_AWAITED,
    MAX_REMEMBERED,
    CopyRequest,
    EvictionValue,
    Pressure,
    PromoteOnSecondHit,
    StateAdmission,
    TierAdmission,
    Trigger,
    WriteBudget,
)
from kvstore.server.tiering.breaker import Breaker
from kvstore.tiers.base import Tier

LEAVING = Trigger.leaving


def test_any_rule_is_overruled_by_what_a_load_costs_and_by_what_is_needed() -> None:
    hopeless = CopyRequest(LEAVING, 100, 1, chance=0.0, load_s=9.0, compute_s=1.0, is_needed=True)
    for rule in ADMISSIONS.values():

        def admitted(load_s: float, compute_s: float, rule: TierAdmission = rule) -> set[Trigger]:
            offers = [CopyRequest(one, 100, 9, 1.0, load_s, compute_s) for one in Trigger]
            return {one.moment for one in offers if rule.admits(one, 0.0)}

        assert not admitted(0.2, 0.2), "it loads as long as it computes"
        assert admitted(0.1, 0.2)
        assert admitted(99.0, 0.0), "an unknown speed of prefill refuses nothing"
        assert rule.admits(hopeless, 1.0)


def test_the_value_rule_weighs_what_a_load_spares_against_a_price_that_rises() -> None:
    rule = replace(BY_VALUE, least_value=0.2)
    assert rule.admits(CopyRequest(LEAVING, 100, chance=0.2), 0.0)
    assert not rule.admits(CopyRequest(LEAVING, 100, chance=0.19), 0.0)
    assert rule.admits(CopyRequest(LEAVING, 100, chance=0.4, load_s=1.0, compute_s=2.0), 0.0)
    assert not rule.admits(CopyRequest(LEAVING, 100, chance=0.39, load_s=1.0, compute_s=2.0), 0.0)
    prices = [BY_VALUE.price(step / 10) for step in range(11)]
    assert prices == sorted(prices)
    assert prices[0] == LEAST_CHANCE
    for chance, pressure, is_worth_it in ((1.0, 1.0, False), (1.0, 0.9, True), (0.5, 0.9, False)):
        assert BY_VALUE.admits(CopyRequest(LEAVING, 100, chance=chance), pressure) is is_worth_it


def test_a_tier_that_writes_all_the_time_is_under_pressure_and_recovers() -> None:
    busy, slow, quick = Pressure(), Pressure(), Pressure()
    assert busy.level(0.0, 0.0) == 0.0
    for second in range(60):
        for pressure, took_s in ((busy, 1.0), (slow, 0.9), (quick, 0.09)):
            pressure.note(took_s, float(second))
    assert busy.level(0.0, 60.0) > 0.8
    assert slow.level(0.0, 60.0) > 0.5
    assert busy.level(0.0, 120.0) == quick.level(0.0, 60.0) == 0.0


def number_key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "little"))


def test_a_chunk_is_due_at_its_second_read_and_then_every_other() -> None:
    reads = PromoteOnSecondHit(3)
    assert [reads.is_due(number_key(1)) for _ in range(5)] == [False, True, False, True, False]
    for seed in range(2, 6):
        assert not reads.is_due(number_key(seed))
    assert len(reads._once) == 3
    assert not reads.is_due(number_key(2)), "it was read too long ago"
    assert reads.is_due(number_key(5))


def test_a_tier_with_room_takes_everything_and_then_what_is_worth_more_than_its_victims() -> None:
    price = EvictionValue()
    assert price.takes(0.0)
    price.note_eviction(2.0)
    assert price.per_byte == 2.0
    assert price.takes(2.0 * LEAST_SHARE)
    assert not price.takes(1.9 * LEAST_SHARE)
    for _ in range(1000):
        price.note_eviction(1.0)
    assert price.takes(1.01 * LEAST_SHARE)


A_DAY = 24_000
BURST = A_DAY // BURSTS_A_DAY


def test_an_hours_share_may_be_written_at_once_and_debt_raises_the_price() -> None:
    budget = WriteBudget(A_DAY, 0.0)
    budget.admitted(number_key(1), BURST)
    assert (budget.left_bytes(0.0), budget.price(0.0)) == (0.0, FIRST_PRICE)
    assert budget.left_bytes(1800.0) == BURST / 2
    assert budget.left_bytes(10 * DAY_S) == BURST
    budget, prices = WriteBudget(A_DAY, 0.0), []
    for number in range(9):
        prices.append(budget.price(0.0))
        budget.note_write(number_key(number), BURST // 4)
    assert prices == [0.0] * 4 + [0.5, 0.625, 0.75, 0.875, 1.0]
    assert budget.price(0.0) > 1
    assert budget.price(3600.0) == 0.625


def test_a_copy_is_paid_for_once_and_at_what_it_took() -> None:
    budget = WriteBudget(A_DAY, 0.0)
    budget.admitted(number_key(1), 100)
    budget.admitted(number_key(1), 120)
    assert budget.left_bytes(0.0) == BURST - 120
    budget.note_write(number_key(1), 60)
    assert budget.left_bytes(0.0) == BURST - 60
    budget.admitted(number_key(2), 10)
    budget.note_write(number_key(2), 0)
    budget.note_write(number_key(3), 0)
    assert budget.left_bytes(0.0) == BURST - 60
    for number in range(2 * MAX_AWAITED):
        budget.admitted(number_key(number), 0)
    assert len(budget._awaited) == MAX_AWAITED


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 2 * BURST)), max_size=60))
def test_no_clock_lets_more_through_than_the_time_that_passed(
    steps: list[tuple[float, int]],
) -> None:
    budget, now, forward, written = WriteBudget(A_DAY, 0.0), 0.0, 0.0, 0
    for step, size in steps:
        now += step
        forward += max(0.0, step)
        if budget.price(now) == 0:
            budget.admitted(number_key(0), size)
            budget.note_write(number_key(0), size)
            written += size
    assert written <= BURST + forward * A_DAY / DAY_S + 2 * BURST + 1


def test_no_more_states_are_remembered_than_the_limit() -> None:
    states = StateAdmission(limit=8)
    for number in range(100):
        states.parted(number_key(number))
        states.admits(number_key(1000 + number), is_end=False)
    assert len(states._partings) == len(states._turned_away) == 8
    assert states.admits(number_key(99), is_end=False), "the latest partings stay"
    assert not states.admits(number_key(1000), is_end=False), "the oldest are forgotten"
    assert MAX_REMEMBERED < 1 << 20


DISK_BYTES = 2 << 20


def make_core(rule: str, *lower: Tier, clock: FakeClock | None = None, **terms: Any) -> Core:
    """A core whose lower tiers, a disk if none is named, are given copies by *rule*."""
    history = AccessHistory()
    tiers = lower or (SimDisk(DISK_BYTES, no_faults()),)
    return Core(
        tiers,
        admissions={tier.name: rule for tier in tiers},
        metadata=ChunkMetadata(history, forecast=ReuseForecast(history)),
        clock=clock or FakeClock(),
        **terms,
    )


def on_disk(core: Core, versions: list[Version]) -> int:
    return sum("disk" in core.tiers_of(version) for version in versions)


FAST_ENGINE = PrefillModel(0.0, 1e-12)


@pytest.fixture(params=["through", "evict", "selective", "auto"])
def core(request: pytest.FixtureRequest) -> Iterator[Core]:
    with closing(make_core(request.param)) as core:
        yield core


def ask(core: Core, versions: list[Version]) -> None:
    """Look a prompt up and put what is missing of it."""
    core.put(versions[core.look_up(versions).ready :])
    core.settle()


def test_each_rule_writes_at_its_moment() -> None:
    for rule, stored, asked, evicted in [
        ("through", 3, 3, 3),
        ("evict", 0, 0, 3),
        ("selective", 0, 3, 3),
        ("auto", 0, 0, 3),
    ]:
        with closing(make_core(rule)) as core:
            versions = prompt(3)
            ask(core, versions)
            assert on_disk(core, versions) == stored
            ask(core, versions)
            assert on_disk(core, versions) == asked
            core.put(prompt(12, seed=9))
            assert on_disk(core, versions) == evicted


def test_a_clean_victim_is_not_written_again() -> None:
    with closing(make_core("evict")) as core:
        versions = prompt(3)
        ask(core, versions)
        ask(core, prompt(12, seed=8))
        core.get(versions)
        copied = core.counters["copied_chunks"]
        assert copied == 3 + 3, "the chunks, and what went for them to come up again"
        ask(core, prompt(12, seed=9))
        assert core.counters["copied_chunks"] == copied + 12 - 3
        assert [core.tiers_of(version) for version in versions] == [["disk"]] * 3


def test_nothing_is_written_where_a_load_takes_as_long_as_computing(core: Core) -> None:
    fast = EngineTerms(FAST_ENGINE)
    core.look_up(prompt(1), lease=False, engine=fast)
    for seed in range(4):
        ask(core, prompt(6, seed=seed))
        ask(core, prompt(6, seed=seed))
    assert core.slot("disk").tier.stats().chunks == 0


def test_no_chunk_is_left_without_what_it_continues(core: Core) -> None:
    trunk = prompt(9)
    for turn in range(24):
        ask(core, trunk[: 1 + turn * 5 % 9])
        ask(core, prompt(4, seed=30 + turn % 3))
        here = set(keys_of([v for v in trunk if core.tiers_of(v)]))
        for parent, child in zip(keys_of(trunk), keys_of(trunk)[1:], strict=False):
            assert child not in here or parent in here


def test_an_exclusive_tier_gives_a_chunk_up_once_nobody_reads_it() -> None:
    with closing(make_core("evict", exclusive=("disk",))) as core:
        versions = prompt(3)
        ask(core, versions)
        ask(core, prompt(12, seed=9))
        match = core.look_up(versions, lease=True)
        results = core.store.reads.get(keys_of(versions), ReadTerms(core.session, core.later()))
        assert [a.data.tobytes() for a in results] == frames_of(versions)
        core.store.tick()
        assert on_disk(core, versions) == 3, "it may be read where it is"
        core.store.release(core.session, match.lease_id)
        core.store.tick()
        core.settle()
        assert [core.tiers_of(version) for version in versions] == [["cpu"]] * 3
        assert core.counters["left_copies"] == 3
        ask(core, prompt(12, seed=8))
        assert on_disk(core, versions) == 3


def test_an_exclusive_tier_takes_no_durable_puts() -> None:
    with closing(make_core("evict", exclusive=("disk",))) as core:
        assert core.store.durable is None
        with pytest.raises(InvalidRequestError, match="durable"):
            core.put(prompt(1), durable=True)


@pytest.mark.parametrize("rule", ["auto", "evict"])
@pytest.mark.parametrize("is_slow", [False, True])
def test_victims_go_to_the_nearest_tier_or_if_weighed_where_they_would_load_from_soonest(
    rule: str, is_slow: bool
) -> None:
    tiers = SimDisk(1 << 20, no_faults()), SimRedis(1 << 20, no_faults())
    with closing(make_core(rule, *tiers)) as core:
        if is_slow:
            core.slot("disk").bytes_per_s = 1e6
        versions = prompt(6)
        core.put(versions)
        for _ in range(3):
            core.look_up(versions)
        core.put(prompt(12, seed=9))
        has_victims = [tier.stats().chunks > 0 for tier in tiers]
        assert has_victims == ([False, True] if is_slow and rule == "auto" else [True, False])


def test_memory_takes_everything_until_it_gave_up_something_worth_more() -> None:
    core = make_core("auto")
    placement = core.moves.placement
    disk, cpu = core.slot("disk"), core.slot("cpu")
    loved, once = prompt(2, seed=1), prompt(2, seed=2)
    for _ in range(40):  # asked for again and again: a kind with a high chance
        core.look_up(loved, lease=False)
        core.put(loved)
        core.clock.advance(5.0)  # type: ignore[attr-defined]
    for seed in range(40):  # and one that never comes again
        core.put(prompt(2, seed=100 + seed))
        core.clock.advance(5.0)  # type: ignore[attr-defined]
    core.put(once)
    lovely, single = keys_of(loved)[0], keys_of(once)[0]
    price = placement._prices["cpu"]
    assert price.per_byte is not None, "memory gave up what came before"
    assert placement.promotes(lovely, disk, cpu)
    for _ in range(400):
        price.note_eviction(placement._value(lovely, disk))
    assert not placement.promotes(single, disk, cpu)
    assert placement.promotes(lovely, disk, cpu)
    assert placement._value(keys_of(prompt(1, seed=999))[0], disk) == 0.0
    core.close()


FRAME = prompt(1)[0].info.size_bytes


def budget(frames_an_hour: int) -> Settings:
    return settings(write_budget={"disk": 24 * frames_an_hour * FRAME, "redis": 1})


def test_beyond_it_only_what_is_likely_to_be_asked_for_again_leaves_memory_for_disk() -> None:
    clock = FakeClock()
    core = make_core("evict", clock=clock, config=budget(1))
    for seed in range(20):  # teach it that prompts like these do not come again
        core.put(prompt(6, seed=seed))
        clock.advance(1.0)
    core.settle()
    assert core.counters["copied_chunks"] < 12
    assert core.counters["over_budget_copies"] == core.counters["unworthy_copies"] > 80
    assert core.moves.placement.budgets()["disk"][1] > -3 * 24 * FRAME
    core.close()


def test_a_server_keeps_to_its_budget_and_shows_it(make_server: ServerMaker) -> None:
    server = make_server("--write-budget", "disk=24MiB", "--http", "127.0.0.1:0")
    options = ClientOptions("auto", chunk_tokens=64, deadline_ms=DEADLINE_MS)
    client = server.connect("auto", MEDIUM, options)
    chunks = chunks_of(client, names_of(client, 1, 12))
    assert {one.outcome for one in client.put_chunks(chunks)} == {PutOutcome.stored}
    server.settled()
    stats = dict(server.usage().tiers)
    assert stats["disk"].chunks == 4, "of an hour's MiB, and no more than one frame beyond it"
    assert server.counter("over_budget_copies") == 8
    durable = client.put_chunks(chunks_of(client, names_of(client, 2, 3)), durable=True)
    assert {one.outcome for one in durable} == {PutOutcome.stored}
    assert dict(server.settled().tiers)["disk"].chunks == 7
    (budget, left) = server.node.store.moves.placement.budgets()["disk"]
    assert budget == 24 << 20
    assert left < -2 * 256 * 1024


@pytest.fixture
def breaker(clock: FakeClock) -> Breaker:
    return Breaker("tier redis", 3, 500, clock)


def open_it(breaker: Breaker) -> None:
    for number in range(3):
        breaker.fail(f"failure {number}")


def test_it_opens_at_so_many_failures_in_a_row_and_says_why(breaker: Breaker) -> None:
    for _ in range(3):
        breaker.succeed()
        breaker.fail("one")
        breaker.fail("two")
        assert breaker.allows()
        assert (breaker.is_open, breaker.reason) == (False, "")
    breaker.fail("three")
    assert not breaker.allows()
    assert (breaker.is_open, breaker.reason) == (True, "three")


def test_an_open_breaker_lets_one_attempt_a_period(breaker: Breaker, clock: FakeClock) -> None:
    open_it(breaker)
    clock.advance(0.499)
    assert not breaker.allows()
    clock.advance(0.002)
    assert not breaker.is_open
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    assert breaker.is_open
    clock.advance(0.3)
    breaker.fail("still down")  # for a period more
    clock.advance(0.4)
    assert not breaker.allows()
    assert breaker.reason == "still down"
    clock.advance(0.2)
    assert breaker.allows()
    breaker.succeed()
    assert [breaker.allows() for _ in range(3)] == [True, True, True]
    assert breaker.reason == ""
    breaker.fail("one")
    assert breaker.allows()


def test_of_many_threads_one_gets_the_attempt(breaker: Breaker, clock: FakeClock) -> None:
    open_it(breaker)
    clock.advance(0.6)
    barrier = threading.Barrier(8, timeout=30)

    def ask(_: int) -> bool:
        barrier.wait()
        return breaker.allows()

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(ask, range(8))) == [False] * 7 + [True]


def test_the_log_has_one_line_for_each_opening_and_each_closing(
    breaker: Breaker, clock: FakeClock
) -> None:
    with capture_logs() as logs:
        breaker.succeed()
        breaker.fail("one")
        breaker.succeed()
        assert logs == []
        for _ in range(2):
            open_it(breaker)
            clock.advance(0.6)
            breaker.fail("still down")
            breaker.succeed()
            breaker.succeed()
    assert [(log["event"].partition(":")[0], log["log_level"]) for log in logs] == [
        ("circuit breaker opened", "warning"),
        ("circuit breaker closed", "warning"),
    ] * 2
    assert {log["medium"] for log in logs} == {"tier redis"}
    assert logs[0]["reason"] == "failure 2"
