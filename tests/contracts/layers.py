"""What every transport does for engines: pages in place, and work layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from contracts.chunks import make_representation
from contracts.parallel import Connect
from helpers.local_server import LocalServer
from helpers.pages import AXES, engine_pages, rows_of
from helpers.prompts import MEDIUM, SMALL, assert_reads, chunks_of, equal, keys_of, store, tokens

from kvstore.client import Client, ClientOptions, PlannedChunk
from kvstore.client.decode import Layer
from kvstore.codecs.base import Part
from kvstore.codecs.block_part import BlockPart
from kvstore.proto.errors import InvalidRequestError, KVStoreError, LayoutMismatchError
from kvstore.proto.types import ChunkKey, DType, LayerGroup, LayerKind, Model, PutOutcome

BLOCKS = 24

TWO_GROUPS = replace(
    SMALL,
    layer_groups=(
        LayerGroup(LayerKind.attention, DType.bfloat16, (0, 2, 5), 2, 8),
        LayerGroup(LayerKind.mla, DType.float16, (1, 3), 1, 24),
    ),
)
"""A model whose kinds of layers alternate."""


def planned(client: Client, keys: Sequence[ChunkKey]) -> list[PlannedChunk]:
    """The chunks of ``chunks_of`` before they have tensors."""
    return [
        PlannedChunk(
            chunk.key, client.options.chunk_tokens, parent=chunk.parent, position=chunk.position
        )
        for chunk in chunks_of(client, keys)
    ]


def layers_of(client: Client, keys: Sequence[ChunkKey]) -> dict[int, list[Sequence[Part]]]:
    """What ``chunks_of`` puts, by the model's layer, then chunk."""
    groups = client.model.layer_groups
    chunks = chunks_of(client, keys)
    return {
        layer: [cast("Sequence[Part]", chunk.tensors[number][at]) for chunk in chunks]
        for number, group in enumerate(groups)
        for at, layer in enumerate(group.layer_ids)
    }


def assert_layer(client: Client, keys: Sequence[ChunkKey], layer: Layer) -> None:
    """Fail unless the layer is right for as many chunks as it has."""
    right = layers_of(client, keys)[layer.id]
    for found, wanted in zip(layer.tensors, right, strict=False):
        assert all(map(np.array_equal, found, wanted))


