"""A real vLLM in its own process, with or without a connector."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.lib import ROOT

_OWN = Path(sys.prefix).parent.name
VERSION = _OWN.removeprefix("vllm-") if _OWN.startswith("vllm-") else "0.32"
"""vLLM's version: that of the current environment, if it is one of vLLM's."""

PYTHON = ROOT / "build" / f"vllm-{VERSION}" / "venv" / "bin" / "python"
"""The interpreter of the environment that ``make vllm-env`` makes."""

_ENVIRONMENT = {
    # Keeps vLLM fast and quiet on a small machine; see docs/vllm.md.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}


class EngineProcess:
    """One engine over *model*; *store* is its ``kv_connector_extra_config``, which may include a
    ``kv_role``; None for no store.

    *settings* are further arguments of ``vllm.LLM``, *child* the module that runs it and its
    arguments. Its standard error goes to *log*.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        store: dict[str, Any] | None = None,
        child: Sequence[str] = ("bench.lib.vllm_child",),
        **settings: Any,
    ) -> None:
        arguments = {
            "model": str(model), "dtype": "float32", "enforce_eager": True, "block_size": 32,
            "max_model_len": 3072, "max_num_seqs": 8, "disable_log_stats": False, **settings,
        }  # fmt: skip
        if store is not None:
            store = dict(store)
            role = store.pop("kv_role", "kv_both")
            arguments["kv_transfer_config"] = {
                "kv_connector": "KVStoreConnector",
                "kv_connector_module_path": "kvstore.client.engines.vllm",
                "kv_role": role,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": store,
            }
        self.log = log
        settled = [f"{name}={value}" for name, value in _ENVIRONMENT.items()]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                ["env", *settled, str(PYTHON), "-m", *child],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._send(arguments)
        assert self._receive() == "ready"

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the engine ended: {self.log.read_text()[-4000:]}"
        return json.loads(line)

    def request(self, do: str, **arguments: Any) -> Any:
        """Request one action of the engine; return its answer."""
        self._send({"do": do, **arguments})
        return self._receive()

    def generate(self, *prompts: list[int], **arguments: Any) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self.request("generate", prompts=prompts, **arguments)
        return answers

    def fresh(self) -> None:
        assert self.request("settle")
        assert self.request("reset")

    def forget(self) -> None:
        assert self.request("reset")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def make_model(folder: Path, scale: int = 1) -> None:
    """Write the tiny model, in the engines' environment; see ``bench.lib.vllm_tiny_model``."""
    subprocess.run(
        [PYTHON, "-m", "bench.lib.vllm_tiny_model", folder, str(scale)], cwd=ROOT, check=True
    )
