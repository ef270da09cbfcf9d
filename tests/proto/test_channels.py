"""Messages of the bulk channel and calls over the Unix socket: there and back, and lies."""

from __future__ import annotations

import pytest
from contracts.chunks import make_representation
from golden.samples import vectors
from helpers import stream_messages as messages
from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto import bulk, unix_socket
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.bulk import (
    LENGTHS,
    MAGIC,
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    found_infos,
    found_rows,
    guest_token,
    keys_of,
    pack,
    parse,
    unpack_lengths,
)
from kvstore.proto.errors import (
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    QuotaExceededError,
    TierFullError,
)
from kvstore.proto.types import ChainDigest, ChunkInfo, ChunkKey, KVLayout
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

LAYOUT = KVLayout.of(make_representation(), 16)
SPACE = bytes(range(16))
TOKEN = bytes(range(16))
SESSION = 0x1122334455667788


def test_what_is_no_message_or_too_long_is_refused_by_its_lengths() -> None:
    for begun, named in [
        (LENGTHS.pack(b"KVS\x02", 1, 0), "use version 3"),
        (LENGTHS.pack(b"GET ", 1, 0), "use version 3"),
        (LENGTHS.pack(MAGIC, MAX_HEADER_BYTES + 1, 0), "header=1048577: at most"),
        (LENGTHS.pack(MAGIC, 0xFFFFFFFF, 0), "header=4294967295: at most"),
        (LENGTHS.pack(MAGIC, 1, MAX_PAYLOAD_BYTES + 1), "payload=1048577: at most"),
    ]:
        with pytest.raises(InvalidRequestError, match=named):
            unpack_lengths(begun)
    with pytest.raises(InvalidRequestError, match="header=257: at most 256 bytes"):
        unpack_lengths(LENGTHS.pack(MAGIC, 257, 0), 256)


def test_a_payload_where_none_belongs_is_refused() -> None:
    for message in [messages.ready(), messages.get(1, 1), messages.put(1, 1), messages.done(1, 0)]:
        header = message.SerializeToString()
        assert parse(header, 0) == message
        with pytest.raises(InvalidRequestError, match=r"payload=1: .* has none"):
            parse(header, 1)


def test_kinds_that_are_not_known_are_refused() -> None:
    for header in [b"", b"\x08\x01", b"\xfa\x7f\x00"]:
        with pytest.raises(InvalidRequestError, match="use version 3"):
            parse(header, 0)
    with pytest.raises(InvalidRequestError, match="header=3: "):
        parse(b"\xff\xff\xff", 0)


def test_the_vectors_of_the_bulk_channel_are_what_the_code_sends() -> None:
    v = vectors()
    token = guest_token(TOKEN, SESSION, bytes(range(16, 32)), 300)
    guest = messages.attach(SESSION, token)
    guest.attach.key_namespace, guest.attach.until_s = bytes(range(16, 32)), 300
    get, put = messages.get(1, SESSION, bytes(range(16))), messages.put(2, SESSION)
    get.get.deadline_ms = put.put.deadline_ms = 2000
    put.put.durable = True
    put.put.hints.category = "code"
    stored = pb.PutResponse(outcomes=bytes([0, 2]), reasons=["", "full"])
    sent: dict[str, bytes] = {
        "bulk_attach": pack(messages.attach(SESSION, TOKEN)),
        "bulk_guest": pack(guest),
        "bulk_attached": pack(messages.ready()),
        "bulk_get": pack(get),
        "bulk_part": pack(messages.part(1, 2368, 0, 0, "cpu"), 2368),
        "bulk_cancel": pack(messages.cancel(1)),
        "bulk_done": pack(messages.done(1, 1)),
        "bulk_put": pack(put),
        "bulk_ready": pack(messages.ready(2)),
        "bulk_finish": pack(messages.finish(2, 2)),
        "bulk_stored": pack(pb.StreamMessage(request=2, stored=stored)),
        "bulk_failed": pack(messages.failed(2, "DeadlineError", "late")),
    }
    assert {name: data.hex() for name, data in sent.items()} == {name: v[name] for name in sent}
    for data in sent.values():
        header_bytes, payload_bytes = unpack_lengths(data)
        assert len(data) == LENGTHS.size + header_bytes
        assert pack(parse(data[LENGTHS.size :], payload_bytes), payload_bytes) == data


def test_an_error_comes_back_as_its_class() -> None:
    full = TierFullError("cpu", 5, 4)
    sent = bulk.failure(5, full)
    error = bulk.error_of(sent.failed)
    assert (sent.request, type(error), str(error)) == (5, TierFullError, str(full))
    assert type(bulk.error_of(pb.StreamError(name="exit", text="no"))) is KVStoreError
    assert len(pack(bulk.failure(5, KVStoreError("x" * 9999)))) < 1100


# --- what servers send each other


def key(number: int) -> ChunkKey:
    return ChunkKey(SPACE + number.to_bytes(16, "little"))


def info(number: int) -> ChunkInfo:
    return ChunkInfo(key(number), ChainDigest(bytes(16)), LAYOUT, 0, 4096 + number)


@given(st.lists(st.booleans(), max_size=40))
def test_what_is_found_is_read_back_for_each_key(here: list[bool]) -> None:
    keys = [key(number) for number in range(len(here))]
    infos = [info(number) if is_here else None for number, is_here in enumerate(here)]
    assert found_infos(keys, found_rows(infos)) == infos


