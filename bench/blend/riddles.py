"""Riddles whose answers need attention across chunks, and a Llama set by hand that answers them.

Chunks have statements "name value ." and "name other-name ."; the query "? name" asks for the
name's value, through up to two aliases. In a story a name may be stated again, in the same chunk or
a later one: the last statement counts, and an alias keeps the value of its target at that point, so
rows of a chunk depend on the chunks before it.

The model handles riddles without restated names. Layer 0 copies the previous token; each further
layer resolves a name once: queries are the name of a token, keys the name before it, values the
value of that token or the one it resolved. An alias into another chunk resolves only if it attends
to that chunk: prefilled alone it answers wrong, and recomputing its row fixes it. Nothing is
trained.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

NAMES, VALUES = 40, 32
BEGIN, DOT, ASK = 0, 1, 2
FIRST_NAME = 3
FIRST_VALUE = FIRST_NAME + NAMES
VOCABULARY = FIRST_VALUE + VALUES

HEAD_DIM = 128
# Channels of a hidden state.
IS_NAME, AFTER_NAME, IS_VALUE, FOUND = 0, NAMES, 2 * NAMES, 2 * NAMES + VALUES
IS_OTHER = 2 * (NAMES + VALUES) + 1
ONE = IS_OTHER + 1
_HIDDEN = 160
_THETA = 1e12  # the slowest pairs do not rotate: a name has one key at all positions


def make_designed(lookups: int = 3) -> LlamaForCausalLM:
    """Return the model, float32, with *lookups* layers that resolve a name."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=_HIDDEN,
        intermediate_size=8,
        num_hidden_layers=1 + lookups,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": _THETA},
    )
    model: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        _embed(model.model.embed_tokens.weight)
        table = model.model.rotary_emb.inv_freq.double()
        _attend_to_previous(model.model.layers[0].self_attn, table)
        for layer in model.model.layers[1:]:
            _attend_to_name(layer.self_attn, table)
        for value in range(VALUES):
            model.lm_head.weight[FIRST_VALUE + value, FOUND + value] = 4.0
    found: LlamaForCausalLM = model.eval()
    return found


def _embed(weight: Tensor) -> None:
    length = 3.0
    for name in range(NAMES):
        weight[FIRST_NAME + name, IS_NAME + name] = length
    for value in range(VALUES):
        weight[FIRST_VALUE + value, IS_VALUE + value] = length
    weight[FIRST_NAME:, IS_OTHER - 1] = length
    weight[:FIRST_NAME, IS_OTHER] = length
    weight[:, ONE] = 10.0


def _attend_to_previous(attention: Any, table: Tensor) -> None:
    """Attend to the previous position: keys rotate with the position, queries one less."""
    half = HEAD_DIM // 2
    sharpness = 9.0
    for pair in torch.nonzero(table > 0.02).flatten().tolist():
        attention.k_proj.weight[pair, ONE] = 1.0
        attention.q_proj.weight[pair, ONE] = sharpness * torch.cos(table[pair])
        attention.q_proj.weight[pair + half, ONE] = -sharpness * torch.sin(table[pair])
    for name in range(NAMES):
        attention.v_proj.weight[name, IS_NAME + name] = 1.0
        attention.o_proj.weight[AFTER_NAME + name, name] = 0.7


