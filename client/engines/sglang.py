"""SGLang's HiCache on this store: a storage backend that SGLang loads by name.

``--hicache-storage-backend dynamic --hicache-storage-backend-extra-config`` with
``{"backend_name": "kvstore", "module_path": "kvstore.client.engines.sglang", "class_name":
"KVStoreStorage", "interface_v1": 1, "address": "127.0.0.1:7420", "model_revision": "..."}``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)
from typing_extensions import override

from kvstore.client.engines.base import ConnectorStats
from kvstore.client.engines.sglang_pages import PageSettings, PageStore, RankTerms
from kvstore.proto.errors import RepresentationError


class KVStoreStorage(HiCacheStorage):  # type: ignore[misc]
    """Pages in the store; SGLang's threads may call at once.

    With ``interface_v1`` pages go straight between the host pool and the store. A store that
    fails is a miss, or a page that was not kept. Raises InvalidRequestError for settings and
    RepresentationError for pools that it does not understand, when SGLang attaches it.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        config = storage_config
        name = config.model_name or ""
        self._settings = PageSettings.parse(config.extra_config or {}, name)
        self._rank = RankTerms(
            name, config.is_mla_model, config.tp_rank, config.tp_size, config.pp_rank,
            config.pp_size, config.attn_cp_rank, config.attn_cp_size,
        )  # fmt: skip
        self._is_writer = bool(config.is_storage_writer)
        self._store: PageStore | None = None
        if config.dcp_size > 1:
            raise RepresentationError("dcp_size", config.dcp_size, "use 1: pages would be shards")

    @property
    def pages(self) -> PageStore:
        """The pages of the host pool that was registered."""
        assert self._store is not None, "SGLang registers its pool first"
        return self._store

    @override
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._store = PageStore(mem_pool_host, self._rank, self._settings)

    @override
    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        fix = "only models whose KV is one pool: no recurrent state, no sliding window"
        raise RepresentationError("host pool", str(host_pool_name), fix)

    # --- pages straight from and to the pool

    @override
    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        read = self.pages.load(keys, self._places(host_indices))
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
        return self.pages.store(keys, self._places(host_indices), before or ())

    def _places(self, host_indices: torch.Tensor) -> list[Any]:
        size = self.mem_pool_host.page_size
        return [self.pages.page(first // size) for first in host_indices[::size].tolist()]

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
        read = self.pages.load(keys, [self.pages.flat(page) for page in pages])
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
        return all(self.pages.store(keys, pages, ()))

    # --- questions

    @override
    def exists(self, key: str) -> bool:
        return self.pages.count([key]) == 1

    @override
    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        return self.pages.count(keys)

    @override
    def clear(self) -> None:
        self.pages.clear()

    def stats(self) -> ConnectorStats:
        """Return what this backend did since its birth."""
        return self.pages.stats()

    def close(self) -> None:
        """End the session with the server. Idempotent."""
        if self._store is not None:
            self._store.client.close()
