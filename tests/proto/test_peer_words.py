"""What servers tell each other: read back as it was written, or refused."""

from __future__ import annotations

import numpy as np
import pytest
from contracts.chunks import make_representation
from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto.bulk import (
    MAX_PAYLOAD_BYTES,
    pack_found,
    pack_wanted,
    unpack_found,
    unpack_wanted,
)
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError
from kvstore.proto.types import ChainDigest, ChunkInfo, ChunkKey, KVLayout

LAYOUT = KVLayout.of(make_representation(), 16)
SPACE = bytes(range(16))


def key(number: int) -> ChunkKey:
    return ChunkKey(SPACE + number.to_bytes(16, "little"))


def info(number: int) -> ChunkInfo:
    return ChunkInfo(key(number), ChainDigest(bytes(16)), LAYOUT, 0, 4096 + number)


@given(st.lists(st.booleans(), max_size=40))
def test_what_is_found_is_read_back_for_each_key(here: list[bool]) -> None:
    keys = [key(number) for number in range(len(here))]
    infos = [info(number) if is_here else None for number, is_here in enumerate(here)]
    assert unpack_found(keys, pack_found(infos)) == infos


def test_wanted_keys_are_read_back_up_to_the_limit() -> None:
    keys = [key(number) for number in range(5)]
    assert unpack_wanted(pack_wanted(keys), 5) == keys
    with pytest.raises(InvalidRequestError, match="at most 4"):
        unpack_wanted(pack_wanted(keys), 4)
    for cut in (SPACE[:-1], pack_wanted(keys)[:-1]):
        with pytest.raises(InvalidRequestError):
            unpack_wanted(cut, 5)


def test_what_does_not_fit_a_message_is_left_out() -> None:
    keys = [key(number) for number in range(20_000)]
    payload = pack_found(info(number) for number in range(20_000))
    assert MAX_PAYLOAD_BYTES - 512 < len(payload) <= MAX_PAYLOAD_BYTES
    found = unpack_found(keys, payload)
    count = found.index(None)
    assert 1000 < count < 20_000
    assert found[count:] == [None] * (20_000 - count)


def test_an_answer_about_another_chunk_or_too_many_is_refused() -> None:
    with pytest.raises(InvalidFrameError, match="asked for"):
        unpack_found([key(1)], pack_found([info(2)]))
    with pytest.raises(InvalidFrameError, match="answers for 1"):
        unpack_found([key(1)], pack_found([info(1), info(2)]))


@given(st.binary(max_size=200), st.integers(0, 3))
def test_rubbish_is_refused_and_nothing_else_happens(rubbish: bytes, seed: int) -> None:
    keys = [key(number) for number in range(3)]
    whole = pack_found(map(info, range(3)))
    at = np.random.default_rng(seed).integers(0, len(whole))
    for payload in (rubbish, whole[:at] + rubbish + whole[at:]):
        try:
            found = unpack_found(keys, payload)
        except InvalidFrameError:
            continue
        assert len(found) == 3
        assert all(
            one is None or one.key == wanted for one, wanted in zip(found, keys, strict=True)
        )
