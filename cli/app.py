"""The frame of the command line: commands, connection options, exit codes, calls.

Heavy imports wait until a command needs them: gRPC and rich take longer than most commands run.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar, get_args

import typer
from typer.core import TyperGroup
from typing_extensions import override

from kvstore.proto import __version__
from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    TierUnavailableError,
    printable,
)

if TYPE_CHECKING:  # help is to load none of the product
    from kvstore.client.access import Access
    from kvstore.client.connection import Connection

EXIT_NOT_HELD = 1
EXIT_USAGE = 2
EXIT_STORE = 3
CODES = {
    0: "done",
    EXIT_NOT_HELD: "not found, or a check failed",
    EXIT_USAGE: "wrong usage or configuration",
    EXIT_STORE: "the server answered with an error, or not at all",
}
DEFAULT_ADDRESS = "127.0.0.1:7420"
DEADLINE_MS = 2000
ANSWER_S = 0.5
"""What a server has to say that it is there, once it was late."""
MAX_PORT = 65_535

Command = TypeVar("Command", bound=Callable[..., None])

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def fail(reason: object, status: int) -> NoReturn:
    """Print *reason* on standard error, and end the process with *status*."""
    lines = map(printable, f"kvstore: {reason}".split("\n"))
    print("\n".join(lines), file=sys.stderr)
    raise SystemExit(status)


# --- the connection


def _parameter(name: str, hint: Any, default: Any = None) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _options(prefix: str = "") -> list[Parameter]:
    """Return the connection options; with *prefix* the environment has a say too."""

    def option(name: str, text: str, metavar: str = "FILE", has_env: bool = False) -> Parameter:
        env = f"{prefix}{name.upper()}" if prefix and has_env else None
        flag = f"--{name.replace('_', '-')}"
        found = typer.Option(flag, metavar=metavar, help=text, envvar=env)
        return _parameter(name, Annotated[str | None, found])

    tls = typer.Option("--tls", help="Connect over TLS; verify the server with the system's CAs.")
    return [
        option("address", f"The server; {DEFAULT_ADDRESS} by default.", "HOST[:PORT]", True),
        option("token_file", "File with an API key or a JWT.", has_env=True),
        _parameter("tls", Annotated[bool, tls], False),
        option("ca", "CA bundle (PEM) to verify the server with; connects over TLS.", has_env=True),
        option("cert", "Client certificate (PEM) for mutual TLS."),
        option("key", "Private key (PEM) of the client certificate."),
    ]


_OPTIONS = _options()
_ARGUMENT = typer.Argument(metavar="[ADDRESS]", help="The same as --address.")
_WHERE = _parameter("where", Annotated[str | None, _ARGUMENT])
_given: ContextVar[Mapping[str, Any] | None] = ContextVar("given", default=None)
"""Connection options: those before the command, overridden by those behind it."""


def _remember(values: Mapping[str, Any]) -> None:
    where, address = values.get("where"), values.get("address")
    if where and address and where != address:
        fix = f"--address is {address!r}; give one of them"
        raise InvalidRequestError("address", where, fix)
    named = {"address": where or address} | {
        one.name: values.get(one.name) for one in _OPTIONS if one.name != "address"
    }
    _given.set({**(_given.get() or {}), **{name: value for name, value in named.items() if value}})


def server_address() -> str:
    """Return the server's address, with its port. Raises InvalidRequestError."""
    text = str((_given.get() or {}).get("address", DEFAULT_ADDRESS))
    if text.startswith("unix:") or "//" in text:
        return text
    host, colon, port = text.rpartition(":")
    if not colon or (text.startswith("[") and text.endswith("]")):
        host, port = text, DEFAULT_ADDRESS.rpartition(":")[2]
    if not (port.isascii() and port.isdecimal() and 0 < int(port) <= MAX_PORT):
        raise InvalidRequestError("address", text, f"the port is a number, 1 to {MAX_PORT}")
    if not host or " " in host or (":" in host and not host.startswith("[")):
        raise InvalidRequestError("address", text, "write HOST, HOST:PORT or [IPV6]:PORT")
    return f"{host}:{port}"


