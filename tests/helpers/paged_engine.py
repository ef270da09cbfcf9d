"""A stand-in engine: a real model whose attention keeps K and V in pages on a device, as vLLM.

Two steps at once are queued on the device's stream, so the last step of a request is queued after
its end. Freed blocks are reused first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate
from threading import Event as Gate
from typing import Any, cast

import torch
from helpers.local_server import eventually
from helpers.slow_device import DelayedDevice, SlowDevice
from helpers.vllm_pages import representation
from helpers.vllm_stand_ins import FakeRequest, step
from helpers.vllm_steps import options
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvstore.client import Client
from kvstore.client.engines.base import Connector
from kvstore.client.engines.vllm.device import DeviceSide
from kvstore.client.engines.vllm.identity import KVCacheShape, LayerGroupShape, LayerRef
from kvstore.client.engines.vllm.scheduler import VllmScheduler
from kvstore.client.engines.vllm.worker import VllmWorker
from kvstore.proto.device import Event
from kvstore.proto.types import DType, LayerKind

BLOCK_TOKENS = 16
BLOCKS = 40
"""The first is the null block."""
PIECE_TOKENS = 48
"""Tokens of a prompt in one step."""
IN_FLIGHT = 2
"""Queued steps before the host reads the tokens of the first."""

LAYERS, HEADS, KV_HEADS, HEAD_DIM, TOKEN_IDS = 3, 4, 2, 16, 512
WIDTH = 2 * HEAD_DIM
CPU = torch.device("cpu")
_WAIT_S = 30.0

SHAPE = KVCacheShape(
    (
        LayerGroupShape(
            LayerKind.attention, DType.float32, KV_HEADS, HEAD_DIM, 0,
            tuple(LayerRef(f"model.layers.{at}.self_attn.attn", at, 0) for at in range(LAYERS)),
        ),
    ),
    BLOCK_TOKENS,
)  # fmt: skip


@lru_cache
def small_model(place: torch.device = CPU) -> PreTrainedModel:
    """Return a Llama with random weights, whose tokens depend on all before them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        config = LlamaConfig(
            vocab_size=TOKEN_IDS, hidden_size=64, intermediate_size=128, head_dim=HEAD_DIM,
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
            initializer_range=0.2, max_position_embeddings=1024,
        )  # fmt: skip
        model: Any = LlamaForCausalLM(config)
    model.set_attn_implementation("pages_of_a_test")
    return cast(PreTrainedModel, model.eval().to(place))


def indices(values: Sequence[int], place: torch.device) -> torch.Tensor:
    """Return *values* in the memory of *place*, without waiting on the host."""
    made = torch.tensor(values, dtype=torch.long)
    if place.type == "cpu":
        return made
    return made.pin_memory().to(place, non_blocking=True)


def views(place: torch.device) -> list[torch.Tensor]:
    """Return the pages of each layer as vLLM registers them: views of one byte buffer with
    interleaved layers, tokens before heads.
    """
    shape = (LAYERS, BLOCKS, BLOCK_TOKENS, KV_HEADS, WIDTH)
    buffer = torch.zeros(math.prod(shape) * 4, dtype=torch.int8, device=place)
    return list(buffer.view(torch.float32).view(shape).transpose(2, 3).unbind(0))


