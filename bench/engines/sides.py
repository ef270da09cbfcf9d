"""The engines that bench.engines compares: a vLLM without a store, and one with each of three."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from bench.lib import ROOT
from bench.lib.processes import PeerSkippedError
from bench.lib.traces import read_segments, tokens_of
from bench.lib.vllm import EngineProcess
from bench.lib.workload import serving
from bench.peers.lmcache import LMCache
from kvstore.cli.simulate import Segment, SegmentLine

CHATS = "dev_chat_sharegptlike_sps2_n100"
DOCUMENTS = "dev_ragshared_qps2_n900"
LEAST_TOKENS = 1024
"""Least length of the prefix shared with an earlier prompt."""
MOST_TOKENS = 2560
VOCABULARY = 247
"""Token ids from 3 on; the tiny model's tokenizer has bytes only."""

Prompt: TypeAlias = list[int]
_ROUND = 1 << 20
"""More than the segments of a trace, so each round has its own streams."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A request whose *history* is the prefix of an earlier one, then *rest*."""

    history: tuple[Segment, ...]
    earlier: tuple[Segment, ...]
    """The part after the history in the earlier request; empty for a chat."""
    rest: tuple[Segment, ...]

    def prompts(self, number: int) -> tuple[Prompt, Prompt]:
        return tokens(self.history + self.earlier, number), tokens(self.history + self.rest, number)

    @property
    def history_tokens(self) -> int:
        return length(self.history)


def length(segments: Sequence[Segment]) -> int:
    return sum(count for _, count in segments)


def tokens(segments: Sequence[Segment], number: int) -> Prompt:
    """Return the tokens of *segments*, different for each *number*."""
    moved = [(number * _ROUND + stream, count) for stream, count in segments]
    return [3 + int(one) % VOCABULARY for one in tokens_of(moved)]


def turns(count: int) -> list[Turn]:
    """Return *count* turns, alternately of chats and of documents, spread over their traces."""
    half = -(-count // 2)
    pairs = zip(*(_spread(one, half) for one in (_chat_turns(), _document_turns())), strict=True)
    return list(chain.from_iterable(pairs))[:count]


def chats(most_tokens: int) -> list[tuple[Segment, ...]]:
    """Return second turns of chats, cut to *most_tokens*; those below a quarter are left out."""
    second = [_cut(line.inputs, most_tokens) for line in read_segments(CHATS) if line.turn == 1]
    return [one for one in second if length(one) >= most_tokens // 4]


def _fits(line: SegmentLine) -> bool:
    history = line.input_tokens - line.inputs[-1][1]
    return history >= LEAST_TOKENS and line.input_tokens <= MOST_TOKENS


def _chat_turns() -> list[Turn]:
    """Return turns of chats: the conversation with outputs, then the new message."""
    fit = [line for line in read_segments(CHATS) if line.turn and _fits(line)]
    return [Turn(line.inputs[:-1], (), line.inputs[-1:]) for line in fit]


def _document_turns() -> list[Turn]:
    earlier: dict[tuple[Segment, ...], SegmentLine] = {}
    found = []
    for line in read_segments(DOCUMENTS):
        document = line.inputs[:2]
        if len(line.inputs) != 3 or not _fits(line):
            continue
        if (before := earlier.get(document)) is not None:
            found.append(Turn(document, before.inputs[2:], line.inputs[2:]))
        earlier[document] = line
    return found


def _cut(segments: Sequence[Segment], most_tokens: int) -> tuple[Segment, ...]:
    kept: list[Segment] = []
    for stream, count in segments:
        kept.append((stream, min(count, most_tokens - length(kept))))
    return tuple(one for one in kept if one[1])


def _spread(found: Sequence[Turn], count: int) -> list[Turn]:
    if count > len(found):
        raise ValueError(f"{len(found)} prompts of the trace qualify, not {count}")
    return [found[number * len(found) // count] for number in range(count)]


CHUNK_TOKENS = 128
"""Also of LMCache and of vLLM's offloading."""
STORE_BYTES = 1 << 30
"""Capacity of each."""
VENVS = ROOT / "build" / "peers"
PLAIN, OURS, OFFLOAD, LMCACHE = "no store", "kvstore", "vLLM offload", "LMCache"


@dataclass(frozen=True, slots=True)
class Result:
    """Outputs of a batch and its time. ``cached``: the fewest cached tokens of a prompt."""

    took_s: float
    cached: int
    tokens: list[list[int]]


@dataclass(frozen=True, slots=True)
class Side:
    """A running engine. ``settles``: it is ours, and reports when all is stored."""

    name: str
    engine: EngineProcess
    has_store: bool = True
    settles: bool = False

    def generate(self, prompts: Sequence[Prompt], max_tokens: int = 1) -> Result:
        outputs = self.engine.generate(*prompts, max_tokens=max_tokens)
        cached = min(output["cached"] for output in outputs)
        return Result(outputs[0]["took_s"], cached, [output["tokens"] for output in outputs])

    def clear(self) -> None:
        if self.settles and not self.engine.request("settle"):
            raise RuntimeError(f"{self.name} does not finish its stores")
        if not self.engine.request("drain"):
            raise RuntimeError(f"{self.name} does not release its blocks")


class Sides:
    """Starts engines on the model in *folder*; all end with the *stack*."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder

    def _start(self, name: str, **settings: Any) -> EngineProcess:
        log = self._folder / f"{name}.log"
        engine = EngineProcess(self._folder / "model", log, **settings)
        self._stack.callback(engine.close)
        return engine

    def server(self) -> str:
        """Start our server with a memory tier; return its address."""
        flags = ("--tiers", "cpu", "--cpu", str(STORE_BYTES))
        address, _ = self._stack.enter_context(serving(*flags))
        return address

    def plain(self) -> Side:
        return Side(PLAIN, self._start("plain"), has_store=False)

    def ours(self, address: str, **settings: Any) -> Side:
        """Return an engine with our connector and its *settings*."""
        store = {"address": address, "chunk_tokens": CHUNK_TOKENS, **settings}
        return Side(OURS, self._start("ours", store=store), settles=True)

    def offload(self) -> Side:
        """Return an engine with vLLM's own offloading to CPU memory, in its process."""
        extra = {
            "spec_name": "CpuTieringSpec", "spec_module_path": "bench.lib.vllm_offloading",
            "cpu_bytes_to_use": STORE_BYTES, "secondary_tiers": [], "block_size": CHUNK_TOKENS,
        }  # fmt: skip
        return Side(OFFLOAD, self._start("offload", kv_transfer_config={
            "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }))  # fmt: skip

    def lmcache(self) -> Side:
        """Return an engine with LMCache's connector, and its server. Raises PeerSkippedError."""
        peer = LMCache.install(VENVS, self._folder)
        server = self._stack.enter_context(peer.engine_server(STORE_BYTES, CHUNK_TOKENS))
        packages = next((peer.python.parents[1] / "lib").glob("python*/site-packages"))
        extra = {
            "lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server,
            "lmcache.mp.mp_transfer_mode": "engine_driven",  # its fastest, with shared memory
        }  # fmt: skip
        child = ("bench.lib.vllm_child", str(packages))
        try:
            engine = self._start("lmcache", child=child, kv_transfer_config={
                "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra,
            })  # fmt: skip
        except AssertionError as error:  # has the engine's log
            raise PeerSkippedError(str(error).strip().splitlines()[-1]) from None
        return Side(LMCACHE, engine)
