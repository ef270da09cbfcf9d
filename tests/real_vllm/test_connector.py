"""What vLLM asks of the class of a connector before there is an engine."""

from __future__ import annotations

import inspect
from dataclasses import fields
from types import SimpleNamespace

import pytest
from vllm.config import LoRAConfig, ModelConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from kvstore.client.engines import vllm_identity
from kvstore.client.engines.vllm import KVStoreConnector
from kvstore.client.engines.vllm_orders import LoadOrder, StepOrders
from kvstore.client.engines.vllm_refused import RefusedWorker


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


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_an_engine_that_nobody_understands_starts_and_every_request_is_a_counted_miss(
    role: KVConnectorRole,
) -> None:
    """As objects of another release: whatever is wrong with them is no reason not to start."""
    transfer = SimpleNamespace(kv_connector_extra_config={}, kv_load_failure_policy="recompute")
    config = SimpleNamespace(
        kv_transfer_config=transfer, compilation_config=SimpleNamespace(static_forward_context={})
    )
    made = KVStoreConnector(config, role, None)
    request = SimpleNamespace(request_id="a", num_tokens=9)
    made.register_kv_caches({})
    made.on_new_request(request)
    assert made.get_num_new_matched_tokens(request, 0) == (0, False)
    state = SimpleNamespace(get_block_ids=lambda _: ([],))
    meta = made.build_connector_meta(SimpleNamespace(kv_connector_block_state=state))
    assert meta.orders == StepOrders()
    assert made.request_finished(request, []) == (False, None)
    assert made.reset_cache() is True
    assert list(made.take_events()) == []
    stats = made.get_kv_connector_stats()
    if role is KVConnectorRole.SCHEDULER:
        assert stats is not None
        assert stats.data == {"lookups": 1, "miss_AttributeError": 1, "prompt_tokens": 9}
    else:
        assert stats is None
        said = made.build_connector_worker_meta()
        assert said is not None
        assert "model_config" in said.news.refusal
    made.shutdown()


def test_vllm_has_every_setting_that_is_in_names() -> None:
    """One that was renamed would be left out of them in silence."""
    parts = {
        "model_config": ModelConfig, "lora_config": LoRAConfig,
        "multimodal_config": MultiModalConfig,
    }  # fmt: skip
    known = {part: {field.name for field in fields(kind)} for part, kind in parts.items()}
    asked = [(part, name) for part, names in vllm_identity._TERMS.items() for name in names]
    assert [one for one in asked if one[1] not in known[one[0]]] == []


def test_vllms_cpu_backends_have_no_pools_that_are_refused() -> None:
    """Those with a scale for each token and head are of its GPU backends: refused by name."""
    taken = {
        *CPUAttentionBackend.supported_kv_cache_dtypes,
        *CPUMLABackend.supported_kv_cache_dtypes,
    }
    assert taken == {"auto", "fp8", "fp8_e4m3", "fp8_e5m2"}
