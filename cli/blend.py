"""`kvstore blend`: whose gates are open, and opening one by comparing with full prefills."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.app import EXIT_NOT_HELD, AsJson, command, group

if TYPE_CHECKING:  # help is to load none of the product
    from kvstore.proto.blend import GateView

_REPORT_EVERY = 8
"""Trials between two lines of progress."""

group("blend", "Measure", "Reuse of chunks of other prompts: the gates, and their calibration.")


@command("blend status", example="kvstore blend status", where=True)
def blend_status(address: str, as_json: AsJson = False) -> None:
    """Show the gates of a server: one for each model and tag that was tried."""
    from kvstore.cli.output import Grid, show
    from kvstore.cli.server import fetch_figures

    reply = fetch_figures(address)
    counted = {name: n for name, n in sorted(reply.counters.items()) if name.startswith("blend_")}
    table = Grid("model", "tag", "gate", "ratio", "agreement", "KL a token", "speedup", "why")
    for gate in reply.gates:
        known = map(_known, (gate.agreement, gate.divergence, gate.speedup))
        ratio = f"{gate.ratio:.3f}"
        table.add_row(gate.model, gate.tag or "-", _state(gate), ratio, *known, gate.why)
    counters = Grid("counter", "since the start")
    for name, value in counted.items():
        counters.add_row(name, value)
    nothing = "no gates: nobody has tried to blend; all are closed"
    shown = {"gates": list(map(gate_as_dict, reply.gates)), "counters": counted}
    show(shown, [table if reply.gates else nothing, counters], as_json)


@command(
    "blend calibrate",
    exits="0 1 2 3",
    example="kvstore blend calibrate ./my-model --text corpus.txt",
)
def blend_calibrate(  # noqa: PLR0913 - each is an option
    address: str,
    model: Annotated[Path, typer.Argument(help="Folder of a transformers model.")],
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to cut documents from.")
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='Or prompts: JSON lines, {"documents": ["...", "..."], "question": "..."}.',
        ),
    ] = None,
    prefix: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The system prompt, in front; else BOS or some text."),
    ] = None,
    tag: Annotated[str, typer.Option(help="What kind of prompts; gates are one for each.")] = "",
    documents: Annotated[int, typer.Option(min=2, metavar="N", help="In a prompt.")] = 4,
    document_tokens: Annotated[int, typer.Option(min=16, metavar="N", help="Of each.")] = 128,
    question_tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Of the end.")] = 32,
    selector: Annotated[str, typer.Option(help="Who chooses what is recomputed.")] = "hybrid",
    seed: Annotated[int, typer.Option(help="Of the order of documents.")] = 0,
) -> None:
    """Blend prompts against full prefills until the gate opens, or stays closed.

    Exits with 1 when it stays closed.
    """
    from kvstore.cli.calibrate import check_extras

    check_extras(model)
    from kvstore.cli.trials import BlendTrials

    trials = BlendTrials(
        text, questions, prefix, tag,
        documents, document_tokens, question_tokens, selector, seed,
    )  # fmt: skip
    gate = trials.run(address, model)
    print_gate(gate)
    if not gate.is_open:
        raise typer.Exit(EXIT_NOT_HELD)


# --- how gates are shown


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
    asked = f"{gate.let_through} prompts let through, {gate.kept_out} not"
    compared = f"{gate.shadows} compared since it changed"
    if gate.shadows:
        found = f"agreement {_known(gate.agreement)}, KL a token {_known(gate.divergence)}"
        compared = f"{compared}: {found}"
    name = f"{gate.model or 'a model'}, tag {gate.tag or '-'}"
    return f"{name}: {_state(gate)} at ratio {gate.ratio:.3g}, {gate.why}; {asked}; {compared}"


def print_gate(gate: GateView) -> None:
    """Print what came of trials."""
    from kvstore.proto.errors import printable

    name = f"{gate.model}, tag {gate.tag or '-'}"
    print(printable(f"{name}: {_state(gate)} at ratio {gate.ratio:.3f}"))
    held = f"agreement {_known(gate.agreement)}, KL a token {_known(gate.divergence)}"
    print(printable(f"{held}, speedup {_known(gate.speedup)}: {gate.why}"))


def follow(gate: GateView) -> None:
    """Report how trials go, from time to time."""
    if gate.shadows % _REPORT_EVERY == 0:
        typer.echo(f"ratio {gate.ratio:.3f}, {gate.why}", err=True)


def _state(gate: GateView) -> str:
    return "open" if gate.is_open else "closed"


def _known(value: float) -> str:
    return f"{value:.3g}" if value >= 0 else "-"
