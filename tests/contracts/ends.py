"""What every transport does for models that keep windows or states: a prefix ends where it can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from contracts.chunks import make_representation
from contracts.parallel import Connect
from helpers.local_server import eventually
from helpers.prompts import equal, keys_of, outcomes

from kvstore.client import Chunk, Client
from kvstore.client.chunk import parents
from kvstore.client.planning import PlanTerms
from kvstore.codecs.base import AnyTensors, ChunkTensors, empty_tensors
from kvstore.proto.errors import LayoutMismatchError
from kvstore.proto.plans import PrefillModel
from kvstore.proto.types import ChunkKey, DType, KVLayout, LayerGroup, LayerKind, PutOutcome

TOKENS = 16
ATTENTION = LayerGroup(LayerKind.attention, DType.bfloat16, (0, 3), 2, 8)
WINDOW = LayerGroup(LayerKind.window, DType.float8_e4m3fn, (1,), 2, 8, window_tokens=12)
STATE = LayerGroup(LayerKind.state, DType.uint8, (2, 4), 1, 203)

HYBRID = replace(make_representation(), layer_groups=(ATTENTION, WINDOW, STATE))
WIDE = replace(HYBRID, layer_groups=(replace(WINDOW, window_tokens=34), ATTENTION))
"""Its windows reach over three chunks."""

stored, exists, refused = PutOutcome.stored, PutOutcome.exists, PutOutcome.refused


def tensors_for(key: ChunkKey, layout: KVLayout) -> ChunkTensors:
    """Return tensors that follow from the key and each component's kind."""
    out = empty_tensors(layout)
    for component, layers in zip(layout.components, out, strict=True):
        draw = np.random.default_rng([int.from_bytes(key[-8:], "little"), int(component.kind)])
        for parts in layers:
            for part in parts:
                part[...] = np.frombuffer(draw.bytes(part.nbytes), part.dtype).reshape(part.shape)
    return out


def chunk_of(client: Client, keys: Sequence[ChunkKey], at: int, ends: str) -> Chunk:
    """Return chunk *at* of a chain, with its window for ``w`` and its state for ``s`` in *ends*."""
    layout = KVLayout.of(client.model, TOKENS, window="w" in ends, state="s" in ends)
    parent = parents(keys)[at]
    tensors = tensors_for(keys[at], layout)
    return Chunk(keys[at], tensors, parent=parent, position=TOKENS * at, layout=layout)


def put_ends(client: Client, keys: Sequence[ChunkKey], ends: Sequence[str]) -> list[PutOutcome]:
    """Put a chain; *ends* says what each chunk has of its end."""
    return outcomes(client, [chunk_of(client, keys, at, has) for at, has in enumerate(ends)])


class EndsContract:
    """See TransportContract, which brings the fixtures."""

    def test_windows_and_states_come_back_bit_for_bit(self, connect: Connect) -> None:
        client = connect(HYBRID)
        keys = keys_of(client, 1, 3)
        assert put_ends(client, keys, ["", "w", "ws"]) == [stored] * 3
        found = client.get_chunks(keys)
        for at, (one, has) in enumerate(zip(found, ["", "w", "ws"], strict=True)):
            assert equal(one, chunk_of(client, keys, at, has).tensors)  # type: ignore[arg-type]

    def test_a_chunk_that_is_put_again_with_its_state_gains_it_unless_it_is_read(
        self, connect: Connect
    ) -> None:
        client = connect(HYBRID)
        keys = keys_of(client, 1, 2)
        assert put_ends(client, keys, ["", ""]) == [stored, stored]
        match = client.lookup(keys=keys)
        assert (match.ready, match.shared) == (0, 2)
        other = keys_of(client, 2, 2)
        put_ends(client, other, ["", "ws"])
        with client.lease(keys=other):
            assert put_ends(client, other, ["ws"]) == [refused]

        def is_gained() -> bool:  # refused while the first is being copied to a lower tier
            return put_ends(client, keys, ["", "ws"]) == [exists, stored]

        assert eventually(is_gained)
        assert client.lookup(keys=keys).ready == 2
        assert equal(client.get_chunks(keys)[1], chunk_of(client, keys, 1, "ws").tensors)  # type: ignore[arg-type]
        assert put_ends(client, keys, ["", ""]) == [exists, exists]
        assert client.lookup(keys=keys).ready == 2

    def test_windows_and_states_that_are_not_wanted_are_not_read(self, connect: Connect) -> None:
        client = connect(HYBRID)
        keys = keys_of(client, 1, 2)
        put_ends(client, keys, ["ws", "ws"])
        rooms: dict[int, AnyTensors] = {}

        def room(index: int, layout: KVLayout) -> AnyTensors:
            tensors: list[list[list[np.ndarray]]] = empty_tensors(layout)
            if index == 0:
                tensors[1:] = [[], []]
            rooms[index] = tensors
            return tensors

        assert len(client.get_chunks(keys, room)) == 2
        first, second = chunk_of(client, keys, 0, ""), chunk_of(client, keys, 1, "ws")
        assert equal(rooms[0], first.tensors)  # type: ignore[arg-type]
        assert equal(rooms[1], second.tensors)  # type: ignore[arg-type]
        with pytest.raises(LayoutMismatchError, match="layers=0: give 2"):
            client.get_chunks(keys[:1], lambda _, layout: [[] for _ in layout.components])

    def test_tensors_that_are_not_what_the_layout_says_are_refused(self, connect: Connect) -> None:
        client = connect(HYBRID)
        keys = keys_of(client, 1, 1)
        whole = chunk_of(client, keys, 0, "ws")
        with pytest.raises(LayoutMismatchError, match="components=3: give 1"):
            client.put_chunks(
                [replace(whole, layout=KVLayout.of(HYBRID, TOKENS, window=False, state=False))]
            )
        with pytest.raises(LayoutMismatchError, match="layout"):
            client.put_chunks([replace(whole, layout=KVLayout.of(WIDE, TOKENS))])
        assert outcomes(client, [replace(whole, layout=None)]) == [stored]

    def test_work_layer_by_layer_is_refused_by_name(self, connect: Connect) -> None:
        client = connect(HYBRID)
        keys = keys_of(client, 1, 1)
        with pytest.raises(LayoutMismatchError, match="kind='window'"):
            next(client.get_chunk_layers(keys))
        with pytest.raises(LayoutMismatchError, match="kind='window'"):
            client.get_levelled(keys, PlanTerms(1.0, PrefillModel(0.0, 1e-3), 1e9))
