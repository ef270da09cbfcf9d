"""Chunks that gain what is of their end, over tiers, restarts, codecs and nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
from contracts.ends import HYBRID, chunk_of, put_ends
from helpers.local_server import LocalServer
from helpers.prompts import equal, keys_of, outcomes

from kvstore.client import Chunk, Client
from kvstore.client.chunk_puts import layout_of
from kvstore.codecs.base import ChunkTensors, Part
from kvstore.proto.types import Accuracy, PutOutcome

stored = PutOutcome.stored


def connect(server: LocalServer) -> Client:
    return server.connect("auto", HYBRID)


def test_a_state_that_came_later_survives_a_restart(
    make_server: Callable[..., LocalServer],
) -> None:
    server = make_server()
    client = connect(server)
    keys = keys_of(client, 1, 3)
    client.put_chunks([chunk_of(client, keys, at, "") for at in range(3)], durable=True)
    assert client.lookup(keys=keys).ready == 0
    (put,) = client.put_chunks([chunk_of(client, keys, 1, "ws")], durable=True)
    assert put.outcome is stored
    server.close()
    again = connect(make_server())
    match = again.lookup(keys=keys)
    assert (match.ready, match.shared) == (2, 3)
    found = again.get_chunks(keys)
    assert len(found) == 2, "behind the state nobody could go on"
    assert equal(found[1], chunk_of(again, keys, 1, "ws").tensors)  # type: ignore[arg-type]


def finite(chunk: Chunk) -> Chunk:
    """Return the chunk with numbers from 1 to 2 in its attention."""
    for parts in cast("ChunkTensors", chunk.tensors)[0]:
        for part in parts:
            part[...] = part & 0x7F | 0x3F80
    return chunk


def test_a_tier_with_loss_keeps_states_as_they_are(make_server: Callable[..., LocalServer]) -> None:
    server = make_server("--codec", "disk=kivi:8")
    client = connect(server)
    keys = keys_of(client, 1, 2)
    chunks = [finite(chunk_of(client, keys, at, ends)) for at, ends in enumerate(("w", "ws"))]
    assert outcomes(client, chunks) == [stored, stored]
    server.settled()
    copies = server.node.store.catalog.copies(keys[1])
    assert copies["disk"].accuracy is not Accuracy.exact
    assert copies["disk"].layout == copies["cpu"].layout
    server.leave_memory(keys)
    assert client.lookup(keys=keys).ready == 0
    assert client.lookup(keys=keys, accuracy=Accuracy.approximate).ready == 2
    found = client.get_chunks(keys, accuracy=Accuracy.approximate)
    for mine, theirs in zip(found[1][2], chunks[1].tensors[2], strict=True):
        assert np.array_equal(mine[0], cast("Part", theirs[0]))


def test_a_copy_with_another_end_than_the_others_is_not_counted(server: LocalServer) -> None:
    client, catalog = connect(server), server.node.store.catalog
    for seed, ends, ready in ((1, "ws", 2), (2, "", 0)):
        keys = keys_of(client, seed, 2)
        put_ends(client, keys, ["", ends])
        server.settled()
        other = layout_of(chunk_of(client, keys, 1, "w"), HYBRID)
        info = catalog.copies(keys[1])["cpu"]
        catalog.forget("disk", keys[1])
        catalog.note_sealed("disk", type(info)(info.key, info.parent, other, 0, 900))
        assert catalog.holders(keys[1]) == ["cpu"]
        assert keys[1] in catalog.orphans["disk"]
        assert client.lookup(keys=keys).ready == ready
