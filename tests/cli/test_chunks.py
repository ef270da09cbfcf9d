"""kvstore ls, stat, pin, unpin and clear, against real servers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import ServerMaker
from helpers.disk_damage import flip_a_bit
from helpers.kvstore_command import Kvstore
from helpers.local_server import LocalServer
from helpers.prompts import SMALL, other_revision, store

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
    assert (status, "unique prefix" in err) == (2, True)


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
    found, more = list[str](), True
    while more:
        argv = ("--limit", 3, *(("--after", found[-1]) if found else ()))
        _, out, _ = kvstore("ls", "--json", "--address", server.address, *argv)
        (space,) = json.loads(out)["spaces"]
        assert 1 <= len(space["chunks"]) <= 3
        found += [one["digest"] for one in space["chunks"]]
        more = space["after"] is not None
        assert space["after"] == (found[-1] if more else None)
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
    chunks = {name: row["chunks"] for name, row in spaces.items()}
    assert chunks == {one.namespace.hex(): 2, other.namespace.hex(): 1}
    assert spaces[one.namespace.hex()]["tenant"] == "default"
    chosen = ("--namespace", other.namespace.hex()[:8])
    assert len(listed(kvstore, "--address", server.address, *chosen)) == 1
    assert other.namespace.hex() in kvstore("ls", "--address", server.address, "--spaces")[1]
    status, _, err = kvstore("ls", "--address", server.address, "--namespace", "00112233")
    assert (status, "--spaces" in err) == (2, True)


def test_wrong_usage_is_told_by_field_before_any_server_is_asked(kvstore: Kvstore) -> None:
    for argv, field in (
        (("ls", "xyz!"), "prefix"),
        (("ls", "--after", "abc"), "after"),
        (("stat", "abc"), "key"),
        (("pin", "abcd", "--for", "soon"), "for"),
        (("pin", "abcd", "--for", "0s"), "for"),
        (("pin", "abcd", "--for", "25h"), "for"),
        (("pin",), "keys"),
        (("clear", "--yes"), "scope"),
        (("clear", "--all", "--tenant", "acme", "--yes"), "scope"),
        (("clear", "--namespace", "00112233", "--model-representation", "x", "--yes"), "namespace"),
    ):
        status, out, err = kvstore(*argv, "--address", "127.0.0.1:1")
        assert (status, out, err.startswith(f"kvstore: {field}=")) == (2, "", True), argv


# --- one chunk


def test_stat_tells_all_of_a_chunk_and_verifies_it(kvstore: Kvstore, server: LocalServer) -> None:
    keys = store(server.connect("grpc"), 1, 3)
    server.settled()
    status, out, _ = kvstore("stat", digest(keys[1])[:10], "--json", "--address", server.address)
    facts = json.loads(out)
    assert (status, facts["key"], facts["verified"]) == (0, keys[1].hex(), True)
    assert facts["parent"] == digest(keys[0])
    assert (facts["context_tokens"], facts["position"]) == (16, 16)
    assert facts["representation"]["model_id"] == SMALL.model_id
    (component,) = facts["components"]
    assert (component["kind"], component["tokens"]) == ("attention", 16)
    copies = {copy["tier"]: copy["policy"] for copy in facts["copies"]}
    assert copies == {"cpu": "hit_density", "disk": "hit_density"}
    ranks = [
        json.loads(kvstore("stat", key.hex(), "--json", "--address", server.address)[1])["copies"]
        for key in keys
    ]
    assert sorted(copies[0]["before"] for copies in ranks) == [0, 1, 2]
    text = kvstore("stat", keys[1].hex(), "--address", server.address)[1]
    for word in (keys[1].hex(), "verified", "attention", SMALL.model_id):
        assert word in text
    absent = "0" * 32 if digest(keys[0])[0] != "0" else "1" * 32
    status, _, err = kvstore("stat", absent, "--address", server.address)
    assert (status, "no such chunk" in err) == (1, True)


def test_stat_of_a_damaged_chunk_exits_with_1_and_says_what_is_wrong(
    kvstore: Kvstore, make_server: ServerMaker
) -> None:
    server = make_server("--cpu", "4MiB")
    keys = store(server.connect("grpc"), 1, 1)
    server.settled()
    server.node.store.delete(keys, server.node.store.moves.clock() + 5, "cpu")
    flip_a_bit(server.config.disk[0].path, keys[0])
    status, out, err = kvstore("stat", digest(keys[0]), "--json", "--address", server.address)
    assert status == 1, (out, err)
    facts = json.loads(out[out.index("{") :])  # behind the lines that the server logs
    assert (facts["verified"], bool(facts["damage"])) == (False, True)
    assert server.counter("corrupt_chunks") == 1


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
