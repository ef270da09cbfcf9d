"""Calls that come over the Unix socket, answered by the same methods as gRPC's."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from types import GeneratorType
from typing import Any

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import shm
from kvstore.proto.calls import MAX_PART_BYTES, Packet, pack_answer, pack_failure, unpack_call
from kvstore.proto.errors import UnauthenticatedError
from kvstore.server.interceptors import describe
from kvstore.server.service import KVStoreService
from kvstore.server.sessions import Session

_NO_CONTEXT: Any = None
"""The service's methods take gRPC's context and do not look at it."""


class LocalCalls:
    """Runs a call against *service* and packs what it answers, errors included."""

    def __init__(self, service: KVStoreService) -> None:
        self._service = service

    def answer(
        self, session: Session, head: shm.Request, body: bytes
    ) -> Generator[Packet, None, None]:
        """Yield the packets of the answer. Closing the iterator ends the call."""
        method = "call"
        try:
            method, request = unpack_call(head, body)
            if request.session_id != session.session_id:  # type: ignore[attr-defined]
                raise UnauthenticatedError("session_id: call on the connection of your session")
            reply = getattr(self._service, method)(request, _NO_CONTEXT)
            if isinstance(reply, GeneratorType):
                yield from _stream(reply)
            else:
                yield pack_answer(reply)
        except Exception as error:  # noqa: BLE001 - this edge's interceptor
            name, _, text = describe(error, method)
            yield pack_failure(name, text)


def _stream(replies: Iterable[pb.GetResponse]) -> Iterator[Packet]:
    for reply in replies:
        if reply.HasField("part") and len(reply.part.data) > MAX_PART_BYTES:
            yield from _cut(reply)
        else:
            yield pack_answer(reply, more=True)
    yield pack_answer(None)


def _cut(reply: pb.GetResponse) -> Iterator[Packet]:
    """Cut a part into parts that fit a packet."""
    data, offset = reply.part.data, reply.part.offset
    for start in range(0, len(data), MAX_PART_BYTES):
        reply.part.offset = offset + start
        reply.part.data = data[start : start + MAX_PART_BYTES]
        yield pack_answer(reply, more=True)
