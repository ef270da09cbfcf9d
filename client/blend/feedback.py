"""What a blend was worth, against a full prefill of the same prompt: for the store's feedback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstore.client.blend.source import LayerKV
from kvstore.proto.errors import InvalidRequestError

CLEAR_MARGIN = 0.1
"""Of probability, between a full prefill's two likeliest tokens. Closer ones change places between
two dtypes of one model, too: which one is first then says nothing of a blend."""

WORST = 1e3
"""Nats, where logits are no numbers or rule out what the full prefill may choose: a mean that a
report can hold."""


@dataclass(frozen=True, slots=True)
class Shadow:
    """Mean KL(full || blended) a token, in nats, and the share with the same likeliest token.

    ``agreement`` is that of the ``clear_tokens`` at which the full prefill's two likeliest are
    CLEAR_MARGIN apart; ``agreement_of_all`` that of all ``tokens``, and where none is clear both.
    """

    divergence: float
    agreement: float
    tokens: int
    agreement_of_all: float
    clear_tokens: int


def compare(full: Tensor, blended: Tensor) -> Shadow:
    """Return how far *blended* logits are from *full* ones: (tokens, vocabulary) each.

    Summed in float64. Raises InvalidRequestError for shapes that differ and for no tokens.
    """
    if full.shape != blended.shape or full.ndim != 2 or not len(full):
        found = (tuple(full.shape), tuple(blended.shape))
        raise InvalidRequestError("logits", found, "give the same rows of both, at least one")
    wanted, got = (part.double().log_softmax(-1) for part in (full, blended))
    share = wanted.exp()
    # Tokens that a model masks have a share of 0 and a logarithm of minus infinity in both.
    parts = torch.where(share == 0, 0.0, share * (wanted - got))
    divergence = parts.sum(-1).nan_to_num(WORST).clamp(max=WORST).mean()
    agrees = (full.argmax(-1) == blended.argmax(-1)) & ~blended.isnan().any(-1)
    likeliest = wanted.topk(2).values.exp() if full.shape[1] > 1 else wanted.exp()
    is_clear = likeliest[:, 0] - likeliest[:, -1] >= CLEAR_MARGIN
    clear = int(is_clear.sum())
    return Shadow(
        max(0.0, float(divergence)),
        float(agrees[is_clear if clear else slice(None)].double().mean()),
        len(full),
        float(agrees.double().mean()),
        clear,
    )


def worse(first: Shadow, second: Shadow) -> Shadow:
    """Return two comparisons of one blend as one: the larger divergence, and both's tokens."""
    clear, tokens = first.clear_tokens + second.clear_tokens, first.tokens + second.tokens
    agreed = sum(one.agreement * one.clear_tokens for one in (first, second))
    of_all = sum(one.agreement_of_all * one.tokens for one in (first, second))
    divergence = max(first.divergence, second.divergence)
    agreement = agreed / clear if clear else of_all / tokens
    return Shadow(divergence, agreement, tokens, of_all / tokens, clear)


def deviations(full: Sequence[LayerKV], stored: Sequence[LayerKV]) -> Tensor:
    """Return how far each token's stored values are from *full* ones: (tokens,), float32.

    Layers of (kv_heads, tokens, head_dim) each; squared distances, summed over the layers,
    each in units of its mean squared value.
    """
    found = torch.zeros(full[0][1].shape[1], device=full[0][1].device)
    for (_, wanted), (_, got) in zip(full, stored, strict=True):
        squares = wanted.float().square().sum((0, 2)).mean()
        distance = (wanted.float() - got.float()).square().sum((0, 2))
        found += distance / squares.clamp_min(torch.finfo(torch.float32).tiny)
    return found


def ranks(values: Tensor) -> Tensor:
    """Return the place of each of *values*, (tokens,), from 0 for the least to under 1."""
    places = torch.argsort(torch.argsort(values, stable=True), stable=True)
    return places.float() / max(1, len(values))
