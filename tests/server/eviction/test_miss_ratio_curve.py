"""The WhatIf: the curve of hits against size, or that it is not known."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore.cli.simulate.block_replay import BlockReplay
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import ChunkKey
from kvstore.server.eviction import miss_ratio_curve
from kvstore.server.eviction.access_history import History
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.eviction.miss_ratio_curve import LEAST_SAMPLED, SCALES, Ids, WhatIf, identities


def mix(ids: Ids) -> Ids:
    """Return hashes of identities: the finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    mixed = ids + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def chain(start: int, length: int) -> Ids:
    return mix(np.arange(start * 100, start * 100 + length, dtype=np.uint64))


def ratios(curve: WhatIf) -> list[float | None]:
    return [point.hit_ratio for point in curve.curve()]


def test_nothing_is_known_before_enough_was_asked_for() -> None:
    curve = WhatIf(200)
    assert ratios(curve) == [None] * 4
    for start in range(LEAST_SAMPLED // 2 - 1):
        curve.asked(chain(start, 2), 1, 0.0)
    assert ratios(curve) == [None] * 4
    curve.asked(chain(0, 2), 1, 0.0)
    assert ratios(curve) == pytest.approx([0.0, 0.0, 2 / 256, 2 / 256])
    assert [point.scale for point in curve.curve()] == list(SCALES)


def test_a_loop_is_hit_by_caches_that_are_as_large_and_by_no_other() -> None:
    curve = WhatIf(100)
    for turn in range(60):
        curve.asked(chain(turn % 15, 10), 1, float(turn))
    half, same, double, most = ratios(curve)
    assert (half, same) == (0.0, 0.0)
    assert double == most == 0.75


def exact_curve(requests: list[Ids], capacity: int) -> list[float]:
    ratios = []
    for scale in SCALES:
        cache = BlockReplay(LruEviction(), History(), int(scale * capacity))
        for now_s, ids in enumerate(requests):
            cache.request(ids.tolist(), 1, now_s)
        ratios.append(cache.hit_blocks / cache.blocks)
    return ratios


def test_a_small_sample_tells_the_curve_within_three_points() -> None:
    rng = random.Random(3)
    starts = [int(rng.paretovariate(0.8) * 30) % 5000 for _ in range(6000)]
    requests = [chain(start, 12) for start in starts]
    curve = WhatIf(6000, limit_nodes=4096)
    for now_s, ids in enumerate(requests):
        curve.asked(ids, 1, now_s)
    assert curve.rate == 1 / 8
    exact = exact_curve(requests, 6000)
    assert exact[3] - exact[0] > 0.1
    for point, true in zip(curve.curve(), exact, strict=True):
        assert point.hit_ratio == pytest.approx(true, abs=0.03)


def test_a_sample_that_became_empty_says_that_nothing_is_known_or_what_was() -> None:
    curve = WhatIf(1 << 40, limit_nodes=1)
    for start in range(50):
        curve.asked(chain(start, 10), 1, 0.0)
    assert curve.rate < 1 / 64
    for ratio in ratios(curve):
        assert ratio is None or 0.0 <= ratio <= 1.0


def test_old_requests_count_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miss_ratio_curve, "WINDOW_CHUNKS", 100)
    curve = WhatIf(200)
    for start in range(100):
        curve.asked(chain(start, 10), 1, 0.0)
    assert ratios(curve)[1] == 0.0
    for _ in range(100):
        curve.asked(chain(0, 10), 1, 0.0)
    ratio = ratios(curve)[1]
    assert ratio is not None
    assert ratio > 0.95


def test_empty_lookups_and_chunks_of_no_size_do_no_harm() -> None:
    curve = WhatIf(10)
    curve.asked(np.zeros(0, np.uint64), 0, 0.0)
    curve.asked(chain(1, 3), 0, 0.0)
    assert ratios(curve) == [None] * 4
    with pytest.raises(InvalidRequestError, match="capacity_bytes=0"):
        WhatIf(0)


def test_identities_are_of_the_namespace_and_the_chain() -> None:
    keys = [ChunkKey(bytes([a]) * 16 + bytes([b]) * 16) for a, b in ((1, 2), (1, 3), (4, 2))]
    found = identities(keys).tolist()
    assert len(set(found)) == 3
    assert identities(keys[1:]).tolist() == found[1:]
    assert len(identities([])) == 0


@pytest.mark.parametrize("limit_nodes", [4, 64, 1024])
def test_it_remembers_no_more_than_twice_its_limit(limit_nodes: int) -> None:
    curve = WhatIf(500, limit_nodes)
    for now_s in range(400):
        curve.asked(chain(now_s * 7, 30), 1, float(now_s))
        assert len(curve) <= 2 * limit_nodes
    for ratio in ratios(curve):
        assert ratio is None or ratio < 0.1, "nothing came twice"


def test_the_end_of_a_prompt_goes_before_what_begins_it() -> None:
    curve = WhatIf(16)
    for turn in range(60):
        curve.asked(chain(1, 8), 1, 0.0)
        curve.asked(chain(100 + turn, 12), 1, 0.0)
    half, same, double, _ = ratios(curve)
    assert half == 0.0
    assert same == pytest.approx(4 / 20, abs=0.01), "of eight chunks four stay beside twelve others"
    assert double == pytest.approx(8 / 20, abs=0.01)


def test_a_chunk_that_is_asked_for_twice_in_a_prompt_is_counted_once() -> None:
    curve = WhatIf(100)
    for _ in range(100):
        curve.asked(np.concatenate([chain(1, 4), chain(1, 4)]), 1, 0.0)
    assert len(curve) == 4
    for ratio in ratios(curve):
        assert ratio is not None
        assert ratio > 0.9
