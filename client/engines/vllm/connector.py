"""The vLLM connector, loaded by vLLM itself: loads and stores prefixes of a model's KV.

vLLM creates one object in its scheduler and one in each worker. A store error is a miss; an
engine whose KV has no name, or unsupported pages, runs without the store and logs why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, kv_events
from vllm.distributed.kv_transfer.kv_connector.v1 import base, metrics
from vllm.logger import init_logger
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched import output as sched_output
from vllm.v1.kv_cache_interface import KVCacheConfig, get_kv_cache_spec_kind

from kvstore.client.chunk import Shard
from kvstore.client.client import Client
from kvstore.client.engines.base import Connector
from kvstore.client.engines.identity import BYTE_ROWS, NO_ROPE, byte_group
from kvstore.client.engines.vllm import messages
from kvstore.client.engines.vllm.blocks import BlockWriter, with_heads
from kvstore.client.engines.vllm.events import EventMaker, KVEvents
from kvstore.client.engines.vllm.identity import KVCacheShape, hashes_inputs, model_of, shape_of
from kvstore.client.engines.vllm.messages import VllmSettings
from kvstore.client.engines.vllm.scheduler import VllmScheduler
from kvstore.client.engines.vllm.worker import VllmWorker
from kvstore.client.options import ClientOptions
from kvstore.proto.errors import KVStoreError, LayoutMismatchError, ModelError
from kvstore.proto.types import DEFAULT_CHUNK_TOKENS, END_KINDS, Model

__all__ = ["KVStoreConnector"]

logger = init_logger(f"vllm.{__name__}")

OLDEST, NEWEST = (0, 26), (0, 33)
"""Releases that the connector is written for. vLLM's connector interface changes with them;
changes in between are detected by feature, not by version."""
TransferResults: Any = getattr(base, "KVConnectorTransferResults", None)
"""Reports loads that failed as a whole. None below 0.30, where vLLM accepts failed blocks only."""
HAS_BLOCK_TABLES = hasattr(getattr(sched_output, "KVConnectorBlockState", None), "get_block_ids")
"""Whether a step includes the block tables of all its requests: from 0.30 on."""
event_keys: Callable[[list[Any]], Any] = getattr(
    kv_cache_utils, "to_event_extra_keys", lambda keys: keys
)
"""Converts blocks' extra keys for events; the identity below 0.31."""


@dataclass
class StepMetadata(base.KVConnectorMetadata):  # type: ignore[misc]
    """The plan of a step, sent to the workers."""

    plan: messages.StepPlan = field(default_factory=messages.StepPlan)


