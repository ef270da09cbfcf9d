"""The ChunkIndex: runs of known keys, copies by tier, and rows that are given again."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest
from contracts.chunks import make_info, make_representation
from contracts.policy import digest, info, key
from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW
from kvstore.proto.types import ROOT, Accuracy, ChunkInfo, ChunkKey, KVLayout, Namespace
from kvstore.server.index.chunk_index import MAX_TIERS, ChunkIndex

TIERS = ("cpu", "disk", "redis")


@pytest.fixture
def index() -> ChunkIndex:
    return ChunkIndex(TIERS)


def add(index: ChunkIndex, tier: str, chunk: ChunkInfo) -> int:
    return index.add(tier, [chunk])[0]


def keys_of(index: ChunkIndex, space: Namespace) -> list[ChunkKey]:
    return [ChunkKey(key) for key in index.keys_starting(space).tolist()]


def keys_at(index: ChunkIndex, asked: list[int], least: Accuracy = Accuracy.exact) -> list[object]:
    rows = index.readable(index.prefix([key(number) for number in asked]), least)
    return [index.key(row) for row in rows.tolist()]


def test_an_empty_index_matches_nothing(index: ChunkIndex) -> None:
    assert keys_at(index, [1]) == keys_at(index, []) == []
    assert index.row(key(1)) == NO_ROW
    assert index.copies(NO_ROW) == {}
    assert (len(index), index.row(key(1))) == (0, NO_ROW)


@pytest.mark.parametrize(
    ("known", "asked", "ready"),
    [
        ([0, 1, 2], [0, 1, 2], 3),
        ([2, 0, 1], [0, 1, 2], 3),
        ([0, 1], [0, 1, 2], 2),
        ([0, 2], [0, 1, 2], 1),
        ([1, 2], [0, 1, 2], 0),
        ([0, 1, 2], [1, 2], 2),
        ([0, 1, 2], [1, 1, 0, 1, 2], 5),
        ([0], [], 0),
    ],
)
def test_the_longest_prefix_ends_before_the_first_gap(
    index: ChunkIndex, known: list[int], asked: list[int], ready: int
) -> None:
    for number in known:
        add(index, "cpu", info(number))
    assert keys_at(index, asked) == [key(number) for number in asked[:ready]]


def test_a_parent_that_nobody_put_is_no_chunk(index: ChunkIndex) -> None:
    row = add(index, "cpu", info(1, 0))
    assert index.parents[row] != NO_ROW
    assert index.key(index.parents[row]) == key(0)
    assert (len(index), index.row(key(0)), keys_at(index, [0, 1])) == (1, NO_ROW, [])
    assert not index.discard("cpu", index.parents[row])
    add(index, "cpu", info(0))
    assert keys_at(index, [0, 1]) == [key(0), key(1)]


def test_a_chunk_goes_with_its_last_copy(index: ChunkIndex) -> None:
    row = add(index, "cpu", info(1))
    assert add(index, "disk", info(1, size_bytes=60)) == row
    assert index.copies(row) == {"cpu": info(1), "disk": info(1, size_bytes=60)}
    assert index.discard("cpu", row)
    assert index.holders(row) == ["disk"]
    assert not index.discard("cpu", row)
    assert index.discard("disk", row)
    assert index.row(key(1)) == NO_ROW


def test_a_copy_is_described_as_it_was_told(index: ChunkIndex) -> None:
    told = replace(
        make_info(7, 123),
        parent=digest(3),
        codec_id=9,
        accuracy=Accuracy.approximate,
        prefill_flops=2.5,
    )
    row = add(index, "redis", told)
    assert index.info("redis", row) == told
    first = replace(told, key=key(1), parent=ROOT, accuracy=Accuracy.exact)
    assert index.info("cpu", add(index, "cpu", first)) == first


def test_a_row_that_is_given_again_remembers_nothing(index: ChunkIndex) -> None:
    row = add(index, "disk", replace(info(1), prefill_flops=3.0))
    index.hits[row] = 1
    index.discard("disk", row)
    assert add(index, "cpu", info(2)) == row
    assert (index.hits[row], index.parents[row]) == (0, NO_ROW)
    assert index.copies(row) == {"cpu": info(2)}
    assert keys_at(index, [1]) == []


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [3, 4, 2, 5, 0, 1]])
def test_what_two_chunks_continue_and_all_before_it_is_common_from_then_on(
    index: ChunkIndex, order: list[int]
) -> None:
    """0 - 1 - 2, and behind 1 also 3 - 4; 5 has nothing before or behind it."""
    parents = {0: None, 1: 0, 2: 1, 3: 1, 4: 3, 5: None}
    rows = {number: add(index, "cpu", info(number, parents[number])) for number in order}
    common = [number for number, row in rows.items() if index.is_common(row)]
    assert sorted(common) == [0, 1]
    for number in (2, 3, 4):
        index.discard("cpu", rows[number])
    assert index.is_common(rows[1])
    for number in (1, 0, 5):
        index.discard("cpu", rows[number])
    again = [add(index, "cpu", info(number)) for number in range(10, 16)]
    assert not any(map(index.is_common, again))


def test_the_ends_of_one_prompt_as_it_grows_do_not_make_it_common(index: ChunkIndex) -> None:
    """The prompt's end, shorter than a chunk; longer after an answer; whole after the next."""
    first, second = add(index, "cpu", info(0)), add(index, "cpu", info(1, 0))
    for number, less in ((2, 1), (3, 1), (4, 0)):
        layout = KVLayout.of(make_representation(), info(0).layout.tokens - less)
        row = add(index, "cpu", info(number, 1, layout=layout))
        assert not index.is_common(second)
    index.discard("cpu", row)
    add(index, "cpu", info(4, 1))
    assert not index.is_common(second), "the same chunk came again"
    add(index, "cpu", info(5, 1))
    assert index.is_common(first)
    assert index.is_common(second)


