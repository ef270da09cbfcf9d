"""KV in a GPU's memory goes by way of the host; memory that says it is a GPU's stands in here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from conftest import ServerMaker
from helpers.local_server import DEADLINE_MS, LocalServer
from helpers.prompts import tokens

from kvstore.client import Chunk, Client, ClientOptions, PagedCache
from kvstore.client import chunk as chunk_module
from kvstore.client import kv as kv_module
from kvstore.proto.errors import InvalidRequestError, LayoutMismatchError, TierUnavailableError
from kvstore.proto.types import DType, LayerGroup, LayerKind, Model

MODEL = Model.uniform("far", "8f2c1d4", layers=2, kv_heads=2, head_dim=8, dtype="bfloat16")
COUNT, BLOCKS = 120, list(range(15, 0, -1))
AXES = [
    "layer kv block token head dim", "block kv head token dim", "head block token dim",
    "block layer kv token head dim",
]  # fmt: skip
SIZES = {"layer": 2, "kv": 2, "block": 20, "head": 2, "dim": 8}


class Far(torch.Tensor):
    """Memory that nothing of the host may read or write but by copies."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.near

    @property
    def near(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def far(*shape: int) -> Any:
    return torch.randn(shape).bfloat16().as_subclass(Far)


@pytest.fixture(params=[4096, 2 * 4096, kv_module.STAGED_BYTES], ids=["one", "two", "all"])
def client(
    server: LocalServer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Client:
    """A client that has so many bytes of KV in the host's memory at a time: a chunk is of 4096."""
    monkeypatch.setattr(kv_module, "STAGED_BYTES", request.param)
    return server.connect("auto", MODEL, ClientOptions(chunk_tokens=32, deadline_ms=DEADLINE_MS))


def pages(axes: str, block_tokens: int = 8) -> Any:
    sizes = SIZES | {"token": block_tokens}
    shape = [sizes[name] for name in axes.split()]
    if "layer" in axes:
        return far(*shape)
    return [far(*shape) if "kv" in axes else (far(*shape), far(*shape)) for _ in range(2)]


def copied(kv: Any) -> Any:
    """The same on the host."""
    return [copied(one) for one in kv] if isinstance(kv, list | tuple) else kv.near.clone()


def is_alike(some: Any, others: Any) -> bool:
    if isinstance(some, list | tuple):
        return all(map(is_alike, some, others))
    return torch.equal(some.near, others)


@pytest.mark.parametrize("block_tokens", [8, 12])
@pytest.mark.parametrize("axes", AXES)
def test_blocks_of_a_gpu_hold_what_blocks_of_the_host_do(
    client: Client, axes: str, block_tokens: int
) -> None:
    prompt, there = tokens(1, COUNT), PagedCache(MODEL, pages(axes, block_tokens), axes)
    assert client.put(prompt, there[BLOCKS], start=COUNT) == []
    assert len(client.put(prompt, there[BLOCKS])) == 4
    for start in (0, 4, 37, 70, COUNT):
        out = pages(axes, block_tokens)
        wanted = copied(out)
        hit = client.get(prompt, out=PagedCache(MODEL, out, axes)[BLOCKS], start=start)
        client.get(prompt, out=PagedCache(MODEL, wanted, axes)[BLOCKS], start=start)
        assert hit.tokens == COUNT
        assert is_alike(out, wanted)
    out = pages(axes, block_tokens)
    for layer in client.get_layers(prompt, out=PagedCache(MODEL, out, axes)[BLOCKS]):
        assert len(layer.tensors) == 4
    client.put(tokens(2, COUNT), PagedCache(MODEL, out, axes)[BLOCKS])
    whole = client.get(prompt).kv
    assert torch.equal(client.get(tokens(2, COUNT)).kv, whole)
    out, short = PagedCache(MODEL, pages(axes, block_tokens), axes)[BLOCKS], tokens(3, 32)
    assert client.get([*prompt[:32], *short], out=out).tokens == 32  # part of a block
    client.put(short, out)
    assert torch.equal(client.get(short).kv, whole[..., :32, :])


def test_tensors_of_a_gpu_go_out_and_come_back_in_each_form(client: Client) -> None:
    prompt, kv = tokens(1, COUNT), far(2, 2, 2, COUNT, 8)
    assert client.put(prompt, kv, start=COUNT) == client.put(prompt[:9], kv) == []
    assert len(client.put(prompt, kv, start=64)) == 2
    assert len(client.put(prompt, {at: tuple(kv[at]) for at in range(2)})) == 4
    assert torch.equal(client.get(prompt).kv, kv.near)
    out = far(2, 2, 2, 140, 8)
    before = out.near.clone()
    assert client.get([*prompt[:96], *tokens(2, 40)], out=out, start=40).tokens == 96
    assert torch.equal(out.near[..., 32:96, :], kv.near[..., 32:96, :])
    assert torch.equal(out.near[..., :32, :], before[..., :32, :])
    assert torch.equal(out.near[..., 96:, :], before[..., 96:, :]), "what was not there"
    layers = {at: (far(2, COUNT, 8), far(2, COUNT, 8)) for at in range(2)}
    seen, unread = [], layers[1][1].near.clone()
    for layer in client.get_layers(prompt, out=layers):
        seen.append(layer.id)
        assert torch.equal(layers[1][1].near, unread) == (layer.id == 0)
        assert is_alike(layers[layer.id], kv.near[layer.id])
    assert seen == [0, 1]
    other = tokens(3, COUNT)
    with client.put_layers(other) as put:
        for at in range(2):
            put.layer(at, kv[at])
    assert torch.equal(client.get(other).kv, kv.near)


def test_no_more_of_a_prompt_is_in_memory_of_the_host_than_its_limit(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, rooms, most_bytes = chunk_module.host_tensor, list[Any](), 0

    def counted(*given: Any) -> torch.Tensor:
        nonlocal most_bytes
        room = make(*given)
        rooms.append(ref(room.untyped_storage()))
        kept = [one for each in rooms if (one := each()) is not None]
        most_bytes = max(most_bytes, sum(one.nbytes() for one in kept))
        return room

    monkeypatch.setattr(kv_module, "host_tensor", counted)
    prompt, kv, out = tokens(1, COUNT), far(2, 2, 2, COUNT, 8), far(2, 2, 2, COUNT, 8)
    client.put(prompt, kv)
    assert client.get(prompt, out=out).tokens == COUNT
    assert torch.equal(out.near, kv.near)
    assert 0 < most_bytes <= min(kv_module.STAGED_BYTES, kv.near.nbytes)


def test_batches_of_the_server_that_end_within_a_part_bring_every_chunk(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_module, "STAGED_BYTES", 4 * 4096)
    server = make_server("--limits", "max_batch_chunks=3")
    for transport in ("auto", "grpc"):
        options = ClientOptions(chunk_tokens=32, deadline_ms=DEADLINE_MS)
        client = server.connect(transport, MODEL, options)
        prompt, kv, out = tokens(1, 384), far(2, 2, 2, 384, 8), far(2, 2, 2, 384, 8)
        if transport == "auto":
            client.put(prompt, kv)
            stored = kv
        assert client.get(prompt, out=out).tokens == 384
        assert torch.equal(out.near, stored.near)


def test_windows_before_the_start_are_the_callers_on_a_gpu_too(server: LocalServer) -> None:
    groups = (
        LayerGroup(LayerKind.attention, DType.bfloat16, (0, 2), 2, 8),
        LayerGroup(LayerKind.window, DType.bfloat16, (1,), 1, 4, window_tokens=9),
    )
    options = ClientOptions(chunk_tokens=32, deadline_ms=DEADLINE_MS)
    client = server.connect("auto", replace(MODEL, layer_groups=groups), options)
    prompt, kv = tokens(1, 96), [far(2, 2, 2, 96, 8), far(1, 2, 1, 96, 4)]
    client.put(prompt, kv)
    out = [far(2, 2, 2, 96, 8), far(1, 2, 1, 96, 4)]
    wanted = copied(out)
    assert client.get(prompt, out=out, start=40).tokens == 96
    client.get(prompt, out=wanted, start=40)
    assert is_alike(out, wanted)


def test_what_cannot_be_of_a_gpus_tensors_is_refused_by_name(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, near = tokens(1, 32), torch.zeros(2, 32, 8, dtype=torch.bfloat16)
    client.put(prompt, far(2, 2, 2, 32, 8))
    bad = [
        far(2, 2, 2, 31, 8), far(2, 2, 3, 32, 8), far(2, 2, 32, 8), far(8), far(),
        [far(2, 2, 2, 32, 8)] * 2,
        far(2, 2, 2, 32, 8).float(), far(2), {0: far(2, 2, 32, 8), 1: far(2, 2, 32, 8)},
        {0: (far(), far()), 1: (far(), far())}, {0: (near, far(2, 32, 8)), 1: (near, near)},
    ]  # fmt: skip
    for kv in bad:
        with pytest.raises(LayoutMismatchError, match="out="):
            client.get(prompt, out=kv)
        with pytest.raises(LayoutMismatchError, match="kv="):
            client.put(prompt, kv)
    for axes, some in (("block kv head token dim", pages(AXES[0])), (AXES[0], pages(AXES[1])[0])):
        with pytest.raises(LayoutMismatchError):
            PagedCache(MODEL, some, axes)
    (key,), blocks = client.keys(tokens(8, 32)), PagedCache(MODEL, pages(AXES[0]), AXES[0])[BLOCKS]
    with pytest.raises(LayoutMismatchError, match="cuda"):
        client.put_chunks([Chunk(key, blocks.chunk(0, 32))])
    assert client.lookup(keys=[key]).ready == 0

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    assert client.get(tokens(9, 32), out=far(2, 2, 2, 32, 8)).tokens == 0
    monkeypatch.setattr(kv_module, "host_tensor", full)
    assert client.get(tokens(9, 32), out=far(2, 2, 2, 32, 8)).tokens == 0, "a miss needs no room"
    with pytest.raises(TierUnavailableError, match="no memory"):
        client.put(prompt, far(2, 2, 2, 32, 8))
    monkeypatch.undo()
    monkeypatch.setattr(Far, "copy_", full, raising=False)
    with pytest.raises(TierUnavailableError, match="no memory"):
        client.get(prompt, out=far(2, 2, 2, 32, 8))
    two = far(2, 2, 32, 8)
    with pytest.raises(InvalidRequestError, match="overlapping"):
        client.get(prompt, out={0: (two[0], two[1]), 1: (two[1], two[0])})
    axes = "block kv head token dim"
    with pytest.raises(InvalidRequestError, match="overlapping"):
        PagedCache(MODEL, [far(20, 2, 2, 8, 8)] * 2, axes)
    with pytest.raises(LayoutMismatchError, match="leave kv out"):
        PagedCache(MODEL, [(far(20, 2, 2, 8, 8), far(20, 2, 2, 8, 8)) for _ in range(2)], axes)
    with pytest.raises(LayoutMismatchError, match="some on the host"):
        PagedCache(MODEL, [far(20, 2, 2, 8, 8), torch.zeros(20, 2, 2, 8, 8).bfloat16()], axes)


def test_tensors_of_inference_and_of_unsigned_integers_are_written_to(client: Client) -> None:
    prompt, kv = tokens(1, 32), far(2, 2, 2, 32, 8)
    client.put(prompt, kv)
    with torch.inference_mode():
        out, cache = far(2, 2, 2, 32, 8), pages(AXES[0])
    assert client.get(prompt, out=out).tokens == 32
    assert torch.equal(out.near, kv.near)
    blocks = PagedCache(MODEL, cache, AXES[0])[BLOCKS]
    assert client.get(prompt, out=blocks).tokens == 32
    numbers = torch.zeros(2, 2, 20, 8, 2, 8, dtype=torch.uint16).as_subclass(Far)
    blocks = PagedCache(MODEL, numbers, AXES[0])[BLOCKS]
    assert client.get(prompt, out=blocks).tokens == 32
    assert torch.equal(
        numbers.near, torch.where(numbers.near != 0, cache.near.view(torch.uint16), 0)
    )
    assert client.put(prompt, blocks)
