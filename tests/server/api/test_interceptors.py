"""How errors cross the wire: status, class name and message, over a real gRPC server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
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


class Faulty:
    """A server of four methods, one a kind, which raise *error*, streams after two replies."""

    def __init__(self) -> None:
        self.error: Exception = KVStoreError("")
        self._shedder = LoadShedder(4, Counters(), CallWrapper())
        self._server = grpc.server(self._shedder.reads, interceptors=[self._shedder])
        methods = {
            kind: getattr(grpc, f"{kind}_rpc_method_handler")(
                self._stream if kind.endswith("stream") else self._once
            )
            for kind in KINDS
        }
        handler = grpc.method_handlers_generic_handler("faulty.Faulty", methods)
        self._server.add_generic_rpc_handlers((handler,))
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")

    def _once(self, request: Any, context: grpc.ServicerContext) -> bytes:
        raise self.error

    def _stream(self, request: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from (b"1", b"2")
        raise self.error

    def call(self, error: Exception, kind: str = "unary_unary") -> tuple[list[bytes], Any]:
        """Call a method that raises *error*; return the replies before it and what arrived."""
        self.error, replies = error, list[bytes]()
        method = getattr(self._channel, kind)(f"/faulty.Faulty/{kind}")
        request = iter([b""]) if kind.startswith("stream") else b""
        with pytest.raises(grpc.RpcError) as caught:
            replies.extend(method(request, timeout=20))
        return replies, caught.value

    def close(self) -> None:
        self._channel.close()
        self._server.stop(None).wait()
        self._shedder.close()


@pytest.fixture
def faulty(no_leaks: None) -> Iterator[Faulty]:
    with closing(Faulty()) as faulty:
        yield faulty


def test_error_of_ours_arrives_as_itself_cut_where_it_is_too_long_to_travel(faulty: Faulty) -> None:
    for error in ERRORS:
        _, failure = faulty.call(error)
        assert failure.code() is grpc.StatusCode[error.status]
        arrived = translate(failure)
        assert type(arrived) is type(error)
        assert str(arrived) == str(error)
    arrived = translate(faulty.call(LeaseExpiredError(text := "ü" * 100_000))[1])
    assert type(arrived) is LeaseExpiredError
    assert str(arrived) == text[: MAX_MESSAGE_CHARS - 3] + "..."

    def tree(root: type[KVStoreError]) -> set[type[KVStoreError]]:
        return {root}.union(*map(tree, root.__subclasses__()))

    ours = {kind for kind in tree(KVStoreError) if kind.__module__ == KVStoreError.__module__}
    assert {kind for kind in ours if not kind.__name__.startswith("_")} == set(map(type, ERRORS))


@pytest.mark.parametrize("kind", KINDS)
def test_error_in_a_call_of_any_kind_comes_after_its_replies_and_a_bug_only_to_the_log(
    faulty: Faulty, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = [b"1", b"2"] if kind.endswith("stream") else []
    replies, failure = faulty.call(LeaseExpiredError("gone"), kind)
    assert replies == expected
    assert isinstance(translate(failure), LeaseExpiredError)
    replies, failure = faulty.call(ZeroDivisionError(SECRET), kind)
    assert replies == expected
    assert failure.code() is grpc.StatusCode.INTERNAL
    arrived = translate(failure)
    assert type(arrived) is KVStoreError
    assert str(arrived) == "internal error; see the server's log"
    captured = capsys.readouterr()
    assert SECRET in captured.out + captured.err
