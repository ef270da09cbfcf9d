"""BlockReplay: what it counts as a hit, what it may hold and what it remembers."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore.cli.simulate import BlockReplay
from kvstore.proto.errors import InvalidRequestError
from kvstore.server.eviction.access_history import NO_INFO, AccessHistory, InsertInfo
from kvstore.server.eviction.policy import make_policy

Trace = list[tuple[list[int], float]]


def make(name: str, capacity_bytes: int, min_rows: int = 1 << 18) -> BlockReplay:
    history = AccessHistory(512)
    return BlockReplay(make_policy(name, history), history, capacity_bytes, min_rows=min_rows)


def tree_trace(seed: int, requests: int = 400) -> Trace:
    """Prompts that branch off earlier ones; each block has one parent."""
    draw, trace, fresh = random.Random(seed), [([1], 0.0)], 2
    for step in range(1, requests):
        base = draw.choice(trace[-40:])[0]
        kept = base[: draw.randrange(1, len(base) + 1)][:20]
        new = draw.randrange(6)
        trace.append(([*kept, *range(fresh, fresh + new)], float(draw.randrange(step))))
        fresh += new
    return sorted(trace, key=lambda one: one[1])


def hits(replay: BlockReplay, trace: Trace, size_bytes: int = 10) -> list[int]:
    return [replay.request(blocks, size_bytes, now_s) for blocks, now_s in trace]


def test_a_hit_is_the_longest_prefix_that_is_here() -> None:
    replay = make("lru", 100)
    assert replay.request([1, 2, 3], 10, 0.0) == 0
    assert replay.request([1, 2, 4], 10, 1.0) == 2
    assert replay.request([5, 2, 3], 10, 2.0) == 0
    assert replay.request([1, 2, 3, 9], 10, 3.0) == 3
    assert (replay.blocks, replay.hit_blocks) == (13, 5)


def test_a_prompt_does_not_evict_its_own_blocks() -> None:
    replay = make("lru", 40)
    replay.request([1, 2, 3, 4], 10, 0.0)
    assert replay.request([1, 2, 5, 6, 7, 8], 10, 1.0) == 2
    assert replay.request([1, 2, 5, 6, 7, 8], 10, 2.0) == 4
    assert replay.used_bytes == 40


def test_a_block_larger_than_the_tier_is_looked_up_and_not_stored() -> None:
    replay = make("hit_density", 99)
    replay.request([1], 50, 0.0)
    assert replay.request([2], 100, 1.0) == 0
    assert replay.request([2], 100, 2.0) == 0
    assert replay.request([1], 50, 3.0) == 1
    assert replay.used_bytes == 50


def test_a_tier_of_no_bytes_hits_nothing() -> None:
    assert sum(hits(make("hit_density", 0), tree_trace(1))) == 0


def plain_lru(trace: Trace, places: int) -> list[int]:
    """A leaf-LRU over a tree is an LRU whose prompts are used from the end to the beginning."""
    here: dict[int, None] = {}
    found = []
    for blocks, _ in trace:
        hit = next((at for at, block in enumerate(blocks) if block not in here), len(blocks))
        found.append(hit)
        for block in blocks[:places][::-1]:
            here.pop(block, None)
            here[block] = None
        while len(here) > places:
            del here[next(iter(here))]
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("places", [21, 60, 200])
def test_lru_hits_what_a_list_in_order_of_use_hits(seed: int, places: int) -> None:
    trace = [(list(dict.fromkeys(blocks)), now_s) for blocks, now_s in tree_trace(seed)]
    assert hits(make("lru", 10 * places), trace) == plain_lru(trace, places)


@pytest.mark.parametrize("name", ["lru", "hit_density"])
def test_the_same_trace_hits_the_same_and_bytes_add_up_after_every_request(name: str) -> None:
    def run() -> list[tuple[int, int, int]]:
        draw, replay, out = random.Random(7), make(name, 1_000), []
        for blocks, now_s in tree_trace(2):
            size_bytes = draw.choice((10, 25, 60))
            facts = InsertInfo(tokens_full=draw.random() < 0.5, reuse=draw.randrange(3))
            hit = replay.request(blocks, size_bytes, now_s, facts)
            assert sum(replay._sizes) == replay.used_bytes <= 1_000
            out.append((hit, replay.used_bytes, replay.evictions))
        return out

    assert run() == run()


@pytest.mark.parametrize("name", ["lru", "hit_density"])
def test_what_is_remembered_is_bounded_and_the_oldest_goes_first(name: str) -> None:
    replay = make(name, 200, min_rows=100)
    for step in range(500):
        replay.request([1, 10 * step + 2, 10 * step + 3], 10, float(step))
        assert len(replay) <= 110
    assert replay.request([1, 4992, 4993], 10, 500.0) == 3
    assert replay.request([1, 12, 13], 10, 501.0) == 1


def test_a_tier_that_holds_many_remembers_twice_as_many() -> None:
    replay = make("lru", 4_000, min_rows=100)
    for step in range(300):
        replay.request([3 * step, 3 * step + 1, 3 * step + 2], 10, float(step))
    assert 400 < len(replay) <= 803


def test_forgetting_does_not_change_what_lru_hits() -> None:
    trace = tree_trace(3, 2_000)
    assert hits(make("lru", 500, min_rows=60), trace) == hits(make("lru", 500), trace)


@pytest.mark.parametrize("name", ["lru", "hit_density"])
def test_blocks_that_come_twice_or_under_other_parents_lose_no_bytes(name: str) -> None:
    draw, replay = random.Random(4), make(name, 300, min_rows=40)
    for step in range(600):
        blocks = [draw.randrange(60) for _ in range(draw.randrange(12))]
        hit = replay.request(blocks, 10, float(step))
        assert 0 <= hit <= len(blocks)
        assert sum(replay._sizes) == replay.used_bytes <= 300


def test_hints_and_times_of_any_kind_leave_the_accounting_whole() -> None:
    draw, replay = random.Random(9), make("hit_density", 200)
    times = [0.0, 1e12, -1e12, 5.0, 5.0]
    for blocks, _ in tree_trace(6):
        replay.request(blocks, 10, draw.choice(times), InsertInfo(reuse=draw.randrange(3)))
        assert sum(replay._sizes) == replay.used_bytes <= 200


def test_learning_beats_lru_where_some_prompts_come_back_and_most_never_do() -> None:
    def rate(name: str) -> float:
        draw, replay = random.Random(1), make(name, 2_000)
        for step in range(3_000):
            if draw.random() < 0.3:
                chat = draw.randrange(12)
                blocks = [1000 * chat + at for at in range(6)]
            else:
                blocks = [10**6 + 100 * step + at for at in range(20)]
            replay.request(blocks, 10, float(step))
        return replay.hit_blocks / replay.blocks

    assert rate("hit_density") > rate("lru") + 0.03


def test_flops_given_with_a_prompt_are_remembered() -> None:
    history = AccessHistory()
    replay = BlockReplay(make_policy("marconi", history), history, 100)
    replay.request([7, 8], 10, 0.0, NO_INFO, np.array([3.0, 4.0]))
    assert [history.flops_of(row) for row in (1, 2)] == [3.0, 4.0]


def test_a_capacity_or_a_size_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="capacity_bytes"):
        make("lru", -1)
    with pytest.raises(InvalidRequestError, match="block_bytes"):
        make("lru", 10).request([1], 0, 0.0)


def test_what_leaf_lru_hits_and_evicts_in_a_trace_of_300_prompts_stays_what_it_was() -> None:
    draw, replay = random.Random(5), make("lru", 4_000)
    for step in range(300):
        chat = int(draw.random() ** 2 * 40)
        length = 1 + int(draw.random() * 60)
        blocks = [1000 * chat + at for at in range(length)]
        if draw.random() < 0.4:
            blocks = [10**6 + 100 * step + at for at in range(length)]
        replay.request(blocks, 10, float(step))
    assert (replay.hit_blocks, replay.evictions) == (927, 7732)
