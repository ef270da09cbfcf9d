"""What a load asks for and what it brought: spans of a prompt, the copies allowed, the prefix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, TypeAlias

from kvstore.client.chunk import LayerTensors
from kvstore.client.planning import Deadline
from kvstore.codecs.base import Importance, codec_name
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import Accuracy, KVLayout, Stated

Span: TypeAlias = tuple[int, int]
"""First token of a chunk, and the one after its last."""
Source: TypeAlias = Callable[[Span], LayerTensors]
"""Returns the tensors of one span, without copying if it can."""


class About(NamedTuple):
    """What there is to say of a chunk beside its tensors: see ``Chunk``."""

    layout: KVLayout | None = None
    importance: Importance | None = None


AboutOf: TypeAlias = Callable[[Span], About]
"""Returns what there is to say of the chunk at a span."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a load brought."""

    stored_tokens: int = 0
    """What was read."""
    hit_tokens: int = 0
    """What the engine skips of them: it computes the prompt's last token at least."""
    tier_tokens: Mapping[str, int] = field(default_factory=dict)
    """``hit_tokens`` by the tier they were on."""
    shared_tokens: int = 0
    """How far other prompts went the same way, where a model's states decide what is a hit."""
    lossy_tokens: int = 0
    """Of ``stored_tokens``, those from the first chunk on that was read from a lossy copy."""
    codecs: frozenset[str] = frozenset()
    """Of copies that state no bound among what was read."""
    tiers: Sequence[str] = field(default=(), compare=False)
    """Where each chunk was."""

    @property
    def exact_tokens(self) -> int:
        """The tokens before any that was read from a lossy copy: only these may be stored."""
        return self.stored_tokens - self.lossy_tokens

    @classmethod
    def of(
        cls, spans: Sequence[Span], tiers: Sequence[str], prompt_tokens: int, shared_tokens: int = 0
    ) -> Prefix:
        """Return the prefix of the chunks at *spans*, which came from *tiers*."""
        tier_tokens: Counter[str] = Counter()
        for (start, stop), tier in zip(spans, tiers, strict=True):
            tier_tokens[tier] += min(stop, prompt_tokens - 1) - start
        stored_tokens = spans[-1][1] if spans else 0
        found = dict(tier_tokens)
        return cls(stored_tokens, tier_tokens.total(), found, shared_tokens, tiers=tiers)


@dataclass(frozen=True, slots=True)
class Asked:
    """A load: tokens of its prompt, whether a part of what is there is of no use, its deadline."""

    tokens: int
    whole: bool = False
    within: Deadline | None = None


# --- which copies an engine reads, and which of those that came it uses

_ACCURACIES = {one.name: one for one in reversed(Accuracy)}


def least_of(accuracy: str) -> Accuracy:
    """Return the least accuracy of what *accuracy* allows to be read.

    Raises InvalidRequestError for what is none.
    """
    if not isinstance(accuracy, str) or accuracy not in _ACCURACIES:
        raise InvalidRequestError("accuracy", accuracy, f"use {', '.join(_ACCURACIES)}")
    return _ACCURACIES[accuracy]


class Allowed(NamedTuple):
    """The copies that a prompt may be read from: those of ``least`` or better; of those without a
    bound, those that one of ``codecs`` made.
    """

    least: Accuracy
    codecs: frozenset[str] = frozenset()

    def count(self, stated: Sequence[Stated]) -> int:
        """Return how many of the first chunks are from such copies, which state *stated*."""
        others = (
            at
            for at, one in enumerate(stated)
            if one.accuracy is Accuracy.approximate and codec_name(one.codec_id) not in self.codecs
        )
        return next(others, len(stated))


ONLY_EXACT = Allowed(Accuracy.exact)


def exact_count(stated: Sequence[Stated]) -> int:
    """Return how many of the first chunks are exact, whose copies state *stated*."""
    return len(list(takewhile(lambda one: one.accuracy is Accuracy.exact, stated)))
