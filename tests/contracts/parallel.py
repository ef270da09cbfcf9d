"""What every Transport promises of shards and of lookups that wait. A part of its suite."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from helpers.prompts import assert_reads, chunks_of, equal, keys_of
from helpers.shards import TWO_GROUPS, WIDE, part_of, slices

from kvstore.client import Chunk, Client, Shard
from kvstore.codecs.base import empty_tensors
from kvstore.proto.errors import InvalidRequestError, LayoutMismatchError
from kvstore.proto.plans import Hints
from kvstore.proto.types import KVLayout, PutOutcome

Connect = Callable[..., Client]

LAYOUT = KVLayout.of(TWO_GROUPS, 16)


def put(client: Client, chunks: list[Chunk], shard: Shard) -> set[PutOutcome]:
    """Put what *shard* has of whole *chunks*; return what became of them."""
    layout = KVLayout.of(client.model, 16)
    part = shard.in_chunk(client.model, layout)
    puts = client.put_chunks([part_of(chunk, part) for chunk in chunks], shard=shard)
    assert len(puts) == len(chunks)
    return {one.outcome for one in puts}


def ranks_of(tensor: int, stages: list[tuple[int, int]]) -> list[Shard]:
    """Return the shards of an engine of so many heads' ranks and these pipeline stages."""
    return [
        Shard.of_rank(TWO_GROUPS, rank, tensor, layers)
        for layers in stages
        for rank in range(tensor)
    ]


ENGINES = [
    ranks_of(1, [(0, 6)]),
    ranks_of(2, [(0, 6)]),
    ranks_of(3, [(0, 1), (1, 6)]),
    ranks_of(8, [(0, 5), (5, 6)]),
]
"""Heads whole, in halves, unevenly, and more ranks than heads; the first stage of the third has
no latent layer."""


class ParallelContract:
    """See TransportContract, which brings the fixtures."""

    @pytest.mark.parametrize("writers", [2, 3], ids=["tp3pp2", "tp8pp2"])
    def test_what_the_ranks_of_any_engine_put_is_read_by_the_ranks_of_any_other(
        self, connect: Connect, writers: int
    ) -> None:
        clients = [connect(TWO_GROUPS) for _ in range(2)]
        keys = keys_of(clients[0], 1, 2)
        chunks = chunks_of(clients[0], keys)
        for number, shard in enumerate(ENGINES[writers]):
            found = put(clients[number % 2], chunks, shard)
            assert found <= {PutOutcome.pending, PutOutcome.stored, PutOutcome.exists}
        assert_reads(clients[0], keys)
        for readers in ENGINES:
            for shard in readers:
                part = shard.in_chunk(TWO_GROUPS, LAYOUT)
                room = [empty_tensors(part.layout) for _ in keys]
                assert len(clients[1].get_chunks(keys, room, shard=shard)) == 2
                wanted = [slices(chunk.tensors, part) for chunk in chunks]  # type: ignore[arg-type]
                assert all(map(equal, room, wanted))

    def test_chunks_are_pending_until_the_last_rank_put_its_part(self, connect: Connect) -> None:
        client = connect(WIDE)
        keys = keys_of(client, 1, 2)
        chunks = chunks_of(client, keys)
        ranks = [Shard.of_rank(WIDE, rank, 2) for rank in range(2)]
        assert put(client, chunks, ranks[0]) == {PutOutcome.pending}
        match = client.lookup(keys=keys)
        assert (match.ready, match.pending) == (0, 2)
        assert client.get_chunks(keys) == []
        assert put(client, chunks, ranks[1]) == {PutOutcome.stored}
        assert put(client, chunks, ranks[0]) == {PutOutcome.exists}
        assert client.lookup(keys=keys).ready == 2

    def test_tensors_that_are_not_of_the_shard_are_refused_before_anything_is_sent(
        self, connect: Connect
    ) -> None:
        client = connect(WIDE)
        (chunk,) = chunks_of(client, keys_of(client, 1, 1))
        for shard in (Shard((0, 2)), Shard((5, 6)), Shard(kv_heads=((0, 5),))):
            with pytest.raises(LayoutMismatchError):
                client.put_chunks([chunk], shard=shard)
        assert client.lookup(keys=[chunk.key]).pending == 0

    def test_facts_that_contradict_another_ranks_are_refused(self, connect: Connect) -> None:
        client = connect(WIDE)
        (chunk,) = chunks_of(client, keys_of(client, 1, 1))
        top, rest = Shard((0, 1)), Shard((1, 3))
        assert put(client, [chunk], top) == {PutOutcome.pending}
        with pytest.raises(InvalidRequestError, match="position"):
            put(client, [replace(chunk, position=16)], rest)
        with pytest.raises(InvalidRequestError, match="content"):
            put(client, [replace(chunk, content=bytes([1]) * 16)], rest)
        assert put(client, [chunk], rest) == {PutOutcome.stored}
        assert_reads(client, [chunk.key])

    # --- hand-over

    def test_a_lookup_waits_for_what_was_promised_and_is_answered_when_it_is_whole(
        self, connect: Connect
    ) -> None:
        prefill, decode = connect(WIDE), connect(WIDE)
        keys = keys_of(prefill, 1, 2)
        chunks = chunks_of(prefill, keys)
        assert prefill.announce_puts(keys, within=60.0) == 2
        assert decode.lookup(keys=keys).pending == 2
        answers: list[int] = []
        asked = threading.Event()

        def ask() -> None:
            asked.set()
            answers.append(decode.lookup(keys=keys, wait=20.0).ready)

        thread = threading.Thread(target=ask)
        thread.start()
        asked.wait()
        hints = Hints(handover_ms=60_000)
        for rank in range(2):
            shard = Shard.of_rank(WIDE, rank, 2)
            part = shard.in_chunk(WIDE, KVLayout.of(WIDE, 16))
            parts = [part_of(chunk, part) for chunk in chunks]
            prefill.put_chunks(parts, hints=hints, shard=shard)
        thread.join()
        assert answers == [2]
        assert_reads(decode, keys)
