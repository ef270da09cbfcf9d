"""What is printed: tables of which nothing is cut, progress, and nothing that a terminal obeys."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from concurrent import futures
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from helpers.kvstore_command import Kvstore
from rich.console import Console
from typing_extensions import override

from kvstore.cli.app import LOG_EVERY_S, Grid, followed, progress
from kvstore.proto import kvstore_pb2 as pb

ID = "96732432a2736b7df7b1c4a0e5d9f218"
REASON = "evicted from disk 40 s before: no tier below was to have a copy"


def grid() -> Grid:
    rows = [(ID, "evicted", REASON), (ID[::-1], "[red]unknown[/]", "never\nstored")]
    return Grid(("digest", "state", "why"), rows)


def shown(width: int, *, is_terminal: bool, rows: Grid | None = None) -> list[str]:
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=is_terminal, soft_wrap=True, color_system=None
    )
    console.print(rows or grid())
    return out.getvalue().splitlines()


def test_each_row_is_one_line_of_plain_columns_where_there_is_room_or_no_terminal() -> None:
    head, first, second = shown(20, is_terminal=False)
    assert head.split() == ["digest", "state", "why"]
    assert first == f"{ID}  evicted          {REASON}"
    assert second == f"{ID[::-1]}  [red]unknown[/]  never stored"
    assert shown(200, is_terminal=True) == [head, first, second]


def test_a_terminal_that_is_too_narrow_wraps_the_last_column_alone() -> None:
    lines = shown(80, is_terminal=True)
    assert max(map(len, lines)) <= 80
    assert sum(ID in line for line in lines) == 1
    told = "".join(line[len(ID) + 2 + len("[red]unknown[/]") + 2 :].strip() + " " for line in lines)
    assert REASON in " ".join(told.split())


def test_a_terminal_too_narrow_for_that_shows_each_cell_in_a_line_of_its_own() -> None:
    lines = shown(50, is_terminal=True)
    assert f"digest: {ID}" in lines
    assert "state:  evicted" in lines
    assert REASON in " ".join(" ".join(lines).split())


def test_a_terminal_never_breaks_a_word() -> None:
    for width in range(20, 120, 5):
        made = Grid(("at", "digest", "why"), [("0", ID, f"revision: {'f' * 40} asked")], wraps=2)
        words = " ".join(shown(width, is_terminal=True, rows=made)).split()
        assert ID in words, width
        assert "f" * 40 in words, width


def test_progress_is_a_bar_on_terminals_and_a_line_now_and_then_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = iter([0.0, 5.0, LOG_EVERY_S, LOG_EVERY_S, LOG_EVERY_S + 1])
    with progress("working", lambda: next(now_s)) as report:
        for done in (1, 2, 3):
            report(done, 4)
    assert capsys.readouterr().err == "kvstore: working: 2 of 4\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert list(followed([1, 2, 3], "working")) == [1, 2, 3]
    assert "working" in capsys.readouterr().err


# --- a server that answers with escape sequences, markup and line ends

HOSTILE = "m\x1b[31mRED\x1b[2J\nFAKE [bold red]rich[/] :skull: \u202eedoc\x9b"
WAIT_S = 20
_SERVICE = pb.DESCRIPTOR.services_by_name["KVStore"]
_VALUES: dict[int, Any] = {
    FieldDescriptor.CPPTYPE_STRING: HOSTILE,
    FieldDescriptor.CPPTYPE_BOOL: False,
    FieldDescriptor.CPPTYPE_ENUM: 0,
    FieldDescriptor.CPPTYPE_FLOAT: 1.0,
    FieldDescriptor.CPPTYPE_DOUBLE: 1.0,
}


def spoil(message: Message, depth: int = 0) -> Message:
    """Fill every field of *message*, each text with HOSTILE."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            if kind.fields_by_name["value"].message_type is None:
                value[HOSTILE] = _VALUES.get(kind.fields_by_name["value"].cpp_type, 0)
        elif kind is not None:
            if depth < 4:
                spoil(value.add() if field.is_repeated else value, depth + 1)
        else:
            one = _value(field)
            if field.is_repeated:
                value.append(one)
            else:
                setattr(message, field.name, one)
    return message


def _value(field: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return bytes(16)
    return 0 if field.name == "left" else _VALUES.get(field.cpp_type, 1)


if TYPE_CHECKING:
    Handler = grpc.GenericRpcHandler[Any, Any]
else:  # grpc's classes are generic in its stubs only
    Handler = grpc.GenericRpcHandler


class _Hostile(Handler):
    """Answers every method; with *refuses* by an error that has HOSTILE for its reason."""

    refuses = False

    @override
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        name = handler_call_details.method.rpartition("/")[2]
        method = _SERVICE.methods_by_name.get(name)
        if method is None:
            return None

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if self.refuses:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, HOSTILE.replace("\n", " "))
            return spoil(GetMessageClass(method.output_type)()).SerializeToString()

        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(lambda *call: iter([answer(*call)]))
        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def hostile() -> Iterator[tuple[_Hostile, str]]:
    handler = _Hostile()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield handler, f"127.0.0.1:{port}"
    server.stop(None).wait(WAIT_S)


COMMANDS = [
    ("explain", "--recent", "3"),
    ("explain", "--namespace", "00" * 16, "--keys", "00" * 16),
    ("ls", "--spaces"),
    ("status",),
    ("status", "--all"),
    ("sessions",),
    ("doctor",),
    ("quota", "show"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_a_server_tells_is_printed_as_text_and_not_obeyed(
    hostile: tuple[_Hostile, str],
    command: tuple[str, ...],
    kvstore: Kvstore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "1500")
    handler, address = hostile
    for handler.refuses in (False, True):
        run = kvstore(*command, "--address", address)
        text = run.out + run.err
        assert "[bold red]rich[/] :skull:" in text
        lines = text.splitlines()
        assert [line for line in lines if not line.isprintable()] == []
        assert [line for line in lines if line.lstrip(" \u2502").startswith("FAKE")] == []
