"""How a tier is shared, and what another size of it would hit."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW
from kvstore.proto.types import KEY_BYTES, ChunkKey
from kvstore.server.eviction.lru import closes_circle
from kvstore.server.eviction.policy import Columns, EvictionPolicy, Rows

MAX_PARTITIONS = 15
"""And one for all others, number 0. Each costs the columns of its policy by row."""


@dataclass(frozen=True, slots=True)
class Quota:
    """What a partition may take of a tier, and what no other may take from it.

    ``limit_bytes`` and ``limit_chunks`` 0 mean that it has no limit.
    """

    limit_bytes: int = 0
    guaranteed_bytes: int = 0
    limit_chunks: int = 0

    def __post_init__(self) -> None:
        if self.limit_bytes < 0 or self.guaranteed_bytes < 0 or self.limit_chunks < 0:
            raise InvalidRequestError("quota", self, "give numbers, none below 0")
        if self.limit_bytes and self.guaranteed_bytes > self.limit_bytes:
            fix = f"at most the quota of {self.limit_bytes}"
            raise InvalidRequestError("guaranteed_bytes", self.guaranteed_bytes, fix)


NO_QUOTA = Quota()


class PartitionTable:
    """Numbers of the tenants and categories that have a quota on some tier.

    A chunk counts against its tenant's quota if that has one, else against its category's.
    """

    def __init__(self, tenants: Sequence[str] = (), categories: Sequence[str] = ()) -> None:
        owners = [("tenant", name) for name in tenants]
        owners += [("category", name) for name in categories]
        if len(owners) > MAX_PARTITIONS:
            raise InvalidRequestError("quotas", len(owners), f"at most {MAX_PARTITIONS}")
        self.names = ("", *(f"{kind} {name}" for kind, name in owners))
        self.tenants = tuple(tenants)
        self._numbers = {owner: number for number, owner in enumerate(owners, 1)}

    def number(self, tenant: str, category: str = "") -> int:
        """Return the partition of chunks of *tenant* and *category*; 0 is that of all others."""
        number = self._numbers.get(("tenant", tenant), 0)
        return number or self._numbers.get(("category", category), 0)

    def quotas(
        self, tenants: Mapping[str, Quota], categories: Mapping[str, Quota]
    ) -> tuple[Quota, ...]:
        """Return the quotas of one tier by partition number."""
        given = {"tenant": tenants, "category": categories}
        numbered = (given[kind].get(name, NO_QUOTA) for kind, name in self._numbers)
        return (NO_QUOTA, *numbered)


class PartitionedEviction(EvictionPolicy):
    """A policy for each partition; the one that is most over its share evicts first.

    Shares are max-min fair: a partition's is what it is guaranteed, or an equal part of the tier
    if that is more, up to its quota; partition 0 has what the others leave (vLLM's and LMCache's
    per-salt quotas do the same with one LRU each). *make* returns a policy, *partition_of* a
    row's partition when it is inserted. 17 bytes a row, and for each partition its policy.

    Chunks of one chain may be in several partitions, so the tree of all is kept here, and none is
    named before what continues it.
    """

    def __init__(
        self,
        make: Callable[[], EvictionPolicy],
        partition_of: Callable[[int], int],
        quotas: Sequence[Quota],
        capacity_bytes: int,
    ) -> None:
        self.parts = [make() for _ in quotas]
        self._partition_of = partition_of
        self.quotas = tuple(quotas)
        self._capacity_bytes = capacity_bytes
        self.used = [0] * len(quotas)
        """Bytes by partition."""
        self._columns = Columns()
        self._places: array[int] = self._columns.add("B")
        """One more than the partition of each row; 0 for those not here."""
        self._sizes: array[int] = self._columns.add("Q")
        self._parents: array[int] = self._columns.add("I")
        self._children: array[int] = self._columns.add("I")
        """Chunks here, of any partition, that continue the row's."""

    @override
    def insert(self, row: int, parent: int, size_bytes: int, now_s: float) -> None:
        self._columns.reach(max(row, parent))
        if self._places[row]:
            number = self._places[row] - 1
            self.used[number] += size_bytes - self._sizes[row]
            self._sizes[row] = size_bytes
            self.parts[number].insert(row, self._parents[row], size_bytes, now_s)
            return
        if closes_circle(row, parent, self._parents, self._children):
            parent = NO_ROW
        number = self._partition_of(row)
        number = number if number < len(self.parts) else 0
        self._places[row] = number + 1
        self._sizes[row] = size_bytes
        self.used[number] += size_bytes
        self._parents[row] = parent
        if parent:
            self._children[parent] += 1
        self.parts[number].insert(row, parent, size_bytes, now_s)

    @override
    def touch(self, rows: Rows, now_s: float) -> None:
        rows = rows[rows < len(self._places)]
        places = np.frombuffer(self._places, np.uint8)[rows]
        for place in np.unique(places).tolist():
            if place:
                self.parts[place - 1].touch(rows[places == place], now_s)

    @override
    def remove(self, row: int) -> None:
        if row >= len(self._places) or not self._places[row]:
            return
        number = self._places[row] - 1
        self._places[row] = 0
        self.used[number] -= self._sizes[row]
        parent, self._parents[row] = self._parents[row], NO_ROW
        if parent:
            self._children[parent] -= 1
        self.parts[number].remove(row)

    # --- shares

    def owed_bytes(self, number: int, need_bytes: int, need_chunks: int = 1) -> int:
        """Return what a partition has to free before it takes *need_bytes* in so many chunks."""
        quota = self.quotas[number]
        limit, most = quota.limit_bytes, quota.limit_chunks
        owed = max(0, self.used[number] + need_bytes - limit) if limit else 0
        # A chunk too many is a byte at least, and to free a byte is to free a chunk.
        over = len(self.parts[number]) + need_chunks * (need_bytes > 0) - most if most else 0
        return max(owed, over)

    def with_quota(self, number: int, quota: Quota) -> tuple[Quota, ...]:
        """Return ``quotas`` with another. Raises InvalidRequestError if more than all is sure."""
        quotas = (*self.quotas[:number], quota, *self.quotas[number + 1 :])
        sure = sum(one.guaranteed_bytes for one in quotas)
        if sure > self._capacity_bytes:
            fix = f"at most {self._capacity_bytes - sure + quota.guaranteed_bytes} are left"
            raise InvalidRequestError("guaranteed_bytes", quota.guaranteed_bytes, fix)
        return quotas

    def _shares(self) -> list[int]:
        fair = self._capacity_bytes // max(1, sum(used > 0 for used in self.used))
        shares = [0]
        for quota in self.quotas[1:]:
            most = min(fair, quota.limit_bytes) if quota.limit_bytes else fair
            shares.append(max(quota.guaranteed_bytes, most))
        shares[0] = max(0, self._capacity_bytes - sum(shares[1:]))
        return shares

    # --- victims

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        return self._named(dict.fromkeys(range(len(self.parts)), 0), keep, now_s)

    def victims_for(
        self, number: int, keep: Callable[[int], bool], now_s: float, *, is_own: bool = False
    ) -> Iterator[int]:
        """``victims`` for *number*: its own if *is_own*, else of no other below its guarantee."""
        floors = {n: quota.guaranteed_bytes for n, quota in enumerate(self.quotas)}
        return self._named({number: 0} if is_own else {**floors, number: 0}, keep, now_s)

    def _named(
        self, floors: Mapping[int, int], keep: Callable[[int], bool], now_s: float
    ) -> Iterator[int]:
        named: set[int] = set()
        named_children: Counter[int] = Counter()
        used, shares = list(self.used), self._shares()

        def stays(row: int) -> bool:
            is_continued = self._children[row] > named_children[row]
            return is_continued or (row not in named and keep(row))

        # What waited for a chunk of another partition gets its turn in the next round.
        is_news = True
        while is_news:
            is_news = False
            open_parts = {n: self.parts[n].victims(stays, now_s) for n in floors}
            while open_parts:
                number = max(open_parts, key=lambda n: (used[n] - shares[n], -n))
                row = next(open_parts[number], NO_ROW)
                if row in named:
                    continue
                if not row or used[number] - self._sizes[row] < floors[number]:
                    del open_parts[number]
                    continue
                named.add(row)
                parent = self._parents[row]
                named_children[parent] += 1
                used[number] -= self._sizes[row]
                is_news = is_news or self._places[parent] not in (0, number + 1)
                yield row

    @override
    def __len__(self) -> int:
        return sum(map(len, self.parts))


