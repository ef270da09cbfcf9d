"""Calls over the Unix socket as bytes: what is packed comes back, anything else is refused."""

from __future__ import annotations

import pytest
from golden.samples import vectors
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import unix_socket
from kvstore.proto.errors import (
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    QuotaExceededError,
)
from kvstore.proto.unix_socket import (
    HEADER_BYTES,
    MAX_ANSWER_BYTES,
    MAX_BODY_BYTES,
    MAX_PACKET_BYTES,
    METHODS,
    NOWHERE,
    REPLIES,
    REPLY_KINDS,
    Op,
    Packet,
    Place,
    Reach,
    Reply,
    Request,
    pack_answer,
    pack_call,
    pack_failure,
    pack_places,
    unpack_answer,
    unpack_call,
    unpack_head,
    unpack_places,
)

NUMBERS = {
    1: "Lookup", 2: "Get", 3: "Release", 4: "Reserve", 5: "Commit", 6: "Abort",
    8: "Resolve", 9: "ReportReuse", 10: "PutDevice",
}  # fmt: skip
"""As servers and clients out there have them."""

SERVICE = pb.DESCRIPTOR.services_by_name["KVStore"]
TOKEN = bytes(range(16))


def unpacked(packet: Packet) -> tuple[str, Message]:
    return unpack_call(Request.unpack(packet[:HEADER_BYTES]), packet[HEADER_BYTES:])


# --- calls


def test_a_method_keeps_its_number() -> None:
    assert {number: method.name for number, method in METHODS.items()} == NUMBERS


def test_methods_have_the_messages_of_the_service_and_stream_nothing_to_it() -> None:
    for number in NUMBERS:
        method, described = METHODS[number], SERVICE.methods_by_name[NUMBERS[number]]
        assert method.request.DESCRIPTOR is described.input_type
        assert method.reply.DESCRIPTOR is described.output_type
        assert REPLIES[method.name] is method.reply
        assert not described.client_streaming
        assert "session_id" in method.request.DESCRIPTOR.fields_by_name


def test_a_method_without_a_number_has_no_reply() -> None:
    assert REPLIES.keys().isdisjoint(("Put", "OpenSession", "lookup", ""))


def test_a_call_comes_out_as_it_went_in() -> None:
    for number in NUMBERS:
        request = METHODS[number].request(session_id=7)
        packet = pack_call(NUMBERS[number], request)
        head = Request.unpack(packet[:HEADER_BYTES])
        assert (head.op, head.arg, head.token) == (Op.call, number, bytes(16))
        assert unpacked(packet) == (NUMBERS[number], request)


def test_an_unknown_method_is_refused_and_the_known_ones_named() -> None:
    for number in [0, 11, 12, 1 << 32, (1 << 64) - 1]:
        with pytest.raises(
            InvalidRequestError, match=rf"method={number}: use one of \[1, 2, 3, 4, 5"
        ):
            unpack_call(Request(Op.call, number), b"")


def test_a_body_that_is_no_message_is_refused_with_the_name_of_what_it_should_be() -> None:
    with pytest.raises(InvalidRequestError, match="body=3: send a LookupRequest"):
        unpack_call(Request(Op.call, 1), b"\xff\xff\xff")


# --- answers


def received(packets: list[Packet]) -> tuple[list[Reply], bytes]:
    answers = [unpack_answer(packet) for packet in packets]
    assert [answer.error for answer in answers] == [None] * len(answers)
    return [answer.reply for answer in answers], b"".join(answer.body for answer in answers)


def lookup_of(size_bytes: int) -> pb.LookupResponse:
    """Return an answer that is as long as that."""
    head = 4 if size_bytes > 1 << 14 else 3 if size_bytes > 1 << 7 else 2
    reply = pb.LookupResponse(tiers=bytes(size_bytes - head))
    assert reply.ByteSize() == size_bytes
    return reply


def test_an_answer_of_any_length_comes_out_as_it_went_in() -> None:
    for size_bytes, packets in [
        (100, 1),
        (MAX_BODY_BYTES - 1, 1),
        (MAX_BODY_BYTES, 1),
        (MAX_BODY_BYTES + 1, 2),
        (2 * MAX_BODY_BYTES, 2),
        (2 * MAX_BODY_BYTES + 1, 3),
        (MAX_ANSWER_BYTES - MAX_PACKET_BYTES, 16),
    ]:
        for more in [False, True]:
            reply = lookup_of(size_bytes)
            sent = pack_answer(reply, more=more)
            assert len(sent) == packets
            assert max(map(len, sent)) <= MAX_PACKET_BYTES
            replies, body = received(sent)
            assert replies == [Reply.part] * (packets - 1) + [Reply.more if more else Reply.ok]
            assert pb.LookupResponse.FromString(body) == reply


def test_the_end_of_a_stream_is_empty_and_no_empty_message_is_the_end() -> None:
    assert received(pack_answer(None)) == ([Reply.ok], b"")
    assert received(pack_answer(pb.GetResponse(), more=True)) == ([Reply.more], b"")


def test_a_failure_carries_its_error() -> None:
    answer = unpack_answer(pack_failure("QuotaExceededError", "kv reached max_sessions=1: stop"))
    assert answer.reply is Reply.failed
    assert type(answer.error) is QuotaExceededError
    assert str(answer.error) == "kv reached max_sessions=1: stop"


