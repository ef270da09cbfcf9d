"""Batches: lists that are longer than what a server takes in one request, and its answers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from typing import TypeVar

import numpy as np
from typing_extensions import override

from kvstore.client.blend.segments import NamedSegment
from kvstore.client.decode import Room
from kvstore.client.prefill import chunks_worth_loading
from kvstore.client.rectangle_room import RectangleRoom
from kvstore.client.transport import ABANDON_S, LayerSink, Put
from kvstore.codecs.base import AnyPart
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.blend import Resolution
from kvstore.proto.errors import KVStoreError
from kvstore.proto.messages import as_value, chains_of
from kvstore.proto.plans import LoadPlan, PlannedBatch, PlanRange, PrefillModel
from kvstore.proto.types import DIGEST_BYTES, ChunkKey, Match

MAX_OPEN_BATCHES = 8
"""Batches of one layered get or put, each a stream: all of them are open at the same time."""

T = TypeVar("T")


def batches(items: Sequence[T], limit: int) -> Iterator[tuple[int, Sequence[T]]]:
    """Yield *items* in runs of *limit* at most, each with the place of its first; one if empty."""
    for first in range(0, max(1, len(items)), limit):
        yield first, items[first : first + limit]


def digest_batches(packed: bytes, limit: int) -> list[bytes]:
    """Cut packed digests into those of *limit* chunks at most."""
    return [bytes(part) for _, part in batches(packed, limit * DIGEST_BYTES)]


def behind(room: Room, first: int) -> Room:
    """Return *room* for a batch whose first chunk is number *first*."""
    if not first:
        return room
    if isinstance(room, RectangleRoom):
        return room.behind(first)
    return lambda index, layout: room(first + index, layout)


def match_from_message(message: pb.LookupResponse, asked: int) -> Match:
    """Return the answer to a lookup of *asked* chunks. Raises KVStoreError if it is none."""
    names, sources = tuple(message.tier_names), message.tiers
    ready = message.ready
    fits = len(sources) == ready and len(message.load_us) == 4 * ready <= 4 * asked
    if not fits or max(sources, default=-1) >= len(names):
        raise KVStoreError(f"the server's answer to a lookup of {asked} chunks is damaged")
    return Match(
        ready=ready,
        pending=message.pending,
        missing=asked - ready - message.pending,
        tier_names=names,
        sources=sources,
        loads=message.load_us,
        lease_id=message.lease_id,
        lease_ttl_ms=message.lease_ttl_ms,
        plan=_plan_from_message(message, asked),
        shared=min(message.shared, asked),
    )


def _plan_from_message(message: pb.LookupResponse, asked: int) -> LoadPlan | None:
    """Return the plan over *asked* chunks; None without one. Raises KVStoreError."""
    if not message.plan and not message.recompute_ms:
        return None
    ranges = tuple(as_value(PlanRange, one) for one in message.plan)
    bounds = [0, *(one.stop for one in ranges)]
    is_whole = bounds[-1] == asked and [one.first for one in ranges] == bounds[:-1]
    if not is_whole or any(first >= stop for first, stop in pairwise(bounds)):
        raise KVStoreError(f"the server's plan for {asked} chunks is damaged")
    return LoadPlan(ranges, message.plan_ms, message.recompute_ms)


def joined(matches: Sequence[Match], asked: int) -> Match:
    """Return the answer about *asked* chunks, of which all but the last of *matches* are ready.

    There is no plan where not all of them were asked for at once.
    """
    first, last = matches[0], matches[-1]
    if first.ready + first.pending + first.missing == asked:
        return first
    ready = sum(match.ready for match in matches)
    return replace(
        first,
        ready=ready,
        pending=last.pending,
        missing=asked - ready - last.pending,
        sources=b"".join(match.sources for match in matches),
        loads=b"".join(match.loads for match in matches),
        more_leases=tuple(match.lease_id for match in matches[1:] if match.lease_id),
        plan=None,
        shared=sum(match.shared for match in matches),
    )


def prefix_plan(
    match: Match, chunk_tokens: int, chunks: int, tokens: int, prefill: PrefillModel
) -> LoadPlan:
    """Plan a prompt of several batches: load from its start, compute the rest.

    A server plans no more than one batch. Never slower than to compute all.
    """
    spans = [(at * chunk_tokens, min((at + 1) * chunk_tokens, tokens)) for at in range(match.ready)]
    count = chunks_worth_loading(match.load_us, spans, tokens, prefill)
    load_ms = sum(match.load_us[:count]) / 1000
    start = spans[count - 1][1] if count else 0
    rest_ms = 1000 * prefill.seconds(tokens - start, start)
    ranges = (PlanRange(0, count, True, load_ms), PlanRange(count, chunks, False, rest_ms))
    return LoadPlan(
        tuple(one for one in ranges if one.first < one.stop),
        load_ms + rest_ms,
        1000 * prefill.seconds(tokens, 0),
    )


def chain_batches(
    chains: Sequence[Sequence[ChunkKey]], limit: int
) -> list[list[tuple[int, Sequence[ChunkKey]]]]:
    """Return groups of *limit* chunks at most, of chains with their numbers; long ones are cut.

    Where there is more than one group, chains that share a prefix lie together.
    """
    order: Sequence[int] = range(len(chains))
    if max(len(chains), sum(map(len, chains))) > limit:
        order = sorted(order, key=lambda number: list(chains[number]))
    groups: list[list[tuple[int, Sequence[ChunkKey]]]] = [[]]
    room = limit
    for number in order:
        for _, piece in batches(chains[number], limit):
            if len(piece) > room or len(groups[-1]) == limit:
                groups.append([])
                room = limit
            groups[-1].append((number, piece))
            room -= len(piece)
    return groups


def batch_from_message(message: pb.PlanResponse, lengths: Sequence[int]) -> PlannedBatch:
    """Return the answer to the announcement of chains of these *lengths*. Raises KVStoreError."""
    if len(message.uses) != 4 * sum(lengths) or sorted(message.order) != list(range(len(lengths))):
        raise KVStoreError(f"the server's plan for {len(lengths)} chains is damaged")
    uses = chains_of(np.frombuffer(message.uses, "<u4").tolist(), lengths)
    order, uses_of = tuple(message.order), tuple(map(tuple, uses))
    return PlannedBatch(order, uses_of, message.kept, message.peak_chunks)


def joined_plans(
    chains: Sequence[Sequence[ChunkKey]],
    groups: Sequence[Sequence[tuple[int, Sequence[ChunkKey]]]],
    plans: Sequence[PlannedBatch],
) -> PlannedBatch:
    """Return the plan of all *chains*, which were planned in *groups*."""
    if len(plans) == 1:
        return plans[0]
    pairs = zip(groups, plans, strict=True)
    order = dict.fromkeys(group[place][0] for group, plan in pairs for place in plan.order)
    uses = Counter(key for chain in chains for key in set(chain))
    return PlannedBatch(
        tuple(order),
        tuple(tuple(uses[key] for key in chain) for chain in chains),
        sum(plan.kept for plan in plans),
        max(*(plan.peak_chunks for plan in plans), *(len(set(chain)) for chain in chains)),
    )


def segment_batches(segments: Sequence[NamedSegment], limit: int) -> list[list[NamedSegment]]:
    """Return groups of *limit* chunks at most, in order; segments that are longer are cut."""
    groups: list[list[NamedSegment]] = [[]]
    room = limit
    for one in segments:
        start = one.start
        for first, some in batches(one.chunks, limit):
            is_last = first + len(some) == len(one.chunks)
            stop = one.stop if is_last else some[-1].stop
            if len(some) > room:
                groups.append([])
                room = limit
            groups[-1].append(replace(one, start=start, stop=stop, chunks=tuple(some)))
            room -= len(some)
            start = stop
    return groups


def joined_resolutions(found: Sequence[Resolution]) -> Resolution:
    """Return the answer about a prompt that was asked for in several requests."""
    segments = tuple(segment for one in found for segment in one.segments)
    chunks = [chunk for segment in segments for chunk in segment.chunks]
    prefix = found[0].exact_prefix
    if prefix == sum(len(segment.chunks) for segment in found[0].segments):
        prefix += len(list(takewhile(lambda chunk: chunk.is_exact, chunks[prefix:])))
    lease_id, *more = [one.lease_id for one in found if one.lease_id] or [0]
    return replace(
        found[-1],
        segments=segments,
        exact_prefix=prefix,
        is_shadow=any(one.is_shadow for one in found),
        lease_id=lease_id,
        lease_ttl_ms=min((one.lease_ttl_ms for one in found if one.lease_id), default=0),
        more_leases=tuple(more),
    )


class JoinedSink(LayerSink):
    """The sinks of several batches of *limit* chunks as one."""

    def __init__(self, limit: int) -> None:
        self._sinks: list[LayerSink] = []
        self._limit = limit

    def add(self, sink: LayerSink) -> None:
        """Take the sink of the next batch."""
        self._sinks.append(sink)

    @override
    def write(self, segment: int, layers: Sequence[Sequence[AnyPart]]) -> None:
        for sink, (_, some) in zip(self._sinks, batches(layers, self._limit), strict=True):
            sink.write(segment, some)

    @override
    def commit(self) -> list[Put]:
        return [put for sink in self._sinks for put in sink.commit()]

    @override
    def abandon(self, within_s: float = ABANDON_S) -> None:
        until = time.monotonic() + within_s
        for sink in self._sinks:
            sink.abandon(0)  # all are cancelled before any is waited for
        for sink in self._sinks:
            sink.abandon(max(0.0, until - time.monotonic()))
