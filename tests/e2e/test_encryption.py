"""Encryption at rest, seen from clients and from who holds the disk or Redis."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from conftest import ServerMaker
from helpers.local_server import LocalServer, eventually
from helpers.prompts import MEDIUM, assert_reads, chunks_of, is_right, keys_of, parts_of, tensors_of
from helpers.redis_process import RedisProcess

from kvstore.client import Client, ClientOptions
from kvstore.client.options import TransportName
from kvstore.codecs.base import ChunkTensors
from kvstore.proto.types import ChunkKey, PutOutcome
from kvstore.server.security.key_files import (
    EncryptionKey,
    next_key,
    parse_encryption_keys,
    write_keys,
)

CHUNK_TOKENS = 64


def key_file(path: Path) -> Path:
    write_keys(path, [next_key([], os.urandom, time.time())])
    return path


def rows(path: Path) -> list[EncryptionKey]:
    return list(parse_encryption_keys(path.read_bytes()).values())


def client_of(server: LocalServer, transport: TransportName) -> Client:
    options = ClientOptions(transport, chunk_tokens=CHUNK_TOKENS, deadline_ms=20_000)
    return server.connect(representation=MEDIUM, options=options)


def stored(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


def assert_comes(client: Client, keys: list[ChunkKey]) -> None:
    """All of *keys* come, and right: a get may end early where the disk is late."""
    found: list[ChunkTensors] = []

    def is_whole() -> bool:
        found[:] = client.get_chunks(keys)
        return len(found) == len(keys)

    assert eventually(is_whole)
    assert all(is_right(client, *pair) for pair in zip(keys, found, strict=True))


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_chunks_on_disk_are_read_and_files_show_nothing(
    transport: TransportName, tmp_path: Path, make_server: ServerMaker
) -> None:
    keys_path = key_file(tmp_path / "keys")
    flags = ("--encryption-keys", str(keys_path), "--cpu", "4MiB", "--write", "through")
    server = make_server(*flags)
    client = client_of(server, transport)
    keys = keys_of(client, 1, 32)  # 8 MiB: half of them only disk has in the end
    chunks = chunks_of(client, keys)
    for at in range(0, len(keys), 4):
        puts = client.put_chunks(chunks[at : at + 4], durable=True)
        assert {put.outcome for put in puts} == {PutOutcome.stored}, puts
    assert_comes(client, keys)
    sample = parts_of(tensors_of(keys[0], MEDIUM, CHUNK_TOKENS))[0].tobytes()[:32]
    files = stored(server.config.disk[0].path)
    assert len(files) > 8 << 20
    assert sample not in files
    assert server.node.store.tiers.file_backed is None


def test_after_a_rotation_both_epochs_are_read_and_a_retired_one_is_missing(
    tmp_path: Path, make_server: ServerMaker
) -> None:
    path = key_file(tmp_path / "keys")
    server = make_server("--encryption-keys", str(path), "--cpu", "4MiB")
    client = client_of(server, "grpc")
    first, second = keys_of(client, 1, 12), keys_of(client, 2, 12)
    client.put_chunks(chunks_of(client, first), durable=True)
    write_keys(path, [*rows(path), next_key(rows(path), os.urandom, time.time())])
    client.put_chunks(chunks_of(client, second), durable=True)
    assert_comes(client, first)
    assert_comes(client, second)
    write_keys(path, rows(path)[1:])
    server.stop()
    again = make_server("--encryption-keys", str(path), "--cpu", "4MiB")
    client = client_of(again, "grpc")
    assert [client.get_chunks([key]) for key in first] == [[]] * len(first)
    assert_comes(client, second)
    assert again.counter("corrupt_chunks") == len(first)
    client.put_chunks(chunks_of(client, first), durable=True)
    assert_comes(client, first)


def test_two_servers_share_an_encrypted_redis(tmp_path: Path, make_server: ServerMaker) -> None:
    process = RedisProcess(tmp_path / "redis")
    (tmp_path / "redis").mkdir()
    process.start()
    try:
        keys_path = key_file(tmp_path / "keys")
        flags = (
            *("--encryption-keys", str(keys_path), "--tiers", "cpu,redis"),
            *("--redis", process.url, "--redis-timeout-ms", "20000", "--socket", "off"),
        )
        writer = client_of(make_server(*flags), "grpc")
        keys = keys_of(writer, 1, 4)
        chunks = chunks_of(writer, keys)
        server = make_server(*flags)
        writer.put_chunks(chunks)
        reader = client_of(server, "grpc")
        assert eventually(lambda: reader.lookup(keys=keys).ready == len(keys))
        assert_reads(reader, keys)
        sample = parts_of(tensors_of(keys[0], MEDIUM, CHUNK_TOKENS))[0].tobytes()[:32]
        values = [process.value(name) for name in process.names()]
        assert values
        assert not any(sample in bytes(value) for value in values)
    finally:
        process.client.close()
        process.stop()
