"""What `kvstore blend` prints: gates and counters, as tables or JSON."""

from __future__ import annotations

import json

from kvstore.cli.output import Grid, open_console
from kvstore.client.server_state import ServerStatus
from kvstore.proto.blend import GateView
from kvstore.proto.errors import printable


def gates_as_json(reply: ServerStatus) -> str:
    """Return the gates and the counters of blending as JSON."""
    shown = [gate_as_dict(one) for one in reply.gates]
    return json.dumps({"gates": shown, "counters": _counters(reply)}, indent=2)


def gate_as_dict(gate: GateView) -> dict[str, object]:
    """Return a gate as JSON shows it."""
    return {
        "model": gate.model, "tag": gate.tag, "open": gate.is_open, "ratio": gate.ratio,
        "agreement": gate.agreement, "divergence": gate.divergence, "shadows": gate.shadows,
        "speedup": gate.speedup, "let_through": gate.let_through, "kept_out": gate.kept_out,
        "why": gate.why,
    }  # fmt: skip


def gate_line(gate: GateView) -> str:
    """Return why requests of a model and tag were blended, or not."""
    state = f"{'open' if gate.is_open else 'closed'} at ratio {gate.ratio:.3g}"
    asked = f"{gate.let_through} prompts let through, {gate.kept_out} not"
    compared = f"{gate.shadows} compared since it changed"
    if gate.shadows:
        found = f"agreement {_known(gate.agreement)}, KL a token {_known(gate.divergence)}"
        compared = f"{compared}: {found}"
    name = f"{gate.model or 'a model'}, tag {gate.tag or '-'}"
    return f"{name}: {state}, {gate.why}; {asked}; {compared}"


def _counters(reply: ServerStatus) -> dict[str, int]:
    return {
        name: value for name, value in sorted(reply.counters.items()) if name.startswith("blend_")
    }


def print_gates(reply: ServerStatus) -> None:
    """Print the gates and the counters of blending as tables."""
    console = open_console()
    table = Grid("model", "tag", "gate", "ratio", "agreement", "KL a token", "speedup", "why")
    for one in reply.gates:
        table.add_row(
            one.model,
            one.tag or "-",
            "open" if one.is_open else "closed",
            f"{one.ratio:.3f}",
            _known(one.agreement),
            _known(one.divergence),
            _known(one.speedup),
            one.why,
        )
    console.print(table if reply.gates else "no gates: nobody has tried to blend; all are closed")
    counters = Grid("counter", "since the start")
    for name, value in _counters(reply).items():
        counters.add_row(name, str(value))
    console.print(counters)


def _known(value: float) -> str:
    return f"{value:.3g}" if value >= 0 else "-"


def print_gate(gate: GateView) -> None:
    """Print what came of trials."""
    state = "open" if gate.is_open else "closed"
    name = f"{gate.model}, tag {gate.tag or '-'}"
    print(printable(f"{name}: {state} at ratio {gate.ratio:.3f}"))
    held = f"agreement {_known(gate.agreement)}, KL a token {_known(gate.divergence)}"
    print(printable(f"{held}, speedup {_known(gate.speedup)}: {gate.why}"))