def test_a_failure_that_makes_no_sense_is_an_error_all_the_same() -> None:
    for body, text in [
        (b"Unheard\0of", "of"),
        (b"LeaseExpiredError", ""),
        (b"", ""),
        (b"\xff\0\xffx", "\ufffdx"),
    ]:
        error = unpack_answer(unix_socket.pack_reply(Reply.failed) + body).error
        expected = LeaseExpiredError if body.startswith(b"Lease") else KVStoreError
        assert type(error) is expected
        assert str(error) == text


def test_a_refusal_is_an_error_that_says_which() -> None:
    for reply in [Reply.denied, Reply.unknown, Reply.invalid]:
        assert str(unpack_answer(unix_socket.pack_reply(reply)).error).endswith(
            f"the call: {reply.name}"
        )


def test_what_is_no_answer_is_refused() -> None:
    for packet in [b"", b"x" * 31, bytes(32), b"x" * 32, bytes(MAX_PACKET_BYTES + 1)]:
        with pytest.raises(InvalidRequestError):
            unpack_answer(packet)


def test_a_packet_over_the_limit_is_refused_since_its_end_may_be_missing() -> None:
    fits = unix_socket.pack_reply(Reply.ok) + bytes(MAX_BODY_BYTES)
    assert len(unpack_answer(fits).body) == MAX_BODY_BYTES
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_PACKET_BYTES} bytes"):
        unpack_answer(fits + b"\0")


# --- the words of docs/format.md

SESSION = 0x1122334455667788
NONCES = (bytes(range(16, 32)), bytes(range(32, 48)))
LOOKUP = pb.LookupRequest(session_id=1, digests=TOKEN, lease=True, deadline_ms=2000)

WORDS: dict[str, list[Packet]] = {
    "hello_request": [Request(Op.hello, SESSION, NONCES[0]).pack()],
    "greeting": [
        unix_socket.pack_greeting(NONCES[1], unix_socket.proof(TOKEN, Op.hello, SESSION, NONCES))
    ],
    "attach_request": [
        Request(Op.attach, 4 << 20, unix_socket.proof(TOKEN, Op.attach, SESSION, NONCES)).pack()
    ],
    "join_request": [
        Request(Op.join, 0, unix_socket.proof(TOKEN, Op.join, SESSION, NONCES)).pack()
    ],
    "slab_request": [Request(Op.slab, 3).pack()],
    "extent_request": [Request(Op.extent, 2).pack()],
    "ring_request": [Request(Op.ring, 64 << 20, unix_socket.device_token("cpu")).pack()],
    "lookup_call": [pack_call("Lookup", LOOKUP)],
    "ok_reply": [unix_socket.pack_reply(Reply.ok)],
    "denied_reply": [unix_socket.pack_reply(Reply.denied)],
    "unknown_reply": [unix_socket.pack_reply(Reply.unknown)],
    "invalid_reply": [unix_socket.pack_reply(Reply.invalid)],
    "slab_reply": [unix_socket.pack_reply(Reply.ok, 264 << 20)],
    "lookup_answer": pack_answer(pb.LookupResponse(ready=1, tiers=b"\0", tier_names=["cpu"])),
    "get_answer": pack_answer(pb.GetResponse(lease_id=9, index=1, tier="disk"), more=True),
    "get_end": pack_answer(None),
    "failed_answer": [pack_failure("LeaseExpiredError", "gone")],
    "part_start": [pack_answer(lookup_of(MAX_BODY_BYTES + 1))[0][:40]],
}


def test_the_vectors_of_the_format_page_are_what_the_code_sends() -> None:
    for name in WORDS:
        assert [packet.hex() for packet in WORDS[name]] == [vectors()[name]]


def test_the_vectors_have_every_word() -> None:
    asked = {name for name in WORDS if name.endswith(("request", "call"))}
    assert {Request.unpack(WORDS[name][0][:HEADER_BYTES]).op for name in asked} == set(Op)
    answers = {
        unpack_head(WORDS[name][0][:HEADER_BYTES], REPLY_KINDS)[0] for name in WORDS.keys() - asked
    }
    assert answers == set(Reply)


# --- places, rows of 32 bytes

WORD = st.integers(0, 2**64 - 1)
PLACES = st.builds(
    Place, st.integers(0, 2**32 - 1), st.integers(0, 255), st.integers(0, 255), WORD, WORD, WORD
)


@given(st.lists(PLACES, max_size=20))
def test_places_come_back_as_they_were_packed(places: list[Place]) -> None:
    assert unpack_places(pack_places(places)) == places


def test_a_row_is_the_one_that_the_format_shows() -> None:
    place = Place(7, Reach.memory, 1, 0x40, 0x1234, 0x5EED_B10C_0000_0002)
    assert pack_places([place]).hex() == (
        "0700000001010000"
        "40000000000000003412000000000000020000000cb1ed5e"
    )  # fmt: skip
    assert pack_places([NOWHERE]) == bytes(32)


def test_rows_that_are_cut_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="places=33: send rows of 32 bytes"):
        unpack_places(bytes(33))
