"""kvstore ls, stat, get, put, pin, unpin and clear, against real servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coarse_codec import coarse_codec
from conftest import ServerMaker
from disk_damage import flip_a_bit
from google.protobuf import json_format
from kvstore_command import Kvstore
from local_server import LocalServer
from prompts import SMALL, is_right, other_revision, store
from trust_world import World

from kvstore.cli.chunks import parse_duration_ms
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.messages import as_message
from kvstore.proto.types import DIGEST_BYTES, ChunkKey


def digest(key: ChunkKey) -> str:
    return key[DIGEST_BYTES:].hex()


def listed(kvstore: Kvstore, *argv: object) -> list[dict[str, Any]]:
    status, out, err = kvstore("ls", "--json", *argv)
    assert status == 0, err
    return [chunk for space in json.loads(out)["spaces"] for chunk in space["chunks"]]


# --- ls


def test_ls_shows_whole_digests_and_takes_any_digits_that_they_begin_with(
    kvstore: Kvstore, server: LocalServer
) -> None:
    client = server.connect("grpc")
    digests = sorted(map(digest, store(client, 1, 40)))
    where = ("--address", server.address)
    _, out, _ = kvstore("ls", *where)
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows[2:]] == digests
    for count in (4, 5, 31):
        begun = digests[3][:count]
        found = [one["digest"] for one in listed(kvstore, begun, *where)]
        assert found == [one for one in digests if one.startswith(begun)]
    pages = listed(kvstore, "--after", digests[3][:15], "--limit", 5, *where)
    assert [one["digest"] for one in pages] == digests[4:9]
    status, _, err = kvstore("ls", "--after", "f" * 15, *where)
    assert (status, "begin" in err) == (2, True)


def test_ls_shows_each_chunk_once_in_pages_that_follow_each_other(
    kvstore: Kvstore, server: LocalServer
) -> None:
    client = server.connect("grpc")
    keys = store(client, 1, 7)
    client.lookup(keys=keys[:2])
    server.settled()
    chunks = listed(kvstore, "--address", server.address)
    assert [one["digest"] for one in chunks] == sorted(map(digest, keys))
    first = next(one for one in chunks if one["digest"] == digest(keys[0]))
    assert (first["hits"], first["tokens"], first["context_tokens"]) == (1, 16, 0)
    assert [copy["tier"] for copy in first["copies"]] == ["cpu", "disk"]
    assert 0 <= first["idle_s"] < 60
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        argv = ("--limit", 3, *(("--after", after) if after else ()))
        _, out, _ = kvstore("ls", "--json", "--address", server.address, *argv)
        (space,) = json.loads(out)["spaces"]
        assert 1 <= len(space["chunks"]) <= 3
        found += [one["digest"] for one in space["chunks"]]
        after = space["after"]
    assert found == sorted(map(digest, keys))
    out = kvstore("ls", "--address", server.address, "--limit", 2)[1]
    assert f"--after {found[1]}" in out
    (one,) = listed(kvstore, found[3][:8], "--address", server.address)
    assert one["digest"] == found[3]


def test_ls_keeps_models_apart_and_names_their_namespaces(
    kvstore: Kvstore, server: LocalServer
) -> None:
    one, other = server.connect("grpc"), server.connect("grpc", other_revision(SMALL))
    store(one, 1, 2)
    store(other, 1, 1)
    _, out, _ = kvstore("ls", "--spaces", "--json", "--address", server.address)
    spaces = {row["namespace"]: row for row in json.loads(out)["spaces"]}
    assert {name: row["chunks"] for name, row in spaces.items()} == {
        one.namespace.hex(): 2,
        other.namespace.hex(): 1,
    }
    assert spaces[one.namespace.hex()]["tenant"] == "default"
    chosen = ("--namespace", other.namespace.hex()[:8])
    assert len(listed(kvstore, "--address", server.address, *chosen)) == 1
    assert other.namespace.hex() in kvstore("ls", "--address", server.address, "--spaces")[1]
    status, _, err = kvstore("ls", "--address", server.address, "--namespace", "00112233")
    assert (status, "--spaces" in err) == (2, True)


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (("ls", "xyz!"), "prefix"),
        (("ls", "--after", "abc"), "after"),
        (("stat", "abc"), "key"),
        (("get", "abcd", "--out", "chunk.pt"), "file"),
        (("put", "chunk.pt"), "file"),
        (("pin", "abcd", "--for", "soon"), "for"),
        (("pin",), "keys"),
        (("clear", "--yes"), "scope"),
        (("clear", "--all", "--tenant", "acme", "--yes"), "scope"),
    ],
)
def test_wrong_usage_is_told_by_field_before_any_server_is_asked(
    kvstore: Kvstore, argv: tuple[str, ...], field: str
) -> None:
    status, out, err = kvstore(*argv, "--address", "127.0.0.1:1")
    assert (status, out) == (2, "")
    assert err.startswith(f"kvstore: {field}=")


# --- one chunk


def test_stat_tells_all_of_a_chunk_and_verifies_it(kvstore: Kvstore, server: LocalServer) -> None:
    keys = store(server.connect("grpc"), 1, 3)
    server.settled()
    status, out, _ = kvstore("stat", digest(keys[1])[:10], "--json", "--address", server.address)
    facts = json.loads(out)
    assert (status, facts["key"], facts["verified"]) == (0, keys[1].hex(), True)
    assert (facts["parent"], facts["context_tokens"], facts["position"]) == (
        digest(keys[0]),
        16,
        16,
    )
    assert facts["representation"]["model_id"] == SMALL.model_id
    (component,) = facts["components"]
    assert (component["kind"], component["tokens"]) == ("attention", 16)
    assert {copy["tier"]: copy["policy"] for copy in facts["copies"]} == {
        "cpu": "hit_density",
        "disk": "hit_density",
    }
    ranks = [
        json.loads(kvstore("stat", key.hex(), "--json", "--address", server.address)[1])["copies"]
        for key in keys
    ]
    assert sorted(copies[0]["before"] for copies in ranks) == [0, 1, 2]
    text = kvstore("stat", keys[1].hex(), "--address", server.address)[1]
    for word in (keys[1].hex(), "verified", "attention", SMALL.model_id):
        assert word in text


def test_stat_and_get_of_what_is_not_there_exit_with_1(
    kvstore: Kvstore, server: LocalServer, tmp_path: Path
) -> None:
    keys = store(server.connect("grpc"), 1, 1)
    absent = "0" * 32 if digest(keys[0])[0] != "0" else "1" * 32
    out = tmp_path / "none.safetensors"
    for argv in (("stat", absent), ("get", absent, "--out", out)):
        status, _, err = kvstore(*argv, "--address", server.address)
        assert (status, "no such chunk" in err) == (1, True)
    assert not out.exists()


def test_a_damaged_chunk_is_not_written_and_stat_says_what_is_wrong(
    kvstore: Kvstore, make_server: ServerMaker, tmp_path: Path
) -> None:
    server = make_server("--cpu", "4MiB")
    keys = store(server.connect("grpc"), 1, 1)
    server.settled()
    slab = server.node.store.tiers.cpu_tier.find(keys)[0]
    assert slab is not None
    server.node.store.delete(keys, server.node.store.moves.clock() + 5, "cpu")
    flip_a_bit(server.config.disk[0].path, keys[0])
    status, _, _ = kvstore(
        "get", digest(keys[0]), "-o", tmp_path / "x.frame", "--address", server.address
    )
    assert status == 1
    assert not (tmp_path / "x.frame").exists()
    assert server.counter("corrupt_chunks") == 1


@pytest.mark.parametrize("suffix", [".safetensors", ".frame"])
def test_what_get_writes_put_stores_elsewhere_as_the_same_chunk(
    kvstore: Kvstore, make_server: ServerMaker, tmp_path: Path, suffix: str
) -> None:
    server = make_server()
    client = server.connect("grpc")
    keys = store(client, 1, 2)
    files = []
    for number, key in enumerate(keys):
        files.append(tmp_path / f"{number}{suffix}")
        done = kvstore("get", digest(key), "--out", files[-1], "--address", server.address)
        assert done[0] == 0, done[2]
    client.clear()
    assert client.lookup(keys=keys).ready == 0
    status, out, err = kvstore("put", *files, "--json", "--address", server.address)
    assert status == 0, err
    assert [(row["key"], row["outcome"]) for row in json.loads(out)] == [
        (key.hex(), "stored") for key in keys
    ]
    found = client.get_chunks(keys)
    assert len(found) == 2
    assert all(is_right(client, key, one) for key, one in zip(keys, found, strict=True))
    assert client.stat(keys=keys[1:])[0].parent == keys[0][DIGEST_BYTES:]
    assert "exists" in kvstore("put", files[0], "--address", server.address)[1]


def test_no_file_is_written_over_and_no_folder_made(kvstore: Kvstore, tmp_path: Path) -> None:
    path = tmp_path / "chunk.frame"
    path.write_text("mine")
    for out, fix in ((path, "is there already"), (tmp_path / "no" / "c.frame", "that exists")):
        status, _, err = kvstore("get", "abcd", "--out", out)
        assert (status, fix in err) == (2, True), err
    assert path.read_text() == "mine"


def test_the_file_of_a_chunk_is_safetensors_as_others_read_it(
    kvstore: Kvstore, server: LocalServer, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file

    client = server.connect("grpc")
    keys = store(client, 1, 1)
    path = tmp_path / "chunk.safetensors"
    assert kvstore("get", digest(keys[0]), "--out", path, "--address", server.address)[0] == 0
    tensors = load_file(path)
    (found,) = client.get_chunks(keys)
    for number, parts in enumerate(found[0]):
        for name, part in zip(("key", "value"), parts, strict=True):
            read = tensors[f"layer.{number}.{name}"]
            assert (read.dtype, tuple(read.shape)) == (torch.bfloat16, part.shape)
            assert np.array_equal(read.view(torch.uint16).numpy(), part)


def test_a_changed_file_is_refused_whatever_was_changed(
    kvstore: Kvstore, server: LocalServer, tmp_path: Path
) -> None:
    client = server.connect("grpc")
    keys = store(client, 1, 1)
    for suffix in (".safetensors", ".frame"):
        path = tmp_path / f"chunk{suffix}"
        kvstore("get", digest(keys[0]), "--out", path, "--address", server.address)
        whole = path.read_bytes()
        client.clear()
        for at in (3, 9, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            status, _, err = kvstore("put", path, "--address", server.address)
            assert (status, "is no chunk" in err) == (2, True), (suffix, at, err)
        path.write_bytes(whole[:-7])
        assert kvstore("put", path, "--address", server.address)[0] == 2
        assert client.lookup(keys=keys).ready == 0
        path.write_bytes(whole)
        assert kvstore("put", path, "--address", server.address)[0] == 0


def test_a_lossy_copy_is_got_on_request_only_and_never_put(
    kvstore: Kvstore, make_server: ServerMaker, tmp_path: Path
) -> None:
    with coarse_codec():
        server = make_server("--codec", "disk=coarse")
        keys = store(server.connect("grpc"), 1, 1)
        server.settled()
        assert kvstore("clear", "--tier", "cpu", "--yes", "--address", server.address)[0] == 0
        path = tmp_path / "chunk.safetensors"
        argv = ("get", digest(keys[0]), "--out", path, "--address", server.address)
        assert kvstore(*argv)[0] == 1
        status, out, _ = kvstore(*argv, "--lossy")
        assert (status, "bounded" in out) == (0, True)
        status, _, err = kvstore("put", path, "--address", server.address)
        assert (status, "lossy" in err) == (2, True)


# --- keeping


def test_pins_keep_chunks_by_key_and_by_prefix_until_they_are_taken_back(
    kvstore: Kvstore, server: LocalServer
) -> None:
    client = server.connect("grpc")
    keys = store(client, 1, 3)
    at = ("--address", server.address)
    assert kvstore("pin", digest(keys[0]), "--for", "2h", *at)[:2] == (0, "1 of 1 chunks\n")
    (row,) = listed(kvstore, digest(keys[0]), *at)
    assert 7000 < row["pinned_s"] <= 7200
    assert kvstore("clear", "--namespace", client.namespace.hex(), "--yes", *at)[0] == 0
    assert [one["digest"] for one in listed(kvstore, *at)] == [digest(keys[0])]
    assert kvstore("unpin", "--prefix", digest(keys[0])[:5], *at)[0] == 0
    assert listed(kvstore, *at)[0]["pinned_s"] == 0
    assert kvstore("unpin", digest(keys[0]), *at)[0] == 1, "there is no pin any more"
    assert kvstore("pin", "f" * 32, *at)[0] == 1
    assert kvstore("pin", digest(keys[0]), "--for", "25h", *at)[0] == 2


@pytest.mark.parametrize(
    ("text", "ms"), [("250ms", 250), ("30s", 30_000), ("10min", 600_000), ("2h", 7_200_000)]
)
def test_times_are_written_with_their_unit(text: str, ms: int) -> None:
    assert parse_duration_ms(text) == ms
    with pytest.raises(InvalidRequestError):
        parse_duration_ms(text.lstrip("0123456789"))


def test_clear_says_first_what_would_go_and_takes_one_tier_or_all(
    kvstore: Kvstore, server: LocalServer
) -> None:
    one, other = server.connect("grpc"), server.connect("grpc", other_revision(SMALL))
    store(one, 1, 3)
    store(other, 1, 2)
    server.settled()
    at = ("--address", server.address, "--json")
    status, out, _ = kvstore("clear", "--all", "--dry-run", *at)
    assert (status, json.loads(out)["deleted"]) == (0, 5)
    assert len(listed(kvstore, "--address", server.address)) == 5
    status, _, err = kvstore("clear", "--all", *at)
    assert (status, "--yes" in err) == (2, True), "nobody is there to be asked"
    assert json.loads(kvstore("clear", "--tier", "cpu", "--yes", *at)[1])["deleted"] == 5
    rows = listed(kvstore, "--address", server.address)
    assert [[copy["tier"] for copy in row["copies"]] for row in rows] == [["disk"]] * 5
    space = other.namespace.hex()
    done = json.loads(kvstore("clear", "--namespace", space, "--yes", *at)[1])
    assert done == {"dry_run": False, "deleted": 2, "deleted_bytes": 2 * _size(rows), "in_use": 0}
    assert json.loads(kvstore("clear", "--tenant", "default", "--yes", *at)[1])["deleted"] == 3
    assert listed(kvstore, "--address", server.address) == []
    assert kvstore("clear", "--tier", "tape", "--yes", *at)[0] == 2


def test_clear_asks_whoever_sits_there_and_takes_no_for_an_answer(
    kvstore: Kvstore, server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(server.connect("grpc"), 1, 2)
    server.settled()  # a chunk that is being copied to the disk is read, and would stay
    asked: list[str] = []
    answers = [False, True]

    def confirm(question: str, *, err: bool) -> bool:
        asked.append(question)
        return answers.pop(0)

    monkeypatch.setattr("typer.confirm", confirm)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    argv = ("clear", "--all", "--address", server.address)
    assert kvstore(*argv)[0] == 1
    assert len(listed(kvstore, "--address", server.address)) == 2
    assert kvstore(*argv)[0] == 0
    assert listed(kvstore, "--address", server.address) == []
    assert asked[0].startswith("would delete 2 chunks, ")


def _size(rows: list[dict[str, Any]]) -> int:
    (size,) = {copy["size_bytes"] for row in rows for copy in row["copies"]}
    return int(size)


# --- tenants


@pytest.fixture
def world(tmp_path: Path, no_leaks: None) -> Iterator[World]:
    world = World(tmp_path, "--audit-log", str(tmp_path / "audit.log"))
    yield world
    world.close()


def test_a_caller_sees_and_forgets_what_is_its_tenants_alone(
    world: World, kvstore: Kvstore, tmp_path: Path
) -> None:
    mine, theirs = world.client(world.acme), world.client(world.zeta)
    keys, others = store(mine, 1, 2), store(theirs, 1, 3)

    def as_holder(key: str, *argv: object) -> tuple[int, str, str]:
        token = tmp_path / "token"
        token.write_text(key)
        token.chmod(0o600)
        name, *rest = argv
        at = ("--address", world.address)
        return kvstore("--token-file", token, "--ca", world.ca.path, name, *rest, *at)

    _, out, _ = as_holder(world.acme, "ls", "--json")
    (space,) = json.loads(out)["spaces"]
    assert [one["digest"] for one in space["chunks"]] == sorted(map(digest, keys))
    assert theirs.namespace.hex() not in out
    assert as_holder(world.acme, "stat", others[2].hex())[0] == 1, "as if it were not there"
    assert as_holder(world.acme, "ls", "--namespace", theirs.namespace.hex())[0] == 2
    for argv in (("ls", "--spaces", "--tenant", "zeta"), ("clear", "--tenant", "zeta", "--yes")):
        status, _, err = as_holder(world.acme, *argv)
        assert (status, "admin" in err) == (3, True)
    assert as_holder(world.acme, "clear", "--all", "--yes")[0] == 3
    assert as_holder(world.reader, "pin", keys[0].hex())[0] == 3, "reading is not keeping"
    _, out, _ = as_holder(world.admin, "ls", "--spaces", "--tenant", "*", "--json")
    assert {row["tenant"] for row in json.loads(out)["spaces"]} == {"acme", "zeta"}
    status, out, _ = as_holder(world.acme, "clear", "--tenant", "acme", "--yes", "--json")
    assert (status, json.loads(out)["deleted"]) == (0, 2)
    assert theirs.lookup(keys=others).ready == 3
    admin = world.new_key("ops", "admin", "write")
    status, out, _ = as_holder(admin, "clear", "--tenant", "zeta", "--yes", "--json")
    assert (status, json.loads(out)["deleted"]) == (0, 3)
    world.server.node.trust.close()
    lines = [json.loads(line) for line in (tmp_path / "audit.log").read_text().splitlines()]
    cleared = [(line["tenant"], line["outcome"]) for line in lines if line["rpc"] == "Clear"]
    assert cleared == [
        ("zeta", "PermissionDeniedError"), ("*", "PermissionDeniedError"),
        ("acme", "OK"), ("zeta", "OK"),
    ]  # fmt: skip


def test_a_representation_stands_for_a_namespace_that_the_server_forgot(
    kvstore: Kvstore, server: LocalServer, tmp_path: Path
) -> None:
    keys = store(server.connect("grpc"), 1, 2)
    server.node.store.spaces.restore([])
    assert listed(kvstore, "--address", server.address) == []
    path = tmp_path / "model.json"
    path.write_text(json_format.MessageToJson(as_message(pb.Representation, SMALL)))
    argv = ("--address", server.address, "--model-representation", path)
    assert len(listed(kvstore, *argv)) == len(keys)
