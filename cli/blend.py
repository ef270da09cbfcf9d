"""`kvstore blend`: whose gates are open, and opening one by comparing with full prefills."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.app import EXIT_NOT_HELD, AsJson, command, group
from kvstore.proto.errors import InvalidRequestError

if TYPE_CHECKING:  # help is to load none of the product
    from kvstore.proto.blend import GateView

_REPORT_EVERY = 8
"""Trials between two lines of progress."""
_MAX_LINES = 8
"""Of prompts that are named, so many are."""

group("blend", "Measure", "Reuse of chunks of other prompts: the gates, and their calibration.")


@command("blend status", example="kvstore blend status", where=True)
def blend_status(address: str, as_json: AsJson = False) -> None:
    """Show the gates of a server: one for each model and tag that was tried."""
    from kvstore.cli.blend_report import gates_as_json, print_gates
    from kvstore.cli.server import fetch_figures

    reply = fetch_figures(address)
    if as_json:
        print(gates_as_json(reply))
    else:
        print_gates(reply)


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
    from kvstore.cli.blend_report import print_gate
    from kvstore.cli.calibrate import check_extras

    check_extras(model)
    from kvstore.cli.trials import BlendTrials

    trials = BlendTrials(
        text, questions, prefix, tag,
        documents, document_tokens, question_tokens, selector, seed,
    )  # fmt: skip
    gate = trials.run(address, model, _report)
    print_gate(gate)
    if not gate.is_open:
        raise typer.Exit(EXIT_NOT_HELD)


def compare_copies(
    models: Sequence[Path], codec: str, prompts: Path | None, chunk_tokens: int, address: str
) -> None:
    """Compare what a model makes of *codec*'s copies of stored prompts with full prefills.

    Ends the process with 1 when the gate is not open then. Raises what ``run_copy_trials`` does.
    """
    from kvstore.cli.blend_report import print_gate
    from kvstore.cli.calibrate import check_extras

    if len(models) > 1:
        raise InvalidRequestError("sources", len(models), "give one model")
    if prompts is None:
        raise InvalidRequestError("prompts", None, "give --prompts FILE")
    check_extras(models[0])
    from kvstore.cli.trials import run_copy_trials

    gate, short = run_copy_trials(address, models[0], codec, prompts, chunk_tokens, _report)
    print_gate(gate)
    if short:
        lines = ", ".join(short[:_MAX_LINES]) + ", ..." * (len(short) > _MAX_LINES)
        fix = "give prompts that are longer, or more of which is stored by this codec alone"
        text = f"{len(short)} of the prompts did not count: too few tokens could be compared; {fix}"
        typer.echo(f"{text} (lines {lines})", err=True)
    if not gate.is_open:
        raise typer.Exit(EXIT_NOT_HELD)


def _report(gate: GateView) -> None:
    """Report how trials go, from time to time."""
    if gate.shadows % _REPORT_EVERY == 0:
        typer.echo(f"ratio {gate.ratio:.3f}, {gate.why}", err=True)
