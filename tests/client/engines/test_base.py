"""The engine-neutral connector: counting, and the boundary where store errors end."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.coarse_codec import coarse_codec
from helpers.kvstore_command import kvstore_command
from helpers.local_server import DEADLINE_MS, LocalServer
from helpers.lossy_copies import leave_on_disk
from helpers.plain_engine import PlainEngine, load_prompt
from helpers.prompts import MEDIUM, SMALL, tokens
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client import Chunk, ClientOptions
from kvstore.client.chunk import LayerTensors
from kvstore.client.engines.prefix import ONLY_EXACT, Prefix, Span, least_of
from kvstore.client.planning import PrefillModel
from kvstore.codecs.base import empty_tensors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.keys import chain_digests, chunk_spans
from kvstore.proto.types import (
    DIGEST_BYTES,
    Accuracy,
    ChainDigest,
    DType,
    KVLayout,
    Model,
    PutOutcome,
    RopeParameters,
)

CHUNK_TOKENS = 16


Connect = Callable[..., PlainEngine]


@pytest.fixture
def connect(server: LocalServer) -> Connect:
    """Make engines with a client each."""
    return lambda **terms: PlainEngine(server.connect(), **terms)


def test_what_one_connector_stores_another_loads(connect: Connect) -> None:
    prompt = tokens(1, 5 * CHUNK_TOKENS)
    assert connect().store(prompt) == 5
    assert connect().load(prompt) == Prefix(80, 79, {"cpu": 79})


def test_a_prefix_says_how_far_it_is_exact(make_server: Callable[..., LocalServer]) -> None:
    with coarse_codec():
        server = make_server("--codec", "disk=coarse")
        prompt = tokens(1, 5 * CHUNK_TOKENS)
        PlainEngine(server.connect()).store(prompt)
        strict, loose = (
            PlainEngine(server.connect(), accuracy=accuracy) for accuracy in ("exact", "bounded")
        )
        leave_on_disk(server, loose.client.keys(prompt)[2:4])
        assert strict.load(prompt).exact_tokens == strict.load(prompt).stored_tokens == 32
        prefix = load_prompt(loose.connector, prompt, loose.make_room)
        assert (prefix.stored_tokens, prefix.exact_tokens) == (80, 32)
        assert loose.connector.stats().lossy_hit_tokens == 79 - 32
        assert loose.connector.counts()["lossy_hit_tokens"] == 79 - 32
        assert load_prompt(loose.connector, prompt, loose.make_room, (), ONLY_EXACT) == (
            Prefix(32, 32, {"cpu": 32})
        )
        absent = ChainDigest(bytes(DIGEST_BYTES))
        digests = [ChainDigest(key[DIGEST_BYTES:]) for key in loose.client.keys(prompt)]
        exact = {digests[0], digests[1], digests[4]}
        assert loose.connector.stored([*digests[::-1], absent]) == exact, "that alone is stored"


@pytest.mark.parametrize("accuracy", ["Exact", None, ["exact"], Accuracy.bounded])
def test_an_accuracy_that_is_none_is_refused_by_name(accuracy: Any) -> None:
    with pytest.raises(InvalidRequestError, match="accuracy"):
        least_of(accuracy)


def test_a_prompt_of_no_tokens_is_a_miss_of_none(connect: Connect) -> None:
    engine = connect()
    assert engine.load([]) == Prefix()
    assert engine.store([]) == 0
    stats = engine.connector.stats()
    assert (stats.lookups, stats.miss_tokens, stats.load_errors) == (1, 0, {})


def test_only_chunks_that_end_behind_from_token_are_sent(connect: Connect) -> None:
    prompt = tokens(2, 4 * CHUNK_TOKENS)
    engine = connect()
    asked, own = list[Span](), engine.source(prompt)

    def source(span: Span) -> LayerTensors:
        asked.append(span)
        return own(span)

    assert engine.connector.store_chunks(prompt[:32], source) == 2
    assert engine.connector.store_chunks(prompt, source, from_token=32) == 2
    assert asked == [(0, 16), (16, 32), (32, 48), (48, 64)]
    assert connect().load(prompt).stored_tokens == 64


def test_storing_again_finds_the_chunks_there(connect: Connect) -> None:
    engine = connect()
    prompt = tokens(3, 3 * CHUNK_TOKENS)
    assert [engine.store(prompt), engine.store(prompt)] == [3, 0]
    stats = engine.connector.stats()
    assert (stats.stored_chunks, stats.existing_chunks, stats.refused_chunks) == (3, 3, 0)


def test_chunks_carry_their_place_and_cost(connect: Connect, server: LocalServer) -> None:
    engine, prompt = connect(token_flops=5.0), tokens(5, 2 * CHUNK_TOKENS)
    engine.store(prompt)
    keys = engine.client.keys(prompt)
    copies = [server.node.store.catalog.copies(key)["cpu"] for key in keys]
    assert [info.prefill_flops for info in copies] == [80.0, 80.0]
    assert copies[1].parent_key == keys[0]


# --- the boundary


class BrokenError(Exception):
    """What an engine's own code may raise."""


