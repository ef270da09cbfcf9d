from __future__ import annotations

from contracts.chunks import make_info

from kvstore.proto.types import ChunkKey
from kvstore.server.tiering.admission import PromoteOnSecondHit


def key(seed: int) -> ChunkKey:
    return make_info(seed, 1).key


def test_a_chunk_is_due_at_its_second_read_and_then_every_other() -> None:
    reads = PromoteOnSecondHit(10)
    assert [reads.is_due(key(1)) for _ in range(5)] == [False, True, False, True, False]


def test_chunks_do_not_count_for_each_other() -> None:
    reads = PromoteOnSecondHit(10)
    assert [reads.is_due(key(seed)) for seed in (1, 2, 3, 2)] == [False, False, False, True]


def test_what_was_read_too_long_ago_is_forgotten() -> None:
    reads = PromoteOnSecondHit(3)
    for seed in range(4):
        assert not reads.is_due(key(seed))
    assert len(reads._once) == 3
    assert not reads.is_due(key(0)), "the first of four was forgotten"
    assert reads.is_due(key(3))


def test_no_more_is_remembered_than_the_limit() -> None:
    reads = PromoteOnSecondHit(5)
    for seed in range(50):
        reads.is_due(key(seed))
    assert len(reads._once) == 5
