"""Places travel as rows of 32 bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.unix_socket import NOWHERE, Place, Reach, pack_places, unpack_places

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
