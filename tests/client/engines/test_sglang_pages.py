"""Pages of SGLang's host pools, by what its pools are in memory; SGLang itself is not needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.local_server import DEADLINE_MS, LocalServer
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.chunk import LayerTensors
from kvstore.client.engines.identity import BYTE_ROWS, byte_tensors
from kvstore.client.engines.sglang.pages import (
    BATCH,
    UNKNOWN,
    AuxPoolStore,
    PageSettings,
    PageStore,
    RankInfo,
    ServerArgsDigest,
    aux_model,
    digests_of,
    kv_model,
    prefix_ends,
)
from kvstore.proto.errors import InvalidRequestError, ModelError

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


def hashes(count: int) -> list[str]:
    return [sha256(bytes([number])).hexdigest() for number in range(count)]


HASHES = hashes(PAGES)


@dataclass
class Pool:
    """A host pool as SGLang lays it out: its buffer, and how."""

    layout: str
    kv_buffer: torch.Tensor
    page_size: int = SIZE
    start_layer: int = 0
    layer_num: int = LAYERS
    is_mla: bool = False
    beside_bytes: int = 0
    """What a page has that is not in the buffer."""

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        page_bytes = self.kv_buffer.nbytes // PAGES + self.beside_bytes
        return torch.zeros(page_bytes, dtype=torch.uint8)

    @classmethod
    def make(cls, layout: str, is_mla: bool = False, dtype: torch.dtype = torch.bfloat16) -> Pool:
        shape = (MLA_SHAPES if is_mla else MHA_SHAPES)[layout]
        return cls(layout, torch.zeros(shape, dtype=dtype), is_mla=is_mla)

    @property
    def rows(self) -> torch.Tensor:
        """A view (parts, layers, pages, slots, heads, dim) of the buffer, however it lies."""
        whole = self.kv_buffer.unsqueeze(0) if self.is_mla else self.kv_buffer
        if self.layout == "page_head":
            return whole.permute(0, 4, 1, 3, 2, 5)
        whole = whole if self.layout == "layer_first" else whole.transpose(1, 2)
        if self.layout == "page_first_direct":
            return whole
        return whole.view(*whole.shape[:2], PAGES, SIZE, *whole.shape[3:])


def numbers(is_mla: bool = False) -> torch.Tensor:
    """Return what the pool is to hold: (parts, layers, pages, slots, heads, dim), all different."""
    shape = (1 if is_mla else 2, LAYERS, PAGES, SIZE, 1 if is_mla else HEADS, DIM)
    draw = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=draw).to(torch.bfloat16)


def filled(layout: str, is_mla: bool = False) -> Pool:
    pool = Pool.make(layout, is_mla)
    pool.rows.copy_(numbers(is_mla))
    return pool


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


def pages(store: PageStore, *numbers: int) -> list[LayerTensors]:
    return [store.page(number) for number in numbers]


@pytest.mark.parametrize(
    ("is_mla", "layout"),
    [(False, "layer_first"), (False, "page_head"), (True, "page_first_direct")],
)
def test_what_one_layout_stored_every_layout_reads(
    connect: Callable[..., PageStore], is_mla: bool, layout: str
) -> None:
    rank = replace(RANK, is_mla=is_mla)
    one = connect(filled(layout, is_mla), rank)
    assert one.count(HASHES) == 0
    assert one.store(HASHES[:4], pages(one, 0, 1, 2, 3), ()) == [True] * 4
    assert one.count(HASHES) == 4
    for other in MLA_SHAPES if is_mla else MHA_SHAPES:
        pool = Pool.make(other, is_mla)
        reader = connect(pool, rank)
        assert reader.load(HASHES, pages(reader, 5, 1, 2, 3, 4, 0)) == 4
        wanted, found = numbers(is_mla), pool.rows
        assert torch.equal(found[:, :, 1:4], wanted[:, :, 1:4])
        assert torch.equal(found[:, :, 5], wanted[:, :, 0]), "page 0 was put at 5"
        assert not found[:, :, 4].any(), "pages that nobody stored were written to"


def test_flat_pages_are_the_pages_of_the_pool_in_its_own_order(
    connect: Callable[..., PageStore],
) -> None:
    for is_mla, layout in CASES:
        pool = filled(layout, is_mla)
        store = connect(pool, replace(RANK, is_mla=is_mla))
        assert store.store(HASHES[:2], pages(store, 0, 1), ()) == [True, True]
        first, whole = 0 if is_mla else 1, pool.kv_buffer
        if layout in ("layer_first", "page_first"):
            wanted = whole.narrow(first + (layout == "layer_first"), 0, SIZE).flatten()
        else:
            wanted = whole.narrow(first, 0, 1).flatten()
        flat = torch.zeros_like(wanted)
        assert store.load(HASHES[:1], [store.page(0, flat)]) == 1
        assert torch.equal(flat, wanted), layout
    assert (store.stats().existing_chunks, store.stats().stored_chunks) == (2, 0), "any writer's"


def test_pages_are_stored_as_what_follows_the_pages_before_them(
    connect: Callable[..., PageStore], server: LocalServer
) -> None:
    pool = Pool.make("page_first")
    store = connect(pool)
    store.store(HASHES[:2], pages(store, 0, 1), ())
    store.store(HASHES[2:4], pages(store, 2, 3), HASHES[:2])
    stats = store.client.stat(keys=store.keys_of(digests_of(HASHES[:4])))
    parents = [one.parent.hex() for one in stats]
    assert parents == [bytes(16).hex(), *(name[:32] for name in HASHES[:3])]


def test_a_page_of_bytes_is_never_a_copy() -> None:
    page = torch.zeros(256, dtype=torch.uint8)
    rows: Any = byte_tensors(page)[0][0][0]
    rows[0, 3, 1] = 7
    assert page[3 * 256 // BYTE_ROWS + 1] == 7
    with pytest.raises(RuntimeError, match="view"):
        byte_tensors(torch.zeros(16, 8, dtype=torch.uint8).T)


def test_stages_never_read_each_others_pages(connect: Callable[..., PageStore]) -> None:
    pool = filled("page_first")
    store = connect(pool)
    store.store(HASHES[:1], pages(store, 0), ())
    for changed in (replace(RANK, pp_rank=1, pp_size=2), replace(RANK, cp_rank=1, cp_size=2)):
        other = connect(Pool.make("page_first"), changed)
        assert other.count(HASHES[:1]) == 0
        assert other.store(HASHES[:1], pages(other, 0), ()) == [True]
    assert store.load(HASHES[:1], pages(store, 5)) == 1
    assert torch.equal(pool.rows[:, :, 5], pool.rows[:, :, 0]), "another rank's page was read"
    other.clear()
    assert (other.count(HASHES[:1]), store.count(HASHES[:1])) == (0, 1)


def test_ranks_of_a_latent_model_share_their_pages(connect: Callable[..., PageStore]) -> None:
    rank = replace(RANK, is_mla=True, tp_size=2)
    pool = Pool.make("page_first", True)
    writer, reader = connect(pool, rank), connect(pool, replace(rank, tp_rank=1))
    writer.store(HASHES[:1], pages(writer, 0), ())
    assert reader.count(HASHES[:1]) == 1


def test_pools_that_are_not_understood_are_refused_by_name() -> None:
    mla, settings = replace(RANK, is_mla=True), settings_for()
    refused = [
        (Pool("page_unified", torch.zeros(1)), RANK, "layout='page_unified': use one of"),
        (Pool("page_head", torch.zeros(1)), mla, "layout='page_head'"),
        (Pool("page_first", torch.zeros(1), page_size=1), RANK, "page_size=1: start SGLang with"),
        # As those of MXFP8: pages would come back with whatever scales lie there by then.
        (replace(Pool.make("page_first"), beside_bytes=64), RANK, "in its buffer"),
    ]
    for pool, rank, words in refused:
        with pytest.raises(ModelError, match=words):
            kv_model(pool, rank, settings)
    for kv_heads in (3, 4):
        with pytest.raises(ModelError, match="kv_heads"):
            kv_model(
                Pool.make("page_first"),
                replace(RANK, tp_size=4),
                settings_for(kv_heads=kv_heads),
            )


def test_bytes_are_named_by_the_type_that_the_engine_was_started_with() -> None:
    """SGLang keeps both kinds of fp8 as bytes: an engine of one would read the other's."""
    settings = settings_for()
    pool = Pool.make("page_first", False, torch.uint8)
    with pytest.raises(ModelError, match="dtype='uint8': the type"):
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
    with pytest.raises(ModelError, match=r"model_revision='':.* 'tiny' is no local folder"):
        PageSettings.parse({}, "tiny")
    with pytest.raises(InvalidRequestError, match="reset_on_flush='no': give a value of type bool"):
        PageSettings.parse({"reset_on_flush": "no"}, path)
    with pytest.raises(InvalidRequestError, match="adress='h:1': use"):
        PageSettings.parse({"adress": "h:1"}, path)
    for kv_heads in (-1, "8", True):
        with pytest.raises(InvalidRequestError, match="kv_heads"):
            PageSettings.parse({"kv_heads": kv_heads}, path)
    for accuracy in ("bounded", "lossy"):
        with pytest.raises(InvalidRequestError, match=r"accuracy=.*exact"):
            PageSettings.parse({"accuracy": accuracy}, path)
    assert PageSettings.parse({"accuracy": "exact"}, path).accuracy == "exact"


