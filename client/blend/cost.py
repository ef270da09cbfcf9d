"""Cost models of computing and loading, fitted to measured times, and decisions on plans.

CacheBlend (arXiv 2405.16444, section 5) raises the ratio until computing takes as long as
loading. Here a full prefill and the exact prefix alone are choices, too, and a choice must be
faster by more than the models' error.
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

from kvstore.client.blend.engine import BlendResult
from kvstore.client.blend.plan import BlendPlan
from kvstore.client.blend.selectors import CHECK_LAYER, check_selector, measure_of
from kvstore.client.planning import LinkMeter
from kvstore.proto.errors import InvalidRequestError

SAMPLES_KEPT = 64
_PRIOR_WEIGHT = 0.02
"""The prior's weight, as a fraction of one sample, so that the first samples replace it."""
LEVEL_SAMPLES = 5
"""The last samples rescale the whole fit, because a machine's speed drifts."""
ERRORS_KEPT = 16
_CAUTIOUS_SHARE = 0.8
_NO_SAMPLES_ERROR = 0.25

FREE_SHARE = 0.02
"""Plans up to this much slower than the fastest count as equal: the largest ratio wins."""
MIN_MARGIN = 0.05
"""The least gain over a full prefill for any other choice."""
RATIO_STEPS = 20

MAX_WAIT_SHARE = 0.5
"""The longest wait for loads, as a share of a full prefill."""
SLACK_SHARE = 0.1
"""The wait added to the expected load time, as a share of the same."""
LOAD_FACTOR = 2.0
"""The wait for loads, as a multiple of recent load times."""
FIRST_WAIT_S = 1.0
"""The wait until a full prefill was measured."""
Action: TypeAlias = Literal["full", "prefix", "blend"]


class Work(NamedTuple):
    """A pass's work per layer: stored tokens placed, rows computed, pairs attended.

    m rows spread over n tokens attend to about m (2 n - m) / 2 tokens; ``pairs`` is twice that.
    """

    passes: float
    loaded: float
    rows: float
    pairs: float

    @classmethod
    def of(cls, rows: Sequence[float], tokens: int, loaded: int) -> Work:
        """Return the work of one pass with *rows* per layer, over a prompt of *tokens*."""
        count = max(1, len(rows))
        pairs = sum(m * (2 * tokens - m) for m in rows) / count
        return cls(1.0, float(loaded), sum(rows) / count, pairs)


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds in all layers per pass, token placed, row and pair."""

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
        """Return the time of *work*."""
        return math.fsum(a * b for a, b in zip(astuple(self), work, strict=True))


class CostMeter:
    """Fits a Speed to measured work; *prior* holds until then. Thread-safe."""

    def __init__(self, prior: Speed) -> None:
        self.speed = prior
        self.error_share = _NO_SAMPLES_ERROR
        """The 80th percentile of the last predictions' relative errors."""
        self.is_measured = False
        self._prior = prior
        self._lock = threading.Lock()
        self._samples: deque[tuple[Work, float]] = deque(maxlen=SAMPLES_KEPT)
        self._errors: deque[float] = deque(maxlen=ERRORS_KEPT)

    def observe(self, work: Work, seconds: float) -> None:
        """Record the time of *work*; *seconds* that is not a positive number is ignored."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        with self._lock:
            if self.is_measured:  # the prior's error is not the fit's
                self._errors.append(abs(self.speed.seconds(work) / seconds - 1))
            self._samples.append((work, seconds))
            self.is_measured = True
            if len(self._errors) >= 4:
                place = int(_CAUTIOUS_SHARE * (len(self._errors) - 1))
                self.error_share = sorted(self._errors)[place]
            self.speed = _fitted(self._prior, list(self._samples))


def _fitted(prior: Speed, samples: Sequence[tuple[Work, float]]) -> Speed:
    """Return the speed of least squares (of relative errors), scaled to the last samples' median.

    A term that would be negative is set to 0, and the others are refitted.
    """
    work = np.array([one for one, _ in samples])
    seconds = np.array([taken for _, taken in samples])
    start = np.array(astuple(prior))
    scale = np.where(start > 0, start, start.max())
    rows = np.vstack([work / seconds[:, None] * scale, _PRIOR_WEIGHT * np.eye(4)])
    wanted = np.concatenate([np.ones(len(samples)), _PRIOR_WEIGHT * start / scale])
    is_free = np.ones(4, dtype=bool)
    found = np.full(4, -1.0)
    while (found < 0).any():
        found = np.zeros(4)
        found[is_free] = np.linalg.lstsq(rows[:, is_free], wanted, rcond=None)[0]
        is_free &= found > 0
    fitted = found * scale if found[2:].sum() > 0 else start
    expected = work[-LEVEL_SAMPLES:] @ fitted
    is_known = expected > 0
    taken = seconds[-LEVEL_SAMPLES:][is_known] / expected[is_known]
    return Speed(*(fitted * (median(taken.tolist()) if taken.size else 1.0)).tolist())


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen action, and the expected seconds of it and of a full prefill."""

    action: Action
    ratio: float
    expected_s: float
    full_s: float

    def applied(self, plan: BlendPlan) -> BlendPlan:
        """Return *plan* as decided, for ``Blender.blend``."""
        if self.action == "blend":
            return plan.with_ratio(self.ratio)
        return plan.without("approx", *(("exact",) if self.action == "full" else ()))


