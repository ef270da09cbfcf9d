"""One vLLM engine of ``bench.gpu engines``: reads an order and prints the results, lines of JSON.

Runs in its own process, with our server if it uses one. ``python -m bench.gpu.child FOLDER SIZE``
writes the model: a Llama with random weights and peaked attention, so that damage to KV shows in
the generated tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from bench.gpu.engines import (
    CHUNK_TOKENS,
    DECODE_FIRST,
    DECODE_PROMPT,
    DECODE_REQUESTS,
    DECODE_ROUNDS,
    DECODE_STEPS,
    HEAD_DIM,
    KV_HEADS,
    SIZES,
    VOCABULARY,
    WARM_UP_TOKENS,
    prompt,
)
from bench.lib.processes import free_port
from bench.lib.workload import serving

SHARP, PLAIN = 1.7, 1.0
LOUD = 2.0
"""Gains of weights: queries and keys; most others; values and the output head."""


def config_of(size: str) -> dict[str, Any]:
    """Return the ``config.json`` of a model of *size*."""
    hidden, inner, layers, heads = SIZES[size]
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": min(KV_HEADS, heads),
        "head_dim": HEAD_DIM, "vocab_size": VOCABULARY, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02,
    }  # fmt: skip


class Weights:
    """Makes random weights, on the device if there is one, and counts the written bytes."""

    def __init__(self, folder: Path, hidden: int) -> None:
        import torch

        torch.manual_seed(11)
        self._folder, self._hidden, self._torch = folder, hidden, torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self.files: dict[str, str] = {}
        self.total = 0

    def noise(self, rows: int, columns: int, gain: float) -> Any:
        """Return a matrix whose products have *gain* squared times the variance of the input."""
        torch = self._torch
        made = torch.randn(rows, columns, device=self._device, dtype=torch.bfloat16)
        return (made * (gain / columns**0.5)).cpu()

    def ones(self) -> Any:
        return self._torch.ones(self._hidden, dtype=self._torch.bfloat16)

    def save(self, name: str, tensors: dict[str, Any]) -> None:
        from safetensors.torch import save_file

        save_file(tensors, self._folder / name, metadata={"format": "pt"})
        self.files.update(dict.fromkeys(tensors, name))
        self.total += sum(one.nbytes for one in tensors.values())


def write(folder: Path, size: str) -> int:
    """Write the model, ``config.json`` last; return the bytes of its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(size)
    hidden, inner, layers, heads = SIZES[size]
    kv = config["num_key_value_heads"] * HEAD_DIM
    made = Weights(folder, hidden)
    noise = made.noise
    made.save("model-ends.safetensors", {
        "model.embed_tokens.weight": noise(VOCABULARY, hidden, hidden**0.5),
        "lm_head.weight": noise(VOCABULARY, hidden, LOUD), "model.norm.weight": made.ones(),
    })  # fmt: skip
    for number in range(layers):
        at = f"model.layers.{number}"
        made.save(f"model-{number:02}.safetensors", {
            f"{at}.self_attn.q_proj.weight": noise(heads * HEAD_DIM, hidden, SHARP),
            f"{at}.self_attn.k_proj.weight": noise(kv, hidden, SHARP),
            f"{at}.self_attn.v_proj.weight": noise(kv, hidden, LOUD),
            f"{at}.self_attn.o_proj.weight": noise(hidden, heads * HEAD_DIM, PLAIN),
            f"{at}.mlp.gate_proj.weight": noise(inner, hidden, PLAIN),
            f"{at}.mlp.up_proj.weight": noise(inner, hidden, PLAIN),
            f"{at}.mlp.down_proj.weight": noise(hidden, inner, PLAIN),
            f"{at}.input_layernorm.weight": made.ones(),
            f"{at}.post_attention_layernorm.weight": made.ones(),
        })  # fmt: skip
    index = {"metadata": {"total_size": made.total}, "weight_map": made.files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return made.total


REPEATS = 3
RESULT_TOKENS, BEST = 16, 20
"""Compared tokens, and log probabilities of the first one."""
CONTROL_TOKENS = 512
"""Replaced tokens at the front of the control."""
FILLS = 5
"""Most runs of a prompt until all of it is stored."""
WITHIN_S = 30.0
BATCHED_TOKENS = 8192


@dataclass(slots=True)
class Store:
    tiers: str
    capacity_bytes: int
    folder: Path
    address: str = ""
    _stack: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        if not self.address:
            self.address = f"127.0.0.1:{free_port()}"
        size = str(self.capacity_bytes)
        flags = ["--listen", self.address, "--socket", str(self.folder / "kv.sock")]
        flags += ["--tiers", self.tiers, "--cpu", size]
        if "gpu" in self.tiers.split(","):
            flags += ["--gpu", size]
        if self.is_disk:
            flags += ["--disk", f"{size}:{self.folder / 'disk'}", "--write", "through"]
        self._stack.enter_context(serving(*flags))

    @property
    def is_disk(self) -> bool:
        return "disk" in self.tiers.split(",")

    def stop(self) -> None:
        """End the server; its disk tier stays."""
        self._stack.close()


@dataclass(slots=True)
class Answer:
    """Result of one request. ``best``: log probabilities of its first token."""

    ms: float
    tokens: list[int]
    best: dict[int, float]
    cached: int


class Engine:
    """A vLLM in this process, and our store if it uses one."""

    def __init__(self, llm: Any, store: Store | None) -> None:
        self._llm, self._store, self._steps = llm, store, count(10_000)

    @property
    def connector(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        return get_kv_transfer_group() if has_kv_transfer_group() else None

    @property
    def worker(self) -> Any:
        return getattr(self.connector, "_worker", None)

    @property
    def load_ms(self) -> float:
        """Total milliseconds of our loads; 0 with another connector or without."""
        worker = self.worker
        return worker.counted["load_us"] / 1e3 if hasattr(worker, "settled") else 0.0

    def generate(self, ids: list[int], tokens: int, best: int = 0) -> Answer:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False,
            logprobs=best or None,
        )  # fmt: skip
        began = time.perf_counter()
        (output,) = self._llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
        took_ms = 1e3 * (time.perf_counter() - began)
        result, first = output.outputs[0], {}
        if best:
            first = {int(one): round(p.logprob, 6) for one, p in result.logprobs[0].items()}
        return Answer(took_ms, list(result.token_ids), first, output.num_cached_tokens or 0)

    def step(self) -> None:
        self.generate(prompt(33, next(self._steps)), 4)

    def reset(self) -> None:
        """Empty vLLM's own prefix cache; blocks in use are released within a few steps."""
        began = time.monotonic()
        while not self._llm.reset_prefix_cache():
            if time.monotonic() - began > WITHIN_S:
                raise RuntimeError("vLLM does not reset its prefix cache: hits would be its own")
            self.step()
            time.sleep(0.02)

    def settle(self) -> None:
        worker, began = self.worker, time.monotonic()
        if not hasattr(worker, "settled"):
            for _ in range(8):  # other connectors finish stores in later steps
                self.step()
                time.sleep(0.1)
            return
        while time.monotonic() - began < WITHIN_S:
            # A step gathers those that wait in their pages.
            if worker.settled(WITHIN_S) and not worker._waiting:
                return
            self.step()
        raise RuntimeError("the connector does not finish its stores")

    def forget(self) -> None:
        """Reset the engine's cache; restart a server with a disk tier to empty its memory."""
        if self._store is not None and self._store.is_disk:
            self._store.stop()
            self._store.start()
            self._await_store()
        self.reset()

    def _await_store(self) -> None:
        began = time.monotonic()
        while time.monotonic() - began < WITHIN_S:
            self.reset()
            if self.generate(prompt(CHUNK_TOKENS + 1, 900), 1).cached:
                return
            time.sleep(0.1)
        raise RuntimeError("the store is not used after its restart")

    def warm_up(self, tokens: int) -> None:
        for length, seed in ((CHUNK_TOKENS, 900), (tokens, 901), (tokens, 902)):
            self.generate(prompt(length + 1, seed), 4)
            self.settle()
        self.reset()
        self.generate(prompt(tokens + 1, 901), 1)

    def decode_ms(self, number: int) -> float:
        """Return milliseconds of a decoding step of some requests, which fill chunks meanwhile."""
        from vllm import SamplingParams

        first = 5000 + number * DECODE_REQUESTS
        seeds = range(first, first + DECODE_REQUESTS)
        prompts = [{"prompt_token_ids": prompt(DECODE_PROMPT, seed)} for seed in seeds]
        took = []
        for length in (DECODE_FIRST, DECODE_FIRST + DECODE_STEPS):
            sampling = SamplingParams(
                temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False
            )
            began = time.perf_counter()
            self._llm.generate(prompts, sampling, use_tqdm=False)
            took.append(time.perf_counter() - began)
            self.settle()
        return 1e3 * (took[1] - took[0]) / DECODE_STEPS


def apart(one: dict[int, float], other: dict[int, float]) -> float:
    """Return the largest difference of log probabilities; -1 if the best tokens differ."""
    if one.keys() != other.keys():
        return -1.0
    return max((abs(one[token] - other[token]) for token in one), default=0.0)


def transfer_of(order: dict[str, Any], store: Store | None) -> dict[str, Any] | None:
    """Return the ``kv_transfer_config`` of an engine."""
    if order["engine"] == "none":
        return None
    if store is None:
        return {
            "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": order["capacity_bytes"], "block_size": CHUNK_TOKENS,
            },
        }  # fmt: skip
    extra = {
        "address": store.address, "chunk_tokens": CHUNK_TOKENS, "model_revision": "5eed0f0e",
        "deadline_ms": 10_000, "lookup_deadline_ms": 300, "retry_after_ms": 100,
        "durable": store.is_disk,
    }  # fmt: skip
    return {
        "kv_connector": "KVStoreConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvstore.client.engines.vllm",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra,
    }  # fmt: skip


