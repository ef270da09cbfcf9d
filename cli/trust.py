"""`kvstore token`, `keys`, `quota` and `audit`: who may call, what is encrypted, who took what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.exits import EXIT_NOT_HELD, EXIT_USAGE, fail
from kvstore.cli.manual import Manual
from kvstore.cli.server_address import DEFAULT_ADDRESS, Address
from kvstore.proto.errors import InvalidRequestError

if TYPE_CHECKING:  # help is to load none of the product
    from kvstore.server.security.key_files import ApiKey, EncryptionKey

token_app = typer.Typer(
    cls=Manual,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="API keys in the file of --auth-keys; servers take changes in by themselves.",
)
keys_app = typer.Typer(
    cls=Manual,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Keys in the file of --encryption-keys; servers take changes in by themselves.",
)
quota_app = typer.Typer(
    cls=Manual, no_args_is_help=True, rich_markup_mode=None, help="What tenants take and may take."
)
audit_app = typer.Typer(
    cls=Manual, no_args_is_help=True, rich_markup_mode=None, help="The log of who did what."
)


KeyFile = Annotated[Path, typer.Argument(metavar="FILE", help="It is made if it is not there.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


# --- token


@token_app.command("make")
def token_make(
    file: KeyFile,
    tenant: Annotated[str, typer.Option(help="Whose chunks it is for.")],
    roles: Annotated[str, typer.Option(help="Some of read,write,admin.")] = "read,write",
) -> None:
    """Make a key and print it, once: the file has its hash alone."""
    import os
    import time

    from kvstore.server.security.key_files import make_key, write_keys

    try:
        rows = _tokens(file)
        names = [role for role in roles.split(",") if role]
        text, row = make_key(tenant, names, os.urandom, time.time())
        write_keys(file, [*rows, row])
    except InvalidRequestError as error:
        fail(error, EXIT_USAGE)
    print(text)


@token_app.command("list")
def token_list(file: KeyFile, as_json: AsJson = False) -> None:
    """Show the keys of a file: their ids, tenants and roles."""
    import json

    try:
        rows = _tokens(file)
    except InvalidRequestError as error:
        fail(error, EXIT_USAGE)
    shown = [(r.id, r.tenant, ",".join(sorted(r.roles)), _day(r.made)) for r in rows]
    names = ("id", "tenant", "roles", "made")
    if as_json:
        print(json.dumps([dict(zip(names, one, strict=True)) for one in shown], indent=2))
    else:
        _print_table(names, shown)


@token_app.command("revoke")
def token_revoke(
    file: KeyFile,
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Its id, or how it begins.")],
) -> None:
    """Take a key out of a file: its sessions end within a second."""
    from kvstore.server.security.key_files import write_keys

    try:
        rows = _tokens(file)
        key_id = _one_of([row.id for row in rows], key_id)
        write_keys(file, [row for row in rows if row.id != key_id])
    except InvalidRequestError as error:
        fail(error, EXIT_USAGE)
    print(f"revoked {key_id}")


def _one_of(ids: Sequence[str], begun: str) -> str:
    """Return the one id that begins with *begun*. Raises InvalidRequestError."""
    from kvstore.cli.spaces import LEAST_DIGITS, one_of

    found = one_of("id", begun, ids) if len(begun) >= LEAST_DIGITS else None
    if found is None:
        raise InvalidRequestError("id", begun, "is not in the file; kvstore token list")
    return found


def _tokens(file: Path) -> list[ApiKey]:
    from kvstore.server.security.key_files import parse_keys, read_guarded

    return list(parse_keys(read_guarded(file)).rows.values()) if file.exists() else []


# --- keys


@keys_app.command("new")
def keys_new(file: KeyFile) -> None:
    """Add a key of the next epoch: what is written from now on is encrypted with it."""
    import os
    import time

    from kvstore.server.security.key_files import next_key, write_keys

    try:
        rows = _encryption_keys(file)
        row = next_key(rows, os.urandom, time.time())
        write_keys(file, [*rows, row])
    except InvalidRequestError as error:
        fail(error, EXIT_USAGE)
    print(f"epoch {row.epoch} is written with from now on")


@keys_app.command("list")
def keys_list(file: KeyFile, as_json: AsJson = False) -> None:
    """Show the epochs of a file, and what tells their keys apart."""
    import hashlib
    import json

    try:
        rows = _encryption_keys(file)
    except InvalidRequestError as error:
        fail(error, EXIT_USAGE)
    shown = [
        (str(row.epoch), hashlib.sha256(row.key).hexdigest()[:16], _day(row.made)) for row in rows
    ]
    names = ("epoch", "fingerprint", "made")
    if as_json:
        print(json.dumps([dict(zip(names, one, strict=True)) for one in shown], indent=2))
    else:
        _print_table(names, shown)


@keys_app.command("retire")
def keys_retire(
    file: KeyFile, epoch: Annotated[int, typer.Argument(metavar="EPOCH", help="As list shows it.")]
) -> None:
    """Forget a key for good: what was encrypted with it is missing from now on."""
    from kvstore.server.security.key_files import write_keys

    try:
        rows = _encryption_keys(file)
        left = [row for row in rows if row.epoch != epoch]
        if len(left) == len(rows):
            raise InvalidRequestError("epoch", epoch, "is not in the file; kvstore keys list")
        if not left or epoch == max(row.epoch for row in rows):
            raise InvalidRequestError("epoch", epoch, "is written with; kvstore keys new first")
        write_keys(file, left)
    except InvalidRequestError as error:
        fail(error, EXIT_USAGE)
    print(f"epoch {epoch} is gone")


def _encryption_keys(file: Path) -> list[EncryptionKey]:
    from kvstore.server.security.key_files import parse_encryption_keys, read_guarded

    return list(parse_encryption_keys(read_guarded(file)).values()) if file.exists() else []


# --- quota


@quota_app.command("show")
def quota_show(
    tenant: Annotated[str, typer.Argument(help="Default: your own; * is every one.")] = "",
    address: Address = DEFAULT_ADDRESS,
    as_json: AsJson = False,
) -> None:
    """Show what a tenant takes of each tier, and its limits."""
    from kvstore.cli.quota import ask_quota, print_quotas, quotas_as_json

    reply = ask_quota(address, tenant)
    if as_json:
        print(quotas_as_json(reply))
    else:
        print_quotas(reply)


@quota_app.command("set")
def quota_set(  # noqa: PLR0913 - each is an option
    tenant: Annotated[str, typer.Argument(help="Whose limits change.")],
    address: Address = DEFAULT_ADDRESS,
    size: Annotated[str | None, typer.Option(metavar="SIZE", help="Of each tier.")] = None,
    guaranteed: Annotated[str | None, typer.Option(metavar="SIZE", help="Kept for it.")] = None,
    tier: Annotated[str, typer.Option(help="Of this tier alone.")] = "",
    chunks: Annotated[int | None, typer.Option(min=0, help="On each tier; 0: no limit.")] = None,
    rate: Annotated[int | None, typer.Option(min=0, help="Requests a second.")] = None,
    leases: Annotated[int | None, typer.Option(min=0, help="At once.")] = None,
) -> None:
    """Change a tenant's limits until the server restarts; needs the role admin."""
    from kvstore.cli.quota import Change, print_quotas, set_quota

    try:
        change = Change(tenant, tier, size, guaranteed, chunks, rate, leases)
        reply = set_quota(address, change)
    except InvalidRequestError as error:
        fail(error, EXIT_USAGE)
    print_quotas(reply)


