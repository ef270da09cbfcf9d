"""The engine-neutral connector: counting, and the boundary where store errors end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ServerMaker
from helpers.coarse_codec import coarse_codec
from helpers.local_server import LocalServer, eventually
from helpers.lossy_copies import leave_on_disk
from helpers.plain_engine import load_prompt
from helpers.prompts import MEDIUM, SMALL, tokens
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client import Chunk, ClientOptions
from kvstore.client.chunk import LayerTensors
from kvstore.client.engines.base import Connector
from kvstore.client.engines.prefix import ONLY_EXACT, Prefix, Span
from kvstore.client.planning import PrefillModel
from kvstore.codecs.base import ChunkTensors, empty_tensors
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.keys import chain_digests, chunk_spans
from kvstore.proto.types import DIGEST_BYTES, Accuracy, ChainDigest, KVLayout, Model, PutOutcome

CHUNK_TOKENS = 16


def tensors_for(prompt: Sequence[int], span: Span, kind: Model = SMALL) -> ChunkTensors:
    """Tensors in which every element is the id of its token."""
    start, stop = span
    out = empty_tensors(KVLayout.of(kind, stop - start))
    ids = np.asarray(prompt[start:stop])
    for layers in out:
        for parts in layers:
            for part in parts:
                part[...] = ids[None, :, None]
    return out


class Engine:
    """A connector with what an engine brings: a source for a prompt, and a room that is kept."""

    def __init__(self, connector: Connector) -> None:
        self.connector = connector
        self.room: list[ChunkTensors] = []

    def store(self, prompt: Sequence[int], from_token: int = 0) -> int:
        return self.connector.store_chunks(
            prompt, lambda span: tensors_for(prompt, span), from_token
        )

    def load(self, prompt: Sequence[int], extra: Sequence[bytes] = ()) -> Prefix:
        return load_prompt(self.connector, prompt, self.make_room, extra)

    def make_room(self, spans: Sequence[Span]) -> Sequence[LayerTensors]:
        self.room = [empty_tensors(KVLayout.of(SMALL, stop - start)) for start, stop in spans]
        return self.room

    def holds(self, prompt: Sequence[int], prefix: Prefix) -> bool:
        spans = chunk_spans(len(prompt), CHUNK_TOKENS)
        pairs = [
            (part, right)
            for span, room in zip(spans, self.room, strict=False)
            if span[1] <= prefix.stored_tokens
            for layers, others in zip(room, tensors_for(prompt, span), strict=True)
            for parts, rights in zip(layers, others, strict=True)
            for part, right in zip(parts, rights, strict=True)
        ]
        return bool(pairs) and all(np.array_equal(part, right) for part, right in pairs)


Connect = Callable[[], Engine]


@pytest.fixture
def connect(server: LocalServer) -> Connect:
    """Make engines with a client each."""
    return lambda: Engine(Connector(server.connect()))


def test_what_one_connector_stores_another_loads(connect: Connect) -> None:
    prompt = tokens(1, 5 * CHUNK_TOKENS)
    assert connect().store(prompt) == 5
    other = connect()
    prefix = other.load(prompt)
    assert prefix == Prefix(80, 79, {"cpu": 79})
    assert other.holds(prompt, prefix)


def test_a_prefix_says_how_far_it_is_exact(make_server: Callable[..., LocalServer]) -> None:
    with coarse_codec():
        server = make_server("--codec", "disk=coarse")
        prompt = tokens(1, 5 * CHUNK_TOKENS)
        Engine(Connector(server.connect())).store(prompt)
        strict, loose = (
            Engine(Connector(server.connect(), accuracy=accuracy))
            for accuracy in ("exact", "bounded")
        )
        leave_on_disk(server, loose.connector.client.keys(prompt)[2:4])
        assert strict.load(prompt).exact_tokens == strict.load(prompt).stored_tokens == 32
        prefix = loose.load(prompt)
        assert (prefix.stored_tokens, prefix.exact_tokens) == (80, 32)
        assert loose.connector.stats().lossy_hit_tokens == 79 - 32
        assert loose.connector.counts()["lossy_hit_tokens"] == 79 - 32
        assert load_prompt(loose.connector, prompt, loose.make_room, (), ONLY_EXACT) == (
            Prefix(32, 32, {"cpu": 32})
        )


def test_only_what_has_an_exact_copy_counts_as_stored(
    make_server: Callable[..., LocalServer],
) -> None:
    with coarse_codec():
        server = make_server("--codec", "disk=coarse")
        prompt = tokens(1, 5 * CHUNK_TOKENS)
        connector = Connector(server.connect(), accuracy="bounded")
        Engine(connector).store(prompt[: 4 * CHUNK_TOKENS])
        keys = connector.client.keys(prompt)
        leave_on_disk(server, keys[1:3])
        digests = [ChainDigest(key[DIGEST_BYTES:]) for key in keys]
        assert connector.stored(digests[::-1]) == {digests[0], digests[3]}


@pytest.mark.parametrize("accuracy", ["lossy", "Exact", "", None, 1, ["exact"], Accuracy.bounded])
def test_an_accuracy_that_is_none_is_refused_by_name(server: LocalServer, accuracy: Any) -> None:
    with pytest.raises(InvalidRequestError, match="accuracy"):
        Connector(server.connect(), accuracy=accuracy)


def test_a_prompt_of_no_tokens_is_a_miss_of_none(connect: Connect) -> None:
    engine = connect()
    assert engine.load([]) == Prefix()
    assert engine.store([]) == 0
    stats = engine.connector.stats()
    assert (stats.lookups, stats.miss_tokens, stats.load_errors) == (1, 0, {})


def test_only_chunks_that_end_behind_from_token_are_sent(connect: Connect) -> None:
    prompt = tokens(2, 4 * CHUNK_TOKENS)
    engine = connect()
    asked: list[Span] = []

    def source(span: Span) -> LayerTensors:
        asked.append(span)
        return tensors_for(prompt, span)

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


def test_what_else_names_a_prompt_separates_it(connect: Connect) -> None:
    engine = connect()
    prompt = tokens(4, 2 * CHUNK_TOKENS)
    engine.connector.store_chunks(prompt, lambda span: tensors_for(prompt, span), 0, [b"salt"])
    assert engine.load(prompt) == Prefix()
    assert engine.load(prompt, [b"salt"]).stored_tokens == 32


def test_chunks_carry_their_place_and_cost(server: LocalServer) -> None:
    connector = Connector(server.connect(), token_flops=5.0)
    prompt = tokens(5, 2 * CHUNK_TOKENS)
    connector.store_chunks(prompt, lambda span: tensors_for(prompt, span))
    store = server.node.store
    keys = connector.client.keys(prompt)
    copies = [store.catalog.copies(key)["cpu"] for key in keys]
    assert [info.prefill_flops for info in copies] == [80.0, 80.0]
    assert copies[1].parent_key == keys[0]


def test_durable_stores_survive_a_restart(
    make_server: Callable[..., LocalServer], tmp_path: Path
) -> None:
    prompt = tokens(6, 3 * CHUNK_TOKENS)
    first = make_server()
    assert Engine(Connector(first.connect(), durable=True)).store(prompt) == 3
    first.close()
    prefix = Engine(Connector(make_server().connect())).load(prompt)
    assert prefix.tier_tokens == {"disk": 47}


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
    stats = engine.connector.stats()
    assert stats.load_errors == {"BrokenError": 1, "InvalidRequestError": 2}
    assert (stats.lookups, stats.hit_tokens, stats.miss_tokens) == (3, 0, 80)


def test_room_of_another_shape_is_a_counted_miss(connect: Connect) -> None:
    engine = connect()
    prompt = tokens(8, 2 * CHUNK_TOKENS)
    engine.store(prompt)
    wrong = [empty_tensors(KVLayout.of(MEDIUM, CHUNK_TOKENS)) for _ in range(2)]
    assert load_prompt(engine.connector, prompt, lambda _: wrong) == Prefix()
    assert engine.connector.stats().load_errors == {"LayoutMismatchError": 1}


def test_whatever_fails_in_a_store_is_counted_and_stores_nothing(connect: Connect) -> None:
    engine = connect()
    prompt = tokens(9, 2 * CHUNK_TOKENS)

    def broken(span: Span) -> LayerTensors:
        if span[0]:
            raise BrokenError
        return tensors_for(prompt, span)

    wrong_kind = tensors_for(prompt, (0, 16), MEDIUM)
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


def test_chunks_that_go_between_lookup_and_get_are_lost_not_hit(connect: Connect) -> None:
    engine = connect()
    client = engine.connector.client
    prompt = tokens(11, 4 * CHUNK_TOKENS)
    engine.store(prompt)

    def forgetting(spans: Sequence[Span]) -> Sequence[LayerTensors]:
        client.delete(keys=client.keys(prompt)[1:])
        return engine.make_room(spans)

    prefix = load_prompt(engine.connector, prompt, forgetting)
    assert prefix == Prefix(16, 16, {"cpu": 16})
    assert engine.holds(prompt, prefix)
    stats = engine.connector.stats()
    assert (stats.lost_chunks, stats.miss_tokens, stats.load_errors) == (3, 48, {})


def test_chunks_the_server_has_no_room_for_are_refused_not_errors(
    make_server: Callable[..., LocalServer],
) -> None:
    server = make_server("--cpu", "4MiB", "--tiers", "cpu")
    options = ClientOptions(chunk_tokens=64, deadline_ms=1000)
    connector = Connector(server.connect(representation=MEDIUM, options=options))
    held, other = tokens(12, 10 * 64), tokens(13, 20 * 64)
    stored = connector.store_chunks(held, lambda span: tensors_for(held, span, MEDIUM))
    with connector.client.lease(keys=connector.client.keys(held)) as lease:
        assert lease.match.ready == stored
        connector.store_chunks(other, lambda span: tensors_for(other, span, MEDIUM))
    stats = connector.stats()
    assert stats.refused_chunks > 0
    assert stats.store_errors == {}


def test_a_row_of_failures_is_logged_once_until_the_store_works_again(
    server: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(Connector(server.connect()))

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
    one, other = connect().connector, connect().connector
    chunks = one._chunks(prompt, lambda span: tensors_for(prompt, span), 0, ())
    assert one.write_each(lambda: list(chunks)) == 3 * [PutOutcome.stored]
    out = [empty_tensors(KVLayout.of(SMALL, CHUNK_TOKENS)) for _ in range(4)]
    digests = chain_digests(tokens(18, 3 * CHUNK_TOKENS) + [7] * CHUNK_TOKENS, CHUNK_TOKENS)
    assert other.read(digests, out) == 3
    assert np.array_equal(out[2][0][0][0], tensors_for(prompt, (32, 48))[0][0][0])
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


def test_stats_are_of_one_moment_and_cannot_be_changed(connect: Connect) -> None:
    engine = connect()
    before = engine.connector.stats()
    engine.load(tokens(16, 32))
    assert (before.lookups, engine.connector.stats().lookups) == (0, 1)
    with pytest.raises(FrozenInstanceError):
        before.lookups = 7  # type: ignore[misc]


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
    engine = Engine(Connector(server.connect(), prefill=PrefillModel(1e-6, token_s)))
    assert engine.load(prompt).stored_tokens == loaded * CHUNK_TOKENS
    stats = engine.connector.stats()
    assert (stats.slow_chunks, stats.lost_chunks) == (3 - loaded, 0)


def test_a_connector_is_not_given_lossy_copies(make_server: ServerMaker) -> None:
    with coarse_codec():
        server = make_server("--codec", "disk=coarse")
        engine = Engine(Connector(server.connect()))
        prompt = tokens(7, 3 * CHUNK_TOKENS)
        engine.store(prompt)
        store = server.node.store
        assert eventually(lambda: store.catalog.eviction.count_on("disk") == 3)
        server.settled()
        for key in engine.connector.client.keys(prompt):
            assert store.catalog.cast_out("cpu", key)
            store.moves.eviction.delete_from(store.tiers.cpu, key)
        assert engine.load(prompt) == Prefix()
        assert engine.store(prompt) == 3, "originals take the place of lossy copies"
        assert engine.load(prompt).stored_tokens == 48
        server.close()
