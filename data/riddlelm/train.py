"""Train the small Llama of data/riddlelm, on which naive reuse visibly hurts.

    python -m data.riddlelm.train --out build/riddlelm            # some six minutes of a core
    python -m data.riddlelm.train --out build/riddlelm --resume   # where it was stopped

Stories of `bench.blend.riddles`: the loss is that of the queries and, half as much, of the rows
that name another name, which are to say what it stands for there. Muon for the matrices of the
layers, AdamW for the rest; warmup, constant, linear decay to 0. The same seed, steps, threads
and versions give the same weights, whether or not it was stopped on the way: each batch is made
from the seed and its step, and the state is kept in safetensors.

The heads start as `data/tinylm`'s did, only more of them: those of layer 0 look one token back,
those behind it look for what layer 0 wrote there (mimetic initialisation, Trockman and Kolter,
arXiv 2305.09828, for the circuit of induction heads, Olsson et al., arXiv 2209.11895). Random
ones learn the same, in more time than a core has.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench.blend.cases import Engine, riddle_case
from bench.blend.riddles import STORY, VOCABULARY, Riddle, Shape, answered, make_riddle
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN, HEAD_DIM, LAYERS, INNER = 128, 32, 4, 128
THETA = 1e6
SEED = 1
STATE = "state.safetensors"
_NO_LABEL = -100
_TRIAL_SEED = 10**9
_BACK_SHARPNESS = 8.0
_MATCH_SHARPNESS = 2.0
_WRITTEN = 0.7


@dataclass(frozen=True, slots=True)
class Recipe:
    """How long and how fast. *easy_share*: of the steps, with shorter stories."""

    steps: int = 1200
    stories: int = 16
    queries: int = 20
    matrix_rate: float = 0.02
    other_rate: float = 3e-3
    resolved_weight: float = 0.5
    easy_share: float = 0.1
    warmup: int = 50
    decay_share: float = 0.5
    momentum: float = 0.95

    def shape(self, step: int) -> Shape:
        """Return what the stories of *step* are like."""
        is_easy = step < self.easy_share * self.steps
        return Shape(3 if is_easy else 5, 8, self.queries, 0.0 if is_easy else 0.2)

    def rate(self, step: int) -> float:
        """Return what share of the full rates *step* takes."""
        left = (self.steps - step) / self.steps
        return min(1.0, (step + 1) / self.warmup) * min(1.0, left / self.decay_share)


def make_model(seed: int = SEED) -> LlamaForCausalLM:
    """Return the model before any step, float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // HEAD_DIM,
        num_key_value_heads=HIDDEN // HEAD_DIM,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )
    model: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        _seed_heads(model)
    found: LlamaForCausalLM = model
    return found


def _seed_heads(model: Any) -> None:
    """Set the embeddings, and the heads to look back by one and for what was found there.

    Channel 0 of the embeddings is a constant, so that queries and keys have a bias.
    """
    table = model.model.embed_tokens.weight.normal_()
    table[:, 0] = HIDDEN**0.5
    model.lm_head.weight.copy_(table * HIDDEN**-0.5)
    model.lm_head.weight[:, 0] = 0
    aside = _orthogonal()  # where layer 0 writes, apart from the embeddings
    for index, layer in enumerate(model.model.layers):
        attention, values, match = layer.self_attn, _orthogonal(), _orthogonal()
        attention.v_proj.weight.copy_(values)
        attention.v_proj.weight[:, 0] = 0
        written = values.T if index else aside @ values.T
        attention.o_proj.weight.copy_(written * _WRITTEN)
        attention.q_proj.weight.copy_(match * _MATCH_SHARPNESS)
        attention.k_proj.weight.copy_(match @ aside.T * _MATCH_SHARPNESS)
        attention.q_proj.weight[:, 0] = attention.k_proj.weight[:, 0] = 0
        layer.mlp.gate_proj.weight.normal_(0, HIDDEN**-0.5)
        layer.mlp.up_proj.weight.normal_(0, HIDDEN**-0.5)
        layer.mlp.down_proj.weight.normal_(0, 0.1 * INNER**-0.5)
    _look_back(model.model.layers[0].self_attn, model.model.rotary_emb.inv_freq[:4])


