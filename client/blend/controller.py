"""Whether to blend, and how much to compute: the least of max(load, compute), layer by layer.

After CacheBlend (arXiv 2405.16444, section 5), which raises the ratio until computing takes as
long as loading; here full recompute and the exact prefix alone are choices too, and whatever
is not expected to be faster by more than the models err is not chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from kvstore.client.blend.cost import CostEstimate, CostMeter, Speed, Work
from kvstore.client.blend.plan import BlendPlan
from kvstore.client.blend.report import BlendResult
from kvstore.client.blend.selectors import selector_of
from kvstore.client.levels import LinkMeter
from kvstore.proto.errors import InvalidRequestError

FREE_SHARE = 0.02
"""A plan this much slower than the fastest is as fast: the largest ratio among them wins."""
LEAST_MARGIN = 0.05
"""What must be gained at least before anything but a full prefill is chosen."""
RATIO_STEPS = 20

Action: TypeAlias = Literal["full", "prefix", "blend"]


@dataclass(frozen=True, slots=True)
class Storage:
    """What loading costs: bytes a token of all layers, as stored, and a request's delay.

    ``can_skip_rows``: the source leaves out what ``narrow`` names.
    """

    token_bytes: float
    bytes_per_s: float
    delay_s: float = 0.0
    can_skip_rows: bool = False

    def __post_init__(self) -> None:
        if not (self.token_bytes > 0 and self.bytes_per_s > 0 and self.delay_s >= 0):
            found = (self.token_bytes, self.bytes_per_s, self.delay_s)
            raise InvalidRequestError("storage", found, "give positive bytes, speed and delay")


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, what it is expected to take, and what computing all of the prompt would."""

    action: Action
    ratio: float
    expected_s: float
    full_s: float

    def applied(self, plan: BlendPlan) -> BlendPlan:
        """Return *plan* as decided: for ``Blender.blend``."""
        if self.action == "blend":
            return plan.with_ratio(self.ratio)
        return plan.without("approx", *(("exact",) if self.action == "full" else ()))


class Controller:
    """Decides for one engine. *prior*: its speed until something was measured.

    Any thread may call it.
    """

    def __init__(self, n_layers: int, prior: Speed, link: LinkMeter) -> None:
        self._n_layers = n_layers
        self._full = CostMeter(prior)
        self._blend = CostMeter(prior)
        self._link = link

    def decide(
        self, plan: BlendPlan, token_bytes: float, *, can_skip_rows: bool = False
    ) -> Decision:
        """Return what to do with *plan*, whose ratio is the least that is good enough.

        *token_bytes*: what a stored token takes on the link, all layers.
        """
        speed = self._link.estimate().p20_bytes_per_s
        storage = Storage(token_bytes, speed, can_skip_rows=can_skip_rows)
        return choose(plan, self._n_layers, storage, self._full.estimate(), self._blend.estimate())

    @property
    def knows_full(self) -> bool:
        """Whether a full prefill was measured."""
        return self._full.is_measured

    @property
    def knows_blend(self) -> bool:
        """Whether a blend was measured."""
        return self._blend.is_measured

    def observe_full(self, tokens: int, seconds: float) -> None:
        """Take note of a full prefill."""
        self._full.observe(Work.of([tokens], tokens, 0), seconds)

    def observe_blend(self, plan: BlendPlan, result: BlendResult, loaded_bytes: int) -> None:
        """Take note of a blend: what it computed, and how fast *loaded_bytes* came."""
        report = result.report
        if report.failure:
            return
        loaded = plan.count("exact") + plan.count("approx")
        work = Work.of(report.rows, len(plan.tokens), loaded)
        if report.attention is not None:
            work += Work.of([plan.count("miss")], len(plan.tokens), 0)
        self._blend.observe(work, report.total_s - report.wait_s)
        self._link.observe(loaded_bytes, report.load_s)

    def observe_late(self, loaded_bytes: int, waited_s: float) -> None:
        """Take note of loads that were given up: the link is no faster than that."""
        self._link.observe(loaded_bytes, waited_s)


