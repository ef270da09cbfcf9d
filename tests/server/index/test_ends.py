"""Chunks that gain what is of their end, and the states that a judicious server keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
from conftest import ServerMaker
from contracts.ends import HYBRID, TOKENS, chunk_of, put_ends
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import equal, keys_of, outcomes, tokens

from kvstore.client import Chunk, Client
from kvstore.client.chunk_puts import layout_of
from kvstore.codecs.base import ChunkTensors, Part
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.frame import raw_frame_bytes
from kvstore.proto.types import (
    DIGEST_BYTES,
    Accuracy,
    ChunkInfo,
    ChunkKey,
    KVLayout,
    LayerKind,
    PutOutcome,
)
from kvstore.server.store.reservations import WITHOUT_STATE

stored, exists = PutOutcome.stored, PutOutcome.exists


def test_a_state_that_came_later_survives_a_restart(make_server: ServerMaker) -> None:
    server = make_server()
    client = server.connect("auto", HYBRID)
    keys = keys_of(client, 1, 3)
    client.put_chunks([chunk_of(client, keys, at, "") for at in range(3)], durable=True)
    assert client.lookup(keys=keys).ready == 0
    (put,) = client.put_chunks([chunk_of(client, keys, 1, "ws")], durable=True)
    assert put.outcome is stored
    server.close()
    again = make_server().connect("auto", HYBRID)
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


def test_a_tier_with_loss_keeps_states_as_they_are(make_server: ServerMaker) -> None:
    server = make_server("--codec", "disk=kivi:8")
    client = server.connect("auto", HYBRID)
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
    client, catalog = server.connect("auto", HYBRID), server.node.store.catalog
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


@pytest.fixture
def judicious(make_server: ServerMaker) -> LocalServer:
    return make_server("--state-admission", "judicious")


@pytest.fixture
def client(judicious: LocalServer) -> Client:
    return judicious.connect("auto", HYBRID)


def put(client: Client, keys: Sequence[ChunkKey], first: int = 0) -> list[tuple[PutOutcome, bool]]:
    """Put a chain with a state in every chunk; say what became of each, and if it lost its own."""
    puts = client.put_chunks([chunk_of(client, keys, at, "ws") for at in range(first, len(keys))])
    return [(one.outcome, one.reason == WITHOUT_STATE) for one in puts]


def states_of(server: LocalServer, keys: Sequence[ChunkKey]) -> list[bool]:
    copies = [server.node.store.catalog.copies(key)["cpu"] for key in keys]
    return [one.layout.has(LayerKind.state) for one in copies]


def test_only_the_last_state_of_a_put_is_kept(judicious: LocalServer, client: Client) -> None:
    keys = keys_of(client, 1, 4)
    assert put(client, keys) == [(stored, True)] * 3 + [(stored, False)]
    assert states_of(judicious, keys) == [False, False, False, True]
    assert client.lookup(keys=keys).ready == 4
    found = client.get_chunks(keys)
    for at, one in enumerate(found):
        expected = chunk_of(client, keys, at, "ws" if at == 3 else "w")
        assert equal(one, expected.tensors)  # type: ignore[arg-type]
    assert judicious.counter("put_states_left_out") == 3
    sizes = [judicious.node.store.catalog.size_bytes("cpu", key) for key in keys]
    assert len(set(sizes[:3])) == 1
    assert sizes[0] < sizes[3]
    assert judicious.node.store.writes.is_draining is False
    assert judicious.settled().pending_puts == 0


def test_where_prompts_part_a_state_is_kept_the_second_time(
    judicious: LocalServer, client: Client
) -> None:
    keys = keys_of(client, 1, 4)
    put(client, keys)
    other = client.keys([*tokens(1, 4 * TOKENS)[: 2 * TOKENS], *tokens(9, 2 * TOKENS)])
    assert other[:2] == keys[:2]
    match = client.lookup(keys=other)
    assert (match.ready, match.shared) == (0, 2)

    def is_gained() -> bool:  # refused while the first is being copied to a lower tier
        return put(client, other)[1] == (stored, False) or states_of(judicious, [other[1]]) == [
            True
        ]

    assert eventually(is_gained)
    assert states_of(judicious, other[1:]) == [True, False, True]
    assert client.lookup(keys=other[:3]).ready == 2


def test_a_state_that_comes_a_second_time_is_kept(judicious: LocalServer, client: Client) -> None:
    keys = keys_of(client, 3, 3)
    assert put(client, keys)[0] == (stored, True)
    judicious.settled()
    assert put(client, keys)[:2] == [(stored, False)] * 2
    assert states_of(judicious, keys) == [True] * 3
    assert put(client, keys) == [(exists, False)] * 3


def test_explain_says_that_the_state_was_not_kept(judicious: LocalServer, client: Client) -> None:
    keys = keys_of(client, 5, 3)
    put(client, keys)
    request = pb.ExplainRequest(
        key_namespace=keys[0][:DIGEST_BYTES], digests=b"".join(k[DIGEST_BYTES:] for k in keys[:2])
    )
    reply = judicious.dial().call("Explain", request, DEADLINE_MS, pb.ExplainResponse)
    assert [one.state for one in reply.chunks] == ["no_end"] * 2
    assert all("--state-admission" in one.reason for one in reply.chunks)


def test_what_is_aborted_is_put_anew_as_if_it_had_not_been(
    judicious: LocalServer, client: Client
) -> None:
    keys = keys_of(client, 7, 3)
    chunks = [chunk_of(client, keys, at, "ws") for at in range(3)]
    layouts = [KVLayout.of(HYBRID, TOKENS)]
    core = judicious.node.store
    (session,) = judicious.node.sessions.by_id.values()
    size = raw_frame_bytes(layouts[0])
    infos = [ChunkInfo(c.key, c.parent, layouts[0], 0, size) for c in chunks]
    begun = core.writes.begin_all(session, infos, core.moves.clock() + 5)
    assert all(core.writes.abort(session, one.ticket_id) for one in begun)  # type: ignore[union-attr]
    assert [one.reason == WITHOUT_STATE for one in client.put_chunks(chunks)] == [True, True, False]
