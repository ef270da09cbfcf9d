"""The kvstore command: what to type.

cli/exits.py has the exit codes, cli/manual.py the end of each command's help.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli import care, chunks
from kvstore.cli.access import Ca, Cert, Key, Tls, TokenFile, remember
from kvstore.cli.blend import blend_app, compare_copies
from kvstore.cli.config import config_app
from kvstore.cli.exits import EXIT_CODES, EXIT_NOT_HELD, EXIT_STORE, EXIT_USAGE, fail
from kvstore.cli.manual import Manual
from kvstore.cli.server_address import DEFAULT_ADDRESS, Address, AddressArgument, one_of
from kvstore.cli.trace import trace_app
from kvstore.cli.trust import audit_app, keys_app, quota_app, token_app
from kvstore.proto import __version__
from kvstore.proto.errors import InvalidRequestError, KVStoreError

DEMO_TOKENS = 900
MIN_DEMO_TOKENS = 64


# Plain help and tracebacks: rich takes longer to import than most commands take to run.
app = typer.Typer(
    cls=Manual,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Look at a kvstore server, check its configuration, see the store at work.",
    epilog=EXIT_CODES,
)
app.add_typer(config_app, name="config")
app.add_typer(trace_app, name="trace")
app.add_typer(blend_app, name="blend")
care.add_to(app)
chunks.add_to(app)
app.add_typer(token_app, name="token")
app.add_typer(keys_app, name="keys")
app.add_typer(quota_app, name="quota")
app.add_typer(audit_app, name="audit")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command in *argv*, or of this process. Ends in SystemExit."""
    try:
        app(args=None if argv is None else list(argv), prog_name="kvstore")
    except KVStoreError as error:
        fail(error, EXIT_STORE)


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
    token_file: TokenFile = None,
    tls: Tls = False,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    remember((token_file, tls, ca, cert, key))


