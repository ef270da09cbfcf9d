"""A store that is slow, stopped, gone or wrong costs a bounded wait and no answer."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.blend_world import LAYERS, STORED, VOCABULARY, make_world, random_tokens
from helpers.local_server import LocalServer, eventually
from helpers.server_process import ServerProcess

from kvstore.client import Client, ClientOptions
from kvstore.client.blend import engine as engine_module
from kvstore.client.blend import gate as gate_module
from kvstore.client.blend.cost import (
    FIRST_WAIT_S,
    LOAD_FACTOR,
    MAX_WAIT_SHARE,
    SLACK_SHARE,
    BlendPlanner,
    Speed,
)
from kvstore.client.blend.engine import Blender, BlendResult, MemorySource
from kvstore.client.blend.gate import GuardedBlender, ShadowEval
from kvstore.client.blend.layer_pass import LayerKV
from kvstore.client.blend.plan import SegmentRange
from kvstore.client.blend.store import StoreSource, store_prefill
from kvstore.client.engines.transformers import TransformersConnector
from kvstore.client.engines.transformers.blend_adapter import BlendedCache
from kvstore.client.engines.transformers.cache import as_argument
from kvstore.client.options import TransportName
from kvstore.client.planning import LinkMeter
from kvstore.client.segments import SegmentMatch, SegmentQuery
from kvstore.proto.blend import ReuseReport, ShadowResult
from kvstore.proto.errors import InvalidRequestError, KVStoreError, ModelError
from kvstore.proto.types import ChunkKey, PutOutcome, RopeParameters
from kvstore.server.blending.gates import TRIALS

TRIAL = SegmentQuery(is_trial=True)
PATIENT_S = 0.3
SUFFIX = 9
DOCUMENT = random_tokens(1, 48)
BEFORE = ([*random_tokens(2, 20), *DOCUMENT, *random_tokens(3, SUFFIX)], [SegmentRange(20, 68)])
ASKED = ([*random_tokens(4, 36), *DOCUMENT, *random_tokens(5, SUFFIX)], [SegmentRange(36, 84)])


@pytest.mark.parametrize(
    ("stalls", "patience_s"),
    [((0,), PATIENT_S), ((3,), PATIENT_S), (range(LAYERS), PATIENT_S), ((1,), math.inf)],
    ids=["the first layer", "one in the middle", "each a little", "one, with endless patience"],
)
def test_a_source_that_stalls_is_waited_for_in_bounds_and_the_prompt_computed(
    monkeypatch: pytest.MonkeyPatch, stalls: Collection[int], patience_s: float
) -> None:
    class Stalling(MemorySource):
        def layer(self, i: int) -> Mapping[int, LayerKV]:
            if i in stalls:
                go_on.wait(20 if len(stalls) == 1 else 0.4 * PATIENT_S)
            return super().layer(i)

    world, go_on = make_world(), threading.Event()
    if patience_s == math.inf:
        monkeypatch.setattr(engine_module, "LAYER_WAIT_S", 0.2)
    plan = world.plan(0.2, selector="first_k")
    found = world.blender.blend(plan, Stalling(world.stored), patience_s=patience_s)
    go_on.set()
    assert found.report.failure.startswith("DeadlineError")
    assert not found.is_blended
    assert torch.equal(found.logits, world.blender.prefill(world.tokens).logits[-12:])


def test_a_blend_that_gave_up_asks_its_source_for_no_more_layers() -> None:
    asked, go_on = list[int](), threading.Event()

    class Failing(MemorySource):
        def layer(self, i: int) -> Mapping[int, LayerKV]:
            asked.append(i)
            if i == 1:
                go_on.wait(20)
                raise KVStoreError("gone")
            return super().layer(i)

    world = make_world()
    found = world.blender.blend(world.plan(0.2), Failing(world.stored), patience_s=PATIENT_S)
    assert not found.is_blended
    go_on.set()
    assert eventually(
        lambda: not any(t.name.startswith("kvstore-blend") for t in threading.enumerate())
    )
    assert asked == [0, 1]


def test_a_source_that_is_closed_under_the_read_of_a_layer_ends_its_loads(
    server: LocalServer, blender: Blender, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.connect("auto", STORED, ClientOptions(chunk_tokens=16))
    store_prefill(client, blender.prefill(BEFORE[0]), *BEFORE)
    ended = list[bool]()
    with client.find_segments(*ASKED, TRIAL) as resolved:
        source = StoreSource(resolved, ASKED[0], client.model)

        def layers(*_: object) -> Generator[Any, None, None]:
            try:
                source.close()
                yield from range(9)
            finally:
                ended.append(True)

        monkeypatch.setattr(source, "_begun", layers)
        with suppress(AttributeError):  # those were no layers
            source.layer(0)
        assert ended == [True]


@pytest.mark.parametrize("transport", ["shm", "grpc", "tcp"])
def test_a_server_that_stops_mid_plan_costs_no_more_than_the_patience(
    server_process: Callable[..., ServerProcess], blender: Blender, transport: TransportName
) -> None:
    process = server_process("--bulk", "127.0.0.1:0")
    process.start()
    options = ClientOptions(transport, chunk_tokens=16, deadline_ms=20_000)
    with Client(process.address, STORED, options) as client:
        store_prefill(client, blender.prefill(BEFORE[0]), *BEFORE)
        resolved = client.find_segments(*ASKED, TRIAL)
        assert len(list(resolved.chunks())) == 3
        process.send_signal(signal.SIGSTOP)
        try:
            started = time.monotonic()
            with StoreSource(resolved, ASKED[0], client.model) as source:
                found = blender.blend(source.plan, source, patience_s=PATIENT_S)
            took_s = time.monotonic() - started
        finally:
            process.send_signal(signal.SIGCONT)
        resolved.abandon()
    assert found.report.failure.startswith("DeadlineError")
    assert torch.equal(found.logits, blender.prefill(ASKED[0]).logits[-9:])
    assert took_s < 10, "half the client's deadline"


def test_patience_is_what_loads_took_with_slack_and_no_more_than_half_a_full_prefill(
    server: LocalServer, client: Client, blender: Blender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for requests that are compared: these are answered from a full prefill."""
    seen: list[float] = []
    loads: list[float] = []
    real = blender.blend

    def blend(*arguments: object, patience_s: float) -> BlendResult:
        seen.append(patience_s)
        done = real(*arguments, patience_s=patience_s)  # type: ignore[arg-type]
        loads.append(done.report.load_s)
        return done

    monkeypatch.setattr(blender, "blend", blend)
    good = ShadowResult(0.0, 1.0, 64)
    store_prefill(client, blender.prefill(BEFORE[0]), *BEFORE)
    for _ in range(TRIALS):
        client.report_reuse(ReuseReport(ratio=0.3, shadow=good))
    draws = iter([0.0, 1.0, 1.0])  # the first is compared
    monkeypatch.setattr(server.node.store.blends.gates, "_draw", lambda: next(draws))
    gated = GuardedBlender(client, blender)
    compared = gated.run(*ASKED)
    gated.run(*ASKED)
    assert GuardedBlender(client, blender, SegmentQuery()).run(*ASKED).shadow is None
    assert compared.shadow is not None
    full_s = compared.result.report.total_s
    first = min(MAX_WAIT_SHARE * full_s, LOAD_FACTOR * loads[0] + SLACK_SHARE * full_s)
    assert seen == [math.inf, pytest.approx(first), FIRST_WAIT_S]


