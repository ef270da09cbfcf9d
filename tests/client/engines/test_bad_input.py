"""Engines and servers that do not fit: right tokens, and a miss with a reason that prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from conftest import ServerMaker
from helpers.kvstore_command import kvstore_command
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.plain_engine import PlainEngine
from helpers.prompts import SMALL, tokens

from kvstore.client import ClientOptions
from kvstore.client.planning import PrefillModel
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.types import DType, Model, RopeParameters

PROMPT = tokens(1, 64)
(GROUP,) = SMALL.layer_groups


def with_group(**changes: object) -> Model:
    return replace(SMALL, layer_groups=(replace(GROUP, **changes),))  # type: ignore[arg-type]


OTHERS = {
    "layer_groups[0].dtype differs: bfloat16 stored, float16 asked": with_group(
        dtype=DType.float16
    ),
    "layer_groups[0].kv_heads differs: 2 stored, 1 asked": with_group(kv_heads=1),
    "layer_groups[0].layer_ids differs: 0 to 1 stored, 0 to 2 asked": with_group(
        layer_ids=(0, 1, 2)
    ),
    "layout_version differs: 1 stored, 2 asked": replace(SMALL, layout_version=2),
    "rope.theta differs: 10000.0 stored, 500000.0 asked": replace(
        SMALL, rope=RopeParameters(500_000.0, 8)
    ),
    "rope.scaling differs: default stored, yarn asked": replace(
        SMALL, rope=RopeParameters(10_000.0, 8, "yarn", (("factor", 4.0),))
    ),
    "adapter_digest differs: none stored, sha256:5f asked": replace(
        SMALL, adapter_digest="sha256:5f"
    ),
    "model_revision differs: 0000": replace(SMALL, model_revision="f" * 40),
    "quantization differs: none stored, fp8-e4m3 asked": replace(SMALL, quantization="fp8-e4m3"),
}


def printed(
    server: LocalServer, engine: PlainEngine, capsys: pytest.CaptureFixture[str]
) -> tuple[str, list[str]]:
    """Return what ``kvstore explain`` prints of the engine's chunks, and the states it says."""
    keys = [word for key in engine.client.keys(PROMPT) for word in ("--keys", key.hex())]
    words, kvstore = ("explain", "--address", server.address, *keys), kvstore_command(capsys)
    chunks = json.loads(kvstore(*words, "--json").out)["chunks"]
    return kvstore(*words).out, [one["state"] for one in chunks]


def test_an_engine_of_another_identity_misses_and_the_field_is_printed(
    server: LocalServer, capsys: pytest.CaptureFixture[str]
) -> None:
    PlainEngine(server.connect()).store(PROMPT)
    for line, kind in OTHERS.items():
        engine = PlainEngine(server.connect("auto", kind))
        assert engine.load(PROMPT).stored_tokens == 0, line
        assert engine.connector.stats().misses == {"absent": 1}, line
        out, states = printed(server, engine, capsys)
        assert states == ["other_identity"] * 4, line
        assert line in out
        engine.client.close()


def test_an_engine_with_chunks_of_another_length_misses_and_disturbs_nobody(
    server: LocalServer, capsys: pytest.CaptureFixture[str]
) -> None:
    one = PlainEngine(server.connect())
    other = PlainEngine(server.connect(options=ClientOptions("auto", 32, DEADLINE_MS)))
    one.store(PROMPT)
    assert other.load(PROMPT).stored_tokens == 0
    _, states = printed(server, other, capsys)
    assert states == ["unknown"] * 2
    assert other.store(PROMPT) == 2
    assert one.load(PROMPT).stored_tokens == other.load(PROMPT).stored_tokens == 64


def short(engine: PlainEngine, server: LocalServer) -> None:
    engine.load(PROMPT[:10])


def pending(engine: PlainEngine, server: LocalServer) -> None:
    keys = engine.client.keys(PROMPT)
    begun = [server.node.store.catalog.in_flight.begin(key) for key in keys]
    engine.load(PROMPT)
    for key in keys:
        server.node.store.catalog.in_flight.end(key)
    assert all(begun)


def absent(engine: PlainEngine, server: LocalServer) -> None:
    engine.load(PROMPT)


def slow(engine: PlainEngine, server: LocalServer) -> None:
    engine.store(PROMPT)
    for slot in server.node.store.tiers.slots.values():
        slot.round_trip_s = 1e-3
    fast = PlainEngine(engine.client, PrefillModel(0.0, 1e-9))
    engine.connector = fast.connector
    engine.load(PROMPT)


def error(engine: PlainEngine, server: LocalServer) -> None:
    engine.load([-1] * 64)


def lost(engine: PlainEngine, server: LocalServer) -> None:
    engine.store(PROMPT)
    lookup = engine.client.lookup

    def lookup_and_lose(*, keys: list[object], **terms: Any) -> object:
        match = lookup(keys=keys, **terms)  # type: ignore[arg-type]
        assert engine.client.delete(keys=keys[2:]) == 2  # type: ignore[arg-type]
        return match

    engine.client.lookup = lookup_and_lose  # type: ignore[method-assign, assignment]
    assert engine.load(PROMPT).stored_tokens == 32


def nothing(engine: PlainEngine, server: LocalServer) -> None:
    engine.store(PROMPT)
    engine.load(PROMPT)


WAYS: list[Callable[[PlainEngine, LocalServer], None]] = [
    short, pending, absent, slow, error, lost, nothing
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: getattr(way, "__name__", ""))
def test_each_way_of_missing_has_a_count_that_a_heartbeat_tells(
    server: LocalServer, way: Callable[[PlainEngine, LocalServer], None]
) -> None:
    engine = PlainEngine(server.connect())
    way(engine, server)
    expected = {} if way is nothing else {way.__name__: 1}
    assert engine.connector.stats().misses == expected
    engine.client._link.connected().session.heartbeat()
    request = pb.ExplainRequest(recent=10)
    reply = server.dial().call("Explain", request, DEADLINE_MS, pb.ExplainResponse)
    told = {name: count for one in reply.engines for name, count in one.counts.items()}
    assert {name[5:]: n for name, n in told.items() if name in WORDS} == expected


WORDS = {f"miss_{way.__name__}" for way in WAYS}


def test_a_restart_of_the_server_is_a_miss_and_then_none(
    make_server: ServerMaker, server: LocalServer
) -> None:
    options = ClientOptions("auto", 16, DEADLINE_MS, retry_after_ms=20)
    engine = PlainEngine(server.connect(options=options))
    engine.store(PROMPT)
    boot_id, port = engine.client.boot_id, server.node.port
    server.stop()
    assert engine.load(PROMPT).stored_tokens == 0
    assert engine.connector.stats().misses == {"error": 1}
    make_server("--listen", f"127.0.0.1:{port}")
    assert eventually(lambda: engine.load(PROMPT).stored_tokens == 64)
    assert engine.client.boot_id != boot_id