SCALES = (0.5, 1.0, 2.0, 4.0)
"""The sizes that are tried, as multiples of the tier's."""

MAX_SAMPLED_CHUNKS = 1_024
"""Sampled chunks that are remembered; the sample is halved before there are more."""

LEAST_SAMPLED = 256
"""Sampled chunks that have to be asked for before there is a curve."""

WINDOW_CHUNKS = 1 << 16
"""Sampled chunks asked for until what came before counts half."""

_KEY_WORDS = KEY_BYTES // 8
_SCALES = np.array(SCALES)
_ALL = 1 << 64
_NEVER = np.iinfo(np.int64).max

Ids = NDArray[np.uint64]


def identities(keys: Sequence[ChunkKey]) -> Ids:
    """Return 64 bits of each key, of its namespace and its chain digest: spread evenly by these."""
    words = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, _KEY_WORDS)
    return words[:, 0] ^ words[:, 2]


class MissRatioCurve:
    """The live curve of hit ratio against size of one tier, were its policy leaf-LRU.

    It sees every lookup, with the chunks that are missing too, as those are put next. Chunks
    whose identity is below a threshold are sampled (SHARDS: Waldspurger et al., FAST 2015,
    section 3), and of a request's it counts how many others were used since: under LRU that
    answers for all sizes at once (Mattson et al., 1970). The end of a prompt is used before
    what begins it, which is leaf-LRU, and chunks count as hit up to the first that is not.
    Not thread-safe: the owner locks.
    """

    def __init__(self, capacity_bytes: int, limit_nodes: int = MAX_SAMPLED_CHUNKS) -> None:
        """For a tier of *capacity_bytes*. Raises InvalidRequestError."""
        if capacity_bytes <= 0 or limit_nodes < 1:
            raise InvalidRequestError("capacity_bytes", capacity_bytes, "give the tier's size")
        self._capacity_bytes = capacity_bytes
        self._limit_nodes = limit_nodes
        self.rate = 1.0
        """The share of chunks that is in the sample: 1, or a half, a quarter and so on."""
        self._used: dict[int, int] = {}
        """The last use of each sampled chunk, the oldest first."""
        self._tick = 0
        self._expected = 0.0
        """Sampled chunks that there should have been."""
        self._sampled = 0.0
        self._seen = 0
        self._hits = np.zeros(len(SCALES))

    def requested(self, ids: Ids, chunk_bytes: int) -> None:
        """A lookup asked for a chain: (chunks,) of ``identities``, each of about *chunk_bytes*."""
        chunks = self._capacity_bytes / max(1, chunk_bytes)
        while SCALES[-1] * chunks * self.rate > self._limit_nodes:
            # Half of the sample, the part with the larger identities, is left out; what was counted
            # at a higher rate counts for as much as it would have at this one.
            self.rate /= 2
            limit = _ALL * self.rate
            self._used = {one: tick for one, tick in self._used.items() if one < limit}
            self._weigh(0.5)
        self._expected += len(ids) * self.rate
        if self.rate < 1:
            ids = ids[ids < np.uint64(int(_ALL * self.rate))]
        if not len(ids):
            return
        self._use(list(dict.fromkeys(ids.tolist())), chunks * self.rate)
        if self._sampled > 2 * WINDOW_CHUNKS:
            self._weigh(0.5)

    def _use(self, ids: list[int], nodes: float) -> None:
        """Count what a request of sampled chunks hits; *nodes* is the tier's size in the sample."""
        used = self._used
        order = np.fromiter(used.values(), np.int64, len(used))
        at = np.array([used.get(one, -1) for one in ids], np.int64)
        later = len(used) - np.searchsorted(order, at, side="right")
        later = np.maximum.accumulate(np.where(at < 0, _NEVER, later))
        self._hits += (later[:, None] < nodes * _SCALES).sum(axis=0)
        self._sampled += len(ids)
        self._seen += len(ids)
        # From the last to the first: what begins a prompt is used after what ends it.
        for one in reversed(ids):
            self._tick += 1
            used.pop(one, None)
            used[one] = self._tick
        for one in list(islice(used, max(0, len(used) - self._limit_nodes))):
            del used[one]

    def _weigh(self, share: float) -> None:
        self._expected *= share
        self._sampled *= share
        self._hits *= share

    def points(self) -> dict[float, float]:
        """Return the hit ratio of chunks by ``SCALES``; nothing until enough was asked for."""
        if self._seen < LEAST_SAMPLED or self._expected <= 0:
            return {}
        # SHARDS-adj (section 3.4): what is in the sample beyond the rate, or lacks, counts as hits.
        ratios = (self._hits + self._expected - self._sampled) / self._expected
        return dict(zip(SCALES, np.clip(ratios, 0.0, 1.0).tolist(), strict=True))


