"""Pages of SGLang's host pools, by what its pools are in memory; SGLang itself is not needed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.local_server import LocalServer

from kvstore.client.engines.identity import BYTE_ROWS, byte_tensors
from kvstore.client.engines.sglang.pages import (
    PageSettings,
    PageStore,
    RankInfo,
    ServerArgsDigest,
    digests_of,
    kv_model,
)
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.types import LayerKind

ServerMaker = Callable[..., LocalServer]
LAYERS, HEADS, DIM, SIZE, PAGES = 3, 2, 8, 16, 6
TOKENS = SIZE * PAGES
MHA_SHAPES = {
    "layer_first": (2, LAYERS, TOKENS, HEADS, DIM),
    "page_first": (2, TOKENS, LAYERS, HEADS, DIM),
    "page_first_direct": (2, PAGES, LAYERS, SIZE, HEADS, DIM),
    "page_head": (2, PAGES, HEADS, SIZE, LAYERS, DIM),
}
MLA_SHAPES = {
    "layer_first": (LAYERS, TOKENS, 1, DIM),
    "page_first": (TOKENS, LAYERS, 1, DIM),
    "page_first_direct": (PAGES, LAYERS, SIZE, 1, DIM),
}
CASES = [(False, layout) for layout in MHA_SHAPES] + [(True, layout) for layout in MLA_SHAPES]
RANK = RankInfo(is_mla=False)
HASHES = [hashlib.sha256(bytes([number])).hexdigest() for number in range(PAGES)]


@dataclass
class Pool:
    """A host pool as SGLang lays it out: its buffer, and how."""

    layout: str
    kv_buffer: torch.Tensor
    page_size: int = SIZE
    start_layer: int = 0
    layer_num: int = LAYERS
    beside_bytes: int = 0
    """What a page has that is not in the buffer."""

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        page_bytes = self.kv_buffer.nbytes // PAGES + self.beside_bytes
        return torch.zeros(page_bytes, dtype=torch.uint8)

    @classmethod
    def make(cls, layout: str, is_mla: bool, dtype: torch.dtype = torch.bfloat16) -> Pool:
        shape = (MLA_SHAPES if is_mla else MHA_SHAPES)[layout]
        return cls(layout, torch.zeros(shape, dtype=dtype))

    def rows(self, is_mla: bool) -> torch.Tensor:
        """Return a view (parts, layers, tokens, heads, dim) of the buffer, however it lies."""
        whole = self.kv_buffer.unsqueeze(0) if is_mla else self.kv_buffer
        if self.layout == "layer_first":
            return whole
        if self.layout == "page_first":
            return whole.transpose(1, 2)
        if self.layout == "page_first_direct":
            return whole.permute(0, 2, 1, 3, 4, 5).flatten(2, 3)
        return whole.permute(0, 4, 1, 3, 2, 5).flatten(2, 3)


def numbers(is_mla: bool) -> torch.Tensor:
    """Return what the pool is to hold: (parts, layers, tokens, heads, dim), all different."""
    shape = (1 if is_mla else 2, LAYERS, TOKENS, 1 if is_mla else HEADS, DIM)
    draw = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=draw).to(torch.bfloat16)


def fill(pool: Pool, is_mla: bool) -> None:
    """Lay the numbers into the pool by its own indices, one by one."""
    values = numbers(is_mla)
    for part, layer, token, head in torch.cartesian_prod(
        *map(torch.arange, values.shape[:4])
    ).tolist():
        row = values[part, layer, token, head]
        page, slot = divmod(token, SIZE)
        at = {
            "layer_first": (part, layer, token, head),
            "page_first": (part, token, layer, head),
            "page_first_direct": (part, page, layer, slot, head),
            "page_head": (part, page, head, slot, layer),
        }[pool.layout]
        pool.kv_buffer[at[1:] if is_mla else at] = row


@pytest.mark.parametrize("accuracy", ["bounded", "approximate", "lossy", 1])
def test_an_accuracy_other_than_exact_is_refused_by_name(accuracy: object) -> None:
    extra = {"model_revision": "c" * 40, "accuracy": accuracy}
    with pytest.raises(InvalidRequestError, match=r"accuracy=.*exact"):
        PageSettings.parse(extra, "tiny")
    assert PageSettings.parse({**extra, "accuracy": "exact"}, "tiny").accuracy == "exact"


def settings_for(address: str = "127.0.0.1:1", name: str = "tiny", **more: Any) -> PageSettings:
    engine = ServerArgsDigest(kv_cache_dtype=str(more.pop("kv_cache_dtype", "")))
    return PageSettings.parse(
        {"address": address, "model_revision": "c" * 40, "deadline_ms": 20_000, **more},
        name,
        engine,
    )


@pytest.fixture
def connect(server: LocalServer) -> Iterator[Callable[..., PageStore]]:
    made: list[PageStore] = []

    def make(pool: Pool, rank: RankInfo = RANK, **changes: Any) -> PageStore:
        made.append(PageStore(pool, rank, settings_for(server.address, **changes)))
        return made[-1]

    yield make
    for store in made:
        store.client.close()


def pages(store: PageStore, *numbers: int) -> list[object]:
    return [store.page(number) for number in numbers]


@pytest.mark.parametrize(("is_mla", "layout"), CASES)
def test_what_one_layout_stored_every_layout_reads(
    connect: Callable[..., PageStore], is_mla: bool, layout: str
) -> None:
    rank = replace(RANK, is_mla=is_mla)
    source = Pool.make(layout, is_mla)
    fill(source, is_mla)
    one = connect(source, rank)
    assert one.count(HASHES) == 0
    assert one.store(HASHES[:4], pages(one, 0, 1, 2, 3), ()) == [True] * 4  # type: ignore[arg-type]
    assert one.count(HASHES) == 4
    for other in MLA_SHAPES if is_mla else MHA_SHAPES:
        pool = Pool.make(other, is_mla)
        reader = connect(pool, rank)
        assert reader.load(HASHES, pages(reader, 5, 1, 2, 3, 4, 0)) == 4  # type: ignore[arg-type]
        wanted, found = numbers(is_mla), pool.rows(is_mla)
        span = SIZE * 4
        assert torch.equal(found[:, :, SIZE:span], wanted[:, :, SIZE:span])
        assert torch.equal(found[:, :, -SIZE:], wanted[:, :, :SIZE]), "page 0 was put at 5"
        assert not found[:, :, span:-SIZE].any(), "pages that nobody stored were written to"


@pytest.mark.parametrize(("is_mla", "layout"), CASES)
def test_flat_pages_are_the_pages_of_the_pool_in_its_own_order(
    connect: Callable[..., PageStore], is_mla: bool, layout: str
) -> None:
    pool = Pool.make(layout, is_mla)
    fill(pool, is_mla)
    store = connect(pool, replace(RANK, is_mla=is_mla))
    store.store(HASHES[:2], pages(store, 0, 1), ())  # type: ignore[arg-type]
    start, first = (0, 0 if is_mla else 1)
    whole = pool.kv_buffer
    if layout in ("layer_first", "page_first"):
        axis = first + (layout == "layer_first")
        wanted = whole.narrow(axis, start, SIZE).flatten()
    else:
        wanted = whole.narrow(first, start, 1).flatten()
    flat = torch.zeros_like(wanted)
    assert store.load(HASHES[:1], [store.flat(flat)]) == 1
    assert torch.equal(flat, wanted)


def test_the_same_pages_are_known_by_any_number_of_writers(
    connect: Callable[..., PageStore],
) -> None:
    pool = Pool.make("page_first", is_mla=False)
    fill(pool, is_mla=False)
    one, other = connect(pool), connect(pool)
    assert one.store(HASHES[:2], pages(one, 0, 1), ()) == [True, True]  # type: ignore[arg-type]
    assert other.store(HASHES[:3], pages(other, 0, 1, 2), ()) == [True] * 3  # type: ignore[arg-type]
    assert (other.stats().existing_chunks, other.stats().stored_chunks) == (2, 1)


def test_pages_are_stored_as_what_follows_the_pages_before_them(
    connect: Callable[..., PageStore], server: LocalServer
) -> None:
    pool = Pool.make("page_first", is_mla=False)
    store = connect(pool)
    store.store(HASHES[:2], pages(store, 0, 1), ())  # type: ignore[arg-type]
    store.store(HASHES[2:4], pages(store, 2, 3), HASHES[:2])  # type: ignore[arg-type]
    stats = store.client.stat(keys=store._keys(digests_of(HASHES[:4])))
    parents = [one.parent.hex() for one in stats]
    assert parents == [bytes(16).hex(), *(name[:32] for name in HASHES[:3])]


def test_pages_that_lack_a_place_are_not_stored_and_said_not_to_be(
    connect: Callable[..., PageStore],
) -> None:
    store = connect(Pool.make("page_first", is_mla=False))
    assert store.store(HASHES[:2], pages(store, 0), ()) == [False] * 2  # type: ignore[arg-type]
    assert store.count(HASHES[:2]) == 0


def test_a_page_of_bytes_is_never_a_copy() -> None:
    for page in (np.zeros(256, np.uint8), torch.zeros(256, dtype=torch.uint8)):
        rows: Any = byte_tensors(page)[0][0][0]
        rows[0, 3, 1] = 7
        assert page[3 * 256 // BYTE_ROWS + 1] == 7
    with pytest.raises(ValueError, match="follow each other"):
        byte_tensors(np.zeros((16, 8), np.uint8).T)
    with pytest.raises(RuntimeError, match="view"):
        byte_tensors(torch.zeros(16, 8, dtype=torch.uint8).T)


@pytest.mark.parametrize(
    "changed",
    [
        replace(RANK, pp_rank=1, pp_size=2),
        replace(RANK, cp_rank=1, cp_size=2),
    ],
    ids=str,
)
def test_stages_never_read_each_others_pages(
    connect: Callable[..., PageStore], changed: RankInfo
) -> None:
    pool = Pool.make("page_first", is_mla=False)
    fill(pool, is_mla=False)
    store = connect(pool)
    store.store(HASHES[:1], pages(store, 0), ())  # type: ignore[arg-type]
    other = connect(Pool.make("page_first", is_mla=False), changed)
    assert other.count(HASHES[:1]) == 0
    assert other.store(HASHES[:1], pages(other, 0), ()) == [True]  # type: ignore[arg-type]
    assert store.load(HASHES[:1], pages(store, 5)) == 1  # type: ignore[arg-type]
    rows = pool.rows(is_mla=False)
    assert torch.equal(rows[:, :, -SIZE:], rows[:, :, :SIZE]), "another rank's page was read"


def test_ranks_of_a_latent_model_share_their_pages(connect: Callable[..., PageStore]) -> None:
    rank = replace(RANK, is_mla=True, tp_size=2)
    pool = Pool.make("page_first", is_mla=True)
    writer, reader = connect(pool, rank), connect(pool, replace(rank, tp_rank=1))
    writer.store(HASHES[:1], pages(writer, 0), ())  # type: ignore[arg-type]
    assert reader.count(HASHES[:1]) == 1


@pytest.mark.parametrize(
    "change",
    [{"model_revision": "d" * 40}, {"adapter_digest": "lora"}, {"name": "other"}],
    ids=str,
)
def test_other_weights_have_other_pages(
    connect: Callable[..., PageStore], change: dict[str, str]
) -> None:
    pool = Pool.make("page_first", is_mla=False)
    store = connect(pool)
    store.store(HASHES[:1], pages(store, 0), ())  # type: ignore[arg-type]
    assert connect(pool, **change).count(HASHES[:1]) == 0


def test_another_dtype_is_another_representation() -> None:
    settings = settings_for()
    half, full = (
        kv_model(Pool.make("page_head", False, dtype), RANK, settings)
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert half.layer_groups[0].dtype.name == "bfloat16"
    assert full.layer_groups[0].dtype.name == "float32"
    group = half.layer_groups[0]
    assert (group.kind, group.kv_heads, group.head_dim) == (LayerKind.attention, HEADS, DIM)


@pytest.mark.parametrize(
    ("pool", "rank", "words"),
    [
        (Pool("page_unified", torch.zeros(1)), RANK, "layout='page_unified': use one of"),
        (Pool("page_head", torch.zeros(1)), replace(RANK, is_mla=True), "layout='page_head'"),
        (Pool("page_first", torch.zeros(1), page_size=1), RANK, "page_size=1: start SGLang with"),
    ],
)
def test_pools_that_are_not_understood_are_refused_by_name(
    pool: Pool, rank: RankInfo, words: str
) -> None:
    with pytest.raises(ModelError) as caught:
        kv_model(pool, rank, settings_for())
    assert words in str(caught.value)


def test_pools_that_keep_scales_beside_their_pages_are_refused() -> None:
    """As those of MXFP8: pages would come back with whatever scales lie there by then."""
    pool = replace(Pool.make("page_first", False), beside_bytes=64)
    with pytest.raises(ModelError, match="lie in its buffer"):
        kv_model(pool, RANK, settings_for())


def test_bytes_are_named_by_the_type_that_the_engine_was_started_with() -> None:
    """SGLang keeps both kinds of fp8 as bytes: an engine of one would read the other's."""
    settings = settings_for()
    pool = Pool.make("page_first", False, torch.uint8)
    with pytest.raises(ModelError, match="dtype='uint8': nobody says"):
        kv_model(pool, RANK, settings)
    one, other = (
        kv_model(pool, RANK, settings_for(kv_cache_dtype=name)) for name in ("fp8_e4m3", "fp8_e5m2")
    )
    assert (one.quantization, other.quantization) == ("bytes-of:fp8_e4m3", "bytes-of:fp8_e5m2")


