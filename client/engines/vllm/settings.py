"""What a user may set of the vLLM connector, of an engine and of a request; checked.

Works on vLLM's objects by their fields, without importing vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvstore.client.engines.base import EngineSettings
from kvstore.client.engines.vllm.identity import KVCacheShape
from kvstore.client.options import MAX_DEADLINE_MS, ClientOptions
from kvstore.client.planning import PrefillModel
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.plans import MAX_HANDOVER_MS, Hints
from kvstore.proto.types import DEFAULT_CHUNK_TOKENS

MAX_TOKEN_US = 10_000_000
"""Ten seconds a token."""

HINTS_NAME = "kvstore"
"""Of the entry of a request's ``kv_transfer_params`` that has hints for this store."""

DEADLINE_NAME = "first_token_ms"
"""Of a request's deadline, in that entry."""


@dataclass(frozen=True, slots=True)
class Role:
    """What an engine does with the store. Times are those of VllmSettings."""

    loads: bool = True
    stores: bool = True
    handover_ms: int = 0
    wait_ms: int = 0
    first_token_ms: int = 0
    steps_ahead: int = 0
    """How many steps vLLM schedules before the result of the one that runs is there."""


BOTH = Role()
"""An engine that prefills and decodes."""


@dataclass(frozen=True, slots=True)
class VllmSettings(EngineSettings):
    """``kv_connector_extra_config`` of one engine; docs/vllm.md says what each is.

    ``chunk_tokens`` 0: the least multiple of the engine's block from 256 on. ``first_token_ms`` 0:
    no deadline. ``prefill_token_us`` 0: it is learned. A token is no setting: engines print those.
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
        """Return the settings in *extra*. Raises InvalidRequestError for what is no setting."""
        known = [field.name for field in fields(cls)]
        for name in extra.keys() - {*known}:
            fix = f"kv_connector_extra_config has {', '.join(known)}"
            raise InvalidRequestError("kv_connector_extra_config", name, fix)
        return cls(**extra)

    def chunk_tokens_for(self, block_tokens: int) -> int:
        """Return the tokens of a chunk where a block has *block_tokens*.

        Raises InvalidRequestError when that many do not fill whole blocks.
        """
        chosen = self.chunk_tokens or -(-DEFAULT_CHUNK_TOKENS // block_tokens) * block_tokens
        if chosen % block_tokens:
            fix = f"give a multiple of the block size, {block_tokens}"
            raise InvalidRequestError("chunk_tokens", chosen, fix)
        return chosen

    def accuracy_for(self, shape: KVCacheShape, device_type: str) -> str:
        """Return which copies an engine loads whose pages are on devices of *device_type*.

        Exact ones only into pages on a device, and of models that keep windows or have several
        block tables: which of vLLM's cached blocks are lossy is known of one table alone.
        """
        is_plain = shape.tables == 1 and not shape.has_ends
        return self.accuracy if device_type == "cpu" and is_plain else "exact"

    @property
    def prefill(self) -> PrefillModel | None:
        """What the engine takes to compute, if that is stated and not learned."""
        return PrefillModel(0.0, self.prefill_token_us / 1e6) if self.prefill_token_us else None

    def client_options(self, chunk_tokens: int, name: str, *, is_lookup: bool) -> ClientOptions:
        """Return the options of a client that looks up, or of one that loads and stores."""
        return self.options(
            chunk_tokens,
            deadline_ms=self.lookup_deadline_ms if is_lookup else self.deadline_ms,
            retry_after_ms=self.retry_after_ms,
            name=name,
            sglang_names=self.sglang_names,
        )


@dataclass(frozen=True, slots=True)
class FlopsModel:
    """About what a prefill computes: so much a token, and so much more for each one before it.

    It goes with what is stored: the policy keeps what is dear to compute.
    """

    token_flops: float = 0.0
    context_flops: float = 0.0

    @classmethod
    def of(cls, config: Any) -> FlopsModel:
        """Return that of a transformers *config* of a text model; 0 if it says too little.

        Two operations a weight (Kaplan et al., Scaling Laws for Neural Language Models, 2020,
        section 2.1), of a mixture of experts those that one token meets, without embeddings.
        """

        def number(name: str) -> float:
            value = getattr(config, name, None)
            return float(value) if isinstance(value, int | float) else 0.0

        hidden, layers = number("hidden_size"), number("num_hidden_layers")
        heads = number("num_attention_heads")
        if not hidden or not layers or not heads:
            return cls()
        head_dim = number("head_dim") or hidden / heads
        kv_heads = number("num_key_value_heads") or heads
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        experts = number("num_experts_per_tok")
        inner = number("intermediate_size") or 4 * hidden
        if experts:
            inner = experts * (number("moe_intermediate_size") or inner)
        weights = attention + 3 * hidden * inner
        return cls(2 * layers * weights, 4 * layers * heads * head_dim)

    def of_chunk(self, position: int, tokens: int) -> float:
        """Return the floating-point operations of *tokens* tokens from *position* on."""
        before = position + tokens / 2
        return tokens * (self.token_flops + self.context_flops * before)


def hints_of(request: Any) -> Hints:
    """Return the hints of vLLM's *request*: its length, and what its user states of its reuse.

    Users state it as ``{"kvstore": {"reuse": 2, "category": "chat", ...}}`` in
    ``kv_transfer_params``. Raises InvalidRequestError for what is no hint.
    """
    prompt_tokens = getattr(request, "num_prompt_tokens", 0)
    stated = _stated(request)
    known = [one.name for one in fields(Hints) if one.name != "prompt_tokens"]
    if not isinstance(stated, Mapping) or not stated.keys() <= {*known, DEADLINE_NAME}:
        field = f"kv_transfer_params.{HINTS_NAME}"
        raise InvalidRequestError(field, stated, f"give {[*known, DEADLINE_NAME]}")
    given = {name: one for name, one in stated.items() if name != DEADLINE_NAME}
    return Hints(**given, prompt_tokens=prompt_tokens)


def deadline_ms_of(request: Any, usual_ms: int) -> int:
    """Return when vLLM's *request* is to have its first token, from its arrival on; 0: no matter.

    Users state it beside hints; *usual_ms* is of those that do not. Raises InvalidRequestError.
    """
    stated = _stated(request)
    found = stated.get(DEADLINE_NAME, usual_ms) if isinstance(stated, Mapping) else usual_ms
    if type(found) is not int or not 0 <= found <= MAX_DEADLINE_MS:
        name = f"kv_transfer_params.{HINTS_NAME}.{DEADLINE_NAME}"
        raise InvalidRequestError(name, found, f"give 0 to {MAX_DEADLINE_MS}")
    return found


def _stated(request: Any) -> Any:
    """Return what a user states for this store; nothing is no hint."""
    params = getattr(request, "kv_transfer_params", None)
    stated = params.get(HINTS_NAME) if isinstance(params, Mapping) else None
    return {} if stated is None else stated
