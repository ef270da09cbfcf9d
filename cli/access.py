"""How the command's calls prove who they are: options before the command, for all of them."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:  # help is to load none of the product
    from kvstore.client.access import Access
    from kvstore.client.connection import Connection

TokenFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="API key or JWT to call servers with.")
]
Tls = Annotated[bool, typer.Option("--tls", help="Call over TLS, believing the system's roots.")]
Ca = Annotated[Path | None, typer.Option(metavar="FILE", help="PEM of who signs servers.")]
Cert = Annotated[Path | None, typer.Option(metavar="FILE", help="PEM of our certificate.")]
Key = Annotated[Path | None, typer.Option(metavar="FILE", help="PEM of its private key.")]

Given = tuple[Path | None, bool, Path | None, Path | None, Path | None]

_given: ContextVar[Given] = ContextVar("given", default=(None, False, None, None, None))


def remember(given: Given) -> None:
    """Have the commands that run now call servers with these options."""
    _given.set(given)


def given_access() -> Access:
    """Return the access that the options name. Raises InvalidRequestError."""
    from kvstore.client.access import OPEN, Access

    given = _given.get()
    if not any(given):
        return OPEN
    token_file, tls, ca, cert, key = given
    return Access(tls, ca, cert, key, token_file=token_file)


def dial(address: str, retry_after_ms: int) -> Connection:
    """Return a connection to *address* with that access. Raises InvalidRequestError."""
    from kvstore.client.connection import Connection

    return Connection(address, retry_after_ms, access=given_access())