def test_whatever_fails_in_a_load_is_a_counted_miss(connect: Connect) -> None:
    engine = connect()
    prompt = tokens(7, 2 * CHUNK_TOKENS)
    engine.store(prompt)

    def no_room(spans: Sequence[Span]) -> Sequence[LayerTensors]:
        raise BrokenError

    assert load_prompt(engine.connector, prompt, no_room) == Prefix()
    assert load_prompt(engine.connector, prompt, lambda _: []) == Prefix()
    assert load_prompt(engine.connector, [-1] * 16, engine.make_room) == Prefix()
    wrong = [empty_tensors(KVLayout.of(MEDIUM, CHUNK_TOKENS)) for _ in range(2)]
    assert load_prompt(engine.connector, prompt, lambda _: wrong) == Prefix()
    stats = engine.connector.stats()
    assert stats.load_errors == {
        "BrokenError": 1, "InvalidRequestError": 2, "LayoutMismatchError": 1,
    }  # fmt: skip
    assert (stats.lookups, stats.hit_tokens, stats.miss_tokens) == (4, 0, 112)


def test_whatever_fails_in_a_store_is_counted_and_stores_nothing(connect: Connect) -> None:
    engine = connect()
    prompt = tokens(9, 2 * CHUNK_TOKENS)

    def broken(span: Span) -> LayerTensors:
        if span[0]:
            raise BrokenError
        return engine.source(prompt)(span)

    wrong_kind = empty_tensors(KVLayout.of(MEDIUM, CHUNK_TOKENS))
    assert engine.connector.store_chunks(prompt, broken) == 0
    assert engine.connector.store_chunks(prompt, lambda _: wrong_kind) == 0
    stats = engine.connector.stats()
    assert stats.store_errors == {"BrokenError": 1, "LayoutMismatchError": 1}
    assert stats.stored_chunks == 0
    assert engine.load(prompt) == Prefix()


def test_an_interrupt_is_not_an_error_of_the_store(connect: Connect) -> None:
    def interrupted(span: Span) -> LayerTensors:
        raise KeyboardInterrupt

    engine = connect()
    with pytest.raises(KeyboardInterrupt):
        engine.connector.store_chunks(tokens(10, 16), interrupted)


def test_chunks_the_server_has_no_room_for_are_refused_not_errors(
    make_server: Callable[..., LocalServer],
) -> None:
    server = make_server("--cpu", "4MiB", "--tiers", "cpu")
    options = ClientOptions(chunk_tokens=64, deadline_ms=1000)
    engine = PlainEngine(server.connect(representation=MEDIUM, options=options))
    held, other = tokens(12, 10 * 64), tokens(13, 20 * 64)
    stored = engine.store(held)
    with engine.client.lease(keys=engine.client.keys(held)) as lease:
        assert lease.match.ready == stored
        engine.store(other)
    stats = engine.connector.stats()
    assert stats.refused_chunks > 0
    assert stats.store_errors == {}


def test_a_row_of_failures_is_logged_once_until_the_store_works_again(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    engine = connect()

    def broken(span: Span) -> LayerTensors:
        raise BrokenError("no tensors")

    with caplog.at_level(logging.WARNING, "kvstore.client.engines.base"):
        for _ in range(3):
            engine.connector.store_chunks(tokens(14, 16), broken)
        assert [record.message for record in caplog.records] == [
            "going on without the store: BrokenError: no tensors"
        ]
        engine.store(tokens(14, 16))
        engine.connector.store_chunks(tokens(15, 16), broken)
    assert len(caplog.records) == 2


# --- for engines that keep names themselves


def test_what_is_written_under_names_is_read_under_them(connect: Connect) -> None:
    prompt = tokens(18, 3 * CHUNK_TOKENS)
    engine = connect()
    one, other, source = engine.connector, connect().connector, engine.source(prompt)
    chunks = one._chunks(prompt, source, 0, ())
    assert one.write_each(lambda: list(chunks)) == 3 * [PutOutcome.stored]
    out = [empty_tensors(KVLayout.of(SMALL, CHUNK_TOKENS)) for _ in range(4)]
    digests = chain_digests(tokens(18, 3 * CHUNK_TOKENS) + [7] * CHUNK_TOKENS, CHUNK_TOKENS)
    assert other.read(digests, out) == 3
    right: Any = source((32, 48))
    assert np.array_equal(out[2][0][0][0], right[0][0][0])
    assert (one.stats().stored_chunks, other.stats().lost_chunks) == (3, 1)


def test_asking_reading_and_writing_never_raise(connect: Connect) -> None:
    def broken() -> list[Chunk]:
        raise BrokenError

    connector = connect().connector
    assert connector.ask(broken, None) is None
    assert connector.write_each(broken) == []
    assert connector.read([ChainDigest(bytes(16))], []) == 0
    stats = connector.stats()
    assert stats.load_errors == {"BrokenError": 1, "InvalidRequestError": 1}
    assert stats.store_errors == {"BrokenError": 1}


# --- counting


def test_threads_lose_no_count(connect: Connect) -> None:
    engine = connect()
    prompt = tokens(17, 2 * CHUNK_TOKENS)
    engine.store(prompt)

    def work(_: int) -> None:
        out = [empty_tensors(KVLayout.of(SMALL, CHUNK_TOKENS)) for _ in range(2)]
        load_prompt(engine.connector, prompt, lambda _: out)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(40)))
    stats = engine.connector.stats()
    assert (stats.lookups, stats.hit_tokens, stats.miss_tokens) == (40, 40 * 31, 40)
    assert stats.hit_tokens_by_tier == {"cpu": 40 * 31}


