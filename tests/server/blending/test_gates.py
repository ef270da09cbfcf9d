"""The gate: closed until it is shown, and closed again when what it lets through goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvstore.server.blending.gates import (
    EAGER_REQUESTS,
    MAX_GATES,
    TRIALS,
    GateName,
    Gates,
    GateState,
    Shadow,
)
from kvstore.server.settings.values import MAX_RATIO, GateTerms
from kvstore.server.telemetry.metrics import Counters

NAME: GateName = (b"s" * 16, "rag")
GOOD_TOKENS = 64
TERMS = GateTerms()


def good(ratio: float) -> Shadow:
    return Shadow(0.001, 1.0, GOOD_TOKENS, ratio)


def bad(ratio: float, tokens: int = GOOD_TOKENS) -> Shadow:
    return Shadow(2.0, 0.5, tokens, ratio)


def table(draw: Callable[[], float] | None = None, terms: GateTerms = TERMS) -> Gates:
    return Gates(terms, draw or random.Random(7).random, Counters())


def calibrate(gates: Gates, name: GateName = NAME) -> GateState:
    for _ in range(TRIALS):
        gate = gates.record(name, good(gates.view(name).ratio))
    return gate


def serve(gates: Gates, outcome: Callable[[float], Shadow], requests: int) -> int:
    """Ask for so many requests and report those that are compared; return when it closed."""
    for number in range(requests):
        permit = gates.admit(NAME, trial=False)
        if not permit.may_pass:
            return number
        if permit.is_shadow:
            gates.record(NAME, outcome(gates.view(NAME).ratio))
    return requests


def test_trials_over_a_few_tokens_are_not_counted_but_what_is_open_is_watched_by_all() -> None:
    gates = table()
    for _ in range(TRIALS):
        assert gates.record(NAME, Shadow(0.0, 1.0, 15, 0.3)).shadows == 0
    assert gates.record(NAME, Shadow(0.0, 1.0, 16, 0.3)).shadows == 1
    calibrate(gates)
    assert gates.view(NAME).is_open
    before = gates.view(NAME).shadows
    assert gates.record(NAME, Shadow(0.0, 1.0, 1, 0.3)).shadows == before + 1


def test_a_gate_that_nobody_calibrated_is_closed_and_asking_leaves_no_trace() -> None:
    gates = table()
    permit = gates.admit(NAME, trial=False)
    assert (permit.may_pass, permit.is_shadow) == (False, False)
    assert "calibrate" in gates.view(NAME).why
    assert len(gates) == 0
    trial = gates.admit(NAME, trial=True)
    assert (trial.may_pass, trial.is_shadow) == (True, True), "and is compared"


def test_enough_good_trials_open_it() -> None:
    gates = table()
    for _ in range(TRIALS - 1):
        assert not gates.record(NAME, good(0.3)).is_open
    gate = gates.record(NAME, good(0.3))
    assert (gate.is_open, gate.is_calibrated, gate.ratio) == (True, True, 0.3)


def test_bad_trials_raise_the_ratio_until_it_is_too_much() -> None:
    gates = table()
    ratios = []
    for _ in range(5 * TRIALS):
        ratios.append(gates.view(NAME).ratio)
        gate = gates.record(NAME, bad(ratios[-1]))
    assert sorted(set(ratios)) == pytest.approx([0.3, 0.45, 0.675])
    assert not gate.is_open
    assert max(ratios) <= MAX_RATIO


def test_trials_that_are_good_at_a_higher_ratio_open_it_there() -> None:
    gates = table()
    for _ in range(3 * TRIALS):
        ratio = gates.view(NAME).ratio
        gate = gates.record(NAME, good(ratio) if ratio > 0.5 else bad(ratio))
        if gate.is_open:
            break
    assert gate.is_open
    assert gate.ratio == pytest.approx(0.675)


def test_a_model_that_blends_badly_closes_it_within_200_requests() -> None:
    for seed in range(50):
        gates = table(random.Random(seed).random)
        calibrate(gates)
        assert serve(gates, bad, 200) < 200, seed
        gate = gates.view(NAME)
        assert (gate.is_open, gate.is_calibrated) == (False, False)
        assert gates.changes == 4, "opened, raised twice, closed"


def test_it_closes_even_where_each_comparison_is_of_one_token() -> None:
    for seed in range(20):
        gates = table(random.Random(seed).random)
        calibrate(gates)
        assert serve(gates, lambda ratio: Shadow(2.0, 0.0, 1, ratio), 200) < 200, seed


def test_a_model_that_blends_well_stays_open_at_its_ratio() -> None:
    gates = table()
    calibrate(gates)
    assert serve(gates, good, 5000) == 5000
    assert gates.view(NAME).ratio == 0.3


def test_one_bad_comparison_among_good_ones_changes_nothing() -> None:
    gates = table()
    calibrate(gates)
    for number in range(40):
        outcome = Shadow(0.06, 0.94, GOOD_TOKENS, 0.3) if number % 10 == 9 else good(0.3)
        assert gates.record(NAME, outcome).is_open
    assert gates.view(NAME).ratio == 0.3


def test_comparisons_are_frequent_after_a_change_and_rare_later() -> None:
    gates = table()
    calibrate(gates)
    compared = [gates.admit(NAME, trial=False).is_shadow for _ in range(20_000)]
    assert compared[0]
    assert sum(compared[:EAGER_REQUESTS]) > EAGER_REQUESTS // 3
    late = sum(compared[10_000:]) / 10_000
    assert 0.5 * TERMS.shadow_share < late < 2 * TERMS.shadow_share


def test_comparisons_at_less_than_its_ratio_are_not_counted() -> None:
    gates = table()
    calibrate(gates)
    for _ in range(50):
        gates.record(NAME, bad(0.05))
    assert gates.view(NAME).is_open
    assert gates.view(NAME).shadows == 0


def test_models_and_tags_have_gates_of_their_own() -> None:
    gates = table()
    calibrate(gates)
    assert not gates.admit((NAME[0], "chat"), trial=False).may_pass
    assert not gates.admit((b"t" * 16, "rag"), trial=False).may_pass
    assert gates.admit(NAME, trial=False).may_pass


def test_strangers_cannot_push_an_open_gate_out() -> None:
    gates = table()
    calibrate(gates)
    for number in range(2 * MAX_GATES):
        gates.record((number.to_bytes(16, "big"), ""), bad(0.3))
    assert len(gates) == MAX_GATES
    assert gates.view(NAME).is_open


def test_open_gates_are_open_after_a_restart_and_closed_ones_closed() -> None:
    gates = table()
    calibrate(gates)
    gates.record((b"t" * 16, ""), good(0.3))
    after = table()
    after.restore(gates.save())
    assert after.admit(NAME, trial=False).is_shadow  # watched as if it had just opened
    assert not after.admit((b"t" * 16, ""), trial=False).may_pass


def test_speed_is_told_and_kept_as_a_mean() -> None:
    gates = table()
    calibrate(gates)
    gates.record(NAME, None, 2.0)
    assert gates.record(NAME, None, 4.0).speedup == pytest.approx(2.5)
