"""Settings of the vLLM connector, and the messages between its scheduler side and worker side.

Reads vLLM's objects by their fields, without importing vLLM.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from kvstore.client.engines.identity import EngineSettings
from kvstore.client.engines.vllm.identity import KVCacheShape
from kvstore.client.options import MAX_DEADLINE_MS, ClientOptions
from kvstore.client.planning import PlanTerms, PrefillModel
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.plans import MAX_HANDOVER_MS, NO_HINTS, Hints
from kvstore.proto.types import DEFAULT_CHUNK_TOKENS, ChainDigest

INCOMPATIBLE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors from unexpected objects of another vLLM release or a user."""
BlockTables: TypeAlias = Sequence[Sequence[int]]
"""The blocks of a request in each of vLLM's KV cache groups, in token order."""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Read *digests*, consecutive chunks of a request, into its blocks.

    ``tables``: the blocks of these chunks in each block table, in order; 0 where there is none.
    The first ``kept_blocks`` were in the engine's own cache and may be in use: they are not
    written. ``all_or_nothing``: a partial read is useless. ``terms``: of a request with a
    deadline, counted from now.
    """

    request_id: str
    digests: tuple[ChainDigest, ...]
    tables: tuple[tuple[int, ...], ...]
    kept_blocks: int = 0
    all_or_nothing: bool = False
    terms: PlanTerms | None = None


@dataclass(frozen=True, slots=True)
class ChunkName:
    """A chunk's names in a put; ``position`` is its first token's."""

    digest: ChainDigest
    parent: ChainDigest
    content: bytes
    position: int


@dataclass(frozen=True, slots=True)
class SaveSpec:
    """Store consecutive chunks of a request, which are complete after this step."""

    chunks: tuple[ChunkName, ...]
    tables: tuple[tuple[int, ...], ...]
    hints: Hints = NO_HINTS


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The workers' tasks in one step. An idle step computes nothing.

    ``taken_blocks``: blocks allocated for this step, which its compute and loads overwrite from
    its start. None: any block may be overwritten.
    """

    loads: tuple[LoadSpec, ...] = ()
    stores: tuple[SaveSpec, ...] = ()
    is_idle: bool = False
    taken_blocks: frozenset[int] | None = None


