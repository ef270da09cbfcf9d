"""kvstore simulate: what policies would have hit on a trace. No server, no bytes."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.cli.simulate.block_replay import BlockReplay
from kvstore.cli.trace_blocks import DEFAULT_BLOCK_TOKENS, BlockTrace, make_blocks
from kvstore.cli.trace_files import SegmentLine, TraceLines, read_trace
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import POLICIES, policy_instead_of
from kvstore.server.eviction.access_history import AccessHistory, InsertInfo
from kvstore.server.eviction.policy import EvictionPolicy, make_policy
from kvstore.server.settings.values import parse_size

if TYPE_CHECKING:  # its file imports this one
    from kvstore.cli.simulate.states import StateSimulator

ATTENTION, HYBRID = "attention", "hybrid-7b"
MODELS = (ATTENTION, HYBRID)

DEFAULT_KV_BYTES_PER_TOKEN = 131_072
"""Llama-3.1-8B in bfloat16: 32 layers of 8 heads of 128, keys and values."""

_LINEAR_FLOPS, _SQUARE_FLOPS = 1.6e10, 262_144.0
"""Prefill of such a model: 1.6e10 L + 262,144 L^2 for a prompt of L tokens."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a trace is replayed on. *capacity* is ``10GiB`` or a share of the footprint, ``5%``.

    With *from_half* hits count from the middle of the trace on. Raises InvalidRequestError.
    """

    policy: str
    capacity: str
    model: str = ATTENTION
    kv_bytes_per_token: int = DEFAULT_KV_BYTES_PER_TOKEN
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    from_half: bool = False

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise InvalidRequestError("model", self.model, f"one of {', '.join(MODELS)}")
        for name in ("kv_bytes_per_token", "block_tokens"):
            if not 0 < getattr(self, name) < 1 << 40:
                raise InvalidRequestError(name, getattr(self, name), "give 1 or more")
        parse_capacity(self.capacity, 0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy hit. Rates are shares of what was asked for; *block_hit_rate* is None where
    the model's cache is of no blocks.

    *requests_per_s* counts requests for blocks where there are blocks, else whole prompts.
    *flops_saved* is what prefill of the tokens hit would have cost.
    """

    policy: str
    capacity_bytes: int
    token_hit_rate: float
    flops_saved: float
    requests_per_s: float
    block_hit_rate: float | None = None
    evictions: int | None = None


def names_of(policies: str, model: str) -> list[str]:
    """Return the policies in a list with commas; all there are for ``all``.

    Raises InvalidRequestError for one that the model's simulator does not have.
    """
    if model == HYBRID:
        from kvstore.cli.simulate.states import STATE_POLICIES as known
    else:
        known = POLICIES
    names = list(known) if policies == "all" else policies.split(",")
    for name in names:
        if name not in known:
            raise InvalidRequestError("policy", name, policy_instead_of(name, (*known, "or all")))
    return names


def parse_capacity(text: str, footprint_bytes: int) -> int:
    """Return bytes: of a size such as 10GiB, or of a share of *footprint_bytes* such as 2.5%.

    Raises InvalidRequestError.
    """
    share = re.fullmatch(r"\s*([0-9]{1,6}(?:\.[0-9]{1,9})?)\s*%\s*", text)
    if share is not None:
        return int(Fraction(share[1]) / 100 * footprint_bytes)
    try:
        return parse_size(text.strip())
    except ValueError as error:
        raise InvalidRequestError("capacity", text, f"{error}, or 5% of the trace") from None


class Simulator:
    """A trace that was read once, and replayed as often as there are policies and capacities."""

    def __init__(self, path: Path) -> None:
        """Read the trace. Raises InvalidRequestError and OSError, as ``read_trace``."""
        self._name = path.name
        self._lines: TraceLines = read_trace(path)
        self._blocks: dict[int, BlockTrace] = {}
        self._states: StateSimulator | None = None

    def run(self, terms: Terms) -> Outcome:
        """Replay the trace. Raises InvalidRequestError when it cannot be, saying why."""
        if terms.model == HYBRID:
            return self._run_states(terms)
        trace = self._blocks.get(terms.block_tokens)
        if trace is None:
            trace = self._blocks[terms.block_tokens] = make_blocks(self._lines, terms.block_tokens)
        return replay_blocks(trace, terms)

    def _run_states(self, terms: Terms) -> Outcome:
        from kvstore.cli.simulate.states import StateSimulator

        lines = [line for line in self._lines if isinstance(line, SegmentLine)]
        if not lines:
            raise InvalidRequestError(
                f"model for {self._name}",
                terms.model,
                "a state is of one token's position, and blocks do not say which: use attention",
            )
        if self._states is None:
            self._states = StateSimulator(lines)
        return self._states.run(terms)


def replay_blocks(
    trace: BlockTrace, terms: Terms, policy: tuple[EvictionPolicy, AccessHistory] | None = None
) -> Outcome:
    """Replay a trace of blocks on one tier; *policy* stands in for the one that is named, with
    the AccessHistory that it ranks by.
    """
    block_bytes = trace.block_tokens * terms.kv_bytes_per_token
    capacity_bytes = parse_capacity(terms.capacity, trace.blocks * block_bytes)
    if policy is None:
        history = AccessHistory(trace.block_tokens)
        policy = make_policy(terms.policy, history), history
    replay = BlockReplay(*policy, capacity_bytes)
    times, starts = trace.times_s.tolist(), trace.starts.tolist()
    rows = trace.rows.tolist()
    is_full = (trace.tokens == trace.block_tokens).tolist()
    hits = [0] * trace.requests
    flops = flops_by_place(int(np.diff(trace.starts).max(initial=0)), trace.block_tokens)
    started = time.perf_counter()
    for at, (now_s, start, end) in enumerate(zip(times, starts, starts[1:], strict=False)):
        chain = rows[start:end]
        if chain:
            facts = _facts(is_full[chain[-1]], len(chain))
            hits[at] = replay.request(chain, block_bytes, now_s, facts, flops[: len(chain)])
    spent_s = time.perf_counter() - started
    first = trace.requests // 2 if terms.from_half else 0
    hit_blocks = np.minimum(np.array(hits, np.int64), trace.known)[first:]
    inputs = trace.input_tokens[first:]
    hit_tokens = np.minimum(hit_blocks * trace.block_tokens, inputs)
    return Outcome(
        policy=terms.policy,
        capacity_bytes=capacity_bytes,
        token_hit_rate=_share(int(hit_tokens.sum()), int(inputs.sum())),
        flops_saved=float((_LINEAR_FLOPS * hit_tokens + _SQUARE_FLOPS * hit_tokens**2).sum()),
        requests_per_s=len(rows) / max(spent_s, 1e-9),
        block_hit_rate=_share(int(hit_blocks.sum()), int(trace.known[first:].sum())),
        evictions=replay.evictions,
    )


@lru_cache(maxsize=1024)
def _facts(tokens_full: bool, prompt_chunks: int) -> InsertInfo:
    return InsertInfo(tokens_full=tokens_full, prompt_chunks=prompt_chunks)


def flops_by_place(blocks: int, block_tokens: int) -> NDArray[np.float64]:
    """Return what the prefill of the first block of a prompt costs, of the second, and so on."""
    ends = np.arange(blocks + 1, dtype=np.float64) * block_tokens
    return np.diff(_LINEAR_FLOPS * ends + _SQUARE_FLOPS * ends**2)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
