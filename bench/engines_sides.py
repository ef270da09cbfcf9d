"""The engines that bench.engines compares: a vLLM without a store, and one with each of three."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.engines_prompts import Prompt
from bench.peer_lmcache import LMCache
from bench.peer_process import PeerSkippedError
from bench.vllm_engine import ROOT, EngineProcess
from bench.workload import serving

CHUNK_TOKENS = 128
"""Of ours, of LMCache's and of vLLM's offloading alike."""
STORE_BYTES = 1 << 30
"""What each of them may hold."""
VENVS = ROOT / "build" / "peers"
PLAIN, OURS, OFFLOAD, LMCACHE = "no store", "kvstore", "vLLM offload", "LMCache"


@dataclass(frozen=True, slots=True)
class Taken:
    """What prompts took together. ``cached``: the fewest tokens that one of them found cached.

    ``cpu_s`` is of the engine's process, all its threads together, and not of a server's.
    """

    took_s: float
    cpu_s: float
    cached: int
    tokens: list[list[int]]


@dataclass(frozen=True, slots=True)
class Side:
    """One contestant: a running engine. ``settles``: it is ours, and says when all is stored."""

    name: str
    engine: EngineProcess
    has_store: bool = True
    settles: bool = False

    def ask(self, prompts: Sequence[Prompt], max_tokens: int = 1) -> Taken:
        """Have the engine answer *prompts*, all at once."""
        answers = self.engine.generate(*prompts, max_tokens=max_tokens)
        return Taken(
            answers[0]["took_s"],
            answers[0]["cpu_s"],
            min(answer["cached"] for answer in answers),
            [answer["tokens"] for answer in answers],
        )

    def fresh(self) -> None:
        """Wait until all is stored, then forget what the engine itself has cached."""
        if self.settles and not self.engine.ask("settle"):
            raise RuntimeError(f"{self.name} does not come to an end with its stores")
        if not self.engine.ask("drain"):
            raise RuntimeError(f"{self.name} keeps its blocks")


class Field:
    """Starts contestants over one *model*; all end with the *stack*."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder

    def _start(self, name: str, **settings: Any) -> EngineProcess:
        log = self._folder / f"{name}.log"
        engine = EngineProcess(self._folder / "model", log, **settings)
        self._stack.callback(engine.close)
        return engine

    def server(self) -> str:
        """Start a server of ours, in memory alone; return its address."""
        flags = ("--tiers", "cpu", "--cpu", str(STORE_BYTES))
        address, _ = self._stack.enter_context(serving(*flags, disk=self._folder / "disk"))
        return address

    def plain(self) -> Side:
        """Return one that computes everything."""
        return Side(PLAIN, self._start("plain"), has_store=False)

    def ours(self, address: str, **settings: Any) -> Side:
        """Return one with our connector; *settings* are its own."""
        store = {"address": address, "chunk_tokens": CHUNK_TOKENS, **settings}
        return Side(OURS, self._start("ours", store=store), settles=True)

    def offload(self) -> Side:
        """Return one that offloads to CPU memory, as vLLM itself does: inside the process."""
        extra = {
            "spec_name": "CpuTieringSpec", "spec_module_path": "bench.vllm_offloading",
            "cpu_bytes_to_use": STORE_BYTES, "secondary_tiers": [], "block_size": CHUNK_TOKENS,
        }  # fmt: skip
        return Side(OFFLOAD, self._start("offload", kv_transfer_config={
            "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }))  # fmt: skip

    def lmcache(self) -> Side:
        """Return one with LMCache's connector, and its server. Raises PeerSkippedError."""
        peer = LMCache.install(VENVS, self._folder)
        server = self._stack.enter_context(peer.engine_server(STORE_BYTES, CHUNK_TOKENS))
        packages = next((peer.python.parents[1] / "lib").glob("python*/site-packages"))
        extra = {
            "lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server,
            "lmcache.mp.mp_transfer_mode": "engine_driven",  # with shared memory its fastest here
        }  # fmt: skip
        child = ("bench.vllm_lmcache", str(packages))
        try:
            engine = self._start("lmcache", child=child, kv_transfer_config={
                "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra,
            })  # fmt: skip
        except AssertionError as error:  # the last words of the engine
            raise PeerSkippedError(str(error).strip().splitlines()[-1]) from None
        return Side(LMCACHE, engine)