def learned(*loads: float, full_s: float = 1.0) -> BlendPlanner:
    planner = BlendPlanner(LAYERS, Speed(0.0, 0.0, 1e-4, 1e-9), LinkMeter(1e9))
    planner.observe_full(100, full_s)
    for seconds in loads:
        planner.observe_load(1000, seconds)
    return planner


def test_the_quicker_the_store_was_the_less_it_is_waited_for() -> None:
    assert learned().wait_s(100, 1000) == pytest.approx(0.5)
    assert learned(0.02, 0.02).wait_s(100, 1000) == pytest.approx(0.14)
    assert learned(7.0).wait_s(100, 1000) == pytest.approx(0.5), "half a full prefill"
    unloaded = learned(0.02)
    unloaded.observe_load(0, 5.0)
    assert unloaded.wait_s(100, 1000) == pytest.approx(0.14), "a plan without loads"
    longer_s = learned(0.02).wait_s(200, 500)
    assert longer_s == pytest.approx(0.22, rel=1e-4), "a longer prompt, less to load"


def test_a_store_that_became_slow_is_given_time_until_it_is_found_to_be_so() -> None:
    planner, waited = learned(0.02), []
    for _ in range(4):
        waited.append(planner.wait_s(100, 1000))
        planner.observe_load(1000, waited[-1])
    assert waited == [pytest.approx(one) for one in (0.14, 0.38, 0.5, 0.5)]
    planner.observe_load(1000, 0.02)
    assert planner.wait_s(100, 1000) == pytest.approx(0.5), "one quick load does not undo that"
    for _ in range(11):
        planner.observe_load(1000, 0.02)
    assert planner.wait_s(100, 1000) < 0.2, "and quick again"


