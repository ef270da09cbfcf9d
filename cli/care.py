"""`kvstore scrub` and `kvstore doctor`: what to type."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvstore.cli.exits import EXIT_NOT_HELD, EXIT_USAGE, fail
from kvstore.cli.server_address import DEFAULT_ADDRESS, Address, AddressArgument, one_of

_AS_SERVER = {"allow_extra_args": True, "ignore_unknown_options": True}


def scrub(
    where: AddressArgument = None,
    address: Address = DEFAULT_ADDRESS,
    tiers: Annotated[
        str, typer.Option(metavar="NAMES", help="Which, with commas; default: the server's.")
    ] = "",
    rate: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes a second at most; 0: as fast as it goes.")
    ] = "0",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Have a server verify what its tiers hold, once; exits with 1 when it found damage."""
    from kvstore.cli.scrub import run_scrub, scrub_as_json, scrub_line
    from kvstore.server.settings.values import parse_size

    try:
        bytes_per_s = parse_size(rate)
    except ValueError as error:
        fail(f"rate {rate!r}: {error}", EXIT_USAGE)
    names = [name.strip() for name in tiers.split(",") if name.strip()]
    for reply in run_scrub(one_of(where, address), names, bytes_per_s):
        if not as_json and sys.stdout.isatty():
            print(scrub_line(reply), end="\r" if reply.running else "\n", flush=True)
    if as_json:
        print(scrub_as_json(reply))
    elif not sys.stdout.isatty():
        print(scrub_line(reply))
    if reply.damaged_chunks:
        raise SystemExit(EXIT_NOT_HELD)


def doctor(
    context: typer.Context,
    address: Address = DEFAULT_ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine, and the server if it runs; takes kvstore-server's flags too.

    Exits with 1 when something fails.
    """
    from kvstore.cli.doctor import examine, findings_as_json, has_failed, print_findings
    from kvstore.proto.errors import InvalidRequestError
    from kvstore.server.settings.settings import load_config

    try:
        config = load_config(context.args)
    except InvalidRequestError as error:
        fail(error, EXIT_USAGE)
    findings = list(examine(config, address))
    if as_json:
        print(findings_as_json(findings))
    else:
        print_findings(findings)
    if has_failed(findings):
        raise SystemExit(EXIT_NOT_HELD)


def add_to(app: typer.Typer) -> None:
    """Register both commands."""
    app.command()(scrub)
    app.command(context_settings=_AS_SERVER)(doctor)