class LayersContract:
    """See TransportContract, which brings the fixtures."""

    def options(self, chunk_tokens: int = 16, staging_bytes: int = 1 << 20) -> ClientOptions:
        raise NotImplementedError

    # --- pages

    @pytest.mark.parametrize(
        ("axes", "block_tokens"), [(AXES[0], 16), (AXES[3], 24), (AXES[6], 100)]
    )
    def test_pages_of_any_order_and_size_go_out_and_come_back(
        self, connect: Connect, axes: str, block_tokens: int
    ) -> None:
        client = connect(MEDIUM, self.options(chunk_tokens=64))
        prompt = tokens(1, 3 * 64 + 40)
        draw = np.random.default_rng(1)
        source, room = (engine_pages(MEDIUM, axes, BLOCKS, block_tokens, draw) for _ in range(2))
        needed = -(-len(prompt) // block_tokens)
        ids, other_ids = (draw.permutation(BLOCKS)[:needed].tolist() for _ in range(2))
        puts = client.put(prompt, source[ids])
        assert [put.outcome for put in puts] == [PutOutcome.stored] * 4
        before = rows_of(room, range(BLOCKS))
        assert client.get(prompt, out=room[other_ids]).tokens == len(prompt)
        assert np.array_equal(
            rows_of(room, other_ids)[..., : len(prompt), :],
            rows_of(source, ids)[..., : len(prompt), :],
        )
        untouched = [block for block in range(BLOCKS) if block not in other_ids]
        slots = np.concatenate([np.arange(block_tokens) + block_tokens * one for one in untouched])
        assert np.array_equal(rows_of(room, range(BLOCKS))[..., slots, :], before[..., slots, :])

    def test_pages_end_before_a_wrong_chunk(self, client: Client, server: LocalServer) -> None:
        keys = store(client, 1, 3)
        damage(server, keys[1])
        room = engine_pages(client.model, "block kv token head dim", 6, 8, np.random.default_rng(1))
        assert client.get(keys=keys, out=room[range(6)]).chunks == 1
        assert client.lookup(keys=keys).ready == 1

    # --- layers out

    @pytest.mark.parametrize("representation", [SMALL, TWO_GROUPS], ids=["one kind", "two kinds"])
    def test_layers_come_in_the_models_order(self, connect: Connect, representation: Model) -> None:
        client = connect(representation)
        keys = store(client, 1, 5)
        layers = list(client.get_chunk_layers([*keys, *keys_of(client, 2, 1)]))
        assert [layer.id for layer in layers] == sorted(layers_of(client, keys))
        for layer in layers:
            assert len(layer.tensors) == 5
            assert_layer(client, keys, layer)

    def test_layers_end_before_a_wrong_chunk(self, client: Client, server: LocalServer) -> None:
        keys = store(client, 1, 4)
        damage(server, keys[2])  # its last layer
        layers = list(client.get_chunk_layers(keys))
        assert [layer.id for layer in layers] == [0, 1]
        assert len(layers[0].tensors) >= len(layers[1].tensors) == 2
        for layer in layers:
            assert_layer(client, keys, layer)
        assert client.lookup(keys=keys).ready == 2

    def test_layers_given_up_leave_no_lease(self, connect: Connect, server: LocalServer) -> None:
        client = connect(MEDIUM, self.options(chunk_tokens=64))
        keys = store(client, 1, 10)
        for read in (0, 1, 3) * 2:
            with closing(client.get_chunk_layers(keys)) as layers:
                for number in range(read):
                    assert next(layers).id == number
        usage = server.settled()
        assert (usage.leases, usage.tiers[0][1].reservations) == (0, 0)
        assert_reads(client, keys)

    # --- layers in

    @pytest.mark.parametrize("representation", [SMALL, TWO_GROUPS], ids=["one kind", "two kinds"])
    def test_a_put_layer_by_layer_is_seen_when_all_of_it_is_there(
        self, connect: Connect, representation: Model
    ) -> None:
        client = connect(representation)
        keys = keys_of(client, 1, 4)
        with client.put_chunk_layers(planned(client, keys)) as put:
            for layer_id, tensors in reversed(layers_of(client, keys).items()):
                put.layer(layer_id, tensors)
                assert client.lookup(keys=keys).ready == 0
        assert [one.outcome for one in put.results] == [PutOutcome.stored] * 4
        assert_reads(client, keys)

    def test_layers_larger_than_a_message_go_from_pages_to_pages(self, connect: Connect) -> None:
        model = make_representation(layers=3, kv_heads=8, head_dim=128)
        client = connect(model, self.options(chunk_tokens=300, staging_bytes=16 << 20))
        keys, draw = keys_of(client, 1, 2), np.random.default_rng(1)
        source, room = (
            [pages[range(40)].chunk(at, at + 300) for at in (0, 300)]
            for pages in (
                engine_pages(model, "block kv head token dim", 40, 16, draw) for _ in range(2)
            )
        )
        with client.put_chunk_layers(planned(client, keys)) as put:
            for layer in range(3):
                put.layer(layer, [chunk[0][layer] for chunk in source])
        found = client.get_chunks(keys)
        layers = list(client.get_chunk_layers(keys, room))
        assert [len(layer.tensors) for layer in layers] == [2, 2, 2]
        for given, whole, read in zip(source, found, room, strict=True):
            dense, read_back = (
                [[[_dense(part) for part in parts] for parts in one] for one in chunk]
                for chunk in (given, read)
            )
            assert equal(whole, dense)
            assert equal(read_back, dense)

    def test_a_put_given_up_stores_nothing(self, client: Client, server: LocalServer) -> None:
        keys = keys_of(client, 1, 3)
        right = layers_of(client, keys)
        with server.unchanged():
            put = client.put_chunk_layers(planned(client, keys))
            put.layer(0, right[0])
            put.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
            put = client.put_chunk_layers(planned(client, keys))
            put.layer(0, right[0])
            with pytest.raises(InvalidRequestError, match=r"layers=\[1\]: give them all"):
                put.__exit__(None, None, None)
            with pytest.raises(InvalidRequestError, match="this put has ended"):
                put.layer(1, right[1])
            put.abandon()
        assert client.lookup(keys=keys).missing == 3

    def test_a_wrong_layer_is_refused_and_the_put_goes_on(self, client: Client) -> None:
        keys = keys_of(client, 1, 2)
        right = layers_of(client, keys)
        wrong: list[tuple[int, Sequence[Sequence[Part | torch.Tensor]], str]] = [
            (0, right[0], "layer_id=0: give each layer once"),
            (7, right[1], r"layer_id=7: the model has \[0, 1\]"),
            (1, right[1][:1], "tensors=1: give 2 chunks"),
            (1, [parts[:1] for parts in right[1]], "parts=1: give 2"),
            (1, [[part[:, 1:] for part in parts] for parts in right[1]], r"shape=\(2, 15, 8\)"),
            (1, [[torch.zeros(2, 16, 8).half()] * 2] * 2, "dtype='float16': give bfloat16"),
        ]
        with client.put_chunk_layers(planned(client, keys)) as put:
            put.layer(0, right[0])
            for layer_id, tensors, message in wrong:
                with pytest.raises((InvalidRequestError, LayoutMismatchError), match=message):
                    put.layer(layer_id, tensors)
            put.layer(1, right[1])
        assert_reads(client, keys)

    def test_a_layered_put_of_what_exists_changes_nothing(
        self, client: Client, server: LocalServer
    ) -> None:
        keys = store(client, 1, 2)
        both = [*keys, *keys_of(client, 2, 1)]
        right = layers_of(client, both)
        with client.put_chunk_layers(planned(client, both), durable=True) as put:
            put.layer(0, right[0])
            put.layer(1, right[1])
        exists, stored = PutOutcome.exists, PutOutcome.stored
        assert [one.outcome for one in put.results] == [exists, exists, stored]
        (held,) = client.stat(keys=both[2:])
        assert "disk" in [copy.tier for copy in held.copies], "as it was answered"
        assert server.settled().tiers[0][1].chunks == 3

    def test_what_cannot_be_put_layer_by_layer_is_refused_at_once(self, client: Client) -> None:
        keys = keys_of(client, 1, 2)
        with pytest.raises(InvalidRequestError, match="chunks=0: give 1 to"):
            client.put_chunk_layers([])
        with pytest.raises(InvalidRequestError, match="timeout=0"):
            client.put_chunk_layers(planned(client, keys), timeout=0.0)
        with pytest.raises(LayoutMismatchError, match="tokens=9000"):
            client.put_chunk_layers([PlannedChunk(keys[0], 9000)])
        with pytest.raises(InvalidRequestError, match="not in this client's namespace"):
            client.put_chunk_layers([PlannedChunk(ChunkKey(bytes(32)), 16)])

    def test_a_server_that_stops_in_a_layered_put_is_an_error_and_leaves_no_thread(
        self, client: Client, server: LocalServer
    ) -> None:
        keys = keys_of(client, 1, 2)
        right = layers_of(client, keys)
        put = client.put_chunk_layers(planned(client, keys))
        put.layer(0, right[0])
        server.stop()

        def go_on() -> None:
            put.layer(1, right[1])
            put.commit()

        with pytest.raises(KVStoreError):
            go_on()
        put.abandon()


def damage(server: LocalServer, key: ChunkKey) -> None:
    """Flip a bit of the last layer of a chunk in the server's memory, its only copy then."""
    server.settled()
    core = server.node.store
    core.moves.tiers.slots["disk"].tier.delete(key)
    core.catalog.forget("disk", key)
    flip(server, key)


def flip(server: LocalServer, key: ChunkKey) -> None:
    """Flip a bit of the last layer of a chunk's copy in the server's memory."""
    frame = server.node.store.tiers.cpu_tier.peek(key)
    assert frame is not None
    frame.flags.writeable = True
    frame[-1] ^= 1


def _dense(part: object) -> Part:
    assert isinstance(part, BlockPart)
    out = np.empty(part.shape, part.dtype)
    part.gather(out)
    return out