@dataclass
class WorkerMetadata(base.KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The workers' report, sent to the scheduler."""

    report: messages.WorkerReport

    def aggregate(self, other: WorkerMetadata) -> WorkerMetadata:
        """Return the joint report."""
        return WorkerMetadata(self.report.joined(other.report))


class KVStoreConnector(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
    """The connector's scheduler side, or that of one worker: vLLM calls only its methods."""

    def __init__(
        self, vllm_config: VllmConfig, role: base.KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = VllmSettings.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._tables = messages.FollowedTables()
        self._registered: dict[str, torch.Tensor] = {}
        self._is_dropped = False
        self._reported: Counter[str] = Counter()
        if warning := untested():
            logger.warning(warning)
        is_scheduler = role == base.KVConnectorRole.SCHEDULER
        make: Callable[..., Any] = _scheduler if is_scheduler else _worker
        try:
            shape = shape_of(vllm_config, kv_cache_config)
            check_loads_can_fail(shape)
            side = make(vllm_config, settings, shape, kv_cache_config)
        except (*messages.INCOMPATIBLE, KVStoreError, OSError) as error:
            logger.error("running without the store: %s: %s", type(error).__name__, error)
            side = _refused(vllm_config, settings, error, is_scheduler=is_scheduler)
        self._side = side
        self._scheduler: VllmScheduler = side
        self._worker: VllmWorker = side

    @property
    def requires_kv_delivery(self) -> bool:
        """False for a cache: no request waits for its stores."""
        return False

    # --- scheduler

    def on_new_request(self, request: Any) -> None:
        """Start to look up the request."""
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded beside the engine's work; None: not known yet."""
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record the blocks to load into."""
        if num_external_tokens:
            self._scheduler.on_alloc(request, num_external_tokens, blocks.get_block_ids())

    def build_connector_meta(self, scheduler_output: Any) -> base.KVConnectorMetadata:
        """Return the plan of a step."""
        if HAS_BLOCK_TABLES:
            tables_of = scheduler_output.kv_connector_block_state.get_block_ids
        else:
            self._tables.follow(scheduler_output)
            tables_of = self._tables.of
        return StepMetadata(self._scheduler.build_plan(scheduler_output, tables_of))

    def update_connector_output(self, connector_output: Any) -> None:
        """Process the workers' report."""
        sent = connector_output.kv_connector_worker_meta
        if isinstance(sent, WorkerMetadata):
            self._scheduler.on_report(sent.report)

    def has_pending_push_work(self) -> bool:
        """Return whether to run idle steps: chunks wait in their pages for a free slot."""
        return self._scheduler.has_stores_waiting

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Drop the request; its blocks are free at once, and copied before they are overwritten."""
        self._scheduler.finished(request)
        return False, None

    request_finished_all_groups = request_finished

    def reset_cache(self) -> bool | None:
        """Stop loading earlier chunks: weights may have changed."""
        self._scheduler.reset()
        return True

    def take_events(self) -> Iterable[Any]:
        """Return the events of chunks stored and removed since the last call."""
        events = self._scheduler.events
        return events.take() if events is not None else ()

    # --- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the engine's pages."""
        self._registered = kv_caches
        pages = {name: with_heads(each) for name, each in kv_caches.items()}
        if refusal := self._worker.register(pages, self._writer):
            logger.error("running without the store: %s", refusal)

    def unregister_kv_caches(self) -> None:
        """Release the pages before vLLM frees them."""
        self._is_dropped |= self._worker.drop_pages()

    def restore_kv_caches(self) -> None:
        """Register the pages again once they are restored."""
        if self._is_dropped:
            self._is_dropped = False
            self.register_kv_caches(self._registered)

    def _writer(self, layer_name: str) -> BlockWriter:
        layers = self._vllm_config.compilation_config.static_forward_context
        dtype = self._vllm_config.model_config.dtype
        return block_writer(layer_name, layers.get(layer_name), dtype)

    def handle_preemptions(self, kv_connector_metadata: base.KVConnectorMetadata) -> None:
        """Copy chunks still to be stored from blocks that the step is about to overwrite."""
        self._worker.save_before_overwrite(_plan_in(kv_connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the loads of the step."""
        self._worker.load(_plan_in(self._get_connector_metadata()))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is computed only after its load."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: whole chunks are stored at the end of the step."""

    def wait_for_save(self) -> None:
        """Copy the step's completed chunks and send them in the background."""
        self._worker.store(_plan_in(self._get_connector_metadata()))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads ended, successful or not."""
        is_idle = _plan_in(self._get_connector_metadata()).is_idle
        return None, self._worker.finished_loads(is_idle=is_idle) or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return the same, and the requests that vLLM has to recompute as a whole."""
        _, over = self.get_finished(finished_req_ids)
        failed = self._worker.failed_loads()
        return TransferResults(finished_recving=over or set(), failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that vLLM has to recompute."""
        return self._worker.failed_blocks()

    def build_connector_worker_meta(self) -> base.KVConnectorWorkerMetadata | None:
        """Return the report to the scheduler."""
        report = self._worker.report()
        return WorkerMetadata(report) if report is not None else None

    # --- both

    def get_kv_connector_stats(self) -> metrics.KVConnectorStats | None:
        """Return this side's counts since the last call."""
        counted = self._side.counted.copy()
        new, self._reported = counted - self._reported, counted
        return StoreStats(dict(new)) if new else None

    @classmethod
    def build_kv_connector_stats(cls, data: Any = None) -> metrics.KVConnectorStats:
        """Return counts received from another process."""
        return StoreStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *terms: Any) -> metrics.KVConnectorPromMetrics:
        """Return the exporter of the counts to vLLM's own metrics."""
        return StoreMetrics(*terms)

    def shutdown(self) -> None:
        """Stop the threads and clients, after a short wait for stores in progress."""
        self._side.close()


def _plan_in(metadata: Any) -> messages.StepPlan:
    return metadata.plan if isinstance(metadata, StepMetadata) else messages.StepPlan()


def block_writer(name: str, layer: Any, dtype: torch.dtype) -> BlockWriter:
    """Return a function that writes KV into pages by the attention backend of *layer*, as *dtype*
    and multiplied by the scale that the backend divides by."""

    def write(parts: Sequence[torch.Tensor], pages: torch.Tensor, slots: torch.Tensor) -> None:
        if not hasattr(getattr(layer, "impl", None), "do_kv_cache_update"):
            raise LayoutMismatchError("layers", name, "unsupported attention backend")
        if len(parts) == 2:
            if parts[0].element_size() == 1:
                scales = (layer._k_scale_float, layer._v_scale_float)
                pairs = zip(parts, scales, strict=True)
                parts = [(part.float() * scale).to(dtype) for part, scale in pairs]
            layer.impl.do_kv_cache_update(layer, *parts, pages, slots)
            return
        latents, rank = parts[0], layer.kv_lora_rank
        layer.impl.do_kv_cache_update(
            latents[:, 0, :rank], latents[..., rank:], pages.squeeze(1), slots,
            layer.kv_cache_dtype, layer._k_scale,
        )  # fmt: skip

    return write


def event_maker(config: VllmConfig, cache: KVCacheConfig, shape: KVCacheShape) -> EventMaker:
    """Return vLLM's event factory, for the KV cache groups that keep all of a prompt."""
    block_tokens = shape.block_tokens
    _, hash_tokens = kv_cache_utils.resolve_kv_cache_block_sizes(cache, config)
    kinds = [get_kv_cache_spec_kind(group.kv_cache_spec) for group in cache.kv_cache_groups]
    ends = {table for group in shape.groups if group.kind in END_KINDS for table in group.tables}

    def hashes(request: Any) -> list[Any]:
        found = kv_cache_utils.resolve_block_hashes(request.block_hashes, hash_tokens, block_tokens)
        return [kv_cache_utils.maybe_convert_block_hash(one) for one in found]

    def extra_keys(request: Any, start: int, stop: int) -> Any:
        keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, stop, 0)
        return (event_keys([keys]) or [None])[0]

    groups = [(at, kind.value) for at, kind in enumerate(kinds) if at not in ends]
    return EventMaker(block_stored, block_removed, hashes, extra_keys, block_tokens, tuple(groups))


# --- the two sides


def _scheduler(
    config: VllmConfig, settings: VllmSettings, shape: KVCacheShape, cache: KVCacheConfig
) -> VllmScheduler:
    transfer = config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        fix = 'set it to "recompute": else vLLM fails a request whose load failed'
        raise ModelError("kv_load_failure_policy", transfer.kv_load_failure_policy, fix)
    role = messages.Role(
        transfer.is_kv_consumer,
        transfer.is_kv_producer,
        settings.handover_ms,
        settings.wait_ms,
        settings.first_token_ms,
        getattr(config, "max_concurrent_batches", 1) - 1,
    )
    lookups = _connector(config, settings, shape, None)
    scheduler = VllmScheduler(lookups, shape, role=role, has_hashes=hashes_inputs(config))
    if getattr(config.kv_events_config, "enable_kv_cache_events", False):
        maker, chunk_tokens = event_maker(config, cache, shape), scheduler.chunk_tokens
        scheduler.events = KVEvents(maker, chunk_tokens, shape.ranks * shape.stages)
    return scheduler


def _worker(
    config: VllmConfig, settings: VllmSettings, shape: KVCacheShape, _: KVCacheConfig
) -> VllmWorker:
    connector = _connector(config, settings, shape, get_tensor_model_parallel_rank())
    worker = VllmWorker(connector, shape, settings.queue_bytes)
    worker.cost = messages.FlopsModel.of(config.model_config.hf_text_config)
    worker.reports_stores = getattr(config.kv_events_config, "enable_kv_cache_events", False)
    return worker


def _connector(
    config: VllmConfig, settings: VllmSettings, shape: KVCacheShape, rank: int | None
) -> Connector:
    """Return the connector of a worker, or, if *rank* is None, of the scheduler's lookups."""
    chunk_tokens = settings.chunk_tokens_for(shape.block_tokens)
    identity = model_of(config, shape, settings.model_revision)
    name = "vllm-lookup" if rank is None else f"vllm-rank-{rank}"
    options = settings.client_options(chunk_tokens, name, is_lookup=rank is None)
    if rank is not None and shape.ranks * shape.stages > 1:
        shard = Shard.of_rank(identity, rank, shape.ranks, shape.own_layers)
        options = replace(options, shard=shard)
    client_class = Client
    if rank is not None and config.device_config.device_type == "cuda":
        from kvstore.client.cuda import CudaClient  # it may lack cupy

        client_class = CudaClient
    accuracy = settings.accuracy_for(shape, config.device_config.device_type)
    if accuracy != settings.accuracy:
        fix = "is ignored: only exact copies are loaded into these pages"
        logger.warning("accuracy=%s %s", settings.accuracy, fix)
    return Connector(
        client_class(settings.address, identity, options),
        durable=settings.durable,
        prefill=settings.prefill if rank is None else None,
        accuracy=accuracy,
    )


NO_SHAPE = KVCacheShape((), DEFAULT_CHUNK_TOKENS)
"""For a refused engine: nothing is loaded or stored."""
NOWHERE = "127.0.0.1:1"
"""An address where no server listens."""


def _refused(config: Any, settings: VllmSettings, error: Exception, *, is_scheduler: bool) -> Any:
    """Return a side that runs without the store because of *error*, and reports it."""
    name = "vllm-lookup" if is_scheduler else "vllm-rank"
    connector = Connector(client_of_refused(config, settings, name))
    text = f"{type(error).__name__}: {error}"
    if not is_scheduler:
        worker = VllmWorker(connector, NO_SHAPE, settings.queue_bytes)
        worker.refuse(text)
        return worker
    connector.report_refusal(text)
    reason = str(getattr(error, "field", type(error).__name__))
    return VllmScheduler(connector, NO_SHAPE, refusal=reason)


def client_of_refused(config: Any, settings: VllmSettings, name: str) -> Client:
    """Return a client of an engine whose KV has no name."""
    model = str(getattr(getattr(config, "model_config", None), "model", "unknown"))
    group = byte_group(BYTE_ROWS, "model")
    identity = Model(model, "refused", "none", "none", (group,), NO_ROPE, "none")
    try:
        options = settings.client_options(DEFAULT_CHUNK_TOKENS, name, is_lookup=False)
        options = replace(options, transport="grpc", staging_bytes=1)
        return Client(settings.address, identity, options)
    except (*messages.INCOMPATIBLE, KVStoreError, OSError):  # invalid settings
        return Client(NOWHERE, identity, ClientOptions())


# --- counts for vLLM's logs and metrics


class StoreStats(metrics.KVConnectorStats):  # type: ignore[misc]
    """Counts by name, summed over ranks and time."""

    def reset(self) -> None:
        """Reset all counts."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: metrics.KVConnectorStats) -> metrics.KVConnectorStats:
        """Add the counts of *other*."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts for vLLM's log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Return whether there are no counts."""
        return not self.data


class StoreMetrics(metrics.KVConnectorPromMetrics):  # type: ignore[misc]
    """The counter ``vllm:kvstore_events_total``, with the count's name as label ``event``."""

    def __init__(self, config: Any, types: Any, labelnames: list[str], values: Any) -> None:
        super().__init__(config, types, labelnames, values)
        self._events = self._counter_cls(
            name="vllm:kvstore_events",
            documentation="Counts of the kvstore connector, by event.",
            labelnames=[*labelnames, "event"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of one engine."""
        values = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            self._events.labels(*values, name).inc(count)


def _known(event: Any) -> Callable[..., Any]:
    """Return a factory of *event* that drops fields this release does not have."""
    names = event.__struct_fields__
    return lambda **given: event(**{name: given[name] for name in given if name in names})


block_stored, block_removed = _known(kv_events.BlockStored), _known(kv_events.BlockRemoved)


def untested() -> str:
    """Return a warning if this release of vLLM is not supported, or ""."""
    found = vllm.__version__
    numbers = [int(part) for part in found.split(".")[:2] if part.isdecimal()]
    if OLDEST <= tuple(numbers) <= NEWEST:
        return ""
    first, last = (".".join(map(str, one)) for one in (OLDEST, NEWEST))
    return f"kvstore supports vLLM {first} to {last}, not {found}"


def check_loads_can_fail(shape: KVCacheShape) -> None:
    """Raise ModelError if vLLM would take a failed load for a complete one: with several block
    tables or windows it has to recompute all, which releases below 0.30 cannot."""
    if shape.all_or_nothing and TransferResults is None:
        what = "sliding windows" if shape.has_ends else f"{shape.tables} KV cache groups"
        fix = f"vLLM {vllm.__version__} cannot recompute a failed load of it; 0.30 can"
        raise ModelError("kv_cache_groups", what, fix)
