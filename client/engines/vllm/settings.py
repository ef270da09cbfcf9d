"""What a user may set of the vLLM connector: ``kv_connector_extra_config``, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvstore.client.engines.base import client_options
from kvstore.client.engines.prefix import least_of
from kvstore.client.engines.vllm.identity import EngineShape
from kvstore.client.options import MAX_DEADLINE_MS, ClientOptions, TransportName
from kvstore.client.prefill import PrefillModel
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.plans import MAX_HANDOVER_MS, NO_HINTS, Hints
from kvstore.proto.types import DEFAULT_CHUNK_TOKENS

MAX_TOKEN_US = 10_000_000
"""Ten seconds a token."""


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
class VllmSettings:
    """``kv_connector_extra_config`` of one engine; every field may be left out.

    ``address``: the server. ``chunk_tokens``: tokens of a chunk, a multiple of the engine's
    block; 0 takes the least multiple from 256 on. ``model_revision``: a commit or a digest of
    the weights, instead of reading all of them once at the start. ``deadline_ms`` bounds a load
    and a store, ``lookup_deadline_ms`` what a request waits to learn what is stored. After the
    server did not answer nobody asks it for ``retry_after_ms``. ``queue_bytes``: KV of pages in
    CPU memory that waits to be stored; what comes beyond it is not stored. ``durable``: stores are
    on disk when they are over. ``transport``: as in ClientOptions. ``handover_ms``: what is stored
    is announced when its prompt arrives, and kept until another engine reads it, so long at most.
    ``wait_ms``: what a request waits for what another engine has announced. ``first_token_ms``:
    of requests that have none of their own, from their arrival to their first token: what loads
    later is computed; 0: none. ``prefill_token_us``: about what the engine takes to compute a
    token, by which that is told; 0: it is learned. ``accuracy``: which copies are loaded, as for
    Connector; vLLM shows a connector no logits, so that others open gates and close them.
    ``token_file`` has an API key or a JWT; ``tls_ca``, ``tls_cert`` and ``tls_key`` are PEM files,
    as in Access; ``tenant``: as in ClientOptions, as ``sglang_names`` is. A token is no setting:
    engines print those.
    """

    address: str = "127.0.0.1:7420"
    chunk_tokens: int = 0
    model_revision: str = ""
    deadline_ms: int = 2000
    lookup_deadline_ms: int = 30
    retry_after_ms: int = 1000
    queue_bytes: int = 256 << 20
    durable: bool = False
    transport: TransportName = "auto"
    handover_ms: int = 0
    wait_ms: int = 0
    first_token_ms: int = 0
    prefill_token_us: int = 0
    accuracy: str = "exact"
    token_file: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tenant: str = ""
    sglang_names: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            if type(value) is not kind:
                raise InvalidRequestError(
                    field.name, value, f"give a value of type {kind.__name__}"
                )
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
        least_of(self.accuracy)

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> VllmSettings:
        """Return the settings in *extra*. Raises InvalidRequestError for what is no setting."""
        known = [field.name for field in fields(cls)]
        for name in extra:
            refuse_blending("kv_connector_extra_config", name)
            if name not in known:
                fix = f"kv_connector_extra_config has {', '.join(known)}"
                raise InvalidRequestError("kv_connector_extra_config", name, fix)
        return cls(**extra)

    def chunk_tokens_for(self, block_tokens: int) -> int:
        """Return the tokens of a chunk where a block has *block_tokens*.

        Raises InvalidRequestError when that many do not fill whole blocks.
        """
        chosen = self.chunk_tokens or -(-DEFAULT_CHUNK_TOKENS // block_tokens) * block_tokens
        if chosen % block_tokens:
            raise InvalidRequestError(
                "chunk_tokens", chosen, f"give a multiple of the block size, {block_tokens}"
            )
        return chosen

    def accuracy_for(self, shape: EngineShape, device_type: str) -> str:
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

    def options(self, chunk_tokens: int, name: str, *, is_lookup: bool = False) -> ClientOptions:
        """Return the options of a client that looks up, or of one that loads and stores."""
        return client_options(
            self,
            chunk_tokens,
            deadline_ms=self.lookup_deadline_ms if is_lookup else self.deadline_ms,
            retry_after_ms=self.retry_after_ms,
            name=name,
            sglang_names=self.sglang_names,
        )


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


@dataclass(frozen=True, slots=True)
class MissingHook:
    """What blending needs of an engine, and what vLLM has in its place."""

    need: str
    in_vllm: str


VLLM_VERSION = "0.32"
"""That of which this was read."""

MISSING_HOOKS = (
    MissingHook(
        "KV in the middle of a prompt",
        "get_num_new_matched_tokens answers with tokens behind those already computed",
    ),
    MissingHook(
        "some tokens of a loaded span computed again",
        "a request's tokens are computed or not, by one number",
    ),
    MissingHook(
        "rows that differ from layer to layer",
        "a step's rows are fixed before its first layer, in metadata that layers share",
    ),
    MissingHook(
        "attention of scattered rows",
        "the kernels can, the scheduler never asks for it",
    ),
    MissingHook(
        "blocks that are kept out of its prefix cache",
        "full blocks are hashed and shared; only the request itself can carry a salt",
    ),
)
"""docs/blend.md says more of each."""


def refuse_blending(field: str, name: str) -> None:
    """Raise InvalidRequestError for what *field* calls *name*, if that asks for blending."""
    if not name.startswith("blend"):
        return
    lacking = "; ".join(f"{hook.need} ({hook.in_vllm})" for hook in MISSING_HOOKS)
    fix = f"vLLM {VLLM_VERSION} cannot be blended in, it has no hook for: {lacking}"
    raise InvalidRequestError(field, name, f"{fix}. Blend with transformers: docs/blend.md")
