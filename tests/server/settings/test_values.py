"""Sizes and addresses as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.server.settings.settings import Settings
from kvstore.server.settings.values import (
    GIB,
    KIB,
    MIB,
    format_size,
    is_loopback,
    parse_endpoint,
    parse_size,
)


def test_sizes_are_read_as_written() -> None:
    for text, size_bytes in [
        ("8GiB", 8 * GIB),
        ("512MiB", 512 * MIB),
        ("1GB", 10**9),
        ("1048576", MIB),
        (" 64 kib ", 64 * KIB),
        ("7b", 7),
        ("8G", 8 * 10**9),
        ("8Gi", 8 * GIB),
        ("64k", 64_000),
        (5, 5),
    ]:
        assert parse_size(text) == size_bytes


def test_what_is_not_a_size_is_refused() -> None:
    for value in ["", "GiB", "1 G B", "8Gx", "1e9", "0x10", "٣MiB", True, 1.5, None]:
        with pytest.raises(ValueError, match="8GiB, 512MiB, 1GB or 1048576"):
            parse_size(value)


@given(st.integers(0, 1 << 50))
def test_a_formatted_size_reads_back(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


@given(st.text(max_size=20))
def test_an_endpoint_is_split_or_refused_never_garbled(text: str) -> None:
    try:
        host, port = parse_endpoint(text)
    except ValueError:
        return
    assert 0 <= port <= 65535
    shown = f"[{host}]" if ":" in host else host
    assert text.rpartition(":")[0] in (shown, f"[{host}]")


def test_addresses_of_this_machine_are_loopback_and_no_others() -> None:
    for host in ["127.0.0.1", "127.9.9.9", "::1", "localhost"]:
        assert is_loopback(host)
    for host in ["0.0.0.0", "::", "10.0.0.1", "localhost.example", "node7"]:
        assert not is_loopback(host)


def test_urls_of_a_redis_are_known() -> None:
    for url in ["redis://h", "rediss://u:p@h:6380/1", "redis://[::1]:1/0?db=1"]:
        assert Settings(redis_url=url).redis_url == url


def test_addresses_of_the_bulk_channel_are_taken() -> None:
    for value in ["off", "127.0.0.1:0", "0.0.0.0:7421", "[::1]:7421", "store.example:1"]:
        assert Settings.model_validate({"bulk": value}).bulk == value
