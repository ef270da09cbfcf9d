"""Values of the client: options, chunks, pages, shards, states; what is refused by name."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contracts.chunks import make_representation
from helpers.credentials import Authority
from helpers.local_server import LocalServer
from helpers.pages import AXES, engine_pages, rows_of
from helpers.prompts import SMALL, equal, store, tokens
from helpers.shards import TWO_GROUPS, WIDE

from kvstore.client import Access, Chunk, Client, ClientOptions, PagedCache, PlannedChunk, Shard
from kvstore.client.chunk import arrays_of, to_array, to_torch
from kvstore.client.chunk_puts import layout_of
from kvstore.client.paged_cache import page_axes
from kvstore.client.server_state import stat_from_message, status_from_message
from kvstore.codecs.base import AnyTensors
from kvstore.codecs.block_part import BlockPart, to_dense
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError, KVStoreError, LayoutMismatchError, ModelError
from kvstore.proto.types import (
    Accuracy,
    ChunkKey,
    ChunkShard,
    DType,
    Extent,
    KVLayout,
    LayerGroup,
    LayerKind,
    Model,
    PutOutcome,
)

POSITIVE = "give a positive whole number"
PRINTABLE = "give at most 128 printable characters"
UNUSABLE: list[tuple[str, list[Any], str]] = [
    ("transport", ["pigeon"], "use auto, shm, tcp or grpc"),
    ("transport", ["zmq"], "it was removed; use tcp"),
    ("chunk_tokens", [15, 8193], "use 16 to 8192"),
    ("chunk_tokens", [256.0, "256"], "use 16 to 8192, a whole number"),
    ("deadline_ms", [0, -1, 2.5, True], POSITIVE),
    ("deadline_ms", [600_001], "at most 600000"),
    ("name", ["half \ud800", 7], PRINTABLE),
    ("tenant", ["\udfff"], PRINTABLE),
    ("shard", [(0, 2)], "give a Shard, such as Shard.of_rank's"),
    ("staging_bytes", [0], POSITIVE),
    ("retry_after_ms", [0], POSITIVE),
    ("copy_threads", [0], POSITIVE),
]


def test_unusable_option_is_refused_by_name() -> None:
    for field, values, fix in UNUSABLE:
        for value in values:
            with pytest.raises(InvalidRequestError) as caught:
                ClientOptions(**{field: value})
            assert (caught.value.field, str(caught.value)) == (field, f"{field}={value!r}: {fix}")


def test_options_and_access_of_another_kind_are_refused_by_name() -> None:
    given: Any = {"deadline_ms": 5}
    with pytest.raises(InvalidRequestError, match="options='dict': give ClientOptions"):
        Client("127.0.0.1:1", MODEL, given)
    token: Any = "secret"
    with pytest.raises(InvalidRequestError, match=r"access='str': give Access"):
        ClientOptions(access=token)


def test_a_folder_of_assets_may_be_a_string() -> None:
    nowhere: Any = "/nowhere"
    with pytest.raises(InvalidRequestError, match="/nowhere"):
        Client("127.0.0.1:1", MODEL, ClientOptions(assets=nowhere))


def test_files_without_certificates_are_refused_by_name(tmp_path: Path) -> None:
    """gRPC said of them that the address list was empty."""
    text = tmp_path / "text"
    for words in ("", "no certificate"):
        text.write_text(words)
        given: list[tuple[str, Any]] = [("ca", {"ca": text}), ("cert", {"cert": text, "key": text})]
        for name, files in given:
            with pytest.raises(InvalidRequestError, match=f"{name}='{text}': give certificates"):
                Client("127.0.0.1:1", MODEL, ClientOptions(access=Access(**files)))


def test_files_that_cannot_be_read_are_refused_by_the_name_of_their_option(tmp_path: Path) -> None:
    for name in ("token_file", "ca", "cert"):
        for path, reason in (tmp_path, "Is a directory"), (tmp_path / "none", "No such file"):
            files: dict[str, Any] = {name: path} | ({"key": path} if name == "cert" else {})
            with pytest.raises(InvalidRequestError, match=f"^{name}='{path}': {reason}"):
                Client("127.0.0.1:1", MODEL, ClientOptions(access=Access(**files)))


def test_comments_among_certificates_may_be_in_any_language(tmp_path: Path) -> None:
    made = Authority(tmp_path).path
    made.write_text(f"# Főtanúsítvány\n{made.read_text()}", encoding="utf-8")
    with Client("127.0.0.1:1", MODEL, ClientOptions(access=Access(ca=made))) as client:
        assert client.address == "127.0.0.1:1"


def test_addresses_of_hosts_and_of_grpc_are_taken_and_others_refused(tmp_path: Path) -> None:
    for address in ("[::1]:7420", "localhost:7420", "dns:///store.example:7420", "unix:/run/x"):
        with Client(address, SMALL) as client:
            assert client.address == address
    for address in ("127.0.0.1", "http://127.0.0.1:7420", "127.0.0.1:99999", ":7420", ""):
        with pytest.raises(InvalidRequestError, match="address="):
            Client(address, SMALL)
    with pytest.raises(InvalidRequestError, match="model="):
        Client("localhost:7420", "a name")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"assets=.*none': give a folder that exists"):
        Client("127.0.0.1:1", SMALL, ClientOptions(assets=tmp_path / "none"))


KEY = ChunkKey(bytes(32))


def tensors(shape: tuple[int, ...] = (2, 16, 8), dtype: str = "u2") -> list[list[list[Any]]]:
    """Return tensors for two layers of the small model."""
    return [[[np.zeros(shape, dtype) for _ in range(2)] for _ in range(2)]]


def arrays_in(chunk: Chunk, model: Model) -> tuple[KVLayout, AnyTensors]:
    layout = layout_of(chunk, model)
    return layout, arrays_of(layout, chunk.tensors)


WRONG: list[tuple[Any, str]] = [
    (tensors((2, 15, 8)), "tokens=15: a chunk has 16 to 8192 tokens"),
    (tensors((2, 8193, 8)), "tokens=8193: a chunk has"),
    (tensors((3, 16, 8)), r"shape=\(3, 16, 8\): give \(2, 16, 8\)"),
    (tensors((2, 16, 9)), r"shape=\(2, 16, 9\): give \(2, 16, 8\)"),
    (tensors((2, 16)), r"shape=\(2, 16\): give \(2, 16, 8\)"),
    (tensors((2,)), "tensors='list': give components, layers, parts"),
    (tensors(dtype="f4"), "dtype='float32': give bfloat16"),
    (tensors(dtype="f2"), "dtype='float16': give bfloat16"),
    (tensors(dtype="u1"), "dtype='uint8': give bfloat16"),
    ([tensors()[0][:1]], "layers=1: give 2"),
    ([tensors()[0] * 2], "layers=4: give 2"),
    (tensors() * 2, "components=2: give 1"),
    ([[parts[:1] for parts in tensors()[0]]], "parts=1: give 2"),
    ([], "tensors='list': give components, layers, parts"),
    ([[]], "tensors='list': give components, layers, parts"),
    ([[[1, 2]]], "tensors='list': give components, layers, parts"),
    ([[[[1.0], [2.0]]]], "tensors='list': give components, layers, parts"),
    (
        [[[np.zeros((2, 16, 8), "u2"), [1]], tensors()[0][1]]], "tensors='list': give numpy or",
    ),
    (
        [[[torch.zeros(2, 16, 8, dtype=torch.float16)] * 2] * 2], "dtype='float16': give bfloat16",
    ),
]  # fmt: skip


def test_wrong_tensors_are_refused_by_what_is_wrong() -> None:
    for wrong, message in WRONG:
        with pytest.raises(LayoutMismatchError, match=message):
            arrays_in(Chunk(KEY, wrong), SMALL)


def test_bytes_stand_for_fp8() -> None:
    model = make_representation(dtype=DType.float8_e4m3fn)
    assert arrays_in(Chunk(KEY, tensors(dtype="u1")), model)[0].tokens == 16
    with pytest.raises(LayoutMismatchError, match="dtype='int8': give float8_e4m3fn"):
        arrays_in(Chunk(KEY, tensors(dtype="i1")), model)


def test_chunk_is_checked_at_its_birth() -> None:
    for field, values, fix in (
        ("parent", (b"short",), "give 16 bytes"),
        ("content", (bytes(17),), "give 16 bytes"),
        ("position", (-1, 1 << 32), "a token index is in 0..2^32-1"),
        ("prefill_flops", (-1.0, float("inf"), float("nan")), "must be finite, not negative"),
    ):
        for value in values:
            naming: dict[str, Any] = {field: value}
            with pytest.raises(InvalidRequestError) as caught:
                Chunk(KEY, tensors(), **naming)
            assert str(caught.value) == f"{field}={value!r}: {fix}"
            assert caught.value.field == field
            with pytest.raises(InvalidRequestError):
                PlannedChunk(KEY, 16, **naming)


SHAPE = (2, 6, 8)


def test_arrays_and_torch_tensors_of_every_dtype_share_their_memory() -> None:
    for dtype in DType:
        tensor = torch.zeros(SHAPE, dtype=getattr(torch, dtype.name))
        array = to_array(tensor)
        assert (array.shape, array.dtype.itemsize) == (SHAPE, dtype.item_bytes)
        assert DType.parse(str(tensor.dtype)) is dtype
        array.view(np.uint8)[...] = 0x3C
        back = to_torch(array, dtype)
        assert (back.dtype, tuple(back.shape)) == (tensor.dtype, SHAPE)
        for one in (tensor, back):
            assert bool((one.view(torch.uint8) == 0x3C).all())


def test_what_is_no_tensor_of_ours_is_refused() -> None:
    given: list[Any] = [[1.0, 2.0], "text", None, 3]
    for what in given:
        with pytest.raises(LayoutMismatchError, match="give numpy or torch tensors"):
            to_array(what)
    for bad in (torch.zeros(SHAPE, device="meta"), torch.zeros(SHAPE).to_sparse()):
        with pytest.raises(LayoutMismatchError, match="copy it to a dense tensor on the CPU"):
            to_array(bad)
    with pytest.raises(ModelError, match=r"dtype='torch\.float64': use one of bfloat16"):
        DType.parse(str(torch.float64))


MODEL = make_representation(layers=3)


@pytest.mark.parametrize("axes", AXES)
def test_tensors_of_a_span_are_those_of_its_slots(axes: str) -> None:
    pages = engine_pages(MODEL, axes, 6, 8, np.random.default_rng(1))
    assert (pages.blocks, pages.block_tokens) == (6, 8)
    ids = [5, 0, 3, 4]
    rows = rows_of(pages, ids)
    (layers,) = pages[ids].chunk(3, 30)
    for layer, parts in enumerate(layers):
        for number, part in enumerate(parts):
            assert isinstance(part, BlockPart)
            assert np.array_equal(to_dense(part).view(np.int16), rows[layer, number, :, 3:30])


def test_axes_of_one_entry_may_be_left_out() -> None:
    group = LayerGroup(LayerKind.mla, DType.float16, (0, 1), 1, 24)
    mla = replace(MODEL, layer_groups=(group,))
    tensors = [np.zeros((5, 16, 24), np.float16) for _ in range(2)]
    pages = PagedCache(mla, tensors, "block token dim")
    (layers,) = pages[[1, 4]].chunk(0, 20)
    assert [part.shape for parts in layers for part in parts] == [(1, 20, 24)] * 2
    slots = [np.zeros((100, 2, 8), np.float32) for _ in range(6)]
    pairs = list(zip(slots[:3], slots[3:], strict=True))
    flat = PagedCache(make_representation(layers=3, dtype=DType.float32), pairs, "block head dim")
    assert (flat.blocks, flat.block_tokens) == (100, 1)


def test_axes_that_make_no_sense_are_refused() -> None:
    once = "use each of layer block kv token head dim once at most"
    for names, message in (
        ("block token head", "axes='block token head': name block and dim at least"),
        ("block block dim", once),
        ("block dim page", once),
    ):
        with pytest.raises(LayoutMismatchError, match=message):
            page_axes(names)
    unwritten: Any = ("block", "dim")
    with pytest.raises(LayoutMismatchError, match=r"axes=.*: give one string"):
        page_axes(unwritten)


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


PAGE_AXES = "block kv token head dim"
OTHERS: list[tuple[Any, str, str]] = [
    ([numbers(4, 2, 8, 2, 8)] * 2, PAGE_AXES, "layers=2: give pages of 3"),
    ([numbers(4, 8, 2, 8)] * 3, PAGE_AXES, r"does not name the axes of \(4"),
    ([numbers(4, 2, 8, 3, 8)] * 3, PAGE_AXES, "they need 2 heads of 8"),
    ([numbers(4, 2, 8, 2, 9)] * 3, PAGE_AXES, "they need 2 heads of 8"),
    ([numbers(0, 2, 8, 2, 8)] * 3, PAGE_AXES, "they need 2 heads of 8"),
    ([numbers(4, 3, 8, 2, 8)] * 3, PAGE_AXES, "kv=3: give 2 parts"),
    ([numbers(4, 8, 2, 8)] * 3, "block token head dim", "kv=1: give 2 parts"),
    ([(numbers(4, 2, 8, 2, 8),) * 2] * 3, PAGE_AXES, "leave kv out if"),
    ([{"kv": numbers(4, 2, 8, 2, 8)}] * 3, PAGE_AXES, "does not name the axes of"),
    ([{name: numbers(4, 8, 2, 8) for name in "vk"}] * 3, "block token head dim", "not name the"),
    ([[[numbers(4, 8, 2, 8)]] * 2] * 3, "block token head dim", "does not name the axes of"),
    (
        [numbers(4, 2, 8, 2, 8)] * 2 + [numbers(5, 2, 8, 2, 8)],
        PAGE_AXES, "all layers need the same number of blocks",
    ),
    (
        [numbers(4, 2, 8, 2, 8, dtype=torch.float16)] * 3,
        PAGE_AXES, "pages='float16': give bfloat16",
    ),
    ([np.zeros((4, 2, 8, 2, 8), np.uint8)] * 3, PAGE_AXES, "pages='uint8'"),
    (numbers(3, 4, 2, 8, 2, 8), PAGE_AXES, "name the layer axis"),
    ([numbers(4, 2, 8, 2, 8)] * 3, "layer block kv token head dim", "leave layer out if"),
    (numbers(3, 4, 2, 8, 2), "layer block kv token head dim", "does not name the axes"),
]  # fmt: skip


def test_pages_of_another_model_are_refused() -> None:
    for tensors, names, message in OTHERS:
        with pytest.raises(LayoutMismatchError, match=message):
            PagedCache(MODEL, tensors, names)


def test_pages_that_overlap_are_refused() -> None:
    whole = np.zeros((4, 2, 16, 3, 2, 8), np.uint16)  # block kv token layer head dim
    PagedCache(MODEL, [whole[:, :, :, layer] for layer in range(3)], PAGE_AXES)
    with pytest.raises(InvalidRequestError, match="pages='overlapping'"):
        PagedCache(MODEL, [whole[:, :, :, layer] for layer in (0, 1, 1)], PAGE_AXES)
    flat = np.zeros(2 * 16 * 2 * 8, np.uint16)
    strided = np.lib.stride_tricks.as_strided(flat, (4, 2, 16, 2, 8), (0, 512, 32, 16, 2))
    with pytest.raises(InvalidRequestError, match="pages="):
        PagedCache(MODEL, [strided.copy(), strided.copy(), strided], PAGE_AXES)
    with pytest.raises(LayoutMismatchError, match="byte order"):
        PagedCache(MODEL, [strided.astype(">u2")] * 3, PAGE_AXES)


LAYOUT = KVLayout.of(TWO_GROUPS, 16)


def test_layers_are_the_models_and_a_single_span_of_heads_is_not_of_latents() -> None:
    # Layers 0, 2, 5 are attention, 1, 3, 4 are latent.
    assert Shard((1, 5), ((1, 3),)).in_chunk(TWO_GROUPS, LAYOUT) == ChunkShard(
        LAYOUT, (Extent(1, 2, 1, 3), Extent(0, 3, 0, 1))
    )
    assert Shard((2, 3)).in_chunk(TWO_GROUPS, LAYOUT).extents == (Extent(1, 2, 0, 4), None)
    assert Shard().in_chunk(TWO_GROUPS, LAYOUT).is_whole


def test_ranks_share_heads_evenly_or_have_the_same() -> None:
    for ranks, spans in (
        (1, [(0, 4)]),
        (3, [(0, 1), (1, 2), (2, 4)]),
        (8, [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3), (3, 4), (3, 4)]),
    ):
        found = [Shard.of_rank(TWO_GROUPS, rank, ranks).kv_heads for rank in range(ranks)]
        assert [heads for heads, _ in found] == spans
        assert {latent for _, latent in found} == {(0, 1)}


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
        cache = PagedCache(shard.part_of(model), pages, PAGE_AXES)
        assert client.get(prompt, out=cache[[4, 2, 0, 1, 3]]).tokens == 32
        with client.lease(prompt) as lease:
            leased, got = lease.get(), client.get_chunks(lease.keys)
        assert len(got) == 2
        assert all(map(equal, leased, got))
        assert np.array_equal(pages[0][4, 0], own[0, 0, :, :8].swapaxes(0, 1))
    client = connect(stages[0])
    whole = PagedCache(model, [np.zeros((5, 2, 8, 4, 8), np.float16) for _ in range(3)], PAGE_AXES)
    with pytest.raises(LayoutMismatchError, match="give a cache of this Model"):
        client.get(prompt, out=whole[[0, 1, 2, 3, 4]])
    with pytest.raises(LayoutMismatchError, match="whole chunks only"):
        list(client.get_layers(prompt))
    with pytest.raises(LayoutMismatchError, match="whole chunks only"):
        client.put_layers(prompt)


def test_no_message_leaves_the_client(server: LocalServer) -> None:
    client = server.connect()
    keys = store(client, 1, 2)
    status = client.status()
    assert all(map(is_dataclass, [*client.list(), status]))
    first: Any = client.stat(keys=keys)[0]
    with pytest.raises(FrozenInstanceError):
        first.hits = 1
    assert first.copies[0].accuracy is Accuracy.exact
    assert first.components[0].kind is LayerKind.attention
    assert (first.expires_s, first.pinned_s) == (None, 0.0)
    assert status.counters["put_stored_chunks"] == 2
    assert status.directory is None


def test_times_that_are_unknown_are_none_and_numbers_that_stand_for_nothing_errors() -> None:
    assert stat_from_message(pb.ChunkStat(idle_s=-1)).idle_s is None
    assert stat_from_message(pb.ChunkStat(idle_s=2.5, expires_s=9)).expires_s == 9
    with pytest.raises(KVStoreError, match="77"):
        stat_from_message(pb.ChunkStat(copies=[pb.Copy(tier="cpu", accuracy=77)]))


def test_a_server_in_a_directory_names_the_other_nodes() -> None:
    directory = pb.Directory(node_id="a", standing="known")
    directory.nodes.add(node_id="b", grpc_address="b:7420")
    status = status_from_message(pb.StatusResponse(directory=directory))
    assert status.directory is not None
    assert [node.grpc_address for node in status.directory.nodes] == ["b:7420"]
