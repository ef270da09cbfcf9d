"""Texts for trained models: held-out prefixes to score, and prefixes that tell facts.

The texts are those of ``data/tinylm``, whichever model reads them. Facts are tinylm's own
questions; a model that brings none is told codes of four digits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from bench.lib.traces import TINYLM, Ids, ids_of, rows_of

CODES = 6
"""Told in one prefix; each is asked for."""
OWNERS = (
    "north gate", "old mill", "harbour office", "stone bridge", "glass house", "market hall",
    "upper school", "river station", "corn store", "music room", "west tower", "ferry house",
)  # fmt: skip
QUESTION = "\n\nQuestion: What is the code of the {owner}?\nAnswer: The code of the {owner} is"


@dataclass(frozen=True, slots=True)
class Lengths:
    """How much text one model is measured on.

    ``windows`` texts of a stored ``prefix`` and the ``rest`` that is scored; ``calibrate`` texts
    fit tables; ``contexts`` prefixes of ``told`` tokens tell facts.
    """

    windows: int = 16
    calibrate: int = 8
    prefix: int = 256
    rest: int = 256
    contexts: int = 32
    told: int = 512


class Context(NamedTuple):
    """A prefix that tells facts, and for each a question and its answer, all as tokens."""

    prefix: Ids
    asked: tuple[tuple[Ids, Ids], ...]


Telling = tuple[list[str], list[tuple[str, str]]]
"""Passages with facts; questions with their answers."""


def held_out(use: str) -> list[str]:
    """Return the texts that are there to ``score``, or to ``calibrate``."""
    return [row["text"] for row in rows_of(TINYLM / "heldout.jsonl", use)]


def windows(tokenizer: Any, use: str, count: int, tokens: int) -> list[Ids]:
    """Return the first *tokens* of *count* held-out texts, the beginning of a sequence before.

    Raises ValueError when fewer texts are that long.
    """
    texts = (ids_of(tokenizer, text) for text in held_out(use))
    found = [
        (tokenizer.bos_token_id, *ids[: tokens - 1]) for ids in texts if len(ids) >= tokens - 1
    ]
    if len(found) < count:
        raise ValueError(f"heldout.jsonl: {len(found)} texts of {tokens} tokens, not {count}")
    return found[:count]


def contexts(folder: Path, tokenizer: Any, count: int, tokens: int) -> list[Context]:
    """Return *count* prefixes of *tokens* for the model of *folder*: facts in held-out text.

    Raises ValueError when the facts of fewer have room.
    """
    texts = [ids_of(tokenizer, text) for text in held_out("score")]
    own = folder / "questions.jsonl"
    found: list[Context] = []
    for told, asked in _questions(own) if own.is_file() else _codes(count):
        passages = [ids_of(tokenizer, passage) for passage in told]
        room = tokens - 1 - sum(map(len, passages))
        if room < 0 or len(found) == count:
            continue
        text = texts[len(found) % len(texts)][:room]
        prefix = (tokenizer.bos_token_id, *_spread(passages, text))
        pairs = tuple((ids_of(tokenizer, q), ids_of(tokenizer, a)) for q, a in asked)
        found.append(Context(prefix, pairs))
    if len(found) < count:
        raise ValueError(f"the facts of {len(found)} prefixes fit in {tokens} tokens, not {count}")
    return found


def _questions(file: Path) -> Iterator[Telling]:
    for row in rows_of(file, "score"):
        passages = "".join(f"{text}\n\n" for text in row["paragraphs"])
        yield [passages], [(row["question"], row["answer"])]


def _codes(count: int) -> Iterator[Telling]:
    rng = random.Random(1)
    for _ in range(count):
        codes = {owner: f"{rng.randrange(10_000):04}" for owner in rng.sample(OWNERS, CODES)}
        facts = [f"\n\nThe code of the {owner} is {code}.\n\n" for owner, code in codes.items()]
        yield facts, [(QUESTION.format(owner=owner), f" {code}") for owner, code in codes.items()]


def _spread(passages: Sequence[Ids], text: Ids) -> Ids:
    cuts = [len(text) * part // len(passages) for part in range(len(passages) + 1)]
    parts = [text[begin:end] for begin, end in pairwise(cuts)]
    return tuple(
        token for part, passage in zip(parts, passages, strict=True) for token in (*part, *passage)
    )
