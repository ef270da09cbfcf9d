"""Shadows: exact while everything is sampled, close when little is, and bounded always."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.policy.history import History
from kvstore.server.policy.lru import LruEviction
from kvstore.server.policy.registry import make_policy
from kvstore.server.policy.shadow import Asked, Cast, ShadowSet, mix


def asked(*ids: int, now_s: float = 0.0, above: int | None = None) -> Asked:
    return Asked(ids, [1] * len(ids), now_s, above)


def one_lru(limit_nodes: int = 1 << 20) -> ShadowSet:
    return ShadowSet([Cast(LruEviction())], None, limit_nodes)


def prompts(seed: int, count: int) -> Iterator[list[int]]:
    """Chains of a tree of 40 conversations, each prompt one or two chunks longer than before."""
    rng = random.Random(seed)
    chains = [[session * 1000] for session in range(40)]
    for _ in range(count):
        chain = chains[min(int(rng.expovariate(0.1)), 39)]
        for _ in range(rng.randrange(1, 3)):
            if len(chain) < 30:
                chain.append(chain[-1] + 1)
        yield chain.copy()


class PlainLru:
    """Chunks by last use, the end of a prompt before what begins it: leaf-LRU by definition."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.order: dict[int, None] = {}

    def request(self, chain: list[int]) -> int:
        hits = next((at for at, one in enumerate(chain) if one not in self.order), len(chain))
        for one in reversed(chain):
            self.order.pop(one, None)
            self.order[one] = None
        while len(self.order) > self.capacity:
            del self.order[next(iter(self.order))]
        return hits


@pytest.mark.parametrize("capacity", [50, 200, 700])
def test_a_shadow_of_everything_hits_what_the_cache_itself_would(capacity: int) -> None:
    shadows, plain = one_lru(), PlainLru(capacity)
    for chain in prompts(1, 1500):
        assert shadows.request(asked(*chain), capacity) == [plain.request(chain)]
    assert shadows.rate == 1.0
    assert shadows.used_bytes() == [len(plain.order)]


def test_the_sample_is_thinned_before_a_shadow_holds_more_than_its_limit() -> None:
    shadows = one_lru(64)
    for chain in prompts(2, 800):
        ids = np.array(chain, np.uint64)
        sampled = ids[shadows.sampled(ids)].tolist()
        shadows.request(asked(*sampled), 500)
        assert shadows.used_bytes()[0] <= 64
    assert shadows.rate in (1 / 8, 1 / 16)
    ids = np.arange(1 << 14, dtype=np.uint64)
    share = shadows.sampled(ids).mean()
    assert abs(share - shadows.rate) < 0.02


def test_a_thinner_sample_is_part_of_the_thicker_one() -> None:
    thick, thin = one_lru(), one_lru(4)
    thin.request(asked(*range(100)), 1000)
    ids = np.arange(1000, dtype=np.uint64)
    assert not (thin.sampled(ids) & ~thick.sampled(ids)).any()
    assert thin.rate < 0.1


def test_hashes_are_those_of_splitmix64() -> None:
    assert mix(np.array([0], np.uint64)).tolist() == [0xE220A8397B1DCDAF]


def test_a_sample_of_a_sixteenth_is_within_three_points_of_all_of_it() -> None:
    exact, small = one_lru(), one_lru(128)
    counts = [0.0, 0.0, 0.0, 0.0]
    rng = random.Random(5)
    for turn in range(12_000):
        start = int(rng.paretovariate(0.7) * 40) % 9000
        chain = [start * 8 + at for at in range(8)]
        ids = np.array(chain, np.uint64)
        sampled = ids[small.sampled(ids)].tolist()
        found = small.request(asked(*sampled, now_s=turn), 4_000)[0] if sampled else 0
        hits = exact.request(asked(*chain, now_s=turn), 4_000)[0]
        if turn > 2_000:
            counts = [
                counts[0] + hits, counts[1] + 8, counts[2] + found, counts[3] + len(sampled),
            ]  # fmt: skip
    assert small.rate <= 1 / 16
    assert 0.2 < counts[0] / counts[1] < 0.8
    assert abs(counts[0] / counts[1] - counts[2] / counts[3]) < 0.03


def test_shadows_of_other_sizes_hit_as_caches_of_those_sizes() -> None:
    scales = (0.5, 1.0, 4.0)
    shadows = ShadowSet([Cast(LruEviction(), scale) for scale in scales])
    plain = [PlainLru(int(100 * scale)) for scale in scales]
    for chain in prompts(3, 1000):
        assert shadows.request(asked(*chain), 100) == [one.request(chain) for one in plain]


