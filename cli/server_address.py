"""Where the server is that a command asks: ``--address``, or the first argument where it may be."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.cli.exits import EXIT_USAGE, fail

DEFAULT_ADDRESS = "127.0.0.1:7420"

Address = Annotated[str, typer.Option("--address", help="HOST:PORT of the server.")]
AddressArgument = Annotated[
    str | None, typer.Argument(metavar="[ADDRESS]", help="The same as --address.")
]


def one_of(argument: str | None, option: str) -> str:
    """Return the address that was given; two that differ end the process."""
    if argument is None or argument == option:
        return option
    if option != DEFAULT_ADDRESS:
        fail(f"address {argument!r}: --address says {option!r}; give one of them", EXIT_USAGE)
    return argument
