"""Quotas of a tier, and the miss-ratio curve over its size."""

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
"""Beside number 0 for all others. Each costs the columns of its policy by row."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of a partition on a tier, and its guaranteed minimum.

    ``limit_bytes`` and ``limit_chunks`` 0: no limit.
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
    """Partition numbers of the tenants and categories with a quota on some tier.

    A chunk counts against its tenant's quota if there is one, else against its category's.
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
        """Return the partition of chunks of *tenant* and *category*; 0 for all others."""
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
    """One policy per partition; the partition furthest over its share evicts first.

    Shares are max-min fair: a partition's share is its guarantee, or an equal part of the tier if
    that is more, up to its quota; partition 0 has the rest (vLLM's and LMCache's per-salt quotas do
    the same with one LRU each). *make* returns a policy, *partition_of* a row's partition when it
    is inserted. 17 bytes a row, and for each partition its policy.

    Chunks of one chain may be in several partitions, so the tree of all is kept here, and a victim
    is yielded after all that continue it.
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
        """The partition of each row plus one; 0 for absent ones."""
        self._sizes: array[int] = self._columns.add("Q")
        self._parents: array[int] = self._columns.add("I")
        self._children: array[int] = self._columns.add("I")
        """Chunks of any partition that continue the row's."""

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
        """Return what a partition must free before it adds *need_bytes* in *need_chunks*."""
        quota = self.quotas[number]
        limit, most = quota.limit_bytes, quota.limit_chunks
        owed = max(0, self.used[number] + need_bytes - limit) if limit else 0
        # A chunk too many is at least a byte, and freeing a byte frees a chunk.
        over = len(self.parts[number]) + need_chunks * (need_bytes > 0) - most if most else 0
        return max(owed, over)

    def with_quota(self, number: int, quota: Quota) -> tuple[Quota, ...]:
        """Return ``quotas`` with another. Raises InvalidRequestError over the tier's capacity."""
        quotas = (*self.quotas[:number], quota, *self.quotas[number + 1 :])
        guaranteed = sum(one.guaranteed_bytes for one in quotas)
        if guaranteed > self._capacity_bytes:
            fix = f"at most {self._capacity_bytes - guaranteed + quota.guaranteed_bytes} are left"
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
        """``victims`` for *number*: its own if *is_own*, else others' down to their guarantees."""
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

        # Chunks that waited for a child in another partition follow in the next round.
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
"""Sizes of the curve, as multiples of the tier's."""

MAX_SAMPLED_CHUNKS = 1_024
"""Limit of sampled chunks; the sample is halved to stay below it."""

LEAST_SAMPLED = 256
"""Sampled requests before there is a curve."""

WINDOW_CHUNKS = 1 << 16
"""Sampled requests after which earlier ones count half."""

_KEY_WORDS = KEY_BYTES // 8
_SCALES = np.array(SCALES)
_ALL = 1 << 64
_NEVER = np.iinfo(np.int64).max

Ids = NDArray[np.uint64]


def identities(keys: Sequence[ChunkKey]) -> Ids:
    """Return an evenly distributed 64-bit hash of each key, of its namespace and chain digest."""
    words = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, _KEY_WORDS)
    return words[:, 0] ^ words[:, 2]


class MissRatioCurve:
    """The live curve of hit ratio against size of one tier under leaf-LRU.

    It gets every lookup, including missing chunks, which are put next. Chunks whose identity is
    below a threshold are sampled (SHARDS: Waldspurger et al., FAST 2015, section 3), and for each
    requested one it counts the others used since: under LRU this gives the hits of all sizes at
    once (Mattson et al., 1970). The end of a prompt is used before its start, as in leaf-LRU, and
    chunks count as hits up to the first miss. Not thread-safe: the owner locks.
    """

    def __init__(self, capacity_bytes: int, limit_nodes: int = MAX_SAMPLED_CHUNKS) -> None:
        """Measure a tier of *capacity_bytes*. Raises InvalidRequestError."""
        if capacity_bytes <= 0 or limit_nodes < 1:
            raise InvalidRequestError("capacity_bytes", capacity_bytes, "give the tier's size")
        self._capacity_bytes = capacity_bytes
        self._limit_nodes = limit_nodes
        self.rate = 1.0
        """Sampling rate: 1, a half, a quarter and so on."""
        self._used: dict[int, int] = {}
        """The last use of each sampled chunk, the oldest first."""
        self._tick = 0
        self._expected = 0.0
        """Expected number of sampled requests."""
        self._sampled = 0.0
        self._seen = 0
        self._hits = np.zeros(len(SCALES))

    def requested(self, ids: Ids, chunk_bytes: int) -> None:
        """Record a lookup of a chain: (chunks,) of ``identities``, each of about *chunk_bytes*."""
        chunks = self._capacity_bytes / max(1, chunk_bytes)
        while SCALES[-1] * chunks * self.rate > self._limit_nodes:
            # Drop the half of the sample with the larger identities, and scale earlier counts to
            # the new rate.
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
        """Count the hits of a request for sampled chunks; the tier has *nodes* of the sample."""
        used = self._used
        order = np.fromiter(used.values(), np.int64, len(used))
        at = np.array([used.get(one, -1) for one in ids], np.int64)
        later = len(used) - np.searchsorted(order, at, side="right")
        later = np.maximum.accumulate(np.where(at < 0, _NEVER, later))
        self._hits += (later[:, None] < nodes * _SCALES).sum(axis=0)
        self._sampled += len(ids)
        self._seen += len(ids)
        # From last to first: the start of a prompt is used after its end.
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
        """Return the hit ratio of chunks by ``SCALES``; empty until LEAST_SAMPLED requests."""
        if self._seen < LEAST_SAMPLED or self._expected <= 0:
            return {}
        # SHARDS-adj (section 3.4): the deviation from the expected sample counts as hits.
        ratios = (self._hits + self._expected - self._sampled) / self._expected
        return dict(zip(SCALES, np.clip(ratios, 0.0, 1.0).tolist(), strict=True))


class PartitionUse(NamedTuple):
    """The use and quota of a tier by a tenant or category."""

    name: str
    used_bytes: int
    quota: Quota


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """The eviction policy of a tier and its miss-ratio curve.

    ``curve`` maps multiples of the tier's size to the hit ratio of chunks; it is empty until
    LEAST_SAMPLED requests.
    """

    name: str
    fallbacks: int
    """Times that ranking took too long, so that leaf-LRU chose."""
    curve: Mapping[float, float]
    partitions: Sequence[PartitionUse]

    @classmethod
    def of(
        cls, name: str, policy: EvictionPolicy, curve: MissRatioCurve | None, names: Sequence[str]
    ) -> PolicyReport:
        """Return the report of *policy*, with its *name* and the *names* of its partitions."""
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
