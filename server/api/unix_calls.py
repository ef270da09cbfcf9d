"""Calls over the Unix socket, answered by the same methods as gRPC's."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from kvstore.proto import unix_socket
from kvstore.proto.errors import KVStoreError, UnauthenticatedError
from kvstore.proto.types import DIGEST_BYTES
from kvstore.proto.unix_socket import METHODS, Packet, pack_answer, pack_failure, unpack_call
from kvstore.server.api.interceptors import describe, known_errors
from kvstore.server.security.authorization import Authorizer
from kvstore.server.security.sessions import Session
from kvstore.server.telemetry.tracing import CURRENT, NUMBERS, RequestId

if TYPE_CHECKING:
    from kvstore.proto.kvstore_pb2_grpc import KVStoreServicer
    from kvstore.server.telemetry.tracing import Tracing

SEND_WITHIN_S = 5
_NO_CONTEXT: Any = None
"""The service's methods take gRPC's context and ignore it."""


@dataclass(frozen=True, slots=True)
class UnixCalls:
    """Runs a call against ``service`` and packs its answer, errors included.

    ``authorizer`` checks the session's roles and rate, and records the outcome. ``after_lookup`` is
    called once the answer to a lookup is sent.
    """

    service: KVStoreServicer
    authorizer: Authorizer
    after_lookup: Callable[[], None]
    tracing: Tracing | None = None

    def answer(
        self, session: Session, head: unix_socket.Request, body: bytes
    ) -> Generator[Packet, None, None]:
        """Yield the packets of the answer. Closing the iterator ends the call."""
        method = METHODS.get(head.arg)
        name = "call" if method is None else method.name
        CURRENT.set(RequestId(next(NUMBERS)))
        try:
            with known_errors(name):
                yield from self._packets(session, head, body)
        except KVStoreError as error:
            kind, _, message = describe(error, name)
            yield pack_failure(kind, message)
        finally:
            CURRENT.set(None)
        if name == "Lookup":  # the caller has its answer: an error here is only logged
            with suppress(KVStoreError), known_errors(name):
                self.after_lookup()

    def _packets(
        self, session: Session, head: unix_socket.Request, body: bytes
    ) -> Generator[Packet, None, None]:
        method, request = unpack_call(head, body)
        if request.session_id != session.session_id:  # type: ignore[attr-defined]
            raise UnauthenticatedError("session_id: call on the connection of your session")
        authorizer, outcome = self.authorizer, "cancelled"
        started = authorizer.clock()
        try:
            authorizer.admit_on(session, method)
            chunks = len(getattr(request, "digests", b"")) // DIGEST_BYTES
            tracing = self.tracing
            with tracing.call(method, "unix", chunks) if tracing is not None else nullcontext():
                reply = getattr(self.service, method)(request, _NO_CONTEXT)
                if isinstance(reply, GeneratorType):
                    with closing(reply):
                        for message in reply:
                            yield from pack_answer(message, more=True)
                    reply = None
                yield from pack_answer(reply)
            outcome = "OK"
        except KVStoreError as error:
            outcome = type(error).__name__
            raise
        finally:
            authorizer.counters.note_call(method, authorizer.clock() - started)
            authorizer.note(session.owner, method, outcome, session, request, lambda: "unix")


def send_packets(
    connection: socket.socket, packets: Iterable[Packet], clock: Callable[[], float]
) -> bool:
    """Send *packets*; return False once the peer has blocked for SEND_WITHIN_S in total."""
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
    """Wait until *connection* is writable; return whether it is."""
    poll = select.poll()  # not select(), which fails for descriptors above 1023
    poll.register(connection, select.POLLOUT)
    return bool(poll.poll(1000 * within_s))
