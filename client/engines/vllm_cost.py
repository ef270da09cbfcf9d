"""What a prefill costs by a model's settings, and what users say of a request's reuse.

Both go with what is stored: the policy keeps what is dear to compute and likely to be asked for.
Works on vLLM's objects by their fields, without importing vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvstore.client.engines.vllm_blending import refuse_blending
from kvstore.client.options import MAX_DEADLINE_MS
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.plans import NO_HINTS, Hints

HINTS_NAME = "kvstore"
"""Of the entry of a request's ``kv_transfer_params`` that has hints for this store."""

DEADLINE_NAME = "first_token_ms"
"""Of a request's deadline, in that entry."""


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """About what a prefill computes: so much a token, and so much more for each one before it."""

    token_flops: float = 0.0
    context_flops: float = 0.0

    @classmethod
    def of(cls, config: Any) -> PrefillCost:
        """Return the cost by a transformers *config* of a text model; 0 if it says too little.

        Two operations a weight (Kaplan et al., Scaling Laws for Neural Language Models, 2020,
        section 2.1), of a mixture of experts those that one token meets, without embeddings.
        """
        hidden, layers, heads = (
            _number(config, name)
            for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        if not hidden or not layers or not heads:
            return cls()
        head_dim = _number(config, "head_dim") or hidden / heads
        kv_heads = _number(config, "num_key_value_heads") or heads
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        experts = _number(config, "num_experts_per_tok")
        inner = _number(config, "intermediate_size") or 4 * hidden
        if experts:
            inner = experts * (_number(config, "moe_intermediate_size") or inner)
        weights = attention + 3 * hidden * inner
        return cls(2 * layers * weights, 4 * layers * heads * head_dim)

    def of_chunk(self, position: int, tokens: int) -> float:
        """Return the floating-point operations of *tokens* tokens from *position* on."""
        before = position + tokens / 2
        return tokens * (self.token_flops + self.context_flops * before)


def _number(config: Any, name: str) -> float:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) else 0.0


def hints_of(request: Any) -> Hints:
    """Return what is said of the reuse of vLLM's *request*: its length, and what its user states.

    Users state it as ``{"kvstore": {"reuse": 2, "category": "chat", ...}}`` in
    ``kv_transfer_params``. Raises InvalidRequestError for what is no hint.
    """
    length: dict[str, Any] = {"prompt_tokens": getattr(request, "num_prompt_tokens", 0)}
    stated = _stated(request)
    if stated is None:
        return Hints(**length) if any(length.values()) else NO_HINTS
    for name in map(str, stated) if isinstance(stated, Mapping) else ():
        refuse_blending(f"kv_transfer_params.{HINTS_NAME}", name)
    known = [one.name for one in fields(Hints) if one.name != "prompt_tokens"]
    if not isinstance(stated, Mapping) or not stated.keys() <= {*known, DEADLINE_NAME}:
        fix = f"give {[*known, DEADLINE_NAME]}"
        raise InvalidRequestError(f"kv_transfer_params.{HINTS_NAME}", stated, fix)
    hints = {name: value for name, value in stated.items() if name != DEADLINE_NAME}
    return Hints(**length, **hints)


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
    params = getattr(request, "kv_transfer_params", None)
    return params.get(HINTS_NAME) if isinstance(params, Mapping) else None
