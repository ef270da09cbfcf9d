"""Pains 1 and 15: KV that is wrong and is served all the same; codecs that fail in silence."""

from __future__ import annotations

import pytest
from conftest import ServerMaker
from helpers.coarse_codec import coarse_codec
from helpers.disk_damage import flip_a_bit
from helpers.documents import DOCUMENT, HEAD, OTHER, OTHER_HEAD, TRIAL, kinds, prompt_of, put_prompt
from helpers.local_server import LocalServer, eventually
from helpers.plain_engine import PlainEngine
from helpers.prompts import chunks_of, store, tokens

from kvstore.client.options import TransportName
from kvstore.proto.types import Accuracy, ChunkKey

CHUNKS = 4
PROMPT = tokens(1, 16 * CHUNKS)


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_lmcache_3388_a_load_that_falls_short_is_never_told_as_a_hit(
    make_server: ServerMaker, transport: TransportName
) -> None:
    """LMCache#3388: a retrieve came back as failed, the engine used the blocks all the same, and a
    model talked gibberish. Its long form is in test_peers.py."""
    server = make_server()
    client = server.connect(transport)
    keys = client.keys(PROMPT)
    client.put_chunks(chunks_of(client, keys), durable=True)
    client.close()
    server.stop()
    flip_a_bit(server.config.disk[0].path, keys[2])
    engine = PlainEngine(make_server().connect(transport))
    assert engine.load(PROMPT).stored_tokens == 2 * 16
    assert engine.connector.stats().lost_chunks == 2
    assert engine.store(PROMPT) == 1
    assert engine.load(PROMPT).stored_tokens == CHUNKS * 16


def leave_on_disk(server: LocalServer, keys: list[ChunkKey]) -> None:
    catalog = server.node.store.catalog
    assert eventually(lambda: catalog.eviction.count_on("disk") == len(keys))
    server.settled()
    server.leave_memory(keys)


def test_lmcache_717_an_approximation_is_never_taken_for_the_original(
    make_server: ServerMaker,
) -> None:
    """LMCache#717: with its CacheGen serde a model scored worse, and nothing in a hit said that the
    KV was an approximation."""
    with coarse_codec():
        server = make_server("--codec", "disk=coarse")
        client = server.connect()
        keys = store(client, 1, CHUNKS)
        leave_on_disk(server, keys)
        engine = PlainEngine(client)
        assert engine.load(PROMPT).stored_tokens == 0
        assert len(client.get_chunks(keys, accuracy=Accuracy.bounded)) == CHUNKS
        copies = [copy.accuracy for stat in client.stat(keys=keys) for copy in stat.copies]
        assert set(copies) == {Accuracy.bounded}
        assert engine.store(PROMPT) == CHUNKS
        assert engine.load(PROMPT).stored_tokens == CHUNKS * 16
        server.close()


def test_lmcache_2787_a_codec_that_cannot_code_a_model_loses_nothing_in_silence(
    make_server: ServerMaker,
) -> None:
    """LMCache#2787, #4064: with CacheGen over Redis each put failed inside the serde, a warning was
    all, and nothing was ever stored."""
    server = make_server("--codec", "disk=cachegen")
    client = server.connect()
    keys = store(client, 1, CHUNKS)
    leave_on_disk(server, keys)
    assert server.counter("lossless_instead") == CHUNKS
    assert server.counter("failed_copies") == 0
    assert PlainEngine(client).load(PROMPT).stored_tokens == CHUNKS * 16


def test_lmcache_4666_nothing_is_blended_for_a_model_that_was_not_measured(
    server: LocalServer,
) -> None:
    """LMCache#4666, #500: KV of the same tokens behind others was used for any model and prompt,
    and nothing measured what that did to the answers."""
    client = server.connect()
    put_prompt(client, *prompt_of(HEAD, DOCUMENT, OTHER))
    turned = prompt_of(OTHER_HEAD, OTHER, DOCUMENT)
    with client.find_segments(*turned) as resolved:
        assert {kind for segment in kinds(resolved) for kind in segment} == {"none"}
    with client.find_segments(*turned, TRIAL) as resolved:
        assert "variant" in kinds(resolved)[1]
    with client.find_segments(*prompt_of(HEAD, DOCUMENT, OTHER)) as resolved:
        assert resolved.found.exact_prefix == 5
