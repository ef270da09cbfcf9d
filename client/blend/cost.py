"""What computing and loading take, learned from what they took, and what to do with a plan.

CacheBlend (arXiv 2405.16444, section 5) raises the ratio until computing takes as long as
loading. Here a full prefill and the exact prefix alone are choices too, and whatever is not
expected to be faster by more than the models err is not chosen.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from statistics import median
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.client.blend.engine import BlendResult
from kvstore.client.blend.plan import BlendPlan
from kvstore.client.blend.selectors import CHECK_LAYER, check_selector, measure_of
from kvstore.client.planning import LinkMeter
from kvstore.proto.errors import InvalidRequestError

SAMPLES_KEPT = 64
_PRIOR_WEIGHT = 0.02
"""How firmly the prior stands: as a fraction of one sample, so the first ones replace it."""
LEVEL_SAMPLES = 5
"""Machines get slower and faster: the last samples say how much against the whole fit."""
ERRORS_KEPT = 16
_CAUTIOUS_SHARE = 0.8
_NO_SAMPLES_ERROR = 0.25

FREE_SHARE = 0.02
"""A plan this much slower than the fastest is as fast: the largest ratio among them wins."""
MIN_MARGIN = 0.05
"""What must be gained at least before anything but a full prefill is chosen."""
RATIO_STEPS = 20

MAX_WAIT_SHARE = 0.5
"""Of what a full prefill takes: loads are waited for no longer, however long they take."""
SLACK_SHARE = 0.1
"""Of the same: however quick they are."""
LOAD_FACTOR = 2.0
"""What loads may take beyond what they took lately."""
FIRST_WAIT_S = 1.0
"""Until a full prefill was measured."""
_EWMA_WEIGHT = 0.25
_FADING = 0.8
"""What is left of the slowest load, one load later."""
Action: TypeAlias = Literal["full", "prefix", "blend"]


class Work(NamedTuple):
    """What a pass does in the mean layer: stored tokens placed, rows computed, pairs attended.

    A row at the end of n tokens attends n of them; m rows spread over n tokens about
    m (2 n - m) / 2, of which ``pairs`` is twice as many.
    """

    passes: float
    loaded: float
    rows: float
    pairs: float

    @classmethod
    def of(cls, rows: Sequence[float], tokens: int, loaded: int) -> Work:
        """Return the work of one pass: *rows* of each layer, of a prompt of *tokens*."""
        count = max(1, len(rows))
        pairs = sum(m * (2 * tokens - m) for m in rows) / count
        return cls(1.0, float(loaded), sum(rows) / count, pairs)


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds that all layers take: of a pass, a token placed, a row, a pair."""

    pass_s: float
    loaded_s: float
    row_s: float
    pair_s: float

    def __post_init__(self) -> None:
        is_known = all(math.isfinite(value) and value >= 0 for value in astuple(self))
        if not (is_known and self.row_s + self.pair_s > 0):
            fix = "finite seconds, none negative, and computing takes some"
            raise InvalidRequestError("speed", astuple(self), fix)

    def seconds(self, work: Work) -> float:
        """Return what *work* takes."""
        return math.fsum(a * b for a, b in zip(astuple(self), work, strict=True))


class CostEstimate(NamedTuple):
    """What to expect, and the relative error that four of five predictions kept to."""

    speed: Speed
    error_share: float