class PartitionUse(NamedTuple):
    """What a tenant or category takes of a tier."""

    name: str
    used_bytes: int
    quota: Quota


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """By which policy a tier evicts, and what another size of the tier would be worth.

    ``curve`` has the hit ratio, of chunks, by how many times the tier's size; it is empty until
    enough was asked for.
    """

    name: str
    fallbacks: int
    """Times that ranking took too long, and leaf-LRU chose instead."""
    curve: Mapping[float, float]
    partitions: Sequence[PartitionUse]

    @classmethod
    def of(
        cls, name: str, policy: EvictionPolicy, curve: MissRatioCurve | None, names: Sequence[str]
    ) -> PolicyReport:
        """Return the report of *policy*, called *name*, whose partitions are called *names*."""
        partitions: list[PartitionUse] = []
        if isinstance(policy, PartitionedEviction):
            partitions = [
                PartitionUse(label or "others", used, quota)
                for label, used, quota in zip(names, policy.used, policy.quotas, strict=True)
            ]
            policy = policy.parts[0]
        points = {} if curve is None else curve.points()
        return cls(name, int(getattr(policy, "fallbacks", 0)), points, partitions)

    def fill(self, status: pb.TierStatus) -> None:
        """Write the report into a tier's status."""
        status.policy = self.name
        for scale, ratio in self.curve.items():
            status.what_if.add(scale=scale, hit_ratio=ratio)
        for one in self.partitions:
            status.partitions.add(
                name=one.name,
                used_bytes=one.used_bytes,
                quota_bytes=one.quota.limit_bytes,
                guaranteed_bytes=one.quota.guaranteed_bytes,
            )
