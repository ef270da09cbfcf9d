"""The engine-neutral connector: counting, and the boundary where store errors end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from helpers.local_server import DEADLINE_MS, LocalServer
from helpers.plain_engine import PlainEngine, load_prompt
from helpers.prompts import MEDIUM, tokens
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client import Chunk, ClientOptions
from kvstore.client.chunk import LayerTensors
from kvstore.client.engines.prefix import Prefix, Span
from kvstore.codecs.base import empty_tensors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.keys import chunk_spans
from kvstore.proto.types import ChainDigest, KVLayout

CHUNK_TOKENS = 16
Connect = Callable[[], PlainEngine]


@pytest.fixture
def connect(server: LocalServer) -> Connect:
    """Make engines with a client each."""
    return lambda: PlainEngine(server.connect())


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
    assert load_prompt(engine.connector, [-1] * 16, engine.allocate) == Prefix()
    wrong = [empty_tensors(KVLayout.of(MEDIUM, CHUNK_TOKENS)) for _ in range(2)]
    assert load_prompt(engine.connector, prompt, lambda _: wrong) == Prefix()
    stats = engine.connector.stats()
    assert stats.load_errors == {
        "BrokenError": 1, "InvalidRequestError": 2, "LayoutMismatchError": 1,
    }  # fmt: skip
    assert (stats.lookups, stats.hit_tokens, stats.miss_tokens) == (4, 0, 112)


def interrupted(span: Span) -> LayerTensors:
    raise KeyboardInterrupt


def test_whatever_fails_in_a_store_is_counted_and_stores_nothing_but_an_interrupt_goes_on(
    connect: Connect,
) -> None:
    engine = connect()
    prompt = tokens(9, 2 * CHUNK_TOKENS)

    def broken(span: Span) -> LayerTensors:
        if span[0]:
            raise BrokenError
        return engine.source(prompt)(span)

    wrong_kind = empty_tensors(KVLayout.of(MEDIUM, CHUNK_TOKENS))
    assert engine.connector.store_chunks(prompt, broken) == 0
    assert engine.connector.store_chunks(prompt, lambda _: wrong_kind) == 0
    with pytest.raises(KeyboardInterrupt):
        engine.connector.store_chunks(prompt, interrupted)
    stats = engine.connector.stats()
    assert stats.store_errors == {"BrokenError": 1, "LayoutMismatchError": 1}
    assert stats.stored_chunks == 0
    assert engine.load(prompt) == Prefix()


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
            "continuing without the store: BrokenError: no tensors"
        ]
        engine.store(tokens(14, 16))
        engine.connector.store_chunks(tokens(15, 16), broken)
    assert len(caplog.records) == 2


# --- for engines that keep names themselves


def test_asking_reading_and_writing_never_raise(connect: Connect) -> None:
    def broken() -> list[Chunk]:
        raise BrokenError

    connector = connect().connector
    assert connector.guard(broken, None) is None
    assert connector.write_each(broken) == []
    assert connector.read([ChainDigest(bytes(16))], []) == 0
    stats = connector.stats()
    assert stats.load_errors == {"BrokenError": 1, "InvalidRequestError": 1}
    assert stats.store_errors == {"BrokenError": 1}


# --- counting


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


def test_each_way_of_missing_has_a_count_that_a_heartbeat_tells(server: LocalServer) -> None:
    engine = PlainEngine(server.connect())
    client, catalog, prompts = engine.client, server.node.store.catalog, iter(range(2, 9))

    def prompt() -> list[int]:
        return tokens(next(prompts), 64)

    engine.load(tokens(1, 10))  # short
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
    assert stats.misses == expected
    client._link.connected().session.heartbeat()
    request = pb.ExplainRequest(recent=10)
    reply = server.dial().call("Explain", request, DEADLINE_MS, pb.ExplainResponse)
    told = {name: count for one in reply.engines for name, count in one.counts.items()}
    misses = {name[5:]: count for name, count in told.items() if name.startswith("miss_")}
    assert misses == expected | {"tokens": misses["tokens"]}
