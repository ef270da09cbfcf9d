"""The framework of the command line: commands, connection options, calls, and output.

Heavy imports are deferred until a command needs them: gRPC and rich import slower than most
commands run.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from enum import Enum
from inspect import Parameter
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar, get_args

import typer
from typer import Argument, Option
from typer.core import TyperGroup
from typing_extensions import override

import kvstore
from kvstore.proto import __version__
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    TierUnavailableError,
    printable,
)
from kvstore.proto.types import Model

if TYPE_CHECKING:  # keeps --help fast
    from kvstore.client.connection import Connection
    from kvstore.client.options import Access

EXIT_NOT_HELD = 1
EXIT_USAGE = 2
EXIT_STORE = 3
EXIT_PIPE = 128 + signal.SIGPIPE
CODES = {
    0: "done",
    EXIT_NOT_HELD: "not found, or a check failed",
    EXIT_USAGE: "wrong usage or configuration",
    EXIT_STORE: "server error, or server unreachable",
}
DEFAULT_PORT = 7420
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"
DEADLINE_MS = 2000
PROBE_S = 0.5
"""How long a late server has to respond to a probe."""
T = TypeVar("T")
Command = TypeVar("Command", bound="Callable[..., Shown | None]")

AsJson = Annotated[bool, Option("--json", help="Print JSON.")]
Yes = Annotated[bool, Option("--yes", "-y", help="Skip the confirmation.")]


def fail(reason: object, status: int) -> NoReturn:
    """Print *reason* on standard error, and end the process with *status*."""
    lines = map(printable, f"kvstore: {reason}".split("\n"))
    print("\n".join(lines), file=sys.stderr)
    raise SystemExit(status)


# --- the connection


def _parameter(name: str, hint: Any, default: Any = None) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _options(prefix: str = "") -> list[Parameter]:
    """Return the connection options; with *prefix*, also from environment variables."""

    def option(name: str, text: str, metavar: str = "FILE", has_env: bool = False) -> Parameter:
        env = f"{prefix}{name.upper()}" if prefix and has_env else None
        kind = Path if metavar == "FILE" else str
        found = Option(metavar=metavar, help=text, envvar=env)
        return _parameter(name, Annotated[kind, found])

    tls = Option("--tls", help="Connect over TLS; verify the server with the system's CAs.")
    return [
        option("address", f"The server; {DEFAULT_ADDRESS} by default.", "HOST[:PORT]", True),
        option("token_file", "File with an API key or a JWT.", has_env=True),
        _parameter("tls", Annotated[bool, tls], False),
        option("ca", "CA bundle (PEM) to verify the server with; connects over TLS.", has_env=True),
        option("cert", "Client certificate (PEM) for mutual TLS."),
        option("key", "Private key (PEM) of the client certificate."),
    ]


_OPTIONS = _options()
_ARGUMENT = Argument(metavar="[ADDRESS]", help="The same as --address.")
_WHERE = _parameter("where", Annotated[str | None, _ARGUMENT])
_given: ContextVar[Mapping[str, Any]] = ContextVar("given")
"""Connection options: those before the command, overridden by those after it."""


def _remember(values: Mapping[str, Any]) -> None:
    where, address = values.get("where"), values.get("address")
    if where and address and where != address:
        fix = f"--address is {address!r}; give one of them"
        raise InvalidRequestError("address", where, fix)
    named = {one.name: values.get(one.name) for one in _OPTIONS} | {"address": where or address}
    _given.set({**_given.get({}), **{name: value for name, value in named.items() if value}})


def server_address() -> str:
    """Return the server's address, with its port. Raises InvalidRequestError."""
    from kvstore.client.options import SCHEMES, check_address

    text = found = str(_given.get({}).get("address", DEFAULT_ADDRESS))
    if not found.startswith(SCHEMES) and ":" not in found.rpartition("]")[2]:
        found = f"{found}:{DEFAULT_PORT}"
    try:
        check_address(found)
    except InvalidRequestError:
        fix = "give HOST, HOST:PORT or [IPV6]:PORT; the port is a number, 1 to 65535"
        raise InvalidRequestError("address", text, fix) from None
    return found


def given_access() -> Access:
    """Return the access by the given options. Raises InvalidRequestError."""
    from kvstore.client.options import Access

    return Access(**{name: value for name, value in _given.get({}).items() if name != "address"})


