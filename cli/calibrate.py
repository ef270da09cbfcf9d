"""`kvstore calibrate` and `blend`: codec assets, and gates of lossy copies and of blending."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from kvstore.cli import app
from kvstore.cli.bench import complete_codecs
from kvstore.proto.errors import InvalidRequestError

if TYPE_CHECKING:  # keeps --help fast
    from kvstore.proto.blend import GateView

app.group("blend", "Measure", "Reuse of chunks of other prompts.")


@app.command(
    "calibrate", exits="0 1 2 3", example="kvtc ./model --text book.txt --out .", section="Measure"
)
def calibrate(  # noqa: PLR0913 - each is an option
    address: str,
    kind: Annotated[
        Literal["cachegen", "kvtc", "kvq", "gate"],
        Argument(help="Codec to make an asset for; or gate, of lossy copies."),
    ],
    sources: Annotated[
        list[Path],
        Argument(help="Folder of a transformers model, or .npy and .safetensors KV dumps."),
    ],
    out: Annotated[Path | None, Option(metavar="DIR", help="Folder of assets.")] = None,
    text: Annotated[Path | None, app.path("Text for the model to read.")] = None,
    representation: Annotated[str | None, Option(metavar="HEX", help="Model of the dumps.")] = None,
    tokens: Annotated[int, app.number("Tokens of the text to use.")] = 8192,
    codec: Annotated[
        str, Option(help="gate: the codec of the copies.", autocompletion=complete_codecs)
    ] = "",
    prompts: Annotated[
        Path | None,
        app.path('gate: stored prompts, JSON lines: {"prompt": "..."} or {"tokens": [1, 2]}.'),
    ] = None,
    chunk_tokens: Annotated[int, app.number("gate: tokens of the engine's chunks.")] = 256,
) -> None:
    """Make a model's asset for a codec that needs one, or open the gate of a codec's lossy copies.

    A gate opens once 64 prompts are close enough to their full prefills. Exits with 1 if it is not
    open at the end, with 2 if there is nothing to make or compare.
    """
    from kvstore.cli.trials import compare_copies, samples_of
    from kvstore.codecs.assets import AssetKind
    from kvstore.codecs.calibration import make_asset

    if kind == "gate":
        _finish(compare_copies(sources, codec, prompts, chunk_tokens, address))
        return
    if out is None:
        raise InvalidRequestError("out", None, "give --out DIR for the asset")
    samples = samples_of(sources, text, representation, tokens)
    made, asset = make_asset(AssetKind[kind], samples, out)
    print(f"{made}: {made.stat().st_size} bytes, digest {asset.digest.hex()}")


@app.command("blend calibrate", exits="0 1 2 3", example="./my-model --text corpus.txt")
def blend_calibrate(  # noqa: PLR0913 - each is an option
    address: str,
    model: Annotated[Path, Argument(help="Folder of a transformers model.")],
    text: Annotated[Path | None, app.path("Text to cut documents from.")] = None,
    questions: Annotated[
        Path | None,
        app.path('Or prompts: JSON lines, {"documents": ["...", "..."], "question": "..."}.'),
    ] = None,
    prefix: Annotated[Path | None, app.path("System prompt; default: BOS or some text.")] = None,
    tag: Annotated[str, Option(help="Kind of prompts; each kind has its own gate.")] = "",
    documents: Annotated[int, app.number("Documents in a prompt.", 2)] = 4,
    document_tokens: Annotated[int, app.number("Tokens of each document.", 16)] = 128,
    question_tokens: Annotated[int, app.number("Tokens of the question.", 2)] = 32,
) -> None:
    """Blend prompts against full prefills until the gate opens, or stays closed.

    Exits with 1 when it stays closed.
    """
    from kvstore.cli.trials import BlendTrials

    trials = BlendTrials(text, questions, prefix, tag, documents, document_tokens, question_tokens)
    _finish(trials.run(address, model))


def check_extras(folder: Path) -> None:
    """Raise InvalidRequestError unless the packages that run a model are installed."""
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        fix = f"needs {' and '.join(missing)}: pip install 'kvstore-server[transformers]'"
        raise InvalidRequestError("model", str(folder), fix)


# --- display of gates


def gate_as_dict(gate: Any) -> dict[str, Any]:
    """Return a GateView, or its message, for JSON."""
    hidden = ("calibrated", "codecs")
    return {name: value for name, value in app.as_dict(gate).items() if name not in hidden}


def gate_line(gate: dict[str, Any]) -> str:
    """Return a line on one gate: its state, why, and its counts."""
    name = f"{gate['model'] or 'a model'}, tag {gate['tag'] or '-'}"
    requests = f"{gate['let_through']} prompts let through, {gate['kept_out']} not"
    compared = f"{gate['shadows']} compared since it changed"
    if gate["shadows"]:
        compared = f"{compared}: {_found(gate)}"
    state = f"{_state(gate)} at ratio {gate['ratio']:.3g}, {gate['why']}"
    return f"{name}: {state}; {requests}; {compared}"


def _finish(view: GateView) -> None:
    """Print the result of trials. Exits with 1 unless the gate is open."""
    gate = gate_as_dict(view)
    name = f"{gate['model']}, tag {gate['tag'] or '-'}"
    state = f"{name}: {_state(gate)} at ratio {gate['ratio']:.3f}"
    found = f"{_found(gate)}, speedup {_known(gate['speedup'])}: {gate['why']}"
    app.show(app.Shown(gate, [state, found], gate["open"]), as_json=False)


def _found(gate: dict[str, Any]) -> str:
    return f"agreement {_known(gate['agreement'])}, KL a token {_known(gate['divergence'])}"


def _state(gate: dict[str, Any]) -> str:
    return "open" if gate["open"] else "closed"


def _known(value: float) -> str:
    return f"{value:.3g}" if value >= 0 else "-"
