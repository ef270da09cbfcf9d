"""What a blend costs, what the planner chooses, and what is told of one."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.client.blend.cost import MIN_MARGIN, BlendPlanner, CostMeter, Speed, Work
from kvstore.client.blend.engine import LayerLoader, MemorySource
from kvstore.client.blend.gate import ShadowEval, compare, deviations, worse
from kvstore.client.blend.plan import BlendPlan, Segment
from kvstore.client.blend.selectors import SELECTORS
from kvstore.client.planning import LinkMeter
from kvstore.proto.errors import DeadlineError, InvalidRequestError

LAYERS = 32
SPEED = Speed(1e-3, 1e-7, 2e-5, 5e-10)
TOKEN_BYTES = 131072.0


def plan(ratio: float = 0.15, exact: int = 512, approx: int = 7000, **settings: Any) -> BlendPlan:
    segments, place = [], 0
    for size, kind in ((exact, "exact"), (approx, "approx"), (64, "miss")):
        if size:
            segments.append(Segment(place, place + size, kind, src_pos=0))  # type: ignore[arg-type]
            place += size
    return BlendPlan(tuple(range(place)), tuple(segments), ratio=ratio, **settings)


def planner_of(
    bytes_per_s: float, error_share: float = 0.0, speed: Speed = SPEED, layers: int = LAYERS
) -> BlendPlanner:
    """A planner of an engine that is known, blends up to *error_share*."""
    found = BlendPlanner(layers, speed, LinkMeter(bytes_per_s))
    found.full.error_share, found.blend.error_share = 0.0, error_share
    return found


def decide(found: BlendPlan, bytes_per_s: float, **terms: Any) -> Any:
    return planner_of(bytes_per_s).choose(found, TOKEN_BYTES, **terms)


def test_the_faster_the_storage_the_less_is_computed() -> None:
    found = decide(plan(), 1e12)
    assert (found.action, found.ratio) == ("blend", 0.15)
    assert found.expected_s < 0.4 * found.full_s
    found = decide(plan(selector="first_k"), 1e10)
    assert found.action == "blend"
    assert found.ratio > 0.15, "what hides behind the load is computed for nothing"
    assert found.expected_s < found.full_s
    found = decide(plan(), 1e8)
    assert (found.action, found.expected_s) == ("full", found.full_s)


def test_rows_that_need_not_come_are_computed_instead_of_loaded() -> None:
    slow = plan(selector="stored_priority")
    waiting, skipping = decide(slow, 4e9), decide(slow, 4e9, can_skip_rows=True)
    assert skipping.action == "blend"
    assert skipping.expected_s < 0.9 * waiting.expected_s
    assert skipping.ratio > 0.15


@given(
    name=st.sampled_from(sorted(SELECTORS)),
    bandwidth=st.floats(1e6, 1e12),
    exact=st.integers(0, 4000),
    approx=st.integers(0, 8000),
    ratio=st.floats(0.01, 1.0),
)
@settings(max_examples=100, deadline=None)
def test_nothing_is_chosen_that_is_expected_to_lose(
    name: str, bandwidth: float, exact: int, approx: int, ratio: float
) -> None:
    found = decide(plan(ratio, exact, approx, selector=name), bandwidth)
    assert found.ratio >= ratio
    if found.action == "full":
        assert found.expected_s == found.full_s
    else:
        assert found.expected_s * (1 + MIN_MARGIN) < found.full_s


def test_what_is_not_known_well_has_to_gain_more() -> None:
    assert planner_of(1e10, 4.0).choose(plan(), TOKEN_BYTES).action == "full"
    assert planner_of(1e10).choose(plan(), TOKEN_BYTES).action == "blend"


@pytest.mark.parametrize("load_s", [3.0, 60.0])
def test_layers_are_loaded_while_others_are_computed(load_s: float) -> None:
    """By hand: 2 layers. The second is loaded while the first is computed, or after it was."""
    planner = planner_of(2 * 60 / (2 * load_s), speed=Speed(0.0, 0.0, 1.0, 0.0), layers=2)
    # Rows of a blend are never believed to be cheaper than those of a prefill: 1 s each.
    planner.blend.speed = Speed(0.0, 0.0, 1e-3, 0.0)
    found = planner.choose(plan(0.5, exact=0, approx=60, selector="first_k"), token_bytes=2.0)
    layer_s = (found.ratio * 60 + 64) / 2
    assert found.full_s == 124
    if load_s == 3.0:
        assert (found.action, found.ratio) == ("blend", 0.5)
        assert found.expected_s == pytest.approx(load_s + 2 * layer_s)
    else:  # two loads and the last layer are no gain
        assert found.action == "full"


def test_a_decision_is_applied_to_its_plan() -> None:
    found = plan()
    assert decide(found, 1e12).applied(found) == found
    full = decide(found, 1e8).applied(found)
    assert full.count("miss") == len(found.tokens)
    assert decide(plan(1.0, exact=0), 1e12).action == "full"
    for ratio in (0.9, 1.0):  # at 1 a blend is the full prefill: nothing is loaded for it
        prefix = plan(ratio, exact=7000, approx=512)
        decided = decide(prefix, 2e10)
        left = decided.applied(prefix)
        assert decided.action == "prefix"
        assert (left.count("exact"), left.count("approx")) == (7000, 0)


# --- learning


def observed(meter: CostMeter, speed: Speed, count: int, noise: float, seed: int = 0) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        tokens = rng.randrange(500, 9000)
        rows = tokens * rng.choice((0.1, 0.3, 0.6, 1.0))
        work = Work.of([rows], tokens, int(tokens - rows))
        meter.observe(work, speed.seconds(work) * (1 + noise * rng.uniform(-1, 1)))


def test_a_meter_learns_the_speed_of_an_engine_that_is_not_what_it_was_told() -> None:
    meter = CostMeter(SPEED)
    true = Speed(3e-3, 4e-7, 9e-5, 1e-9)
    observed(meter, true, 40, noise=0.05)
    found = meter
    for tokens, rows in ((1000, 150), (8000, 1200), (8000, 8000)):
        work = Work.of([rows], tokens, tokens - rows)
        assert found.speed.seconds(work) == pytest.approx(true.seconds(work), rel=0.2)
    assert found.error_share < 0.2


def test_a_meter_says_how_badly_it_predicts() -> None:
    calm, wild = CostMeter(SPEED), CostMeter(SPEED)
    observed(calm, SPEED, 30, noise=0.01)
    observed(wild, SPEED, 30, noise=0.8)
    assert calm.error_share < 0.05 < wild.error_share


def test_one_sample_moves_an_estimate_and_nonsense_does_not() -> None:
    meter = CostMeter(SPEED)
    work = Work.of([8000], 8000, 0)
    for seconds in (0.0, -1.0, math.nan, math.inf):
        meter.observe(work, seconds)
    assert meter.speed == SPEED
    meter.observe(work, 5 * SPEED.seconds(work))
    found = meter.speed
    assert found.seconds(work) == pytest.approx(5 * SPEED.seconds(work), rel=0.2)


def test_a_planner_that_sees_storage_slow_down_stops_blending() -> None:
    link = LinkMeter(1e12)
    planner = BlendPlanner(LAYERS, SPEED, link)
    for tokens in range(1000, 9000, 500):
        planner.observe_full(tokens, SPEED.seconds(Work.of([tokens], tokens, 0)))
    assert planner.choose(plan(), TOKEN_BYTES).action == "blend"
    for _ in range(8):
        link.observe(1 << 30, 30.0)
    assert planner.choose(plan(), TOKEN_BYTES).action == "full"


def test_loads_that_were_given_up_say_that_the_link_is_no_faster() -> None:
    link = LinkMeter(1e9)
    planner = BlendPlanner(LAYERS, SPEED, link)
    assert not planner.full.is_measured
    assert not planner.blend.is_measured
    planner.observe_load(1000, 0.5)
    assert link.estimate().p20_bytes_per_s == 2000
    planner.observe_full(100, 1.0)
    assert planner.full.is_measured
    assert not planner.blend.is_measured


def test_costs_and_speeds_are_checked_at_birth() -> None:
    for token_bytes in (0.0, -1.0, math.nan):
        with pytest.raises(InvalidRequestError, match="token_bytes"):
            planner_of(1e9).choose(plan(), token_bytes)
    for speed in ((-1.0, 0.0, 1.0, 1.0), (0.0, 0.0, 0.0, 0.0), (0, 0, math.nan, 1)):
        with pytest.raises(InvalidRequestError, match="speed"):
            Speed(*speed)


def test_a_comparison_is_divergence_and_agreement_of_the_likeliest_token() -> None:
    full = torch.tensor([[0.0, 0.0], [3.0, 0.0]])
    blended = torch.tensor([[math.log(3.0), 0.0], [3.0, 0.0]])
    found = compare(full, blended)
    one = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert found.divergence == pytest.approx(one / 2)
    assert (found.agreement, found.tokens) == (1.0, 2)
    assert compare(full, torch.tensor([[3.0, 0.0], [0.0, 1.0]])).agreement == 0.0
    assert compare(full, full).divergence == 0


def test_logits_that_are_no_numbers_are_the_worst_there_is_and_masked_tokens_are_left_out() -> None:
    """A gate is told so: a mean of them would be none, and a report of it refused."""
    full = torch.tensor([[9.0, 0.0, 0.0]])
    for wrong in (math.nan, -math.inf):
        found = compare(full, torch.tensor([[wrong, 0.0, 0.0]]))
        assert found.divergence > 100
        assert math.isfinite(found.divergence)
        assert found.agreement == 0.0
    masked = torch.tensor([[9.0, 0.0, -math.inf]])
    assert compare(masked, masked).divergence == 0
    assert compare(masked, torch.tensor([[0.0, 9.0, -math.inf]])).divergence > 8
    for rows, width in ((0, 3), (2, 4)):
        with pytest.raises(InvalidRequestError, match="the same rows"):
            compare(torch.zeros(rows, 3), torch.zeros(rows, width))


def test_agreement_is_that_of_tokens_of_which_the_full_prefill_is_sure() -> None:
    """Of two that are as likely to a few hundredths either may come first."""
    full = torch.tensor([[0.05, 0.0], [3.0, 0.0], [0.0, 2.0]])
    blended = torch.tensor([[0.0, 0.05], [3.0, 0.0], [2.0, 0.0]])
    found = compare(full, blended)
    assert (found.clear_tokens, found.agreement) == (2, 0.5)
    unclear = compare(full[:1], blended[:1])
    assert (unclear.clear_tokens, unclear.agreement) == (0, 0.0)


def test_of_two_comparisons_the_larger_divergence_counts_and_all_their_tokens() -> None:
    question, answer = ShadowEval(0.01, 1.0, 30, 20), ShadowEval(0.04, 0.5, 10, 10)
    found = worse(question, answer)
    assert (found.divergence, found.tokens, found.clear_tokens) == (0.04, 40, 30)
    assert found.agreement == pytest.approx(25 / 30)
    unclear = worse(ShadowEval(0.01, 0.9, 30, 0), ShadowEval(0.04, 0.6, 10, 0))
    assert unclear.agreement == pytest.approx(33 / 40)


def test_deviations_add_up_over_layers_each_in_its_own_size() -> None:
    small = torch.tensor([[[1.0], [1.0]]])
    wrong = torch.tensor([[[1.0], [0.0]]])
    layers = [(small, small), (small, 10 * small)]
    stored = [(small, wrong), (small, 10 * wrong)]
    assert deviations(layers, stored).tolist() == [0.0, 2.0]


def test_a_sources_own_deadline_is_told_as_it_said_it() -> None:
    class Late(MemorySource):
        def layer(self, i: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
            raise DeadlineError("redis took too long")

    with LayerLoader(Late({}), 1, math.inf) as loader, pytest.raises(DeadlineError, match="redis"):
        loader.take()