@contextmanager
def connected(address: str, deadline_ms: int = DEADLINE_MS) -> Iterator[Connection]:
    """Open a connection to *address*. Raises KVStoreErrors; for no response, one sentence."""
    from kvstore.client.connection import Connection, is_gone

    access = given_access()
    connection = Connection(address, deadline_ms, access=access)
    try:
        yield connection
    except (TierUnavailableError, DeadlineError) as error:
        is_late = isinstance(error, DeadlineError)
        if connection.answers(PROBE_S) if is_late else not is_gone(error):
            raise  # only this call was too slow, or one of the server's tiers does not respond
        reason = str(error).rpartition(": ")[2]  # the end of gRPC's report of its attempts
        if "Socket closed" in reason and not access.tls:
            reason += "; if the server uses TLS, give --ca or --tls"
        raise KVStoreError(f"no kvstore-server responds at {address}: {reason}") from None
    finally:
        connection.close()


def client_of(address: str, model: Model, deadline_ms: int, **options: Any) -> kvstore.Client:
    """Return a client of *model*; the caller closes it. Raises KVStoreErrors as ``connected``."""
    call(address, "Status")
    options |= {"deadline_ms": deadline_ms, "access": given_access()}
    return kvstore.Client(address, model, kvstore.ClientOptions(**options))


def rpc(
    connection: Connection, method: str, deadline_ms: int = DEADLINE_MS, /, **fields: Any
) -> Any:
    """Return the reply to *method* with a request of *fields*. Raises KVStoreErrors."""
    kind = pb.DESCRIPTOR.services_by_name["KVStore"].methods_by_name[method]
    request, reply = getattr(pb, kind.input_type.name), getattr(pb, kind.output_type.name)
    return connection.call(method, request(**fields), deadline_ms, reply)


def call(address: str, method: str, deadline_ms: int = DEADLINE_MS, /, **fields: Any) -> Any:
    """Like ``rpc``, over a new connection to *address*."""
    with connected(address, deadline_ms) as connection:
        return rpc(connection, method, deadline_ms, **fields)


# --- values of options

TierName = Literal["gpu", "cpu", "disk", "redis"]
TIER_NAMES: tuple[str, ...] = get_args(TierName)


def number(text: str, least: int | None = None, most: int | None = None) -> Any:
    """Return an option that is a number."""
    return Option(metavar="N", help=text, min=least, max=most)


def path(text: str, *flags: str, metavar: str = "FILE") -> Any:
    """Return an option that is a file or a folder."""
    return Option(*flags, metavar=metavar, help=text)


def chosen(text: str, names: Sequence[str]) -> Any:
    """Return an option that is a comma-separated list of *names*, with their completion."""

    def complete(incomplete: str) -> list[str]:
        start, comma, last = incomplete.rpartition(",")
        return [f"{start}{comma}{name}" for name in names if name.startswith(last)]

    text = f"{text}: {', '.join(names)}; comma-separated."
    return Option(metavar="NAMES", help=text, autocompletion=complete)


def size(text: str, *flags: str) -> Any:
    """Return an option that is a number of bytes, such as ``8GiB``."""
    return Option(*flags, parser=_parse_size, metavar="SIZE", help=text)


def _parse_size(text: str | int) -> int:
    from kvstore.server.settings.values import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def confirm(question: str) -> None:
    """End the process unless the user confirms."""
    if not sys.stdin.isatty():
        fail("no terminal for confirmation: give --yes", EXIT_USAGE)
    if not typer.confirm(question, err=True):
        raise typer.Exit(EXIT_NOT_HELD)


# --- commands

SECTIONS = ("Look", "Change", "Measure", "Administer", "Commands")
REMOVED = {
    "top": "kvstore status --watch",
    "explain --spaces": "kvstore ls --spaces",
    "get": "kvstore stat to verify a chunk, Client.frame in Python to read it",
    "put": "Client.put_chunks in Python",
    "blend status": "kvstore status --all",
    "blend calibrate --selector": "kvstore blend calibrate without it: the selector is hybrid",
    "blend calibrate --seed": "kvstore blend calibrate without it",
    "simulate --model": "kvstore simulate without it, which replays a server's behaviour",
    "simulate --plot": "kvstore simulate --json, and plot its output",
    "trace replay --requests": "kvstore trace replay without it, which replays the whole trace",
    "trace replay --speed": "kvstore trace replay without it",
}
"""Removed commands and options, and their replacements."""


