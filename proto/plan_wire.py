"""How plans travel: between their dataclasses and protobuf messages."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError, KVStoreError
from kvstore.proto.plans import EngineTerms, LoadPlan, PlannedBatch, PlanRange, PrefillModel

T = TypeVar("T")


def engine_to_message(engine: EngineTerms | None) -> pb.Prefill | None:
    """Return the protobuf form of what an engine takes."""
    if engine is None:
        return None
    prefill = engine.prefill
    return pb.Prefill(
        start_s=prefill.start_s,
        token_s=prefill.token_s,
        pair_s=prefill.pair_s,
        tokens=engine.prompt_tokens,
    )


def engine_from_message(request: pb.LookupRequest | pb.ResolveRequest) -> EngineTerms | None:
    """Return what the engine takes, if the request says. Raises InvalidRequestError."""
    if not request.HasField("prefill"):
        return None
    told = request.prefill
    return EngineTerms(PrefillModel(told.start_s, told.token_s, told.pair_s), told.tokens)


def add_plan(reply: pb.LookupResponse, plan: LoadPlan | None) -> None:
    """Put a plan into the answer to a lookup."""
    if plan is None:
        return
    reply.plan_ms, reply.recompute_ms = plan.plan_ms, plan.recompute_ms
    for one in plan.ranges:
        reply.plan.add(first=one.first, stop=one.stop, load=one.load, ms=one.ms)


def plan_from_message(message: pb.LookupResponse, asked: int) -> LoadPlan | None:
    """Return the plan over the chunks *asked* for; None without one. Raises KVStoreError."""
    if not message.plan and not message.recompute_ms:
        return None
    ranges = tuple(PlanRange(one.first, one.stop, one.load, one.ms) for one in message.plan)
    bounds = [0, *(one.stop for one in ranges)]
    is_whole = bounds[-1] == asked and [one.first for one in ranges] == bounds[:-1]
    if not is_whole or any(first >= stop for first, stop in pairwise(bounds)):
        raise KVStoreError(f"the server's plan for {asked} chunks is damaged")
    return LoadPlan(ranges, message.plan_ms, message.recompute_ms)


def chains_of(digests: Sequence[T], lengths: Sequence[int]) -> list[Sequence[T]]:
    """Cut *digests* into chains of these *lengths*. Raises InvalidRequestError."""
    ends = [0, *accumulate(lengths)]
    if ends[-1] != len(digests):
        raise InvalidRequestError("lengths", ends[-1], f"as many as chains has, {len(digests)}")
    return [digests[first:stop] for first, stop in pairwise(ends)]


def pack_uses(uses: Sequence[int]) -> bytes:
    """Return counts as four bytes each, little-endian."""
    packed = array("I", uses)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def batch_from_message(message: pb.PlanResponse, lengths: Sequence[int]) -> PlannedBatch:
    """Return the answer to the announcement of chains of these *lengths*. Raises KVStoreError."""
    ends = [0, *accumulate(lengths)]
    if len(message.uses) != 4 * ends[-1] or sorted(message.order) != list(range(len(lengths))):
        raise KVStoreError(f"the server's plan for {len(lengths)} chains is damaged")
    uses = array("I", message.uses)
    if sys.byteorder == "big":
        uses.byteswap()
    return PlannedBatch(
        tuple(message.order),
        tuple(tuple(uses[first:stop]) for first, stop in pairwise(ends)),
        message.kept,
        message.peak_chunks,
    )
