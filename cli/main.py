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
from kvstore.cli.blend import blend_app
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
trace_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="What a server is asked for: recorded without anything of anybody's, and replayed.",
)
app.add_typer(trace_app, name="trace")
app.add_typer(blend_app, name="blend")


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


@app.command()
def top(
    address: Annotated[str, typer.Argument(help="HOST:PORT of the server")] = DEFAULT_ADDRESS,
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one look as JSON.")] = False,
    every_s: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between looks.")] = 2,
) -> None:
    """Watch a server's tiers, hit ratios, policies and what another size would be worth."""
    from kvstore.cli.top import show_live, show_once

    if once or as_json:
        show_once(address, as_json=as_json)
    else:
        show_live(address, every_s)


@app.command()
def explain(  # noqa: PLR0913 - each is an option
    address: Annotated[str, typer.Option(help="HOST:PORT of the server.")] = DEFAULT_ADDRESS,
    representation: Annotated[
        Path | None,
        typer.Option(
            "--model-representation", metavar="FILE", help="JSON, as --spaces --json prints it."
        ),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(metavar="HEX", help="Of the chunks; on the server's host.")
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Token ids of a prompt.")
    ] = None,
    keys: Annotated[
        list[str] | None, typer.Option(metavar="HEX", help="A key or digest; give it repeatedly.")
    ] = None,
    chunk_tokens: Annotated[int, typer.Option(metavar="N", help="Of the engine.")] = 256,
    extra: Annotated[
        list[str] | None,
        typer.Option(metavar="HEX", help="What else names the prompt, such as its salt."),
    ] = None,
    recent: Annotated[
        int, typer.Option(metavar="N", min=0, help="The last N misses, and engines' own counts.")
    ] = 0,
    spaces: Annotated[
        bool, typer.Option("--spaces", help="Each model's identity that is known there.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say why a prompt's chunks are hits or misses, or what missed lately and why."""
    from kvstore.cli.explain import Question, ask_explain, explain_as_json, print_explain
    from kvstore.proto.errors import RepresentationError

    try:
        question = Question(
            representation, namespace, tokens, keys or (), chunk_tokens, extra or (), recent, spaces
        )
        reply = ask_explain(address, question)
    except (InvalidRequestError, RepresentationError, OSError) as error:
        _fail(error, EXIT_USAGE)
    if as_json:
        print(explain_as_json(address, reply))
    else:
        print_explain(reply)


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


@app.command()
def simulate(  # noqa: PLR0913 - each is an option
    trace: Annotated[Path, typer.Argument(help="JSONL: Mooncake's blocks or token segments.")],
    policy: Annotated[
        str, typer.Option(metavar="P[,P]", help="Eviction policies, or all.")
    ] = "hit_density",
    capacity: Annotated[
        str,
        typer.Option("--capacity", "--size", metavar="C[,C]", help="10GiB, or 5% of the trace."),
    ] = "5%",
    model: Annotated[str, typer.Option(help="attention or hybrid-7b.")] = "attention",
    kv_bytes_per_token: Annotated[
        int, typer.Option(metavar="N", help="Of the model attention.")
    ] = 131_072,
    block_tokens: Annotated[
        int, typer.Option(metavar="N", help="Of a block, where the trace has none.")
    ] = 256,
    count_from: Annotated[
        str, typer.Option("--from", metavar="start|half", help="Count hits from there on.")
    ] = "start",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw hits by capacity: .svg or .png.")
    ] = None,
) -> None:
    """Replay a trace on policies and capacities, and print what each would have hit."""
    from kvstore.cli.simulate import Simulator, Terms, names_of
    from kvstore.cli.simulate_report import (
        check_plot,
        outcomes_as_json,
        plot_outcomes,
        print_outcomes,
    )

    try:
        if count_from not in ("start", "half"):
            raise InvalidRequestError("from", count_from, "start or half")
        if plot is not None:
            check_plot(plot)
        terms = [
            Terms(name, size, model, kv_bytes_per_token, block_tokens, count_from == "half")
            for size in capacity.split(",")
            for name in names_of(policy, model)
        ]
        simulator = Simulator(trace)
        outcomes = [simulator.run(one) for one in terms]
    except (InvalidRequestError, OSError) as error:
        _fail(error, EXIT_USAGE)
    if as_json:
        print(outcomes_as_json(outcomes))
    else:
        print_outcomes(outcomes)
    if plot is not None:
        drawn = plot_outcomes(plot, trace.name, outcomes)
        if drawn != plot:
            print(f"kvstore: no matplotlib for {plot.name}: drew {drawn}", file=sys.stderr)


@trace_app.command("record")
def trace_record(
    out: Annotated[Path, typer.Argument(help="File to write, which must not exist.")],
    address: Annotated[str, typer.Option(help="HOST:PORT of the server.")] = DEFAULT_ADDRESS,
    seconds: Annotated[float, typer.Option(metavar="S", help="How long.")] = 60.0,
    block_tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens of a chunk of that server.")
    ] = 256,
) -> None:
    """Record a server's lookups from now on: times, lengths, and numbers in place of chunks.

    Runs on the server's host. The file is one that simulate and replay read.
    """
    from kvstore.cli.trace_record import Recording, record

    try:
        made = record(Recording(address, seconds, block_tokens), out)
    except (InvalidRequestError, OSError) as error:
        _fail(error, EXIT_USAGE)
    lost = f", {made.lost} lost: read too late" if made.lost else ""
    print(f"{out}: {made.lookups} lookups of {made.chunks} chunks{lost}")


@trace_app.command("replay")
def trace_replay(
    trace: Annotated[Path, typer.Argument(help="JSONL, as simulate reads.")],
    address: Annotated[str, typer.Option(help="HOST:PORT of the server.")] = DEFAULT_ADDRESS,
    chunk_bytes: Annotated[int, typer.Option(metavar="N", help="Of each chunk.")] = 64 << 10,
    requests: Annotated[int, typer.Option(metavar="N", help="How many; 0 is all.")] = 0,
    speed: Annotated[
        float, typer.Option(metavar="X", help="Of the trace's time; 0: one after the other.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Play a trace against a server, with chunks of made-up bytes, and print what it had."""
    from kvstore.cli.trace_replay import ReplayTerms, replay_trace

    try:
        done = replay_trace(trace, ReplayTerms(address, chunk_bytes, requests, speed))
    except (InvalidRequestError, OSError) as error:
        _fail(error, EXIT_USAGE)
    if as_json:
        print(done.as_json())
        return
    print(
        f"{done.requests} requests in {done.spent_s:.1f} s: {done.hit_blocks} of {done.blocks}"
        f" blocks hit ({done.block_hit_rate:.2%}), {done.stored} stored, {done.refused} refused"
    )
