"""SGLang's HiCache on this store: a storage backend that SGLang loads by name.

``--hicache-storage-backend dynamic --hicache-storage-backend-extra-config`` with
``{"backend_name": "kvstore", "module_path": "kvstore.client.engines.sglang", "class_name":
"KVStoreStorage", "interface_v1": 1, "address": "127.0.0.1:7420", "model_revision": "..."}``.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from typing_extensions import override

from kvstore.client.engines.identity import EPOCH_BYTES
from kvstore.client.engines.prefix import ConnectorStats
from kvstore.client.engines.sglang.pages import PageSettings, PageStore, RankTerms
from kvstore.client.engines.sglang.pools import SecondStore, ends
from kvstore.client.engines.sglang.terms import UNSTATED, EngineTerms, WeightsEpoch, terms_of
from kvstore.proto.errors import ModelError

TERMS_IN = ("sglang.srt.runtime_context", "get_server_args")
"""Where an engine of 0.5.23 keeps what it was started with."""

VERSION_IN = ("sglang.srt.runtime_context", "get_serving")
"""Where it keeps ``weight_version``, which updates of its weights may give."""

NO_ENGINE = (ImportError, AttributeError, ValueError, RuntimeError, LookupError)
"""What is raised where a process has no engine, and by an engine of another release."""

_flushes = itertools.count(1)
"""Of this process, over all backends that were attached: ranks count alike."""


def engine_terms() -> EngineTerms:
    """Return what this process's engine was started with; UNSTATED where there is none."""
    module, name = TERMS_IN
    try:
        arguments = getattr(importlib.import_module(module), name)()
    except NO_ENGINE:
        return UNSTATED
    return terms_of(arguments, is_hip=torch.version.hip is not None)


def weight_version() -> str:
    """Return what this process's engine calls its weights; "" where it does not."""
    module, name = VERSION_IN
    try:
        return str(getattr(importlib.import_module(module), name)().weight_version)
    except NO_ENGINE:
        return ""


def agreed_bytes() -> bytes:
    """Return random bytes that all ranks have which flush together: the first to ask draws them."""
    number, drawn = next(_flushes), os.urandom(EPOCH_BYTES).hex()
    try:
        group = importlib.import_module(VERSION_IN[0]).get_parallel().attn_dp_rank
        store = torch.distributed.distributed_c10d._get_default_store()
        return bytes(store.compare_set(f"kvstore-weights-{group}-{number}", "", drawn))
    except NO_ENGINE:  # ranks that cannot agree share nothing, which is safe
        return drawn.encode()


