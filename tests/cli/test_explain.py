"""``kvstore explain``: what it prints, what it refuses, what it exits with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from helpers.documents import DOCUMENT, HEAD, prompt_of
from helpers.kvstore_command import Kvstore
from helpers.local_server import DEADLINE_MS, LocalServer
from helpers.plain_engine import PlainEngine
from helpers.prompts import SMALL, keys_of, other_revision, store, tokens

from kvstore.cli.explain import read_tokens
from kvstore.client import ClientOptions
from kvstore.client.segments import SegmentQuery
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.blend import ReuseReport, ShadowResult
from kvstore.proto.messages import as_message
from kvstore.proto.types import DIGEST_BYTES, DType
from kvstore.server.blending.gates import TRIALS

(GROUP,) = SMALL.layer_groups


@pytest.fixture
def explain(server: LocalServer, kvstore: Kvstore) -> Kvstore:
    """Run the command against the server."""
    return lambda *argv: kvstore("explain", "--address", server.address, *argv)


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    """A file of the 64 tokens of the prompt of seed 1."""
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(tokens(1, 64)))
    return path


def as_json(explain: Kvstore, *argv: object) -> Any:
    status, out, err = explain(*argv, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


def test_a_prompt_that_is_stored_is_a_hit_with_its_copies(
    server: LocalServer, explain: Kvstore, kvstore: Kvstore, prompt: Path, tmp_path: Path
) -> None:
    client = server.connect()
    store(client, 1, 4)
    argv = ("--namespace", client.namespace.hex(), "--tokens", prompt, "--chunk-tokens", "16")
    found = as_json(explain, *argv)
    assert found["hit_chunks"] == 4
    assert {chunk["state"] for chunk in found["chunks"]} == {"ready"}
    assert found["chunks"][0]["copies"][0]["tier"] == "cpu"
    status, out, _ = explain(*argv)
    assert (status, "hit: 4 of 4 chunks" in out) == (0, True)
    assert as_json(explain, *argv, "--extra", b"salt".hex())["hit_chunks"] == 0
    shown = kvstore("ls", "--spaces", "--json", "--address", server.address).out
    (space,) = json.loads(shown)["spaces"]
    path = tmp_path / "copied.json"  # what ls prints of a namespace can be asked with
    path.write_text(json.dumps(space["representation"]))
    assert as_json(explain, "--model-representation", path, *argv[2:])["hit_chunks"] == 4


def test_other_identities_are_printed_by_what_differs_those_of_the_same_tokens_first(
    server: LocalServer, explain: Kvstore, prompt: Path, tmp_path: Path
) -> None:
    half = replace(SMALL, layer_groups=(replace(GROUP, dtype=DType.float16),))
    store(server.connect("auto", half), 1, 4)
    kind = tmp_path / "representation.json"
    kind.write_text(json_format.MessageToJson(as_message(pb.Representation, SMALL)))
    argv = ("--model-representation", kind, "--tokens", prompt, "--chunk-tokens", "16")
    status, out, _ = explain(*argv)
    assert status == 0
    assert "hit: 0 of 4 chunks" in out
    assert "layer_groups[0].dtype differs: stored float16, requested bfloat16" in out
    found = as_json(explain, *argv)
    assert [chunk["state"] for chunk in found["chunks"]] == ["other_identity"] * 4
    assert found["near"][0]["differences"] == [
        {"field": "layer_groups[0].dtype", "stored": "float16", "asked": "bfloat16"}
    ]
    assert len(server.node.sessions) == 1, "its own session is closed again"
    far = replace(other_revision(SMALL), adapter_digest="sha256:5f", quantization="int8")
    store(server.connect("auto", far), 1, 4)
    store(server.connect("auto", other_revision(SMALL)), 2, 4)
    found = as_json(explain, *argv)
    assert [(len(near["differences"]), near["same_tokens"]) for near in found["near"]] == [
        (1, True), (3, True), (1, False)
    ]  # fmt: skip


def test_recent_misses_are_printed_with_what_engines_counted(
    server: LocalServer, explain: Kvstore
) -> None:
    status, out, _ = explain("--recent", "5")
    assert (status, out.startswith("no misses")) == (0, True)
    client = server.connect(options=ClientOptions("auto", 16, DEADLINE_MS, name="engine-7"))
    engine = PlainEngine(client)
    engine.load(tokens(3, 64))
    client._link.connected().session.heartbeat()
    found = as_json(explain, "--recent", "5")
    (miss,) = found["recent"]
    assert (miss["client"], miss["chunks"], miss["state"]) == ("engine-7", 4, "unknown")
    (report,) = found["engines"]
    assert report["counts"] == {"lookups": 1, "miss_absent": 1, "miss_tokens": 64}
    status, out, _ = explain("--recent", "5")
    assert status == 0
    for word in ("engine-7", "0 of 4", "miss_absent 1"):
        assert word in out


def test_what_clients_say_of_themselves_is_printed_as_it_is(
    server: LocalServer, explain: Kvstore
) -> None:
    client = server.connect(options=ClientOptions("auto", 16, DEADLINE_MS, name="[/bold]"))
    client.lookup(keys=keys_of(client, 1, 1))
    client.counts = lambda: {"refused: [red]packs otherwise[/]": 1, "[/x]": 1}
    client.send_counts()
    (report,) = as_json(explain, "--recent", "5")["engines"]
    assert report["refused"] == ["[red]packs otherwise[/]"]
    assert report["counts"] == {"[/x]": 1}
    status, out, _ = explain("--recent", "5")
    assert status == 0
    assert "[/bold] runs without the store: [red]packs otherwise[/]\n" in out


def test_a_question_that_cannot_be_asked_exits_with_2(
    kvstore: Kvstore, prompt: Path, tmp_path: Path
) -> None:
    short, empty, words = (tmp_path / name for name in ("short", "empty", "words"))
    short.write_text("1 2 3")
    empty.write_text("{}")
    words.write_text("1 two 3")
    space, key = "00" * 16, "00" * 32
    for argv, said in (
        ([], "give one of --tokens, --keys and --recent"),
        (["--recent", "3", "--keys", "00"], "give one of"),
        (["--tokens", prompt, "--keys", key], "give one of"),
        (["--keys", "zz"], "hexadecimal"),
        (["--keys", "001"], "digits"),
        (["--keys", space], "--namespace"),
        (["--keys", key, "--keys", "11" * 32], "one namespace"),
        (["--keys", key, "--namespace", "11"], "at least 4"),
        (["--tokens", prompt, "--namespace", space, "--chunk-tokens", "3"], "chunk_tokens"),
        (["--tokens", prompt, "--namespace", space, "--extra", "salt"], "extra"),
        (["--tokens", short, "--namespace", space], "at least one chunk"),
        (["--tokens", words, "--namespace", space], "only token ids"),
        (["--tokens", tmp_path / "none", "--namespace", space], "No such file"),
        (["--tokens", prompt, "--model-representation", prompt], "model_representation"),
        (["--tokens", prompt, "--model-representation", empty], "rope"),
    ):
        status, _, err = kvstore("explain", *argv)
        assert (status, err.startswith("kvstore: "), said in err) == (2, True, True), err
    for text in ("[1, 2, 3]", "1 2 3", "1,2,3\n", "1\n2\n3\n"):
        words.write_text(text)
        assert read_tokens(words) == [1, 2, 3]


def test_why_prompts_were_blended_or_not_is_told_by_model_and_tag(
    server: LocalServer, explain: Kvstore
) -> None:
    client = server.connect()
    prompt, ranges = prompt_of(HEAD, DOCUMENT)
    for _ in range(3):
        client.find_segments(prompt, ranges, SegmentQuery(tag="chat")).release()
    for agreement in [0.0] * TRIALS + [1.0] * TRIALS:
        shadow = ShadowResult(0.0, agreement, 64)
        client.report_reuse(ReuseReport("rag", ratio=0.5, shadow=shadow))
    client.find_segments(prompt, ranges, SegmentQuery(tag="rag")).release()
    found = {gate["tag"]: gate for gate in as_json(explain, "--recent", "4")["gates"]}
    assert {gate["model"] for gate in found.values()} == {SMALL.model_id}
    chat, rag = found["chat"], found["rag"]
    assert (chat["open"], chat["let_through"], chat["kept_out"]) == (False, 0, 3)
    assert "not calibrated" in chat["why"]
    assert (rag["open"], rag["let_through"], rag["kept_out"]) == (True, 1, 0)
    assert rag["ratio"] == pytest.approx(0.3 * 1.5)
    _, shown, _ = explain("--recent", "4")
    assert f"{SMALL.model_id}, tag rag: open at ratio 0.45, calibrated; 1 prompts let" in shown
    assert f"{SMALL.model_id}, tag chat: closed at ratio 0.3, not calibrated" in shown


def test_keys_and_namespaces_are_taken_as_logged_and_by_any_digits_that_begin_one_alone(
    server: LocalServer, explain: Kvstore
) -> None:
    client = server.connect()
    (key,) = store(client, 1, 1)
    absent = keys_of(client, 1, 2)[1]
    space, digest = client.namespace.hex(), key[DIGEST_BYTES:].hex()
    for argv in (
        ("--keys", digest[:7]),
        ("--keys", key.hex()[:40]),
        ("--namespace", space[:5], "--keys", digest[:8].upper()),
        ("--namespace", space[:9], "--keys", digest),
    ):
        (chunk,) = as_json(explain, *argv)["chunks"]
        assert (chunk["digest"], chunk["state"]) == (digest, "ready")
    whole = ("--keys", key.hex(), "--keys", absent.hex())
    digests = ("--keys", digest, "--keys", absent[DIGEST_BYTES:].hex())
    for named in (whole, ("--namespace", space, *whole), ("--namespace", space, *digests)):
        found = as_json(explain, *named)
        assert [chunk["state"] for chunk in found["chunks"]] == ["ready", "unknown"]
    store(server.connect(representation=other_revision(SMALL)), 1, 1)
    for argv, word in (
        (("--keys", digest[:7]), "matches several"),
        (("--namespace", "0" * 31, "--keys", digest), "no namespace begins"),
        (("--namespace", space[:8], "--keys", "0" * 31), "no stored chunk begins"),
    ):
        status, _, err = explain(*argv)
        assert (status, word in err) == (2, True), err


def test_what_is_printed_into_a_pipe_has_whole_ids_one_row_a_line_and_no_lines_around(
    server: LocalServer, explain: Kvstore
) -> None:
    client = server.connect(options=ClientOptions("auto", 16, DEADLINE_MS, name="engine-7"))
    keys = store(client, 1, 2)
    other = server.connect(representation=other_revision(SMALL))
    other.lookup(keys=keys_of(other, 1, 2))
    named = [word for key in keys for word in ("--keys", key.hex())]
    shown = [explain(*argv)[1] for argv in (["--recent", "5"], named)]
    assert all(line.isascii() for line in shown)
    assert f"model_revision: stored {SMALL.model_revision}, requested {'f' * 40}" in shown[0]
    assert [key[DIGEST_BYTES:].hex() in shown[1] for key in keys] == [True, True]
    assert len(shown[1].splitlines()) == 2 + len(keys)
