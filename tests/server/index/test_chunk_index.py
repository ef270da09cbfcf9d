"""The ChunkIndex against a dictionary, whatever happens; where prefixes end, and what rows keep.

Also chunks that gain what is of their end, and the states that a judicious server keeps.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import pytest
from conftest import ServerMaker
from contracts.chunks import make_representation
from contracts.ends import HYBRID as HYBRID_MODEL
from contracts.ends import TOKENS, chunk_of, put_ends
from contracts.policy import digest, info, key
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import equal, keys_of, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvstore.client import Client
from kvstore.client.chunk_puts import layout_of
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.frame import raw_frame_bytes
from kvstore.proto.key_table import NO_ROW
from kvstore.proto.types import (
    DIGEST_BYTES,
    Accuracy,
    ChunkInfo,
    ChunkKey,
    Component,
    DType,
    KVLayout,
    LayerKind,
    Namespace,
    PutOutcome,
)
from kvstore.server.eviction.policy import Rows
from kvstore.server.index.chunk_index import (
    MAX_CHECKPOINT_SPACES,
    MAX_TIERS,
    ChunkIndex,
    ResumeRequirements,
)
from kvstore.server.store.reservations import WITHOUT_STATE

TIERS = ("cpu", "disk")
CHUNKS = 8
GHOSTS = 3
HYBRID = Namespace(b"h" * 16)
PLAIN = Namespace(bytes(16))
_ATTENTION = Component(LayerKind.attention, DType.bfloat16, 2, 1, 8, 16)
_STATE = Component(LayerKind.state, DType.float32, 2, 1, 8, 1)
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
            held = index.copies(index.row(name))
            assert set(held) == set(there) == set(index.holders(index.row(name)))
            assert {info.key for info in held.values()} == {name}
            assert not index.is_evicted(name)
        for space in (PLAIN, HYBRID):
            found = {ChunkKey(name) for name in index.keys_starting(space).tolist()}
            assert found == {name for name in self.copies if name.startswith(space)}
        alone = {name for name, there in self.copies.items() if set(there) == {"cpu"}}
        assert set(index.only_on(("cpu",))) == alone
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
        RadixMachine, settings=settings(max_examples=150, stateful_step_count=50, deadline=None)
    )


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


def test_namespaces_of_such_models_are_remembered_within_a_limit() -> None:
    index = ChunkIndex(TIERS)
    for number in range(MAX_CHECKPOINT_SPACES + 5):
        index.need(Namespace(number.to_bytes(16, "little")), ResumeRequirements(state=True))
    assert len(index.needs) == MAX_CHECKPOINT_SPACES


WHOLE = replace(make_representation(), layer_groups=(*HYBRID_MODEL.layer_groups,))
chunks = st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(16, 40)), max_size=12)


@given(chunks, st.booleans(), st.integers(0, 90))
def test_a_prefix_ends_at_the_deepest_state_whose_windows_reach(
    drawn: list[tuple[bool, bool, int]], state: bool, window: int
) -> None:
    index = ChunkIndex(["cpu"])
    for number, (has_window, has_state, count) in enumerate(drawn):
        layout = KVLayout.of(WHOLE, count, window=has_window, state=has_state)
        index.add("cpu", [replace(info(number), layout=layout)])
    index.needs[key(0)[:16]] = ResumeRequirements(state, window)

    def can_end(count: int) -> bool:
        seen, at = 0, count
        while at and seen < window:
            has_window, _, tokens = drawn[at - 1]
            if not has_window:
                return False
            seen, at = seen + tokens, at - 1
        return not state or drawn[count - 1][1]

    deepest = max((n for n in range(1, len(drawn) + 1) if can_end(n)), default=0)
    rows = index.prefix([key(number) for number in range(len(drawn))])
    assert len(index.usable(rows)) == deepest


THREE = ("cpu", "disk", "redis")


@pytest.fixture
def index() -> ChunkIndex:
    return ChunkIndex(THREE)


def add(index: ChunkIndex, tier: str, chunk: ChunkInfo) -> int:
    return index.add(tier, [chunk])[0]


def keys_at(index: ChunkIndex, asked: list[int], least: Accuracy = Accuracy.exact) -> list[object]:
    rows = index.readable(index.prefix([key(number) for number in asked]), least)
    return [index.key(row) for row in rows.tolist()]


def test_a_row_that_is_given_again_remembers_nothing(index: ChunkIndex) -> None:
    row = add(index, "disk", replace(info(1), prefill_flops=3.0))
    index.hits[row] = 1
    index.discard("disk", row)
    assert add(index, "cpu", info(2)) == row
    assert (index.hits[row], index.parents[row]) == (0, NO_ROW)
    assert index.copies(row) == {"cpu": info(2)}
    assert keys_at(index, [1]) == []


@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [3, 4, 2, 5, 0, 1]])
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


def test_an_index_has_no_more_tiers_than_a_byte_has_bits() -> None:
    ChunkIndex([str(number) for number in range(MAX_TIERS)])
    with pytest.raises(InvalidRequestError, match="tiers"):
        ChunkIndex([str(number) for number in range(MAX_TIERS + 1)])


def test_memory_is_that_of_the_most_chunks_there_ever_were() -> None:
    index = ChunkIndex(THREE)

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


stored, exists = PutOutcome.stored, PutOutcome.exists


def test_a_state_that_came_later_survives_a_restart(make_server: ServerMaker) -> None:
    server = make_server()
    client = server.connect("auto", HYBRID_MODEL)
    keys = keys_of(client, 1, 3)
    client.put_chunks([chunk_of(client, keys, at, "") for at in range(3)], durable=True)
    assert client.lookup(keys=keys).ready == 0
    (put,) = client.put_chunks([chunk_of(client, keys, 1, "ws")], durable=True)
    assert put.outcome is stored
    server.close()
    again = make_server().connect("auto", HYBRID_MODEL)
    match = again.lookup(keys=keys)
    assert (match.ready, match.shared) == (2, 3)
    found = again.get_chunks(keys)
    assert len(found) == 2, "behind the state nobody could go on"
    assert equal(found[1], chunk_of(again, keys, 1, "ws").tensors)  # type: ignore[arg-type]


def test_a_copy_with_another_end_than_the_others_is_not_counted(server: LocalServer) -> None:
    client, catalog = server.connect("auto", HYBRID_MODEL), server.node.store.catalog
    for seed, ends, ready in ((1, "ws", 2), (2, "", 0)):
        keys = keys_of(client, seed, 2)
        put_ends(client, keys, ["", ends])
        server.settled()
        other = layout_of(chunk_of(client, keys, 1, "w"), HYBRID_MODEL)
        info = catalog.copies(keys[1])["cpu"]
        catalog.forget("disk", keys[1])
        catalog.note_sealed("disk", type(info)(info.key, info.parent, other, 0, 900))
        assert catalog.holders(keys[1]) == ["cpu"]
        assert keys[1] in catalog.orphans["disk"]
        assert client.lookup(keys=keys).ready == ready


@pytest.fixture
def judicious(make_server: ServerMaker) -> LocalServer:
    return make_server("--state-admission", "judicious")


@pytest.fixture
def client(judicious: LocalServer) -> Client:
    return judicious.connect("auto", HYBRID_MODEL)


def put(client: Client, keys: Sequence[ChunkKey], first: int = 0) -> list[tuple[PutOutcome, bool]]:
    """Put a chain with a state in every chunk; say what became of each, and if it lost its own."""
    puts = client.put_chunks([chunk_of(client, keys, at, "ws") for at in range(first, len(keys))])
    return [(one.outcome, one.reason == WITHOUT_STATE) for one in puts]


def states_of(server: LocalServer, keys: Sequence[ChunkKey]) -> list[bool]:
    copies = [server.node.store.catalog.copies(key)["cpu"] for key in keys]
    return [one.layout.has(LayerKind.state) for one in copies]


def test_only_the_last_state_of_a_put_is_kept(judicious: LocalServer, client: Client) -> None:
    keys = keys_of(client, 1, 4)
    assert put(client, keys) == [(stored, True)] * 3 + [(stored, False)]
    assert states_of(judicious, keys) == [False, False, False, True]
    assert client.lookup(keys=keys).ready == 4
    found = client.get_chunks(keys)
    for at, one in enumerate(found):
        expected = chunk_of(client, keys, at, "ws" if at == 3 else "w")
        assert equal(one, expected.tensors)  # type: ignore[arg-type]
    assert judicious.counter("put_states_left_out") == 3
    sizes = [judicious.node.store.catalog.size_bytes("cpu", key) for key in keys]
    assert len(set(sizes[:3])) == 1
    assert sizes[0] < sizes[3]
    assert judicious.node.store.writes.is_draining is False
    assert judicious.settled().pending_puts == 0


def test_where_prompts_part_a_state_is_kept_the_second_time(
    judicious: LocalServer, client: Client
) -> None:
    keys = keys_of(client, 1, 4)
    put(client, keys)
    other = client.keys([*tokens(1, 4 * TOKENS)[: 2 * TOKENS], *tokens(9, 2 * TOKENS)])
    assert other[:2] == keys[:2]
    match = client.lookup(keys=other)
    assert (match.ready, match.shared) == (0, 2)

    def is_gained() -> bool:  # refused while the first is being copied to a lower tier
        return put(client, other)[1] == (stored, False) or states_of(judicious, [other[1]]) == [
            True
        ]

    assert eventually(is_gained)
    assert states_of(judicious, other[1:]) == [True, False, True]
    assert client.lookup(keys=other[:3]).ready == 2


def test_a_state_that_comes_a_second_time_is_kept(judicious: LocalServer, client: Client) -> None:
    keys = keys_of(client, 3, 3)
    assert put(client, keys)[0] == (stored, True)
    judicious.settled()
    assert put(client, keys)[:2] == [(stored, False)] * 2
    assert states_of(judicious, keys) == [True] * 3
    assert put(client, keys) == [(exists, False)] * 3


def test_explain_says_that_the_state_was_not_kept(judicious: LocalServer, client: Client) -> None:
    keys = keys_of(client, 5, 3)
    put(client, keys)
    request = pb.ExplainRequest(
        key_namespace=keys[0][:DIGEST_BYTES], digests=b"".join(k[DIGEST_BYTES:] for k in keys[:2])
    )
    reply = judicious.dial().call("Explain", request, DEADLINE_MS, pb.ExplainResponse)
    assert [one.state for one in reply.chunks] == ["no_end"] * 2
    assert all("--state-admission" in one.reason for one in reply.chunks)


def test_what_is_aborted_is_put_anew_as_if_it_had_not_been(
    judicious: LocalServer, client: Client
) -> None:
    keys = keys_of(client, 7, 3)
    chunks = [chunk_of(client, keys, at, "ws") for at in range(3)]
    layouts = [KVLayout.of(HYBRID_MODEL, TOKENS)]
    core = judicious.node.store
    (session,) = judicious.node.sessions.by_id.values()
    size = raw_frame_bytes(layouts[0])
    infos = [ChunkInfo(c.key, c.parent, layouts[0], 0, size) for c in chunks]
    begun = core.writes.begin_all(session, infos, core.moves.clock() + 5)
    assert all(core.writes.abort(session, one.ticket_id) for one in begun)  # type: ignore[union-attr]
    assert [one.reason == WITHOUT_STATE for one in client.put_chunks(chunks)] == [True, True, False]
