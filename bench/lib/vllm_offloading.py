"""vLLM's tiered offloading for an engine on the CPU, which vLLM's own spec refuses.

It has only the copies between the engine's pages and the primary tier; the rest is vLLM's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kvstore.client.engines.vllm_tier import StoreTieringSpec


class CopyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks immediately, in the engine's thread."""

    def __init__(self, caches: Any, chunk_blocks: int, region: Any) -> None:
        self._caches = caches
        self._region = region
        self._chunk_blocks = chunk_blocks
        self._done: list[Any] = []
        self._pages = [
            one.tensor.view(torch.int8).view(-1, one.page_size_bytes) for one in caches.tensors
        ]
        # The second name is that of 0.26.
        make_view = getattr(region, "create_next_worker_view", None) or region.create_next_view
        self._primary = [make_view(one.page_size_bytes * chunk_blocks) for one in caches.tensors]

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        began = time.perf_counter()
        moved = 0
        for page, place in self._pairs(src_spec, dst_spec.block_ids):
            place.copy_(page)
            moved += page.numel()
        return self._end(job_id, moved, began)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        began = time.perf_counter()
        moved = 0
        for page, place in self._pairs(dst_spec, src_spec.block_ids):
            page.copy_(place)
            moved += page.numel()
        return self._end(job_id, moved, began)

    def _end(self, job_id: int, moved: int, began: float) -> bool:
        self._done.append(TransferResult(job_id, True, moved, time.perf_counter() - began))
        return True

    def _pairs(self, blocks: Any, chunk_ids: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        size = self._chunk_blocks
        block_at = chunk_at = 0
        for group, (count, first) in enumerate(
            zip(blocks.group_sizes, blocks.block_indices, strict=True)
        ):
            skipped = first % size
            for ref in self._caches.group_data_refs[group] if count else ():
                width = ref.page_size_bytes
                for number in range(count):
                    chunk, slot = divmod(number + skipped, size)
                    row = self._primary[ref.tensor_idx][int(chunk_ids[chunk_at + chunk])]
                    page = self._pages[ref.tensor_idx][int(blocks.block_ids[block_at + number])]
                    yield page[:width], row[slot * width : (slot + 1) * width]
            block_at += count
            chunk_at += -(-(count + skipped) // size) if count else 0

    def get_finished(self) -> list[Any]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Any) -> None:
        """Return at once: jobs end in their submission."""

    def shutdown(self) -> None:
        self._primary = []
        self._region.cleanup()


class CpuTieringSpec(StoreTieringSpec):  # type: ignore[misc]
    def get_worker(self, kv_caches: Any) -> CopyWorker:
        if hasattr(self, "num_chunks"):
            sizes = {"num_chunks": self.num_chunks, "kv_bytes_per_chunk": self.kv_bytes_per_chunk}
        else:  # below 0.30
            sizes = {"num_blocks": self.num_blocks, "kv_bytes_per_block": self.kv_bytes_per_chunk}
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            rank=self.config.parallel.rank,
            cpu_page_size=self.cpu_page_size_per_worker,
            **sizes,
        )
        self._worker = CopyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
