"""The gate of blending: whether a model's KV of other prompts is given out, and how much of it
is recomputed, decided by comparing with full prefills.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from kvstore.proto.blend import ACCURACY_TAG
from kvstore.server.settings.values import MAX_RATIO, GateTerms

MAX_GATES = 1024
"""Models and tags that are told apart; of one more, one that is closed is forgotten, if any is."""

TRIALS = 64
"""Full prefills that are compared before a gate opens."""

LEAST_TRIAL_TOKENS = 16
"""Trials over fewer are not counted: the mean weighs all alike."""

RAISE = 1.5
SETTLED_SHADOWS = 4
"""Comparisons at one ratio before anything follows from them."""

EAGER_REQUESTS = 8
"""After every change or bad comparison n more requests pass, and one is compared with the chance
EAGER_REQUESTS / (EAGER_REQUESTS + n), until that is less than the usual share."""

FULL_WEIGHT_TOKENS = 64
_EWMA_WEIGHT = 0.25
"""Of a comparison over FULL_WEIGHT_TOKENS tokens or more; of fewer, in proportion."""

UNKNOWN = -1.0

GateName: TypeAlias = tuple[bytes, str]
"""Namespace, so tenant and model, and tag."""


@dataclass(frozen=True, slots=True)
class Shadow:
    """One comparison: KL(full || blended) a token in nats, the share of tokens whose most likely
    one agrees, of those with a clear one, over how many tokens, and the share that was recomputed.
    """

    divergence: float
    agreement: float
    tokens: int
    ratio: float


@dataclass(frozen=True, slots=True)
class GateState:
    """One gate as it is now. ``asked``: requests since the last change or bad comparison."""

    is_open: bool
    ratio: float
    agreement: float = UNKNOWN
    divergence: float = UNKNOWN
    shadows: int = 0
    why: str = "not calibrated; run kvstore blend calibrate"
    is_calibrated: bool = False
    speedup: float = UNKNOWN
    asked: int = 0


class Permit(NamedTuple):
    """The answer to one request: the gate, whether it may pass, and whether it is compared."""

    gate: GateState
    may_pass: bool
    is_shadow: bool


class GateTable:
    """All gates. Not thread-safe: the owner locks. *draw* returns numbers from 0 to below 1.

    Closed, a gate lets trials through only: requests answered from a full prefill beside which
    the engine blends. TRIALS of them within bounds open it; else the ratio is raised, and past
    MAX_RATIO it stays closed. Open, comparisons that come out of bounds raise the ratio, and past
    MAX_RATIO close it. Comparisons at less than the gate's ratio are not counted, nor trials over
    fewer than LEAST_TRIAL_TOKENS tokens.

    Gates of lossy copies, those of ACCURACY_TAG, have a ratio of 0: nothing of them is recomputed,
    and where they are too far from exact they close at once.
    """

    def __init__(self, terms: GateTerms, draw: Callable[[], float]) -> None:
        self.terms = terms
        self._draw = draw
        self._gates: OrderedDict[GateName, GateState] = OrderedDict()
        self.changes = 0
        """How often a gate opened, closed or changed its ratio."""
        self.closed = 0
        """How often one that was open closed."""

    def state(self, name: GateName) -> GateState:
        """Return a gate; one that nobody knows is closed."""
        if name[1].startswith(ACCURACY_TAG):
            unknown = GateState(
                is_open=False, ratio=0.0, why="not calibrated; run kvstore calibrate gate"
            )
        else:
            unknown = GateState(is_open=False, ratio=self.terms.ratio)
        return self._gates.get(name) or unknown

    def ask(self, name: GateName, *, trial: bool) -> Permit:
        """May one request be blended, and is it to be compared?"""
        gate = self.state(name)
        if trial:
            return Permit(gate, may_pass=True, is_shadow=True)
        if not gate.is_open:
            return Permit(gate, may_pass=False, is_shadow=False)
        chance = max(self.terms.shadow_share, EAGER_REQUESTS / (EAGER_REQUESTS + gate.asked))
        self._keep(name, replace(gate, asked=gate.asked + 1))
        return Permit(gate, may_pass=True, is_shadow=self._draw() < chance)

    def told(self, name: GateName, shadow: Shadow | None, speedup: float = UNKNOWN) -> GateState:
        """Take in what one request turned out to be, and return the gate as it is then."""
        gate = self.state(name)
        if speedup >= 0:
            before = gate.speedup if gate.speedup >= 0 else speedup
            gate = replace(gate, speedup=before + _EWMA_WEIGHT * (speedup - before))
        if shadow is not None and self._counts(gate, shadow):
            gate = self._watched(gate, shadow) if gate.is_open else self._tried(gate, shadow)
        elif name not in self._gates:
            return gate
        self._keep(name, gate)
        return gate

    def _counts(self, gate: GateState, shadow: Shadow) -> bool:
        is_long = gate.is_open or shadow.tokens >= LEAST_TRIAL_TOKENS
        return is_long and shadow.ratio >= gate.ratio - 1e-3

    def _mixed(self, gate: GateState, shadow: Shadow) -> GateState:
        """Return the gate with one more comparison in its means."""
        terms = self.terms
        agreement, divergence = gate.agreement, gate.divergence
        if not gate.shadows:  # begun in the middle of the bounds, so that no single one decides
            agreement, divergence = (1 + terms.min_agreement) / 2, terms.max_divergence / 2
        weight = _EWMA_WEIGHT * min(1.0, shadow.tokens / FULL_WEIGHT_TOKENS)
        return replace(
            gate,
            agreement=agreement + weight * (shadow.agreement - agreement),
            divergence=divergence + weight * (shadow.divergence - divergence),
            shadows=gate.shadows + 1,
        )

    def _watched(self, gate: GateState, shadow: Shadow) -> GateState:
        gate = self._mixed(gate, shadow)
        if not self._is_good(shadow.agreement, shadow.divergence):
            gate = replace(gate, asked=0)
        if gate.shadows < SETTLED_SHADOWS or self._is_good(gate.agreement, gate.divergence):
            return gate
        return self._raised(gate)

    def _tried(self, gate: GateState, shadow: Shadow) -> GateState:
        """Take in a trial: plain means, as all of them are at one ratio."""
        count = gate.shadows
        agreement, divergence = (gate.agreement, gate.divergence) if count else (0.0, 0.0)
        gate = replace(
            gate,
            agreement=agreement + (shadow.agreement - agreement) / (count + 1),
            divergence=divergence + (shadow.divergence - divergence) / (count + 1),
            shadows=count + 1,
            why=f"calibrating: {count + 1} of {TRIALS} trials",
        )
        if gate.shadows < TRIALS:
            return gate
        if not self._is_good(gate.agreement, gate.divergence):
            return self._raised(gate)
        self.changes += 1
        return replace(gate, is_open=True, shadows=0, asked=0, is_calibrated=True, why="calibrated")

    def _raised(self, gate: GateState) -> GateState:
        """Recompute more, or close when that were too much."""
        found = f"agreement {gate.agreement:.3f}, divergence {gate.divergence:.3g}"
        ratio = gate.ratio * RAISE
        self.changes += 1
        if 0 < ratio <= MAX_RATIO:
            why = f"raised from {gate.ratio:.3g}: {found}"
            return replace(gate, ratio=ratio, shadows=0, asked=0, why=why)
        self.closed += gate.is_open
        why = f"closed at {gate.ratio:.3g}: {found}"
        ratio = min(gate.ratio, self.terms.ratio)
        return replace(
            gate, is_open=False, ratio=ratio, shadows=0, asked=0, why=why, is_calibrated=False
        )

    def _is_good(self, agreement: float, divergence: float) -> bool:
        terms = self.terms
        return agreement >= terms.min_agreement and divergence <= terms.max_divergence

    def _keep(self, name: GateName, gate: GateState) -> None:
        self._gates[name] = gate
        self._gates.move_to_end(name)
        if len(self._gates) > MAX_GATES:
            names = iter(self._gates)
            shut = (one for one in names if not self._gates[one].is_open and one != name)
            del self._gates[next(shut, next(iter(self._gates)))]

    # --- over a restart

    def calibrated(self) -> list[tuple[GateName, GateState]]:
        """Return the gates that are open."""
        return [(name, gate) for name, gate in self._gates.items() if gate.is_open]

    def restore(self, gates: Sequence[tuple[GateName, GateState]]) -> None:
        """Open gates that an earlier run had open; they are watched as if just opened."""
        for name, gate in gates[:MAX_GATES]:
            self._keep(name, replace(gate, asked=0, shadows=0))

    def __iter__(self) -> Iterator[tuple[GateName, GateState]]:
        return iter(list(self._gates.items()))

    def __len__(self) -> int:
        return len(self._gates)
