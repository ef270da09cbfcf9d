"""Prompts for engines from ``data/traces``: its lengths and shared prefixes, tokens of our own.

A small engine's context holds a few thousand tokens, so only requests that fit are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeAlias, TypeVar

from kvstore.cli.simulate import Segment, SegmentLine, read_trace, tokens_of

TRACES = Path(__file__).resolve().parents[1] / "data" / "traces"
CHATS = "dev_chat_sharegptlike_sps2_n100"
DOCUMENTS = "dev_ragshared_qps2_n900"
LEAST_TOKENS = 1024
"""Of what a prompt shares with an earlier one."""
MOST_TOKENS = 2560
VOCABULARY = 247
"""Token ids from 3 on; the tiny model's tokenizer knows bytes."""

Prompt: TypeAlias = list[int]
T = TypeVar("T")

_ROUND = 1 << 20
"""More than a trace has segments: each round gets streams of its own."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A request that begins with what an earlier one left behind: *history*, then *rest*."""

    kind: str
    history: tuple[Segment, ...]
    earlier: tuple[Segment, ...]
    """What came behind the history in the earlier request; of a chat nothing."""
    rest: tuple[Segment, ...]

    def prompts(self, number: int) -> tuple[Prompt, Prompt]:
        """Return the earlier prompt and this one, of tokens that no other *number* has."""
        return tokens(self.history + self.earlier, number), tokens(self.history + self.rest, number)

    @property
    def history_tokens(self) -> int:
        """Tokens that both have."""
        return length(self.history)


def length(segments: Sequence[Segment]) -> int:
    """Return the tokens of *segments*."""
    return sum(count for _, count in segments)


def tokens(segments: Sequence[Segment], number: int) -> Prompt:
    """Return the tokens of *segments*; another *number* has others."""
    moved = [(number * _ROUND + stream, count) for stream, count in segments]
    return [3 + int(one) % VOCABULARY for one in tokens_of(moved)]


def turns(count: int) -> list[Turn]:
    """Return *count* turns, of chats and of documents by turns, spread over their traces."""
    half = -(-count // 2)
    pairs = zip(_spread(_chat_turns(), half), _spread(_document_turns(), half), strict=True)
    return list(chain.from_iterable(pairs))[:count]


def chats(most_tokens: int) -> list[tuple[Segment, ...]]:
    """Return second turns of chats, cut to *most_tokens*; those under a quarter are left out."""
    asked = [_cut(line.inputs, most_tokens) for line in _lines(CHATS) if line.turn == 1]
    return [one for one in asked if length(one) >= most_tokens // 4]


def _lines(name: str) -> list[SegmentLine]:
    lines = read_trace(TRACES / f"{name}.jsonl")
    return [line for line in lines if isinstance(line, SegmentLine)]


def _fits(line: SegmentLine) -> bool:
    history = line.input_tokens - line.inputs[-1][1]
    return history >= LEAST_TOKENS and line.input_tokens <= MOST_TOKENS


def _chat_turns() -> list[Turn]:
    """Turns of chats: all that was said before, answers included, then what is said now."""
    fit = [line for line in _lines(CHATS) if line.turn and _fits(line)]
    return [Turn("chat", line.inputs[:-1], (), line.inputs[-1:]) for line in fit]


def _document_turns() -> list[Turn]:
    """Questions about documents of which another was asked before."""
    asked: dict[tuple[Segment, ...], SegmentLine] = {}
    found = []
    for line in _lines(DOCUMENTS):
        document = line.inputs[:2]
        if len(line.inputs) != 3 or not _fits(line):
            continue
        before = asked.get(document)
        if before is not None:
            found.append(Turn("document", document, before.inputs[2:], line.inputs[2:]))
        asked[document] = line
    return found


def _cut(segments: Sequence[Segment], most_tokens: int) -> tuple[Segment, ...]:
    kept: list[Segment] = []
    for stream, count in segments:
        kept.append((stream, min(count, most_tokens - length(kept))))
    return tuple(one for one in kept if one[1])


def _spread(found: Sequence[T], count: int) -> list[T]:
    """Return *count* of *found*, as far from each other as they can be."""
    if count > len(found):
        raise ValueError(f"{len(found)} prompts of the trace fit, not {count}")
    return [found[number * len(found) // count] for number in range(count)]