def test_sizes_count_in_bytes_and_what_cannot_fit_is_not_admitted() -> None:
    shadows = one_lru()
    assert shadows.request(Asked([1, 2, 3], [40, 40, 40], 0.0), 100) == [0]
    assert shadows.used_bytes() == [80]
    assert shadows.request(Asked([1, 2, 3], [40, 40, 40], 0.0), 100) == [2]
    assert shadows.request(Asked([9], [101], 0.0), 100) == [0]
    assert shadows.request(asked(9), 100) == [0]


def test_a_chunk_continues_the_one_that_is_named_above_it() -> None:
    shadows = one_lru()
    shadows.request(asked(1), 2)
    shadows.request(asked(2, above=1), 2)
    shadows.request(asked(7), 2)
    assert shadows.request(asked(1), 2) == [1], "what continues a chunk goes before it"
    assert shadows.request(asked(2, above=1), 2) == [0]


def test_rows_are_given_back_with_the_chunks() -> None:
    shadows = one_lru(64)
    for chain in prompts(4, 600):
        shadows.request(asked(*chain), 60)
        assert len(shadows) <= 60 + 64 + 30, "what is here, ghosts, and what begins them"
    shadows.clear()
    assert len(shadows) == 0
    assert shadows.used_bytes() == [0]


def test_a_chunk_that_comes_back_soon_has_its_row_still() -> None:
    shadows = one_lru()
    shadows.request(asked(1, 2), 2)
    row = shadows.row(2)
    shadows.request(asked(7, 8), 2)
    assert shadows.row(2) == row
    assert shadows.request(asked(1, 2), 2) == [0]
    assert shadows.row(2) == row


def test_a_prompt_that_goes_on_does_not_push_itself_out() -> None:
    shadows = ShadowSet([Cast(make_policy("lfu", History()))])
    for _ in range(3):
        shadows.request(asked(9), 3)
    shadows.request(asked(1, 2), 3)
    shadows.request(asked(3, above=2), 3)
    assert shadows.request(asked(1, 2), 3) == [2], "the one to go was 9, often as it was used"


def test_what_is_forgotten_is_a_miss_and_comes_again() -> None:
    shadows = one_lru()
    shadows.request(asked(1, 2, 3), 10)
    shadows.forget(2)
    shadows.forget(77)
    assert shadows.request(asked(1, 2, 3), 10) == [1]
    assert shadows.request(asked(1, 2, 3), 10) == [3]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=6), max_size=60),
    st.integers(1, 20),
    st.integers(1, 12),
)
def test_any_chains_keep_the_books_straight(
    chains: list[list[int]], capacity: int, limit: int
) -> None:
    """Chunks that are in a request twice, or under other parents each time, as liars send them."""
    shadows = ShadowSet([Cast(LruEviction()), Cast(LruEviction(), 2.0)], None, limit)
    for now_s, chain in enumerate(chains):
        hits = shadows.request(asked(*chain, now_s=now_s), capacity)
        assert all(0 <= one <= len(set(chain)) for one in hits)
        used = shadows.used_bytes()
        assert used[0] <= min(capacity, limit)
        assert used[1] <= min(2 * capacity, limit)
    shadows.clear()
    assert (len(shadows), shadows.used_bytes()) == (0, [0, 0])


def test_the_same_requests_give_the_same_hits() -> None:
    runs = []
    for _ in range(2):
        shadows = one_lru(40)
        runs.append([shadows.request(asked(*chain), 200) for chain in prompts(8, 300)])
    assert runs[0] == runs[1]


def test_a_set_has_shadows_of_a_positive_size() -> None:
    for casts in ([], [Cast(LruEviction(), 0.0)]):
        with pytest.raises(InvalidRequestError):
            ShadowSet(casts)


def test_a_set_says_what_each_shadow_holds_and_would_evict() -> None:
    shadows = ShadowSet([Cast(LruEviction()), Cast(LruEviction(), 2.0)])
    for one in (1, 2, 3, 4, 5):
        shadows.request(asked(one), 2)
    assert [one for one in range(1, 7) if shadows.holds(0, one)] == [4, 5]
    assert [one for one in range(1, 7) if shadows.holds(1, one)] == [2, 3, 4, 5]
    assert (shadows.count_only(1, 0), shadows.count_only(0, 1)) == (2, 0)
    assert shadows.left == [[3], [1]]
    assert list(shadows.victims(1, lambda one: one == 3, 9.0)) == [2, 4, 5]
    assert [one for one in range(1, 7) if shadows.holds(1, one)] == [2, 3, 4, 5]