OTHER_ROPE: dict[str, Any] = {"rope": RopeParameters(5e5, 16)}
OTHER_ADAPTER: dict[str, Any] = {"adapter_digest": "blake3:of a LoRA"}


@pytest.fixture
def server(make_server: Callable[..., LocalServer]) -> LocalServer:
    return make_server("--bulk", "127.0.0.1:0")


@pytest.fixture
def client(client: Client, blender: Blender) -> Client:
    """Of a server that has the document behind another head."""
    puts = store_prefill(client, blender.prefill(BEFORE[0]), *BEFORE)
    assert {put.outcome for put in puts} == {PutOutcome.stored}
    return client


def assert_computed(
    blender: Blender, resolved: SegmentMatch, client: Client
) -> tuple[str, set[str]]:
    """Fail unless the answer is a full prefill's; return why it, or its segments, were computed."""
    with StoreSource(resolved, ASKED[0], client.model) as source:
        found = blender.blend(source.plan.with_ratio(0.2), source)
    assert not found.is_blended
    wanted = blender.prefill(ASKED[0]).logits[-SUFFIX:]
    assert float((found.logits - wanted).abs().max()) <= 1e-5
    return found.report.failure, set(found.report.refused.values())


# --- whose KV is given out


@pytest.mark.parametrize(
    ("change", "reason"),
    [(OTHER_ROPE, "another rotation"), (OTHER_ADAPTER, "another adapter")],
    ids=["rotation", "adapter"],
)
def test_an_engine_that_is_not_what_its_client_says_computes_instead(
    server: LocalServer, blender: Blender, change: dict[str, Any], reason: str
) -> None:
    """The client's Model is of another rotation or adapter than the engine's own."""
    client = server.connect("auto", replace(STORED, **change))
    store_prefill(client, blender.prefill(BEFORE[0]), *BEFORE)
    with client.find_segments(*ASKED, TRIAL) as resolved:
        assert assert_computed(blender, resolved, client) == ("", {reason})


