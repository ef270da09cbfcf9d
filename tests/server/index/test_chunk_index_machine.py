"""The ChunkIndex against a dictionary, whatever happens: copies, ghosts, state checkpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest
from contracts.policy import digest, info, key
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvstore.proto.key_table import NO_ROW
from kvstore.proto.types import (
    Accuracy,
    ChunkKey,
    Component,
    DType,
    KVLayout,
    LayerKind,
    Namespace,
)
from kvstore.server.eviction.policy import Rows
from kvstore.server.index.chunk_index import MAX_CHECKPOINT_SPACES, ChunkIndex, ResumeRequirements

TIERS = ("cpu", "disk")
CHUNKS = 8
GHOSTS = 3
HYBRID = Namespace(b"h" * 16)
PLAIN = Namespace(bytes(16))

_ATTENTION = Component(LayerKind.attention, DType.bfloat16, 2, 1, 8, 16)
_STATE = Component(LayerKind.state, DType.float32, 2, 1, 8, 1)
_WINDOW = Component(LayerKind.window, DType.bfloat16, 2, 1, 8, 16)

numbers = st.integers(0, CHUNKS - 1)
tiers = st.sampled_from(TIERS)


def layout(*, has_state: bool) -> KVLayout:
    return KVLayout((_ATTENTION, _STATE) if has_state else (_ATTENTION,))


class RadixMachine(RuleBasedStateMachine):
    """Chains of two namespaces: the chunks of one have states here and there."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten: list[int] = []
        self.index = ChunkIndex(TIERS, GHOSTS, self.forget)
        self.index.need(HYBRID, ResumeRequirements(state=True))
        self.copies: dict[ChunkKey, dict[str, bool]] = {}
        """By chunk, the tiers with a copy, and whether its layout has a state."""
        self.ghosts: list[ChunkKey] = []
        self.rows: dict[ChunkKey, int] = {}

    def forget(self, rows: Rows) -> None:
        self.forgotten += rows.tolist()

    def key(self, space: Namespace, number: int) -> ChunkKey:
        return ChunkKey(space + digest(number))

    def keys(self, space: Namespace) -> list[ChunkKey]:
        return [self.key(space, number) for number in range(CHUNKS)]

    @rule(
        space=st.sampled_from((PLAIN, HYBRID)), number=numbers, tier=tiers, has_state=st.booleans()
    )
    def add(self, space: Namespace, number: int, tier: str, has_state: bool) -> None:
        name = self.key(space, number)
        has_state &= space == HYBRID
        there = self.copies.setdefault(name, {})
        # What a chunk has is said by its first copy.
        has_state = next(iter(there.values()), has_state)
        there[tier] = has_state
        chunk = replace(
            info(number, number - 1 if number else None), key=name,
            layout=layout(has_state=has_state),
        )  # fmt: skip
        (row,) = self.index.add(tier, [chunk])
        if name in self.ghosts:
            self.ghosts.remove(name)
        assert self.rows.setdefault(name, row) == row, "a known chunk keeps its row"

    @rule(space=st.sampled_from((PLAIN, HYBRID)), number=numbers, tier=tiers)
    def discard(self, space: Namespace, number: int, tier: str) -> None:
        name = self.key(space, number)
        row = self.index.row(name)
        there = self.copies.get(name, {})
        assert (row != NO_ROW) == bool(there)
        if not row:
            return
        assert self.index.discard(tier, row) == (tier in there)
        if there.pop(tier, None) is None or there:
            return
        del self.copies[name]
        self.ghosts.append(name)
        self.trim()

    @rule(number=numbers)
    def remember(self, number: int) -> None:
        """As a file of an earlier run would have it."""
        name = self.key(PLAIN, number)
        is_new = name not in self.copies and name not in self.ghosts
        fits = len(self.ghosts) < max(GHOSTS, 2 * len(self.copies))
        row = self.index.add_evicted(name)
        assert (row != NO_ROW) == (is_new and fits)
        if row:
            self.ghosts.append(name)
            self.rows[name] = row

    def trim(self) -> None:
        if len(self.ghosts) > max(GHOSTS, 2 * len(self.copies)):
            name = self.ghosts.pop(0)
            assert self.forgotten.pop(0) == self.rows.pop(name)

    @invariant()
    def the_index_is_the_dictionary(self) -> None:
        index = self.index
        assert not self.forgotten, "only ghosts over the limit are forgotten"
        assert len(index) == len(self.copies)
        assert len(index.evicted) == len(self.ghosts)
        known = [index.key(row) for row in index.known_rows()]
        assert known[: len(self.ghosts)] == self.ghosts
        assert set(known[len(self.ghosts) :]) == set(self.copies)
        for name, there in self.copies.items():
            assert set(index.holders(index.row(name))) == set(there)
            assert not index.is_evicted(name)
        for name in self.ghosts:
            assert index.row(name) == NO_ROW
            assert index.is_evicted(name)

    @invariant()
    def prefixes_end_where_the_dictionary_says(self) -> None:
        for space in (PLAIN, HYBRID):
            keys = self.keys(space)
            known = here = usable = 0
            while known < CHUNKS and (keys[known] in self.copies or keys[known] in self.ghosts):
                known += 1
            while here < CHUNKS and keys[here] in self.copies:
                here += 1
                if space == PLAIN or any(self.copies[keys[here - 1]].values()):
                    usable = here
            rows = self.index.known_prefix(keys)
            assert [self.index.key(row) for row in rows.tolist()] == keys[:known]
            assert len(self.index.readable(self.index.prefix(keys))) == usable
            assert len(self.index.readable(rows)) == usable