class CostMeter:
    """Learns a Speed from finished work; *prior* stands until then. Any thread may call."""

    def __init__(self, prior: Speed) -> None:
        self._prior = prior
        self._lock = threading.Lock()
        self._samples: deque[tuple[Work, float]] = deque(maxlen=SAMPLES_KEPT)
        self._errors: deque[float] = deque(maxlen=ERRORS_KEPT)
        self.estimate = CostEstimate(prior, _NO_SAMPLES_ERROR)

    @property
    def is_measured(self) -> bool:
        """Whether any work was observed."""
        return bool(self._samples)

    def observe(self, work: Work, seconds: float) -> None:
        """Take note of what *work* took; what is not a positive number says nothing."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        with self._lock:
            if self._samples:  # the prior's error says nothing of the fit's
                self._errors.append(abs(self.estimate.speed.seconds(work) / seconds - 1))
            self._samples.append((work, seconds))
            errors = sorted(self._errors)
            place = int(_CAUTIOUS_SHARE * (len(errors) - 1))
            error = errors[place] if len(errors) >= 4 else _NO_SAMPLES_ERROR
            self.estimate = CostEstimate(_fitted(self._prior, list(self._samples)), error)


def _fitted(prior: Speed, samples: Sequence[tuple[Work, float]]) -> Speed:
    """Return the speed with the least relative error, none of its terms negative.

    Least squares; a term that would be negative is 0 and the others are fitted again. All of it
    is then as much slower as the last samples were, in the median.
    """
    work = np.array([one for one, _ in samples])
    seconds = np.array([taken for _, taken in samples])
    start = np.array(astuple(prior))
    scale = np.where(start > 0, start, start.max())
    rows = np.vstack([work / seconds[:, None] * scale, _PRIOR_WEIGHT * np.eye(4)])
    wanted = np.concatenate([np.ones(len(samples)), _PRIOR_WEIGHT * start / scale])
    is_free = np.ones(4, dtype=bool)
    found: NDArray[np.float64] = np.zeros(4)
    while is_free.any():
        found = np.zeros(4)
        found[is_free] = np.linalg.lstsq(rows[:, is_free], wanted, rcond=None)[0]
        if (found >= 0).all():
            break
        is_free &= found > 0
    fitted = found * scale if found[2:].sum() > 0 else start
    expected = work[-LEVEL_SAMPLES:] @ fitted
    is_known = expected > 0
    taken = seconds[-LEVEL_SAMPLES:][is_known] / expected[is_known]
    return Speed(*(fitted * (median(taken.tolist()) if taken.size else 1.0)).tolist())


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and the seconds expected of it and of a full prefill."""

    action: Action
    ratio: float
    expected_s: float
    full_s: float

    def applied(self, plan: BlendPlan) -> BlendPlan:
        """Return *plan* as decided: for ``Blender.blend``."""
        if self.action == "blend":
            return plan.with_ratio(self.ratio)
        return plan.without("approx", *(("exact",) if self.action == "full" else ()))


@dataclass(frozen=True, slots=True)
class Costs:
    """What an engine and a link take: full prefills, blends, and a stored token, all layers.

    ``can_skip_rows``: the source leaves out what ``narrow`` names. Raises InvalidRequestError.
    """

    n_layers: int
    full: CostEstimate
    blend: CostEstimate
    token_bytes: float
    bytes_per_s: float
    can_skip_rows: bool = False

    def __post_init__(self) -> None:
        if not (self.token_bytes > 0 and self.bytes_per_s > 0):
            found = (self.token_bytes, self.bytes_per_s)
            raise InvalidRequestError("storage", found, "give positive bytes and speed")

    def choose(self, plan: BlendPlan) -> Decision:
        """Return the fastest way that is sure to be no slower than computing everything.

        Ratios from the plan's to 1 are weighed; among those within FREE_SHARE of the fastest the
        largest is taken: quality for nothing.
        """
        check_selector(plan.selector)
        tokens = len(plan.tokens)
        full_s = self.full.speed.seconds(Work.of([tokens], tokens, 0))
        margin = max(MIN_MARGIN, self.full.error_share, self.blend.error_share)
        found = []
        if exact := plan.count("exact"):
            loads, rows = [exact] * self.n_layers, [tokens - exact] * self.n_layers
            expected_s = self._pipelined_s(plan, loads, rows, exact)
            found.append(Decision("prefix", 1.0, expected_s, full_s))
        if plan.count("approx") and plan.ratio < 1:  # at 1 it is the full prefill
            steps = {plan.ratio, *(step / RATIO_STEPS for step in range(RATIO_STEPS))}
            timed = {step: self._blend_s(plan, step) for step in steps if step >= plan.ratio}
            free_s = min(timed.values()) * (1 + FREE_SHARE)
            ratio = max(step for step, taken_s in timed.items() if taken_s <= free_s)
            found.append(Decision("blend", ratio, timed[ratio], full_s))
        found = [one for one in found if one.expected_s * (1 + margin) < full_s]
        nothing = Decision("full", 1.0, full_s, full_s)
        return min(found, key=lambda one: one.expected_s, default=nothing)

    def _blend_s(self, plan: BlendPlan, ratio: float) -> float:
        exact, approx, miss = (plan.count(kind) for kind in ("exact", "approx", "miss"))
        stored, chosen, layers = exact + approx, miss + plan.chosen_tokens(ratio), self.n_layers
        measure = measure_of(plan, layers) if ratio > 0 else None
        if measure == "deviation" and ratio < 1:
            loads = [exact + (approx if i >= CHECK_LAYER else 0) for i in range(layers)]
            rows = [miss + approx if i < CHECK_LAYER else chosen for i in range(layers)]
            return self._pipelined_s(plan, loads, rows, stored)
        if measure == "attention":
            first_s = self._pipelined_s(plan, [stored] * layers, [miss] * layers, stored)
            return first_s + self._compute_s(Work.of([chosen], len(plan.tokens), 0))
        kept = len(plan.tokens) - exact - chosen if self.can_skip_rows else approx
        return self._pipelined_s(plan, [exact + kept] * layers, [chosen] * layers, stored)

    def _pipelined_s(
        self, plan: BlendPlan, loads: Sequence[float], rows: Sequence[float], placed: int
    ) -> float:
        """Return when the last layer is done, of *loads* tokens and computed *rows* a layer.

        Each waits for its load and the layer before; the next is requested when it is taken.
        """
        token_s = self.token_bytes / self.bytes_per_s / self.n_layers
        work = {count: Work.of([count], len(plan.tokens), placed) for count in set(rows)}
        layer_s = {count: self._compute_s(one) / self.n_layers for count, one in work.items()}
        done_s, requested_s = 0.0, 0.0
        for tokens, count in zip(loads, rows, strict=True):
            requested_s = max(done_s, requested_s + tokens * token_s)
            done_s = requested_s + layer_s[count]
        return done_s

    def _compute_s(self, work: Work) -> float:
        """Return what *work* takes: no less than as many rows of a prefill.

        The two are learned apart, and what errs low in one must not look like a gain.
        """
        as_prefill = work._replace(loaded=0.0)
        return max(self.full.speed.seconds(as_prefill), self.blend.speed.seconds(work))