def choose(
    plan: BlendPlan, n_layers: int, storage: Storage, full: CostEstimate, blend: CostEstimate
) -> Decision:
    """Return the fastest way that is sure to be no slower than computing everything.

    Ratios from the plan's to 1 are weighed; among those within FREE_SHARE of the fastest the
    largest is taken: quality for nothing.
    """
    tokens = len(plan.tokens)
    full_s = full.speed.seconds(Work.of([tokens], tokens, 0))
    nothing = Decision("full", 1.0, full_s, full_s)
    margin = max(LEAST_MARGIN, full.error_share, blend.error_share)
    timing = _Timing(plan, n_layers, storage, (full.speed, blend.speed))
    found = []
    if plan.count("exact"):
        found.append(Decision("prefix", 1.0, timing.prefix_s(), full_s))
    if plan.count("approx") and plan.ratio < 1:  # at 1 it is the full prefill
        found.append(_best_blend(plan, timing, full_s))
    found = [one for one in found if one.expected_s * (1 + margin) < full_s]
    return min(found, key=lambda one: one.expected_s, default=nothing)


def _best_blend(plan: BlendPlan, timing: _Timing, full_s: float) -> Decision:
    steps = {plan.ratio, *(step / RATIO_STEPS for step in range(RATIO_STEPS))}
    timed = [(timing.blend_s(ratio), ratio) for ratio in steps if ratio >= plan.ratio]
    fastest_s = min(timed)[0]
    free = [(ratio, taken) for taken, ratio in timed if taken <= fastest_s * (1 + FREE_SHARE)]
    ratio, expected_s = max(free)
    return Decision("blend", ratio, expected_s, full_s)


@dataclass(frozen=True, slots=True)
class _Timing:
    """Seconds of the ways to serve one plan, each as a pipeline of loads and layers."""

    plan: BlendPlan
    n_layers: int
    storage: Storage
    speeds: tuple[Speed, Speed]
    """Of full prefills and of blends."""

    def compute_s(self, work: Work) -> float:
        """Return what *work* takes: no less than as many rows of a prefill.

        The two are learned apart, and what errs low in one must not look like a gain.
        """
        full, blend = self.speeds
        return max(full.seconds(replace(work, loaded=0.0)), blend.seconds(work))

    def prefix_s(self) -> float:
        """Return what it takes to load the exact segments and compute the rest."""
        exact = self.plan.count("exact")
        rows = len(self.plan.tokens) - exact
        return self._pipeline([exact] * self.n_layers, [rows] * self.n_layers, exact)

    def blend_s(self, ratio: float) -> float:
        """Return what blending takes with *ratio* of the approximate rows computed."""
        plan = self.plan
        exact, approx, miss = (plan.count(kind) for kind in ("exact", "approx", "miss"))
        chosen = miss + plan.chosen_tokens(ratio)
        selector = selector_of(plan.selector)
        checks = [c for c in selector.check_layers(plan) if c < self.n_layers]
        if checks and 0 < ratio < 1:
            first, last = min(checks), max(checks)
            loads = [exact + (approx if i >= first else 0) for i in range(self.n_layers)]
            rows = [miss + approx if i < last else chosen for i in range(self.n_layers)]
            return self._pipeline(loads, rows, exact + approx)
        if selector.needs_attention and ratio > 0:
            loads, rows = [exact + approx] * self.n_layers, [miss] * self.n_layers
            second = Work.of([chosen], len(plan.tokens), 0)
            return self._pipeline(loads, rows, exact + approx) + self.compute_s(second)
        kept = len(plan.tokens) - exact - chosen if self.storage.can_skip_rows else approx
        return self._pipeline(
            [exact + kept] * self.n_layers, [chosen] * self.n_layers, exact + approx
        )

    def _pipeline(self, loads: Sequence[float], rows: Sequence[float], placed: int) -> float:
        """Return when the last layer is done.

        Each waits for its load and the layer before; the next is asked for when it is taken.
        """
        token_s = self.storage.token_bytes / self.storage.bytes_per_s / self.n_layers
        work = {count: Work.of([count], len(self.plan.tokens), placed) for count in set(rows)}
        layer_s = {count: self.compute_s(one) / self.n_layers for count, one in work.items()}
        done, asked = 0.0, 0.0
        delay_s = self.storage.delay_s
        for tokens, count in zip(loads, rows, strict=True):
            taken = max(done, asked + delay_s + tokens * token_s)
            done, asked, delay_s = taken + layer_s[count], taken, 0.0
        return done