@given(
    prompt_tokens=st.integers(1, 500),
    tiers=st.lists(st.sampled_from(["cpu", "disk", "redis"]), max_size=40),
)
def test_a_prefix_never_covers_the_last_token_and_its_tiers_add_up(
    prompt_tokens: int, tiers: list[str]
) -> None:
    spans = chunk_spans(prompt_tokens, CHUNK_TOKENS)[: len(tiers)]
    prefix = Prefix.of(spans, tiers[: len(spans)], prompt_tokens)
    assert prefix.stored_tokens == (spans[-1][1] if spans else 0)
    assert prefix.hit_tokens == min(prefix.stored_tokens, prompt_tokens - 1)
    assert sum(prefix.tier_tokens.values()) == prefix.hit_tokens
    assert set(prefix.tier_tokens) <= set(tiers)


@pytest.mark.parametrize(("token_s", "loaded"), [(0.0, 0), (10.0, 3)])
def test_what_is_sooner_computed_than_loaded_is_not_loaded(
    connect: Connect, server: LocalServer, token_s: float, loaded: int
) -> None:
    prompt = tokens(6, 3 * CHUNK_TOKENS)
    connect().store(prompt)
    for slot in server.node.store.tiers.slots.values():
        slot.round_trip_s = 1e-3
    engine = connect(prefill=PrefillModel(1e-6, token_s))
    assert engine.load(prompt).stored_tokens == loaded * CHUNK_TOKENS
    stats = engine.connector.stats()
    assert (stats.slow_chunks, stats.lost_chunks) == (3 - loaded, 0)


# --- engines and servers that do not fit


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


def test_each_way_of_missing_has_a_count_that_a_heartbeat_tells(server: LocalServer) -> None:
    engine = PlainEngine(server.connect())
    client, catalog, prompts = engine.client, server.node.store.catalog, iter(range(2, 9))

    def prompt() -> list[int]:
        return tokens(next(prompts), 64)

    engine.load(PROMPT[:10])  # short
    engine.load(prompt())  # absent
    engine.load([-1] * 64)  # error
    keys = client.keys(pending := prompt())
    assert [catalog.in_flight.begin(key) for key in keys] == [True] * 4
    engine.load(pending)
    for key in keys:
        catalog.in_flight.end(key)
    engine.store(kept := prompt())
    assert engine.load(kept).stored_tokens == 64
    engine.store(lost := prompt())
    lookup = client.lookup

    def lookup_and_lose(**terms: Any) -> Any:
        match = lookup(**terms)
        assert client.delete(keys=terms["keys"][2:]) == 2
        return match

    client.lookup = lookup_and_lose  # type: ignore[method-assign, assignment]
    assert engine.load(lost).stored_tokens == 32
    client.lookup = lookup  # type: ignore[method-assign]
    stats = engine.connector.stats()
    assert (stats.lost_chunks, stats.load_errors) == (2, {"InvalidRequestError": 1})
    expected = {"short": 1, "absent": 1, "error": 1, "pending": 1, "lost": 1}
    assert engine.connector.stats().misses == expected
    client._link.connected().session.heartbeat()
    request = pb.ExplainRequest(recent=10)
    reply = server.dial().call("Explain", request, DEADLINE_MS, pb.ExplainResponse)
    told = {name: count for one in reply.engines for name, count in one.counts.items()}
    misses = {name[5:]: count for name, count in told.items() if name.startswith("miss_")}
    assert misses == expected | {"tokens": misses["tokens"]}