@app.command()
def status(
    where: AddressArgument = None,
    address: Address = DEFAULT_ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a server's tiers and counters; exits with 3 when it cannot be reached."""
    from kvstore.cli.status import ask_status, print_status, status_as_json

    address = one_of(where, address)
    reply = ask_status(address)
    if as_json:
        print(status_as_json(address, reply))
    else:
        print_status(address, reply)


@app.command()
def top(
    where: AddressArgument = None,
    address: Address = DEFAULT_ADDRESS,
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one look as JSON.")] = False,
    every_s: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between looks.")] = 2,
) -> None:
    """Watch a server's tiers, hit ratios, policies and what another size would be worth."""
    from kvstore.cli.top import show_live, show_once

    address = one_of(where, address)
    if once or as_json:
        show_once(address, as_json=as_json)
    else:
        show_live(address, every_s)


@app.command()
def explain(  # noqa: PLR0913 - each is an option
    address: Address = DEFAULT_ADDRESS,
    representation: Annotated[
        Path | None,
        typer.Option(
            "--model-representation", metavar="FILE", help="JSON, as --spaces --json prints it."
        ),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="Of the chunks, or how it begins; on the server's host."),
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Token ids of a prompt.")
    ] = None,
    keys: Annotated[
        list[str] | None,
        typer.Option(metavar="HEX", help="A key or digest, or how it begins; repeatable."),
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
    from kvstore.proto.errors import ModelError

    try:
        question = Question(
            representation, namespace, tokens, keys or (), chunk_tokens, extra or (), recent, spaces
        )
        reply = ask_explain(address, question)
    except (InvalidRequestError, ModelError, OSError) as error:
        fail(error, EXIT_USAGE)
    if as_json:
        print(explain_as_json(address, reply))
    else:
        print_explain(reply)


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
        fail(error, error.exit_status)
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
    from kvstore.cli.bench import every_name, measure_all, print_speeds, speeds_as_json
    from kvstore.proto.errors import UnknownCodecError

    try:
        speeds, missing = measure_all(names or every_name())
    except UnknownCodecError as error:
        fail(error, EXIT_USAGE)
    if as_json:
        print(speeds_as_json(speeds, missing))
    else:
        print_speeds(speeds, missing)


@app.command()
def calibrate(  # noqa: PLR0913 - each is an option
    kind: Annotated[
        str, typer.Argument(help="An asset of cachegen, kvt or kvqs; or gate, of lossy copies.")
    ],
    sources: Annotated[
        list[Path],
        typer.Argument(help="Folder of a transformers model, or .npy and .safetensors KV dumps."),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of assets to write into.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text for the model to read.")
    ] = None,
    representation: Annotated[
        str | None, typer.Option(metavar="HEX", help="Model digest, for dumps.")
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of the text to use.")] = 8192,
    codec: Annotated[str, typer.Option(help="gate: whose copies are compared.")] = "",
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='gate: stored prompts, JSON lines: {"prompt": "..."} or {"tokens": [1, 2]}.',
        ),
    ] = None,
    chunk_tokens: Annotated[int, typer.Option(metavar="N", help="gate: of the engine.")] = 256,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Make a model's asset for a codec that needs one, or open the gate of a codec's lossy copies.

    A gate opens once 64 prompts are near enough to their full prefills; exits with 1 when it is not
    open in the end, with 2 when nothing can be made or compared.
    """
    from kvstore.cli.calibrate import Calibration
    from kvstore.cli.calibrate import calibrate as make
    from kvstore.proto.errors import ModelError

    try:
        if kind == "gate":
            compare_copies(sources, codec, prompts, chunk_tokens, address)
            return
        if out is None:
            raise InvalidRequestError("out", None, "give --out DIR, to write the asset into")
        path, asset = make(Calibration(kind, sources, out, text, representation, tokens))
    except (InvalidRequestError, ModelError) as error:
        fail(error, EXIT_USAGE)
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
        Path | None, typer.Option(metavar="FILE", help="Draw hits by capacity: .svg.")
    ] = None,
) -> None:
    """Replay a trace on policies and capacities, and print what each would have hit."""
    from kvstore.cli.progress import followed
    from kvstore.cli.simulate.blocks import Terms
    from kvstore.cli.simulate.report import (
        Simulator,
        check_plot,
        names_of,
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
        outcomes = [simulator.run(one) for one in followed(terms, "replaying")]
    except (InvalidRequestError, OSError) as error:
        fail(error, EXIT_USAGE)
    if as_json:
        print(outcomes_as_json(outcomes))
    else:
        print_outcomes(outcomes)
    if plot is not None:
        plot_outcomes(plot, trace.name, outcomes)


@app.command()
def bench(
    address: Address = DEFAULT_ADDRESS,
    chunks: Annotated[int, typer.Option(metavar="N", help="How many.")] = 64,
    chunk_bytes: Annotated[int, typer.Option(metavar="N", help="Of each.")] = 1 << 20,
    transport: Annotated[str, typer.Option(help="auto, shm, tcp or grpc.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Put made-up chunks, get them back, compare, delete; exits with 1 unless all are right."""
    from kvstore.cli.bench import BenchTerms
    from kvstore.cli.bench import bench as run

    try:
        terms = BenchTerms(address, chunks, chunk_bytes, transport)  # type: ignore[arg-type]
    except InvalidRequestError as error:
        fail(error, EXIT_USAGE)
    done = run(terms)
    print(done.as_json() if as_json else done.as_text())
    if not done.held:
        raise typer.Exit(EXIT_NOT_HELD)


@app.command()
def drain(
    address: Address = DEFAULT_ADDRESS,
    deadline_s: Annotated[float, typer.Option("--within", metavar="S", help="Seconds.")] = 20.0,
) -> None:
    """Have a server refuse new work and save what only memory has; exits with 1 if not all was."""
    from kvstore.cli.drain import ask_drain

    try:
        is_saved = ask_drain(address, deadline_s)
    except InvalidRequestError as error:
        fail(error, EXIT_USAGE)
    if is_saved:
        print("drained: everything that was in memory is on disk")
    else:
        print("drained, but not all is saved: kvstore status says what the tiers hold")
        raise typer.Exit(EXIT_NOT_HELD)


if __name__ == "__main__":
    main()
