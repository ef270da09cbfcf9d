"""Plans of a batch of prompts: announced in requests of the server's size, answered as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvstore.client.server_link import LeftMs, ServerLink, batches, packed
from kvstore.client.transports.base import Transport
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import KVStoreError
from kvstore.proto.messages import chains_of
from kvstore.proto.plans import PlannedBatch
from kvstore.proto.types import ChunkKey


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


def plan_batch(link: ServerLink, chains: Sequence[Sequence[ChunkKey]], ttl_ms: int) -> PlannedBatch:
    """Announce *chains* of chunks to the server; return its plan for them."""

    def work(transport: Transport, left_ms: LeftMs) -> PlannedBatch:
        terms, plans = transport.session.terms, list[PlannedBatch]()
        groups = chain_batches(chains, terms.max_batch_chunks)
        for group in groups:
            lengths = [len(chain) for _, chain in group]
            request = pb.PlanRequest(
                session_id=terms.session_id,
                chains=b"".join(packed(chain, terms.namespace) for _, chain in group),
                lengths=lengths,
                ttl_ms=ttl_ms,
            )
            reply = transport.calls.call("Plan", request, left_ms(), pb.PlanResponse)
            plans.append(batch_from_message(reply, lengths))
        return joined_plans(chains, groups, plans)

    return link.run(work)


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
