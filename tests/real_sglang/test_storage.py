"""The storage backend inside SGLang's own factory, over SGLang's own host pools and hashes."""

from __future__ import annotations

import itertools
import warnings
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from helpers.local_server import LocalServer
from real_sglang.stand_ins import import_sglang

from kvstore.client.engines.sglang.pages import SERVER_ARGS, ServerArgsDigest
from kvstore.proto.errors import ModelError
from kvstore.proto.keys import page_digests
from kvstore.proto.types import DIGEST_BYTES

import_sglang()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of kernels that only run on GPUs
    from sglang.srt import runtime_context
    from sglang.srt.mem_cache import device_pool_info
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorageConfig,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
    )
    from sglang.srt.mem_cache.pool_host import base as pool_base
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.storage import StorageBackendFactory
    from sglang.srt.mem_cache.utils import get_hash_str
    from sglang.srt.server_args import ServerArgs

from kvstore.client.engines.sglang import backend as kvstore_sglang  # noqa: E402 - once SGLang is there

LAYERS, HEADS, DIM, PAGE, TOKENS = 4, 2, 64, 16, 128
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
REVISION = "c" * 40


def make_pool(layout: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return SGLang's own host pool over device buffers that lie on the CPU."""
    pool_base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    k, v = (
        tuple(torch.zeros(TOKENS, HEADS, DIM, dtype=dtype) for _ in range(LAYERS)) for _ in range(2)
    )
    pointers = [torch.tensor([t.data_ptr() for t in one], dtype=torch.uint64) for one in (k, v)]
    buffers = device_pool_info.KVBuffers(
        k=k, v=v, k_data_ptrs=pointers[0], v_data_ptrs=pointers[1],
        layout=device_pool_info.KVBufferLayout.NHD,
    )  # fmt: skip
    info = device_pool_info.MHABufferInfo(
        buffers=buffers, page_size=PAGE, head_num=HEADS, head_dim=DIM, v_head_dim=DIM,
        dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip
    return MHATokenToKVPoolHost(
        info, 2.0, 0, PAGE, layout, pin_memory=False, device="cpu",
        device_capacity_tokens=TOKENS, start_layer=0, end_layer=LAYERS,
    )  # fmt: skip


def make_backend(server: LocalServer, pool: Any, **changes: Any) -> Any:
    """Return the backend as ``--hicache-storage-backend dynamic`` makes it."""
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=False, enable_storage_metrics=False,
        is_page_first_layout=pool.layout == "page_first", model_name="tiny",
        extra_config={
            "backend_name": "kvstore",
            "module_path": "kvstore.client.engines.sglang",
            "class_name": "KVStoreStorage",
            "interface_v1": 1,
            "address": server.address,
            "model_revision": REVISION,
            "deadline_ms": 20_000,
        },
    )  # fmt: skip
    for name, value in changes.items():
        setattr(config, name, value)
    backend = StorageBackendFactory.create_backend("dynamic", config, pool)
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    return backend


def page_hashes(count: int) -> list[str]:
    """Return SGLang's own hashes of the pages of a prompt."""
    hashes: list[str] = get_hash_str(array("q", range(100, 100 + PAGE * count)), None, PAGE)
    return hashes


def test_prompts_can_be_named_as_sglang_names_their_pages() -> None:
    tokens = range(100, 100 + 3 * PAGE)
    assert [one.hex() for one in page_digests(tokens, PAGE)] == [
        name[: 2 * DIGEST_BYTES] for name in page_hashes(3)
    ]


@pytest.fixture(params=LAYOUTS)
def pool(request: pytest.FixtureRequest) -> Any:
    pool = make_pool(request.param)
    draw = torch.Generator().manual_seed(3)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=draw).to(torch.bfloat16))
    return pool


@pytest.fixture
def backend(server: LocalServer, pool: Any) -> Iterator[Any]:
    backend = make_backend(server, pool)
    yield backend
    backend.close()


def indices(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(PAGE * page, PAGE * (page + 1)) for page in pages])


def test_pages_come_back_into_the_pool_they_came_from(backend: Any, pool: Any) -> None:
    hashes = page_hashes(4)
    before = [pool.get_data_page(PAGE * page).clone() for page in range(4)]
    assert backend.batch_exists(hashes) == 0
    assert backend.batch_set_v1(hashes, indices(0, 1, 2, 3)) == [True] * 4
    assert backend.batch_exists([*hashes, "0" * 64]) == 4
    assert backend.exists(hashes[2])
    pool.kv_buffer.zero_()
    assert backend.batch_get_v1([*hashes, "0" * 64], indices(3, 2, 1, 0, 4)) == [True] * 4 + [False]
    for page in range(4):
        assert torch.equal(pool.get_data_page(PAGE * (3 - page)), before[page])
    assert not pool.get_data_page(PAGE * 4).any()


