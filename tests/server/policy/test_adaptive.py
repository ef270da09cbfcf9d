"""The adaptive policy: whom it follows, on what evidence, and that it costs little."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from itertools import islice

import numpy as np
import pytest
from contracts.policy import NODE_BYTES, PolicyContract, everyone, keep_none
from typing_extensions import override

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW
from kvstore.server.policy.adaptive import AdaptiveEviction
from kvstore.server.policy.history import NO_FACTS, Facts, History
from kvstore.server.policy.mirror import Mirror
from kvstore.server.policy.registry import UNGUARDED, make_policy
from kvstore.server.policy.replay import BlockReplay
from kvstore.server.policy.shadow import ShadowSet


class TestAdaptiveContract(PolicyContract):
    @override
    def make_pair(self) -> tuple[AdaptiveEviction, History]:
        history = History()
        return AdaptiveEviction(history, limit_nodes=8), history

    @override
    def test_a_chunk_takes_no_more_than_its_bytes(self) -> None:
        """Shadows take what they do, however many chunks there are: so of many chunks here."""
        count = 100_000
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            history = History()
            policy = AdaptiveEviction(history)
            for start in range(1, count, 10):
                rows = np.arange(start, start + 10)
                history.seen_chain(rows, NO_ROW, Facts(), float(start))
                policy.insert_chain(rows, NO_ROW, 1 << 20, float(start))
                history.asked(rows, 10, start + 1.0)
                policy.touch(rows, start + 1.0)
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert len(policy) == count
        assert grown < NODE_BYTES * count


def hot_set_and_scan(turns: int) -> Iterable[list[int]]:
    """Ten blocks, each twice in a row, and so many new ones that LRU hits only the second."""
    new = 1000
    for turn in range(turns):
        yield [turn % 10]
        yield [turn % 10]
        for _ in range(3):
            yield [new]
            new += 1


def moving_window(turns: int) -> Iterable[list[int]]:
    """Blocks that come thrice close together, and never again."""
    for turn in range(turns):
        yield [500_000 + turn]
        if turn > 8:
            yield [500_000 + turn - 4]
            yield [500_000 + turn - 8]


def replay(
    policy: str | AdaptiveEviction, history: History, prompts: Iterable[list[int]], capacity: int
) -> int:
    made = make_policy(policy, history) if isinstance(policy, str) else policy
    cache = BlockReplay(made, history, capacity)
    return sum(cache.request(chain, 1, float(at)) for at, chain in enumerate(prompts))


def test_it_starts_with_the_first_and_says_that_nothing_is_known() -> None:
    why = AdaptiveEviction(History()).why()
    assert (why.policy, why.switches, why.sampled, why.sample_rate) == ("hit_density", 0, 0, 1.0)
    assert why.hit_ratios == dict.fromkeys(("hit_density", UNGUARDED, "lru", "s3fifo", "lfu"))


@pytest.mark.parametrize("limit_nodes", [1 << 13, 16])
def test_it_follows_the_policy_that_hits_more_and_hits_as_much(limit_nodes: int) -> None:
    prompts = list(hot_set_and_scan(3000))
    alone = {name: replay(name, History(), prompts, 20) for name in ("lru", "lfu")}
    assert alone["lfu"] > 5900 > 3010 > alone["lru"]
    history = History()
    policy = AdaptiveEviction(history, ("lru", "lfu"), limit_nodes)
    hits = replay(policy, history, prompts, 20)
    why = policy.why()
    assert (why.policy, why.switches) == ("lfu", 1)
    assert 0 < why.since_s < 0.7 * len(prompts)
    lfu, lru = why.hit_ratios["lfu"], why.hit_ratios["lru"]
    assert lfu is not None
    assert lru is not None
    assert lfu > lru + 0.1
    assert hits > 0.7 * alone["lru"] + 0.3 * alone["lfu"]


def test_it_goes_back_when_times_change() -> None:
    history = History()
    policy = AdaptiveEviction(history, ("lru", "lfu"))
    cache = BlockReplay(policy, history, 20)
    for at, chain in enumerate([*hot_set_and_scan(600), *moving_window(3_000)]):
        cache.request(chain, 1, float(at))
    assert (policy.why().policy, policy.why().switches) == ("lru", 2)


def test_candidates_that_do_the_same_are_never_switched() -> None:
    history = History()
    policy = AdaptiveEviction(history, ("lru", "lru"))
    replay(policy, history, hot_set_and_scan(1000), 20)
    assert (policy.why().switches, policy.why().since_s) == (0, 0.0)


def test_its_shadows_hit_what_their_policies_hit_alone() -> None:
    """Everything is sampled, so the shadow of each candidate is the cache with that policy."""
    prompts = [[a, 10 + b % 7, 100 + b] for a in (1, 2, 3) for b in range(400)]
    history = History()
    policy = AdaptiveEviction(history, ("lru", "s3fifo"))
    # It looks full when a victim is first asked for, one prompt late: fill it with one to spare.
    replay(policy, history, prompts, 60)
    for name in ("lru", "s3fifo"):
        alone = replay(name, History(), prompts, 60) / (3 * len(prompts))
        assert policy.why().hit_ratios[name] == pytest.approx(alone, abs=0.02)


def test_after_a_switch_it_holds_what_the_policy_would_hold_alone() -> None:
    prompts = list(hot_set_and_scan(2000))
    history = History()
    policy = AdaptiveEviction(history, ("lru", "lfu"))
    cache = BlockReplay(policy, history, 20)
    for at, chain in enumerate(prompts):
        cache.request(chain, 1, float(at))
    shadows = policy._shadows
    here = set(everyone(policy))
    assert (policy.why().policy, policy.why().switches, len(here)) == ("lfu", 1, 20)
    assert {row for row in here if shadows.holds(1, row)} == here
    assert not all(shadows.holds(0, row) for row in here)


def test_a_small_cache_is_shared_out_while_the_hits_are_near_one_another() -> None:
    for names, owners in ((("lru", "lru"), [0] * 8 + [1] * 8), (("lru", "lfu"), [1] * 16)):
        history = History()
        policy = AdaptiveEviction(history, names)
        replay(policy, history, hot_set_and_scan(1000), 20)
        assert policy._owners == owners


def test_chunks_stored_one_after_the_other_are_in_one_share_and_the_next_in_another() -> None:
    policy = AdaptiveEviction(History(), ("lru", "lfu"))
    policy.insert_chain(np.arange(1, 40), NO_ROW, 1, 1.0)
    policy.insert(40, 39, 1, 1.0)
    policy.insert_chain(np.arange(41, 60), 3, 1, 1.0)
    assert len(set(policy._shares[1:41])) == len(set(policy._shares[41:60])) == 1
    assert policy._shares[40] != policy._shares[41]


def test_what_the_owner_of_a_share_would_not_have_goes_first() -> None:
    history = History()
    policy = AdaptiveEviction(history, ("lru", "lfu"))
    replay(policy, history, hot_set_and_scan(400), 20)
    policy._owners = [0] * 16
    policy._find_strays()
    strays = {row for row in everyone(policy) if not policy._shadows.holds(0, row)}
    assert policy._strays == strays
    assert strays
    named = list(islice(policy.victims(keep_none, 1e4), len(strays)))
    assert set(named) == strays


@pytest.mark.parametrize(("chunks", "switches"), [(10, 1), (1_000_000, 0)])
def test_a_switch_that_costs_more_than_it_gains_is_not_made(
    monkeypatch: pytest.MonkeyPatch, chunks: int, switches: int
) -> None:
    monkeypatch.setattr(ShadowSet, "count_only", lambda *_: chunks)
    monkeypatch.setattr("kvstore.server.policy.adaptive._MUCH_MORE", 1e9)
    history = History()
    policy = AdaptiveEviction(history, ("lru", "lfu"))
    replay(policy, history, hot_set_and_scan(1000), 20)
    assert policy.why().switches == switches


def test_the_same_events_give_the_same_choice_and_the_same_victims() -> None:
    results = []
    for _ in range(2):
        history = History()
        policy = AdaptiveEviction(history, ("lru", "lfu"), 16)
        hits = replay(policy, history, hot_set_and_scan(600), 20)
        results.append((hits, policy.why(), everyone(policy)))
    assert results[0] == results[1]


def test_a_chunk_that_was_looked_up_on_another_tier_is_counted_once() -> None:
    history = History()
    policy = AdaptiveEviction(history)
    policy.insert(1, NO_ROW, 10, 0.0)
    policy.remove(1)
    policy.touch(np.array([1]), 1.0)
    policy.insert(1, NO_ROW, 10, 1.0)
    assert policy.why().sampled == 2
    policy.insert(1, NO_ROW, 10, 1.0)
    assert policy.why().sampled == 2, "a chunk that is here already was not asked for by a put"


def test_a_row_that_became_another_chunks_is_not_taken_for_a_hit() -> None:
    history = History()
    policy = AdaptiveEviction(history, ("lru",))
    history.seen(1, NO_ROW, NO_FACTS, 0.0)
    policy.insert(1, NO_ROW, 10, 0.0)
    policy.remove(1)
    history.forget(1)
    history.seen(1, NO_ROW, NO_FACTS, 5.0)
    policy.insert(1, NO_ROW, 10, 5.0)
    assert policy.why().hit_ratios["lru"] == 0.0
    policy.remove(1)
    history.asked(np.array([1]), 1, 6.0)
    policy.insert(1, NO_ROW, 10, 6.0)
    assert policy.why().hit_ratios["lru"] == pytest.approx(1 / 3)


def test_hints_reach_the_shadows() -> None:
    history = History()
    policy = AdaptiveEviction(history)
    history.seen(1, NO_ROW, NO_FACTS, 0.0)
    policy.insert(1, NO_ROW, 10, 0.0)
    mirror = policy._mirror
    row = policy._shadows.row(1)
    before = mirror.classes[row]
    history.hint(np.array([1]), 1)
    assert mirror.classes[row] == history.classes[1] != before


def test_it_names_the_victims_of_the_one_it_follows() -> None:
    history = History()
    policy = AdaptiveEviction(history, ("lfu", "lru"))
    alone = make_policy("lfu", history)
    for made in (policy, alone):
        for row in (1, 2, 3):
            made.insert(row, NO_ROW, 1, 0.0)
        made.touch(np.array([1]), 1.0)
    assert list(policy.victims(keep_none, 2.0)) == list(alone.victims(keep_none, 2.0)) == [2, 3, 1]


def test_it_names_victims_by_hit_density_where_the_guard_would_not() -> None:
    history = History()
    policy = AdaptiveEviction(history, ("hit_density", UNGUARDED))
    for row in (1, 2):
        history.seen(row, NO_ROW, NO_FACTS, float(row))
        policy.insert(row, NO_ROW, 1, float(row))
    history.asked(np.array([1]), 1, 3.0)
    policy.touch(np.array([1]), 3.0)
    for row, promise in ((1, 0.001), (2, 0.5)):
        history.table.values[history.class_of(row)] = promise
    history.table.version += 1
    assert policy._density is not None
    policy._density._guard.is_warm = True
    assert list(policy._victims_of(0, keep_none, 4.0)) == [2, 1]
    assert list(policy._victims_of(1, keep_none, 4.0)) == [1, 2]


def test_a_guard_that_holds_to_lru_for_long_does_not_hold_it_back() -> None:
    """LRU hits nothing here: the guard of hit density prefers it all the same, once behind."""
    history = History()
    policy = AdaptiveEviction(history)
    cache = BlockReplay(policy, history, 20)
    guards = [one.policy._guard for one in policy._shadows._shadows[:2]]  # type: ignore[attr-defined]
    for at, chain in enumerate(hot_set_and_scan(3000)):
        guards[0]._behind = 1e9
        cache.request(chain, 1, float(at))
    assert guards[0].prefers_lru
    assert not guards[1].prefers_lru
    unguarded, guarded = (policy.why().hit_ratios[name] for name in (UNGUARDED, "hit_density"))
    assert unguarded is not None
    assert guarded is not None
    assert unguarded > guarded + 0.1
    assert policy._hedge.weights[1] > policy._hedge.weights[0]


@pytest.mark.parametrize("names", [(), ("adaptive",), ("lru", "adaptive"), ("best",)])
def test_candidates_have_to_be_policies_that_stand_alone(names: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequestError):
        AdaptiveEviction(History(), names)


def test_a_mirror_keeps_the_clock_and_the_classes_of_what_it_mirrors() -> None:
    history = History()
    mirror = Mirror(history)
    history.seen(5, NO_ROW, Facts(tokens_full=False, flops=7.0), 3.0)
    mirror.copy(5, 1)
    assert (mirror.last_s[1], mirror.classes[1], mirror.flops[1]) == (3.0, history.classes[5], 7.0)
    assert mirror.is_partial(1)
    assert mirror.time_s(1.0) == history.time_s(1.0) == 3.0
    mirror.copy(10_000, 2)
    assert not mirror.knows(2)
