"""One vLLM engine, driven by lines of JSON on standard input; its answers are lines of JSON, too.

Run by ``EngineProcess``; the first line has the arguments of ``vllm.LLM``. The optional argument is
a folder of LMCache's packages, behind those of vLLM on the path, so the engine stays the same.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import get_pp_group
from vllm.inputs import TokensPrompt


def generate(
    llm: LLM, prompts: list[list[int]], max_tokens: int = 8, salts: list[str] | None = None
) -> list[dict[str, Any]]:
    """Return the greedy completion of each prompt, its log probabilities, and its cached tokens."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=1)
    inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    for one, salt in zip(inputs, salts or [], strict=False):
        one["cache_salt"] = salt
    began = time.perf_counter()
    outputs = llm.generate(inputs, sampling, use_tqdm=False)
    took_s = time.perf_counter() - began
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [
                round(next(iter(p.values())).logprob, 6) for p in output.outputs[0].logprobs
            ],
            "cached": output.num_cached_tokens or 0,
            "finish": output.outputs[0].finish_reason,
            "took_s": took_s,
        }
        for output in outputs
    ]


def abort(llm: LLM, prompts: list[list[int]], steps: int) -> int:
    """Start each prompt and abort all of them after *steps*; return how many are unfinished."""
    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    names = [f"aborted-{number}" for number in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), sampling)
    for _ in range(steps):
        engine.step()
    engine.abort_request(names)
    for _ in range(200):
        engine.step()
    return int(engine.get_num_unfinished_requests())


def sides(llm: LLM) -> tuple[Any, Any]:
    """Return the connectors of the scheduler and the worker, both in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    core = llm.llm_engine.engine_core.engine_core
    return core.scheduler.connector, get_kv_transfer_group()


def settle(llm: LLM) -> bool:
    _, worker = sides(llm)
    return not hasattr(worker._worker, "settled") or worker._worker.settled(30.0)


def drain(llm: LLM, within_s: float = 10.0) -> bool:
    """Step until no blocks are held for stores, and reset the prefix cache."""
    began = time.perf_counter()
    while not llm.reset_prefix_cache():
        if time.perf_counter() - began > within_s:
            return False
        llm.llm_engine.step()
        time.sleep(0.002)
    return True


def limit_loads(llm: LLM, chunks: int) -> bool:
    """Limit loads to so many chunks, as if the others had been evicted; 0: no limit."""
    connector = sides(llm)[1]._worker._connector
    vars(connector).pop("read_into", None)
    read_into = connector.read_into
    if chunks:
        connector.read_into = lambda digests, *more: read_into(digests[:chunks], *more)
    return True


def stop_before_load(llm: LLM, pid: int) -> bool:
    """Make the next load stop the server, process *pid*, after the lookup.

    ``counts`` then has the loads that ended because it hangs: ``worker_hung_loads``.
    """
    worker = sides(llm)[1]._worker
    connector = worker._connector
    read_into, end_if_hung = connector.read_into, connector.client.end_if_hung

    def counted() -> bool:
        is_hung = end_if_hung()
        worker.counted["hung_loads"] += is_hung
        return bool(is_hung)

    connector.client.end_if_hung = counted

    def stopped(*given: Any) -> int:
        vars(connector).pop("read_into", None)
        os.kill(pid, signal.SIGSTOP)
        return int(read_into(*given))

    connector.read_into = stopped
    return True


def counts(llm: LLM) -> dict[str, int]:
    """Return the engine's counters of the store since its start."""
    names = {
        "vllm:external_prefix_cache_queries": "queries",
        "vllm:external_prefix_cache_hits": "hits",
        "vllm:num_preemptions": "preemptions",
    }
    metrics = llm.get_metrics()
    found = {names[m.name]: m.value for m in metrics if m.name in names}
    events = (m for m in metrics if m.name.startswith("vllm:kvstore_events"))
    found.update({f"event_{m.labels['event']}": int(m.value) for m in events})
    scheduler, worker = sides(llm)
    for side, name in ((scheduler._scheduler, "scheduler"), (worker._worker, "worker")):
        counted = getattr(side, "counted", {})
        found.update({f"{name}_{key}": count for key, count in counted.items()})
        connector = getattr(side, "_lookups" if name == "scheduler" else "_connector", None)
        if connector is not None:
            errors = connector.stats()
            found.update({f"{name}_error_{key}": n for key, n in errors.load_errors.items()})
            found.update({f"{name}_store_error_{key}": n for key, n in errors.store_errors.items()})
    return found


class Stage:
    """An extension that lets a worker of vLLM's CPU build be a later stage of a pipeline.

    vLLM allocates the receive buffers of a stage in a dummy run, which its CPU worker skips unless
    it compiles. ``worker_extension_cls`` makes this a base of its worker class.
    """

    model_runner: Any

    def make_buffers(self) -> bool:
        """Allocate them like the dummy run; call once, before the first request."""
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )
        return True


def patch_llvmlite() -> None:
    """Make llvmlite's library object raise AttributeError for dunder names.

    LMCache imports numba, and with it llvmlite, whose library object returns a function for every
    name. vLLM's search for CPU kernels reads ``__dict__`` of every module's objects, and fails if
    it is a function.
    """
    from llvmlite.binding import ffi

    answer = ffi._lib_wrapper.__getattr__

    def lookup(library: object, name: str) -> object:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return answer(library, name)

    ffi._lib_wrapper.__getattr__ = lookup


def main(packages: str = "") -> None:
    if packages:
        sys.path.append(packages)
        patch_llvmlite()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps vLLM's prints out of the answers
    llm = LLM(**json.loads(sys.stdin.readline()))
    does: dict[str, Callable[..., Any]] = {
        "generate": generate,
        "abort": abort,
        "settle": settle,
        "drain": drain,
        "limit_loads": limit_loads,
        "stop_before_load": stop_before_load,
        "counts": counts,
        "make_buffers": lambda llm: llm.collective_rpc("make_buffers"),
        "reset": lambda llm, **how: llm.reset_prefix_cache(**how),
    }
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(does[request.pop("do")](llm, **request)), file=answers, flush=True)
    llm.llm_engine.engine_core.shutdown()  # else vLLM leaves shared memory behind


if __name__ == "__main__":
    main(*sys.argv[1:])