def test_a_name_that_is_no_hash_is_a_counted_miss(connect: Callable[..., PageStore]) -> None:
    store = connect(Pool.make("page_first"))
    assert store.count(["no hash"]) == 0
    assert store.store(["ab"], pages(store, 0), ()) == [False]
    assert store.stats().load_errors == {"InvalidRequestError": 1}
    assert store.stats().store_errors == {"InvalidRequestError": 1}


def test_without_a_server_pages_are_missed_and_not_kept_and_nothing_raises() -> None:
    pool = Pool.make("page_first")
    store = PageStore(pool, RANK, settings_for(deadline_ms=500))
    try:
        assert store.count(HASHES) == 0
        assert store.load(HASHES[:1], pages(store, 0)) == 0
        assert store.store(HASHES[:1], pages(store, 0), ()) == [False]
        store.clear()
        assert store.stats().miss_tokens == SIZE
    finally:
        store.client.close()


def half_of(pool: Pool, rank: int) -> Pool:
    """Return the pool of a rank that has one of two heads, with what *pool* holds of it."""
    heads = pool.kv_buffer.chunk(2, dim=2 if pool.layout == "page_head" else -2)
    return Pool(pool.layout, heads[rank].contiguous())


@pytest.mark.parametrize(
    ("layout", "ranks", "writers"),
    [("layer_first", 2, (0, 1)), ("page_head", 2, (0, 1)), ("page_first", 4, (1, 2))],
)
def test_ranks_with_a_head_or_a_copy_of_one_share_pages_with_an_engine_of_one(
    connect: Callable[..., PageStore], layout: str, ranks: int, writers: tuple[int, int]
) -> None:
    pool, more = filled(layout), {"kv_heads": 2} if ranks > 2 else {}
    stores = [
        connect(half_of(pool, 2 * at // ranks), replace(RANK, tp_rank=at, tp_size=ranks), **more)
        for at in range(ranks)
    ]
    first, last = (stores[at] for at in writers)
    assert first.store(HASHES[:1], pages(first, 0), ()) == [True]
    assert last.count(HASHES[:1]) == 0, "half of a page was shown"
    assert last.store(HASHES[:1], pages(last, 0), ()) == [True]
    one = connect(Pool.make("page_first"))
    wanted = numbers()[:, :, 0]
    for store, heads in [
        (one, [0, 1]),
        *((each, [2 * at // ranks]) for at, each in enumerate(stores)),
    ]:
        assert store.load(HASHES[:1], pages(store, 2)) == 1
        assert torch.equal(store._pool.rows[:, :, 2], wanted[:, :, :, heads])


# --- what an engine was started with is in the names of its pages


def terms(**stated: Any) -> ServerArgsDigest:
    common = {"load_format": "auto", "dtype": "auto", "kv_cache_dtype": "auto"}
    return ServerArgsDigest.of(
        SimpleNamespace(**{**common, "json_model_override_args": "{}", **stated})
    )


def named(**stated: Any) -> str:
    """Return what the revision of an engine's pages is called."""
    settings = PageSettings.parse({"model_revision": "c" * 40}, "tiny", terms(**stated))
    return kv_model(Pool.make("page_first"), RANK, settings).model_revision


def test_what_changes_the_kv_is_another_revision() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"json_model_override_args": '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}'},
        {"quantization": "fp8"},
        {"dtype": "half"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"revision": "other"},
        {"model_impl": "transformers"},
        {"mm_process_config": {"image": {"max_pixels": 4}}},
    ]
    assert len({named(**stated) for stated in changes}) == len(changes)


def test_the_weights_are_those_of_the_path_and_commit_that_the_engine_was_started_with() -> None:
    """The name that it serves them under may be any."""
    commit = "8f2c1d4e" * 5
    started = terms(model_path="org/model", revision=commit)
    assert PageSettings.parse({}, "served-name", started).weights.revision == commit
    branch = terms(model_path="org/model", revision="main")
    with pytest.raises(ModelError, match="'org/model' is no local folder"):
        PageSettings.parse({}, "served-name", branch)


def test_amds_fp8_is_another_and_a_file_is_what_it_holds(tmp_path: Path) -> None:
    plain = ServerArgsDigest.of(SimpleNamespace())
    assert ServerArgsDigest.of(SimpleNamespace(), is_hip=True) != plain
    file = tmp_path / "scales.json"
    file.write_text("1.0")
    before = terms(quantization_param_path=str(file))
    file.write_text("2.0")
    assert terms(quantization_param_path=str(file)) != before


def test_an_adapter_whose_files_changed_under_its_path_is_another(tmp_path: Path) -> None:
    """SGLang's ids of adapters that are given at the start are made of names and paths alone."""
    path = str(tmp_path)
    forms: list[Any] = [
        [path], [f"name={path}"], {"name": path}, [{"lora_name": "name", "lora_path": path}],
        [SimpleNamespace(lora_path=path)],
    ]  # fmt: skip
    found = []
    for weights in ("one", "two"):
        (tmp_path / "adapter_model.safetensors").write_text(weights)
        found.append({terms(lora_paths=stated).adapter_digest("none") for stated in forms})
    assert [len(digests) for digests in found] == [1, 1]
    assert len({terms().adapter_digest("none")}.union(*found)) == 3


def test_an_adapter_that_is_not_here_has_to_be_named() -> None:
    found = terms(lora_paths=["org/adapter"])
    with pytest.raises(ModelError, match=r"lora_paths='org/adapter'.*adapter_digest"):
        found.adapter_digest("none")
    assert found.adapter_digest("sha256:5f") == "sha256:5f"


def test_random_weights_are_refused() -> None:
    with pytest.raises(ModelError, match="load_format"):
        terms(load_format="dummy")
    assert UNKNOWN.adapter_digest("none") == "none", "without an engine a user's words stand alone"


EXTRA = {"model_revision": "c" * 40, "deadline_ms": DEADLINE_MS}
SETTINGS = PageSettings.parse(EXTRA, "org/tiny")
PAGE_BYTES = 96


@dataclass
class States:
    """A pool of states, one to a slot."""

    bytes_: int = PAGE_BYTES
    layout: str = "page_first"
    page_size: int = 1
    pages: dict[int, torch.Tensor] = field(default_factory=dict)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.pages[index]

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self.bytes_, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self.pages[index] = data_page.clone()


def rank(**changes: Any) -> RankInfo:
    return RankInfo(**{"is_mla": False, **changes})


def identity(name: str = "swa", pool: Any = None, **changes: Any) -> Any:
    return aux_model(pool or States(), name, rank(**changes), SETTINGS)


def test_pages_are_named_by_pool_form_and_rank() -> None:
    plain = identity()
    assert plain == identity()
    others = [
        identity("mamba"), identity(pool=States(layout="layer_first")),
        identity(pool=States(112)), identity(pool=States(page_size=16)),
        identity(tp_rank=1, tp_size=2), identity(tp_rank=0, tp_size=2), identity(pp_size=2),
    ]  # fmt: skip
    assert all(one != other for one, other in combinations([plain, *others], 2))


def test_what_ranks_of_a_latent_share_they_share_but_for_states() -> None:
    ranks = [{"is_mla": True, "tp_rank": rank, "tp_size": 2} for rank in (0, 1)]
    assert identity("indexer", **ranks[0]) == identity("indexer", **ranks[1])
    assert identity("mamba", **ranks[0]) != identity("mamba", **ranks[1])


@pytest.mark.parametrize("bytes_", [0, 100])
def test_pages_that_fill_no_rows_are_refused(bytes_: int) -> None:
    with pytest.raises(ModelError, match="host pool='swa'"):
        identity(pool=States(bytes_))


def test_more_pages_than_are_copied_at_a_time_come_back_up_to_one_that_is_missing(
    server: LocalServer,
) -> None:
    settings = replace(SETTINGS, address=server.address)
    pool, count, missing = States(), 2 * BATCH + 5, "f" * 64
    store = AuxPoolStore(pool, "mamba", rank(), settings)
    named, seed = hashes(count), torch.Generator().manual_seed(5)
    kept = torch.randint(0, 256, (count, PAGE_BYTES), dtype=torch.uint8, generator=seed)
    pool.pages = dict(enumerate(kept))
    assert store.store(named, range(count)) == [True] * count
    assert store.present([named[-1], missing, named[0]]) == [True, False, True]
    pool.pages = {}
    asked = [*named[: BATCH + 3], missing, *named[BATCH + 3 :]]
    found = store.load(asked, range(len(asked)))
    assert found == [True] * (BATCH + 3) + [False] * (len(asked) - BATCH - 3)
    assert sorted(pool.pages) == list(range(BATCH + 3))
    assert all(torch.equal(pool.pages[at], kept[at]) for at in pool.pages)
    store.client.close()


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 5))
def test_a_prefix_may_end_where_its_last_pages_are(present: list[bool], trailing: int) -> None:
    expected = [
        count
        for count in range(1, len(present) + 1)
        if all(present[max(0, count - trailing) if trailing else 0 : count])
    ]
    assert prefix_ends(present, trailing) == expected
