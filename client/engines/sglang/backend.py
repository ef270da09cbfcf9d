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
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from typing_extensions import override

from kvstore.client.chunk import LayerTensors
from kvstore.client.engines.base import ConnectorStats
from kvstore.client.engines.identity import EPOCH_BYTES
from kvstore.client.engines.sglang.pages import (
    UNKNOWN,
    AuxPoolStore,
    PageSettings,
    PageStore,
    RankInfo,
    ServerArgsDigest,
    WeightsEpoch,
    prefix_ends,
)
from kvstore.proto.errors import ModelError

CONTEXT = "sglang.srt.runtime_context"
"""Where an engine of 0.5.23 keeps its arguments and its ``weight_version``."""
NO_ENGINE = (ImportError, AttributeError, ValueError, RuntimeError, LookupError)
"""Raised in a process without an engine, and by engines of other releases."""
_flushes = itertools.count(1)
"""Numbers this process's flushes over all attached backends: ranks count alike."""


def of_engine(getter: str, field: str = "") -> Any:
    """Return the result of this process's engine's *getter*, or its *field*; None without one."""
    with suppress(*NO_ENGINE):
        found = getattr(importlib.import_module(CONTEXT), getter)()
        return attrgetter(field)(found) if field else found
    return None


def agreed_bytes() -> bytes:
    """Return random bytes, the same on all ranks that flush together; the first rank draws them."""
    number, drawn = next(_flushes), os.urandom(EPOCH_BYTES).hex()
    group = of_engine("get_parallel", "attn_dp_rank")
    with suppress(*NO_ENGINE):
        if group is not None:
            store = torch.distributed.distributed_c10d._get_default_store()
            return bytes(store.compare_set(f"kvstore-weights-{group}-{number}", "", drawn))
    return drawn.encode()  # differs on each rank, which is safe


class KVStoreStorage(HiCacheStorage):  # type: ignore[misc]
    """SGLang's storage backend. Thread-safe.

    With ``interface_v1`` pages transfer directly between the host pool and the store. A store
    error is a miss, or a page not stored. When SGLang attaches it, raises InvalidRequestError for
    invalid settings and ModelError for unsupported pools.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        config = storage_config
        engine, arguments = UNKNOWN, of_engine("get_server_args")
        if arguments is not None:
            engine = ServerArgsDigest.of(arguments, is_hip=torch.version.hip is not None)
        extra = config.extra_config or {}
        self._settings = PageSettings.parse(extra, config.model_name or "", engine)
        self._rank = RankInfo(
            config.is_mla_model, config.tp_rank, config.tp_size, config.pp_rank, config.pp_size,
            config.attn_cp_rank, config.attn_cp_size,
        )  # fmt: skip
        self._epoch = WeightsEpoch(
            lambda: str(of_engine("get_serving", "weight_version") or ""),
            agreed_bytes,
            resets_on_flush=self._settings.reset_on_flush,
        )
        self._is_writer = bool(config.is_storage_writer)
        self.pages: PageStore  # of the pool that SGLang registers first
        self._aux: dict[str, AuxPoolStore] = {}
        if config.dcp_size > 1:
            raise ModelError("dcp_size", config.dcp_size, "use 1: pages would be shards")

    @override
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self.pages = PageStore(mem_pool_host, self._rank, self._settings)
        if hasattr(mem_pool_host, "clear"):
            # SGLang reports flushes and weight updates to no backend, but clears the pool.
            mem_pool_host.clear = partial(self._cleared, mem_pool_host.clear)

    def _cleared(self, clear: Callable[[], None]) -> None:
        clear()
        self._epoch.flushed()

    @override
    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = PoolName(host_pool_name).value
        if name != PoolName.KV.value:
            self._aux[name] = AuxPoolStore(host_pool, name, self._rank, self._settings)

    # --- the KV pool: pages in place, or as flat tensors

    @override
    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        read = self._load(keys, self._places(host_indices))
        return [at < read for at in range(len(keys))]

    @override
    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        before = extra_info.prefix_keys if extra_info is not None else None
        return self._save(keys, lambda: self._places(host_indices), before or ())

    def _places(self, host_indices: torch.Tensor) -> list[LayerTensors]:
        size = self.mem_pool_host.page_size
        return [self.pages.page(first // size) for first in host_indices[::size].tolist()]

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
        read = self._load(keys, [self.pages.page(0, page) for page in pages])
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
        pages = [one.contiguous() for one in values or target_locations]
        return all(self._save(keys, lambda: [self.pages.page(0, page) for page in pages], ()))

    def _load(self, keys: list[str], places: Sequence[LayerTensors]) -> int:
        names = self._epoch.named(keys)
        return self.pages.load(names, places) if names else 0

    def _save(
        self, keys: list[str], places: Callable[[], Sequence[LayerTensors]], before: Sequence[str]
    ) -> list[bool]:
        if not self._is_writer:
            return [True] * len(keys)
        above, names = self._epoch.named(before), self._epoch.named(keys)
        return self.pages.store(names, places(), above) if names else [False] * len(keys)

    @override
    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    @override
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        names = self._epoch.named(keys)
        return self.pages.count(names) if names else 0

    # --- auxiliary pools: recurrent states, windows, indices

    @override
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: Any = None,
    ) -> PoolTransferResult:
        names = self._epoch.named(keys)
        pages = self.pages.count(names) if names else 0
        usable, hits = set(range(1, pages + 1)), {PoolName.KV: pages} if pages else {}
        for transfer in pool_transfers or ():
            if transfer.hit_policy not in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                continue  # it restricts no prefix, and pools not in the hits are not read
            is_trailing = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
            trailing = max(1, len(transfer.keys or ())) if is_trailing else 0
            aux = self._aux.get(transfer.name)
            found = prefix_ends(aux.present(names[:pages]), trailing) if aux and pages else []
            hits.update({transfer.name: found[-1]} if found else {})
            usable &= set(found)
        return PoolTransferResult(max(usable, default=0), hits, sorted(usable))

    @override
    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        return {one.name: self._transfer(one, is_get=True) for one in transfers}

    @override
    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        return {one.name: self._transfer(one, is_get=False) for one in transfers}

    def _transfer(self, transfer: PoolTransfer, *, is_get: bool) -> list[bool]:
        keys, indices = transfer.keys or [], transfer.host_indices
        aux = self._aux.get(transfer.name)
        if aux is None or indices is None or len(indices) != len(keys) * aux.page_size:
            return [False] * len(keys)
        if not is_get and not (self._is_writer or aux.is_own):
            return [True] * len(keys)
        slots, names = indices[:: aux.page_size].tolist(), self._epoch.named(keys)
        if not names:
            return [False] * len(keys)
        return aux.load(names, slots) if is_get else aux.store(names, slots)

    @override
    def clear(self) -> None:
        self.pages.clear()
        for aux in self._aux.values():
            aux.clear()

    def stats(self) -> ConnectorStats:
        """Return the backend's counters since its creation."""
        return self.pages.stats()

    def close(self) -> None:
        """End the session with the server. Idempotent."""
        vars(getattr(self, "mem_pool_host", self)).pop("clear", None)
        stores = [self.pages] if hasattr(self, "pages") else []
        for store in (*stores, *self._aux.values()):
            store.client.close()
