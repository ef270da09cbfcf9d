"""The vLLM connector, loaded by vLLM itself: prefixes of a model's KV from and to a store.

    --kv-transfer-config '{"kv_connector": "KVStoreConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "kvstore.client.engines.vllm",
      "kv_load_failure_policy": "recompute"}'

vLLM makes one object in its scheduler and one in each worker. Whatever goes wrong in the store
is a miss there; an engine whose KV has no name, or lies in pages that are not understood, runs
as if there were no store, and says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.logger import init_logger

from kvstore.client.client import Client
from kvstore.client.engines.base import Connector
from kvstore.client.engines.vllm_identity import EngineShape, representation_of, shape_of
from kvstore.client.engines.vllm_orders import StepOrders, WorkerNews
from kvstore.client.engines.vllm_scheduler import VllmScheduler
from kvstore.client.engines.vllm_settings import VllmSettings
from kvstore.client.engines.vllm_stats import StoreMetrics, StoreStats
from kvstore.client.engines.vllm_worker import RefusedWorker, VllmWorker
from kvstore.proto.errors import KVStoreError, LayoutMismatchError, RepresentationError

__all__ = ["KVStoreConnector"]

TESTED_VERSION = "0.32"
"""vLLM's interface of connectors changes with its minor versions."""

logger = init_logger(f"vllm.{__name__}")


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The orders of a step, on their way to the workers."""

    orders: StepOrders = field(default_factory=StepOrders)


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What workers have to say, on its way to the scheduler."""

    news: WorkerNews

    def aggregate(self, other: WorkerMetadata) -> WorkerMetadata:
        """Return what both say."""
        return WorkerMetadata(self.news.joined(other.news))


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One side of the connector: the scheduler's, or that of one worker."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = VllmSettings.of(transfer.kv_connector_extra_config)
        self._scheduler: VllmScheduler | None = None
        self._worker: VllmWorker | RefusedWorker | None = None
        self._layers = vllm_config.compilation_config.static_forward_context
        if not vllm.__version__.startswith(TESTED_VERSION):
            logger.warning("kvstore is tested with vLLM %s, not %s", TESTED_VERSION,
                           vllm.__version__)  # fmt: skip
        try:
            shape = shape_of(vllm_config, kv_cache_config)
            chunk_tokens = settings.chunk_tokens_for(shape.block_tokens)
            if role == KVConnectorRole.SCHEDULER:
                self._scheduler = _scheduler(vllm_config, settings, shape, chunk_tokens)
            else:
                rank = get_tensor_model_parallel_rank()
                connector = _connector(vllm_config, settings, shape, rank, chunk_tokens)
                self._worker = VllmWorker(connector, shape, settings.queue_bytes)
        except KVStoreError as error:
            logger.error("running without the store: %s", error)
            if role == KVConnectorRole.WORKER:
                self._worker = RefusedWorker(str(error))

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: nobody waits for what it stores."""
        return False

    # --- scheduler

    def on_new_request(self, request: Any) -> None:
        """Begin to look the request up."""
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded beside the engine's work; None: ask again."""
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take note of the blocks to load into."""
        if self._scheduler is not None and num_external_tokens:
            self._scheduler.allocated(request, num_external_tokens, blocks.get_block_ids()[0])

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the orders of a step."""
        if self._scheduler is None:
            return StepMetadata()
        state = scheduler_output.kv_connector_block_state
        orders = self._scheduler.orders(scheduler_output, lambda name: state.get_block_ids(name)[0])
        return StepMetadata(orders)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in what workers have to say."""
        said = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(said, WorkerMetadata):
            self._scheduler.learn(said.news)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; its blocks are free at once, as what is stored was copied."""
        if self._scheduler is not None:
            self._scheduler.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do the same for an engine with several kinds of layers."""
        return self.request_finished(request, [])

    def reset_cache(self) -> bool | None:
        """Load nothing any more of what was stored before: weights may have changed."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    def take_events(self) -> Iterable[Any]:
        """Return no events: what the store holds is not the engine's to announce."""
        return ()

    # --- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's pages."""
        if self._worker is None:
            return
        refusal = self._worker.register(kv_caches, self._write_block(next(iter(kv_caches))))
        if refusal:
            logger.error("running without the store: %s", refusal)

    def _write_block(self, layer_name: str) -> Any:
        """Return how the attention backend of a layer writes K and V into pages."""
        layer = self._layers.get(layer_name)

        def write(
            keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
        ) -> None:
            if not hasattr(getattr(layer, "impl", None), "do_kv_cache_update"):
                raise LayoutMismatchError(
                    "layers", layer_name, "its backend writes in no known way"
                )
            layer.impl.do_kv_cache_update(layer, keys, values, pages, slots)

        return write

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the loads of the step."""
        if self._worker is not None:
            self._worker.load(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: a request that is computed has been loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: whole chunks are stored at the end of the step."""

    def wait_for_save(self) -> None:
        """Copy what the step completed; it is sent while the engine goes on."""
        if self._worker is not None:
            self._worker.store(self._orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads are over, whether they succeeded or not."""
        if self._worker is None:
            return None, None
        return None, self._worker.finished_loads(is_idle=self._orders().is_idle) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that vLLM has to compute after all."""
        return self._worker.failed_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return what the scheduler has to learn."""
        news = self._worker.news() if self._worker is not None else None
        return WorkerMetadata(news) if news is not None else None

    def _orders(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        return metadata.orders if isinstance(metadata, StepMetadata) else StepOrders()

    # --- both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what this side counted since the last call."""
        side = self._scheduler or self._worker
        counts = side.counts() if side is not None else {}
        return StoreStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Return counts that came from another process."""
        return StoreStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Return what exports the counts with vLLM's own metrics."""
        return StoreMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End the threads and the clients, after a moment for stores under way."""
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()


def _scheduler(
    config: VllmConfig, settings: VllmSettings, shape: EngineShape, chunk_tokens: int
) -> VllmScheduler:
    transfer = config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        raise RepresentationError(
            "kv_load_failure_policy", transfer.kv_load_failure_policy,
            'set it to "recompute": else vLLM ends a request whose load failed',
        )  # fmt: skip
    ranks = [
        _connector(config, settings, shape, rank, chunk_tokens, is_lookup=True)
        for rank in range(shape.ranks)
    ]
    return VllmScheduler(
        ranks,
        shape.block_tokens,
        loads=transfer.is_kv_consumer,
        stores=transfer.is_kv_producer,
    )


def _connector(
    config: VllmConfig,
    settings: VllmSettings,
    shape: EngineShape,
    rank: int,
    chunk_tokens: int,
    *,
    is_lookup: bool = False,
) -> Connector:
    identity = representation_of(config, shape, rank, settings.model_revision)
    name = f"vllm-{'lookup' if is_lookup else 'rank'}-{rank}"
    options = settings.options(chunk_tokens, name, is_lookup=is_lookup)
    return Connector(Client(settings.address, identity, options), durable=settings.durable)
