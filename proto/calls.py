"""Calls over the Unix socket: the service's own messages without gRPC around them.

A call is one SOCK_SEQPACKET packet: the 32 bytes of a ``shm.Request`` whose op is ``call`` and
whose arg is the method's number, then the request message. It is answered by packets of the 32
bytes of a reply, then a message each: ``more`` while others follow, ``ok`` last (a streaming
method's last is empty), or ``failed`` with the error's class name, a zero byte and its text.
A message too long for a packet is cut: ``part`` for all packets of it but the last.
A round trip costs a tenth of gRPC's, so whoever shares a host with the server calls this way.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import shm
from kvstore.proto.errors import InvalidRequestError, KVStoreError, revive
from kvstore.proto.wire import MESSAGE_BYTES

MAX_PACKET_BYTES = 1 << 17
"""Fits the default send buffer of a socket; a longer call goes through gRPC."""
MAX_BODY_BYTES = MAX_PACKET_BYTES - shm.MESSAGE_BYTES
"""What a packet holds of a message; a longer answer is cut."""
MAX_ANSWER_BYTES = 2 * MESSAGE_BYTES
"""A message of an answer that is longer once joined is refused, as gRPC's is."""

Packet: TypeAlias = bytes
T = TypeVar("T", bound=Message)


class Method(NamedTuple):
    """One method of the service and its messages."""

    name: str
    request: type[Message]
    reply: type[Message]


METHODS: dict[int, Method] = {
    1: Method("Lookup", pb.LookupRequest, pb.LookupResponse),
    2: Method("Get", pb.GetRequest, pb.GetResponse),
    3: Method("Release", pb.ReleaseRequest, pb.ReleaseResponse),
    4: Method("Reserve", pb.ReserveRequest, pb.ReserveResponse),
    5: Method("Commit", pb.CommitRequest, pb.CommitResponse),
    6: Method("Abort", pb.AbortRequest, pb.AbortResponse),
    7: Method("Plan", pb.PlanRequest, pb.PlanResponse),
    8: Method("Resolve", pb.ResolveRequest, pb.ResolveResponse),
    9: Method("ReportReuse", pb.ReportReuseRequest, pb.ReportReuseResponse),
    10: Method("PutDevice", pb.PutDeviceRequest, pb.PutResponse),
}
"""What may be called so: what every put and get needs. Numbers are never used again."""

_NUMBERS = {method.name: number for number, method in METHODS.items()}


def reply_of(name: str) -> type[Message] | None:
    """Return the reply message of the method called *name*; None when it has no number."""
    number = _NUMBERS.get(name)
    return None if number is None else METHODS[number].reply


def pack_call(method: str, request: Message) -> Packet:
    """Return the packet of a call; it may be longer than MAX_PACKET_BYTES."""
    head = shm.Request(shm.Op.call, _NUMBERS[method]).pack()
    return head + request.SerializeToString()


def unpack_call(request: shm.Request, body: bytes) -> tuple[str, Message]:
    """Return the method's name and its request message. Raises InvalidRequestError."""
    method = METHODS.get(request.arg)
    if method is None:
        raise InvalidRequestError("method", request.arg, f"use one of {sorted(METHODS)}")
    try:
        return method.name, method.request.FromString(body)
    except DecodeError:
        expected = method.request.DESCRIPTOR.name
        raise InvalidRequestError("body", len(body), f"send a {expected}") from None


def pack_answer(answer: Message | None, *, more: bool = False) -> list[Packet]:
    """Return the packets of one message of an answer; None is the empty end of a stream."""
    head = shm.pack_reply(shm.Reply.more if more else shm.Reply.ok)
    if answer is None:
        return [head]
    body = answer.SerializeToString()
    if len(body) <= MAX_BODY_BYTES:
        return [head + body]
    part = shm.pack_reply(shm.Reply.part)
    pieces = [body[i : i + MAX_BODY_BYTES] for i in range(0, len(body), MAX_BODY_BYTES)]
    return [*(part + piece for piece in pieces[:-1]), head + pieces[-1]]


def pack_failure(name: str, text: str) -> Packet:
    """Return the packet of an error by its class name."""
    return shm.pack_reply(shm.Reply.failed) + f"{name}\0{text}".encode()


class Answer(NamedTuple):
    """A packet of an answer. ``error`` is the one that it carries, and then its last."""

    reply: shm.Reply
    body: bytes
    error: KVStoreError | None = None


def unpack_answer(packet: Packet) -> Answer:
    """Parse a packet of an answer. Raises InvalidRequestError."""
    if len(packet) > MAX_PACKET_BYTES:
        raise InvalidRequestError("answer", len(packet), f"at most {MAX_PACKET_BYTES} bytes")
    reply, _ = shm.unpack_reply(packet[: shm.MESSAGE_BYTES])
    body = packet[shm.MESSAGE_BYTES :]
    if reply is shm.Reply.failed:
        name, _, text = body.decode(errors="replace").partition("\0")
        return Answer(reply, b"", revive(name, text))
    if reply not in (shm.Reply.ok, shm.Reply.more, shm.Reply.part):
        return Answer(reply, b"", KVStoreError(f"the server refused the call: {reply.name}"))
    return Answer(reply, body)


def parse_answer(kind: type[T], body: bytes) -> T:
    """Return the message of *kind* that *body* is. Raises KVStoreError."""
    try:
        return kind.FromString(body)
    except DecodeError:
        raise KVStoreError(f"the server's answer is no {kind.DESCRIPTOR.name}") from None
