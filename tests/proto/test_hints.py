"""Hints: what may be said, and how it travels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.messages import hints_from_message, hints_to_message
from kvstore.proto.plans import MAX_HINT_MS, MAX_PRIORITY, NO_HINTS, Hints, Reuse

_HINTS = st.builds(
    Hints,
    st.sampled_from(Reuse),
    st.integers(0, MAX_PRIORITY),
    st.integers(0, MAX_HINT_MS),
    st.integers(0, MAX_HINT_MS),
    st.text(st.characters(categories=["L", "N"]), max_size=64),
    st.integers(0, MAX_HINT_MS),
)


@given(_HINTS)
def test_hints_arrive_as_they_were_given(hints: Hints) -> None:
    message = hints_to_message(hints) or pb.Hints()
    assert hints_from_message(pb.Hints.FromString(message.SerializeToString())) == hints


def test_who_has_nothing_to_say_sends_nothing() -> None:
    assert hints_to_message(NO_HINTS) is None
    assert hints_from_message(pb.Hints()) is NO_HINTS
    assert not pb.PutRequest(hints=hints_to_message(NO_HINTS)).ByteSize()


def test_hints_that_cannot_be_are_refused_by_name() -> None:
    for message, why in [
        (pb.Hints(reuse=3), "hints.reuse=3"),  # type: ignore[arg-type]
        (pb.Hints(priority=101), "hints.priority=101: use 0 to 100"),
        (pb.Hints(category="x" * 65), "at most 64 printable"),
        (pb.Hints(category="a\nb"), "at most 64 printable"),
    ]:
        with pytest.raises(InvalidRequestError, match=why.replace(".", r"\.")):
            hints_from_message(message)


def test_a_number_out_of_range_is_refused_before_it_is_sent() -> None:
    for name in ["priority", "ttl_ms", "pin_ms", "prompt_tokens"]:
        for value in [-1, 1 << 32, 0.5]:
            with pytest.raises(InvalidRequestError, match=rf"hints\.{name}="):
                Hints(**{name: value})  # type: ignore[arg-type]


def test_a_reuse_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"hints\.reuse=7"):
        Hints(reuse=7)  # type: ignore[arg-type]