def test_settings_are_read_and_refused_by_name() -> None:
    path = f"/models/hub/models--tiny/snapshots/{'a' * 40}"
    assert PageSettings.parse({}, path).weights.revision == "a" * 40
    extra = {"address": "h:1", "model_revision": "8f2c1d4", "interface_v1": 1, "prefetch_x": 9}
    found = PageSettings.parse(extra, "tiny")
    assert (found.address, found.weights.revision, found.deadline_ms) == ("h:1", "8f2c1d4", 2000)
    with pytest.raises(ModelError, match=r"model_revision='':.* 'tiny' is no folder"):
        PageSettings.parse({}, "tiny")
    with pytest.raises(InvalidRequestError, match="reset_on_flush='no': give a value of type bool"):
        PageSettings.parse({"reset_on_flush": "no"}, path)
    with pytest.raises(InvalidRequestError, match="adress='h:1': use"):
        PageSettings.parse({"adress": "h:1"}, path)


def test_a_name_that_is_no_hash_is_a_counted_miss(connect: Callable[..., PageStore]) -> None:
    store = connect(Pool.make("page_first", is_mla=False))
    assert store.count(["no hash"]) == 0
    assert store.store(["ab"], pages(store, 0), ()) == [False]  # type: ignore[arg-type]
    assert store.stats().load_errors == {"InvalidRequestError": 1}
    assert store.stats().store_errors == {"InvalidRequestError": 1}


