"""`kvstore ls`, `stat`, `get`, `put`, `pin`, `unpin` and `clear`: what to type."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.exits import EXIT_NOT_HELD, EXIT_USAGE, fail
from kvstore.cli.server_address import DEFAULT_ADDRESS, Address
from kvstore.proto.errors import InvalidRequestError, ModelError

if TYPE_CHECKING:  # help is to load none of the product
    from collections.abc import Iterator, Sequence

    from kvstore.cli.spaces import Where
    from kvstore.client.client import Client
    from kvstore.proto.types import ChunkKey

Key = Annotated[str, typer.Argument(metavar="KEY", help="Key or digest, or its first digits.")]
Space = Annotated[
    str, typer.Option("--namespace", metavar="HEX", help="Of which model; its first digits.")
]
ModelOption = Annotated[
    Path | None,
    typer.Option("--model-representation", metavar="FILE", help="JSON that stands for one."),
]
Tenant = Annotated[
    str, typer.Option(metavar="NAME", help="pool:NAME for a pool; default: your own.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def _usage() -> Iterator[None]:
    """End the process with the status of wrong usage where that is what is wrong."""
    try:
        yield
    except (InvalidRequestError, ModelError, OSError) as error:
        fail(error, EXIT_USAGE)


def _where(address: str, space: str = "", model: Path | None = None, tenant: str = "") -> Where:
    from kvstore.cli.spaces import Where

    return Where(address, space, model, tenant)


def ls(  # noqa: PLR0913 - each is an option
    prefix: Annotated[
        str, typer.Argument(metavar="[PREFIX]", help="Digits that the digests begin with.")
    ] = "",
    address: Address = DEFAULT_ADDRESS,
    space: Space = "",
    model: ModelOption = None,
    tenant: Tenant = "",
    limit: Annotated[int, typer.Option(metavar="N", help="Chunks of a page.")] = 100,
    after: Annotated[str, typer.Option(metavar="HEX", help="Last digest of the page before.")] = "",
    spaces: Annotated[bool, typer.Option("--spaces", help="Only the namespaces.")] = False,
    as_json: AsJson = False,
) -> None:
    """List chunks: their tiers, sizes, time since the last use, hits and what keeps them.

    Chunks come by namespace, in the order of their digests, a page at a time. With --spaces an
    admin may give --tenant '*' to see every tenant's.
    """
    from kvstore.cli import ls as looks

    with _usage():
        if spaces:
            found = looks.list_spaces(address, tenant)
            if as_json:
                print(looks.spaces_as_json(address, found))
            else:
                looks.print_spaces(found)
            return
        pages = looks.list_chunks(_where(address, space, model, tenant), prefix, after, limit)
    if as_json:
        print(looks.list_as_json(address, pages))
    else:
        looks.print_chunks(pages)


def stat(
    key: Key,
    address: Address = DEFAULT_ADDRESS,
    space: Space = "",
    model: ModelOption = None,
    tenant: Tenant = "",
    as_json: AsJson = False,
) -> None:
    """Show all that is known of a chunk, and verify its frame; exits with 1 when it is not there.

    Exits with 1 too when the frame is damaged; the server is told, and drops it.
    """
    from kvstore.cli.stat import print_stat, stat_as_json, stat_chunk

    with _usage():
        facts = stat_chunk(_where(address, space, model, tenant), key)
    if facts is None:
        fail(f"{key}: no such chunk here", EXIT_NOT_HELD)
    if as_json:
        print(stat_as_json(facts))
    else:
        print_stat(facts)
    if not facts.verified:
        raise typer.Exit(EXIT_NOT_HELD)


def get(
    key: Key,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="NAME.safetensors or NAME.frame.")
    ],
    address: Address = DEFAULT_ADDRESS,
    where: Annotated[
        str, typer.Option("--namespace", metavar="HEX", help="Of which model; its first digits.")
    ] = "",
    tenant: Tenant = "",
    lossy: Annotated[bool, typer.Option("--lossy", help="A copy with a loss will do.")] = False,
) -> None:
    """Write a chunk to a file, verified; exits with 1 when it is not there.

    A .safetensors file has its tensors and all that names them, a .frame file its frame as the
    tier has it. kvstore put reads both.
    """
    from kvstore.cli.get import get_chunk
    from kvstore.proto.errors import ChunkCorruptError, InvalidFrameError

    try:
        with _usage():
            done = get_chunk(_where(address, where, None, tenant), key, out, lossy=lossy)
    except (ChunkCorruptError, InvalidFrameError) as error:
        fail(error, EXIT_NOT_HELD)
    if done is None:
        fail(f"{key}: no such chunk here, or only with a loss (--lossy)", EXIT_NOT_HELD)
    header, size_bytes = done
    print(f"{out}: {header.layout.tokens} tokens, {header.accuracy.name}, {size_bytes} bytes")


def put(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="As get wrote them.")],
    address: Address = DEFAULT_ADDRESS,
    model: ModelOption = None,
    tenant: Tenant = "",
    durable: Annotated[
        bool, typer.Option("--durable", help="Return once they would survive a power cut.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Store the chunks in files, under the digests they had; exits with 1 unless all are stored.

    What was restored from a lossy copy is refused.
    """
    import json

    from kvstore.cli.progress import progress
    from kvstore.cli.put import put_files
    from kvstore.proto.errors import printable
    from kvstore.proto.types import PutOutcome

    rows = []
    with _usage(), progress("putting") as told:
        where = _where(address, "", model, tenant)
        for number, (key, done) in enumerate(put_files(where, files, durable=durable)):
            told(number + 1, len(files))
            outcome = done.outcome.name
            rows.append((str(files[number]), key.hex(), outcome, done.reason))
            if not as_json:
                line = f"{files[number]}: {key.hex()} {outcome} {done.reason}"
                print(printable(line).rstrip())
    if as_json:
        names = ("file", "key", "outcome", "reason")
        print(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=2))
    good = {PutOutcome.stored.name, PutOutcome.exists.name}
    if any(outcome not in good for _, _, outcome, _ in rows):
        raise typer.Exit(EXIT_NOT_HELD)