class Commands(TyperGroup):
    """Lists commands by section, and names the replacements of removed ones."""

    @override
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        typed = {arg.partition("=")[0] for arg in args}
        for old, new in REMOVED.items() if ctx.parent is None else ():
            words = [word for word in old.split() if not word.startswith("-")]
            is_typed = args[: len(words)] == words and set(old.split()) <= typed
            if is_typed and not ctx.resilient_parsing:
                fail(f"{old} was removed: use {new}", EXIT_USAGE)
        return super().resolve_command(ctx, args)

    @override
    def invoke(self, ctx: Any) -> Any:
        try:
            found = super().invoke(ctx)
            sys.stdout.flush()
            return found
        except BrokenPipeError:  # the reader closed the pipe: exit as on SIGPIPE
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(EXIT_PIPE) from None

    @override
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows: dict[str, list[tuple[str, str]]] = {name: [] for name in SECTIONS}
        for name, one in self.commands.items():
            sentence = (one.help or "").split("\n")[0].split(";")[0].rstrip(".")
            rows[getattr(one, "rich_help_panel", None) or SECTIONS[-1]].append((name, sentence))
        for section, some in rows.items():
            if some:
                with formatter.section(section):
                    formatter.write_dl(some)


def _typer(**settings: Any) -> typer.Typer:
    """Return a group. Plain help and tracebacks: rich imports slower than most commands run."""
    plain: dict[str, Any] = {"pretty_exceptions_enable": False, "rich_markup_mode": None}
    return typer.Typer(cls=Commands, no_args_is_help=True, **plain, **settings)


root = _typer(
    help="Inspect, administer and benchmark a kvstore server.",
    epilog=f"Exit codes: {'; '.join(f'{code} {text}' for code, text in CODES.items())}.",
)
_groups = {"": root}


def group(name: str, section: str, text: str) -> None:
    """Register a group of commands, called as ``name command``."""
    _groups[name] = _typer(help=text)
    root.add_typer(_groups[name], name=name, rich_help_panel=section)


def command(
    path: str,
    *,
    example: str = "",
    exits: str = "0 2 3",
    section: str | None = None,
    where: bool = False,
    as_server: bool = False,
) -> Callable[[Command], Command]:
    """Register a function as the command *path*: its name, or its group's name and its own.

    *example* has arguments for the help, *exits* are its exit codes. A function with a parameter
    ``address`` takes the connection options, with *where* the address as an argument, too, with
    *as_server* the flags of kvstore-server. What a function returns is printed, on --json as JSON.
    """
    codes = "\n".join(f"  {code}  {CODES[int(code)]}" for code in exits.split())
    shown = f"kvstore {path} {example}".rstrip()
    epilog = f"\b\nExit codes:\n{codes}\n\n\b\nExample:\n  {shown}"
    context = {"allow_extra_args": as_server, "ignore_unknown_options": as_server}
    owner, _, name = path.rpartition(" ")

    def register(function: Command) -> Command:
        made = _groups[owner].command(
            name, epilog=epilog, context_settings=context, rich_help_panel=section
        )
        made(_with_options(function, where))
        return function

    return register


def _with_options(function: Callable[..., Shown | None], where: bool) -> Callable[..., None]:
    """Return *function* with the options of connections, and --json, as ``command`` describes."""
    signature = inspect.signature(function, eval_str=True)
    own = signature.parameters
    shown = [
        one.replace(kind=Parameter.KEYWORD_ONLY) for one in own.values() if one.name != "address"
    ]
    if where:
        shown.insert(0, _WHERE)
    if signature.return_annotation is Shown:
        shown.append(_parameter("as_json", AsJson, False))
    if "address" in own:
        shown += _OPTIONS

    def run(**values: Any) -> None:
        _remember(values)
        passed = {name: values[name] for name in own if name in values}
        if "address" in own:
            passed["address"] = server_address()
        found = function(**passed)
        if found is not None:
            show(found, values["as_json"])

    run.__doc__ = function.__doc__
    return _takes(run, shown)


def _takes(run: Callable[..., None], shown: list[Parameter]) -> Callable[..., None]:
    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in shown}
    return run


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvstore {__version__}")
        raise typer.Exit


_VERSION = Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
_ROOT = [_parameter("version", Annotated[bool, _VERSION], False), *_options("KVSTORE_")]


def _root(**values: Any) -> None:
    _given.set({})
    _remember(values)


root.callback()(_takes(_root, _ROOT))


# --- output: JSON, or lines without control characters, in columns that are not truncated

_GAP = "  "
_MIN_WRAPPED = 12
"""Minimum width of a column that wraps, unless its longest word is longer."""


