"""The kvstore command: what to type, and what it exits with.

Exit codes: 0 done; 1 the demo did not hold; 2 wrong usage or configuration; 3 the store
answered with an error or not at all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvstore import __version__
from kvstore.proto.errors import InvalidRequestError, KVStoreError

EXIT_NOT_HELD = 1
EXIT_USAGE = 2
EXIT_STORE = 3

DEFAULT_ADDRESS = "127.0.0.1:7420"
DEMO_TOKENS = 900
MIN_DEMO_TOKENS = 64

_EXIT_CODES = (
    "Exit codes: 0 done; 1 the demo did not hold; 2 wrong usage or configuration;"
    " 3 the store answered with an error or not at all."
)
_AS_SERVER = {"allow_extra_args": True, "ignore_unknown_options": True}

# Plain help and tracebacks: rich takes longer to import than most commands take to run.
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Look at a kvstore server, check its configuration, see the store at work.",
    epilog=_EXIT_CODES,
)
config_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="What kvstore-server would make of these flags, the environment and the file.",
)
app.add_typer(config_app, name="config")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command in *argv*, or of this process. Ends in SystemExit."""
    try:
        app(args=None if argv is None else list(argv), prog_name="kvstore")
    except KVStoreError as error:
        _fail(error, EXIT_STORE)


def _fail(reason: object, status: int) -> None:
    print(f"kvstore: {reason}", file=sys.stderr)
    raise SystemExit(status)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvstore {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def status(
    address: Annotated[str, typer.Argument(help="HOST:PORT of the server")] = DEFAULT_ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a server's tiers and counters; exits with 3 when it cannot be reached."""
    from kvstore.cli.status import ask_status, print_status, status_as_json

    reply = ask_status(address)
    if as_json:
        print(status_as_json(address, reply))
    else:
        print_status(address, reply)


@config_app.command(context_settings=_AS_SERVER)
def show(context: typer.Context) -> None:
    """Print each setting as YAML with where it came from. Takes kvstore-server's flags."""
    from kvstore.server.config import load_with_origins
    from kvstore.server.settings_file import show

    try:
        config, origins = load_with_origins(context.args)
    except InvalidRequestError as error:
        _fail(error, EXIT_USAGE)
    print(show(config, origins), end="")


@config_app.command(context_settings=_AS_SERVER)
def validate(context: typer.Context) -> None:
    """Print ok, or exit with 2 and what is wrong. Takes kvstore-server's flags."""
    from kvstore.server.config import load_config

    try:
        load_config(context.args)
    except InvalidRequestError as error:
        _fail(error, EXIT_USAGE)
    print("ok")


@app.command()
def demo(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of a transformers model; default: the checkout's tinylm."
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=MIN_DEMO_TOKENS, metavar="N", help="Length of the prompt.")
    ] = DEMO_TOKENS,
) -> None:
    """Compute a prompt once, then load it: in another process, and after a kill -9.

    Starts a server of its own in a temporary folder. Exits with 1 unless the tokens are the
    same with and without the store and loading was faster than computing.
    """
    from kvstore.cli.demo import DemoError, run_demo

    try:
        held = run_demo(model, tokens, json_file)
    except DemoError as error:
        _fail(error, error.exit_status)
    if not held:
        raise typer.Exit(EXIT_NOT_HELD)


@app.command()
def codecs(
    names: Annotated[
        list[str] | None, typer.Argument(help="Codecs, such as kvq:2; default: all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what each codec does on this machine, and up to which link it pays."""
    from kvstore.cli.codecs import every_name, measure_all, print_speeds, speeds_as_json
    from kvstore.proto.errors import UnknownCodecError

    try:
        speeds, missing = measure_all(names or every_name())
    except UnknownCodecError as error:
        _fail(error, EXIT_USAGE)
    if as_json:
        print(speeds_as_json(speeds, missing))
    else:
        print_speeds(speeds, missing)


@app.command()
def calibrate(
    kind: Annotated[str, typer.Argument(help="What for: cachegen or kvt.")],
    sources: Annotated[
        list[Path],
        typer.Argument(help="Folder of a transformers model, or .npy and .safetensors KV dumps."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of assets to write into.")],
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text for the model to read.")
    ] = None,
    representation: Annotated[
        str | None, typer.Option(metavar="HEX", help="Representation digest, for dumps.")
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of the text to use.")] = 8192,
) -> None:
    """Make a model's asset for a codec that needs one; exits with 2 when it cannot."""
    from kvstore.cli.calibrate import Calibration
    from kvstore.cli.calibrate import calibrate as make
    from kvstore.proto.errors import RepresentationError

    try:
        path, asset = make(Calibration(kind, sources, out, text, representation, tokens))
    except (InvalidRequestError, RepresentationError) as error:
        _fail(error, EXIT_USAGE)
    print(f"{path}: {path.stat().st_size} bytes, digest {asset.digest.hex()}")
