"""What ``accuracy`` means: which copies an engine reads, and which of those that came it uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.codecs.base import codec_name
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import Accuracy, Stated

_ACCURACIES = {
    "exact": Accuracy.exact,
    "bounded": Accuracy.bounded,
    "approximate": Accuracy.approximate,
}


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
    lossy = (at for at, one in enumerate(stated) if one.accuracy is not Accuracy.exact)
    return next(lossy, len(stated))


def codecs_of(stated: Sequence[Stated]) -> frozenset[str]:
    """Return the codecs of the copies without a bound."""
    return frozenset(
        codec_name(one.codec_id) for one in stated if one.accuracy is Accuracy.approximate
    )
