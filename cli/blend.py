"""`kvstore blend`: whose gates are open, and opening one by comparing with full prefills."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.exits import EXIT_NOT_HELD, EXIT_USAGE, fail
from kvstore.cli.manual import Manual
from kvstore.cli.server_address import DEFAULT_ADDRESS, Address, AddressArgument, one_of
from kvstore.proto.errors import InvalidRequestError, ModelError

if TYPE_CHECKING:  # help is to load none of the product
    from kvstore.proto.blend import GateView

_REPORT_EVERY = 8
"""Trials between two lines of progress."""
_MAX_LINES = 8
"""Of prompts that are named, so many are."""

blend_app = typer.Typer(
    cls=Manual,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Chunks of other prompts: whether a server gives them out, and why.",
)


@blend_app.command("status")
def blend_status(
    where: AddressArgument = None,
    address: Address = DEFAULT_ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the gates of a server: one for each model and tag that was tried."""
    from kvstore.cli.blend_report import gates_as_json, print_gates
    from kvstore.cli.status import ask_figures

    reply = ask_figures(one_of(where, address))
    if as_json:
        print(gates_as_json(reply))
    else:
        print_gates(reply)


@blend_app.command("calibrate")
def blend_calibrate(  # noqa: PLR0913 - each is an option
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
    address: Address = DEFAULT_ADDRESS,
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

    try:
        check_extras(model)
        from kvstore.cli.trials import BlendTrials

        trials = BlendTrials(
            text, questions, prefix, tag,
            documents, document_tokens, question_tokens, selector, seed,
        )  # fmt: skip
        gate = trials.run(address, model, _report)
    except (InvalidRequestError, ModelError) as error:
        fail(error, EXIT_USAGE)
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
