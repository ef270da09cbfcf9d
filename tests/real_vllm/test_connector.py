"""What vLLM asks of the class of a connector before there is an engine."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.vllm_stand_ins import FullAttentionSpec, SlidingWindowSpec, cache_config, engine_config
from vllm.config import LoadConfig, LoRAConfig, ModelConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.core.sched.output import SchedulerOutput

from kvstore.client.engines.base import Connector
from kvstore.client.engines.vllm import KVStoreConnector
from kvstore.client.engines.vllm import connector as vllm_versions
from kvstore.client.engines.vllm import identity as vllm_identity
from kvstore.client.engines.vllm.connector import NOWHERE, TransferResults
from kvstore.client.engines.vllm.identity import shape_of
from kvstore.client.engines.vllm.messages import LoadSpec, StepPlan, VllmSettings
from kvstore.client.engines.vllm.worker import VllmWorker
from kvstore.proto.errors import ModelError

BELOW_030 = TransferResults is None


def connector() -> KVStoreConnector:
    """Return one whose construction is over, without an engine around it."""
    return KVStoreConnector.__new__(KVStoreConnector)


def refused_worker() -> VllmWorker:
    """Return one that is refused, whose server nobody answers for."""
    config = SimpleNamespace()
    client = vllm_versions.client_of_refused(config, VllmSettings.of({"address": NOWHERE}), "rank")
    worker = VllmWorker(Connector(client), vllm_versions.NO_SHAPE, 1)
    worker.refuse("no reason")
    return worker


@pytest.mark.skipif(BELOW_030, reason="it asks for failed blocks only")
def test_loads_that_failed_as_a_whole_are_over_and_failed_in_the_same_step() -> None:
    made = connector()
    made._worker = refused_worker()
    made._get_connector_metadata = SimpleNamespace  # no plan
    made._worker.load(StepPlan((LoadSpec("a", (), ((1,), (2,)), all_or_nothing=True),)))
    assert made._worker.settled(20.0)
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
    if role is KVConnectorRole.WORKER:
        made.register_kv_caches({})
        assert made.get_kv_connector_stats() is None
        sent = made.build_connector_worker_meta()
        assert sent is not None
        assert "model_config" in sent.report.refusal
        made.shutdown()
        return
    request = SimpleNamespace(request_id="a", num_tokens=9)
    made.on_new_request(request)
    assert made.get_num_new_matched_tokens(request, 0) == (0, False)
    output = SchedulerOutput.make_empty()
    output.kv_connector_block_state = SimpleNamespace(get_block_ids=lambda _: ([],))
    meta = made.build_connector_meta(output)
    assert (meta.plan.loads, meta.plan.stores) == ((), ())
    assert made.request_finished(request, []) == (False, None)
    assert made.reset_cache() is True
    assert list(made.take_events()) == []
    stats = made.get_kv_connector_stats()
    assert stats is not None
    assert stats.data == {"lookups": 1, "miss_AttributeError": 1, "prompt_tokens": 9}
    assert made.get_kv_connector_stats() is None, "nothing was counted since"
    made.shutdown()


def test_pages_given_up_for_a_sleep_are_registered_again_once() -> None:
    asked: list[str] = []
    made, pages = connector(), {"layer": torch.zeros(1)}
    made._registered, made._is_dropped = {}, False

    class Worker:
        def register(self, registered: Any, writer: Any) -> str:
            asked.extend(registered)
            return ""

        def drop_pages(self) -> bool:
            return bool(asked)

    made._worker = Worker()
    made.unregister_kv_caches()
    made.restore_kv_caches()
    assert asked == [], "there were none"
    made.register_kv_caches(pages)
    made.unregister_kv_caches()
    for _ in range(2):
        made.restore_kv_caches()
    assert asked == ["layer", "layer"]


@pytest.mark.parametrize(("installed", "is_known"), [
    ("0.25.1", False), ("0.26.0", True), ("0.33.0rc1", True), ("0.34.0", False), ("dev", False),
])  # fmt: skip
def test_a_release_that_the_connector_is_not_written_for_is_named_beside_those_it_is(
    monkeypatch: pytest.MonkeyPatch, installed: str, is_known: bool
) -> None:
    monkeypatch.setattr("vllm.__version__", installed)
    said = f"kvstore supports vLLM 0.26 to 0.33, not {installed}"
    assert vllm_versions.untested() == ("" if is_known else said)


def test_a_model_whose_loads_fail_as_a_whole_is_refused_where_vllm_cannot_be_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, window = FullAttentionSpec(), SlidingWindowSpec()
    config = engine_config("tiny")
    monkeypatch.setattr(vllm_versions, "TransferResults", None)
    vllm_versions.check_loads_can_fail(shape_of(config, cache_config(plain)))
    for specs in ((plain, plain), (window,)):
        shape = shape_of(config, cache_config(*specs))
        monkeypatch.setattr(vllm_versions, "TransferResults", None)
        with pytest.raises(ModelError, match=r"kv_cache_groups.*0\.30 can"):
            vllm_versions.check_loads_can_fail(shape)
        monkeypatch.setattr(vllm_versions, "TransferResults", object)
        vllm_versions.check_loads_can_fail(shape)


def test_events_have_no_fields_that_a_release_does_not_know() -> None:
    made = vllm_versions.block_removed(
        block_hashes=[b"a"], medium="STORAGE", group_idx=0, locality="REMOTE", ownership="kvstore",
        later=1,
    )  # fmt: skip
    assert (made.block_hashes, made.medium, made.locality) == ([b"a"], "STORAGE", "REMOTE")


def test_vllm_has_every_setting_that_is_in_names() -> None:
    """One that was renamed would be left out of them in silence."""
    parts = {
        "model_config": ModelConfig, "lora_config": LoRAConfig,
        "multimodal_config": MultiModalConfig, "load_config": LoadConfig,
    }  # fmt: skip
    known = {part: {field.name for field in fields(kind)} for part, kind in parts.items()}
    asked = [(part, name) for part, names in vllm_identity._TERMS.items() for name in names]
    absent = {name for part, name in asked if name not in known[part]}
    assert absent <= ({"mm_device_do_normalize", "video_pruning_method"} if BELOW_030 else set())


def test_vllms_cpu_backends_have_no_pools_that_are_refused() -> None:
    """Those with a scale for each token and head are of its GPU backends: refused by name."""
    latent = pytest.importorskip("vllm.v1.attention.backends.mla.cpu_mla").CPUMLABackend
    taken = {*CPUAttentionBackend.supported_kv_cache_dtypes, *latent.supported_kv_cache_dtypes}
    assert taken == {"auto", "fp8", "fp8_e4m3", "fp8_e5m2"}
