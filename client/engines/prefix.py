"""Spans of a prompt, the copies that a load may read, and the prefix that it returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, TypeAlias

from kvstore.client.chunk import LayerTensors
from kvstore.codecs.base import Importance, codec_name
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import Accuracy, KVLayout, Stated

Span: TypeAlias = tuple[int, int]
"""First token of a chunk, and the one after its last."""
Source: TypeAlias = Callable[[Span], LayerTensors]
"""Returns the tensors of one span, without a copy if possible."""


class About(NamedTuple):
    """A chunk's metadata beside its tensors: see ``Chunk``."""

    layout: KVLayout | None = None
    importance: Importance | None = None


AboutOf: TypeAlias = Callable[[Span], About]
"""Returns the metadata of the chunk at a span."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The result of a load."""

    stored_tokens: int = 0
    """Tokens read."""
    hit_tokens: int = 0
    """Tokens the engine skips: it computes at least the prompt's last token."""
    tier_tokens: Mapping[str, int] = field(default_factory=dict)
    """``hit_tokens`` by tier."""
    shared_tokens: int = 0
    """Tokens shared with other prompts, even where a model's states prevent a hit."""
    lossy_tokens: int = 0
    """The ``stored_tokens`` from the first lossy chunk on."""
    codecs: frozenset[str] = frozenset()
    """Codecs of the approximate copies read."""
    tiers: Sequence[str] = field(default=(), compare=False)
    """The tier of each chunk."""

    @property
    def exact_tokens(self) -> int:
        """The tokens before the first lossy chunk: only these may be stored."""
        return self.stored_tokens - self.lossy_tokens

    @classmethod
    def of(
        cls, spans: Sequence[Span], tiers: Sequence[str], prompt_tokens: int, shared_tokens: int = 0
    ) -> Prefix:
        """Return the prefix of the chunks at *spans*, read from *tiers*."""
        tier_tokens: Counter[str] = Counter()
        for (start, stop), tier in zip(spans, tiers, strict=True):
            tier_tokens[tier] += min(stop, prompt_tokens - 1) - start
        stored_tokens = spans[-1][1] if spans else 0
        return cls(stored_tokens, tier_tokens.total(), tier_tokens, shared_tokens, tiers=tiers)


# --- which copies an engine reads, and which of them it uses


def least_of(accuracy: str) -> Accuracy:
    """Return the least accuracy that *accuracy* allows. Raises InvalidRequestError."""
    names = [one.name for one in reversed(Accuracy)]
    if accuracy not in names:
        raise InvalidRequestError("accuracy", accuracy, f"use {', '.join(names)}")
    return Accuracy[accuracy]


class Allowed(NamedTuple):
    """The copies that may be read: at least ``least``; approximate ones only of ``codecs``."""

    least: Accuracy
    codecs: frozenset[str] = frozenset()

    def count(self, stated: Sequence[Stated]) -> int:
        """Return how many of the leading chunks, described by *stated*, are allowed."""
        others = (
            at
            for at, one in enumerate(stated)
            if one.accuracy is Accuracy.approximate and codec_name(one.codec_id) not in self.codecs
        )
        return next(others, len(stated))


def exact_count(stated: Sequence[Stated]) -> int:
    """Return how many of the leading chunks, described by *stated*, are exact."""
    return len(list(takewhile(lambda one: one.accuracy is Accuracy.exact, stated)))
