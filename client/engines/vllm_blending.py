"""What vLLM would have to let a connector do for blending, and does not: declared, and said."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.proto.errors import InvalidRequestError


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
