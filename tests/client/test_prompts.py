"""Prompts by their tokens: KV in each form goes out and comes back, and bad input is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.local_server import DEADLINE_MS, LocalServer
from helpers.prompts import parts_of, tokens

import kvstore
from kvstore.client import Chunk, Client, ClientOptions, PagedCache, Shard
from kvstore.client.chunk import PlannedChunk, parents
from kvstore.client.decode import Wanted
from kvstore.client.transports.base import Put
from kvstore.codecs.base import empty_tensors
from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidRequestError,
    LayoutMismatchError,
    ModelError,
)
from kvstore.proto.types import ChunkKey, DType, KVLayout, LayerGroup, LayerKind, Model

LAYERED = "layer block kv token head dim"
OPTIONS = ClientOptions(chunk_tokens=32, deadline_ms=DEADLINE_MS)
HALF = Model.uniform("half", "8f2c1d4", layers=2, kv_heads=2, head_dim=8, dtype="float16")
HYBRID = replace(
    HALF,
    layer_groups=(
        LayerGroup(LayerKind.attention, DType.float16, (0, 2), 2, 8),
        LayerGroup(LayerKind.window, DType.float16, (1,), 1, 4, window_tokens=9),
    ),
)
COUNT = 3 * 32 + 20


def random(*shape: int) -> np.ndarray[Any, np.dtype[np.float16]]:
    return np.random.default_rng(1).random(shape).astype(np.float16)


def of_hybrid(count: int) -> list[np.ndarray[Any, np.dtype[np.float16]]]:
    return [random(2, 2, 2, count, 8), random(1, 2, 1, count, 4)]


def stored(puts: Sequence[Put]) -> int:
    """Return how many chunks were stored, which must be all."""
    assert {put.outcome.name for put in puts} <= {"stored"}
    return len(puts)


def sevens(keys: Sequence[ChunkKey], model: Model, windows: str) -> list[Chunk]:
    """Return chunks full of sevens; *windows* says which have theirs."""
    chunks = []
    for at, (key, parent) in enumerate(zip(keys, parents(keys), strict=True)):
        layout = KVLayout.of(model, 32, window=windows[at] == "y")
        kv = empty_tensors(layout)
        for part in parts_of(kv):
            part[...] = 7
        chunks.append(Chunk(key, kv, parent=parent, position=32 * at, layout=layout))
    return chunks


@pytest.fixture
def client(server: LocalServer) -> Client:
    return server.connect("auto", HALF, OPTIONS)


def test_one_tensor_goes_out_and_comes_back(client: Client) -> None:
    prompt, kv = tokens(1, COUNT), random(2, 2, 2, COUNT, 8)
    assert client.get(prompt).tokens == 0
    assert stored(client.put(prompt, kv)) == 4
    hit = client.get(prompt)
    assert (hit.tokens, hit.chunks, hit.tiers) == (COUNT, 4, ("cpu",) * 4)
    assert hit.kv.dtype == np.float16
    assert np.array_equal(hit.kv, kv)
    out = np.zeros((2, 2, 2, 140, 8), np.float16)
    longer = [*prompt[:64], *tokens(2, 40)]
    assert client.get(longer, out=out).tokens == 64
    assert np.array_equal(out[..., :64, :], kv[..., :64, :])
    assert client.get(keys=client.keys(prompt), out=out).tokens == COUNT
    assert client.lookup(prompt).ready == len(client.stat(prompt)) == 4
    assert client.pin(prompt, ttl=1.5) == client.unpin(prompt) == client.delete(prompt) == 4


def test_what_the_caller_has_is_neither_read_nor_put(client: Client) -> None:
    prompt, kv = tokens(1, COUNT), random(2, 2, 2, COUNT, 8)
    assert len(client.put(prompt, kv, start=70)) == 2
    out = np.zeros_like(kv)
    hit = client.get(prompt, out=out, start=64)
    assert (hit.tokens, hit.chunks) == (COUNT, 2)
    assert not out[..., :64, :].any()
    assert np.array_equal(out[..., 64:, :], kv[..., 64:, :])
    assert client.get(prompt, start=20).tokens == 20
    assert client.get(prompt, start=COUNT).tokens == COUNT
    assert client.put(prompt, kv, start=COUNT) == []


def test_layers_come_and_go_by_tokens(client: Client) -> None:
    prompt, kv = tokens(1, COUNT), random(2, 2, 2, COUNT, 8)
    with client.put_layers(prompt) as put:
        for layer in (1, 0):
            put.layer(layer, kv[layer])
    assert stored(put.results) == 4
    out = np.zeros_like(kv)
    found = [(layer.id, len(layer.tensors)) for layer in client.get_layers(prompt, out=out)]
    assert found == [(0, 4), (1, 4)]
    assert np.array_equal(out, kv)
    with pytest.raises(LayoutMismatchError, match="tensors="), client.put_layers(prompt) as put:
        put.layer(0, kv[0, :, :, :32])
    with client.put_layers(prompt[:3]) as put:  # as ``put``, which leaves such a rest out
        for layer in (1, 0):
            put.layer(layer, kv[layer])
    assert put.results == []


def test_a_layer_that_is_none_is_refused(client: Client) -> None:
    prompt, kv = tokens(1, 32), random(2, 2, 2, 32, 8)
    cache = PagedCache(HALF, np.zeros((2, 2, 2, 16, 2, 8), np.uint16), LAYERED)
    (blocks,) = cache[[0, 1]].chunk(0, 32)
    bad: list[Any] = [5, None, 1.5, np.float16(1), [5, 6], "ab", [kv[0, 0]], cache[[0, 1]]]
    put = client.put_layers(prompt)
    for tensors in bad:
        with pytest.raises((InvalidRequestError, LayoutMismatchError), match="tensors="):
            put.layer(0, tensors)
    with pytest.raises(InvalidRequestError, match="layer_id="):
        put.layer([0], kv[0])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="tensors='blocks': give tensors over all"):
        put.layer(0, blocks[0])  # type: ignore[arg-type]
    for layer in (0, 1):
        put.layer(layer, kv[layer])
    assert stored(put.commit()) == 1
    assert np.array_equal(client.get(prompt).kv, kv)
    with client.put_chunk_layers([PlannedChunk(client.keys(tokens(2, 32))[0], 32)]) as put:
        for tensors in (5, [5], [[5, 6]], [["a", "b"]]):
            with pytest.raises((InvalidRequestError, LayoutMismatchError), match="tensors="):
                put.layer(0, tensors)  # type: ignore[arg-type]
        for layer in (0, 1):
            put.layer(layer, [blocks[layer]])
    assert stored(put.results) == 1


def test_layers_of_windows_are_put_as_whole_prompts_are(server: LocalServer) -> None:
    client, prompt, kv = server.connect("auto", HYBRID, OPTIONS), tokens(1, 84), of_hybrid(84)
    with client.put_layers(prompt) as put:
        for layer, tensors in ((0, kv[0][0]), (1, kv[1][0]), (2, kv[0][1])):
            put.layer(layer, tensors)
    assert stored(put.results) == 3
    hit = client.get(prompt)
    assert hit.tokens == 84
    assert np.array_equal(hit.kv[0], kv[0])
    assert np.array_equal(hit.kv[1][..., 76:, :], kv[1][..., 76:, :])


def test_a_stage_of_windows_alone_puts_its_part_of_a_prompt(server: LocalServer) -> None:
    prompt, kv = tokens(1, 32), (random(1, 2, 2, 32, 8), random(1, 2, 1, 32, 4))
    for layer, one in ((0, kv[0]), (2, kv[0]), (1, kv[1])):
        shard = Shard((layer, layer + 1))
        puts = server.connect("auto", HYBRID, replace(OPTIONS, shard=shard)).put(prompt, one)
    assert stored(puts) == 1
    hit = server.connect("auto", HYBRID, OPTIONS).get(prompt)
    assert np.array_equal(hit.kv[0][1], kv[0][0])
    assert np.array_equal(hit.kv[1][..., 24:, :], kv[1][..., 24:, :])


def test_a_stage_of_windows_alone_goes_on_from_the_last_chunk_that_has_them(
    server: LocalServer,
) -> None:
    whole, prompt = server.connect("auto", HYBRID, OPTIONS), tokens(1, 96)
    keys = whole.keys(prompt)
    stage = server.connect("auto", HYBRID, replace(OPTIONS, shard=Shard((1, 2))))
    whole.put_chunks(sevens(keys, HYBRID, "nyn"))
    assert list(map(len, stage.get_chunks(keys))) == [0, 1]
    hit = stage.get(prompt)
    assert (hit.tokens, hit.chunks) == (64, 2)
    assert (hit.kv.view(np.uint16)[..., 56:64, :] == 7).all()


def test_bfloat16_is_torchs_and_layers_may_be_named(server: LocalServer) -> None:
    model = Model.uniform("bf", "8f2c1d4", layers=2, kv_heads=2, head_dim=8, dtype="bfloat16")
    client, prompt = server.connect("auto", model, OPTIONS), tokens(1, 32)
    layers = {at: tuple(torch.randn(2, 32, 8).bfloat16() for _ in "KV") for at in range(2)}
    client.put(prompt, layers)
    kv = client.get(prompt).kv
    assert kv.dtype is torch.bfloat16
    for at, parts in layers.items():
        assert torch.equal(kv[at], torch.stack(parts))


def test_a_hybrid_model_has_a_tensor_for_each_group(server: LocalServer) -> None:
    client, prompt, kv = server.connect("auto", HYBRID, OPTIONS), tokens(1, 40), of_hybrid(40)
    client.put(prompt, kv)
    hit = client.get(prompt)
    assert hit.tokens == 32  # a rest of eight tokens is left out
    assert np.array_equal(hit.kv[0], kv[0][..., :32, :])
    assert np.array_equal(hit.kv[1][..., 24:32, :], kv[1][..., 24:32, :])
    with pytest.raises(LayoutMismatchError, match="kv='ndarray': give a tensor for each of 2"):
        client.put(prompt, kv[0])
    prompt = tokens(2, 64)
    client.put(prompt, of_hybrid(64))
    assert client.get(prompt, start=60).tokens == 64, "windows before the start are the caller's"
    assert client.get(prompt, start=30).chunks == 2


WINDOWS = [
    (9, "yynny", 64),
    (9, "nnnny", 0),
    (33, "ynnny", 32),  # it keeps 32 tokens: one chunk is enough
    (34, "nyyyy", 128),
    (34, "yynyy", 64),
    (34, "ynnny", 32),  # with a first chunk alone there is nothing before it
]


@pytest.mark.parametrize(("window", "has", "found"), WINDOWS)
def test_a_prefix_ends_where_windows_were_read(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch, window: int, has: str, found: int
) -> None:
    attention, group = HYBRID.layer_groups
    model = replace(HYBRID, layer_groups=(attention, replace(group, window_tokens=window)))
    client, prompt = server.connect("auto", model, OPTIONS), tokens(1, 160)
    keys = client.keys(prompt)
    assert stored(client.put_chunks(sevens(keys, model, has))) == len(has)
    real = Wanted.decode

    def last_is_corrupt(self: Wanted, arrived: Any) -> Any:
        decoded = real(self, arrived)
        if self.keys[arrived.index] == keys[-1]:
            raise ChunkCorruptError(keys[-1], "made up")
        return decoded

    monkeypatch.setattr(Wanted, "decode", last_is_corrupt)
    out: Any = [np.zeros((2, 2, 2, 160, 8), np.uint16), np.zeros((1, 2, 1, 160, 4), np.uint16)]
    hit = client.get(prompt, out=out)
    assert (hit.tokens, hit.chunks, len(hit.tiers)) == (found, found // 32, found // 32)
    assert (out[0][..., :found, :] == 7).all()
    assert (out[1][..., max(0, found - window + 1) : found, :] == 7).all()


def test_tokens_keys_limits_and_blocks_that_are_none_are_refused(client: Client) -> None:
    verbs = (client.get, client.lookup, client.lease, client.delete, client.stat)
    bad: list[Any] = [[1.5] * 20, [-1] * 20, [1 << 32] * 20, [[1], [2, 3]], "abc", [None] * 20]
    for prompt in bad:
        for call in verbs:
            with pytest.raises(InvalidRequestError, match="tokens="):
                call(prompt)
        with pytest.raises(InvalidRequestError, match="tokens="):
            client.put(prompt, random(2, 2, 2, 20, 8))
    no_keys: list[tuple[str, list[Any]]] = [
        ("keys=", [5, 0, {1: 2}, np.zeros(3)]),
        (r"key=.*: give a list of bytes", [["abc"], "abc", [7], [None], b"abc"]),
    ]
    for match, wrong in no_keys:
        for keys in wrong:
            for call in verbs:
                with pytest.raises(InvalidRequestError, match=match):
                    call(keys=keys)
            with pytest.raises(InvalidRequestError, match=match):
                client.get_chunks(keys)
    with pytest.raises(InvalidRequestError, match="tier="):
        client.clear("\ud800")
    for limit in (1.5, True, -1, 1 << 32, "1"):
        with pytest.raises(InvalidRequestError, match="limit="):
            client.list(limit)  # type: ignore[arg-type]
    cache = PagedCache(HALF, np.zeros((2, 8, 2, 16, 2, 8), np.uint16), LAYERED)
    bad = [[[1], [2, 3]], [True, 2], [True, False], 3, None, [1 << 70], "ab", ["a"]]
    for block_ids in bad:
        with pytest.raises(InvalidRequestError, match="block_ids="):
            cache[block_ids]


def test_no_tokens_are_a_miss_and_neither_tokens_nor_keys_an_error(client: Client) -> None:
    assert client.get([]).tokens == client.get([], start=0).chunks == 0
    assert client.put([], random(2, 2, 2, 1, 8)) == []
    assert client.put(tokens(1, 15), random(2, 2, 2, 15, 8)) == []
    for call in (client.get, client.lookup, client.lease):
        with pytest.raises(InvalidRequestError, match="keys="):
            call()
        with pytest.raises(InvalidRequestError, match="keys="):
            call([1], keys=[])


BAD_KV: list[tuple[Any, str]] = [
    (np.zeros((2, 2, 2, 31, 8), np.float16), "needs 32 tokens"),
    (np.zeros((3, 2, 2, 32, 8), np.float16), r"give \(2, 2, 2, tokens, 8\)"),
    (np.zeros((2, 2, 3, 32, 8), np.float16), r"give \(2, tokens, 8\)"),
    (np.zeros((2, 2, 32, 8), np.float16), r"give \(2, 2, 2, tokens, 8\)"),
    (np.zeros((2, 2, 2, 32, 8), np.float32), "give float16"),
    (np.zeros((2, 2, 2, 32, 8), np.complex64), "give float16"),
    (torch.zeros(2, 2, 2, 32, 8, dtype=torch.float16, device="meta"), "device"),
    ({0: ()}, r"give the layers \[0, 1\]"),
    ({0: (), 1: ()}, "give 2 parts"),
    ({"a": (), 0: ()}, r"\['a', 0\]: give the layers \[0, 1\]"),
    ("abc", "give a tensor"),
    (7, "give a tensor"),
    ([[1, 2]], "give"),
]


def test_kv_of_another_shape_type_or_place_is_refused(client: Client, server: LocalServer) -> None:
    prompt = tokens(1, 32)
    client.put(prompt, random(2, 2, 2, 32, 8))
    with server.unchanged():
        for kv, message in BAD_KV:
            with pytest.raises(LayoutMismatchError, match=f"out=.*{message}"):
                client.get(prompt, out=kv)
            with pytest.raises(LayoutMismatchError, match=f"out=.*{message}"):
                next(client.get_layers(prompt, out=kv))
            with pytest.raises(LayoutMismatchError, match=f"kv=.*{message}"):
                client.put(prompt, kv)


def test_what_cannot_be_written_to_is_no_target(client: Client) -> None:
    prompt, out = tokens(1, 32), random(2, 2, 2, 32, 8)
    client.put(prompt, out)
    out.flags.writeable = False
    with pytest.raises(InvalidRequestError, match="out='read-only'"):
        client.get(prompt, out=out)
    keys, chunk = client.keys(prompt), [[list(layer) for layer in out]]
    for read in (client.get_chunks, lambda *given: list(client.get_chunk_layers(*given))):
        with pytest.raises(InvalidRequestError, match="out='read-only'"):
            read(keys, [chunk])
    pages = [np.broadcast_to(np.float16(0), (4, 2, 16, 2, 8)) for _ in range(2)]
    cache = PagedCache(HALF, pages, "block kv token head dim")
    with pytest.raises(InvalidRequestError, match="out='read-only'"):
        client.get(prompt, out=cache[[0, 1]])
    with pytest.raises(InvalidRequestError, match=r"block_ids=\(0, 4\): the pages have 4"):
        cache[[0, 4]]
    with pytest.raises(InvalidRequestError, match="name each block once"):
        cache[[1, 1]]
    with pytest.raises(LayoutMismatchError, match="in native byte order"):
        client.get(prompt, out=np.zeros((2, 2, 2, 32, 8), ">u2"))
    with pytest.raises(LayoutMismatchError, match="in native byte order"):
        client.put(prompt, np.zeros((2, 2, 2, 32, 8), ">f2"))
    pages = [np.zeros((4, 2, 16, 2, 8), np.float16) for _ in range(2)]
    short = PagedCache(HALF, pages, "block kv token head dim")[[0]]
    with pytest.raises(InvalidRequestError, match="tokens 0 to 32 do not fit that many"):
        client.get(keys=client.keys(prompt), out=short)
    with pytest.raises(LayoutMismatchError, match="kv=16: needs 32 tokens"):
        client.put(prompt, short)
    other = PagedCache(replace(HALF, model_id="other"), pages, "block kv token head dim")
    with pytest.raises(LayoutMismatchError, match="kv='other'"):
        client.put(prompt, other[[0, 1]])


def test_memory_that_overlaps_is_no_target(client: Client) -> None:
    prompt, kv = tokens(1, 32), random(2, 2, 2, 32, 8)
    client.put(prompt, kv)
    one, two = np.zeros((2, 2, 32, 8), np.float16), np.zeros((3, 32, 8), np.float16)
    targets: list[Any] = [
        {0: (one[0], one[1]), 1: (one[0], one[1])},
        {0: tuple(one), 1: (two[:2], two[1:])},
        np.lib.stride_tricks.as_strided(one, kv.shape, (0, 0, 0, 16, 2)),
        torch.zeros(1, 2, 2, 32, 8, dtype=torch.float16).expand(2, 2, 2, 32, 8),
    ]
    for out in targets:
        with pytest.raises(InvalidRequestError, match="out="):
            client.get(prompt, out=out)
    tokens_last = np.zeros((32, 8, 2, 2, 2), np.float16).transpose(2, 3, 4, 0, 1)
    backwards = np.zeros_like(kv)[::-1]
    for fine in (tokens_last, backwards, {0: tuple(tokens_last[0]), 1: tuple(tokens_last[1])}):
        assert client.get(prompt, out=fine).tokens == 32
    assert np.array_equal(tokens_last, kv)
    assert np.array_equal(backwards, kv)


def test_words_of_a_get_or_put_that_cannot_be_are_refused(client: Client) -> None:
    prompt, kv = tokens(1, 32), random(2, 2, 2, 32, 8)
    bad: dict[str, list[Any]] = {
        "start": [33, -1, 1.5, True],
        "timeout": [0, -1.0, float("nan"), 1e9, "1"],
        "accuracy": [7],
    }
    for name, values in bad.items():
        for value in values:
            with pytest.raises(InvalidRequestError, match=f"{name}="):
                client.get(prompt, **{name: value})
    ttls: list[Any] = [-1.0, float("inf"), "1"]
    for ttl in ttls:
        with pytest.raises(InvalidRequestError, match="ttl="):
            client.put(prompt, kv, ttl=ttl)
    unsure: Any = "yes"
    with pytest.raises(InvalidRequestError, match="durable='str'"):
        client.put(prompt, kv, durable=unsure)
    with pytest.raises(InvalidRequestError, match="durable='str'"):
        client.put_layers(prompt, durable=unsure)
    for ttl in (*ttls, 0, 86_401, float(1 << 22)):
        with pytest.raises(InvalidRequestError, match="ttl="):
            client.pin(prompt, ttl=ttl)


def test_kvstore_exports_its_names_when_they_are_used() -> None:
    code = (
        "import sys, kvstore\n"
        "loaded = [name for name in sys.modules if name.startswith('kvstore.')]\n"
        "assert not {'torch', 'grpc', 'numpy'} & set(sys.modules), loaded\n"
        "for name in kvstore.__all__: getattr(kvstore, name)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = kvstore.Nothing


class Config:
    model_type, name_or_path, dtype = "llama", "example/llama", "bfloat16"
    num_hidden_layers, num_attention_heads, num_key_value_heads, hidden_size = 4, 8, 2, 64


class ConfigOfEachLayer(Config):
    """As Gemma 4's: transformers gives no number for all layers."""

    @property
    def head_dim(self) -> int:
        raise RuntimeError("it differs between layers")


