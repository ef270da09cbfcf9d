"""Prefixes that come over slow links: layer by layer, and of requests with a deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, cast
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from contracts.layers import damage
from helpers.local_server import DEADLINE_MS, LocalServer
from helpers.server_process import ServerProcess
from helpers.slow_link import SlowLink
from helpers.torch_engine import greedy, plain_tokens, prefill, random_ids
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvstore.client import Client, ClientOptions
from kvstore.client.deadline import StoredFrame
from kvstore.client.engines.transformers import TransformersConnector
from kvstore.client.planning import LinkEstimate, PrefillMeter, PrefillModel
from kvstore.client.transports.base import Arrivals, ReadPlan
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import Model

CHUNKS, TOKENS, SUFFIX = 6, 64, 64
LAYERS = 6
LAYER_BYTES = CHUNKS * TOKENS * 2 * 2 * 64 * 4
"""Of one layer of all chunks: tinylm's K and V in float32."""
LINK_BYTES_PER_S = 10e6
"""Slow enough that loading layer by layer pays."""
LAYER_S = 0.015
"""What the model takes longer for each layer: enough for the gain to be clear on any machine."""

Connect = Callable[..., TransformersConnector]
OnLayer = Callable[[int], None]

PROMPT = random_ids(CHUNKS * TOKENS + SUFFIX, seed=3)
PREFIX = PROMPT[:, : CHUNKS * TOKENS]


@pytest.fixture
def link(server: LocalServer) -> Iterator[SlowLink]:
    link = SlowLink(server.node.port)
    yield link
    link.close()


@contextmanager
def watched(model: PreTrainedModel, on_layer: OnLayer) -> Iterator[None]:
    """Have *model*, which takes its time, tell *on_layer* of each layer that it has computed."""
    inner: Any = model.base_model
    kind = type(inner.layers[0])
    own = kind.forward

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        found = own(self, *args, **named)
        time.sleep(LAYER_S)
        on_layer(self.self_attn.layer_idx)
        return found

    with patch.object(kind, "forward", forward):
        yield