def _attend_to_name(attention: Any, table: Tensor) -> None:
    """Attend from a name to the tokens after that name, in channels that do not rotate."""
    still = torch.nonzero(table < 1e-5).flatten().tolist()
    slots = still + [pair + HEAD_DIM // 2 for pair in still]
    sharpness = 14.0
    for name in range(NAMES):
        attention.q_proj.weight[slots[name], IS_NAME + name] = sharpness
        attention.k_proj.weight[slots[name], AFTER_NAME + name] = 1.0
    attention.q_proj.weight[slots[NAMES], ONE] = 0.6 * sharpness  # never a special token
    attention.k_proj.weight[slots[NAMES], IS_OTHER] = -3.0
    for value in range(VALUES):
        attention.v_proj.weight[value, IS_VALUE + value] = 1.0
        attention.v_proj.weight[value, FOUND + value] = 1.0
        attention.o_proj.weight[FOUND + value, value] = 1.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a riddle, and the share of aliases, at most *depth* deep.

    *again_share*: share of restated names; None for none. Raises ValueError.
    """

    chunks: int = 4
    statements: int = 8
    queries: int = 12
    again_share: float | None = None
    alias_share: float = 0.35
    depth: int = 2

    def __post_init__(self) -> None:
        counts = (self.chunks, self.statements, self.queries, self.depth)
        if min(counts) < 1 or self.chunks * self.statements < 2:
            raise ValueError(
                f"riddle: {counts}: use at least one of each and two statements in all"
            )


STORY = Shape(chunks=5, again_share=0.2)


@dataclass(frozen=True, slots=True)
class Riddle:
    """Chunks of statements, the queried names, and their values.

    ``resolved``: for each row of ``tokens`` with an alias the value that it stands for there, else
    -1.
    """

    chunks: tuple[tuple[int, ...], ...]
    queried: tuple[int, ...]
    answers: tuple[int, ...]
    resolved: tuple[int, ...]

    @property
    def question(self) -> tuple[int, ...]:
        """ "? name" for each queried name."""
        return tuple(token for name in self.queried for token in (ASK, FIRST_NAME + name))

    @property
    def tokens(self) -> tuple[int, ...]:
        return (BEGIN, *(token for chunk in self.chunks for token in chunk), *self.question)


@dataclass(frozen=True, slots=True)
class _Fact:
    value: int
    depth: int
    chunk: int
    crosses: bool


def make_riddle(rng: random.Random, shape: Shape | None = None) -> Riddle:
    """Return a riddle; every second query needs a statement of another chunk, if any does."""
    shape = shape or Shape()
    statements = shape.chunks * shape.statements
    fresh = rng.sample(range(NAMES), NAMES if shape.again_share is not None else statements)
    if shape.again_share is None:
        fresh.reverse()
    facts: dict[int, _Fact] = {}
    tokens, resolved = list[int](), [-1]
    for number in range(statements):
        name, chunk = _name(rng, shape, facts, fresh), number // shape.statements
        others = [n for n, fact in facts.items() if n != name and fact.depth < shape.depth]
        if others and rng.random() < shape.alias_share:
            other = rng.choice(others)
            fact = facts[other]
            crosses = fact.crosses or fact.chunk != chunk
            facts[name] = _Fact(fact.value, fact.depth + 1, chunk, crosses)
            stated, value = FIRST_NAME + other, FIRST_VALUE + fact.value
        else:
            facts[name] = _Fact(rng.randrange(VALUES), 0, chunk, crosses=False)
            stated, value = FIRST_VALUE + facts[name].value, -1
        tokens += [FIRST_NAME + name, stated, DOT]
        resolved += [-1, value, -1]
    size = 3 * shape.statements
    crossing = [name for name, fact in facts.items() if fact.crosses] or list(facts)
    queried = [rng.choice(crossing if query % 2 else list(facts)) for query in range(shape.queries)]
    return Riddle(
        tuple(tuple(tokens[at : at + size]) for at in range(0, len(tokens), size)),
        tuple(queried),
        tuple(FIRST_VALUE + facts[name].value for name in queried),
        (*resolved, *([-1] * (2 * shape.queries))),
    )


def _name(rng: random.Random, shape: Shape, facts: dict[int, _Fact], fresh: list[int]) -> int:
    again = shape.again_share
    is_again = again is not None and len(facts) > 1 and rng.random() < again
    return rng.choice(list(facts)) if is_again or not fresh else fresh.pop()


def answered(logits: Tensor, riddle: Riddle) -> list[bool]:
    """Return which queries are answered correctly; *logits*: of the question's tokens."""
    found: Sequence[int] = logits[1::2].argmax(-1).tolist()
    return [got == wanted for got, wanted in zip(found, riddle.answers, strict=True)]
