"""vLLM's own CPU offloading with this store below it."""

from __future__ import annotations

from typing import Any

from bench.lib.vllm import EngineProcess
from helpers.local_server import eventually
from helpers.server_process import ServerProcess
from real_vllm.prompts import EngineMaker, assert_same, prompt


def offloading(address: str) -> dict[str, Any]:
    """Return the engine's arguments."""
    tier = {
        "type": "KVStoreTier", "module_path": "kvstore.client.engines.vllm_tier",
        "address": address, "model_revision": "tiny-1", "lookup_deadline_ms": 5000,
    }  # fmt: skip
    extra = {
        "spec_name": "CpuTieringSpec", "spec_module_path": "bench.lib.vllm_offloading",
        "cpu_bytes_to_use": 64 << 20, "secondary_tiers": [tier],
    }  # fmt: skip
    connector = {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }  # fmt: skip
    return {"kv_transfer_config": connector}


def test_what_one_engine_offloads_another_promotes(
    make_engine: EngineMaker, oracle: EngineProcess, store: ServerProcess
) -> None:
    one = prompt(220, 300)
    expected = oracle.generate(one)
    oracle.forget()
    first = make_engine(None, **offloading(store.address))
    assert_same(first.generate(one), expected)
    first.close()
    second = make_engine(None, **offloading(store.address))

    def is_promoted() -> bool:
        second.forget()
        found = second.generate(one)
        assert_same(found, expected)
        return bool(found[0]["cached"] >= 256)

    assert eventually(is_promoted)
    second.close()