# --- audit


@audit_app.command("verify")
def audit_verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="As --audit-log names it.")],
    last: Annotated[
        str | None, typer.Option(metavar="HASH", help="A hash that was noted: must be in the log.")
    ] = None,
) -> None:
    """Follow the chain of a log through all its files; exits with 1 where it is broken.

    Prints how many lines there are and the last one's hash. Noted elsewhere, it shows later whether
    the end was cut off.
    """
    from kvstore.server.security.audit_log import audit_files, read_chain

    files = audit_files(file)
    if not files:
        fail(InvalidRequestError("file", str(file), "is not there"), EXIT_USAGE)
    count, digest, is_found = 0, "", last is None
    try:
        for _, digest in read_chain(files):
            count += 1
            is_found = is_found or digest == last
    except InvalidRequestError as error:
        fail(error, EXIT_NOT_HELD)
    if not is_found:
        fail(f"{last} is not in the log: its end was cut off", EXIT_NOT_HELD)
    print(f"{count} lines hold; the last is {digest}")


def _day(made_s: int) -> str:
    import datetime

    return datetime.datetime.fromtimestamp(made_s, datetime.UTC).strftime("%Y-%m-%d")


def _print_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from kvstore.cli.tables import Grid, open_console

    table = Grid(*names)
    for row in rows:
        table.add_row(*row)
    open_console().print(table)