def given_access() -> Access:
    """Return the access that the options name. Raises InvalidRequestError."""
    from kvstore.client.access import OPEN, Access

    given = dict(_given.get() or {})
    given.pop("address", None)
    files: dict[str, Any] = {name: Path(value) for name, value in given.items() if name != "tls"}
    return Access("tls" in given, **files) if given else OPEN


@contextmanager
def connected(address: str, deadline_ms: int = DEADLINE_MS) -> Iterator[Connection]:
    """Open a connection to *address*. Raises KVStoreErrors, one sentence where nobody answers."""
    from kvstore.client.connection import Connection

    access = given_access()
    connection = Connection(address, deadline_ms, access=access)
    try:
        yield connection
    except (TierUnavailableError, DeadlineError) as error:
        if isinstance(error, DeadlineError) and connection.answers(ANSWER_S):
            raise  # it was too slow with this one thing
        reason = str(error).rpartition(": ")[2]  # the end of gRPC's report of all it tried
        if "Socket closed" in reason and not access.tls:
            reason += "; where the server speaks TLS, give --ca or --tls"
        raise KVStoreError(f"no kvstore-server answers at {address}: {reason}") from None
    finally:
        connection.close()


def ask(
    connection: Connection, method: str, deadline_ms: int = DEADLINE_MS, /, **fields: Any
) -> Any:
    """Return the reply to *method* with a request of *fields*. Raises KVStoreErrors."""
    from kvstore.proto import kvstore_pb2 as pb

    kind = pb.DESCRIPTOR.services_by_name["KVStore"].methods_by_name[method]
    request, reply = getattr(pb, kind.input_type.name), getattr(pb, kind.output_type.name)
    return connection.call(method, request(**fields), deadline_ms, reply)


def call(address: str, method: str, deadline_ms: int = DEADLINE_MS, /, **fields: Any) -> Any:
    """Do what ``ask`` does, of the server at *address*."""
    with connected(address, deadline_ms) as connection:
        return ask(connection, method, deadline_ms, **fields)


# --- values of options

TierName = Literal["gpu", "cpu", "disk", "redis"]
TIER_NAMES: tuple[str, ...] = get_args(TierName)


def parse_size(text: str | int) -> int:
    """Return the bytes of an option such as ``8GiB``. Raises typer.BadParameter."""
    from kvstore.server.settings.values import parse_size as parse

    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def completes(*names: str) -> Callable[[str], list[str]]:
    """Return what completes the last of several *names* with commas between them."""

    def complete(incomplete: str) -> list[str]:
        start, comma, last = incomplete.rpartition(",")
        return [f"{start}{comma}{name}" for name in names if name.startswith(last)]

    return complete


def confirm(question: str) -> None:
    """End the process unless the user confirms."""
    if not sys.stdin.isatty():
        fail("this asks before it deletes anything; give --yes where nobody answers", EXIT_USAGE)
    if not typer.confirm(question, err=True):
        raise typer.Exit(EXIT_NOT_HELD)


# --- commands


@dataclass(frozen=True, slots=True)
class _Entry:
    """A command as it is registered: built when it is run, completed or explained."""

    function: Callable[..., None]
    exits: Sequence[int]
    example: str
    section: str
    has_address: bool
    takes_where: bool
    as_server: bool

    def build(self, path: str) -> Any:
        """Return the command, as typer makes it of a function."""
        made = typer.Typer(rich_markup_mode=None, add_completion=False)
        context = {"allow_extra_args": self.as_server, "ignore_unknown_options": self.as_server}
        codes = "\n".join(f"  {code}  {CODES[code]}" for code in self.exits)
        epilog = f"\b\nExit codes:\n{codes}\n\n\b\nExample:\n  {self.example}"
        made.command(path.split()[-1], epilog=epilog, context_settings=context)(
            self._with_options()
        )
        built: Any = typer.main.get_command(made)
        return built

    def _with_options(self) -> Callable[..., None]:
        own = inspect.signature(self.function, eval_str=True).parameters
        shown = [
            one.replace(kind=Parameter.KEYWORD_ONLY)
            for one in own.values()
            if one.name != "address"
        ]
        if self.takes_where:
            shown.insert(0, _WHERE)
        if self.has_address:
            shown += _OPTIONS

        def run(**values: Any) -> None:
            _remember(values)
            passed = {name: values[name] for name in own if name in values}
            if "address" in own:
                passed["address"] = server_address()
            self.function(**passed)

        run.__doc__ = self.function.__doc__
        run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in shown}
        return run