def test_after_a_flush_nothing_older_is_loaded_and_what_is_new_is(
    backend: Any, pool: Any, server: LocalServer
) -> None:
    """SGLang clears its pools where it flushes; it tells a backend nothing."""
    hashes, other = page_hashes(2), make_backend(server, make_pool(pool.layout))
    assert backend.batch_set_v1(hashes, indices(0, 1)) == [True] * 2
    pool.clear()
    assert backend.batch_exists(hashes) == 0
    assert backend.batch_get_v1(hashes, indices(2, 3)) == [False] * 2
    assert backend.batch_set_v1(hashes, indices(0, 1)) == [True] * 2
    assert backend.batch_exists(hashes) == 2
    assert other.batch_exists(hashes) == 2, "what was stored before, to an engine of that"
    other.close()
    backend.close()
    assert "clear" not in vars(pool)


def test_between_an_update_and_its_flush_nothing_is_loaded_and_nothing_is_stored(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = SimpleNamespace(weight_version="default")
    monkeypatch.setattr(runtime_context, "get_serving", lambda: serving)
    pool, hashes = make_pool("page_first"), page_hashes(2)
    backend = make_backend(server, pool)
    assert backend.batch_set_v1(hashes, indices(0, 1)) == [True] * 2
    serving.weight_version = "step-1"
    assert backend.batch_exists(hashes) == backend.batch_exists_v2(hashes).kv_hit_pages == 0
    assert backend.batch_get_v1(hashes, indices(2, 3)) == [False] * 2
    assert backend.batch_set_v1(hashes, indices(0, 1)) == [False] * 2
    assert not backend.set(hashes[0], pool.get_data_page(0))
    pool.clear()
    assert backend.batch_set_v1(hashes, indices(0, 1)) == [True] * 2
    assert backend.batch_get_v1(hashes, indices(2, 3)) == [True] * 2
    backend.close()


def test_ranks_that_flush_together_call_their_pages_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """They meet in the store that torch.distributed keeps for a world."""
    world = torch.distributed.distributed_c10d
    shared = torch.distributed.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(world, "_get_default_store", lambda: shared)

    def rank(number: int) -> list[bytes]:
        parallel = SimpleNamespace(attn_dp_rank=number)
        monkeypatch.setattr(runtime_context, "get_parallel", lambda: parallel)
        monkeypatch.setattr(kvstore_sglang, "_flushes", itertools.count(1))
        return [kvstore_sglang.agreed_bytes() for _ in range(3)]

    first, second, other = rank(0), rank(0), rank(1)
    assert first == second
    assert len({*first, *other}) == 6


def test_flat_pages_are_what_the_pool_calls_one(backend: Any, pool: Any) -> None:
    hashes = page_hashes(3)
    pages = [pool.get_data_page(PAGE * page).clone() for page in range(3)]
    assert backend.batch_set(hashes, pages)
    found = backend.batch_get(hashes, [pool.get_dummy_flat_data_page() for _ in hashes])
    assert all(map(torch.equal, found, pages))
    assert torch.equal(backend.get(hashes[1], pool.get_dummy_flat_data_page()), pages[1])
    assert backend.get("0" * 64, pool.get_dummy_flat_data_page()) is None
    pool.set_from_flat_data_page(PAGE * 5, found[0])
    assert backend.batch_set_v1([page_hashes(5)[4]], indices(5)) == [True]
    backend.clear()
    assert backend.batch_exists(hashes) == 0


def test_what_the_engine_was_started_with_is_in_the_names_of_its_pages(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang keeps fp8 as bytes; of what kind, and how keys are rotated, its arguments say."""
    with pytest.raises(ModelError, match="uint8"):
        make_backend(server, make_pool("page_first", torch.uint8))
    started = []
    for changes in (
        {},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"json_model_override_args": '{"rope_theta": 5.0}'},
    ):
        # Not published as an engine does, as that asks for a GPU.
        args = SimpleNamespace(kv_cache_dtype="fp8_e5m2", load_format="auto")
        vars(args).update(changes)
        monkeypatch.setattr(runtime_context._CONTEXT, "_server_args", args)
        started.append(make_backend(server, make_pool("page_first", torch.uint8)))
    assert started[0].batch_set_v1(page_hashes(1), indices(0)) == [True]
    assert [one.batch_exists(page_hashes(1)) for one in started] == [1, 0, 0]
    for one in started:
        one.close()


def test_sglang_has_every_argument_that_is_looked_at() -> None:
    """One that was renamed would be left out of names in silence."""
    assert [name for name in SERVER_ARGS if not hasattr(ServerArgs, name)] == []


def test_an_engine_whose_arguments_nobody_gave_departs_in_nothing() -> None:
    """So that it shares with other engines of the same weights."""
    arguments = {one.name: one.default for one in msgspec.structs.fields(ServerArgs)}
    assert ServerArgsDigest.of(SimpleNamespace(**arguments)).settings == {}


# --- pools beside that of KV


def named(name: str, keys: list[str], *pages: int, policy: str = "all_pages") -> Any:
    """Return what SGLang asks of a second pool."""
    return PoolTransfer(
        PoolName(name), host_indices=indices(*pages) if pages else None, keys=keys,
        hit_policy=PoolHitPolicy(policy),
    )  # fmt: skip


@pytest.fixture
def windows(backend: Any, pool: Any) -> Any:
    """A second pool of windows, filled: SGLang keeps those in a pool of the same class."""
    second = make_pool(pool.layout)
    draw = torch.Generator().manual_seed(4)
    second.kv_buffer.copy_(torch.randn(second.kv_buffer.shape, generator=draw).to(torch.bfloat16))
    backend.register_mem_host_pool_v2(pool, PoolName.KV)
    backend.register_mem_host_pool_v2(second, PoolName.SWA)
    return second


def test_a_second_pool_comes_back_into_the_pool_it_came_from(
    server: LocalServer, backend: Any, pool: Any, windows: Any
) -> None:
    hashes = page_hashes(20)
    before = [windows.get_data_page(PAGE * (page % 8)).clone() for page in range(20)]
    written = indices(*(page % 8 for page in range(20)))
    stored = PoolTransfer(PoolName.SWA, host_indices=written, keys=hashes)
    assert backend.batch_set_v2([stored]) == {"swa": [True] * 20}
    windows.kv_buffer.zero_()
    wanted = [hashes[3], hashes[1], "0" * 64, hashes[0]]
    asked = named("swa", wanted, 5, 6, 7, 4)
    assert backend.batch_get_v2([asked]) == {"swa": [True, True, False, False]}
    assert torch.equal(windows.get_data_page(PAGE * 5), before[3])
    assert torch.equal(windows.get_data_page(PAGE * 6), before[1])
    assert not windows.get_data_page(PAGE * 4).any()
    assert torch.count_nonzero(pool.get_data_page(0)), "the pool of KV is not touched"
    backend.clear()
    assert backend.batch_get_v2([named("swa", hashes[:1], 5)]) == {"swa": [False]}


def test_a_prefix_ends_where_every_pool_has_what_it_needs(backend: Any, windows: Any) -> None:
    hashes = page_hashes(6)
    backend.batch_set_v1(hashes[:5], indices(0, 1, 2, 3, 4))
    backend.batch_set_v2([named("swa", [hashes[at] for at in (1, 2, 4)], 1, 2, 4)])

    def usable(policy: str, keys: list[str]) -> tuple[int, dict[str, int], list[int]]:
        found = backend.batch_exists_v2(hashes, [named("swa", keys, policy=policy)])
        return found.kv_hit_pages, found.extra_pool_hit_pages, found.restorable_prefix_pages

    assert usable("trailing_pages", ["last"]) == (5, {"kv": 5, "swa": 5}, [2, 3, 5])
    assert usable("trailing_pages", ["one", "last"]) == (3, {"kv": 5, "swa": 3}, [3])
    assert usable("all_pages", []) == (0, {"kv": 5}, [])
    assert usable("block_groups", [])[0] == 5, "such a pool gates nothing"
    backend.batch_set_v2([named("swa", hashes[:1], 0)])
    assert usable("all_pages", []) == (3, {"kv": 5, "swa": 3}, [1, 2, 3])
    assert backend.batch_exists_v2(hashes).kv_hit_pages == 5
    assert backend.batch_exists_v2(hashes, [named("mamba", [])]).kv_hit_pages == 0


def test_pages_without_room_of_their_own_are_no_hits(backend: Any, windows: Any) -> None:
    hashes = page_hashes(2)
    assert backend.batch_set_v2([named("swa", hashes, 0)]) == {"swa": [False, False]}
    assert backend.batch_get_v2([named("swa", hashes)]) == {"swa": [False, False]}
    assert backend.batch_get_v2([named("indexer", hashes, 0, 1)]) == {"indexer": [False, False]}


@pytest.mark.parametrize("name", ["draft", "draft_swa"])
def test_pools_of_draft_models_are_refused_when_they_are_attached(
    backend: Any, pool: Any, name: str
) -> None:
    with pytest.raises(ModelError, match=f"host pool='{name}'"):
        backend.register_mem_host_pool_v2(pool, PoolName(name))


def test_pools_without_flat_pages_are_refused_when_they_are_attached(backend: Any) -> None:
    class Bare:
        layout, page_size = "layer_first", PAGE

    with pytest.raises(ModelError, match="flat tensors"):
        backend.register_mem_host_pool_v2(Bare(), PoolName.SWA)
