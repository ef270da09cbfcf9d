"""`kvstore trace`: what a server is asked for, recorded and replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.exits import EXIT_USAGE, fail
from kvstore.cli.manual import Manual
from kvstore.cli.server_address import DEFAULT_ADDRESS, Address
from kvstore.proto.errors import InvalidRequestError

trace_app = typer.Typer(
    cls=Manual,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="What a server is asked for: recorded without anything of anybody's, and replayed.",
)


@trace_app.command("record")
def trace_record(
    out: Annotated[Path, typer.Argument(help="File to write, which must not exist.")],
    address: Address = DEFAULT_ADDRESS,
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
        fail(error, EXIT_USAGE)
    lost = f", {made.lost} lost: read too late" if made.lost else ""
    print(f"{out}: {made.lookups} lookups of {made.chunks} chunks{lost}")


@trace_app.command("replay")
def trace_replay(
    trace: Annotated[Path, typer.Argument(help="JSONL, as simulate reads.")],
    address: Address = DEFAULT_ADDRESS,
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
        fail(error, EXIT_USAGE)
    if as_json:
        print(done.as_json())
        return
    print(
        f"{done.requests} requests in {done.spent_s:.1f} s: {done.hit_blocks} of {done.blocks}"
        f" blocks hit ({done.block_hit_rate:.2%}), {done.stored} stored, {done.refused} refused"
    )
