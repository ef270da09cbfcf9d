"""Calls that come over the Unix socket, answered by the same methods as gRPC's."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from kvstore.proto import unix_socket
from kvstore.proto.errors import KVStoreError, UnauthenticatedError
from kvstore.proto.types import DIGEST_BYTES
from kvstore.proto.unix_socket import METHODS, Packet, pack_answer, pack_failure, unpack_call
from kvstore.server.api.interceptors import told
from kvstore.server.security.authorization import Authorizer
from kvstore.server.security.sessions import Session

if TYPE_CHECKING:
    from kvstore.proto.kvstore_pb2_grpc import KVStoreServicer
    from kvstore.server.telemetry.tracing import Tracing

SEND_WITHIN_S = 5
_NO_CONTEXT: Any = None
"""The service's methods take gRPC's context and do not look at it."""


class LocalCalls:
    """Runs a call against *service* and packs what it answers, errors included.

    *authorizer* checks the session's roles and rate, and records what became of the call.
    *after_lookup* is called once the answer to a lookup is on its way.
    """

    def __init__(
        self,
        service: KVStoreServicer,
        authorizer: Authorizer | None = None,
        after_lookup: Callable[[], None] = lambda: None,
    ) -> None:
        self._service = service
        self._authorizer = authorizer
        self._after_lookup = after_lookup
        self.tracing: Tracing | None = None

    def answer(
        self, session: Session, head: unix_socket.Request, body: bytes
    ) -> Generator[Packet, None, None]:
        """Return the packets of the answer. Closing the iterator ends the call."""
        method = METHODS.get(head.arg)
        name = "call" if method is None else method.name
        packets = told(self._packets(session, head, body), pack_failure, name)
        return self._then_learn(packets) if name == "Lookup" else packets

    def _then_learn(self, packets: Generator[Packet, None, None]) -> Generator[Packet, None, None]:
        yield from packets
        # Who asked has its answer: an error here is for the log alone.
        for _ in told(self._learn(), pack_failure, "Lookup"):
            return

    def _learn(self) -> Generator[Packet, None, None]:
        self._after_lookup()
        yield from ()

    def _packets(
        self, session: Session, head: unix_socket.Request, body: bytes
    ) -> Generator[Packet, None, None]:
        method, request = unpack_call(head, body)
        if request.session_id != session.session_id:  # type: ignore[attr-defined]
            raise UnauthenticatedError("session_id: call on the connection of your session")
        if self._authorizer is None:
            yield from self._traced(method, request)
            return
        outcome = "cancelled"
        started = self._authorizer.clock()
        try:
            self._authorizer.admit_on(session, method)
            yield from self._traced(method, request)
            outcome = "OK"
        except KVStoreError as error:
            outcome = type(error).__name__
            raise
        finally:
            self._authorizer.times.note(method, self._authorizer.clock() - started)
            self._authorizer.note(session.owner, method, outcome, session, request, lambda: "unix")

    def _traced(self, method: str, request: Any) -> Generator[Packet, None, None]:
        if self.tracing is None:
            yield from self._answered(method, request)
            return
        chunks = len(getattr(request, "digests", b"")) // DIGEST_BYTES
        with self.tracing.call(method, "unix", chunks):
            yield from self._answered(method, request)

    def _answered(self, method: str, request: Any) -> Generator[Packet, None, None]:
        reply = getattr(self._service, method)(request, _NO_CONTEXT)
        if not isinstance(reply, GeneratorType):
            yield from pack_answer(reply)
            return
        with closing(reply) as messages:
            for message in messages:
                yield from pack_answer(message, more=True)
        yield from pack_answer(None)


def send_packets(
    connection: socket.socket, packets: Iterable[Packet], clock: Callable[[], float]
) -> bool:
    """Send *packets*; False once the peer let us wait SEND_WITHIN_S in all."""
    left_s = float(SEND_WITHIN_S)
    for packet in packets:
        while True:
            try:
                connection.send(packet)
            except BlockingIOError:
                started = clock()
                if left_s <= 0 or not can_send(connection, left_s):
                    return False
                left_s -= clock() - started
            else:
                break
    return True


def can_send(connection: socket.socket, within_s: float) -> bool:
    """Wait until *connection* takes more; whether it does."""
    poll = select.poll()  # not select(), which takes no descriptor above 1023
    poll.register(connection, select.POLLOUT)
    return bool(poll.poll(1000 * within_s))
