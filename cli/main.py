"""The kvstore command: what to type. The commands' own modules register them when imported here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvstore.cli import auth, blend, chunks, config, doctor, explain, server, trace
from kvstore.cli.app import (
    EXIT_NOT_HELD,
    EXIT_STORE,
    EXIT_USAGE,
    AsJson,
    app,
    command,
    completes,
    fail,
    parse_size,
)
from kvstore.proto.errors import InvalidRequestError, KVStoreError, ModelError, UnknownCodecError

MODULES = (auth, blend, chunks, config, doctor, explain, server, trace)

DEMO_TOKENS = 900
MIN_DEMO_TOKENS = 64


def complete_policies(incomplete: str) -> list[str]:
    """Complete names of eviction policies, with commas between them."""
    from kvstore.cli.simulate.report import names_of

    return completes("all", *names_of("all", "attention"))(incomplete)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command in *argv*, or of this process. Ends in SystemExit."""
    try:
        app(args=None if argv is None else list(argv), prog_name="kvstore")
    except (InvalidRequestError, ModelError, UnknownCodecError, OSError) as error:
        fail(error, EXIT_USAGE)
    except KVStoreError as error:
        fail(error, EXIT_STORE)


@command("demo", exits="0 1 2 3", example="kvstore demo --json demo.json", section="Measure")
def demo(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of a transformers model; default: a small one of our own.",
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
    from kvstore.cli.demo.demo import DemoError, run_demo

    try:
        held = run_demo(model, tokens, json_file)
    except DemoError as error:
        fail(error, error.exit_status)
    if not held:
        raise typer.Exit(EXIT_NOT_HELD)


@command("codecs", exits="0 2", example="kvstore codecs raw kvq:2", section="Measure")
def codecs(
    names: Annotated[
        list[str] | None, typer.Argument(help="Codecs, such as kvq:2; default: all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what each codec does on this machine, and up to which link it pays."""
    from kvstore.cli.bench import every_name, measure_all, print_speeds, speeds_as_json

    speeds, missing = measure_all(names or every_name())
    if as_json:
        print(speeds_as_json(speeds, missing))
    else:
        print_speeds(speeds, missing)


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
        typer.Argument(help="Codec to make an asset for; or gate, of lossy copies."),
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
    codec: Annotated[str, typer.Option(help="gate: the codec whose copies are compared.")] = "",
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='gate: stored prompts, JSON lines: {"prompt": "..."} or {"tokens": [1, 2]}.',
        ),
    ] = None,
    chunk_tokens: Annotated[
        int, typer.Option(metavar="N", help="gate: tokens of the engine's chunks.")
    ] = 256,
) -> None:
    """Make a model's asset for a codec that needs one, or open the gate of a codec's lossy copies.

    A gate opens once 64 prompts are near enough to their full prefills; exits with 1 when it is not
    open in the end, with 2 when nothing can be made or compared.
    """
    from kvstore.cli.calibrate import Calibration
    from kvstore.cli.calibrate import calibrate as make

    if kind == "gate":
        blend.compare_copies(sources, codec, prompts, chunk_tokens, address)
        return
    if out is None:
        raise InvalidRequestError("out", None, "give --out DIR, to write the asset into")
    path, asset = make(Calibration(kind, sources, out, text, representation, tokens))
    print(f"{path}: {path.stat().st_size} bytes, digest {asset.digest.hex()}")


@command(
    "simulate",
    exits="0 2",
    example="kvstore simulate trace.jsonl --policy all --capacity 5%,10%",
    section="Measure",
)
def simulate(  # noqa: PLR0913 - each is an option
    trace: Annotated[Path, typer.Argument(help="JSONL: Mooncake's blocks or token segments.")],
    policy: Annotated[
        str,
        typer.Option(
            metavar="P[,P]", help="Eviction policies, or all.", autocompletion=complete_policies
        ),
    ] = "hit_density",
    capacity: Annotated[
        str,
        typer.Option("--capacity", "--size", metavar="C[,C]", help="10GiB, or 5% of the trace."),
    ] = "5%",
    model: Annotated[
        Literal["attention", "hybrid-7b"], typer.Option(help="Model of the prompts.")
    ] = "attention",
    kv_bytes_per_token: Annotated[
        int, typer.Option(metavar="N", help="KV bytes a token of the model attention.")
    ] = 131_072,
    block_tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens of a block, where the trace has none.")
    ] = 256,
    count_from: Annotated[
        Literal["start", "half"], typer.Option("--from", help="Where hits begin to count.")
    ] = "start",
    as_json: AsJson = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw hits by capacity: .svg.")
    ] = None,
) -> None:
    """Replay a trace on policies and capacities, and print what each would have hit."""
    from kvstore.cli.output import followed
    from kvstore.cli.simulate.blocks import Terms
    from kvstore.cli.simulate.report import (
        Simulator,
        check_plot,
        names_of,
        outcomes_as_json,
        plot_outcomes,
        print_outcomes,
    )

    if plot is not None:
        check_plot(plot)
    terms = [
        Terms(name, size, model, kv_bytes_per_token, block_tokens, count_from == "half")
        for size in capacity.split(",")
        for name in names_of(policy, model)
    ]
    simulator = Simulator(trace)
    outcomes = [simulator.run(one) for one in followed(terms, "replaying")]
    if as_json:
        print(outcomes_as_json(outcomes))
    else:
        print_outcomes(outcomes)
    if plot is not None:
        plot_outcomes(plot, trace.name, outcomes)


@command("bench", exits="0 1 2 3", example="kvstore bench --chunks 16 --json", section="Measure")
def bench(
    address: str,
    chunks: Annotated[int, typer.Option(metavar="N", help="Number of chunks.")] = 64,
    chunk_bytes: Annotated[
        int, typer.Option(parser=parse_size, metavar="SIZE", help="Size of each chunk.")
    ] = 1 << 20,
    transport: Annotated[
        Literal["auto", "shm", "tcp", "grpc"], typer.Option(help="How chunks travel.")
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Write, read back, verify and delete synthetic chunks; report throughput and latency.

    Exits with 1 unless all came back as they were.
    """
    from kvstore.cli.bench import BenchTerms
    from kvstore.cli.bench import bench as run

    terms = BenchTerms(address, chunks, chunk_bytes, transport)
    done = run(terms)
    print(done.as_json() if as_json else done.as_text())
    if not done.held:
        raise typer.Exit(EXIT_NOT_HELD)


if __name__ == "__main__":
    main()