class Grid:
    """Rows below *headings*. On a narrow terminal the last *wraps* columns wrap.

    If that would break a word, each row becomes lines of ``heading: value``.
    """

    def __init__(
        self, headings: Sequence[str], rows: Iterable[Iterable[object]], wraps: int = 1
    ) -> None:
        self._rows = [
            [printable(" ".join(str(cell).split("\n"))) for cell in cells]
            for cells in (headings, *rows)
        ]
        self._wraps = wraps

    def lines(self, width: int | None) -> Iterator[str]:
        """Yield lines for a terminal of *width* columns; for None of any length."""
        from rich.cells import cell_len, set_cell_size

        columns = list(zip(*self._rows, strict=True))
        widths = [max(map(cell_len, column)) for column in columns]
        over = 0 if width is None else sum(widths) + len(_GAP) * (len(widths) - 1) - width
        for at in range(len(widths) - 1, len(widths) - self._wraps - 1, -1):
            words = (word for cell in columns[at] for word in cell.split())
            least = max(_MIN_WRAPPED, *map(cell_len, words))
            cut = max(0, min(over, widths[at] - least))
            widths[at], over = widths[at] - cut, over - cut
        headings, *rows = self._rows
        if over > 0:
            longest = max(map(cell_len, headings)) + 1
            for at, row in enumerate(rows):
                yield from [""] * bool(at)
                for name, cell in zip(headings, row, strict=True):
                    yield f"{name + ':':<{longest}} {cell}"
            return
        for row in self._rows:
            for line in zip_longest(*map(_wrapped, row, widths), fillvalue=""):
                yield _GAP.join(map(set_cell_size, line, widths)).rstrip()


def _wrapped(cell: str, width: int) -> list[str]:
    """Cut *cell* between words into lines of *width* columns, which each word fits."""
    from rich.cells import cell_len

    lines = [cell]
    if cell_len(cell) > width:
        lines = [""]
        for word in cell.split():
            longer = f"{lines[-1]} {word}".lstrip()
            lines[-1:] = [longer] if cell_len(longer) <= width else [lines[-1], word]
    return lines


def lines_of(text: Iterable[str | Grid]) -> Iterator[str]:
    """Yield the lines of *text* for standard output."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for part in text:
        yield from part.lines(width) if isinstance(part, Grid) else [printable(part)]


class Shown(NamedTuple):
    """What a command prints: *data* as JSON, or else *text*. It exits with 1 unless it *held*."""

    data: object
    text: Iterable[str | Grid]
    held: bool = True


def show(found: Shown, as_json: bool) -> None:
    """Print what a command *found*, and exit as it says."""
    if as_json:
        print(json.dumps(found.data, indent=2))
    else:
        print(*lines_of(found.text), sep="\n")
    if not found.held:
        raise typer.Exit(EXIT_NOT_HELD)


def as_dict(value: Any) -> Any:
    """Return a dataclass or a protobuf message, or a value of its fields, for JSON.

    Bytes become hexadecimal digits, enumerations their names. The ``server`` field of each message
    is omitted.
    """
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
        return {name.removeprefix("is_"): as_dict(getattr(value, name)) for name in names}
    if hasattr(value, "DESCRIPTOR"):
        names = [field.name for field in value.DESCRIPTOR.fields if field.name != "server"]
        return {name: as_dict(getattr(value, name)) for name in names}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "items"):
        return dict(sorted(value.items()))
    is_row = hasattr(value, "__len__") and not isinstance(value, str)
    return list(map(as_dict, value)) if is_row else value


def readable_size(size_bytes: float) -> str:
    """Return *size_bytes* to one decimal in a suitable unit."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):.1f} {unit}"
    return f"{size_bytes:.0f} B"


def readable_time(seconds: float) -> str:
    """Return *seconds* in a suitable unit."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


# --- progress of long work, on standard error

Report = Callable[[int, int], None]
"""Called with the number done and the total."""
LOG_EVERY_S = 10.0
"""Interval of progress lines without a terminal."""


@contextmanager
def progress(what: str, clock: Callable[[], float] = time.monotonic) -> Iterator[Report]:
    """Yield a function that shows the progress of *what*: a bar on a terminal, else lines."""
    if not sys.stderr.isatty():
        last_s = clock()

        def note(done: int, total: int) -> None:
            nonlocal last_s
            if clock() - last_s >= LOG_EVERY_S:
                last_s = clock()
                print(f"kvstore: {what}: {done} of {total}", file=sys.stderr, flush=True)

        yield note
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def followed(items: Sequence[T], what: str) -> Iterator[T]:
    """Yield *items*, and show progress."""
    with progress(what) as report:
        for number, item in enumerate(items):
            report(number, len(items))
            yield item
