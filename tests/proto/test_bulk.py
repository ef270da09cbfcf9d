"""The words of the bulk channel: every one there and back, and lies."""

from __future__ import annotations

import struct
from typing import get_args

import pytest
from golden.samples import vectors
from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto import bulk
from kvstore.proto.bulk import Word, guest_token, pack, unpack
from kvstore.proto.errors import InvalidRequestError, KVStoreError, TierFullError

U64 = st.integers(0, (1 << 64) - 1)
U32 = st.integers(0, (1 << 32) - 1)
WORDS: st.SearchStrategy[Word] = st.one_of(
    st.builds(bulk.Attach, U64, U64, st.binary(min_size=16, max_size=16)),
    st.builds(bulk.Attached, U64),
    st.builds(
        bulk.Guest,
        U64,
        U64,
        st.binary(min_size=16, max_size=16),
        U32,
        st.binary(min_size=16, max_size=16),
    ),
    st.builds(bulk.Get, U64, U64, U64, U32, U32),
    st.builds(bulk.Put, U64, U64, U32, U32),
    st.builds(bulk.Part, U64, U64, U64, U32, st.binary(min_size=8, max_size=8)),
    st.builds(bulk.Ready, U64),
    st.builds(bulk.Cancel, U64),
    st.builds(bulk.Finish, U64, U32),
    st.builds(bulk.Done, U64, U32),
    st.builds(bulk.Failed, U64),
    st.builds(bulk.Hint, U64),
)


def payload_limit(word: Word) -> int | None:
    return next(s.max_payload_bytes for s in bulk.SHAPES.values() if s.kind is type(word))


def test_every_kind_has_a_word_and_every_word_a_kind() -> None:
    assert {shape.kind for shape in bulk.SHAPES.values()} == set(get_args(Word))
    assert sorted(bulk.SHAPES) == [*range(1, 6), *range(7, 15)]


@given(WORDS)
def test_what_is_packed_is_unpacked(word: Word) -> None:
    limit = payload_limit(word)
    assert unpack(pack(word), limit) == word


@given(WORDS, st.data())
def test_header_of_another_length_is_refused(word: Word, data: st.DataObject) -> None:
    header = pack(word)
    cut = data.draw(st.integers(0, len(header) - 1))
    for wrong in (header[:cut], header + b"\0"):
        with pytest.raises(InvalidRequestError, match=r"^header="):
            unpack(wrong, payload_limit(word))


@given(WORDS)
def test_payload_where_none_belongs_and_none_where_one_does_are_refused(word: Word) -> None:
    limit = payload_limit(word)
    with pytest.raises(InvalidRequestError, match=r"^payload="):
        unpack(pack(word), 0 if limit is None else None)
    if limit is not None:
        with pytest.raises(InvalidRequestError, match=r"^payload=.*at most"):
            unpack(pack(word), limit + 1)


@given(st.binary(max_size=80), st.none() | st.integers(0, 1 << 63))
def test_rubbish_is_refused_cleanly(header: bytes, payload_bytes: int | None) -> None:
    with pytest.raises(InvalidRequestError):
        unpack(header, payload_bytes)


@pytest.mark.parametrize(
    ("version", "kind"), [(1, 7), (0, 7), (2, 0), (2, 6), (2, 15), (65535, 65535)]
)
def test_unknown_versions_and_kinds_are_refused(version: int, kind: int) -> None:
    header = struct.pack("<4sHHQ", bulk.MAGIC, version, kind, 1)
    with pytest.raises(InvalidRequestError, match="speak version 2"):
        unpack(header)


def test_the_vectors_of_the_bulk_channel_are_what_the_code_sends() -> None:
    v = vectors()
    token = bytes(range(16))
    session = 0x1122334455667788
    space = bytes(range(16, 32))
    words: dict[str, Word] = {
        "bulk_attach": bulk.Attach(0, session, token),
        "bulk_attached": bulk.Attached(0),
        "bulk_guest": bulk.Guest(0, session, space, 300, guest_token(token, session, space, 300)),
        "bulk_get": bulk.Get(1, session, 0, 2000, 0),
        "bulk_part": bulk.Part(1, 2368, 0, 0, bulk.tier_bytes("cpu")),
        "bulk_cancel": bulk.Cancel(1),
        "bulk_done": bulk.Done(1, 1),
        "bulk_put": bulk.Put(2, session, 2000, bulk.DURABLE),
        "bulk_ready": bulk.Ready(2),
        "bulk_hint": bulk.Hint(2),
        "bulk_finish": bulk.Finish(2, 2),
        "bulk_failed": bulk.Failed(2),
    }
    assert {name: pack(word).hex() for name, word in words.items()} == {
        name: v[name] for name in words
    }
    assert bulk.pack_outcomes(bytes([0, 2]), ["", "full"]).hex() == v["bulk_outcomes"]
    assert bulk.pack_failure("DeadlineError", "late").hex() == v["bulk_failure"]


# --- payloads


@given(st.lists(st.tuples(st.integers(0, 255), st.text(max_size=50)), max_size=20))
def test_outcomes_come_back(rows: list[tuple[int, str]]) -> None:
    packed = bulk.pack_outcomes(bytes(o for o, _ in rows), [text for _, text in rows])
    outcomes, reasons = bulk.unpack_outcomes(len(rows), packed)
    assert list(zip(outcomes, reasons, strict=True)) == rows


@given(st.integers(0, 50), st.binary(max_size=100))
def test_outcomes_that_lie_are_refused_cleanly(count: int, payload: bytes) -> None:
    try:
        outcomes, reasons = bulk.unpack_outcomes(count, payload)
    except InvalidRequestError:
        return
    assert len(outcomes) == len(reasons) == count
    assert len(payload) >= 3 * count


def test_an_error_comes_back_as_its_class() -> None:
    error = bulk.unpack_failure(bulk.pack_failure("TierFullError", "tier 'cpu' needs 5"))
    assert (type(error), str(error)) == (TierFullError, "tier 'cpu' needs 5")
    assert type(bulk.unpack_failure(b"\xff\xfe")) is KVStoreError


@given(
    st.binary(max_size=64),
    st.lists(
        st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
    ),
)
def test_ranges_come_back(digests: bytes, rows: list[tuple[int, int, int]]) -> None:
    asked = [bulk.Range(*row) for row in rows]
    assert bulk.unpack_ranges(bulk.pack_ranges(digests, asked)) == (digests, asked)


@given(st.binary(max_size=100))
def test_ranges_that_lie_are_refused_cleanly(payload: bytes) -> None:
    try:
        digests, ranges = bulk.unpack_ranges(payload)
    except InvalidRequestError:
        return
    assert len(payload) == 4 + 20 * len(ranges) + len(digests)
