"""Pains 12 and 13: hybrid models that hit wrongly or never, ranks that cannot share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from helpers.local_server import DEADLINE_MS, LocalServer
from helpers.prompts import MEDIUM, SMALL, assert_reads, chunks_of, equal, keys_of

from kvstore.cli.app import call
from kvstore.client import Chunk, Client, ClientOptions
from kvstore.client.chunk import Shard, parents
from kvstore.codecs.base import ChunkTensors, empty_tensors
from kvstore.proto.types import (
    DIGEST_BYTES,
    ChunkKey,
    DType,
    KVLayout,
    LayerGroup,
    LayerKind,
    PutOutcome,
)

HYBRID = replace(
    SMALL,
    layer_groups=(
        LayerGroup(LayerKind.attention, DType.bfloat16, (0, 2), 2, 8),
        LayerGroup(LayerKind.state, DType.float32, (1, 3), 2, 8),
    ),
)
SLIDING = replace(
    SMALL,
    layer_groups=(
        LayerGroup(LayerKind.attention, DType.bfloat16, (0, 2), 2, 8),
        LayerGroup(LayerKind.window, DType.bfloat16, (1, 3), 2, 8, window_tokens=17),
    ),
)
CHUNKS = 4


def kv(key: ChunkKey, layout: KVLayout) -> ChunkTensors:
    out = empty_tensors(layout)
    draw = np.random.default_rng(int.from_bytes(key[-8:], "little"))
    for part in (part for layers in out for parts in layers for part in parts):
        part[...] = np.frombuffer(draw.bytes(part.nbytes), part.dtype).reshape(part.shape)
    return out


def put(client: Client, keys: list[ChunkKey], layouts: list[KVLayout]) -> None:
    chunks = [
        Chunk(key, kv(key, layout), parent=parent, position=16 * at, layout=layout)
        for at, (key, parent, layout) in enumerate(zip(keys, parents(keys), layouts, strict=True))
    ]
    assert [one.outcome for one in client.put_chunks(chunks)] == [PutOutcome.stored] * len(keys)


def states(server: LocalServer, keys: list[ChunkKey]) -> list[str]:
    digests = b"".join(key[DIGEST_BYTES:] for key in keys)
    space = keys[0][:DIGEST_BYTES]
    reply = call(server.address, "Explain", key_namespace=space, digests=digests)
    return [one.state for one in reply.chunks]


def test_lmcache_4247_a_prefix_of_a_hybrid_model_ends_where_its_state_was_kept(
    server: LocalServer,
) -> None:
    """LMCache#4247, #2845, #4094, Mooncake#2236: of models with Mamba layers the attention's KV was
    found, and the recurrent state of its end never loaded: two in five answers were garbage."""
    client = server.connect("auto", HYBRID)
    keys = keys_of(client, 1, CHUNKS)
    bare = KVLayout.of(HYBRID, 16, state=False)
    whole = KVLayout.of(HYBRID, 16)
    put(client, keys, [bare, whole, bare, bare])
    assert client.lookup(keys=keys).ready == 2
    found = client.get_chunks(keys)
    assert [len(one) for one in found] == [1, 2]
    assert equal(found[0], kv(keys[0], bare))
    assert equal(found[1], kv(keys[1], whole))
    assert states(server, keys) == ["ready", "ready", "no_end", "no_end"]
    assert client.lookup(keys=keys[:1]).ready == client.lookup(keys=keys[2:]).ready == 0
    last = Chunk(keys[3], kv(keys[3], whole), parent=parents(keys)[3], position=48, layout=whole)
    server.settled()  # while it is copied to the disk it is read as it is
    assert client.put_chunks([last])[0].outcome is PutOutcome.stored
    assert client.lookup(keys=keys).ready == CHUNKS


def test_lmcache_4094_a_prefix_of_a_sliding_window_has_the_window_of_its_end(
    server: LocalServer,
) -> None:
    """The same for layers that see the last tokens only: a prompt ends where the window is."""
    client = server.connect("auto", SLIDING)
    keys = keys_of(client, 1, CHUNKS)
    bare, whole = KVLayout.of(SLIDING, 16, window=False), KVLayout.of(SLIDING, 16)
    put(client, keys, [bare, bare, whole, bare])
    assert client.lookup(keys=keys).ready == 3
    assert len(client.get_chunks(keys)) == 3
    assert states(server, keys) == ["ready", "ready", "ready", "no_end"]


def sliced(chunks: list[Chunk], rank: int, ranks: int) -> list[Chunk]:
    """What a tensor-parallel rank has of *chunks*: its share of the heads."""
    share = MEDIUM.layer_groups[0].kv_heads // ranks
    heads = slice(rank * share, (rank + 1) * share)

    def rows(chunk: Chunk) -> ChunkTensors:
        return [[[np.asarray(p)[heads] for p in parts] for parts in c] for c in chunk.tensors]

    return [replace(chunk, tensors=rows(chunk)) for chunk in chunks]


def test_lmcache_2903_what_two_ranks_stored_one_reads_and_the_other_way_round(
    server: LocalServer,
) -> None:
    """LMCache#2903, #3266, vllm PR#53129: rank and number of ranks were in the names, so an engine
    with four ranks found nothing of what one with one or two had stored."""
    options = ClientOptions("auto", chunk_tokens=64, deadline_ms=DEADLINE_MS)
    ranks = [server.connect("auto", MEDIUM, options) for _ in range(2)]
    single = server.connect("auto", MEDIUM, options)
    keys = keys_of(single, 1, 2)
    chunks = chunks_of(single, keys)
    for rank, client in enumerate(ranks):
        assert single.lookup(keys=keys).ready == 0
        shard = Shard.of_rank(MEDIUM, rank, 2)
        client.put_chunks(sliced(chunks, rank, 2), shard=shard)
    assert_reads(single, keys)
    for rank in range(4):
        found = single.get_chunks(keys, shard=Shard.of_rank(MEDIUM, rank, 4))
        wanted = sliced(chunks, rank, 4)
        assert all(equal(one, two.tensors) for one, two in zip(found, wanted, strict=True))  # type: ignore[arg-type]
    other = keys_of(single, 2, 2)
    single.put_chunks(chunks_of(single, other))
    for rank, client in enumerate(ranks):
        found = client.get_chunks(other, shard=Shard.of_rank(MEDIUM, rank, 2))
        wanted = sliced(chunks_of(single, other), rank, 2)
        assert all(equal(one, two.tensors) for one, two in zip(found, wanted, strict=True))  # type: ignore[arg-type]
