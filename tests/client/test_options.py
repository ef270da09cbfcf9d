"""What options are refused, by name."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from helpers.prompts import SMALL

from kvstore.client import Client, ClientOptions
from kvstore.proto.errors import InvalidRequestError

UNUSABLE: list[tuple[str, Any, str]] = [
    ("transport", "pigeon", "use auto, shm, tcp or grpc"),
    ("transport", "zmq", "there is no such transport any more; use tcp"),
    ("chunk_tokens", 15, "use 16 to 8192"),
    ("chunk_tokens", 8193, "use 16 to 8192"),
    ("chunk_tokens", 256.0, "use 16 to 8192, a whole number"),
    ("chunk_tokens", "256", "use 16 to 8192, a whole number"),
    ("deadline_ms", 0, "give a positive whole number"),
    ("deadline_ms", -1, "give a positive whole number"),
    ("deadline_ms", 2.5, "give a positive whole number"),
    ("deadline_ms", True, "give a positive whole number"),
    ("deadline_ms", 600_001, "at most 600000"),
    ("name", "half \ud800", "give at most 128 printable characters"),
    ("name", 7, "give at most 128 printable characters"),
    ("tenant", "\udfff", "give at most 128 printable characters"),
    ("staging_bytes", 0, "give a positive whole number"),
    ("retry_after_ms", 0, "give a positive whole number"),
    ("copy_threads", 0, "give a positive whole number"),
]


def test_unusable_option_is_refused_by_name() -> None:
    for field, value, fix in UNUSABLE:
        with pytest.raises(InvalidRequestError) as caught:
            ClientOptions(**{field: value})
        assert (caught.value.field, str(caught.value)) == (field, f"{field}={value!r}: {fix}")


def test_addresses_of_hosts_and_of_grpc_are_taken_and_others_refused() -> None:
    for address in ("[::1]:7420", "localhost:7420", "dns:///store.example:7420", "unix:/run/x"):
        with Client(address, SMALL) as client:
            assert client.address == address
    for address in ("127.0.0.1", "http://127.0.0.1:7420", "127.0.0.1:99999", ":7420", ""):
        with pytest.raises(InvalidRequestError, match="address="):
            Client(address, SMALL)
    with pytest.raises(InvalidRequestError, match="model="):
        Client("localhost:7420", "a name")  # type: ignore[arg-type]


def test_a_folder_of_assets_that_is_not_there_is_refused_when_a_client_is_made(
    tmp_path: Path,
) -> None:
    options = ClientOptions(assets=tmp_path / "none")
    with pytest.raises(InvalidRequestError, match=r"assets=.*none': give a folder that exists"):
        Client("127.0.0.1:1", SMALL, options)


def test_options_cannot_change_after_their_birth() -> None:
    with pytest.raises(FrozenInstanceError):
        ClientOptions().deadline_ms = 1  # type: ignore[misc]