class BlendPlanner:
    """Chooses an action and the wait for loads, at first by *prior*. Thread-safe."""

    def __init__(self, n_layers: int, prior: Speed, link: LinkMeter) -> None:
        self.full = CostMeter(prior)
        self.blend = CostMeter(prior)
        self._n_layers = n_layers
        self._link = link
        self._lock = threading.Lock()  # guards the number below
        self._byte_s: float | None = None

    def choose(
        self, plan: BlendPlan, token_bytes: float, *, can_skip_rows: bool = False
    ) -> Decision:
        """Return the fastest action, or a full prefill unless faster than it by a margin.

        The plan's ratio is the smallest acceptable one. Ratios from it to 1 are compared; of those
        within FREE_SHARE of the fastest the largest is chosen: better quality at no cost.
        *token_bytes*: a stored token's bytes on the link, all layers. *can_skip_rows*: the source
        omits the rows in ``narrow``. Raises InvalidRequestError.
        """
        check_selector(plan.selector)
        if not token_bytes > 0:
            raise InvalidRequestError("token_bytes", token_bytes, "give positive bytes")
        token_s = token_bytes / self._link.estimate().p20_bytes_per_s
        tokens, exact = len(plan.tokens), plan.count("exact")
        full_s = self._full_s(tokens)
        found = []
        if exact:
            work = Work.of([tokens - exact], tokens, exact)
            found.append(Decision("prefix", 1.0, self._pipelined_s(work, exact * token_s), full_s))
        if plan.count("approx") and plan.ratio < 1:  # at 1 it is the full prefill
            steps = {plan.ratio, *(step / RATIO_STEPS for step in range(RATIO_STEPS))}
            ratios = [step for step in steps if step >= plan.ratio]
            timed = {one: self._blend_s(plan, one, token_s, can_skip_rows) for one in ratios}
            free_s = min(timed.values()) * (1 + FREE_SHARE)
            ratio = max(one for one, taken_s in timed.items() if taken_s <= free_s)
            found.append(Decision("blend", ratio, timed[ratio], full_s))
        margin = max(MIN_MARGIN, self.full.error_share, self.blend.error_share)
        found = [one for one in found if one.expected_s * (1 + margin) < full_s]
        nothing = Decision("full", 1.0, full_s, full_s)
        return min(found, key=lambda one: one.expected_s, default=nothing)

    def _blend_s(self, plan: BlendPlan, ratio: float, token_s: float, can_skip_rows: bool) -> float:
        tokens, miss, layers = len(plan.tokens), plan.count("miss"), self._n_layers
        stored = tokens - miss
        chosen = miss + plan.chosen_tokens(ratio)
        loaded, rows = float(stored), [chosen] * layers
        measure = measure_of(plan, layers) if ratio > 0 else None
        if measure == "attention":  # a separate pass loads everything
            first_s = self._pipelined_s(Work.of([miss], tokens, stored), stored * token_s)
            return first_s + self._compute_s(Work.of(rows, tokens, 0))
        if measure == "deviation":
            rows[:CHECK_LAYER] = [miss + plan.count("approx")] * CHECK_LAYER
        elif can_skip_rows:
            loaded = tokens - chosen
        return self._pipelined_s(Work.of(rows, tokens, stored), loaded * token_s)

    def _pipelined_s(self, work: Work, load_s: float) -> float:
        """Return the time of *work* whose loads take *load_s*, pipelined by layer.

        The first load and the last compute are exposed; between them the slower hides the other.
        """
        compute_s = self._compute_s(work)
        hidden_s = (self._n_layers - 1) * max(load_s, compute_s)
        return (load_s + hidden_s + compute_s) / self._n_layers

    def _compute_s(self, work: Work) -> float:
        """Return the compute time of *work*, at least that of the same rows in a prefill.

        The two models are fitted separately: a low error in one must not look like a gain.
        """
        as_prefill = work._replace(loaded=0.0)
        return max(self.full.speed.seconds(as_prefill), self.blend.speed.seconds(work))

    def _full_s(self, tokens: int) -> float:
        return self.full.speed.seconds(Work.of([tokens], tokens, 0))

    def observe_full(self, tokens: int, seconds: float) -> None:
        """Record a full prefill."""
        self.full.observe(Work.of([tokens], tokens, 0), seconds)

    def observe_blend(self, plan: BlendPlan, result: BlendResult, loaded_bytes: int) -> None:
        """Record a blend: its compute time, and the load time of *loaded_bytes*."""
        report, tokens, miss = result.report, len(plan.tokens), plan.count("miss")
        if report.failure:
            return
        work = Work.of(report.rows, tokens, tokens - miss)
        if report.attention is not None:
            work = Work(*(a + b for a, b in zip(work, Work.of([miss], tokens, 0), strict=True)))
        self.blend.observe(work, report.total_s - report.wait_s)
        self.observe_load(loaded_bytes, report.load_s)

    def observe_load(self, size_bytes: int, seconds: float) -> None:
        """Record the time of a plan's loads, or of a wait that timed out.

        A timeout bounds the link's rate and doubles the next wait, so that a store that became
        slower is measured.
        """
        if size_bytes <= 0:
            return
        self._link.observe(size_bytes, seconds)
        with self._lock:
            faded = 0.8 * (self._byte_s or 0.0)  # the slowest so far counts less with each load
            self._byte_s = max(seconds / size_bytes, faded)

    def wait_s(self, tokens: int, size_bytes: int) -> float:
        """Return the total wait for loads of *size_bytes*, for a prompt of *tokens* tokens."""
        if not self.full.is_measured:
            return FIRST_WAIT_S
        full_s = self._full_s(tokens)
        load_s = full_s if self._byte_s is None else self._byte_s * size_bytes
        return min(MAX_WAIT_SHARE * full_s, LOAD_FACTOR * load_s + SLACK_SHARE * full_s)