Keys = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY]...", help="Keys or their first digits.")
]
Prefix = Annotated[str, typer.Option(metavar="HEX", help="All whose digests begin so.")]


def pin(  # noqa: PLR0913 - each is an option
    keys: Keys = None,
    address: Address = DEFAULT_ADDRESS,
    prefix: Prefix = "",
    space: Space = "",
    tenant: Tenant = "",
    lasting: Annotated[
        str, typer.Option("--for", metavar="TIME", help="30s, 10min, 2h; at most 24h.")
    ] = "1h",
    as_json: AsJson = False,
) -> None:
    """Keep chunks from eviction for a time; exits with 1 unless all are there.

    Pins are within the server's limit of them, and end with the server.
    """
    from kvstore.cli.pins import parse_duration_ms

    with _usage():
        ttl_ms = parse_duration_ms(lasting)
        where = _where(address, space, None, tenant)
        _keep(
            where,
            (keys or [], prefix),
            lambda client, some: client.pin(keys=some, ttl=ttl_ms / 1000),
            as_json,
        )


def unpin(
    keys: Keys = None,
    address: Address = DEFAULT_ADDRESS,
    prefix: Prefix = "",
    space: Space = "",
    tenant: Tenant = "",
    as_json: AsJson = False,
) -> None:
    """End the pins of chunks; exits with 1 unless all had one."""
    with _usage():
        where = _where(address, space, None, tenant)
        _keep(where, (keys or [], prefix), lambda client, some: client.unpin(keys=some), as_json)


def _keep(
    where: Where,
    named: tuple[Sequence[str], str],
    work: Callable[[Client, Sequence[ChunkKey]], int],
    as_json: bool,
) -> None:
    import json

    from kvstore.cli.pins import keep

    done, count = keep(where, *named, work)
    print(json.dumps({"done": done, "named": count}) if as_json else f"{done} of {count} chunks")
    if done < count or not count:
        raise typer.Exit(EXIT_NOT_HELD)


def clear(  # noqa: PLR0913 - each is an option
    address: Address = DEFAULT_ADDRESS,
    space: Space = "",
    model: ModelOption = None,
    tenant: Annotated[
        str, typer.Option(metavar="NAME", help="All of it; of others than yours for admins.")
    ] = "",
    tier: Annotated[str, typer.Option(metavar="NAME", help="Only the copies there.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Of every tenant; for admins.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Forget the chunks of a namespace, a tenant, a tier or everything, but what is read or pinned.

    --tier alone takes your tenant's copies on it. Asks before it does anything, unless --yes.
    """
    from kvstore.cli.clear import Scope
    from kvstore.cli.clear import clear as run
    from kvstore.cli.progress import progress

    with _usage():
        scope = Scope(_where(address, space, model), tenant, tier, everything)
        if not (yes or dry_run):
            _confirm(f"{run(scope, dry_run=True).as_text(dry_run=True)}: {scope.said()}. Do it?")
        with progress("clearing") as told:
            done = run(scope, dry_run=dry_run, told=told)
    print(done.as_json(dry_run=dry_run) if as_json else done.as_text(dry_run=dry_run))


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        fail("clear asks before it forgets anything; give --yes where nobody answers", EXIT_USAGE)
    if not typer.confirm(question, err=True):
        raise typer.Exit(EXIT_NOT_HELD)


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    for command in (ls, stat, get, put, pin, unpin, clear):
        app.command()(command)
