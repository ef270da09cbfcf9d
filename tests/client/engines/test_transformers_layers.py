"""Prefixes whose layers come over a slow link while the model computes those before them."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Timer
from typing import Any

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
from kvstore.client.engines.transformers import TransformersConnector
from kvstore.client.planning import LinkEstimate, LinkMeter, PrefillModel
from kvstore.proto.frame import raw_frame_bytes
from kvstore.proto.types import KVLayout, Model

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

    def told(number: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            time.sleep(LAYER_S)
            on_layer(number)

        return hook

    layers: Any = model.base_model
    hooks = [one.register_forward_hook(told(n)) for n, one in enumerate(layers.layers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


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


@pytest.fixture
def layered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has the chunks of each load that is layer by layer."""
    found: list[int] = []
    own = Client.get_chunk_layers

    def counted(self: Client, keys: Any, *args: Any, **more: Any) -> Any:
        found.append(len(keys))
        return own(self, keys, *args, **more)

    monkeypatch.setattr(Client, "get_chunk_layers", counted)
    return found


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
    connector: TransformersConnector,
    tinylm: PreTrainedModel,
    link: SlowLink,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_what_the_deadline_may_end_is_loaded_whole_and_keeps_what_came(
    connector: TransformersConnector, tinylm: PreTrainedModel, link: SlowLink, layered: list[int]
) -> None:
    load_ms = 1000 * LAYERS * LAYER_BYTES / LINK_BYTES_PER_S
    client = connector.client
    client.options = replace(client.options, deadline_ms=int(1.7 * load_ms))
    link.stop_at_bytes = link.passed_bytes + LAYERS * LAYER_BYTES * 5 // 8

    def go_on(_: int) -> None:
        link.stop_at_bytes = math.inf

    with watched(tinylm, go_on):
        found = connector.generate(PROMPT, greedy(1))
    assert layered == []
    assert 0 < found.hit_tokens < CHUNKS * TOKENS


def test_after_a_load_that_was_lost_the_next_one_is_whole(
    connector: TransformersConnector,
    server: LocalServer,
    tinylm: PreTrainedModel,
    link: SlowLink,
    layered: list[int],
) -> None:
    damage(server, connector.client.keys(PROMPT[0].tolist())[3])
    prefix = PREFIX
    loads = []
    for seed in range(3):
        link.bytes_per_s = LINK_BYTES_PER_S
        with watched(tinylm, lambda _: None):
            connector.generate(torch.cat([prefix, random_ids(SUFFIX, seed=seed)], 1), greedy(1))
        loads.append(len(layered))
    assert loads == [1, 1, 2]


def test_loads_layer_by_layer_tell_what_the_link_gives(
    connector: TransformersConnector,
    tinylm: PreTrainedModel,
    link: SlowLink,
    layered: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(LinkMeter, "observe", lambda _, size, seconds: seen.append(size))
    gate = Gate(link)
    # A layer comes some time after the one before was computed, so the model waits for it.
    with watched(tinylm, lambda layer: Timer(0.05, gate, (layer,)).start()):
        connector.generate(PROMPT, greedy(1))
    whole_bytes = CHUNKS * raw_frame_bytes(KVLayout.of(connector.client.model, TOKENS))
    assert layered == [CHUNKS]
    assert set(seen) <= {whole_bytes * layers // LAYERS for layers in range(1, LAYERS + 1)}
    assert whole_bytes in seen


def test_one_load_of_a_connector_is_layer_by_layer_at_a_time(
    connector: TransformersConnector, tinylm: PreTrainedModel, link: SlowLink, layered: list[int]
) -> None:
    link.bytes_per_s = LINK_BYTES_PER_S
    inner: list[int] = []

    def ask_again(_: int) -> None:
        if not inner:
            inner.append(0)
            inner.append(connector.generate(PROMPT, greedy(1)).hit_tokens)

    with watched(tinylm, ask_again):
        assert connector.generate(PROMPT, greedy(1)).hit_tokens == CHUNKS * TOKENS
    assert (inner, len(layered)) == ([0, CHUNKS * TOKENS], 1)
    with watched(tinylm, lambda _: None):
        connector.generate(torch.cat([PREFIX, random_ids(70)], 1), greedy(1))
    assert len(layered) == 2


def test_a_prefix_that_has_come_is_not_held_beside_the_cache(
    connector: TransformersConnector, tinylm: PreTrainedModel, link: SlowLink, layered: list[int]
) -> None:
    held: list[int] = []
    part_bytes = LAYER_BYTES // 2

    def count(layer: int) -> None:
        if layer == 0:
            gc.collect()
            tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor]
            held.append(sum(one.untyped_storage().nbytes() == part_bytes for one in tensors))

    with watched(tinylm, Gate(link)), watched(tinylm, count):
        connector.generate(PROMPT, greedy(3))
    assert layered == [CHUNKS]
    assert held[0] >= 2 * LAYERS
    assert held[1:] == [0, 0]


def test_an_error_of_the_model_does_not_wait_for_layers_on_their_way(
    connector: TransformersConnector,
    server: LocalServer,
    tinylm: PreTrainedModel,
    link: SlowLink,
    layered: list[int],
) -> None:
    Gate(link)  # lets the first layer through alone

    def fail(_: int) -> None:
        raise MemoryError("of the engine")

    began_s = time.monotonic()
    with watched(tinylm, fail), pytest.raises(MemoryError):
        connector.generate(PROMPT, greedy(1))
    assert time.monotonic() - began_s < DEADLINE_MS / 4000
    assert layered == [CHUNKS]
    link.stop_at_bytes = math.inf
    assert server.settled().leases == 0


def test_an_error_of_the_model_itself_is_raised_and_leaves_nothing_leased(
    connector: TransformersConnector, server: LocalServer, tinylm: PreTrainedModel
) -> None:
    def fail(number: int) -> None:
        if number == 2:
            raise MemoryError("of the engine")

    with watched(tinylm, fail), pytest.raises(MemoryError):
        connector.generate(PROMPT, greedy(1))
    assert server.settled().leases == 0
