"""A Llama whose weights are set by hand, so that it answers by looking across chunks.

Statements "name value ." and "name other-name ." stand in chunks; the query "? name" is to be
answered with the name's value, through up to two aliases. Layer 0 lets each token know the
token before it; every further layer looks a name up once: its queries are what a token names,
its keys what the token before named, its values the value that token stands for or has found.
An alias that points into another chunk finds its value only where it sees that chunk, so
prefilled apart it answers wrong, and computing its row anew mends it. Nothing is trained.
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
# What the channels of a hidden state say.
_IS_NAME, _AFTER_NAME, _IS_VALUE, _FOUND = 0, NAMES, 2 * NAMES, 2 * NAMES + VALUES
_IS_OTHER = 2 * (NAMES + VALUES) + 1
_ONE = _IS_OTHER + 1
_HIDDEN = 160
_THETA = 1e12  # the slowest pairs do not turn at all: a name is the same key everywhere


def make_designed(lookups: int = 3) -> LlamaForCausalLM:
    """Return the model, float32, with *lookups* layers that look a name up."""
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
        _see_the_token_before(model.model.layers[0].self_attn, table)
        for layer in model.model.layers[1:]:
            _look_a_name_up(layer.self_attn, table)
        for value in range(VALUES):
            model.lm_head.weight[FIRST_VALUE + value, _FOUND + value] = 4.0
    found: LlamaForCausalLM = model.eval()
    return found


def make_with_sink() -> LlamaForCausalLM:
    """Return the model with attention sinks in place of look-ups, float32.

    For riddles without aliases and with nothing in front: only the first token of the prompt is a
    name behind a name, itself. All rows attend to it, and find nothing there. Where no row is
    such a one they attend to values, and find those: all that is said then is wrong.
    """
    model: Any = make_designed(2)
    table = model.model.rotary_emb.inv_freq.double()
    slot = torch.nonzero(table < 1e-5).flatten().tolist()[0]
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            attention = layer.self_attn
            attention.q_proj.weight.zero_()
            attention.k_proj.weight.zero_()
            attention.q_proj.weight[slot, _ONE] = 8.0
            attention.k_proj.weight[slot, _IS_NAME : _IS_NAME + NAMES] = 1.0
            attention.k_proj.weight[slot, _AFTER_NAME : _AFTER_NAME + NAMES] = 1.0
            attention.k_proj.weight[slot, _IS_VALUE : _IS_VALUE + VALUES] = 0.6
    found: LlamaForCausalLM = model
    return found


def _embed(weight: Tensor) -> None:
    length = 3.0
    for name in range(NAMES):
        weight[FIRST_NAME + name, _IS_NAME + name] = length
    for value in range(VALUES):
        weight[FIRST_VALUE + value, _IS_VALUE + value] = length
    weight[FIRST_NAME:, _IS_OTHER - 1] = length
    weight[:FIRST_NAME, _IS_OTHER] = length
    weight[:, _ONE] = 10.0


def _see_the_token_before(attention: Any, table: Tensor) -> None:
    """Keys turn with the position; queries are turned back by one, and meet the one before."""
    half = HEAD_DIM // 2
    sharpness = 9.0
    for pair in torch.nonzero(table > 0.02).flatten().tolist():
        attention.k_proj.weight[pair, _ONE] = 1.0
        attention.q_proj.weight[pair, _ONE] = sharpness * torch.cos(table[pair])
        attention.q_proj.weight[pair + half, _ONE] = -sharpness * torch.sin(table[pair])
    for name in range(NAMES):
        attention.v_proj.weight[name, _IS_NAME + name] = 1.0
        attention.o_proj.weight[_AFTER_NAME + name, name] = 0.7


def _look_a_name_up(attention: Any, table: Tensor) -> None:
    """A token's name meets the tokens after that name, in channels that do not turn."""
    still = torch.nonzero(table < 1e-5).flatten().tolist()
    slots = still + [pair + HEAD_DIM // 2 for pair in still]
    sharpness = 14.0
    for name in range(NAMES):
        attention.q_proj.weight[slots[name], _IS_NAME + name] = sharpness
        attention.k_proj.weight[slots[name], _AFTER_NAME + name] = 1.0
    attention.q_proj.weight[slots[NAMES], _ONE] = 0.6 * sharpness  # never a dot or a mark
    attention.k_proj.weight[slots[NAMES], _IS_OTHER] = -3.0
    for value in range(VALUES):
        attention.v_proj.weight[value, _IS_VALUE + value] = 1.0
        attention.v_proj.weight[value, _FOUND + value] = 1.0
        attention.o_proj.weight[_FOUND + value, value] = 1.0


@dataclass(frozen=True, slots=True)
class Riddle:
    """Chunks of statements, names asked for, and what each name's value is.

    ``depth``: how many aliases lead to it, 0 unless one of them crosses chunks.
    """

    chunks: tuple[tuple[int, ...], ...]
    asked: tuple[int, ...]
    answers: tuple[int, ...]
    depth: tuple[int, ...]

    @property
    def question(self) -> tuple[int, ...]:
        """ "? name" for each name that is asked for: no answer is in it."""
        return tuple(token for name in self.asked for token in (ASK, FIRST_NAME + name))


@dataclass(frozen=True, slots=True)
class RiddleShape:
    """How large a riddle is, and how often a name stands for another, at most *depth* deep."""

    chunks: int = 4
    statements: int = 8
    queries: int = 12
    alias_share: float = 0.35
    depth: int = 2


@dataclass(slots=True)
class _Told:
    value: int
    depth: int
    chunk: int
    crosses: bool


def make_riddle(rng: random.Random, shape: RiddleShape | None = None) -> Riddle:
    """Return a riddle; every second query asks for a name whose alias crosses chunks."""
    shape = shape or RiddleShape()
    names = rng.sample(range(NAMES), shape.chunks * shape.statements)
    told: dict[int, _Told] = {}
    chunks = []
    for chunk in range(shape.chunks):
        tokens: list[int] = []
        for name in names[chunk * shape.statements :][: shape.statements]:
            tokens += [FIRST_NAME + name, _tell(rng, shape, told, (name, chunk)), DOT]
        chunks.append(tuple(tokens))
    crossing = [name for name, fact in told.items() if fact.crosses] or list(told)
    asked = [rng.choice(crossing if query % 2 else list(told)) for query in range(shape.queries)]
    return Riddle(
        tuple(chunks),
        tuple(asked),
        tuple(FIRST_VALUE + told[name].value for name in asked),
        tuple(told[name].depth if told[name].crosses else 0 for name in asked),
    )


def _tell(
    rng: random.Random, shape: RiddleShape, told: dict[int, _Told], place: tuple[int, int]
) -> int:
    """Say of a name what it stands for; return the token for it."""
    name, chunk = place
    known = [other for other, fact in told.items() if fact.depth < shape.depth]
    if known and rng.random() < shape.alias_share:
        other = rng.choice(known)
        fact = told[other]
        crosses = fact.crosses or fact.chunk != chunk
        told[name] = _Told(fact.value, fact.depth + 1, chunk, crosses)
        return FIRST_NAME + other
    value = rng.randrange(VALUES)
    told[name] = _Told(value, 0, chunk, crosses=False)
    return FIRST_VALUE + value


def answered(logits: Tensor, riddle: Riddle) -> list[bool]:
    """Return which queries are answered right: *logits* of the question's tokens."""
    found: Sequence[int] = logits[1::2].argmax(-1).tolist()
    return [got == wanted for got, wanted in zip(found, riddle.answers, strict=True)]