@dataclass(slots=True)
class WorkerReport:
    """The workers' report to the scheduler."""

    short_loads: dict[str, int] = field(default_factory=dict)
    """Requests whose load was partial, with the number of chunks read."""
    lossy_loads: dict[str, int] = field(default_factory=dict)
    """Requests with lossy chunks, with the index of the first one in the load."""
    gated_loads: set[str] = field(default_factory=set)
    """Those of ``short_loads`` that have a chunk with only lossy copies behind a shut gate."""
    stored: Counter[ChainDigest] = field(default_factory=Counter)
    """Chunks stored, with the number of ranks; filled only if KV events are on."""
    unstored: OrderedDict[ChainDigest, None] = field(default_factory=OrderedDict)
    """Planned chunks that will not be stored, oldest first."""
    refusal: str = ""
    """Why this engine's pages cannot be stored, or ""."""
    is_down: bool = False
    """Whether a load failed because the server did not respond."""
    is_waiting: bool = False
    """Whether chunks wait in their pages for the next step, which may be idle."""

    def joined(self, other: WorkerReport) -> WorkerReport:
        """Return the report of two ranks together: a chunk is read if every rank read it, lossy if
        any read it lossy."""

        def lower(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
            return {**one, **{id_: min(count, one.get(id_, count)) for id_, count in other.items()}}

        return WorkerReport(
            lower(self.short_loads, other.short_loads),
            lower(self.lossy_loads, other.lossy_loads),
            self.gated_loads | other.gated_loads,
            self.stored + other.stored,
            self.unstored | other.unstored,
            self.refusal or other.refusal,
            self.is_down or other.is_down,
            self.is_waiting or other.is_waiting,
        )


class FollowedTables:
    """The block tables of running requests, for vLLM releases whose steps do not have them."""

    def __init__(self) -> None:
        self._tables: dict[str, list[list[int]]] = {}

    def of(self, request_id: str) -> BlockTables:
        """Return the tables of a request, or ()."""
        return self._tables.get(request_id, ())

    def follow(self, output: Any) -> None:
        """Apply the step of vLLM's SchedulerOutput *output*."""
        for request_id in output.finished_req_ids:
            self._tables.pop(request_id, None)
        for one in output.scheduled_new_reqs:
            self._tables[one.req_id] = [list(table) for table in one.block_ids]
        cached = output.scheduled_cached_reqs
        for request_id, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = [list(table) for table in new or ()]
            else:
                for table, blocks in zip(self.of(request_id), new or (), strict=False):
                    table += blocks


def taken_blocks(
    output: Any, loads: Sequence[LoadSpec], block_tokens: int
) -> frozenset[int] | None:
    """Return the blocks allocated in the step of vLLM's SchedulerOutput *output*; None if this
    release does not state them.

    Blocks that a new request found in vLLM's own cache are excluded. Other shared blocks are
    included, which costs a copy that could have waited.
    """
    tables: list[BlockTables] = [spec.tables for spec in loads]
    try:
        tables += [
            [table[one.num_computed_tokens // block_tokens :] for table in one.block_ids]
            for one in output.scheduled_new_reqs
        ]
        tables += [one for one in output.scheduled_cached_reqs.new_block_ids if one is not None]
        others = list(output.new_block_ids_to_zero or ())
        others += [one.dst_block_id for one in output.kv_cache_block_copies or ()]
    except AttributeError:
        return None
    return frozenset(others).union(*(ids for request in tables for ids in request))


# --- settings of an engine and of a request

MAX_TOKEN_US = 10_000_000
"""Ten seconds a token."""


@dataclass(frozen=True, slots=True)
class Role:
    """An engine's use of the store. Times as in VllmSettings."""

    loads: bool = True
    stores: bool = True
    handover_ms: int = 0
    wait_ms: int = 0
    first_token_ms: int = 0
    steps_ahead: int = 0
    """Steps that vLLM schedules before the running one's result is available."""


BOTH = Role()
"""An engine that prefills and decodes."""


@dataclass(frozen=True, slots=True)
class VllmSettings(EngineSettings):
    """``kv_connector_extra_config`` of one engine; see docs/vllm.md.

    ``chunk_tokens`` 0: the least multiple of the engine's block from 256 on. ``first_token_ms`` 0:
    no deadline. ``prefill_token_us`` 0: measured. A token is no setting: engines log settings.
    """

    chunk_tokens: int = 0
    lookup_deadline_ms: int = 30
    retry_after_ms: int = 1000
    queue_bytes: int = 256 << 20
    durable: bool = False
    handover_ms: int = 0
    wait_ms: int = 0
    first_token_ms: int = 0
    prefill_token_us: int = 0
    sglang_names: bool = False

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)
        for name in ("deadline_ms", "lookup_deadline_ms", "retry_after_ms", "queue_bytes"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(name, getattr(self, name), "give a positive number")
        bounds = {
            "handover_ms": MAX_HANDOVER_MS, "wait_ms": MAX_HANDOVER_MS // 2,
            "prefill_token_us": MAX_TOKEN_US, "first_token_ms": MAX_DEADLINE_MS,
        }  # fmt: skip
        for name, most in bounds.items():
            if not 0 <= getattr(self, name) <= most:
                raise InvalidRequestError(name, getattr(self, name), f"give 0 to {most}")

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> VllmSettings:
        """Return the settings in *extra*. Raises InvalidRequestError for unknown ones."""
        known = [field.name for field in fields(cls)]
        for name in extra.keys() - {*known}:
            fix = f"kv_connector_extra_config has {', '.join(known)}"
            raise InvalidRequestError("kv_connector_extra_config", name, fix)
        return cls(**extra)

    def chunk_tokens_for(self, block_tokens: int) -> int:
        """Return a chunk's tokens. Raises InvalidRequestError unless it is whole blocks."""
        chosen = self.chunk_tokens or -(-DEFAULT_CHUNK_TOKENS // block_tokens) * block_tokens
        if chosen % block_tokens:
            fix = f"give a multiple of the block size, {block_tokens}"
            raise InvalidRequestError("chunk_tokens", chosen, fix)
        return chosen

    def accuracy_for(self, shape: KVCacheShape, device_type: str) -> str:
        """Return the accuracy of loads into pages on devices of *device_type*.

        It is exact for pages on a device and for models with windows or several block tables:
        lossy blocks in vLLM's own cache are tracked for one table only.
        """
        return "exact" if shape.all_or_nothing or device_type != "cpu" else self.accuracy

    @property
    def prefill(self) -> PrefillModel | None:
        """The engine's prefill speed, if stated; None: measured."""
        return PrefillModel(0.0, self.prefill_token_us / 1e6) if self.prefill_token_us else None

    def client_options(self, chunk_tokens: int, name: str, *, is_lookup: bool) -> ClientOptions:
        """Return the options of a client for lookups, or for loads and stores."""
        return self.options(
            chunk_tokens,
            deadline_ms=self.lookup_deadline_ms if is_lookup else self.deadline_ms,
            retry_after_ms=self.retry_after_ms,
            name=name,
            sglang_names=self.sglang_names,
        )


@dataclass(frozen=True, slots=True)
class FlopsModel:
    """A prefill's approximate cost: per token, plus per token and preceding token. It is sent with
    each chunk: the eviction policy keeps expensive ones."""

    token_flops: float = 0.0
    context_flops: float = 0.0

    @classmethod
    def of(cls, config: Any) -> FlopsModel:
        """Return the cost for a transformers *config* of a text model; 0 if it is incomplete.

        Two operations per weight (Kaplan et al., Scaling Laws for Neural Language Models, 2020,
        section 2.1), for a mixture of experts per active weight, without embeddings.
        """

        def number(name: str, otherwise: float = 0.0) -> float:
            value = getattr(config, name, None)
            return (float(value) if isinstance(value, int | float) else 0.0) or otherwise

        hidden, layers = number("hidden_size"), number("num_hidden_layers")
        heads = number("num_attention_heads")
        if not hidden or not layers or not heads:
            return cls()
        head_dim = number("head_dim", hidden / heads)
        kv_heads = number("num_key_value_heads", heads)
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        inner = number("intermediate_size", 4 * hidden)
        if experts := number("num_experts_per_tok"):
            inner = experts * number("moe_intermediate_size", inner)
        weights = attention + 3 * hidden * inner
        return cls(2 * layers * weights, 4 * layers * heads * head_dim)

    def of_chunk(self, position: int, tokens: int) -> float:
        """Return the floating-point operations of *tokens* tokens from *position* on."""
        before = position + tokens / 2
        return tokens * (self.token_flops + self.context_flops * before)


def stated_of(request: Any, usual_ms: int) -> tuple[Hints, int]:
    """Return the hints of vLLM's *request*, and the deadline of its first token, in milliseconds
    from its arrival; 0: none.

    Users state them as ``{"kvstore": {"reuse": 2, "category": "chat", "first_token_ms": 500}}`` in
    ``kv_transfer_params``; *usual_ms* is the default deadline. Raises InvalidRequestError for
    invalid ones.
    """
    params = getattr(request, "kv_transfer_params", None)
    stated = params.get("kvstore") if isinstance(params, Mapping) else None
    known = [*(one.name for one in fields(Hints) if one.name != "prompt_tokens"), "first_token_ms"]
    given = {} if stated is None else stated
    if not isinstance(given, Mapping) or not given.keys() <= {*known}:
        raise InvalidRequestError("kv_transfer_params.kvstore", stated, f"give {known}")
    hints = dict(given)
    within_ms = hints.pop("first_token_ms", usual_ms)
    if type(within_ms) is not int or not 0 <= within_ms <= MAX_DEADLINE_MS:
        name, fix = "kv_transfer_params.kvstore.first_token_ms", f"give 0 to {MAX_DEADLINE_MS}"
        raise InvalidRequestError(name, within_ms, fix)
    return Hints(**hints, prompt_tokens=getattr(request, "num_prompt_tokens", 0)), within_ms
