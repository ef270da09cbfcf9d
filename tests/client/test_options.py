"""What options are refused, by name."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from kvstore.client import ClientOptions
from kvstore.proto.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("field", "value", "fix"),
    [
        ("transport", "pigeon", "use auto, shm, zmq or grpc"),
        ("chunk_tokens", 15, "use 16 to 8192"),
        ("chunk_tokens", 8193, "use 16 to 8192"),
        ("deadline_ms", 0, "give a positive number"),
        ("deadline_ms", -1, "give a positive number"),
        ("deadline_ms", 600_001, "at most 600000"),
        ("staging_bytes", 0, "give a positive number"),
        ("retry_after_ms", 0, "give a positive number"),
        ("copy_threads", 0, "give a positive number"),
    ],
)
def test_unusable_option_is_refused_by_name(field: str, value: Any, fix: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ClientOptions(**{field: value})
    assert (caught.value.field, str(caught.value)) == (field, f"{field}={value!r}: {fix}")


def test_options_cannot_change_after_their_birth() -> None:
    with pytest.raises(FrozenInstanceError):
        ClientOptions().deadline_ms = 1  # type: ignore[misc]
