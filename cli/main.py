"""The kvstore command: what to type. The commands' own modules register them when imported here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from kvstore.cli import auth, bench, blend, chunks, config, doctor, explain, server, trace
from kvstore.cli.app import EXIT_STORE, EXIT_USAGE, app, command, fail, number, path
from kvstore.cli.demo import demo
from kvstore.cli.simulate import report
from kvstore.proto.errors import InvalidRequestError, KVStoreError, ModelError, UnknownCodecError

MODULES = (auth, bench, blend, chunks, config, demo, doctor, explain, report, server, trace)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command in *argv*, or of this process. Ends in SystemExit."""
    try:
        app(args=None if argv is None else list(argv), prog_name="kvstore")
    except (InvalidRequestError, ModelError, UnknownCodecError, OSError) as error:
        fail(error, EXIT_USAGE)
    except KVStoreError as error:
        fail(error, EXIT_STORE)


@command(
    "calibrate",
    exits="0 1 2 3",
    example="kvstore calibrate kvt ./my-model --text corpus.txt --out assets",
    section="Measure",
)
def calibrate(  # noqa: PLR0913 - each is an option
    address: str,
    kind: Annotated[
        Literal["cachegen", "kvt", "kvqs", "gate"],
        Argument(help="Codec to make an asset for; or gate, of lossy copies."),
    ],
    sources: Annotated[
        list[Path],
        Argument(help="Folder of a transformers model, or .npy and .safetensors KV dumps."),
    ],
    out: Annotated[Path | None, Option(metavar="DIR", help="Folder of assets.")] = None,
    text: Annotated[Path | None, path("Text for the model to read.")] = None,
    representation: Annotated[str | None, Option(metavar="HEX", help="Model of the dumps.")] = None,
    tokens: Annotated[int, number("Tokens of the text to use.")] = 8192,
    codec: Annotated[str, Option(help="gate: the codec whose copies are compared.")] = "",
    prompts: Annotated[
        Path | None,
        path('gate: stored prompts, JSON lines: {"prompt": "..."} or {"tokens": [1, 2]}.'),
    ] = None,
    chunk_tokens: Annotated[int, number("gate: tokens of the engine's chunks.")] = 256,
) -> None:
    """Make a model's asset for a codec that needs one, or open the gate of a codec's lossy copies.

    A gate opens once 64 prompts are near enough to their full prefills; exits with 1 when it is not
    open in the end, with 2 when nothing can be made or compared.
    """
    from kvstore.cli.calibrate import compare_copies, samples_of
    from kvstore.codecs.assets import AssetKind
    from kvstore.codecs.calibration import make_asset

    if kind == "gate":
        compare_copies(sources, codec, prompts, chunk_tokens, address)
        return
    if out is None:
        raise InvalidRequestError("out", None, "give --out DIR, to write the asset into")
    samples = samples_of(sources, text, representation, tokens)
    made, asset = make_asset(AssetKind[kind], samples, out)
    print(f"{made}: {made.stat().st_size} bytes, digest {asset.digest.hex()}")


if __name__ == "__main__":
    main()
