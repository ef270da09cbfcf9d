"""Frames loaded out of a tier in the benchmark's own process, as the server's workers load them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from kvstore.proto.buffers import Bytes
from kvstore.proto.frame import header_bytes
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.types import ChunkInfo
from kvstore.server.tiering.work_queue import MAX_BATCH
from kvstore.server.wiring import LOADS_AT_ONCE, batch_parallelism
from kvstore.tiers.base import Tier

Load = tuple[ChunkInfo, Bytes]
"""Which frame, and memory that is there for it."""


@contextmanager
def loading(tier: Tier, loads: Sequence[Load]) -> Iterator[Callable[[], None]]:
    """Yield what loads and verifies all of *loads*, by as many threads as the server has for that.

    In rows where the tier wants them so. All are asked for at once.
    """
    queue = f"load-{tier.name}"
    is_batched = tier.batch_key(loads[0][0].key) is not None
    threads = batch_parallelism()[queue] if is_batched else LOADS_AT_ONCE.get(tier.name, 1)
    length = MAX_BATCH if is_batched else 1
    rows = [loads[at : at + length] for at in range(0, len(loads), length)]
    with ThreadPoolExecutor(threads) as pool:

        def load_all() -> None:
            left = iter(rows)
            for done in [pool.submit(_load_rows, tier, left) for _ in range(threads)]:
                done.result()

        yield load_all


def _load_rows(tier: Tier, rows: Iterator[Sequence[Load]]) -> None:
    for row in rows:
        keys = [info.key for info, _ in row]
        for at, (info, out) in enumerate(row):
            if len(row) > 1:
                tier.expect(keys[at:])
            verifier = FrameVerifier(out, info.key, header_bytes(info.layout))
            assert tier.read(info.key, out, 0, verifier)
            verifier.finish()
        if len(row) > 1:
            tier.expect(())