class BlendPlanner:
    """Decides for one engine, and says how long loads are waited for. Any thread may call it.

    *prior*: the engine's speed until something was measured. What is waited for in vain is lost,
    as the prompt is computed then: a late store costs as much more than a full prefill as it was
    waited for.
    """

    def __init__(self, n_layers: int, prior: Speed, link: LinkMeter) -> None:
        self.full = CostMeter(prior)
        self.blend = CostMeter(prior)
        self._n_layers = n_layers
        self._link = link
        self._lock = threading.Lock()  # guards the two below
        self._token_s = math.nan
        self._byte_s = math.nan

    def choose(
        self, plan: BlendPlan, token_bytes: float, *, can_skip_rows: bool = False
    ) -> Decision:
        """Return what to do with *plan*, whose ratio is the smallest that is good enough.

        *token_bytes*: what a stored token takes on the link, all layers.
        """
        full, blend = self.full.estimate, self.blend.estimate
        speed = self._link.estimate().p20_bytes_per_s
        return Costs(self._n_layers, full, blend, token_bytes, speed, can_skip_rows).choose(plan)

    def observe_full(self, tokens: int, seconds: float) -> None:
        """Take note of a full prefill."""
        self.full.observe(Work.of([tokens], tokens, 0), seconds)
        with self._lock:
            known = seconds / tokens if math.isnan(self._token_s) else self._token_s
            self._token_s = known + _EWMA_WEIGHT * (seconds / tokens - known)

    def observe_blend(self, plan: BlendPlan, result: BlendResult, loaded_bytes: int) -> None:
        """Take note of a blend: what it computed, and how fast *loaded_bytes* came."""
        report = result.report
        if report.failure:
            return
        loaded = plan.count("exact") + plan.count("approx")
        work = Work.of(report.rows, len(plan.tokens), loaded)
        if report.attention is not None:
            probe = Work.of([plan.count("miss")], len(plan.tokens), 0)
            work = Work(*(a + b for a, b in zip(work, probe, strict=True)))
        self.blend.observe(work, report.total_s - report.wait_s)
        self.observe_load(loaded_bytes, report.load_s)

    def observe_load(self, size_bytes: int, seconds: float) -> None:
        """Take note of what a plan's loads took, or were waited for in vain.

        After the latter the link counts as no faster than that, and the next loads are waited for
        twice as long, so that a store that became slower is found to be so.
        """
        if size_bytes <= 0:
            return
        self._link.observe(size_bytes, seconds)
        with self._lock:
            faded = 0.0 if math.isnan(self._byte_s) else _FADING * self._byte_s
            self._byte_s = max(seconds / size_bytes, faded)

    def wait_s(self, tokens: int, size_bytes: int) -> float:
        """Return how long loads of *size_bytes* are waited for, in all, of a prompt of *tokens*."""
        with self._lock:
            full_s, load_s = self._token_s * tokens, self._byte_s * size_bytes
        if math.isnan(full_s):
            return FIRST_WAIT_S
        if math.isnan(load_s):
            return MAX_WAIT_SHARE * full_s
        return min(MAX_WAIT_SHARE * full_s, LOAD_FACTOR * load_s + SLACK_SHARE * full_s)