def test_a_server_that_turns_keys_otherwise_is_refused_by_name(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = client.model
    monkeypatch.setattr(client._link, "model", replace(own, rope=RopeParameters(9e9, 16)))
    with pytest.raises(ModelError, match="rope="):
        client.find_segments(*ASKED, TRIAL)


# --- what comes is not what was named


def test_token_ids_that_do_not_match_the_digest_are_refused_by_name(client: Client) -> None:
    """A plan of one chunk holds its digest against the prompt's tokens."""
    document = SegmentRange(36, 52)
    with client.find_segments(ASKED[0], [document], TRIAL) as resolved:
        assert len(list(resolved.chunks())) == 1
        other = list(ASKED[0])
        other[40] = (other[40] + 1) % VOCABULARY
        with pytest.raises(InvalidRequestError, match=r"segment\.chunk_id"):
            StoreSource(resolved, other, client.model)


@pytest.mark.parametrize("transport", ["shm", "grpc", "tcp"])
def test_frames_with_other_tokens_a_shorter_chunk_or_another_place_are_not_used(
    server: LocalServer, client: Client, transport: TransportName
) -> None:
    reader = server.connect(transport, STORED)
    with reader.find_segments(*ASKED, TRIAL) as resolved:
        one, another = list(resolved.chunks())[:2]
        for wrong in (
            replace(one, wanted=replace(one.wanted, content=b"x" * 16)),
            replace(one, wanted=replace(one.wanted, stop=one.wanted.stop - 1)),
            replace(one, best=replace(one.best, position=one.best.position + 1)),
        ):
            assert list(resolved.layers([wrong])) == []
            assert {len(layer.tensors) for layer in resolved.layers([another, wrong])} == {1}


def test_variants_that_are_deleted_mid_plan_are_computed(client: Client, blender: Blender) -> None:
    resolved = client.find_segments(*ASKED, TRIAL)
    resolved.release()
    for entry in client.list():
        client.delete(keys=[ChunkKey(client.namespace + entry.digest)])
    assert "LeaseExpiredError" in assert_computed(blender, resolved, client)[0]


def test_variants_that_went_under_their_lease_are_computed(
    server: LocalServer, client: Client, blender: Blender
) -> None:
    """A tier lost them, whatever was promised."""
    server.settled()
    with client.find_segments(*ASKED, TRIAL) as resolved:
        store = server.node.store
        key = ChunkKey(client.namespace + list(resolved.chunks())[2].best.digest)
        for name in ("cpu", "disk"):
            slot = store.tiers.slots[name]
            store.moves.eviction.delete_from(slot, key)
            store.catalog.forget(name, key)
        assert "LayoutMismatchError" in assert_computed(blender, resolved, client)[0]


def test_an_engine_that_reports_nonsense_is_refused_and_answers_all_the_same(
    server: LocalServer, client: Client, blender: Blender, monkeypatch: pytest.MonkeyPatch
) -> None:
    nonsense = ShadowEval(-1.0, 7.0, 9, 9)
    monkeypatch.setattr(gate_module, "worse", lambda *_: nonsense)
    done = GuardedBlender(client, blender, TRIAL).run(*ASKED)
    assert "InvalidRequestError" in done.failure
    assert "shadow.divergence" in done.failure
    count = len(done.result.logits)
    wanted = blender.prefill(ASKED[0], logits_from=len(ASKED[0]) - count).logits
    assert torch.equal(done.result.logits, wanted)
    assert server.counter("blend_reports") == 0
    with client.find_segments(*ASKED, TRIAL) as resolved:
        assert all(one.best.reports == 0 for one in resolved.chunks())
        assert resolved.found.gate.shadows == 0


# --- blended KV is no original


def test_a_connector_stores_nothing_of_what_was_generated_from_a_blend(
    client: Client, blender: Blender
) -> None:
    model = blender.adapter._model  # type: ignore[attr-defined]
    with (
        client.find_segments(*ASKED, TRIAL) as resolved,
        StoreSource(resolved, ASKED[0], STORED) as source,
    ):
        result = blender.blend(source.plan, source)
    assert result.is_blended
    with pytest.raises(InvalidRequestError, match="blended"):
        store_prefill(client, result, ASKED[0], [])
    ids = torch.tensor([ASKED[0]])
    cache = BlendedCache.of(model, result)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), **as_argument(cache), max_new_tokens=4,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    before = {entry.digest for entry in client.list()}
    with pytest.raises(ModelError, match="BlendedCache"):
        TransformersConnector(client, model).save(output, cache)
    assert {entry.digest for entry in client.list()} == before
