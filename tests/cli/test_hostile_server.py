"""Commands against a server that answers everything with escape sequences, markup and line ends."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from typing_extensions import override

from kvstore.cli.__main__ import main
from kvstore.proto import kvstore_pb2 as pb

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


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit):
        main(argv)
    out, err = capsys.readouterr()
    return out + err


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_a_server_tells_is_printed_as_text_and_not_obeyed(
    hostile: tuple[_Hostile, str],
    command: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "1500")
    text = run(capsys, *command, "--address", hostile[1])
    assert "[bold red]rich[/] :skull:" in text
    lines = text.splitlines()
    assert [line for line in lines if not line.isprintable()] == []
    assert [line for line in lines if line.lstrip(" \u2502").startswith("FAKE")] == []


def test_why_a_server_refuses_is_printed_as_text_too(
    hostile: tuple[_Hostile, str], capsys: pytest.CaptureFixture[str]
) -> None:
    handler, address = hostile
    handler.refuses = True
    text = run(capsys, "ls", "--spaces", "--address", address)
    assert "[bold red]rich[/] :skull:" in text
    assert all(line.isprintable() for line in text.splitlines())