def test_a_chunk_that_names_itself_as_its_parent_goes_whole(index: ChunkIndex) -> None:
    row = add(index, "cpu", info(1, 1))
    assert index.discard("cpu", row)
    assert add(index, "cpu", info(2)) == row


def test_a_copy_that_is_not_near_enough_to_the_original_does_not_count(index: ChunkIndex) -> None:
    add(index, "cpu", info(0))
    add(index, "disk", replace(info(1), accuracy=Accuracy.bounded))
    assert len(keys_at(index, [0, 1])) == 1
    assert len(keys_at(index, [0, 1], Accuracy.bounded)) == 2
    add(index, "cpu", info(1))
    assert len(keys_at(index, [0, 1])) == 2
    held, sizes = index.sizes(
        "disk", index.readable(index.prefix([key(0), key(1)])), Accuracy.bounded
    )
    assert held.tolist() == [False, True]
    assert sizes.tolist()[1] == info(1).size_bytes
    held, _ = index.sizes("disk", index.readable(index.prefix([key(0), key(1)])), Accuracy.exact)
    assert not held.any()


def test_the_chunks_of_a_namespace_are_told_from_others(index: ChunkIndex) -> None:
    other = ChunkKey(b"n" * 16 + digest(5))
    for chunk in (info(2, 1), replace(info(5), key=other), info(0)):
        add(index, "cpu", chunk)
    assert set(keys_of(index, Namespace(bytes(16)))) == {key(0), key(2)}
    assert keys_of(index, Namespace(b"n" * 16)) == [other]


def test_an_index_has_no_more_tiers_than_a_byte_has_bits() -> None:
    ChunkIndex([str(number) for number in range(MAX_TIERS)])
    with pytest.raises(InvalidRequestError, match="tiers"):
        ChunkIndex([str(number) for number in range(MAX_TIERS + 1)])


def test_layouts_of_many_sizes_are_kept_apart(index: ChunkIndex) -> None:
    representation = make_representation(1)
    layouts = [KVLayout.of(representation, 16 + number) for number in range(2000)]
    chunks = [replace(info(number), layout=layout) for number, layout in enumerate(layouts)]
    rows = [add(index, "cpu", chunk) for chunk in chunks]
    assert [index.info("cpu", row) for row in rows] == chunks


def test_memory_is_that_of_the_most_chunks_there_ever_were() -> None:
    index = ChunkIndex(TIERS)

    def come_and_go() -> None:
        for number in range(5_000):
            add(index, "cpu", info(number, number - 1 if number % 10 else None))
            if number >= 50:
                index.discard("cpu", index.row(key(number - 50)))
        for number in range(4_950, 5_000):
            index.discard("cpu", index.row(key(number)))

    come_and_go()
    assert len(index) == 0
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    come_and_go()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 16 << 10


_EVENTS = st.lists(st.tuples(st.booleans(), st.sampled_from(TIERS), st.integers(0, 5)), max_size=60)


@given(_EVENTS, st.lists(st.integers(-1, 5), min_size=6, max_size=6))
def test_any_events_leave_exactly_the_copies_that_were_not_discarded(
    events: list[tuple[bool, str, int]], parents: list[int]
) -> None:
    index = ChunkIndex(TIERS)
    chunks = [info(n, None if parent < 0 else parent) for n, parent in enumerate(parents)]
    model: dict[tuple[str, int], None] = {}
    for adds, tier, number in events:
        row = index.row(key(number))
        if adds:
            row = add(index, tier, chunks[number])
            assert index.info(tier, row) == chunks[number]
            model[tier, number] = None
        elif row:
            assert index.discard(tier, row) == ((tier, number) in model)
            model.pop((tier, number), None)
        else:
            assert not any((name, number) in model for name in TIERS)
    known = {number for _, number in model}
    found = {
        (tier, number)
        for number in known
        for tier, held in index.copies(index.row(key(number))).items()
        if held == chunks[number]
    }
    assert found == set(model)
    assert len(index) == len(known)
    assert set(keys_of(index, Namespace(bytes(16)))) == {key(number) for number in known}
    alone = {n for n in known if ("redis", n) not in model}
    assert set(index.only_on(("cpu", "disk"))) == {key(number) for number in alone}
    run = 0
    while run in known:
        run += 1
    assert len(keys_at(index, list(range(6)))) == run