def engine_of(order: dict[str, Any], store: Store | None) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = transfer_of(order, store)
    most = max(
        max(order["lengths"]), WARM_UP_TOKENS, DECODE_PROMPT + DECODE_FIRST + DECODE_STEPS
    )  # plus generated tokens
    more: dict[str, Any] = {"enforce_eager": True, "dtype": "float32", "block_size": 32}
    if order["device"] == "cuda":
        sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8]}
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", **sizes}
        more = {"compilation_config": graphs, "dtype": "bfloat16"}
    if order["backend"]:
        more["attention_config"] = {"backend": order["backend"]}
    return LLM(
        model=order["model"], skip_tokenizer_init=True, seed=0, max_model_len=most + 256,
        max_num_batched_tokens=BATCHED_TOKENS, max_num_seqs=DECODE_REQUESTS,
        enable_prefix_caching=True, gpu_memory_utilization=0.5,
        kv_transfer_config=KVTransferConfig(**transfer) if transfer else None, **more,
    )  # fmt: skip


def fill(engine: Engine, ids: list[int]) -> list[int]:
    """Repeat the prompt until all of it is stored; return the cached tokens each time.

    Prefill is faster than storing: chunks without buffer space are dropped, and stored when they
    are computed again.
    """
    cached = []
    for _ in range(FILLS):
        engine.reset()
        cached.append(engine.generate(ids, RESULT_TOKENS).cached)
        engine.settle()
        if cached[-1] == len(ids) - 1:
            break
    return cached


