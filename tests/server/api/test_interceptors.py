"""How errors cross the wire: status, class name and message, over a real gRPC server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from kvstore.client.connection import translate
from kvstore.proto.errors import (
    ChunkCorruptError,
    DeadlineError,
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    LayoutMismatchError,
    LeaseExpiredError,
    ModelError,
    PermissionDeniedError,
    QuotaExceededError,
    ShuttingDownError,
    TierFullError,
    TierUnavailableError,
    UnauthenticatedError,
    UnknownCodecError,
)
from kvstore.server.api.interceptors import MAX_MESSAGE_CHARS, CallWrapper
from kvstore.server.api.load_shedding import LoadShedder
from kvstore.server.telemetry.metrics import Counters

ERRORS: list[KVStoreError] = [
    KVStoreError("something else"),
    InvalidRequestError("field", "välue", "give another"),
    InvalidFrameError("magic", b"\xff\x00", "expected another"),
    ModelError("rope", None, "give it"),
    LayoutMismatchError("shape", (1, 2), "give (2, 1)"),
    UnknownCodecError(99, "0, 1"),
    LeaseExpiredError("gone"),
    TierFullError("cpu", 10, 3),
    QuotaExceededError("max_x", 3, "this server"),
    ChunkCorruptError(bytes(32), "layer 1 fails"),
    TierUnavailableError("disk", "it is\nbroken"),
    DeadlineError("too late"),
    ShuttingDownError("bye"),
    UnauthenticatedError("who?"),
    PermissionDeniedError("no"),
]

SECRET = "the password is swordfish"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")

Call = Callable[[str], list[bytes]]


class _Faulty:
    """Four methods, one a kind, which raise *error*, streams after two replies."""

    def __init__(self) -> None:
        self.error: Exception = KVStoreError("")
        self.failures: list[grpc.RpcError] = []

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        def once(request: Any, context: grpc.ServicerContext) -> bytes:
            raise self.error

        def streamed(request: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
            yield b"1"
            yield b"2"
            raise self.error

        methods = {
            kind: getattr(grpc, f"{kind}_rpc_method_handler")(
                streamed if kind.endswith("stream") else once
            )
            for kind in KINDS
        }
        return grpc.method_handlers_generic_handler("faulty.Faulty", methods)


@pytest.fixture
def faulty(no_leaks: None) -> Iterator[tuple[_Faulty, Call]]:
    """A server of such methods, and how to call one: the replies before the error."""
    service = _Faulty()
    shedder = LoadShedder(4, Counters(), CallWrapper())
    server = grpc.server(shedder.reads, interceptors=[shedder])
    server.add_generic_rpc_handlers((service.handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")

    def call(kind: str) -> list[bytes]:
        method = getattr(channel, kind)(f"/faulty.Faulty/{kind}")
        request = iter([b""]) if kind.startswith("stream") else b""
        replies: list[bytes] = []
        try:
            answer = method(request, timeout=20)
            replies += answer if kind.endswith("stream") else [answer]
        except grpc.RpcError as error:
            service.failures.append(error)
            return replies
        raise AssertionError("it did not fail")

    yield service, call
    channel.close()
    server.stop(None).wait()
    shedder.close()


def failure(service: _Faulty) -> grpc.RpcError:
    """Return what the last call failed with."""
    return service.failures[-1]


def test_error_of_ours_arrives_as_itself(faulty: tuple[_Faulty, Call]) -> None:
    service, call = faulty
    for error in ERRORS:
        service.error = error
        call("unary_unary")
        assert failure(service).code() is grpc.StatusCode[error.status]
        arrived = translate(failure(service))
        assert type(arrived) is type(error)
        assert str(arrived) == str(error)

    def tree(root: type[KVStoreError]) -> set[type[KVStoreError]]:
        return {root}.union(*map(tree, root.__subclasses__()))

    ours = {kind for kind in tree(KVStoreError) if kind.__module__ == KVStoreError.__module__}
    assert {kind for kind in ours if not kind.__name__.startswith("_")} == set(map(type, ERRORS))


@pytest.mark.parametrize("kind", KINDS)
def test_error_in_a_call_of_any_kind_comes_after_its_replies_and_a_bug_only_to_the_log(
    faulty: tuple[_Faulty, Call], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    service, call = faulty
    replies = [b"1", b"2"] if kind.endswith("stream") else []
    service.error = LeaseExpiredError("gone")
    assert call(kind) == replies
    assert isinstance(translate(failure(service)), LeaseExpiredError)
    service.error = ZeroDivisionError(SECRET)
    assert call(kind) == replies
    assert failure(service).code() is grpc.StatusCode.INTERNAL
    arrived = translate(failure(service))
    assert type(arrived) is KVStoreError
    assert str(arrived) == "internal error; see the server's log"
    captured = capsys.readouterr()
    assert SECRET in captured.out + captured.err


def test_message_too_long_to_travel_is_cut_and_keeps_its_class(
    faulty: tuple[_Faulty, Call],
) -> None:
    service, call = faulty
    text = "ü" * 100_000
    service.error = LeaseExpiredError(text)
    call("unary_unary")
    arrived = translate(failure(service))
    assert type(arrived) is LeaseExpiredError
    assert str(arrived) == text[: MAX_MESSAGE_CHARS - 3] + "..."