def test_without_a_server_pages_are_missed_and_not_kept_and_nothing_raises() -> None:
    pool = Pool.make("page_first", is_mla=False)
    store = PageStore(pool, RANK, settings_for(deadline_ms=500))
    try:
        assert store.count(HASHES) == 0
        assert store.load(HASHES[:1], pages(store, 0)) == 0  # type: ignore[arg-type]
        assert store.store(HASHES[:1], pages(store, 0), ()) == [False]  # type: ignore[arg-type]
        store.clear()
        assert store.stats().miss_tokens == SIZE
    finally:
        store.client.close()


def half_of(pool: Pool, rank: int) -> Pool:
    """Return the pool of a rank that has one of two heads, with what *pool* holds of it."""
    heads = pool.kv_buffer.chunk(2, dim=2 if pool.layout == "page_head" else -2)
    return Pool(pool.layout, heads[rank].contiguous())


@pytest.mark.parametrize("layout", MHA_SHAPES)
def test_ranks_share_pages_with_an_engine_of_one(
    connect: Callable[..., PageStore], layout: str
) -> None:
    pool = Pool.make(layout, is_mla=False)
    fill(pool, is_mla=False)
    ranks = [replace(RANK, tp_rank=rank, tp_size=2) for rank in range(2)]
    halves = [connect(half_of(pool, number), rank) for number, rank in enumerate(ranks)]
    assert halves[0].store(HASHES[:1], pages(halves[0], 0), ()) == [True]  # type: ignore[arg-type]
    assert halves[1].count(HASHES[:1]) == 0, "half of a page was shown"
    assert halves[1].store(HASHES[:1], pages(halves[1], 0), ()) == [True]  # type: ignore[arg-type]
    room = Pool.make("page_first", is_mla=False)
    one = connect(room)
    assert one.load(HASHES[:1], pages(one, 3)) == 1  # type: ignore[arg-type]
    wanted = numbers(is_mla=False)[:, :, :SIZE]
    assert torch.equal(room.rows(is_mla=False)[:, :, 3 * SIZE : 4 * SIZE], wanted)
    for number, half in enumerate(halves):
        assert half.load(HASHES[:1], pages(half, 2)) == 1  # type: ignore[arg-type]
        found = half._pool.rows(is_mla=False)
        assert torch.equal(found[:, :, 2 * SIZE : 3 * SIZE], wanted[:, :, :, [number]])


