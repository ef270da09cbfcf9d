"""What is known of contents: scores by hand, gates that open and close, and the index of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from helpers.documents import make_content_index
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.proto.types import ROOT, ChainDigest, ChunkKey, Namespace
from kvstore.server.blending.content_index import (
    MAX_CONTEXT,
    MAX_VARIANTS,
    ContentIndex,
    Learned,
    Measured,
    Named,
    VariantInfo,
)
from kvstore.server.blending.gates import (
    EAGER_REQUESTS,
    MAX_GATES,
    TRIALS,
    GateName,
    Gates,
    GateState,
    Shadow,
)
from kvstore.server.blending.scores import (
    NO_IMPACT,
    OVERHEAD_BYTES,
    UNKNOWN_IMPACT,
    Context,
    Scores,
    TokenPriorities,
    context_impact,
    fix_overhead,
    prefix_overlap,
    ranks,
)
from kvstore.server.index.hints import UNKNOWN_CONTENT
from kvstore.server.settings.values import MAX_RATIO, GateTerms
from kvstore.server.telemetry.metrics import Counters

A, B, C = (bytes([number]) * 16 for number in (1, 2, 3))

# --- Cache-Craft's scores, worked out by hand


def test_impact_is_the_logistic_of_outer_over_inner_attention_a_pair_of_tokens() -> None:
    context = [Context(A, 20, 4.0), Context(B, 10, 1.0)]
    outer, inner = 4.0 / (10 * 20) + 1.0 / (10 * 10), 5.0 / (10 * 10)
    assert context_impact(context, 5.0, 10) == pytest.approx(1 / (1 + math.exp(-outer / inner)))
    for nothing in ([], [Context(A, 20, 0.0)]):
        assert context_impact(nothing, 10.0, 10) == NO_IMPACT
    assert context_impact([Context(A, 20, 10.0)], 0.0, 10) == 1.0
    assert context_impact([Context(A, 1, 10.0)], 1e-30, 10) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("masses", "there", "before", "overlap"),
    [
        ((3, 1), {A: 0}, 2, 0.75),
        ((3, 1), {A: 0, B: 1}, 2, 1.0),
        ((3, 1), {C: 0}, 1, 0.0),
        ((3, 1), {A: 5, B: 0}, 3, 0.25),  # what comes behind the chunk does not count
        ((1, 1, 2), {B: 0, A: 1, C: 2}, 3, 2 / 3),  # another order loses its share of pairs
        ((1, 1, 2), {C: 0, B: 1, A: 2}, 3, 0.0),
        ((), {}, 0, 1.0),  # one that began its prompt fits only where one begins
        ((), {A: 0}, 1, 0.0),
    ],
)
def test_overlap_is_the_share_of_the_attention_that_is_there_again_in_its_order(
    masses: tuple[float, ...], there: dict[bytes, int], before: int, overlap: float
) -> None:
    context = [Context(*one) for one in zip((A, B, C), (16,) * 3, masses, strict=False)]
    assert prefix_overlap(context, there, before=before) == pytest.approx(overlap)


def test_overhead_is_impact_times_what_is_missing_of_the_context() -> None:
    assert [fix_overhead(*one) for one in ((0.8, 0.25), (1.0, 0.0), (1.0, 1.0))] == [
        pytest.approx(0.6), 1.0, 0.0,
    ]  # fmt: skip


NAME = b"n" * 32


def scores(*values: float) -> Scores:
    return np.array(values, np.float32)


def priorities(*reports: tuple[float, ...]) -> TokenPriorities:
    known = TokenPriorities()
    for report in reports:
        known.note(NAME, scores(*report))
    return known


def test_scores_become_ranks_whatever_their_unit() -> None:
    assert ranks(scores(5.0, 0.0, 100.0, 7.0)).tolist() == [85, 0, 255, 170]
    assert ranks(scores(5e-9, 0.0, 1e-7, 7e-9)).tolist() == [85, 0, 255, 170]
    assert ranks(scores(3.0)).tolist() == [0]


def test_reports_enter_a_moving_mean_and_what_was_not_measured_keeps_what_it_had() -> None:
    assert list(priorities((0, 1), (1, 0)).levels(NAME)) == [64, 191]
    assert list(priorities((0, 1), *[(1, 0)] * 61).levels(NAME)) == [254, 2]
    assert list(priorities((0, 1), (0, 1, 2)).levels(NAME)) == [0, 255], "another length"
    assert list(priorities((-1, 9)).levels(NAME)) == [], "a partial report of a new content"
    before = list(priorities((0, 1, 2, 3)).levels(NAME))
    after = list(priorities((0, 1, 2, 3), (-1, 9, -1, 4)).levels(NAME))
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1] > before[1]
    assert after[3] < before[3]


def test_the_limit_of_priorities_holds_and_the_longest_unreported_goes() -> None:
    room = 3 * (16 + OVERHEAD_BYTES)
    known = TokenPriorities(room)
    names = [bytes([number]) * 32 for number in range(4)]
    for number in (0, 1, 2, 0, 3):
        known.note(names[number], np.arange(16, dtype=np.float32))
    assert known.size_bytes <= room
    assert [bool(known.levels(name)) for name in names] == [True, False, True, True]


# --- gates: closed until shown, and closed again when what they let through goes wrong

GATE: GateName = (b"s" * 16, "rag")
GOOD_TOKENS = 64
TERMS = GateTerms()


def good(ratio: float) -> Shadow:
    return Shadow(0.001, 1.0, GOOD_TOKENS, ratio)


def bad(ratio: float, tokens: int = GOOD_TOKENS) -> Shadow:
    return Shadow(2.0, 0.5, tokens, ratio)


def make_gates(seed: int = 7) -> Gates:
    return Gates(TERMS, random.Random(seed).random, Counters())


def calibrate(gates: Gates) -> GateState:
    for _ in range(TRIALS):
        gate = gates.record(GATE, good(gates.view(GATE).ratio))
    return gate


def serve(gates: Gates, outcome: Callable[[float], Shadow], requests: int) -> int:
    """Ask for so many requests and report those that are compared; return when it closed."""
    for number in range(requests):
        permit = gates.admit(GATE, trial=False)
        if not permit.may_pass:
            return number
        if permit.is_shadow:
            gates.record(GATE, outcome(gates.view(GATE).ratio))
    return requests


@pytest.fixture
def opened() -> Gates:
    gates = make_gates()
    calibrate(gates)
    return gates


def test_a_gate_is_closed_without_a_trace_until_enough_good_trials_open_it() -> None:
    gates = make_gates()
    permit = gates.admit(GATE, trial=False)
    assert (permit.may_pass, permit.is_shadow) == (False, False)
    assert "calibrate" in gates.view(GATE).why
    assert len(gates) == 0
    trial = gates.admit(GATE, trial=True)
    assert (trial.may_pass, trial.is_shadow) == (True, True), "and is compared"
    for _ in range(TRIALS):
        assert gates.record(GATE, Shadow(0.0, 1.0, 15, 0.3)).shadows == 0, "over too few tokens"
    assert gates.record(GATE, Shadow(0.0, 1.0, 16, 0.3)).shadows == 1
    for _ in range(TRIALS - 2):
        assert not gates.record(GATE, good(0.3)).is_open
    gate = gates.record(GATE, good(0.3))
    assert (gate.is_open, gate.is_calibrated, gate.ratio) == (True, True, 0.3)
    before = gate.shadows
    assert gates.record(GATE, Shadow(0.0, 1.0, 1, 0.3)).shadows == before + 1, "watched by all"


def test_bad_trials_raise_the_ratio_until_it_is_too_much_or_they_are_good() -> None:
    gates, ratios = make_gates(), []
    for _ in range(5 * TRIALS):
        ratios.append(gates.view(GATE).ratio)
        gate = gates.record(GATE, bad(ratios[-1]))
    assert sorted(set(ratios)) == pytest.approx([0.3, 0.45, 0.675])
    assert not gate.is_open
    assert max(ratios) <= MAX_RATIO
    gates = make_gates()
    for _ in range(3 * TRIALS):
        ratio = gates.view(GATE).ratio
        gate = gates.record(GATE, good(ratio) if ratio > 0.5 else bad(ratio))
        if gate.is_open:
            break
    assert gate.is_open
    assert gate.ratio == pytest.approx(0.675)


@pytest.mark.parametrize("outcome", [bad, lambda ratio: Shadow(2.0, 0.0, 1, ratio)])
def test_a_model_that_blends_badly_closes_it_within_200_requests(
    outcome: Callable[[float], Shadow],
) -> None:
    for seed in range(50):
        gates = make_gates(seed)
        calibrate(gates)
        assert serve(gates, outcome, 200) < 200, seed
        gate = gates.view(GATE)
        assert (gate.is_open, gate.is_calibrated) == (False, False)
        assert outcome is not bad or gates.changes == 4, "opened, raised twice, closed"


def test_a_model_that_blends_well_stays_open_whatever_does_not_count(opened: Gates) -> None:
    assert serve(opened, good, 5000) == 5000
    for number in range(40):
        outcome = Shadow(0.06, 0.94, GOOD_TOKENS, 0.3) if number % 10 == 9 else good(0.3)
        assert opened.record(GATE, outcome).is_open
    shadows = opened.view(GATE).shadows
    for _ in range(50):
        opened.record(GATE, bad(0.05))  # at less than its ratio
    gate = opened.view(GATE)
    assert (gate.is_open, gate.ratio, gate.shadows) == (True, 0.3, shadows)


def test_comparisons_are_frequent_after_a_change_and_rare_later(opened: Gates) -> None:
    compared = [opened.admit(GATE, trial=False).is_shadow for _ in range(20_000)]
    assert compared[0]
    assert sum(compared[:EAGER_REQUESTS]) > EAGER_REQUESTS // 3
    late = sum(compared[10_000:]) / 10_000
    assert 0.5 * TERMS.shadow_share < late < 2 * TERMS.shadow_share


def test_models_and_tags_have_gates_of_their_own_and_strangers_push_no_open_one_out(
    opened: Gates,
) -> None:
    for stranger in ((GATE[0], "chat"), (b"t" * 16, "rag")):
        assert not opened.admit(stranger, trial=False).may_pass
    for number in range(2 * MAX_GATES):
        opened.record((number.to_bytes(16, "big"), ""), bad(0.3))
    assert len(opened) == MAX_GATES
    assert opened.admit(GATE, trial=False).may_pass


def test_open_gates_are_open_after_a_restart_and_closed_ones_closed(opened: Gates) -> None:
    opened.record((b"t" * 16, ""), good(0.3))
    after = make_gates()
    after.restore(opened.save())
    assert after.admit(GATE, trial=False).is_shadow  # watched as if it had just opened
    assert not after.admit((b"t" * 16, ""), trial=False).may_pass


def test_speed_is_told_and_kept_as_a_mean(opened: Gates) -> None:
    opened.record(GATE, None, 2.0)
    assert opened.record(GATE, None, 4.0).speedup == pytest.approx(2.5)


# --- the index of contents

SPACE = Namespace(b"s" * 16)
UNMEASURED = -1.0


def digest(number: int) -> ChainDigest:
    return ChainDigest(number.to_bytes(16, "big"))


def content(number: int) -> bytes:
    return b"content" + number.to_bytes(9, "big")


def chunk(number: int, of: int = 1, *, behind: int = 0, position: int = 64) -> Named:
    """Chunk *number* with content *of*, behind another chunk; 0 is the start."""
    return Named(ChunkKey(SPACE + digest(number)), digest(behind), content(of), 16, position)


def other(number: int) -> Named:
    """A variant of content 1 behind a context of its own."""
    return chunk(number, behind=100 + number, position=number)


def variants(index: ContentIndex, of: int = 1, space: Namespace = SPACE) -> list[int]:
    return [int.from_bytes(one.key[16:], "big") for one in index.variants(space, content(of))]


def filled(*chunks: Named) -> ContentIndex:
    index = make_content_index(1000)
    for one in chunks:
        assert index.note(one) is None
    return index


def facts_of(index: ContentIndex, one: Named) -> VariantInfo:
    facts = index.facts(one.key)
    assert facts is not None
    return facts


def test_other_namespaces_and_frames_without_contents_are_not_in_it() -> None:
    index = filled(chunk(1), chunk(2)._replace(content=UNKNOWN_CONTENT))
    assert variants(index, 1, Namespace(b"t" * 16)) == []
    assert index.counts()[1] == 1


def test_facts_say_where_a_variant_stood_and_behind_what() -> None:
    index = filled(chunk(1, position=0), chunk(2, of=2, behind=1, position=16))
    facts = facts_of(index, chunk(2))
    assert (facts.position, facts.parent, facts.tokens) == (16, digest(1), 16)
    assert list(facts.context) == [Context(content(1), 16, 16.0)]
    assert (facts.impact, facts.deviation, facts.reports) == (UNKNOWN_IMPACT, UNMEASURED, 0)
    index = filled(chunk(1, position=32), chunk(2, of=2, behind=1, position=48))
    gone = Context(UNKNOWN_CONTENT, 32, 32.0)
    assert list(facts_of(index, chunk(2)).context) == [gone, Context(content(1), 16, 16.0)]


def test_context_is_looked_at_so_far_back_and_parents_in_a_circle_end() -> None:
    chain = [chunk(n, of=n, behind=n - 1, position=16 * (n - 1)) for n in range(1, 40)]
    facts = facts_of(filled(*chain), chain[-1])
    assert len(facts.context) == MAX_CONTEXT + 1
    assert sum(one.tokens for one in facts.context) == chain[-1].position
    circle = (chunk(1, behind=2, position=1 << 31), chunk(2, of=2, behind=1, position=5))
    assert len(facts_of(filled(*circle), circle[0]).context) <= MAX_CONTEXT + 1


def test_of_one_more_variant_the_oldest_unused_goes() -> None:
    index = filled(*map(other, range(1, MAX_VARIANTS + 1)))
    for number in (2, 3):
        index.chose([(chunk(number).key, 0.9)])
    # 1 stands nearest to a prompt's start, 2 and 3 saved something
    assert index.note(other(9)) == chunk(4).key
    assert sorted(variants(index)) == [1, 2, 3, 5, 9]


def test_the_variant_that_depends_least_on_its_context_always_stays() -> None:
    index = filled(*map(other, range(1, MAX_VARIANTS + 1)))
    low = Measured(0.1, (Context(content(7), 16, 0.001),), 15.0)
    assert index.report(chunk(3).key, low)
    for number in range(10, 40):
        index.note(other(number))
    assert 3 in variants(index)
    assert len(variants(index)) == MAX_VARIANTS


def test_of_variants_used_alike_the_one_goes_of_which_most_has_to_be_recomputed() -> None:
    index = filled(*map(other, range(1, MAX_VARIANTS + 1)))
    for number in range(1, MAX_VARIANTS + 1):
        mass = 9.0 if number == 4 else 0.1 * number
        index.report(chunk(number).key, Measured(UNMEASURED, (Context(content(7), 16, mass),), 4.0))
    index.recall([Learned(chunk(9).key, 0.6, UNMEASURED, 0.0, 1.0, 1, ())])
    assert index.note(other(9)) == chunk(4).key


def test_one_that_began_a_prompt_stays_where_there_is_room_and_gives_way_like_any_other() -> None:
    index = filled(chunk(1, position=0), *map(other, range(10, 10 + MAX_VARIANTS - 1)))
    facts = facts_of(index, chunk(1))
    assert (facts.impact, facts.parent) == (UNKNOWN_IMPACT, ROOT)
    assert index.note(other(30)) == chunk(1).key  # its first token is an attention sink
    assert 10 in variants(index)


def test_contents_beyond_the_limit_are_left_out_and_counted() -> None:
    index = make_content_index(2)
    for number in (1, 2, 3):
        index.note(chunk(number, of=number))
    index.note(chunk(4, of=1, behind=9))
    assert index.counts()[:3] == (2, 3, 1)
    assert index.forget(chunk(2).key)
    index.note(chunk(3, of=3))
    assert variants(index, 3) == [3]


def test_reports_are_averaged_attention_replaces_guesses_and_what_is_gone_takes_none() -> None:
    index, key = filled(chunk(1, behind=9)), chunk(1).key
    context = (Context(content(5), 16, 2.0),)
    for report in ((4.0, context, 8.0), (8.0, (), 0.0), (UNMEASURED, (), 0.0)):
        assert index.report(key, Measured(*report))
    facts = facts_of(index, chunk(1))
    assert facts.deviation == pytest.approx(5.0)
    assert (facts.reports, tuple(facts.context)) == (3, context)
    assert NO_IMPACT < facts.impact < 1.0
    assert index.forget(key)
    assert not index.forget(key)
    assert not index.report(key, Measured(1.0, (), 0.0))


steps = st.lists(
    st.tuples(st.sampled_from(["note", "forget"]), st.integers(1, 25), st.integers(1, 4)),
    max_size=120,
)


@settings(max_examples=60, deadline=None)
@given(steps, st.integers(1, 4))
def test_it_holds_what_a_dictionary_of_lists_would(
    steps: list[tuple[str, int, int]], limit: int
) -> None:
    index = make_content_index(limit)
    model: dict[int, list[int]] = {}
    of: dict[int, int] = {}
    for verb, number, wanted in steps:
        if verb == "forget":
            assert index.forget(chunk(number).key) == (number in of)
            if number in of:
                model[of[number]].remove(number)
                if not model[of[number]]:
                    del model[of[number]]
                del of[number]
        elif number not in of:
            gone = index.note(chunk(number, of=wanted, behind=99, position=number))
            if wanted not in model and len(model) == limit:
                assert gone is None
                continue
            of[number] = wanted
            model.setdefault(wanted, []).insert(0, number)
            assert (gone is not None) == (len(model[wanted]) > MAX_VARIANTS)
            if gone is not None:
                left = int.from_bytes(gone[16:], "big")
                assert left != min(model[wanted])  # the nearest to the start stands in for all
                model[wanted].remove(left)
                del of[left]
        for one in range(1, 5):
            assert variants(index, one) == model.get(one, [])
        assert index.counts()[:2] == (len(model), len(of))
