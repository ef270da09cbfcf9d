"""Verified reads of the Redis tier in the benchmark's own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import numpy as np

from kvstore.proto.frame import check_frame
from kvstore.proto.types import ChunkKey
from kvstore.server.manager_start import LOADS_AT_ONCE
from kvstore.tiers.redis import RedisTier


@contextmanager
def redis_gets(url: str, keys: Sequence[ChunkKey]) -> Iterator[Callable[[], None]]:
    """Yield a get of all *keys* from the Redis tier into memory of ours, each verified.

    As many at once as the server loads.
    """

    def read(key: ChunkKey) -> bool:
        found = tier.read_into(key, frames[key])
        check_frame(frames[key], key)
        return found

    with (
        closing(RedisTier(url, 1 << 40, timeout_ms=5000)) as tier,
        ThreadPoolExecutor(LOADS_AT_ONCE["redis"]) as pool,
    ):
        frames = {
            info.key: np.empty(info.size_bytes, np.uint8)
            for info in tier.find(keys)
            if info is not None
        }

        def get() -> None:
            assert all(pool.map(read, keys))

        yield get
