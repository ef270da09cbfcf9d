"""Shards: which layers and heads a rank has, in the model's own numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.local_server import LocalServer
from helpers.prompts import equal, tokens
from helpers.shards import TWO_GROUPS, WIDE
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client import Client, ClientOptions, PagedCache, Shard
from kvstore.proto.errors import InvalidRequestError, LayoutMismatchError
from kvstore.proto.types import ChunkShard, Extent, KVLayout, Model, PutOutcome

LAYOUT = KVLayout.of(TWO_GROUPS, 16)


def test_layers_are_the_models_and_a_single_span_of_heads_is_not_of_latents() -> None:
    # Layers 0, 2, 5 are attention, 1, 3, 4 are latent.
    assert Shard((1, 5), ((1, 3),)).in_chunk(TWO_GROUPS, LAYOUT) == ChunkShard(
        LAYOUT, (Extent(1, 2, 1, 3), Extent(0, 3, 0, 1))
    )
    assert Shard((2, 3)).in_chunk(TWO_GROUPS, LAYOUT).extents == (Extent(1, 2, 0, 4), None)
    assert Shard().in_chunk(TWO_GROUPS, LAYOUT).is_whole


def test_spans_may_be_lists() -> None:
    listed: Any = [1, 5], [[1, 3]]
    assert Shard(*listed) == Shard((1, 5), ((1, 3),))
    assert Shard(*listed).in_chunk(TWO_GROUPS, LAYOUT).extents[1] == Extent(0, 3, 0, 1)


def test_ranks_share_heads_evenly_or_have_the_same() -> None:
    for ranks, spans in (
        (1, [(0, 4)]),
        (3, [(0, 1), (1, 2), (2, 4)]),
        (8, [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3), (3, 4), (3, 4)]),
    ):
        found = [Shard.of_rank(TWO_GROUPS, rank, ranks).kv_heads for rank in range(ranks)]
        assert [heads for heads, _ in found] == spans
        assert {latent for _, latent in found} == {(0, 1)}


@given(ranks=st.integers(1, 40), cut=st.integers(1, 2))
def test_the_ranks_of_any_engine_cover_the_model(ranks: int, cut: int) -> None:
    layout = KVLayout.of(WIDE, 16)
    covered = set()
    for layers in ((0, cut), (cut, 3)):
        for rank in range(ranks):
            (one,) = Shard.of_rank(WIDE, rank, ranks, layers).in_chunk(WIDE, layout).extents
            assert one is not None
            covered |= {
                (layer, head)
                for layer in range(one.first_layer, one.layer_stop)
                for head in range(one.first_head, one.head_stop)
            }
    assert len(covered) == 3 * 4


def test_spans_that_are_none_are_refused() -> None:
    for layers in ((2, 2), (-1, 2)):
        with pytest.raises(InvalidRequestError, match="layers"):
            Shard(layers)
    with pytest.raises(InvalidRequestError, match="kv_heads"):
        Shard(kv_heads=((3, 1),))
    for rank in (2, -1):
        with pytest.raises(InvalidRequestError, match="rank"):
            Shard.of_rank(WIDE, rank, 2)
    for shard in (Shard((6, 9)), Shard(kv_heads=((0, 5),)), Shard(kv_heads=((0, 1),) * 3)):
        with pytest.raises(LayoutMismatchError):
            shard.in_chunk(TWO_GROUPS, LAYOUT)


def test_a_rank_puts_and_gets_its_part_of_a_prompt_by_tokens(server: LocalServer) -> None:
    model = Model.uniform("wide", "8f2c1d4", layers=3, kv_heads=4, head_dim=8, dtype="float16")
    prompt = tokens(1, 40)
    kv = np.random.default_rng(1).random((3, 2, 4, 40, 8)).astype(np.float16)
    axes = "block kv token head dim"

    def connect(shard: Shard) -> Client:
        return server.connect("auto", model, ClientOptions(chunk_tokens=16, shard=shard))

    stages = [Shard.of_rank(model, rank, 2, stage) for stage in ((0, 1), (1, 3)) for rank in (0, 1)]
    for number, shard in enumerate(stages):
        client, layers = connect(shard), slice(*shard.layers or (0, 3))
        assert client.get(prompt).tokens == 0
        puts = client.put(prompt, kv[layers, :, slice(*shard.kv_heads[0])])
        wanted = PutOutcome.stored if number == 3 else PutOutcome.pending
        assert [put.outcome for put in puts] == [wanted] * 2
    for shard in (*stages, Shard(), Shard((2, 3)), Shard(kv_heads=((1, 2),))):
        client, layers = connect(shard), slice(*shard.layers or (0, 3))
        own = kv[layers, :, slice(*(shard.kv_heads or [(0, 4)])[0])]
        hit = client.get(prompt)
        assert hit.tokens == 32
        assert np.array_equal(hit.kv, own[:, :, :, :32])
        pages = [np.zeros((5, 2, 8, own.shape[2], 8), np.float16) for _ in own]
        cache = PagedCache(shard.part_of(model), pages, axes)
        assert client.get(prompt, out=cache[[4, 2, 0, 1, 3]]).tokens == 32
        with client.lease(prompt) as lease:
            leased, got = lease.get(), client.get_chunks(lease.keys)
        assert len(got) == 2
        assert all(map(equal, leased, got))
        assert np.array_equal(pages[0][4, 0], own[0, 0, :, :8].swapaxes(0, 1))
    client = connect(stages[0])
    whole = PagedCache(model, [np.zeros((5, 2, 8, 4, 8), np.float16) for _ in range(3)], axes)
    with pytest.raises(LayoutMismatchError, match="a cache of another Model"):
        client.get(prompt, out=whole[[0, 1, 2, 3, 4]])
    with pytest.raises(LayoutMismatchError, match="whole chunks only"):
        list(client.get_layers(prompt))
    with pytest.raises(LayoutMismatchError, match="whole chunks only"):
        client.put_layers(prompt)
