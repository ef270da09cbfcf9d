"""The gates of blending: whether a model may use KV of other prompts, and how much of it is
recomputed, decided by comparison with full prefills.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from kvstore.codecs.base import boundless_codecs
from kvstore.proto.blend import ACCURACY_TAG, UNKNOWN, GateView, ShadowResult, accuracy_tag
from kvstore.proto.types import Namespace
from kvstore.server.settings.values import MAX_RATIO, GateTerms
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.tiering.admission import remember

MAX_GATES = 1024
"""Limit of gates; beyond it a closed one is dropped, if any."""

TRIALS = 64
"""Full prefills compared before a gate opens."""

LEAST_TRIAL_TOKENS = 16
"""Shorter trials do not count: the mean weighs all equally."""

RAISE = 1.5
SETTLED_SHADOWS = 4
"""Comparisons at one ratio before they can raise it."""

EAGER_REQUESTS = 8
"""n requests after a change or bad comparison, a request is compared with the probability
EAGER_REQUESTS / (EAGER_REQUESTS + n), or the configured share if that is more."""

FULL_WEIGHT_TOKENS = 64
_EWMA_WEIGHT = 0.25
"""Weight of a comparison over at least FULL_WEIGHT_TOKENS tokens; less in proportion below."""

GateName: TypeAlias = tuple[bytes, str]
"""Namespace (tenant and model) and tag."""


@dataclass(frozen=True, slots=True)
class Shadow(ShadowResult):
    """One comparison, and the recomputed share."""

    ratio: float


@dataclass(frozen=True, slots=True)
class GateState(GateView):
    """The state of one gate. ``asked``: requests since the last change or bad comparison."""

    asked: int = 0


class Permit(NamedTuple):
    """Whether a request may use blending, and whether it is compared."""

    may_pass: bool
    is_shadow: bool


class Gates:
    """All gates, by name. Thread-safe. *draw* returns random numbers in [0, 1).

    A closed gate admits trials only: requests answered by a full prefill while the engine blends
    for comparison. TRIALS of them within bounds open it; else the ratio is raised, and past
    MAX_RATIO it stays closed. In an open gate, comparisons out of bounds raise the ratio, and past
    MAX_RATIO close it. Comparisons below the gate's ratio do not count. Gates of lossy copies, with
    ACCURACY_TAG, have a ratio of 0 and close at once when out of bounds.
    """

    def __init__(self, terms: GateTerms, draw: Callable[[], float], counters: Counters) -> None:
        self.terms = terms
        self._draw = draw
        self._counters = counters
        self._gates: OrderedDict[GateName, GateState] = OrderedDict()
        self._requests: OrderedDict[GateName, tuple[str, int, int]] = OrderedDict()
        """Model, and requests except trials: admitted, and rejected by a closed gate."""
        self.changes = 0
        """Number of times a gate opened, closed or changed its ratio."""
        # Guards the three above; held for dictionary operations only.
        self._lock = threading.Lock()

    def _state(self, name: GateName) -> GateState:
        if name in self._gates:
            return self._gates[name]
        ratio, command = self.terms.ratio, "blend calibrate"
        if name[1].startswith(ACCURACY_TAG):
            ratio, command = 0.0, "calibrate gate"
        return GateState(False, ratio, why=f"not calibrated; run kvstore {command}", tag=name[1])

    def admit(self, name: GateName, *, trial: bool, model: str = "") -> Permit:
        """Return whether a request of *model* may use blending, and whether it is compared."""
        with self._lock:
            gate = self._state(name)
            if trial:
                return Permit(may_pass=True, is_shadow=True)
            is_open, is_shadow = gate.is_open, False
            if is_open:
                eager = EAGER_REQUESTS / (EAGER_REQUESTS + gate.asked)
                self._keep(name, replace(gate, asked=gate.asked + 1))
                is_shadow = self._draw() < max(self.terms.shadow_share, eager)
            _, through, out = self._requests.get(name, ("", 0, 0))
            counted = (model, through + is_open, out + (not is_open))
            remember(self._requests, name, counted, MAX_GATES)
        self._counters.add("blend_let_through" if is_open else "blend_kept_out")
        return Permit(is_open, is_shadow)

    def record(
        self, name: GateName, shadow: Shadow | None, speedup: float = UNKNOWN, model: str = ""
    ) -> GateState:
        """Record the result of one request; return the new state of the gate."""
        with self._lock:
            gate = self._state(name)
            was_open, is_counted = gate.is_open, False
            if shadow is not None and shadow.ratio >= gate.ratio - 1e-3:
                is_counted = was_open or shadow.tokens >= LEAST_TRIAL_TOKENS
            if speedup >= 0:
                before = gate.speedup if gate.speedup >= 0 else speedup
                gate = replace(gate, speedup=before + _EWMA_WEIGHT * (speedup - before))
            if shadow is not None and is_counted:
                gate = self._watched(gate, shadow) if was_open else self._tried(gate, shadow)
            if is_counted or name in self._gates:
                self._keep(name, replace(gate, model=model or gate.model))
            has_changed = is_counted and not gate.shadows  # its ratio, or open or closed
            self.changes += has_changed
        self._counters.add("blend_shadows", shadow is not None)
        self._counters.add("blend_gate_changes", has_changed)
        self._counters.add("blend_gates_closed", was_open and not gate.is_open)
        return gate

    def _watched(self, gate: GateState, shadow: Shadow) -> GateState:
        """Return an open gate with one more comparison in its moving averages."""
        terms = self.terms
        agreement, divergence = gate.agreement, gate.divergence
        if not gate.shadows:  # start amid the bounds, so that no single comparison decides
            agreement, divergence = (1 + terms.min_agreement) / 2, terms.max_divergence / 2
        weight = _EWMA_WEIGHT * min(1.0, shadow.tokens / FULL_WEIGHT_TOKENS)
        gate = replace(
            gate,
            agreement=agreement + weight * (shadow.agreement - agreement),
            divergence=divergence + weight * (shadow.divergence - divergence),
            shadows=gate.shadows + 1,
            asked=gate.asked if self._is_good(shadow.agreement, shadow.divergence) else 0,
        )
        if gate.shadows < SETTLED_SHADOWS or self._is_good(gate.agreement, gate.divergence):
            return gate
        return self._raised(gate)

    def _tried(self, gate: GateState, shadow: Shadow) -> GateState:
        """Return a closed gate with one more trial: plain means, as all are at one ratio."""
        count = gate.shadows + 1
        agreement, divergence = (gate.agreement, gate.divergence) if count > 1 else (0.0, 0.0)
        gate = replace(
            gate,
            agreement=agreement + (shadow.agreement - agreement) / count,
            divergence=divergence + (shadow.divergence - divergence) / count,
            shadows=count,
            why=f"calibrating: {count} of {TRIALS} trials",
        )
        if count < TRIALS:
            return gate
        if not self._is_good(gate.agreement, gate.divergence):
            return self._raised(gate)
        return replace(gate, is_open=True, shadows=0, asked=0, is_calibrated=True, why="calibrated")

    def _raised(self, gate: GateState) -> GateState:
        """Return the gate with a higher ratio, or closed past MAX_RATIO."""
        at = f"{gate.ratio:.3g}: agreement {gate.agreement:.3f}, divergence {gate.divergence:.3g}"
        ratio = gate.ratio * RAISE
        gate = replace(gate, shadows=0, asked=0)
        if 0 < ratio <= MAX_RATIO:
            return replace(gate, ratio=ratio, why=f"raised from {at}")
        ratio, why = min(gate.ratio, self.terms.ratio), f"closed at {at}"
        return replace(gate, is_open=False, is_calibrated=False, ratio=ratio, why=why)

    def _is_good(self, agreement: float, divergence: float) -> bool:
        bounds = self.terms
        return agreement >= bounds.min_agreement and divergence <= bounds.max_divergence

    def _keep(self, name: GateName, gate: GateState) -> None:
        self._gates[name] = gate
        self._gates.move_to_end(name)
        if len(self._gates) > MAX_GATES:
            shut = (one for one in self._gates if not self._gates[one].is_open and one != name)
            del self._gates[next(shut, next(iter(self._gates)))]

    def view(self, name: GateName) -> GateView:
        """Return one gate for clients and operators."""
        with self._lock:
            return self._view(name, self._state(name))

    def of_codecs(self, space: Namespace) -> GateView:
        """Return the codecs whose lossy copies without a bound may be read, as one gate."""
        names = {one: (space, accuracy_tag(one)) for one in boundless_codecs()}
        with self._lock:
            codecs = tuple(one for one, name in names.items() if self._state(name).is_open)
        return GateView(bool(codecs), 0.0, tag=ACCURACY_TAG, codecs=codecs)

    def views(self) -> list[GateView]:
        """Return all used gates, the latest last."""
        with self._lock:
            unknown = {n: self._state(n) for n in self._requests if n not in self._gates}
            return [self._view(*one) for one in (*unknown.items(), *self._gates.items())]

    def _view(self, name: GateName, gate: GateState) -> GateView:
        model, through, out = self._requests.get(name, ("", 0, 0))
        return replace(gate, model=model or gate.model, let_through=through, kept_out=out)

    def save(self) -> list[tuple[GateName, GateState]]:
        """Return the open gates."""
        with self._lock:
            return [(name, gate) for name, gate in self._gates.items() if gate.is_open]

    def restore(self, saved: Sequence[tuple[GateName, GateState]]) -> None:
        """Open the gates that an earlier run had open, as if just opened."""
        with self._lock:
            for name, gate in saved[:MAX_GATES]:
                self._keep(name, replace(gate, asked=0, shadows=0))

    def __len__(self) -> int:
        return len(self._gates)
