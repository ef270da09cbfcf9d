"""Riddles whose names are told again: what a name stands for depends on where it is said.

Statements "name value ." and "name other-name ." in chunks, as in `bench.blend_designed`; here
a name may be told again, in the same chunk or a later one. The last telling counts, and a name
that was told to be as another keeps what that one stood for at the time. A model that looks the
other name up only when it is asked finds the wrong telling, so it has to learn to find out where
the statement stands: rows of a chunk then depend on the chunks before it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from bench.blend_designed import BEGIN, DOT, FIRST_NAME, FIRST_VALUE, NAMES, VALUES, Riddle


@dataclass(frozen=True, slots=True)
class StoryShape:
    """How large a story is; how often a name is told again, and as another, *depth* deep."""

    chunks: int = 5
    statements: int = 8
    queries: int = 12
    again_share: float = 0.2
    alias_share: float = 0.35
    depth: int = 2

    def __post_init__(self) -> None:
        counts = (self.chunks, self.statements, self.queries, self.depth)
        if min(counts) < 1 or self.chunks * self.statements < 2:
            raise ValueError(f"story: {counts}: give at least one of each, two statements in all")


@dataclass(frozen=True, slots=True)
class Story:
    """A riddle, and for each row of ``BEGIN, chunks, question`` the token it is to name, or -1.

    ``resolved``: of rows that say "as another name", the value that one stands for there.
    """

    riddle: Riddle
    resolved: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """The whole prompt."""
        chunks = (token for chunk in self.riddle.chunks for token in chunk)
        return (BEGIN, *chunks, *self.riddle.question)


@dataclass(frozen=True, slots=True)
class _Told:
    value: int
    depth: int
    chunk: int
    crosses: bool


class _Teller:
    """Tells one story."""

    def __init__(self, rng: random.Random, shape: StoryShape) -> None:
        self._rng, self._shape = rng, shape
        self._fresh = rng.sample(range(NAMES), NAMES)
        self.told: dict[int, _Told] = {}

    def statement(self, chunk: int) -> tuple[tuple[int, int, int], int]:
        """Return the tokens of a statement, and the value that its other name stands for."""
        name = self._name()
        others = [n for n, fact in self.told.items() if n != name and fact.depth < self._depth]
        if others and self._rng.random() < self._shape.alias_share:
            other = self._rng.choice(others)
            fact = self.told[other]
            crosses = fact.crosses or fact.chunk != chunk
            self.told[name] = _Told(fact.value, fact.depth + 1, chunk, crosses)
            return (FIRST_NAME + name, FIRST_NAME + other, DOT), FIRST_VALUE + fact.value
        value = self._rng.randrange(VALUES)
        self.told[name] = _Told(value, 0, chunk, crosses=False)
        return (FIRST_NAME + name, FIRST_VALUE + value, DOT), -1

    @property
    def _depth(self) -> int:
        return self._shape.depth

    def _name(self) -> int:
        is_again = len(self.told) > 1 and self._rng.random() < self._shape.again_share
        if is_again or not self._fresh:
            return self._rng.choice(list(self.told))
        return self._fresh.pop()


def make_story(rng: random.Random, shape: StoryShape | None = None) -> Story:
    """Return a story; every second query asks for a name whose value came across chunks."""
    shape = shape or StoryShape()
    teller = _Teller(rng, shape)
    chunks, resolved = [], [-1]
    for chunk in range(shape.chunks):
        tokens: list[int] = []
        for _ in range(shape.statements):
            statement, value = teller.statement(chunk)
            tokens += statement
            resolved += [-1, value, -1]
        chunks.append(tuple(tokens))
    told = teller.told
    crossing = [name for name, fact in told.items() if fact.crosses] or list(told)
    asked = [rng.choice(crossing if query % 2 else list(told)) for query in range(shape.queries)]
    riddle = Riddle(
        tuple(chunks),
        tuple(asked),
        tuple(FIRST_VALUE + told[name].value for name in asked),
        tuple(told[name].depth if told[name].crosses else 0 for name in asked),
    )
    return Story(riddle, (*resolved, *([-1] * (2 * shape.queries))))
