"""A store that is slow, stopped or gone costs a bounded wait, by every transport."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from helpers.blend_world import LAYERS, STORED, make_world, random_tokens
from helpers.local_server import LocalServer
from helpers.server_process import ServerProcess

from kvstore.client import Client, ClientOptions
from kvstore.client.blend.cost import (
    FIRST_WAIT_S,
    LOAD_FACTOR,
    MAX_WAIT_SHARE,
    SLACK_SHARE,
    BlendPlanner,
    Speed,
)
from kvstore.client.blend.engine import Blender, BlendResult, MemorySource
from kvstore.client.blend.gate import GuardedBlender
from kvstore.client.blend.layer_pass import LayerKV
from kvstore.client.blend.plan import SegmentRange
from kvstore.client.blend.store import StoreSource, store_prefill
from kvstore.client.options import TransportName
from kvstore.client.planning import LinkMeter
from kvstore.client.segments import SegmentQuery
from kvstore.proto.blend import ReuseReport, ShadowResult
from kvstore.server.blending.gates import TRIALS

TRIAL = SegmentQuery(is_trial=True)
PATIENT_S = 0.3
DOCUMENT = random_tokens(1, 48)
BEFORE = ([*random_tokens(2, 20), *DOCUMENT, *random_tokens(3, 9)], [SegmentRange(20, 68)])
ASKED = ([*random_tokens(4, 36), *DOCUMENT, *random_tokens(5, 9)], [SegmentRange(36, 84)])


class Stalling(MemorySource):
    """Stops in the middle of a prompt, until it is told to go on."""

    def __init__(self, stored: Mapping[int, Sequence[LayerKV]], at: int) -> None:
        super().__init__(stored)
        self._at = at
        self.go_on = threading.Event()

    def layer(self, i: int) -> Mapping[int, LayerKV]:
        if i == self._at:
            self.go_on.wait(20)
        return super().layer(i)


@pytest.mark.parametrize("at", [0, 3])
def test_a_source_that_stalls_is_waited_for_in_bounds_and_the_prompt_computed(at: int) -> None:
    world = make_world()
    source = Stalling(world.stored, at)
    plan = world.plan(0.2, selector="first_k")
    found = world.blender.blend(plan, source, patience_s=PATIENT_S)
    source.go_on.set()
    assert found.report.failure.startswith("DeadlineError")
    assert not found.is_blended
    assert torch.equal(found.logits, world.blender.prefill(world.tokens).logits[-12:])


def test_all_waits_together_are_bounded() -> None:
    """Each layer is in time, as layers go, but they are too many."""

    class Slow(MemorySource):
        def layer(self, i: int) -> Mapping[int, LayerKV]:
            time.sleep(0.12)
            return super().layer(i)

    world = make_world()
    plan = world.plan(0.2, selector="first_k")
    found = world.blender.blend(plan, Slow(world.stored), patience_s=PATIENT_S)
    assert found.report.failure.startswith("DeadlineError")


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
    assert learned(0.02).wait_s(200, 500) == pytest.approx(0.22), "a longer prompt, less to load"


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
