"""Hints on their way through the server: what they do, and what they cannot do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from conftest import ServerMaker
from helpers.local_server import DEADLINE_MS
from helpers.prompts import SMALL, chunks_of, outcomes
from helpers.prompts import keys_of as names_of
from simulation.clock import FakeClock
from simulation.core import Core, keys_of, prompt
from simulation.tiers import SimDisk, no_faults
from simulation.universe import Version

from kvstore.client.connection import Connection
from kvstore.client.options import TransportName
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import LeaseExpiredError
from kvstore.proto.frame import raw_frame_bytes
from kvstore.proto.plans import Hints, Reuse
from kvstore.proto.types import KVLayout, PutOutcome
from kvstore.server.eviction.policy import EvictionPolicy, make_policy
from kvstore.server.eviction.quotas import PartitionedEviction, PartitionTable, Quota
from kvstore.server.index.hints import ChunkMetadata
from kvstore.server.security.sessions import Session
from kvstore.server.store.reads import ReadTerms
from kvstore.server.store.reservations import PutResult
from kvstore.server.store.writes import RESERVED_S
from kvstore.tiers.base import Tier

TEN_S = Hints(ttl_ms=10_000)
CHUNK_BYTES = raw_frame_bytes(KVLayout.of(SMALL, 16))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def core(clock: FakeClock) -> Iterator[Core]:
    """Room for twelve chunks, of which pins may take six."""
    terms = {"batch": 5.0}
    with closing(
        Core(clock=clock, metadata=ChunkMetadata(category_ttls_s=terms), pin_share=2)
    ) as core:
        yield core


def ready(core: Core, session: Session, versions: list[Version]) -> int:
    return core.store.lookup(session, keys_of(versions), core.later(), lease=False).ready


def here(core: Core, versions: list[Version]) -> list[bool]:
    return ["cpu" in core.tiers_of(version) for version in versions]


# --- time to live


def test_a_chunk_is_nobodys_hit_from_the_moment_its_time_is_up(
    core: Core, session: Session, clock: FakeClock
) -> None:
    versions = prompt(3)
    core.put(session, versions[:1])
    core.put(session, versions[1:], hints=TEN_S)
    clock.advance(9.999)
    assert ready(core, session, versions) == 3
    clock.advance(0.001)
    assert ready(core, session, versions) == 1
    assert core.get(session, keys_of(versions)) == core.get(session, keys_of(versions[:1]))
    match = core.store.lookup(session, keys_of(versions), core.later(), lease=True)
    assert (match.ready, match.pending, match.missing) == (1, 0, 2)


def test_a_lease_taken_in_time_is_read_to_its_end(
    core: Core, session: Session, clock: FakeClock
) -> None:
    versions = prompt(2)
    core.put(session, versions, hints=TEN_S)
    match = core.store.lookup(session, keys_of(versions), core.later(), lease=True)
    clock.advance(11)
    core.store.tick()
    assert here(core, versions) == [True, True]
    results = core.store.reads.get(keys_of(versions), ReadTerms(session, core.later()))
    assert len(list(results)) == 2
    core.store.release(session, match.lease_id)
    core.store.tick()
    assert here(core, versions) == [False, False]


def test_expired_chunks_are_dropped_and_counted_on_every_tier(clock: FakeClock) -> None:
    disk = SimDisk(1 << 20, no_faults())
    with closing(Core([disk], clock=clock)) as core:
        session, versions = core.open_session(), prompt(3)
        core.put(session, versions, durable=True, hints=TEN_S)
        assert core.tiers_of(versions[0]) == ["cpu", "disk"]
        clock.advance(10)
        core.store.tick()
        core.settle()
        assert core.cpu.stats().chunks == disk.stats().chunks == 0
        assert core.counters["expired_chunks"] == 6


def test_what_expired_is_the_first_to_go(core: Core, session: Session, clock: FakeClock) -> None:
    old, mortal, filler = prompt(5), prompt(4, seed=1), prompt(3, seed=2)
    core.put(session, old)
    core.put(session, mortal, hints=TEN_S)
    core.put(session, filler)
    clock.advance(10)
    core.put(session, prompt(4, seed=3))
    assert here(core, mortal) == [False] * 4
    assert here(core, old + filler) == [True] * 8


def test_a_chunk_put_again_lives_on(core: Core, session: Session, clock: FakeClock) -> None:
    versions = prompt(2)
    core.put(session, versions, hints=TEN_S)
    clock.advance(10)
    assert core.put(session, versions[:1]) == [PutResult(PutOutcome.exists)]
    core.put(session, versions[1:], hints=TEN_S)
    assert ready(core, session, versions) == 2
    clock.advance(10)
    assert ready(core, session, versions) == 1, "the first lives for ever now"


def test_a_category_has_its_own_time_to_live_and_a_hint_overrules_it(
    core: Core, session: Session, clock: FakeClock
) -> None:
    mine, longer, other = prompt(1), prompt(1, seed=1), prompt(1, seed=2)
    core.put(session, mine, hints=Hints(category="batch"))
    core.put(session, longer, hints=Hints(category="batch", ttl_ms=20_000))
    core.put(session, other, hints=Hints(category="chat"))
    clock.advance(5)
    assert [ready(core, session, one) for one in (mine, longer, other)] == [0, 1, 1]


@pytest.mark.parametrize("jump_s", [-500.0, 1e9])
def test_a_clock_that_jumps_leaves_a_server_that_works(
    core: Core, session: Session, clock: FakeClock, jump_s: float
) -> None:
    core.put(session, prompt(12), hints=TEN_S)
    clock.advance(jump_s)
    core.store.tick()
    versions = prompt(6, seed=1)
    assert {r.outcome for r in core.put(session, versions)} == {PutOutcome.stored}
    assert ready(core, session, versions) == 6


# --- pins and priorities


def test_a_pin_keeps_chunks_for_its_time(core: Core, session: Session, clock: FakeClock) -> None:
    pinned = prompt(3)
    core.put(session, pinned, hints=Hints(pin_ms=5_000))
    core.put(session, prompt(12, seed=1))
    assert here(core, pinned) == [True] * 3
    clock.advance(5)
    core.store.tick()
    core.put(session, prompt(12, seed=2))
    assert here(core, pinned) == [False] * 3


def test_pins_over_the_limit_are_ignored_and_counted(core: Core, session: Session) -> None:
    results = core.put(session, prompt(12), hints=Hints(pin_ms=60_000))
    assert {result.outcome for result in results} == {PutOutcome.stored}
    limit = core.cpu.capacity_bytes // 2 // prompt(1)[0].info.size_bytes
    assert core.counters["ignored_pins"] == 12 - limit
    results = core.put(session, prompt(12, seed=1), hints=Hints(pin_ms=60_000))
    assert {result.outcome for result in results} == {PutOutcome.stored}, "the rest can go"


def test_of_the_next_to_go_the_lowest_priority_goes_first(clock: FakeClock) -> None:
    with closing(Core(clock=clock, slabs=16)) as core:
        session = core.open_session()
        dear, cheap = prompt(1), prompt(2, seed=1)
        core.put(session, dear, hints=Hints(priority=80))
        core.put(session, cheap, hints=Hints(priority=20))
        core.put(session, prompt(45, seed=2))
        assert all(here(core, dear + cheap)), "full"
        core.put(session, prompt(2, seed=3))
        assert (here(core, dear), here(core, cheap)) == ([True], [False, False])


def test_what_is_said_at_the_release_is_of_the_chunks_of_the_lease(
    core: Core, session: Session, clock: FakeClock
) -> None:
    versions = prompt(3)
    core.put(session, versions)
    match = core.store.lookup(session, keys_of(versions[:2]), core.later(), lease=True)
    assert core.store.release(session, match.lease_id, TEN_S)
    clock.advance(10)
    assert ready(core, session, versions[2:]) == 1
    assert ready(core, session, versions) == 0


def test_the_release_of_no_lease_says_nothing(core: Core, session: Session) -> None:
    versions = prompt(1)
    core.put(session, versions)
    stranger = core.open_session()
    match = core.store.lookup(session, keys_of(versions), core.later(), lease=True)
    assert not core.store.release(stranger, match.lease_id, TEN_S)
    assert core.metadata.hints.expiring == 0


# --- engines that lie

LIES = [
    Hints(reuse=Reuse.discard),
    Hints(reuse=Reuse.keep),
    Hints(priority=100),
    Hints(pin_ms=3_600_000),
    Hints(priority=1, reuse=Reuse.keep),
]


def by_density(tier: Tier, metadata: ChunkMetadata) -> EvictionPolicy:
    return make_policy("hit_density", metadata.history)


def hits_of_a_day(lie: Hints) -> int:
    """Return the chunks hit by an honest tenant beside one that says *lie* of all it puts."""
    clock = FakeClock()
    hits = 0
    with closing(Core(clock=clock, policy=by_density, slabs=8, pin_share=4)) as core:
        honest, liar = core.open_session(), core.open_session("blue")
        for second in range(240):
            mine = prompt(2, seed=second % 5)
            hits += ready(core, honest, mine)
            core.put(honest, mine)
            if second % 2:
                core.put(liar, prompt(2, seed=1_000 + second, tenant="blue"), hints=lie)
            clock.advance(1)
            if second % 20 == 0:
                core.store.tick()
    return hits


@pytest.fixture(scope="module")
def honest_hits() -> int:
    return hits_of_a_day(Hints())


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_an_engine_that_lies_costs_others_little(lie: Hints, honest_hits: int) -> None:
    assert honest_hits > 300, "what there is to lose"
    assert hits_of_a_day(lie) >= 0.9 * honest_hits


# --- quotas


def with_quotas(clock: FakeClock) -> Core:
    """Three slabs; red may take three chunks and is sure of two, the category batch takes two."""
    size = prompt(1)[0].info.size_bytes
    metadata = ChunkMetadata(partitions=PartitionTable(["red"], ["batch"]))
    quotas = (Quota(), Quota(3 * size, 2 * size), Quota(2 * size))

    def policy(tier: Tier, known: ChunkMetadata) -> EvictionPolicy:
        return PartitionedEviction(
            lambda: make_policy("lru", known.history), known.hints.partitions.__getitem__, quotas,
            tier.capacity_bytes,
        )  # fmt: skip

    return Core(clock=clock, metadata=metadata, policy=policy, slabs=3)


def test_a_put_over_the_quota_evicts_the_tenants_own(clock: FakeClock) -> None:
    with closing(with_quotas(clock)) as core:
        red, blue = core.open_session("red"), core.open_session("blue")
        theirs = prompt(3, seed=5, tenant="blue")
        core.put(blue, theirs)
        for seed in range(6):
            mine = prompt(1, seed=seed)
            assert core.put(red, mine)[0].outcome is PutOutcome.stored
            kept = [here(core, prompt(1, seed=one)) == [True] for one in range(seed + 1)]
            assert sum(kept) == min(3, seed + 1)
            assert kept[-3:] == [True] * min(3, seed + 1)
        assert here(core, theirs) == [True] * 3


def test_a_guarantee_holds_against_any_pressure(clock: FakeClock) -> None:
    with closing(with_quotas(clock)) as core:
        red, blue = core.open_session("red"), core.open_session("blue")
        mine = prompt(3)
        core.put(red, mine)
        core.put(blue, prompt(30, seed=1, tenant="blue"))
        assert sum(here(core, mine)) >= 2


def test_a_tenant_that_leases_all_it_may_have_is_refused_and_nobody_else(clock: FakeClock) -> None:
    with closing(with_quotas(clock)) as core:
        red, blue = core.open_session("red"), core.open_session("blue")
        mine = prompt(3)
        core.put(red, mine)
        match = core.store.lookup(red, keys_of(mine), core.later(), lease=True)
        assert core.put(red, prompt(1, seed=1))[0].outcome is PutOutcome.refused
        assert core.put(blue, prompt(1, seed=2, tenant="blue"))[0].outcome is PutOutcome.stored
        core.store.release(red, match.lease_id)
        assert core.put(red, prompt(1, seed=1))[0].outcome is PutOutcome.stored
        assert len(core.store.writes) == 0


def test_a_category_has_its_quota_too(clock: FakeClock) -> None:
    with closing(with_quotas(clock)) as core:
        blue = core.open_session("blue")
        batch = prompt(5, tenant="blue")
        core.put(blue, batch, hints=Hints(category="batch"))
        assert sum(here(core, batch)) == 2
        core.put(blue, prompt(5, seed=1, tenant="blue"), hints=Hints(category="chat"))
        assert sum(here(core, batch)) == 2


def test_room_that_is_reserved_counts_against_the_quota_before_anything_comes(
    clock: FakeClock,
) -> None:
    with closing(with_quotas(clock)) as core:
        red, blue = core.open_session("red"), core.open_session("blue")
        mine = prompt(6)
        writes = core.store.writes
        begun = writes.begin_all(red, [v.info for v in mine], core.later())
        assert [isinstance(one, PutResult) for one in begun] == [False] * 3 + [True] * 3
        assert core.put(red, prompt(1, seed=1))[0].outcome is PutOutcome.refused
        assert core.put(blue, prompt(1, seed=2, tenant="blue"))[0].outcome is PutOutcome.stored
        first, second, third = (one.ticket_id for one in begun[:3])  # type: ignore[union-attr]
        writes.commit(writes.claim(red, first), frame=mine[0].frame)
        assert writes.abort(red, second)
        assert core.put(red, prompt(1, seed=1))[0].outcome is PutOutcome.stored
        assert here(core, mine[:1]) == [True], "two are there and one has room: that is the quota"
        writes.commit(writes.claim(red, third), frame=mine[2].frame)
        assert core.put(red, prompt(3, seed=3))[2].outcome is PutOutcome.stored
        assert sum(here(core, [*mine, *prompt(1, seed=1), *prompt(3, seed=3)])) == 3


def test_room_that_nobody_comes_to_fill_is_given_back(clock: FakeClock) -> None:
    with closing(with_quotas(clock)) as core:
        red = core.open_session("red")
        mine = prompt(3)
        writes = core.store.writes
        begun = writes.begin_all(red, [v.info for v in mine], core.later())
        clock.advance(RESERVED_S - 1)
        core.store.tick()
        assert len(writes) == 3
        claimed = writes.claim(red, begun[0].ticket_id)  # type: ignore[union-attr]
        clock.advance(1)
        core.store.tick()
        assert len(writes) == 0
        assert core.counters["dropped_unfinished_chunks"] == 2
        with pytest.raises(LeaseExpiredError, match="reserve again"):
            writes.claim(red, begun[1].ticket_id)  # type: ignore[union-attr]
        writes.commit(claimed, frame=mine[0].frame)
        assert here(core, mine) == [True, False, False], "who had begun to fill it was let"
        assert core.put(red, prompt(2, seed=1))[1].outcome is PutOutcome.stored


def test_a_chunk_larger_than_its_tenants_quota_is_refused(clock: FakeClock) -> None:
    with closing(with_quotas(clock)) as core:
        red = core.open_session("red")
        assert core.put(red, prompt(1, tokens=228))[0].outcome is PutOutcome.refused
        assert core.put(red, prompt(1))[0].outcome is PutOutcome.stored


@pytest.mark.parametrize("transport", ["grpc", "shm"])
def test_puts_at_the_same_time_pass_the_quota_by_a_chunk_each_at_most_and_not_for_long(
    make_server: ServerMaker, transport: TransportName
) -> None:
    server = make_server("--tiers", "cpu", "--tenant-quotas", "default=40KiB")
    clients = [server.connect(transport) for _ in range(4)]
    is_over, seen = threading.Event(), [0]

    def watch() -> None:
        with closing(Connection(server.address, retry_after_ms=1)) as connection:
            is_last = False
            while not is_last:
                is_last, asked = is_over.is_set(), pb.QuotaRequest()
                reply = connection.call("Quota", asked, DEADLINE_MS, pb.QuotaResponse)
                seen.append(reply.tenants[0].tiers[0].used_bytes)

    def write(number: int) -> set[PutOutcome]:
        seeds = range(100 * number, 100 * number + 12)
        chunks = [chunks_of(clients[number], names_of(clients[number], seed, 4)) for seed in seeds]
        return {outcome for some in chunks for outcome in outcomes(clients[number], some)}

    with ThreadPoolExecutor(len(clients) + 1) as pool:
        watching = pool.submit(watch)
        try:
            found = set().union(*pool.map(write, range(len(clients))))
        finally:
            is_over.set()
        watching.result()
    assert found <= {PutOutcome.stored, PutOutcome.refused}
    assert PutOutcome.stored in found
    assert 20 << 10 < max(seen) <= (40 << 10) + (len(clients) - 1) * CHUNK_BYTES
    assert seen[-1] <= 40 << 10
