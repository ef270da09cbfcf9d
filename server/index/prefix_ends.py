"""Where a prefix can end: chunks that have the states and windows of their last token."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.types import KVLayout, LayerGroup, LayerKind, Namespace
from kvstore.server.eviction.policy import Rows

MAX_CHECKPOINT_SPACES = 4096
"""Namespaces of models with state that are told apart; one more, and the oldest is forgotten."""

_HAS_WINDOW, _HAS_STATE = 1, 2


class ResumeRequirements(NamedTuple):
    """What a model needs of the end of a prefix: states, and the last so many tokens' windows."""

    state: bool = False
    window_tokens: int = 0

    @classmethod
    def of_groups(cls, groups: Iterable[LayerGroup]) -> ResumeRequirements:
        """Return what layers of *groups* need. A window of w sees the w - 1 tokens before."""
        needs = cls()
        for group in groups:
            width = max(1, group.window_tokens - 1) if group.kind is LayerKind.window else 0
            needs = needs.and_also(cls(group.kind is LayerKind.state, width))
        return needs

    @classmethod
    def of_layout(cls, layout: KVLayout) -> ResumeRequirements:
        """Return what a chunk of *layout* gives away of its model's needs."""
        windows = [c.tokens for c in layout.components if c.kind is LayerKind.window]
        return cls(layout.has(LayerKind.state), max(windows, default=0))

    def and_also(self, other: ResumeRequirements) -> ResumeRequirements:
        """Return what fulfils both."""
        tokens = max(self.window_tokens, other.window_tokens)
        return ResumeRequirements(self.state or other.state, tokens)

    @property
    def flags(self) -> int:
        """The same as bits of one byte."""
        return _HAS_STATE * self.state | _HAS_WINDOW * (self.window_tokens > 0)


class StateCheckpoints:
    """By row of the ChunkIndex, what chunks have of their end. Not thread-safe, as the index.

    A recurrent state is of use to a prompt that goes on exactly where it was taken (Marconi,
    MLSys 2025, section 3), a window to one that goes on at most so many tokens behind it.
    """

    def __init__(self) -> None:
        self.flags = array("B")
        """``ResumeRequirements.flags`` of each chunk with a copy; the index lengthens it."""
        self.needs: OrderedDict[bytes, ResumeRequirements] = OrderedDict()
        """By namespace, for models that need anything."""

    def need(self, space: Namespace, needs: ResumeRequirements) -> None:
        """Take note of what the model of *space* needs where a prefix ends."""
        known = self.needs.get(space)
        self.needs[space] = known.and_also(needs) if known else needs
        if len(self.needs) > MAX_CHECKPOINT_SPACES:
            self.needs.popitem(last=False)

    def is_less_complete(self, row: int, layout: KVLayout) -> bool:
        """Whether the chunk has less of its end than *layout*."""
        return bool(ResumeRequirements.of_layout(layout).flags & ~self.flags[row])

    def usable(self, needs: ResumeRequirements, rows: Rows, tokens: Callable[[int], int]) -> int:
        """Return how many of *rows*, a prefix, a model that has such *needs* could continue.

        *tokens* says how many tokens a row's chunk has.
        """
        flags = np.frombuffer(self.flags, np.uint8)[rows]
        fit = np.ones(len(rows), np.bool_)
        if needs.state:
            fit &= (flags & _HAS_STATE) != 0
        if needs.window_tokens:
            has = (flags & _HAS_WINDOW) != 0
            fit &= has if has.all() else _reach(has, rows, tokens, needs.window_tokens)
        ends = np.flatnonzero(fit)
        return int(ends[-1]) + 1 if len(ends) else 0


def _reach(
    has: NDArray[np.bool_], rows: Rows, tokens: Callable[[int], int], wanted: int
) -> NDArray[np.bool_]:
    """Return after which rows the last *wanted* tokens, or all there are, lie in windows kept."""
    behind = np.cumsum(np.fromiter(map(tokens, rows.tolist()), np.int64, len(rows)))
    before = np.concatenate([[0], behind])
    gap = np.maximum.accumulate(np.where(has, -1, np.arange(len(rows))))
    reached: NDArray[np.bool_] = has & ((gap < 0) | (behind - before[gap + 1] >= wanted))
    return reached
