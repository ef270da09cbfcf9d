"""Requests with a deadline through the transformers connector, over links of any speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers.local_server import LocalServer
from helpers.slow_link import SlowLink
from helpers.torch_engine import greedy, plain_tokens, random_ids
from transformers import PreTrainedModel

from kvstore.client import Client, ClientOptions
from kvstore.client.deadline import StoredFrame
from kvstore.client.engines.transformers import TransformersConnector, representation_of
from kvstore.client.planning import PrefillMeter, PrefillModel
from kvstore.client.transports.base import Arrivals, ReadPlan
from kvstore.proto.errors import InvalidRequestError

CHUNKS, TOKENS = 6, 64
CHUNK_S = 0.15
"""What the slow engine takes for a chunk."""
ENGINE = PrefillModel(0.0, CHUNK_S / TOKENS)
TRIES = 4
"""Of what takes real time: a machine that was busy meanwhile shows nothing."""
LONG_MS = 20_000


@pytest.fixture
def link(server: LocalServer) -> Iterator[SlowLink]:
    link = SlowLink(server.node.port)
    yield link
    link.close()


@pytest.fixture
def connect(
    link: SlowLink, tinylm: PreTrainedModel, tokenizer: Any
) -> Iterator[Callable[..., Any]]:
    clients: list[Client] = []
    identity = representation_of(tinylm, tokenizer)

    def connect(**settings: Any) -> TransformersConnector:
        options = ClientOptions("grpc", chunk_tokens=TOKENS, deadline_ms=LONG_MS, retry_after_ms=1)
        clients.append(Client(link.address, identity, options))
        return TransformersConnector(clients[-1], tinylm, durable=True, **settings)

    yield connect
    for client in clients:
        client.close()


@contextmanager
def slow(model: PreTrainedModel) -> Iterator[list[int]]:
    """Have *model* take CHUNK_S for each chunk; collect how many tokens it computed at a time."""
    computed: list[int] = []

    def wait(_: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        computed.append(int(ids.shape[1]))
        time.sleep(CHUNK_S * ids.shape[1] / TOKENS)

    hook = model.base_model.register_forward_pre_hook(wait, with_kwargs=True)
    try:
        yield computed
    finally:
        hook.remove()


def answered(
    connector: TransformersConnector, prompt: torch.Tensor, **asked: Any
) -> tuple[list[int], int, float]:
    """What came, how many tokens were hit, and how long it took."""
    started_s = time.monotonic()
    found = connector.generate(prompt, greedy(1), **asked)
    tokens: list[int] = found.output.sequences[0].tolist()
    return tokens, found.hit_tokens, time.monotonic() - started_s


def alone(model: PreTrainedModel, prompt: torch.Tensor) -> float:
    """What it takes without a store."""
    started_s = time.monotonic()
    model.base_model(prompt)
    return time.monotonic() - started_s


@pytest.fixture
def prompt(tinylm: PreTrainedModel, connect: Callable[..., Any]) -> torch.Tensor:
    """One that is stored."""
    ids = random_ids(CHUNKS * TOKENS + 10, seed=7)
    connect().generate(ids, greedy(1))
    return ids


def right(model: PreTrainedModel, prompt: torch.Tensor) -> list[int]:
    return plain_tokens(model, prompt)[: prompt.shape[1] + 1]


def test_over_a_link_that_gives_next_to_nothing_it_computes_and_is_as_fast_as_without_a_store(
    tinylm: PreTrainedModel, connect: Callable[..., Any], prompt: torch.Tensor, link: SlowLink
) -> None:
    link.bytes_per_s = 20e3
    connector = connect(deadline_ms=300)
    connector._prefill = ENGINE
    connector.client.lookup(keys=connector.client.keys(prompt[0].tolist()))  # a session is there
    with slow(tinylm):
        rounds = [(alone(tinylm, prompt), answered(connector, prompt)[2]) for _ in range(TRIES)]
        tokens, hit, _ = answered(connector, prompt)
    assert tokens == right(tinylm, prompt)
    assert hit < CHUNKS * TOKENS
    assert connector.stats().misses.keys() == {"slow"}
    assert any(took_s < 1.125 * alone_s + 0.3 for alone_s, took_s in rounds), rounds
    assert connector.stats().load_errors == {}


def test_the_model_computes_the_first_chunks_while_the_link_brings_the_last_ones(
    tinylm: PreTrainedModel, connect: Callable[..., Any], prompt: torch.Tensor, link: SlowLink
) -> None:
    chunk_bytes = TOKENS * 6 * 2 * 2 * 64 * 4
    connector = connect()
    connector._prefill = ENGINE
    connector.client.lookup(keys=connector.client.keys(prompt[0].tolist()))

    def is_shared() -> bool:
        link.bytes_per_s = 2 * chunk_bytes / CHUNK_S
        with slow(tinylm) as computed:
            alone_s = alone(tinylm, prompt)
            computed.clear()
            tokens, hit, took_s = answered(connector, prompt, deadline_ms=200)
        assert tokens == right(tinylm, prompt)
        assert hit + sum(computed[:-1]) >= CHUNKS * TOKENS
        return 0 < hit < CHUNKS * TOKENS and took_s < alone_s

    assert any(is_shared() for _ in range(TRIES)), "no sooner than by computing alone"


def test_what_a_token_takes_is_learned_and_a_deadline_needs_no_setting(
    tinylm: PreTrainedModel, connect: Callable[..., Any], prompt: torch.Tensor, link: SlowLink
) -> None:
    connector = connect()
    assert connector.learned.model() is None
    with slow(tinylm):
        connector.generate(random_ids(3 * TOKENS, seed=8), greedy(1))
    learned = connector.learned.model()
    assert learned is not None
    assert CHUNK_S / TOKENS < learned.token_s < 5 * CHUNK_S / TOKENS
    link.bytes_per_s = 20e3
    tokens, hit, took_s = answered(connector, prompt, deadline_ms=300)
    assert tokens == right(tinylm, prompt)
    assert hit < CHUNKS * TOKENS
    assert took_s < 5


def test_every_prompt_of_a_batch_has_the_deadline(
    tinylm: PreTrainedModel, connect: Callable[..., Any], prompt: torch.Tensor
) -> None:
    connector = connect()
    connector._prefill = ENGINE
    found = connector.generate(torch.cat([prompt, prompt]), greedy(1), deadline_ms=2000)
    assert min(found.row_hits) > 0
    for row in found.output.sequences.tolist():
        assert row == right(tinylm, prompt)


def test_an_error_of_the_model_is_the_callers_and_no_deadline_is_refused_by_name(
    tinylm: PreTrainedModel, connect: Callable[..., Any], prompt: torch.Tensor, link: SlowLink
) -> None:
    connector = connect()
    connector._prefill = PrefillModel(0.0, 1e-6)
    link.bytes_per_s = 20e3

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    hook = tinylm.base_model.register_forward_pre_hook(fail)
    try:
        with pytest.raises(ZeroDivisionError):
            connector.generate(prompt, greedy(1), deadline_ms=100)
    finally:
        hook.remove()
    with pytest.raises(InvalidRequestError, match="deadline_ms=-1"):
        connector.generate(prompt, greedy(1), deadline_ms=-1)
    with pytest.raises(InvalidRequestError, match="deadline_ms"):
        connect(deadline_ms=1 << 40)


def damaging(monkeypatch: pytest.MonkeyPatch, connector: TransformersConnector, chunk: int) -> None:
    """Have a byte of the stored *chunk* arrive wrong."""
    kind: Any = type(connector.client._link.connected())
    read = kind.read

    @contextmanager
    def damaged(transport: Any, plan: ReadPlan) -> Iterator[Arrivals]:
        with read(transport, plan) as arriving:
            yield Arrivals(map(flipped, arriving)) if plan.ranges else arriving

    def flipped(piece: Any) -> Any:
        if piece.index != chunk or not piece.offset or len(piece.data) < 100:
            return piece
        data = np.array(piece.data)
        data[-1] ^= 255
        return replace(piece, data=data)

    monkeypatch.setattr(kind, "read", damaged)


@pytest.mark.parametrize(("engine", "chunk"), [(None, 2), (ENGINE, 0)])
def test_behind_a_chunk_that_arrives_damaged_all_is_computed_and_stored_right(
    connect: Callable[..., Any],
    tinylm: PreTrainedModel,
    prompt: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    engine: PrefillModel | None,
    chunk: int,
) -> None:
    connector, model = connect(), cast("Any", tinylm)
    connector._prefill = engine
    damaging(monkeypatch, connector, chunk)
    output = connector.generate(prompt, greedy(80), deadline_ms=LONG_MS).output
    monkeypatch.undo()
    assert output.sequences[0].tolist() == model.generate(prompt, greedy(80))[0].tolist()
    cache, hit = connect().load(output.sequences)
    with torch.no_grad():
        wanted = model(output.sequences, use_cache=True).past_key_values
    assert hit >= CHUNKS * TOKENS
    for layer, own in zip(cache.layers, wanted.layers, strict=True):
        assert torch.allclose(layer.keys, own.keys[:, :, :hit], atol=1e-3)


def test_a_lookup_that_hangs_costs_a_request_its_deadline_and_no_more(
    connect: Callable[..., Any],
    prompt: torch.Tensor,
    link: SlowLink,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connector = connect()
    connector._prefill = PrefillModel(0.0, 1e-5)
    connector.client.lookup(keys=connector.client.keys(prompt[0].tolist()))
    monkeypatch.setattr(connector, "store_chunks", lambda *_: 0)
    link.bytes_per_s = 30.0
    assert min(answered(connector, prompt, deadline_ms=100)[2] for _ in range(TRIES)) < 2
    link.bytes_per_s = 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_load_that_breaks_in_an_unforeseen_way_ends(
    connect: Callable[..., Any],
    tinylm: PreTrainedModel,
    prompt: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connector = connect()
    connector._prefill = ENGINE

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(StoredFrame, "decode", fail)
    assert answered(connector, prompt, deadline_ms=500)[0] == right(tinylm, prompt)


def test_the_prompts_of_a_batch_share_a_deadline(
    tinylm: Any,
    connect: Callable[..., Any],
    prompt: torch.Tensor,
    link: SlowLink,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connector = connect()
    connector.client.lookup(keys=connector.client.keys(prompt[0].tolist()))
    monkeypatch.setattr(connector, "store_chunks", lambda *_: 0)
    batch = torch.cat([prompt] * 6)
    started_s = time.monotonic()
    tinylm.generate(batch, generation_config=greedy(1))
    computing_s = time.monotonic() - started_s
    link.bytes_per_s = 200.0
    started_s = time.monotonic()
    connector.generate(batch, greedy(1), deadline_ms=1000)
    assert time.monotonic() - started_s - computing_s < 4, "six deadlines would be six seconds"
    link.bytes_per_s = 0


def test_a_few_tokens_that_take_what_a_step_takes_do_not_say_what_a_token_takes() -> None:
    meter = PrefillMeter()
    for number in range(16):
        tokens = 4096 if number % 8 == 0 else 40
        meter.observe(tokens, 0.02 + 50e-6 * tokens)
    found = meter.model()
    assert found is not None
    assert found.token_s == pytest.approx(55e-6, rel=0.01)