@pytest.fixture
def learned(
    tinylm: PreTrainedModel, identity: Model, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Make connectors behind a link that know what it and the model take.

    They have seen both. But on a busy machine both may seem so slow that nothing is to be gained.
    """
    clients: list[Client] = []

    def connect(link: SlowLink) -> TransformersConnector:
        options = ClientOptions("grpc", TOKENS, DEADLINE_MS, retry_after_ms=1)
        clients.append(Client(link.address, identity, options))
        connector = TransformersConnector(clients[-1], tinylm)
        assert connector.save(PREFIX, prefill(tinylm, PREFIX)) == CHUNKS
        link.bytes_per_s = LINK_BYTES_PER_S
        seen = torch.cat([PREFIX, random_ids(SUFFIX, seed=99)], 1)
        with watched(tinylm, lambda _: None):
            connector.generate(seen, greedy(1))
        link.bytes_per_s = 0.0
        assert connector.learned.model() is not None
        model = PrefillModel(0.0, LAYERS * LAYER_S / SUFFIX)
        monkeypatch.setattr(connector.learned, "model", lambda doubt=1.0: model)
        estimate = LinkEstimate(LINK_BYTES_PER_S, LINK_BYTES_PER_S)
        monkeypatch.setattr(connector._link.meter, "estimate", lambda: estimate)
        return connector

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def connector(link: SlowLink, learned: Connect) -> TransformersConnector:
    return learned(link)


class Gate:
    """Lets a layer pass, and little of the next one, once the model has computed the one before.

    Only in the first forward after its birth. ``computed`` are the layers of all forwards,
    ``passed`` what the link had brought of the load when each of the first was computed.
    """

    def __init__(self, link: SlowLink) -> None:
        self.computed: list[int] = []
        self.passed: list[int] = []
        self._link, self._start = link, link.passed_bytes
        self._let_through(0)

    def _let_through(self, layer: int) -> None:
        beyond = LAYER_BYTES // 8  # headers and answers, and less than a chunk of the next layer
        self._link.stop_at_bytes = self._start + (layer + 1) * LAYER_BYTES + beyond

    def __call__(self, layer: int) -> None:
        self.computed.append(layer)
        if len(self.computed) < LAYERS:
            self.passed.append(self._link.passed_bytes - self._start)
        if len(self.computed) >= LAYERS - 1:
            self._link.stop_at_bytes = math.inf
        else:
            self._let_through(layer + 1)


def test_each_layer_is_computed_before_the_next_one_has_come(
    connector: TransformersConnector, tinylm: PreTrainedModel, link: SlowLink
) -> None:
    before, gate = connector.stats(), Gate(link)
    with watched(tinylm, gate):
        found = connector.generate(PROMPT, greedy(1))
    assert gate.computed == [*range(LAYERS)]
    assert all(passed < (at + 2) * LAYER_BYTES for at, passed in enumerate(gate.passed))
    assert found.hit_tokens == CHUNKS * TOKENS
    assert found.output.sequences[0].tolist() == plain_tokens(tinylm, PROMPT)[: PROMPT.shape[1] + 1]
    stats = connector.stats()
    assert stats.lookups == before.lookups + 1
    assert stats.hit_tokens == before.hit_tokens + CHUNKS * TOKENS
    assert (stats.lost_chunks, stats.load_errors) == (0, {})
    # The cache is the user's, to be looked at and stored as any other.
    cache: Any = found.output.past_key_values
    assert {type(layer) for layer in cache.layers} == {DynamicLayer}
    assert connector.save(PROMPT, cache, extra=[b"again"]) == CHUNKS + 1
    # What was computed behind those layers is stored and right.
    again = connector.generate(PROMPT, greedy())
    assert again.hit_tokens == PROMPT.shape[1] - 1
    assert again.output.sequences[0].tolist() == plain_tokens(tinylm, PROMPT)


def test_a_damaged_layer_gives_the_forward_up_and_what_is_right_before_it_is_a_hit(
    connector: TransformersConnector, server: LocalServer, tinylm: PreTrainedModel, link: SlowLink
) -> None:
    chunk = 3
    keys = connector.client.keys(PROMPT[0].tolist())
    damage(server, keys[chunk])  # its last layer
    before, gate = connector.stats(), Gate(link)
    with watched(tinylm, gate):
        found = connector.generate(PROMPT, greedy(1))
    assert gate.computed == [*range(LAYERS - 1), *range(LAYERS)]
    assert found.hit_tokens == chunk * TOKENS
    assert found.output.sequences[0].tolist() == plain_tokens(tinylm, PROMPT)[: PROMPT.shape[1] + 1]
    stats = connector.stats()
    assert stats.hit_tokens == before.hit_tokens + chunk * TOKENS
    assert stats.miss_tokens == before.miss_tokens + PROMPT.shape[1] - chunk * TOKENS
    assert (stats.lost_chunks, stats.load_errors) == (CHUNKS - chunk, {})
    assert stats.misses["lost"] == 1
    # The damaged chunk was forgotten and stored again.
    assert connector.load(PROMPT)[1] == PROMPT.shape[1] - 1


def test_a_server_killed_while_layers_are_on_their_way_is_a_miss_and_fails_nothing(
    server_process: Callable[..., ServerProcess], tinylm: PreTrainedModel, learned: Connect
) -> None:
    process = server_process("--cpu", "32MiB", "--tiers", "cpu")
    process.start()
    link = SlowLink(int(process.address.rpartition(":")[2]))
    connector = learned(link)
    before, gate = connector.stats(), Gate(link)

    def kill(layer: int) -> None:
        if len(gate.computed) == 1:  # so the one behind it will not come
            process.kill()
            link.close()
        gate(layer)

    with watched(tinylm, kill):
        found = connector.generate(PROMPT, greedy(1))
    assert gate.computed == [0, 1, *range(LAYERS)]
    assert found.hit_tokens == 0
    assert found.output.sequences[0].tolist() == plain_tokens(tinylm, PROMPT)[: PROMPT.shape[1] + 1]
    stats = connector.stats()
    assert stats.hit_tokens == before.hit_tokens
    assert stats.lost_chunks == CHUNKS
    assert sum(stats.load_errors.values()) == 1


@pytest.mark.parametrize(
    "why",
    ["one token is left", "lossy copies will do", "nothing was measured", "a part is compiled"],
)
def test_where_nothing_is_to_be_gained_the_prefix_comes_whole(
    connector: TransformersConnector, tinylm: PreTrainedModel, link: SlowLink, why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    prompt = PROMPT
    if why == "one token is left":
        prompt = prompt[:, : CHUNKS * TOKENS + 1]
    elif why == "nothing was measured":
        connector = TransformersConnector(connector.client, tinylm)
    elif why == "a part is compiled":  # as Module.compile() leaves it
        part: Any = tinylm.base_model
        monkeypatch.setattr(part, "_compiled_call_impl", part._call_impl)
    accuracy = "bounded" if why == "lossy copies will do" else "exact"
    whole_bytes = link.passed_bytes + LAYERS * LAYER_BYTES
    passed: list[int] = []
    with watched(tinylm, lambda _: passed.append(link.passed_bytes)):
        found = connector.generate(prompt, greedy(1), accuracy=accuracy)
    assert found.hit_tokens == CHUNKS * TOKENS
    assert passed[0] >= whole_bytes


def test_an_error_of_the_model_does_not_wait_for_layers_on_their_way(
    connector: TransformersConnector, server: LocalServer, tinylm: PreTrainedModel, link: SlowLink
) -> None:
    Gate(link)  # lets the first layer through alone
    fail, began_s = Mock(side_effect=MemoryError("of the engine")), time.monotonic()
    with watched(tinylm, fail), pytest.raises(MemoryError):
        connector.generate(PROMPT, greedy(1))
    fail.assert_called_once_with(0)
    assert time.monotonic() - began_s < DEADLINE_MS / 4000
    assert link.stop_at_bytes < math.inf, "the others were on their way"
    link.stop_at_bytes = math.inf
    assert server.settled().leases == 0


CHUNK_S = 0.15
"""What the slow engine takes for a chunk."""
ENGINE = PrefillModel(0.0, CHUNK_S / TOKENS)
TRIES = 4
"""Of what takes real time: a machine that was busy meanwhile shows nothing."""
LONG_MS = 20_000


@pytest.fixture
def connect(
    link: SlowLink, tinylm: PreTrainedModel, identity: Model
) -> Iterator[Callable[..., Any]]:
    clients: list[Client] = []

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

    own: Any = type(model.base_model).forward

    @wraps(own)
    def forward(self: Any, *args: Any, **named: Any) -> Any:
        ids = args[0] if args else named["input_ids"]
        computed.append(int(ids.shape[1]))
        time.sleep(CHUNK_S * ids.shape[1] / TOKENS)
        return own(self, *args, **named)

    with patch.object(type(model.base_model), "forward", forward):
        yield computed


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
    chunk_bytes = LAYERS * LAYER_BYTES / CHUNKS
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


def test_an_error_of_the_model_is_the_callers_and_no_deadline_is_refused_by_name(
    tinylm: PreTrainedModel, connect: Callable[..., Any], prompt: torch.Tensor, link: SlowLink
) -> None:
    connector = connect()
    connector._prefill = PrefillModel(0.0, 1e-6)
    link.bytes_per_s = 20e3

    broken = patch.object(type(tinylm.base_model), "forward", side_effect=ZeroDivisionError)
    with broken, pytest.raises(ZeroDivisionError):
        connector.generate(prompt, greedy(1), deadline_ms=100)
    soon: Any = "5"
    for deadline_ms in (-1, soon):
        with pytest.raises(InvalidRequestError, match=f"deadline_ms={deadline_ms!r}"):
            connector.generate(prompt, greedy(1), deadline_ms=deadline_ms)
    with pytest.raises(InvalidRequestError, match="deadline_ms"):
        connect(deadline_ms=1 << 40)


def damaging(monkeypatch: pytest.MonkeyPatch, connector: TransformersConnector, chunk: int) -> None:
    """Have a byte of the stored *chunk* arrive wrong."""
    kind: Any = type(connector.client._link.connected())
    read = kind.read

    @contextmanager
    def damaged(transport: Any, plan: ReadPlan) -> Iterator[Arrivals]:
        with read(transport, plan) as arriving:
            yield Arrivals(map(flipped, arriving.frames)) if plan.ranges else arriving

    def flipped(piece: Any) -> Any:
        if piece.index != chunk or not piece.offset or len(piece.data) < 100:
            return piece
        data = np.array(piece.data)
        data[-1] ^= 255
        return replace(piece, data=data)

    monkeypatch.setattr(kind, "read", damaged)


@pytest.mark.parametrize(("engine", "chunk"), [(None, 2), (ENGINE, 0)])
def test_behind_a_chunk_that_arrives_damaged_all_is_computed_and_stored_right(
    connect: Callable[..., Any], tinylm: PreTrainedModel, prompt: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch, engine: PrefillModel | None, chunk: int,
) -> None:  # fmt: skip
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
    connect: Callable[..., Any], prompt: torch.Tensor, link: SlowLink,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    connector = connect()
    connector._prefill = PrefillModel(0.0, 1e-5)
    connector.client.lookup(keys=connector.client.keys(prompt[0].tolist()))
    monkeypatch.setattr(connector, "store_chunks", lambda *_: 0)
    link.bytes_per_s = 30.0
    assert min(answered(connector, prompt, deadline_ms=100)[2] for _ in range(TRIES)) < 2
    link.bytes_per_s = 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_load_that_breaks_in_an_unforeseen_way_ends(
    connect: Callable[..., Any], tinylm: PreTrainedModel, prompt: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    connector = connect()
    connector._prefill = ENGINE

    monkeypatch.setattr(StoredFrame, "decode", Mock(side_effect=MemoryError))
    assert answered(connector, prompt, deadline_ms=500)[0] == right(tinylm, prompt)


def test_a_few_tokens_that_take_what_a_step_takes_do_not_say_what_a_token_takes() -> None:
    meter = PrefillMeter()
    for number in range(16):
        tokens = 4096 if number % 8 == 0 else 40
        meter.observe(tokens, 0.02 + 50e-6 * tokens)
    found = meter.model()
    assert found is not None
    assert found.token_s == pytest.approx(55e-6, rel=0.01)
