"""What computing takes, learned from what it took: seconds from rows and pairs of tokens."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from statistics import median
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.client.blend.engine import BlendResult
from kvstore.client.blend.plan import BlendPlan
from kvstore.client.blend.selectors import selector_of
from kvstore.client.link_meter import LinkMeter
from kvstore.proto.errors import InvalidRequestError

SAMPLES_KEPT = 64
_PRIOR_WEIGHT = 0.02
"""How firmly the prior stands: as a fraction of one sample, so the first ones replace it."""
LEVEL_SAMPLES = 5
"""Machines get slower and faster: the last samples say how much against the whole fit."""
ERRORS_KEPT = 16
_CAUTIOUS_SHARE = 0.8
_NO_SAMPLES_ERROR = 0.25


@dataclass(frozen=True, slots=True)
class Work:
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

    def __add__(self, other: Work) -> Work:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Work(*(a + b for a, b in pairs))


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds that all layers take: of a pass, a token placed, a row, a pair."""

    pass_s: float
    loaded_s: float
    row_s: float
    pair_s: float

    def __post_init__(self) -> None:
        if not all(np.isfinite(value) and value >= 0 for value in astuple(self)):
            raise InvalidRequestError("speed", astuple(self), "seconds are finite and not negative")
        if not self.row_s + self.pair_s > 0:
            raise InvalidRequestError("speed", astuple(self), "computing takes time")

    def seconds(self, work: Work) -> float:
        """Return what *work* takes."""
        pairs = zip(astuple(self), astuple(work), strict=True)
        return float(sum(a * b for a, b in pairs))


@dataclass(frozen=True, slots=True)
class CostEstimate:
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
        self._estimate = CostEstimate(prior, _NO_SAMPLES_ERROR)

    def observe(self, work: Work, seconds: float) -> None:
        """Take note of what *work* took; what is not a positive number says nothing."""
        if not (np.isfinite(seconds) and seconds > 0):
            return
        with self._lock:
            before = self._estimate.speed
            if self._samples:  # the prior's error says nothing of the fit's
                self._errors.append(abs(before.seconds(work) / seconds - 1))
            self._samples.append((work, seconds))
            samples, errors = list(self._samples), sorted(self._errors)
        speed = _levelled(_fit(self._prior, samples), samples)
        place = int(_CAUTIOUS_SHARE * (len(errors) - 1))
        error = errors[place] if len(errors) >= 4 else _NO_SAMPLES_ERROR
        with self._lock:
            self._estimate = CostEstimate(speed, error)

    @property
    def is_measured(self) -> bool:
        """Whether anything was observed yet."""
        with self._lock:
            return bool(self._samples)

    def estimate(self) -> CostEstimate:
        """Return what is known now."""
        with self._lock:
            return self._estimate


def _fit(prior: Speed, samples: Sequence[tuple[Work, float]]) -> Speed:
    """Return the speed with the least relative error, none of its terms negative.

    Least squares; a term that would be negative is 0 and the others are fitted again.
    """
    work = np.array([astuple(one) for one, _ in samples])
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
    fitted = found * scale
    if not fitted[2:].sum() > 0:
        return prior
    return Speed(*fitted.tolist())


def _levelled(speed: Speed, samples: Sequence[tuple[Work, float]]) -> Speed:
    """Return *speed* made as much slower as the last samples were, in the median."""
    last = [(speed.seconds(work), taken) for work, taken in samples[-LEVEL_SAMPLES:]]
    level = median([taken / expected for expected, taken in last if expected > 0] or [1.0])
    return Speed(*(part * level for part in astuple(speed)))


# How long a blend waits for the store: what loads take lately, some slack, and never long.
#
# What was waited for in vain is lost, as the prompt is computed then: a store that is late costs as
# much more than a full prefill as it was waited for.

MOST = 0.5
"""Of what a full prefill takes: however long loads take."""
SLACK = 0.1
"""Of the same: however quick they are."""
TIMES = 2.0
"""What loads may take beyond what they took lately."""
FIRST_S = 1.0
"""Until a full prefill was measured."""
_EWMA_WEIGHT = 0.25
_FADES = 0.8
"""What is left of the slowest load, one load later."""


class Patience:
    """Learns from full prefills and from loads. Any thread may call."""

    def __init__(self) -> None:
        self._token_s = math.nan
        self._byte_s = math.nan
        self._lock = threading.Lock()  # guards both

    def note_full(self, tokens: int, seconds: float) -> None:
        """Take note of a full prefill."""
        found = seconds / tokens
        with self._lock:
            known = found if math.isnan(self._token_s) else self._token_s
            self._token_s = known + _EWMA_WEIGHT * (found - known)

    def note_load(self, size_bytes: int, seconds: float) -> None:
        """Take note of what a whole plan's loads took."""
        if size_bytes <= 0:
            return
        with self._lock:
            faded = 0.0 if math.isnan(self._byte_s) else _FADES * self._byte_s
            self._byte_s = max(seconds / size_bytes, faded)

    def note_late(self, size_bytes: int, waited_s: float) -> None:
        """Take note of loads that were given up: the next ones are waited for twice as long, so
        that a store that became slower is found to be so.
        """
        self.note_load(size_bytes, waited_s)

    def within_s(self, tokens: int, size_bytes: int) -> float:
        """Return how long loads of *size_bytes* are waited for, in all, of a prompt of *tokens*."""
        with self._lock:
            full_s, load_s = self._token_s * tokens, self._byte_s * size_bytes
        if math.isnan(full_s):
            return FIRST_S
        if math.isnan(load_s):
            return MOST * full_s
        return min(MOST * full_s, TIMES * load_s + SLACK * full_s)


# Whether to blend, and how much to compute: the least of max(load, compute), layer by layer.
#
# After CacheBlend (arXiv 2405.16444, section 5), which raises the ratio until computing takes as
# long as loading; here full recompute and the exact prefix alone are choices too, and whatever
# is not expected to be faster by more than the models err is not chosen.

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