class KVStoreStorage(HiCacheStorage):  # type: ignore[misc]
    """Pages in the store; SGLang's threads may call at once.

    With ``interface_v1`` pages go straight between the host pool and the store. A store that
    fails is a miss, or a page that was not kept. Raises InvalidRequestError for settings and
    ModelError for pools that it does not understand, when SGLang attaches it.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        config = storage_config
        name = config.model_name or ""
        terms = engine_terms()
        self._settings = PageSettings.parse(config.extra_config or {}, name, terms)
        self._rank = RankTerms(
            name, config.is_mla_model, config.tp_rank, config.tp_size, config.pp_rank,
            config.pp_size, config.attn_cp_rank, config.attn_cp_size, terms,
        )  # fmt: skip
        self._epoch = WeightsEpoch(
            weight_version, agreed_bytes, resets_on_flush=self._settings.reset_on_flush
        )
        self._is_writer = bool(config.is_storage_writer)
        self._store: PageStore | None = None
        self._seconds: dict[str, SecondStore] = {}
        if config.dcp_size > 1:
            raise ModelError("dcp_size", config.dcp_size, "use 1: pages would be shards")

    @property
    def pages(self) -> PageStore:
        """The pages of the host pool that was registered."""
        assert self._store is not None, "SGLang registers its pool first"
        return self._store

    @override
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._store = PageStore(mem_pool_host, self._rank, self._settings)
        if hasattr(mem_pool_host, "clear"):
            # SGLang reports no flush and no update to a backend; it clears the pool at each.
            mem_pool_host.clear = partial(self._cleared, mem_pool_host.clear)

    def _cleared(self, clear: Callable[[], None]) -> None:
        clear()
        self._epoch.flushed()

    @override
    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = PoolName(host_pool_name).value
        if name != PoolName.KV.value:
            self._seconds[name] = SecondStore(host_pool, name, self._rank, self._settings)

    # --- pages straight from and to the pool

    @override
    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        names = self._epoch.named(keys)
        read = self.pages.load(names, self._places(host_indices)) if names else 0
        return [at < read for at in range(len(keys))]

    @override
    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        if not self._is_writer:
            return [True] * len(keys)
        before = extra_info.prefix_keys if extra_info is not None else None
        above, names = self._epoch.named(before or ()), self._epoch.named(keys)
        if not names:
            return [False] * len(keys)
        return self.pages.store(names, self._places(host_indices), above)

    def _places(self, host_indices: torch.Tensor) -> list[Any]:
        size = self.mem_pool_host.page_size
        return [self.pages.page(first // size) for first in host_indices[::size].tolist()]

    # --- pools beside that of KV: recurrent states, windows, indices

    @override
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        keys = self._epoch.named(keys)
        pages = self.pages.count(keys) if keys else 0
        usable, hits = set(range(1, pages + 1)), {PoolName.KV: pages} if pages else {}
        for transfer in pool_transfers or ():
            if transfer.hit_policy not in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                continue  # such a pool gates nothing, and of one that is not named nothing is read
            found = self._ends(keys[:pages], transfer)
            hits.update({transfer.name: found[-1]} if found else {})
            usable &= set(found)
        return PoolTransferResult(max(usable, default=0), hits, sorted(usable))

    def _ends(self, keys: list[str], transfer: PoolTransfer) -> list[int]:
        """Return with how many of *keys* a pool has what a prefix needs of it."""
        second = self._second(transfer)
        if second is None or not keys:
            return []
        is_trailing = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
        trailing = max(1, len(transfer.keys or ())) if is_trailing else 0
        return ends(second.present(keys), trailing)

    def _second(self, transfer: PoolTransfer) -> SecondStore | None:
        return self._seconds.get(PoolName(transfer.name).value)

    @override
    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return {one.name: self._moved(one, is_get=True) for one in transfers}

    @override
    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return {one.name: self._moved(one, is_get=False) for one in transfers}

    def _moved(self, transfer: PoolTransfer, *, is_get: bool) -> list[bool]:
        keys, indices, second = transfer.keys or [], transfer.host_indices, self._second(transfer)
        size = getattr(self.registered_pools.get(transfer.name), "page_size", 1) if second else 1
        if second is None or indices is None or len(indices) != len(keys) * size:
            return [False] * len(keys)
        slots, names = indices[::size].tolist(), self._epoch.named(keys)
        if not is_get and not (self._is_writer or second.is_own):
            return [True] * len(keys)
        if not names:
            return [False] * len(keys)
        return second.load(names, slots) if is_get else second.store(names, slots)

    # --- pages as flat tensors

    @override
    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    @override
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        pages: Sequence[torch.Tensor] = target_locations or [
            self.mem_pool_host.get_dummy_flat_data_page() for _ in keys
        ]
        names = self._epoch.named(keys)
        read = self.pages.load(names, [self.pages.flat(page) for page in pages]) if names else 0
        return [page if at < read else None for at, page in enumerate(pages)]

    @override
    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value if value is not None else target_location])

    @override
    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        if not self._is_writer:
            return True
        pages = [self.pages.flat(page.contiguous()) for page in values or target_locations]
        names = self._epoch.named(keys)
        return bool(names) and all(self.pages.store(names, pages, ()))

    # --- questions

    @override
    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    @override
    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        names = self._epoch.named(keys)
        return self.pages.count(names) if names else 0

    @override
    def clear(self) -> None:
        self.pages.clear()
        for second in self._seconds.values():
            second.clear()

    def stats(self) -> ConnectorStats:
        """Return what this backend did since its birth."""
        return self.pages.stats()

    def close(self) -> None:
        """End the session with the server. Idempotent."""
        vars(getattr(self, "mem_pool_host", self)).pop("clear", None)
        for store in (self._store, *self._seconds.values()):
            if store is not None:
                store.client.close()