def test_requested_keys_are_of_their_namespace_up_to_the_limit() -> None:
    keys = [key(number) for number in range(5)]
    digests = b"".join(one[16:] for one in keys)
    for kind in (pb.FindRequest, pb.GetRequest):
        assert keys_of(kind(key_namespace=SPACE, digests=digests), 5) == keys
        with pytest.raises(InvalidRequestError, match="at most 4"):
            keys_of(kind(key_namespace=SPACE, digests=digests), 4)
        for space, cut in ((SPACE[:-1], digests), (b"", digests), (SPACE, digests[:-1])):
            with pytest.raises(InvalidRequestError):
                keys_of(kind(key_namespace=space, digests=cut), 5)


def test_what_does_not_fit_a_message_is_left_out() -> None:
    keys = [key(number) for number in range(20_000)]
    found = found_rows(info(number) for number in range(20_000))
    answer = pb.StreamMessage(request=(1 << 64) - 1, found=found)
    assert MAX_HEADER_BYTES * 0.9 < answer.ByteSize() <= MAX_HEADER_BYTES
    infos = found_infos(keys, found)
    count = infos.index(None)
    assert 1000 < count < 20_000
    assert infos[count:] == [None] * (20_000 - count)


def test_an_answer_about_another_chunk_or_too_many_is_refused() -> None:
    with pytest.raises(InvalidFrameError, match="requested"):
        found_infos([key(1)], found_rows([info(2)]))
    with pytest.raises(InvalidFrameError, match="at most 1, as requested"):
        found_infos([key(1)], found_rows([info(1), info(2)]))


NUMBERS = {
    1: "Lookup", 2: "Get", 3: "Release", 4: "Reserve", 5: "Commit", 6: "Abort",
    8: "Resolve", 9: "ReportReuse", 10: "PutDevice",
}  # fmt: skip
"""As servers and clients out there have them."""

SERVICE = pb.DESCRIPTOR.services_by_name["KVStore"]


# --- calls


def test_a_method_keeps_its_number_and_the_messages_of_the_service() -> None:
    assert {number: method.name for number, method in METHODS.items()} == NUMBERS
    for number, name in NUMBERS.items():
        method, described = METHODS[number], SERVICE.methods_by_name[name]
        assert method.request.DESCRIPTOR is described.input_type
        assert method.reply.DESCRIPTOR is described.output_type
        assert REPLIES[method.name] is method.reply
        assert not described.client_streaming
        request = method.request(session_id=7)
        packet = pack_call(name, request)
        head = Request.unpack(packet[:HEADER_BYTES])
        assert (head.op, head.arg, head.token) == (Op.call, number, bytes(16))
        assert unpack_call(head, packet[HEADER_BYTES:]) == (name, request)


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
    assert received(pack_answer(None)) == ([Reply.ok], b"")
    assert received(pack_answer(pb.GetResponse(), more=True)) == ([Reply.more], b"")


def test_a_failure_or_refusal_carries_its_error() -> None:
    for reply in [Reply.denied, Reply.unknown, Reply.invalid]:
        refusal = str(unpack_answer(unix_socket.pack_reply(reply)).error)
        assert refusal.endswith(f"the call: {reply.name}")
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


def test_what_is_no_answer_is_refused() -> None:
    for packet in [b"", b"x" * 31, bytes(32), b"x" * 32, bytes(MAX_PACKET_BYTES + 1)]:
        with pytest.raises(InvalidRequestError):
            unpack_answer(packet)
    fits = unix_socket.pack_reply(Reply.ok) + bytes(MAX_BODY_BYTES)
    assert len(unpack_answer(fits).body) == MAX_BODY_BYTES
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_PACKET_BYTES} bytes"):
        unpack_answer(fits + b"\0")


# --- the words of docs/format.md

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
    asked = {name for name in WORDS if name.endswith(("request", "call"))}
    assert {Request.unpack(WORDS[name][0][:HEADER_BYTES]).op for name in asked} == set(Op)
    replies = (WORDS[name][0][:HEADER_BYTES] for name in WORDS.keys() - asked)
    assert {unpack_head(reply, REPLY_KINDS)[0] for reply in replies} == set(Reply)


# --- places, rows of 32 bytes

WORD = st.integers(0, 2**64 - 1)
PLACES = st.builds(
    Place, st.integers(0, 2**32 - 1), st.integers(0, 255), st.integers(0, 255), WORD, WORD, WORD
)


@given(st.lists(PLACES, max_size=20))
def test_places_come_back_as_they_were_packed(places: list[Place]) -> None:
    assert unpack_places(pack_places(places)) == places
    with pytest.raises(InvalidRequestError, match="send rows of 32 bytes"):
        unpack_places(pack_places(places) + b"\0")


def test_a_row_is_the_one_that_the_format_shows() -> None:
    place = Place(7, Reach.memory, 1, 0x40, 0x1234, 0x5EED_B10C_0000_0002)
    assert pack_places([place]).hex() == (
        "0700000001010000"
        "40000000000000003412000000000000020000000cb1ed5e"
    )  # fmt: skip
    assert pack_places([NOWHERE]) == bytes(32)