def test_any_events_leave_the_index_what_the_dictionary_is() -> None:
    run_state_machine_as_test(
        RadixMachine,
        settings=settings(max_examples=150, stateful_step_count=50, deadline=None),
    )


def test_a_ghost_keeps_its_row_and_is_no_hit() -> None:
    index = ChunkIndex(TIERS, 10)
    (row,) = index.add("cpu", [info(1)])
    index.discard("cpu", row)
    assert index.is_evicted(key(1))
    assert index.known_prefix([key(1)]).tolist() == [row]
    assert len(index.readable(index.prefix([key(1)]))) == 0
    assert index.row(key(1)) == NO_ROW
    assert index.add("disk", [info(1)]) == [row]
    assert len(index.evicted) == 0


def test_the_oldest_ghosts_are_forgotten_together_and_told_of_before_their_rows_are_reused() -> (
    None
):
    told: list[list[int]] = []
    index = ChunkIndex(TIERS, 160, lambda rows: told.append(rows.tolist()))
    rows = [index.add("cpu", [info(number)])[0] for number in range(200)]
    for row in rows:
        index.discard("cpu", row)
    assert [len(batch) for batch in told] == [11, 11, 11], "a sixteenth of the limit, and one"
    assert [row for batch in told for row in batch] == rows[:33]
    assert len(index.evicted) <= 160 + 11
    assert index.add("cpu", [info(777)])[0] in rows[:33]


def test_a_model_with_state_goes_on_only_from_where_its_state_was_kept() -> None:
    index = ChunkIndex(TIERS)
    index.need(PLAIN, ResumeRequirements(state=True))
    for number in range(6):
        kept = layout(has_state=number in (1, 3))
        index.add("cpu", [replace(info(number, number - 1 if number else None), layout=kept)])
    chain = [key(number) for number in range(6)]
    assert len(index.readable(index.prefix(chain))) == 4
    assert len(index.readable(index.prefix(chain[:3]))) == 2
    assert len(index.readable(index.prefix(chain[:1]))) == 0
    rows = index.known_prefix(chain)
    assert len(rows) == 6
    assert len(index.usable(rows[:3])) == 2
    index.discard("cpu", index.row(key(3)))
    assert len(index.readable(index.prefix(chain))) == 2


@pytest.mark.parametrize("kind", [_STATE, _WINDOW])
def test_a_chunk_with_a_state_shows_what_its_namespace_needs(kind: Component) -> None:
    index = ChunkIndex(TIERS)
    index.add("cpu", [info(0)])
    assert len(index.readable(index.prefix([key(0)]))) == 1
    index.add("cpu", [replace(info(1, 0), layout=KVLayout((_ATTENTION, kind)))])
    assert len(index.readable(index.prefix([key(0)]))) == 0
    assert len(index.readable(index.prefix([key(0), key(1)]))) == 2


def test_namespaces_of_such_models_are_remembered_within_a_limit() -> None:
    index = ChunkIndex(TIERS)
    for number in range(MAX_CHECKPOINT_SPACES + 5):
        index.need(Namespace(number.to_bytes(16, "little")), ResumeRequirements(state=True))
    assert len(index.needs) == MAX_CHECKPOINT_SPACES


def test_a_lossy_copy_may_be_a_checkpoint_of_its_accuracy() -> None:
    index = ChunkIndex(TIERS)
    chunk = replace(info(0), layout=layout(has_state=True), accuracy=Accuracy.bounded)
    index.add("disk", [chunk])
    assert len(index.readable(index.prefix([key(0)]))) == 0
    assert len(index.readable(index.prefix([key(0)]), Accuracy.bounded)) == 1
