"""A tier below vLLM's own CPU offloading: moves chunks between its primary tier and a store.

Releases below 0.28 do not load a tier by module, but StoreTieringSpec: see docs/vllm.md.

vLLM copies between its pages and the primary tier, identifies chunks by its own hashes, and
passes whole chunks of all ranks as bytes. They are stored as such, so only engines of the same
layout share them.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from blake3 import blake3
from vllm.v1.kv_offload import base as offload
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec as StoreTieringSpec

from kvstore.client.chunk import Chunk, LayerTensors
from kvstore.client.client import Client
from kvstore.client.engines import identity
from kvstore.client.engines.base import Connector, DaemonThreads
from kvstore.client.engines.prefix import least_of
from kvstore.client.engines.vllm.messages import VllmSettings
from kvstore.client.engines.vllm.worker import SHUTDOWN_S
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.types import DIGEST_BYTES, Accuracy, ChainDigest, Model

__all__ = ["KVStoreTier", "StoreTieringSpec"]

REPORTS_PARTIAL_JOBS = "successful_keys" in JobResult.__dataclass_fields__
"""Whether a tier can report a partial promotion; below 0.28 all of it fails."""


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """Runs the lookups of vLLM's scheduler steps in a vLLM thread."""

    def __init__(
        self, tier_type: str, connector: Connector, digest: Callable[[bytes], ChainDigest]
    ) -> None:
        self._connector = connector
        self._digest = digest
        super().__init__(tier_type)

    def batch_lookup(self, keys: Sequence[bytes], req_context: Any) -> Iterable[bool]:
        """Return for each of *keys* whether it is stored. They are no prefix: vLLM looks up each
        kind of layer in turn, and sliding windows from the end."""
        connector, digests = self._connector, [self._digest(key) for key in keys]

        def ready() -> int:
            return connector.client.lookup(keys=connector.keys_of(digests)).ready

        count = connector.guard(ready, -1)
        if count < 0:
            return [False] * len(digests)
        behind = digests[count + 1 :]
        found = connector.stored(behind) if behind else set()
        return [at < count or bytes(one) in found for at, one in enumerate(digests)]

    def note_lost(self, keys: Collection[bytes]) -> None:
        """Mark *keys*, whose promotion failed, as misses for the requests that need them."""
        if hasattr(self, "mark_miss"):
            self.mark_miss(keys)
            return
        for key in keys:  # below 0.28
            if key in self._lookup_state:
                self._lookup_state[key].result = False


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]
    """One engine's tier, for vLLM's scheduler thread. A failure is a miss or a failed job.

    *model_revision*, required, is a commit or digest of the weights: vLLM does not pass their
    origin to a tier. vLLM identifies adapters by name, so change *model_revision* when an
    adapter changes.
    """

    # 0.26 has no Medium.
    medium: ClassVar[Any] = getattr(getattr(offload, "Medium", None), "STORAGE", None)

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        detector = () if backpressure_detector is None else (backpressure_detector,)
        super().__init__(offloading_spec, primary_kv_view, tier_type, *detector)
        settings.pop("module_path", None)  # below 0.28 vLLM passes it on
        stated = VllmSettings.of(settings)
        if least_of(stated.accuracy) is not Accuracy.exact:
            fix = "use exact: vLLM does not report which chunks another was computed after"
            raise InvalidRequestError("accuracy", stated.accuracy, fix)
        self._rows = torch.from_numpy(np.asarray(primary_kv_view)).view(torch.uint8)
        model = tier_model(offloading_spec.config, self._rows.shape[1], stated.model_revision)
        options = partial(stated.client_options, identity.BYTE_ROWS, "vllm-tier")
        self._connector, self._looking = (
            Connector(Client(stated.address, model, options(is_lookup=one)), durable=stated.durable)
            for one in (False, True)
        )
        self._epoch = b""
        self._lookups = _Lookups(tier_type, self._looking, self._digest)
        self._thread = DaemonThreads("kvstore-tier")
        self._max_waiting = max(1, stated.queue_bytes // self._rows.shape[1])
        self._waiting = 0
        self._finished: list[JobResult] = []
        self._failed: set[bytes] = set()
        self._changes = threading.Condition()  # guards the three fields above

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Return whether a chunk is stored; RETRY while unknown."""
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        """Start to store chunks, which vLLM keeps in place until the job ends. It fails if it
        exceeds the queue beside waiting jobs; alone any job is accepted."""
        self._submit(self._store, job_metadata, self._max_waiting)

    def submit_load(self, job_metadata: Any) -> None:
        """Start to load chunks into the rows that vLLM reserved for them."""
        self._submit(self._load, job_metadata)

    def _submit(self, work: Callable[[Any], None], job: Any, most: float = math.inf) -> None:
        def fail_cancelled(done: Future[None]) -> None:
            if done.cancelled():  # by ``shutdown``
                self._end(job)

        with self._changes:
            is_full = self._waiting and self._waiting + len(job.keys) > most
            self._waiting += len(job.keys)
        if is_full:
            self._end(job)
            return
        self._thread.submit(partial(work, job)).add_done_callback(fail_cancelled)

    def _store(self, job: Any) -> None:
        def chunks() -> list[Chunk]:
            named = self._connector.keys_of([self._digest(key) for key in job.keys])
            return list(map(Chunk, named, self._tensors(job)))

        self._end(job, job.keys if self._connector.write_each(chunks) else ())

    def _load(self, job: Any) -> None:
        keys, digests = list(job.keys), [self._digest(key) for key in job.keys]
        self._end(job, keys[: self._connector.read(digests, self._tensors(job))])

    def _tensors(self, job: Any) -> list[LayerTensors]:
        """Return the rows of CPU memory of *job*'s chunks; below 0.30 vLLM calls them blocks."""
        rows = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
        return [identity.byte_tensors(self._rows[int(row)]) for row in rows]

    def _end(self, job: Any, done: Collection[bytes] = ()) -> None:
        is_whole = len(done) == len(job.keys)
        some = tuple(done) if job.is_promotion and done and not is_whole else None
        partial_keys = (some,) if REPORTS_PARTIAL_JOBS else ()
        with self._changes:
            self._finished.append(JobResult(job.job_id, is_whole, *partial_keys))
            self._waiting -= len(job.keys)
            if job.is_promotion:
                self._failed.update(set(job.keys) - set(done))
            self._changes.notify_all()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that ended since the last call."""
        with self._changes:
            finished, self._finished = self._finished, []
            failed, self._failed = self._failed, set()
        self._lookups.note_lost(failed)
        return finished

    def has_pending_work(self) -> bool:
        """Return whether jobs are in progress or unreported."""
        with self._changes:
            return bool(self._waiting or self._finished)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Accept each chunk as it is filled."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Drop a request's lookups."""
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """Start the lookups of a step."""
        self._lookups.flush()

    def drain_jobs(self) -> None:
        """Wait until every job ends: each is bounded by the client's deadline. vLLM calls this to
        reset its caches, as when weights change, and a tier gets no other sign of that: so chunks
        stored before are never loaded afterwards."""
        with self._changes:
            self._changes.wait_for(lambda: not self._waiting)
        self._epoch = os.urandom(identity.EPOCH_BYTES)

    def _digest(self, key: bytes) -> ChainDigest:
        return ChainDigest(blake3(self._epoch + bytes(key)).digest(length=DIGEST_BYTES))

    def shutdown(self) -> None:
        """Stop the threads and close the clients."""
        self._lookups.shutdown()
        with self._changes:
            self._changes.wait_for(lambda: not self._waiting, SHUTDOWN_S)
        self._thread.close()
        for connector in (self._connector, self._looking):
            connector.client.close()


if "KVStoreTier" not in SecondaryTierFactory._registry:
    SecondaryTierFactory.register_tier("KVStoreTier", __name__, "KVStoreTier")


def tier_model(config: Any, chunk_bytes: int, model_revision: str) -> Model:
    """Return the identity of chunks under vLLM's OffloadingConfig *config*. Raises ModelError."""
    if not model_revision:
        raise ModelError("model_revision", "", "give it: vLLM does not pass it on")
    parallel = config.parallel
    layout = {
        "dtype": config.model.dtype,
        # None where a release does not state it.
        "layout": getattr(config, "kv_cache_layout", None),
        "canonical": getattr(config, "canonical_layout", None),
        "groups": [
            (group.tokens_per_block, group.layer_names, getattr(group, "group_id", at))
            for at, group in enumerate(config.groups)
        ],
        "hash": config.cache.tokens_per_hash,
        "blocks": config.cache.blocks_per_chunk,
        "ranks": (parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size),
    }
    return Model(
        model_id=config.model.name,
        model_revision=identity.weights_name(config.model.name, model_revision),
        adapter_digest="none",
        quantization=f"vllm-chunks:{blake3(repr(layout).encode()).hexdigest()}",
        layer_groups=(identity.byte_group(chunk_bytes, "chunk_bytes"),),
        rope=identity.NO_ROPE,
        tokenizer_digest="vllm-block-hashes",
    )