def test_ranks_that_have_copies_of_heads_share_pages_with_an_engine_of_one(
    connect: Callable[..., PageStore],
) -> None:
    pool = Pool.make("page_first", is_mla=False)
    fill(pool, is_mla=False)
    ranks = [
        connect(half_of(pool, number // 2), replace(RANK, tp_rank=number, tp_size=4), kv_heads=2)
        for number in range(4)
    ]
    for number in (1, 2):  # whichever has a head
        assert ranks[number].store(HASHES[:1], pages(ranks[number], 0), ()) == [True]  # type: ignore[arg-type]
    one = connect(Pool.make("page_first", is_mla=False))
    assert one.load(HASHES[:1], pages(one, 3)) == 1  # type: ignore[arg-type]
    wanted = numbers(is_mla=False)[:, :, :SIZE]
    for number, rank in enumerate(ranks):
        assert rank.load(HASHES[:1], pages(rank, 2)) == 1  # type: ignore[arg-type]
        found = rank._pool.rows(is_mla=False)
        assert torch.equal(found[:, :, 2 * SIZE : 3 * SIZE], wanted[:, :, :, [number // 2]])


@pytest.mark.parametrize("kv_heads", [3, 4])
def test_a_number_of_heads_that_ranks_do_not_have_is_refused(kv_heads: int) -> None:
    settings = settings_for(kv_heads=kv_heads)
    with pytest.raises(ModelError, match="kv_heads"):
        kv_model(Pool.make("page_first", False), replace(RANK, tp_size=4), settings)


@pytest.mark.parametrize("kv_heads", [-1, "8", True])
def test_what_is_no_number_of_heads_is_refused(kv_heads: object) -> None:
    with pytest.raises(InvalidRequestError, match="kv_heads"):
        PageSettings.parse({"model_revision": "8f2c1d4", "kv_heads": kv_heads}, "tiny")


def test_clearing_forgets_this_stages_pages_alone(connect: Callable[..., PageStore]) -> None:
    pool = Pool.make("page_first", is_mla=False)
    one, other = connect(pool), connect(pool, replace(RANK, pp_rank=1, pp_size=2))
    for store in (one, other):
        store.store(HASHES[:2], pages(store, 0, 1), ())  # type: ignore[arg-type]
    one.clear()
    assert (one.count(HASHES), other.count(HASHES)) == (0, 2)
