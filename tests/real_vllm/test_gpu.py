"""The real vLLM on a CUDA device: pages in fp8, latents, and our tier below its own offloading.

Its twins on the CPU: ``test_engine``, ``test_kinds``, ``test_sharing``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.gpu.child import Store, write
from real_vllm.gpu_engine import TOKENS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LIMIT_S = 150.0
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",  # engines that share chunks below vLLM's offloading need the same
}  # fmt: skip


def ask(*words: str) -> dict[str, Any]:
    """Return what an engine of its own process says."""
    done = subprocess.run(
        [sys.executable, "-m", "real_vllm.gpu_engine", *words],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", ["bf16", "fp8", "mla"])
def test_a_full_hit_is_what_vllms_own_cache_gives(name: str, tmp_path: Path) -> None:
    found = ask(name, str(tmp_path))
    assert not found["refusal"]
    assert found["cached"] == [TOKENS, TOKENS]
    own, hit = found["tokens"]
    assert hit == own
    assert 0 <= found["apart"] <= found["noise"]
    assert found["control"] != 0.0, "the control, whose KV is another, did not differ"


def test_a_tier_below_vllms_offloading_gives_another_engine_what_one_computed(
    tmp_path: Path,
) -> None:
    write(tmp_path / "model", "tiny")
    store = Store("cpu", 1 << 30, tmp_path)
    store.start()
    try:
        first, second = (ask("tier", str(tmp_path), store.address) for _ in range(2))
    finally:
        store.stop()
    assert (first["cached"], first["loaded"]) == (0, 0)
    assert (second["cached"], second["loaded"]) == (TOKENS, TOKENS // 256)
    assert second["tokens"] == first["tokens"]
