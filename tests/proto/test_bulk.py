"""The messages of the bulk channel: every one there and back, and lies."""

from __future__ import annotations

import pytest
from contracts.chunks import make_representation
from golden.samples import vectors
from helpers import stream_messages as messages
from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto import bulk
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
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError, KVStoreError, TierFullError
from kvstore.proto.types import ChainDigest, ChunkInfo, ChunkKey, KVLayout

LAYOUT = KVLayout.of(make_representation(), 16)
SPACE = bytes(range(16))
TOKEN = bytes(range(16))
SESSION = 0x1122334455667788


def unpack(data: bytes) -> tuple[pb.StreamMessage, int]:
    header_bytes, payload_bytes = unpack_lengths(data)
    assert len(data) == LENGTHS.size + header_bytes
    return parse(data[LENGTHS.size :], payload_bytes), payload_bytes


def test_a_header_is_the_message_and_the_payload_s_length_is_before_it() -> None:
    part = messages.part(7, 1 << 40, 1 << 20, 3, "disk")
    assert unpack(pack(part, 500)) == (part, 500)
    done = messages.done(7, 0)
    assert unpack(pack(done)) == (done, 0)


def test_what_is_no_message_or_too_long_is_refused_by_its_lengths() -> None:
    for begun, named in [
        (LENGTHS.pack(b"KVS\x02", 1, 0), "speak version 3"),
        (LENGTHS.pack(b"GET ", 1, 0), "speak version 3"),
        (LENGTHS.pack(MAGIC, MAX_HEADER_BYTES + 1, 0), "header=1048577: at most"),
        (LENGTHS.pack(MAGIC, 0xFFFFFFFF, 0), "header=4294967295: at most"),
        (LENGTHS.pack(MAGIC, 1, MAX_PAYLOAD_BYTES + 1), "payload=1048577: at most"),
    ]:
        with pytest.raises(InvalidRequestError, match=named):
            unpack_lengths(begun)


def test_a_first_header_may_be_held_to_less() -> None:
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
        with pytest.raises(InvalidRequestError, match="speak version 3"):
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
    with pytest.raises(InvalidFrameError, match="asked for"):
        found_infos([key(1)], found_rows([info(2)]))
    with pytest.raises(InvalidFrameError, match="answers for 1"):
        found_infos([key(1)], found_rows([info(1), info(2)]))
