"""Plans on the wire: what goes in comes out, and what is damaged is refused."""

from __future__ import annotations

import pytest

from kvstore.client.lookups import match_from_message
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import messages
from kvstore.proto.errors import InvalidRequestError, KVStoreError
from kvstore.proto.plans import EngineTerms, LoadPlan, PlanRange, PrefillModel

PLAN = LoadPlan((PlanRange(0, 2, False, 1.5), PlanRange(2, 5, True, 2.5)), 3.0, 9.0)


def reply_of(plan: LoadPlan | None) -> pb.LookupResponse:
    reply = pb.LookupResponse()
    if plan is not None:
        ranges = [messages.as_message(pb.PlanRange, one) for one in plan.ranges]
        reply = messages.as_message(pb.LookupResponse, plan, plan=ranges)
    return pb.LookupResponse.FromString(reply.SerializeToString())


def test_a_plan_comes_out_as_it_went_in() -> None:
    for plan in [PLAN, LoadPlan((), 1.0, 1.0), None]:
        asked = plan.ranges[-1].stop if plan and plan.ranges else 0
        assert match_from_message(reply_of(plan), asked).plan == plan


def test_a_plan_knows_what_it_loads() -> None:
    assert PLAN.loaded == [2, 3, 4]


def test_a_plan_with_gaps_is_damaged() -> None:
    for bounds in [
        [(0, 2), (3, 5)],
        [(0, 2), (2, 4)],
        [(1, 5)],
        [(0, 5), (5, 5)],
        [(0, 6), (6, 5)],
    ]:
        ranges = tuple(PlanRange(first, stop, True, 1.0) for first, stop in bounds)
        with pytest.raises(KVStoreError, match="5 chunks is damaged"):
            match_from_message(reply_of(LoadPlan(ranges, 1.0, 1.0)), 5)


def test_engines_travel_with_a_lookup() -> None:
    engine = EngineTerms(PrefillModel(0.1, 0.2, 0.3), 77)
    request = pb.LookupRequest(prefill=messages.engine_to_message(engine))
    assert messages.engine_from_message(request) == engine
    assert messages.engine_from_message(pb.LookupRequest()) is None
    assert messages.engine_to_message(None) is None


def test_engines_that_cannot_be_are_refused() -> None:
    for value in [-1.0, float("nan"), float("inf")]:
        for field in ("start_s", "token_s", "pair_s"):
            request = pb.LookupRequest(prefill=pb.Prefill())
            setattr(request.prefill, field, value)
            with pytest.raises(InvalidRequestError, match=field):
                messages.engine_from_message(request)
