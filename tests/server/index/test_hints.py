"""Hints: what they do in a server and what they cannot do; priorities and lifetimes by row."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from conftest import ServerMaker
from contracts.policy import keep_none
from helpers.core_chunks import leased
from helpers.local_server import DEADLINE_MS
from helpers.prompts import SMALL, chunks_of, outcomes
from helpers.prompts import keys_of as names_of
from hypothesis import given
from hypothesis import strategies as st
from simulation.clock import FakeClock
from simulation.core import Core, prompt
from simulation.tiers import SimDisk, no_faults
from simulation.universe import Version

from kvstore.client.connection import Connection
from kvstore.client.options import TransportName
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import LeaseExpiredError
from kvstore.proto.frame import raw_frame_bytes
from kvstore.proto.key_table import NO_ROW
from kvstore.proto.plans import Hints, Reuse
from kvstore.proto.types import KVLayout, PutOutcome
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.eviction.policy import EvictionPolicy, make_policy
from kvstore.server.eviction.quotas import PartitionedEviction, PartitionTable, Quota
from kvstore.server.index.hints import LOOK_AHEAD, ChunkMetadata, RowHints
from kvstore.server.security.sessions import Session
from kvstore.server.store.reads import ReadTerms
from kvstore.server.store.reservations import PutResult
from kvstore.server.store.writes import RESERVED_S
from kvstore.tiers.base import Tier

TEN_S = Hints(ttl_ms=10_000)
CHUNK_BYTES = raw_frame_bytes(KVLayout.of(SMALL, 16))


@pytest.fixture
def core(clock: FakeClock) -> Iterator[Core]:
    """Room for twelve chunks, of which pins may take six."""
    terms = {"batch": 5.0}
    with closing(
        Core(clock=clock, metadata=ChunkMetadata(category_ttls_s=terms), pin_share=2)
    ) as core:
        yield core


def here(core: Core, versions: list[Version]) -> list[bool]:
    return ["cpu" in core.tiers_of(version) for version in versions]


def test_a_chunk_is_nobodys_hit_from_the_moment_its_time_is_up(
    core: Core, clock: FakeClock
) -> None:
    versions = prompt(3)
    core.put(versions[:1])
    core.put(versions[1:], hints=TEN_S)
    clock.advance(9.999)
    assert core.look_up(versions).ready == 3
    clock.advance(0.001)
    assert core.look_up(versions).ready == 1
    assert core.get(versions) == core.get(versions[:1])
    match = core.look_up(versions, lease=True)
    assert (match.ready, match.pending, match.missing) == (1, 0, 2)


def test_a_lease_taken_in_time_is_read_to_its_end(core: Core, clock: FakeClock) -> None:
    versions = prompt(2)
    core.put(versions, hints=TEN_S)
    with leased(core, versions) as keys:
        clock.advance(11)
        core.store.tick()
        assert here(core, versions) == [True, True]
        assert len(list(core.store.reads.get(keys, ReadTerms(core.session, core.later())))) == 2
    core.store.tick()
    assert here(core, versions) == [False, False]


def test_expired_chunks_are_dropped_and_counted_on_every_tier(clock: FakeClock) -> None:
    disk = SimDisk(1 << 20, no_faults())
    with closing(Core([disk], clock=clock)) as core:
        versions = prompt(3)
        core.put(versions, durable=True, hints=TEN_S)
        assert core.tiers_of(versions[0]) == ["cpu", "disk"]
        clock.advance(10)
        core.store.tick()
        core.settle()
        assert core.cpu.stats().chunks == disk.stats().chunks == 0
        assert core.counters["expired_chunks"] == 6


def test_what_expired_is_the_first_to_go(core: Core, clock: FakeClock) -> None:
    old, mortal, filler = prompt(5), prompt(4, seed=1), prompt(3, seed=2)
    core.put(old)
    core.put(mortal, hints=TEN_S)
    core.put(filler)
    clock.advance(10)
    core.put(prompt(4, seed=3))
    assert here(core, mortal) == [False] * 4
    assert here(core, old + filler) == [True] * 8


def test_a_chunk_put_again_lives_on(core: Core, clock: FakeClock) -> None:
    versions = prompt(2)
    core.put(versions, hints=TEN_S)
    clock.advance(10)
    assert core.put(versions[:1]) == [PutResult(PutOutcome.exists)]
    core.put(versions[1:], hints=TEN_S)
    assert core.look_up(versions).ready == 2
    clock.advance(10)
    assert core.look_up(versions).ready == 1, "the first lives for ever now"


def test_a_category_has_its_own_time_to_live_and_a_hint_overrules_it(
    core: Core, clock: FakeClock
) -> None:
    mine, longer, other = prompt(1), prompt(1, seed=1), prompt(1, seed=2)
    core.put(mine, hints=Hints(category="batch"))
    core.put(longer, hints=Hints(category="batch", ttl_ms=20_000))
    core.put(other, hints=Hints(category="chat"))
    clock.advance(5)
    assert [core.look_up(one).ready for one in (mine, longer, other)] == [0, 1, 1]


def test_a_pin_keeps_chunks_for_its_time(core: Core, clock: FakeClock) -> None:
    pinned = prompt(3)
    core.put(pinned, hints=Hints(pin_ms=5_000))
    core.put(prompt(12, seed=1))
    assert here(core, pinned) == [True] * 3
    clock.advance(5)
    core.store.tick()
    core.put(prompt(12, seed=2))
    assert here(core, pinned) == [False] * 3


def test_what_is_said_at_the_release_is_of_the_chunks_of_the_lease(
    core: Core, clock: FakeClock
) -> None:
    versions = prompt(3)
    core.put(versions)
    match = core.look_up(versions[:2], lease=True)
    assert not core.store.release(core.open_session(), match.lease_id, TEN_S)
    assert core.metadata.hints.expiring == 0, "it was another's to release"
    assert core.store.release(core.session, match.lease_id, TEN_S)
    clock.advance(10)
    assert core.look_up(versions[2:]).ready == 1
    assert core.look_up(versions).ready == 0


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
            hits += core.look_up(mine, honest).ready
            core.put(mine, honest)
            if second % 2:
                core.put(prompt(2, seed=1_000 + second, tenant="blue"), liar, hints=lie)
            clock.advance(1)
            if second % 20 == 0:
                core.store.tick()
    return hits


def test_an_engine_that_lies_costs_others_little() -> None:
    honest_hits = hits_of_a_day(Hints())
    assert honest_hits > 300, "what there is to lose"
    for lie in LIES:
        assert hits_of_a_day(lie) >= 0.9 * honest_hits, lie


@pytest.fixture
def quotas(clock: FakeClock) -> Iterator[Core]:
    """Three slabs; red may take three chunks and is sure of two, the category batch takes two."""
    size = prompt(1)[0].info.size_bytes
    metadata = ChunkMetadata(partitions=PartitionTable(["red"], ["batch"]))
    terms = (Quota(), Quota(3 * size, 2 * size), Quota(2 * size))

    def policy(tier: Tier, known: ChunkMetadata) -> EvictionPolicy:
        return PartitionedEviction(
            lambda: make_policy("lru", known.history), known.hints.partitions.__getitem__, terms,
            tier.capacity_bytes,
        )  # fmt: skip

    with closing(Core(clock=clock, metadata=metadata, policy=policy, slabs=3)) as core:
        yield core


def outcome(core: Core, session: Session, versions: list[Version]) -> PutOutcome:
    """What became of the last."""
    return core.put(versions, session)[-1].outcome


def test_a_put_over_the_quota_evicts_the_tenants_own(quotas: Core) -> None:
    core, red, blue = quotas, quotas.open_session("red"), quotas.open_session("blue")
    theirs = prompt(3, seed=5, tenant="blue")
    core.put(theirs, blue)
    for seed in range(6):
        mine = prompt(1, seed=seed)
        assert outcome(core, red, mine) is PutOutcome.stored
        kept = [here(core, prompt(1, seed=one)) == [True] for one in range(seed + 1)]
        assert sum(kept) == min(3, seed + 1)
        assert kept[-3:] == [True] * min(3, seed + 1)
    assert here(core, theirs) == [True] * 3


def test_a_tenant_that_leases_all_it_may_have_is_refused_and_nobody_else(quotas: Core) -> None:
    core, red, blue = quotas, quotas.open_session("red"), quotas.open_session("blue")
    mine = prompt(3)
    core.put(mine, red)
    match = core.look_up(mine, red, lease=True)
    assert outcome(core, red, prompt(1, seed=1)) is PutOutcome.refused
    assert outcome(core, blue, prompt(1, seed=2, tenant="blue")) is PutOutcome.stored
    core.store.release(red, match.lease_id)
    assert outcome(core, red, prompt(1, seed=1)) is PutOutcome.stored
    assert outcome(core, red, prompt(1, tokens=228)) is PutOutcome.refused, "larger than the quota"
    assert len(core.store.writes) == 0


def test_room_that_is_reserved_counts_against_the_quota_before_anything_comes(quotas: Core) -> None:
    core, red, blue = quotas, quotas.open_session("red"), quotas.open_session("blue")
    mine = prompt(6)
    writes = core.store.writes
    begun = writes.begin_all(red, [v.info for v in mine], core.later())
    assert [isinstance(one, PutResult) for one in begun] == [False] * 3 + [True] * 3
    assert outcome(core, red, prompt(1, seed=1)) is PutOutcome.refused
    assert outcome(core, blue, prompt(1, seed=2, tenant="blue")) is PutOutcome.stored
    first, second, third = (one.ticket_id for one in begun[:3])  # type: ignore[union-attr]
    writes.commit(writes.claim(red, first), frame=mine[0].frame)
    assert writes.abort(red, second)
    assert outcome(core, red, prompt(1, seed=1)) is PutOutcome.stored
    assert here(core, mine[:1]) == [True], "two are there and one has room: that is the quota"
    writes.commit(writes.claim(red, third), frame=mine[2].frame)
    assert outcome(core, red, prompt(3, seed=3)) is PutOutcome.stored
    assert sum(here(core, [*mine, *prompt(1, seed=1), *prompt(3, seed=3)])) == 3


def test_room_that_nobody_comes_to_fill_is_given_back(quotas: Core, clock: FakeClock) -> None:
    core, red = quotas, quotas.open_session("red")
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
    assert outcome(core, red, prompt(2, seed=1)) is PutOutcome.stored


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


MANY = 1_000


def table_of_rows() -> RowHints:
    table = RowHints()
    for column in table.columns:
        column.frombytes(bytes(100 * column.itemsize))
    return table


def no_parent(_: int) -> int:
    return NO_ROW


def ordered(table: RowHints, victims: list[int]) -> list[int]:
    return list(table.in_order(iter(victims), no_parent, MANY))


def test_the_lower_priority_goes_first_and_no_word_counts_as_fifty() -> None:
    table, victims = table_of_rows(), iter(range(1, 100))
    assert next(table.in_order(victims, no_parent, MANY)) == 1
    assert next(victims) == 2, "without priorities nothing is looked at that is not needed"
    table.set_priority(1, 90)
    table.set_priority(3, 10)
    table.set_priority(4, 50)
    assert ordered(table, [1, 2, 3, 4]) == [3, 2, 4, 1]
    table.set_priority(3, 0)
    assert ordered(table, [1, 2, 3, 4]) == [2, 3, 4, 1]
    for row in range(1, 50):
        table.set_priority(row, 100)
    assert ordered(table, list(range(1, 50))) == list(range(1, 50))


def test_priorities_reach_no_further_than_the_next_to_go() -> None:
    table = table_of_rows()
    table.set_priority(1, 100)
    table.set_priority(LOOK_AHEAD + 5, 1)
    order = ordered(table, list(range(1, 3 * LOOK_AHEAD)))
    assert order.index(LOOK_AHEAD + 5) == 5
    assert order[-1] == 1, "a chunk that everybody passes is the last of those asked for"


@given(st.lists(st.integers(0, 100), min_size=30, max_size=30))
def test_a_chunk_never_goes_before_what_continues_it(priorities: list[int]) -> None:
    table, policy = table_of_rows(), LruEviction()
    parents = {row: row // 2 for row in range(1, 31)}
    for row, parent in parents.items():
        policy.insert(row, parent, 1, 0.0)
        table.set_priority(row, priorities[row - 1])
    order = list(table.in_order(policy.victims(keep_none, 0.0), parents.__getitem__, MANY))
    assert sorted(order) == list(parents)
    for row, parent in parents.items():
        assert parent == NO_ROW or order.index(row) < order.index(parent)


def test_a_life_that_is_prolonged_again_and_again_takes_no_more_room() -> None:
    table = table_of_rows()
    for second in range(20_000):
        table.set_expiry(1 + second % 3, 1.0 + second)
    assert len(table._times) < 2_000
    assert table.expired(1e9, 10) == [3, 1, 2][:3]
    assert table.expiring == 3