def test_a_model_is_read_out_of_a_config() -> None:
    model = Model.from_hf(Config(), revision="8f2c1d4")
    assert model.layer_groups == (
        LayerGroup(LayerKind.attention, DType.bfloat16, (0, 1, 2, 3), 2, 8),
    )
    config: Any = Config()
    config.layer_types, config.sliding_window = ["full_attention", "sliding_attention"] * 2, 32
    groups = Model.from_hf(config, revision="8f2c1d4", dtype="float16").layer_groups
    assert [(group.kind, group.layer_ids, group.window_tokens) for group in groups] == [
        (LayerKind.attention, (0, 2), 0), (LayerKind.window, (1, 3), 32),
    ]  # fmt: skip


def test_a_model_with_latents_keeps_one_for_each_token() -> None:
    config: Any = Config()
    config.kv_lora_rank, config.qk_rope_head_dim = 512, 64
    config.layer_types = ["full_attention", "mlp"] * 2
    assert Model.from_hf(config, revision="8f2c1d4").layer_groups == (
        LayerGroup(LayerKind.mla, DType.bfloat16, (0, 2), 1, 576),
    )


def test_a_config_that_does_not_tell_is_refused_with_what_to_give() -> None:
    def refused(match: str | None = None, **fields: Any) -> None:
        config = Config()
        for field, value in fields.items():
            setattr(config, field, value)
        with pytest.raises(ModelError, match=match):
            Model.from_hf(config, revision="8f2c1d4")

    for kind in ("linear_attention", "mamba", "hybrid", "conv"):
        for field in ("layer_types", "layers_block_type"):
            states = rf"{kind}.*size of the states of layers \[1, 3\]"
            refused(states, **{field: ["full_attention", kind] * 2})
    refused(kv_lora_rank=512)
    refused(layer_types=["full_attention"])
    refused(dtype="int3")
    refused(num_hidden_layers=None)
    refused(is_encoder_decoder=True)
    refused("give it, as dtype='bfloat16'", dtype=None)
    with pytest.raises(ModelError, match="states no heads: it differs between layers"):
        Model.from_hf(ConfigOfEachLayer(), revision="8f2c1d4")
    no_configs: list[Any] = ["Qwen/Qwen3-8B", Path("model"), {"num_hidden_layers": 4}]
    for config in no_configs:
        with pytest.raises(ModelError, match=r"config.*AutoConfig\.from_pretrained"):
            Model.from_hf(config, revision="8f2c1d4")