def write(parts: Sequence[torch.Tensor], pages: torch.Tensor, slots: torch.Tensor) -> None:
    """Write K and V, each (tokens, kv_heads, head_dim), to *slots*, V after K."""
    size = pages.shape[2]
    pages[slots // size, :, slots % size] = torch.cat(list(parts), 2)


@dataclass(frozen=True, slots=True)
class _Row:
    """The tokens of one request in a step, from *start* on."""

    start: int
    tokens: int
    table: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Batch:
    pages: Sequence[torch.Tensor]
    rows: Sequence[_Row]

    @property
    def positions(self) -> torch.Tensor:
        return torch.cat([self._range(row) for row in self.rows])

    def _range(self, row: _Row) -> torch.Tensor:
        return torch.arange(row.start, row.start + row.tokens, device=row.table.device)

    @property
    def slots(self) -> torch.Tensor:
        found = []
        for row in self.rows:
            at = self._range(row)
            found.append(row.table[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS)
        return torch.cat(found)

    def attend(self, pages: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """Return attention of *query* (heads, tokens, head_dim) over each request's blocks."""
        found, first = [], 0
        for row in self.rows:
            stop = row.start + row.tokens
            whole = pages[row.table].transpose(0, 1).flatten(1, 2)[:, :stop]
            keys, values = whole.split(HEAD_DIM, -1)
            mask = torch.ones((row.tokens, stop), dtype=torch.bool, device=pages.device)
            seen = torch.nn.functional.scaled_dot_product_attention(
                query[None, :, first : first + row.tokens], keys[None], values[None],
                mask.tril(row.start), enable_gqa=True,
            )  # fmt: skip
            found.append(seen.transpose(1, 2))
            first += row.tokens
        return torch.cat(found, 1)


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any, **more: Any
) -> tuple[torch.Tensor, None]:
    batch = more["batch"]
    pages = batch.pages[module.layer_idx]
    write([key[0].transpose(0, 1), value[0].transpose(0, 1)], pages, batch.slots)
    return batch.attend(pages, query[0]), None


AttentionInterface.register("pages_of_a_test", _attention)


@dataclass(eq=False)
class _Sequence:
    request: FakeRequest
    prompt_tokens: int
    stop: int
    """Computed tokens at the end; one more is sampled."""
    blocks: list[int] = field(default_factory=list)
    last: list[torch.Tensor] = field(default_factory=list)
    """The last sampled token, on the device and (after the step) on the host."""
    is_loading: bool = False

    @property
    def name(self) -> str:
        return self.request.request_id


@dataclass(frozen=True, slots=True)
class _Step:
    event: Event
    sampled: list[tuple[_Sequence, list[torch.Tensor]]]


class PagedEngine:
    """Generates tokens in batches, with a store at *address* or without one.

    *zeroes_first*: new blocks are zeroed before ``handle_preemptions``, as in vLLM's V2 runner,
    else after it. *stores_last*: stores wait for ``release``; else the host waits for loads and
    stores before it reads results of the device.
    """

    def __init__(
        self, address: str | None, client: type[Client] = Client, *, zeroes_first: bool = True,
        stores_last: bool = False, device: SlowDevice | DelayedDevice | None = None,
    ) -> None:  # fmt: skip
        self.device = device or SlowDevice()
        is_cuda = isinstance(self.device, DelayedDevice)
        self.place = torch.device("cuda", 0) if is_cuda else CPU
        self.model = small_model(self.place)
        self.pages = views(self.place)
        self.late_steps = 0
        """Steps still running when their hooks ended."""
        self._zeroes_first, self._stores_last = zeroes_first, stores_last
        self._free = list(range(1, BLOCKS))
        self.given = 0
        """Number of block allocations."""
        self._new: list[int] = []
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._steps: deque[_Step] = deque()
        self.outputs: dict[str, list[int]] = {}
        self.kept: dict[str, list[torch.Tensor]] = {}
        """K|V of each layer of a request that has ended, (tokens, kv_heads, 2 * head_dim)."""
        self.hits: dict[str, int] = {}
        self._gate = Gate()
        self.worker: VllmWorker | None = None
        if address is not None:
            self._connect(address, client)

    def _connect(self, address: str, client: type[Client]) -> None:
        identity, opts = representation(shape=SHAPE), options(retry_after_ms=300)
        self.scheduler = VllmScheduler(Connector(Client(address, identity, opts)), SHAPE)
        connector = Connector(client(address, identity, opts))
        # With CUDA memory the worker finds the device itself.
        device = self.device if isinstance(self.device, SlowDevice) else None
        self.worker = VllmWorker(connector, SHAPE, 64 << 20, device=device)
        (group,) = SHAPE.groups
        named = zip(group.layers, self.pages, strict=True)
        refusal = self.worker.register({one.name: each for one, each in named}, lambda _: write)
        assert not refusal, refusal
        if self._stores_last:
            self.worker._storer.submit(self._await_release)

    def _await_release(self) -> None:
        self._gate.wait(_WAIT_S)

    @property
    def side(self) -> DeviceSide:
        assert self.worker is not None
        assert isinstance(self.worker._side, DeviceSide)
        return self.worker._side

    # --- requests

    def add(self, name: str, prompt: Sequence[int], new_tokens: int) -> None:
        request = FakeRequest(name, list(prompt))
        stop = len(prompt) + new_tokens - 1
        self._waiting.append(_Sequence(request, len(prompt), stop))
        if self.worker is not None:
            self.scheduler.on_new_request(request)

    def generate(
        self, prompts: Mapping[str, Sequence[int]], new_tokens: int
    ) -> dict[str, list[int]]:
        """Return the tokens of all *prompts*, batched as far as blocks allow."""
        for name, prompt in prompts.items():
            self.add(name, prompt, new_tokens)
        self.finish()
        return {name: self.outputs[name] for name in prompts}

    def finish(self) -> None:
        while self._waiting or self._running:
            self.step()

    def release(self) -> None:
        """Run all queued device work, then let stores continue, and wait for them."""
        self.device.compute.run()
        self._gate.set()
        assert self.worker is None or self.worker.settled(_WAIT_S)

    def close(self) -> None:
        self._gate.set()
        if self.worker is not None:
            self.scheduler.close()
            self.worker.close()

    def _admit(self) -> None:
        """Start requests while there are blocks for all their tokens."""
        while self._waiting:
            reserved = sum(_blocks(one.stop + 1) - len(one.blocks) for one in self._running)
            sequence = self._waiting[0]
            if _blocks(sequence.stop + 1) > len(self._free) - reserved:
                assert self._running, "a request that needs more blocks than there are"
                return
            self._waiting.popleft()
            self._running.append(sequence)
            if self.worker is not None:
                self._begin_load(sequence)

    def _matched(self, request: FakeRequest, computed: int = 0) -> int:
        found: list[int | None] = []

        def is_known() -> bool:
            found.append(self.scheduler.matched_tokens(request, computed))
            return found[-1] is not None

        assert eventually(is_known)
        return found[-1] or 0

    def _begin_load(self, sequence: _Sequence) -> None:
        request = sequence.request
        hit = self.hits[sequence.name] = self._matched(request)
        if hit:
            self._grow(sequence, hit)
            sequence.is_loading = True
            # If the whole prompt is stored, its last token is still computed.
            request.num_computed_tokens = min(hit, sequence.prompt_tokens - 1)
            self.scheduler.on_alloc(request, hit, [sequence.blocks])

    def _grow(self, sequence: _Sequence, tokens: int) -> None:
        """Give a request blocks for *tokens*, most recently freed first."""
        while len(sequence.blocks) < _blocks(tokens):
            sequence.blocks.append(self._free.pop())
            self._new.append(sequence.blocks[-1])
            self.given += 1

    # --- a step

    def step(self) -> None:
        """Queue a step of all ready requests, and read the results of an older one."""
        self._admit()
        counts = {one.name: _next(one) for one in self._running if not one.is_loading}
        chosen = [one for one in self._running if counts.get(one.name)]
        for one in chosen:
            self._grow(one, one.request.num_computed_tokens + counts[one.name])
        sampled = self._queue(chosen, {one.name: counts[one.name] for one in chosen})
        if chosen:
            self._steps.append(_Step(self.device.compute.record(), sampled))
            self.late_steps += not self._steps[-1].event.query()
        if self.worker is not None:
            if not self._stores_last:
                assert self.worker.settled(_WAIT_S)
            self._take_loads(self.worker, is_idle=not chosen)
        while self._steps and (len(self._steps) >= IN_FLIGHT or not chosen):
            self._read_oldest()

    def _queue(
        self, chosen: Sequence[_Sequence], counts: Mapping[str, int]
    ) -> list[tuple[_Sequence, list[torch.Tensor]]]:
        """Call the hooks of a step in vLLM's order, with its work between them."""
        taken, self._new = self._new, []
        prepare = partial(self._prepare, taken)
        if self._zeroes_first:
            self.device.compute.launch(prepare)
        plan = None
        if self.worker is not None:
            tables = {one.name: [one.blocks] for one in self._running}
            plan = self.scheduler.build_plan(step([taken], **counts), tables.__getitem__)
            self.worker.save_before_overwrite(plan)
        if not self._zeroes_first:
            self.device.compute.launch(prepare)
        sampled = self._forward(chosen, counts)
        if self.worker is not None and plan is not None:
            self.worker.load(plan)
            self.worker.store(plan)
        return sampled

    def _prepare(self, taken: Sequence[int]) -> None:
        zeroed = indices(taken, self.place)
        for pages in self.pages:
            pages.index_fill_(0, zeroed, 0.0)

    def _forward(
        self, chosen: Sequence[_Sequence], counts: Mapping[str, int]
    ) -> list[tuple[_Sequence, list[torch.Tensor]]]:
        """Queue a forward pass; its sampled tokens are valid when it ends."""
        rows, ids, sampled = [], [], []
        for one in chosen:
            start, tokens = one.request.num_computed_tokens, counts[one.name]
            rows.append(_Row(start, tokens, indices(one.blocks, self.place)))
            known = one.request.all_token_ids[start : start + tokens]
            is_prompt = start + tokens <= one.prompt_tokens
            given = partial(indices, known, self.place)
            ids.append(given if is_prompt else partial(_first, one.last))
            one.request.num_computed_tokens = start + tokens
            one.last = []
            is_sampled = start + tokens >= one.prompt_tokens
            sampled.append((one, one.last if is_sampled else None))
        if chosen:
            outs = [(at, out) for at, (_, out) in enumerate(sampled) if out is not None]
            batch = _Batch(self.pages, rows)
            self.device.compute.launch(partial(self._compute, batch, ids, outs))
        return [(one, out) for one, out in sampled if out is not None]

    def _compute(
        self, batch: _Batch, ids: Sequence[Callable[[], torch.Tensor]],
        outs: Sequence[tuple[int, list[torch.Tensor]]],
    ) -> None:  # fmt: skip
        with torch.inference_mode():
            tokens = torch.cat([each() for each in ids])
            model: Any = self.model
            logits = model(
                input_ids=tokens[None], position_ids=batch.positions[None], use_cache=False,
                batch=batch,
            ).logits[0]  # fmt: skip
        ends = [*accumulate(row.tokens for row in batch.rows)]
        self._give(outs, [logits[ends[at] - 1].argmax().reshape(1) for at, _ in outs])

    def _give(
        self, outs: Sequence[tuple[int, list[torch.Tensor]]], sampled: Sequence[torch.Tensor]
    ) -> None:
        for (_, out), token in zip(outs, sampled, strict=True):
            kept = token.clone()
            out += [kept, kept.to("cpu", non_blocking=True)]

    def _read_oldest(self) -> None:
        """Read the tokens of the oldest step, and end finished requests."""
        oldest = self._steps.popleft()
        oldest.event.synchronize()
        for one, (_, token) in oldest.sampled:
            if one not in self._running:
                continue  # already finished
            one.request.all_token_ids.append(int(token))
            if len(one.request.all_token_ids) > one.stop:
                self._end(one)

    def _end(self, one: _Sequence) -> None:
        self.outputs[one.name] = one.request.all_token_ids[one.prompt_tokens :]
        blocks = indices(one.blocks, self.place)
        self.kept[one.name] = [
            pages[blocks].transpose(1, 2).flatten(0, 1)[: one.stop].clone() for pages in self.pages
        ]
        self._running.remove(one)
        self._free += one.blocks
        if self.worker is not None:
            self.scheduler.finished(one.request)

    def _take_loads(self, worker: VllmWorker, *, is_idle: bool) -> None:
        done = worker.finished_loads(is_idle=is_idle)
        assert worker.failed_blocks() == set()
        for one in self._running:
            one.is_loading = one.is_loading and one.name not in done
        report = worker.report()
        if report is not None:
            self.scheduler.on_report(report)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def _next(one: _Sequence) -> int:
    """Return how many tokens of a request the next step computes.

    One more than needed at the end, as in vLLM: that step is queued before the last token is read.
    """
    computed = one.request.num_computed_tokens
    if computed < one.prompt_tokens:
        return min(PIECE_TOKENS, one.prompt_tokens - computed)
    return int(computed <= one.stop)


def _first(tokens: Sequence[torch.Tensor]) -> torch.Tensor:
    return tokens[0]