def _look_back(attention: Any, fast: Tensor) -> None:
    """Make each head of *attention* meet the key one before: its fast pairs turn to it."""
    half = HEAD_DIM // 2
    constant = (HIDDEN / 2) ** 0.5  # channel 0 behind the norm
    size = (_BACK_SHARPNESS * HEAD_DIM**0.5) ** 0.5 / constant
    for first in range(0, HIDDEN, HEAD_DIM):
        query = attention.q_proj.weight[first : first + HEAD_DIM]
        key = attention.k_proj.weight[first : first + HEAD_DIM]
        for part in (query, key):
            part.mul_(0.1)
            part[: len(fast)] = part[half : half + len(fast)] = 0
        key[: len(fast), 0] = size
        query[: len(fast), 0] = size * torch.cos(fast)
        query[half : half + len(fast), 0] = -size * torch.sin(fast)


def _orthogonal() -> Tensor:
    found: Tensor = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN))[0]
    return found


class Muon:
    """Momentum made orthogonal (Jordan et al., 2024), for matrices."""

    def __init__(self, parameters: Mapping[str, Tensor], momentum: float) -> None:
        self._parameters = parameters
        self._kept = 1 - momentum
        self.sums = {name: torch.zeros_like(p) for name, p in parameters.items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move all matrices by *rate*."""
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                raise ValueError(f"grad: {name} has none: call backward first")
            total = self.sums[name].lerp_(parameter.grad, self._kept)
            move = _orthogonalised(parameter.grad.lerp(total, 1 - self._kept))
            long, wide = parameter.shape
            parameter.mul_(1 - 0.01 * rate).sub_(move, alpha=rate * max(1.0, long / wide) ** 0.5)


def _orthogonalised(matrix: Tensor) -> Tensor:
    """Return *matrix* with all singular values near 1: five steps of Newton and Schulz."""
    found: Tensor = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        square = found @ found.T
        found = 3.4445 * found + (-4.775 * square + 2.0315 * square @ square) @ found
    return found


class Training:
    """One training under way. *out*: the folder of its checkpoints."""

    def __init__(self, recipe: Recipe, out: Path, seed: int = SEED) -> None:
        self.recipe, self._out, self._seed = recipe, out, seed
        self.model: Any = make_model(seed)
        self.step_count = 0
        named = dict(self.model.named_parameters())
        matrices = {n: p for n, p in named.items() if p.ndim == 2 and ".layers." in n}
        self._muon = Muon(matrices, recipe.momentum)
        self._others = {n: p for n, p in named.items() if n not in matrices}
        self._adam = torch.optim.AdamW(
            list(self._others.values()), lr=recipe.other_rate, betas=(0.9, 0.98), weight_decay=0.0
        )

    def step(self) -> tuple[float, float]:
        """Do one step; return the losses of queries and of rows that name another name."""
        recipe, step = self.recipe, self.step_count
        rng = random.Random(f"{self._seed}:{step}")
        stories = [make_riddle(rng, recipe.shape(step)) for _ in range(recipe.stories)]
        tokens, asked, resolved = _tensors(stories)
        logits = self.model(tokens, use_cache=False).logits.flatten(0, 1)
        of_queries = cross_entropy(logits, asked.flatten(), ignore_index=_NO_LABEL)
        of_rows = cross_entropy(logits, resolved.flatten(), ignore_index=_NO_LABEL)
        (of_queries + recipe.resolved_weight * of_rows).backward()
        rate = recipe.rate(step)
        self._muon.step(recipe.matrix_rate * rate)
        for group in self._adam.param_groups:
            group["lr"] = recipe.other_rate * rate
        self._adam.step()
        self.model.zero_grad()
        self.step_count += 1
        return of_queries.item(), of_rows.item()

    def save(self) -> None:
        """Write the model, bfloat16, and the state to go on from; each whole or not at all."""
        self._out.mkdir(parents=True, exist_ok=True)
        state = {f"p.{n}": p.detach() for n, p in self.model.named_parameters()}
        state |= {f"muon.{n}": part for n, part in self._muon.sums.items()}
        for name, parameter in self._others.items():
            kept = self._adam.state[parameter]
            state |= {f"adam.{key}.{name}": kept[key] for key in ("exp_avg", "exp_avg_sq", "step")}
        _written(self._out / STATE, state, {"step": str(self.step_count)})
        note = {"format": "pt", "note": f"{self.step_count} steps, seed {self._seed}"}
        weights = {
            n: p.detach().bfloat16().contiguous() for n, p in self.model.state_dict().items()
        }
        _written(self._out / "model.safetensors", weights, note)
        settings = self.model.config.to_diff_dict() | {
            "architectures": ["LlamaForCausalLM"],
            "dtype": "bfloat16",
        }
        (self._out / "config.json").write_text(json.dumps(settings, indent=1, sort_keys=True))

    @torch.no_grad()
    def resume(self) -> None:
        """Take the state of ``save`` up again. Raises FileNotFoundError when there is none."""
        with safe_open(self._out / STATE, framework="pt") as file:
            self.step_count = int(file.metadata()["step"])
            for name, parameter in self.model.named_parameters():
                parameter.copy_(file.get_tensor(f"p.{name}"))
            for name, part in self._muon.sums.items():
                part.copy_(file.get_tensor(f"muon.{name}"))
            for name, parameter in self._others.items():
                kept = self._adam.state[parameter]
                for key in ("exp_avg", "exp_avg_sq", "step"):
                    kept[key] = file.get_tensor(f"adam.{key}.{name}")

    def trial(self, stories: int) -> tuple[float, float]:
        """Return the shares of right answers of a full prefill and of naive reuse."""
        engine = Engine.of(self.model)
        full, naive = trial(engine, stories)
        self.model.train()
        return full, naive


def trial(engine: Engine, stories: int) -> tuple[float, float]:
    """Return the shares of right answers of a full prefill and of naive reuse.

    Over *stories* that no training sees.
    """
    rng = random.Random(_TRIAL_SEED)
    right: list[bool] = []
    naive: list[bool] = []
    for _ in range(stories):
        case = riddle_case(engine, make_riddle(rng, STORY))
        right += answered(case.full.logits[-len(case.question) :], case.riddle)
        naive += answered(case.blend(("first_k", 0.0)).logits, case.riddle)
    return sum(right) / len(right), sum(naive) / len(naive)


def _tensors(stories: Sequence[Riddle]) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, and the labels of queries and of other rows: (stories, tokens) each."""
    tokens = torch.tensor([story.tokens for story in stories])
    resolved = torch.tensor([story.resolved for story in stories])
    asked = torch.full_like(tokens, _NO_LABEL)
    for row, story in enumerate(stories):
        asked[row, -2 * len(story.queried) + 1 :: 2] = torch.tensor(story.answers)
    return tokens, asked, torch.where(resolved < 0, _NO_LABEL, resolved)


def _written(path: Path, tensors: dict[str, Tensor], note: dict[str, str]) -> None:
    part = path.with_suffix(".part")
    save_file(tensors, part, metadata=note)
    os.replace(part, path)


def main(argv: Sequence[str] | None = None, recipe: Recipe | None = None) -> None:
    """Train, print losses and the gap on the way, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on where it was stopped")
    parser.add_argument("--every", type=int, default=250, help="steps between two checkpoints")
    parser.add_argument("--threads", type=int, default=1, help="the weights depend on it")
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    training = Training(recipe or Recipe(), given.out)
    if given.resume:
        training.resume()
    while training.step_count < training.recipe.steps:
        losses = training.step()
        if training.step_count % given.every and training.step_count < training.recipe.steps:
            continue
        training.save()
        full, naive = training.trial(24)
        print(
            f"step {training.step_count}  loss {losses[0]:.3f} {losses[1]:.3f}  right: full "
            f"{full:.3f} naive {naive:.3f}  {time.process_time() / 60:.1f} min",
            flush=True,
        )


if __name__ == "__main__":
    main()