_ENTRIES: dict[str, _Entry] = {}
_GROUPS: dict[str, tuple[str, str]] = {}
SECTIONS = ("Look", "Change", "Measure", "Administer")
REMOVED = {"top": "use kvstore status --watch"}


def command(
    path: str,
    *,
    example: str,
    exits: str = "0 2 3",
    section: str = "",
    where: bool = False,
    as_server: bool = False,
) -> Callable[[Command], Command]:
    """Register a function as the command *path*, one word or a group's and its own.

    *exits* are its exit codes. A function with a parameter ``address`` takes the connection
    options, *where* the address as an argument too, *as_server* the flags of kvstore-server.
    """

    def register(function: Command) -> Command:
        has_address = "address" in inspect.signature(function).parameters
        _ENTRIES[path] = _Entry(
            function, [*map(int, exits.split())], example, section, has_address, where, as_server
        )  # fmt: skip
        return function

    return register


def group(name: str, section: str, text: str) -> None:
    """Register a group of commands, which follow as ``name command``."""
    _GROUPS[name] = section, text


class Commands(TyperGroup):
    """The commands of *path*, each built when it is needed: most runs need one of forty.

    Contexts and commands are click's, of which some releases of typer bring their own.
    """

    path = ""

    @override
    def list_commands(self, ctx: Any) -> list[str]:
        return list(dict.fromkeys(name for name, _, _ in self._rows()))

    @override
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        name = f"{self.path} {cmd_name}".strip()
        if name not in self.commands:
            if name in _ENTRIES:
                self.commands[name] = _ENTRIES[name].build(name)
            elif name in _GROUPS:
                self.commands[name] = _build_group(name)
            elif not ctx.resilient_parsing:
                fail(self._unknown(ctx, name), EXIT_USAGE)
        return self.commands.get(name)

    def _unknown(self, ctx: Any, name: str) -> str:
        if name in REMOVED:
            return f"{name}: there is no such command any more; {REMOVED[name]}"
        close = get_close_matches(name.split()[-1], self.list_commands(ctx), 1)
        meant = f"Did you mean {close[0]!r}?" if close else "kvstore --help lists them"
        return f"{name}: there is no such command. {meant}"

    @override
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for section in SECTIONS if not self.path else ("",):
            rows = [(name, text) for name, of, text in self._rows() if of == section]
            if rows:
                with formatter.section(section or "Commands"):
                    formatter.write_dl(rows)

    def _rows(self) -> list[tuple[str, str, str]]:
        """Return the name, the section and the first sentence of each."""
        start = f"{self.path} " if self.path else ""
        inside = [
            (path.removeprefix(start), one.section, _first_words(one.function))
            for path, one in _ENTRIES.items()
            if path.startswith(start) and " " not in path.removeprefix(start)
        ]
        return inside if self.path else [*inside, *((n, *about) for n, about in _GROUPS.items())]


def _first_words(function: Callable[..., None]) -> str:
    return (function.__doc__ or "").split("\n")[0].split(";")[0].rstrip(".")


def _build_group(name: str) -> Any:
    made = typer.Typer(
        cls=Commands, no_args_is_help=True, add_completion=False, rich_markup_mode=None
    )
    made.callback(help=_GROUPS[name][1])(lambda: None)
    built: Any = typer.main.get_command(made)
    built.path = built.name = name
    return built


# Plain help and tracebacks: rich takes longer to import than most commands take to run.
app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Inspect, administer and benchmark a kvstore server.",
    epilog=f"Exit codes: {'; '.join(f'{code} {text}' for code, text in CODES.items())}.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvstore {__version__}")
        raise typer.Exit


_VERSION = typer.Option(
    "--version", callback=_print_version, is_eager=True, help="Print the version."
)
_ROOT = [_parameter("version", Annotated[bool, _VERSION], False), *_options("KVSTORE_")]


def _root(**values: Any) -> None:
    _given.set({})
    _remember(values)


_root.__signature__ = inspect.Signature(_ROOT)  # type: ignore[attr-defined]
_root.__annotations__ = {one.name: one.annotation for one in _ROOT}
app.callback()(_root)
