"""What vLLM asks of the class of a connector before there is an engine."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from kvstore.client.engines.vllm import KVStoreConnector
from kvstore.client.engines.vllm_orders import LoadOrder, StepOrders
from kvstore.client.engines.vllm_worker import RefusedWorker


def connector() -> KVStoreConnector:
    """Return one whose construction is over, without an engine around it."""
    return KVStoreConnector.__new__(KVStoreConnector)


def test_nobody_waits_for_what_a_cache_stores() -> None:
    assert connector().requires_kv_delivery is False


def test_it_takes_several_groups_of_layers_and_their_configuration() -> None:
    assert supports_hma(KVStoreConnector)
    assert "kv_cache_config" in inspect.signature(KVStoreConnector).parameters


def test_loads_that_failed_as_a_whole_are_over_and_failed_in_the_same_step() -> None:
    made = connector()
    made._worker = RefusedWorker("no reason")
    made._get_connector_metadata = SimpleNamespace  # no orders
    made._worker.load(StepOrders((LoadOrder("a", (), ((1,), (2,)), all_or_nothing=True),)))
    results = made.get_transfer_results(set())
    assert results.finished_recving == results.failed_recving == {"a"}
    assert made.get_block_ids_with_load_errors() == set()


def test_vllms_cpu_backends_have_no_pools_that_are_refused() -> None:
    """Those with a scale for each token and head are of its GPU backends: refused by name."""
    taken = {
        *CPUAttentionBackend.supported_kv_cache_dtypes,
        *CPUMLABackend.supported_kv_cache_dtypes,
    }
    assert taken == {"auto", "fp8", "fp8_e4m3", "fp8_e5m2"}
