"""Gates: the gate table as calls use it, with the models' names, and over a restart."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.codecs.base import boundless_codecs
from kvstore.proto.blend import ACCURACY_TAG, GateView, accuracy_tag
from kvstore.proto.types import Namespace
from kvstore.server.blending.gate_table import (
    MAX_GATES,
    UNKNOWN,
    GateName,
    GateState,
    GateTable,
    Permit,
    Shadow,
)
from kvstore.server.security.sessions import Session
from kvstore.server.settings.values import GateTerms
from kvstore.server.telemetry.metrics import Counters


class Asked(NamedTuple):
    """Requests, trials left out, that a gate let through, and those for which it was closed."""

    let_through: int
    kept_out: int


class Gates:
    """Thread-safe. *draw* returns numbers from 0 to below 1."""

    def __init__(self, terms: GateTerms, draw: Callable[[], float], counters: Counters) -> None:
        self._table = GateTable(terms, draw)
        self._counters = counters
        self._models: OrderedDict[bytes, str] = OrderedDict()
        self._asked: OrderedDict[GateName, Asked] = OrderedDict()
        # Guards the three; held for dictionary operations only.
        self._lock = threading.Lock()

    def ask(self, session: Session, tag: str, *, trial: bool) -> Permit:
        """May one request of *session* be blended, and is it to be compared?"""
        with self._lock:
            permit = self._table.ask((session.namespace, tag), trial=trial)
            if not trial:
                self._note(session, tag, permit)
        if not trial:
            self._counters.add("blend_let_through" if permit.may_pass else "blend_kept_out")
        return permit

    def _note(self, session: Session, tag: str, permit: Permit) -> None:
        name = (session.namespace, tag)
        through, out = self._asked.pop(name, Asked(0, 0))
        self._asked[name] = Asked(through + permit.may_pass, out + (not permit.may_pass))
        self._know(session.namespace, session.representation.model_id)
        if len(self._asked) > MAX_GATES:
            self._asked.popitem(last=False)

    def told(
        self, session: Session, tag: str, shadow: Shadow | None, speedup: float = UNKNOWN
    ) -> GateView:
        """Take in what one request turned out to be; return the gate as it is then."""
        with self._lock:
            table = self._table
            changes, closed = table.changes, table.closed
            name = (session.namespace, tag)
            gate = table.told(name, shadow, speedup)
            self._know(session.namespace, session.representation.model_id)
            changes, closed = table.changes - changes, table.closed - closed
            view = self._view(name, gate)
        self._counters.add("blend_shadows", shadow is not None)
        self._counters.add("blend_gate_changes", changes)
        self._counters.add("blend_gates_closed", closed)
        return view

    def _know(self, space: Namespace, model: str) -> None:
        self._models.pop(space, None)
        self._models[space] = model
        if len(self._models) > MAX_GATES:
            self._models.popitem(last=False)

    def view(self, session: Session, tag: str) -> GateView:
        """Return one gate."""
        with self._lock:
            name = (session.namespace, tag)
            return self._view(name, self._table.state(name))

    def of_codecs(self, session: Session) -> GateView:
        """Return whether lossy copies without a bound are read of any codec, and of which."""
        names = {one: (session.namespace, accuracy_tag(one)) for one in boundless_codecs()}
        with self._lock:
            states = {one: self._table.state(name) for one, name in names.items()}
        codecs = tuple(codec for codec, gate in states.items() if gate.is_open)
        return GateView(bool(codecs), 0.0, tag=ACCURACY_TAG, codecs=codecs)

    def views(self) -> list[GateView]:
        """Return all that were heard of, those that were used last last."""
        with self._lock:
            known = dict(self._table)
            unknown = {name: self._table.state(name) for name in self._asked if name not in known}
            return [self._view(*one) for one in (*unknown.items(), *known.items())]

    def _view(self, name: GateName, gate: GateState) -> GateView:
        return GateView(
            gate.is_open, gate.ratio, gate.agreement, gate.divergence, gate.shadows, gate.why,
            gate.is_calibrated, gate.speedup, name[1], self._models.get(name[0], ""),
            *self._asked.get(name, (0, 0)),
        )  # fmt: skip

    def open_count(self) -> int:
        """Gates that are open."""
        with self._lock:
            return sum(gate.is_open for _, gate in self._table)

    # --- over a restart

    @property
    def changes(self) -> int:
        """How often any gate opened, closed or changed its ratio."""
        return self._table.changes

    def save(self) -> list[tuple[GateName, str, GateState]]:
        """Return the gates that are open, with their models' names."""
        with self._lock:
            return [
                (name, self._models.get(name[0], ""), gate)
                for name, gate in self._table.calibrated()
            ]

    def restore(self, saved: Sequence[tuple[GateName, str, GateState]]) -> int:
        """Open gates that an earlier run had open; return how many."""
        with self._lock:
            for name, model, _ in saved:
                self._know(Namespace(name[0]), model)
            self._table.restore([(name, gate) for name, _, gate in saved])
            return len(self._table)
