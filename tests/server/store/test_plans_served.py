"""Plans of a lookup, from what the server measured of its tiers."""

from __future__ import annotations

from contextlib import closing

import pytest
from simulation.clock import FakeClock
from simulation.core import TOKENS, Core, keys_of, prompt
from simulation.tiers import SimDisk, no_faults

from kvstore.proto.plans import EngineTerms, LoadPlan, PrefillModel
from kvstore.server.security.sessions import Session

DISK_BYTES = 2 << 20
ENGINE = PrefillModel(0.001, 1e-4)
"""A chunk of 60 tokens takes 6 ms."""


@pytest.fixture
def core() -> Core:
    return Core([SimDisk(DISK_BYTES, no_faults())], clock=FakeClock())


def plan_of(core: Core, session: Session, chunks: int, tokens: int = 0) -> LoadPlan:
    keys = keys_of(prompt(chunks))
    match = core.store.lookup(
        session, keys, core.later(), lease=False, engine=EngineTerms(ENGINE, tokens)
    )
    assert match.plan is not None
    return match.plan


def shape(plan: LoadPlan) -> list[tuple[int, int, bool]]:
    return [(one.first, one.stop, one.load) for one in plan.ranges]


def test_a_lookup_without_an_engine_has_no_plan(core: Core) -> None:
    match = core.store.lookup(core.open_session(), keys_of(prompt(2)), core.later(), lease=False)
    assert match.plan is None


def test_what_is_in_memory_is_loaded_and_what_is_nowhere_computed(core: Core) -> None:
    session = core.open_session()
    core.put(session, prompt(4))
    plan = plan_of(core, session, 6, 6 * TOKENS + 7)
    assert shape(plan) == [(0, 4, True), (4, 6, False)]
    assert plan.recompute_ms == pytest.approx(1000 * ENGINE.seconds(6 * TOKENS + 7, 0))
    left = ENGINE.seconds(2 * TOKENS + 7, 4 * TOKENS)
    assert plan.plan_ms == pytest.approx(1000 * left, rel=0.01)


def test_a_disk_that_has_become_slow_is_left_alone(core: Core) -> None:
    session = core.open_session()
    core.put(session, prompt(6))
    core.put(session, prompt(12, seed=9))
    assert shape(plan_of(core, session, 6, 400)) == [(0, 6, True)]
    for _ in range(100):
        core.slot("disk").note_load(1000, 1.0)
    slow = plan_of(core, session, 6, 400)
    assert shape(slow) == [(0, 6, False)]
    assert slow.plan_ms == slow.recompute_ms


def test_decoding_counts_as_it_was_measured(core: Core) -> None:
    session = core.open_session()
    core.put(session, prompt(6))
    core.put(session, prompt(12, seed=9))
    quick = plan_of(core, session, 6, 400)
    core.slot("disk").note_decode(1000, 0.002)
    slower = plan_of(core, session, 6, 400)
    assert quick.plan_ms < slower.plan_ms <= slower.recompute_ms


def test_a_frame_that_is_decoded_tells_its_speed() -> None:
    with closing(Core([SimDisk(DISK_BYTES, no_faults())], codec="zplane")) as core:
        session = core.open_session()
        core.put(session, prompt(4))
        core.put(session, prompt(12, seed=9))
        assert core.slot("disk").decode_s_per_byte == 0
        core.get(session, keys_of(prompt(4)))
        assert core.slot("disk").decode_s_per_byte > 0


def test_a_prompt_said_to_be_shorter_than_its_chunks_is_as_long_as_they_are(core: Core) -> None:
    session = core.open_session()
    core.put(session, prompt(4))
    plan = plan_of(core, session, 4, 1)
    assert plan.recompute_ms == pytest.approx(1000 * ENGINE.seconds(4 * TOKENS, 0))


def test_a_plan_of_no_chunks_computes_the_prompt(core: Core) -> None:
    plan = plan_of(core, core.open_session(), 0, 10)
    assert shape(plan) == []
    assert plan.plan_ms == plan.recompute_ms > 0