def measure_prompt(engine: Engine, tokens: int, *, has_control: bool) -> dict[str, Any]:
    """Measure a prompt of *tokens* + 1: computed, and after a reset."""
    ids = prompt(tokens + 1, tokens)
    cold = engine.generate(ids, 1)
    engine.settle()
    own = engine.generate(ids, RESULT_TOKENS, BEST)  # from vLLM's own cache
    engine.settle()
    filled = fill(engine, ids) if engine.connector is not None else []
    again, load_ms = [], []
    for _ in range(REPEATS):
        engine.forget()
        before = engine.load_ms
        again.append(engine.generate(ids, 1))
        load_ms.append(engine.load_ms - before)
    engine.forget()
    hit = engine.generate(ids, RESULT_TOKENS, BEST)
    found = {
        "tokens": tokens, "cold_ms": cold.ms, "filled": filled,
        "hit_ms": [one.ms for one in again], "load_ms": load_ms,
        "cached": [one.cached for one in (*again, hit)],
        "own_tokens": own.tokens, "hit_tokens": hit.tokens, "apart": apart(own.best, hit.best),
    }  # fmt: skip
    if has_control:
        other = prompt(CONTROL_TOKENS, 77) + ids[CONTROL_TOKENS:]
        found["control_apart"] = apart(own.best, engine.generate(other, 1, BEST).best)
        engine.settle()
    print(json.dumps(found), file=sys.stderr, flush=True)  # kept if a later step fails
    return found


def measure(order: dict[str, Any], store: Store | None) -> dict[str, Any]:
    began = time.perf_counter()
    engine = Engine(engine_of(order, store), store)
    result: dict[str, Any] = {"start_s": time.perf_counter() - began}
    worker = engine.worker if store is not None else None
    refusal = getattr(worker, "_refusal", "")
    if refusal:
        raise RuntimeError(f"the connector refused: {refusal}")
    engine.warm_up(min(WARM_UP_TOKENS, max(order["lengths"])))
    result["prompts"] = [
        measure_prompt(engine, tokens, has_control=tokens == min(order["lengths"]))
        for tokens in order["lengths"]
    ]
    counts = worker.counted if worker is not None else {}
    before = counts.get("stored_chunks", 0)
    rounds = range(DECODE_ROUNDS if order["decodes"] else 0)
    result["decode_ms"] = [engine.decode_ms(number) for number in rounds][1:]
    result["dropped"] = counts.get("dropped_chunks", 0) + counts.get("gone_chunks", 0)
    result["decode_stored"] = counts.get("stored_chunks", 0) - before
    return result


def main() -> None:
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps vLLM's prints out of the results
    order = json.loads(sys.stdin.readline())
    store = None
    if order["engine"] == "kvstore":
        store = Store(order["tiers"], order["capacity_bytes"], Path(order["folder"]))
        store.start()
    try:
        result = measure(order, store)
        print(json.dumps(result), file=results, flush=True)
    finally:
        if store is not None:
            store.stop()
    sys.stderr.flush()
    os._exit(0)  # engine threads may hang at exit


if __name__ == "__main__":
    if sys.argv[1:]:
        write(Path(sys.argv[1]), sys.argv[2])
    else:
        main()
