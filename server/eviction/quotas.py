"""Partitions: tenants and categories that may fill only so much of a tier, and are sure of some."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW, spare_rows
from kvstore.server.eviction.miss_ratio_curve import WhatIf
from kvstore.server.eviction.policy import EvictionPolicy, Rows

MAX_PARTITIONS = 15
"""And one for everybody else, number 0. Each costs the columns of its policy by row."""


@dataclass(frozen=True, slots=True)
class Quota:
    """What a partition may take of a tier, and what nobody else may take from it.

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
        if len(tenants) + len(categories) > MAX_PARTITIONS:
            raise InvalidRequestError(
                "quotas", len(tenants) + len(categories), f"at most {MAX_PARTITIONS}"
            )
        self.names = ("", *(f"tenant {t}" for t in tenants), *(f"category {c}" for c in categories))
        self._tenants = {name: number for number, name in enumerate(tenants, 1)}
        self.tenants = tuple(tenants)
        first = len(tenants) + 1
        self._categories = {name: number for number, name in enumerate(categories, first)}

    def number(self, tenant: str, category: str = "") -> int:
        """Return the partition of chunks of *tenant* and *category*; 0 is everybody else's."""
        return self._tenants.get(tenant, 0) or self._categories.get(category, 0)

    def quotas(
        self, tenants: Mapping[str, Quota], categories: Mapping[str, Quota]
    ) -> tuple[Quota, ...]:
        """Return the quotas of one tier by partition number."""
        by_number = {self._tenants[name]: quota for name, quota in tenants.items()}
        by_number |= {self._categories[name]: quota for name, quota in categories.items()}
        return tuple(by_number.get(number, NO_QUOTA) for number in range(len(self.names)))


class PartitionedEviction(EvictionPolicy):
    """A policy for each partition; whoever is most over its share gives up a chunk first.

    Shares are max-min fair: a partition's is what it is guaranteed, or an equal part of the tier
    if that is more, up to its quota; partition 0 has what the others leave. Quotas are for
    isolation and fairness, and cost hit rate (vLLM's and LMCache's per-salt quotas do the same
    with one LRU each). *make* returns a policy, *partition_of* a row's partition when it is
    inserted, *quotas* are by partition. 29 bytes a row, and
    for each partition what its policy takes.

    Chunks of one chain may be in several partitions: such links are kept here, so that none is
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
        self._used = [0] * len(quotas)
        self._places = array("B", [0])
        """One more than the partition of each row; 0 for those not here."""
        self._sizes = array("Q", [0])
        self._parents = array("I", [NO_ROW])
        self._children = array("I", [0])
        # The continuations of a chunk that its own partition may not know of: a list for each,
        # from the first to the next.
        self._first = array("I", [NO_ROW])
        self._next = array("I", [NO_ROW])
        self._previous = array("I", [NO_ROW])
        self._link_count = 0

    def _reach(self, row: int) -> None:
        if row < len(self._places):
            return
        count = row + 1 - len(self._places) + spare_rows(row)
        links = (self._first, self._next, self._previous)
        for column in (self._sizes, self._parents, self._children, *links):
            column.frombytes(bytes(count * column.itemsize))
        self._places.frombytes(bytes(count))

    @override
    def insert(self, row: int, parent: int, size_bytes: int, now_s: float) -> None:
        self._reach(max(row, parent))
        if self._places[row]:
            number = self._places[row] - 1
            self._used[number] += size_bytes - self._sizes[row]
            self._sizes[row] = size_bytes
            self.parts[number].insert(row, self._parents[row], size_bytes, now_s)
            return
        if self._closes_circle(row, parent):
            parent = NO_ROW
        number = self._partition_of(row)
        number = number if number < len(self.parts) else 0
        self._places[row] = number + 1
        self._sizes[row] = size_bytes
        self._used[number] += size_bytes
        self._parents[row] = parent
        if parent:
            self._children[parent] += 1
            if self._places[parent] != number + 1:
                self._link(parent, row)
        self.parts[number].insert(row, parent, size_bytes, now_s)

    def _link(self, parent: int, row: int) -> None:
        after = self._first[parent]
        self._first[parent] = row
        self._next[row], self._previous[row] = after, NO_ROW
        if after:
            self._previous[after] = row
        self._link_count += 1

    def _unlink(self, parent: int, row: int) -> None:
        before, after = self._previous[row], self._next[row]
        if before:
            self._next[before] = after
        elif self._first[parent] == row:
            self._first[parent] = after
        else:
            return  # it was of its parent's partition
        if after:
            self._previous[after] = before
        self._previous[row] = self._next[row] = NO_ROW
        self._link_count -= 1

    def _waits(self, row: int, named: set[int]) -> bool:
        """Whether a chunk of another partition continues it that was not named."""
        child = self._first[row]
        while child:
            if child not in named:
                return True
            child = self._next[child]
        return False

    def _closes_circle(self, row: int, parent: int) -> bool:
        if parent != row and not self._children[row]:
            return False
        above = parent
        while above and above != row:
            above = self._parents[above]
        return above == row and row != NO_ROW

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
        self._used[number] -= self._sizes[row]
        parent, self._parents[row] = self._parents[row], NO_ROW
        if parent:
            self._children[parent] -= 1
            self._unlink(parent, row)
        self.parts[number].remove(row)

    # --- shares

    def used_bytes(self, number: int) -> int:
        """Return the bytes of a partition's chunks."""
        return self._used[number]

    def owed_bytes(self, number: int, need_bytes: int, need_chunks: int = 1) -> int:
        """Return what a partition has to free of its own before it may take *need_bytes* more,
        in so many chunks.
        """
        quota = self.quotas[number]
        limit, most = quota.limit_bytes, quota.limit_chunks
        owed = max(0, self._used[number] + need_bytes - limit) if limit else 0
        # A chunk too many is a byte at least, and whoever frees a byte frees a chunk.
        over = len(self.parts[number]) + need_chunks * (need_bytes > 0) - most if most else 0
        return max(owed, over)

    def set_quota(self, number: int, quota: Quota) -> None:
        """Hold a partition to *quota* from now on.

        Raises InvalidRequestError when all of them would be sure of more than the tier has.
        """
        quotas = (*self.quotas[:number], quota, *self.quotas[number + 1 :])
        sure = sum(one.guaranteed_bytes for one in quotas)
        if sure > self._capacity_bytes:
            fix = f"at most {self._capacity_bytes - sure + quota.guaranteed_bytes} are left"
            raise InvalidRequestError("guaranteed_bytes", quota.guaranteed_bytes, fix)
        self.quotas = quotas

    def chunks(self, number: int) -> int:
        """Return how many chunks a partition has."""
        return len(self.parts[number])

    def _shares(self) -> list[int]:
        fair = self._capacity_bytes // max(1, sum(used > 0 for used in self._used))
        shares = [0]
        for quota in self.quotas[1:]:
            most = min(fair, quota.limit_bytes) if quota.limit_bytes else fair
            shares.append(max(quota.guaranteed_bytes, most))
        shares[0] = max(0, self._capacity_bytes - sum(shares[1:]))
        return shares

    # --- victims

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        floors = [0] * len(self.parts)
        return self._named(range(len(self.parts)), floors, keep, now_s)

    def victims_for(self, number: int, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        """``victims`` to make room for partition *number*: nobody else below its guarantee."""
        floors = [quota.guaranteed_bytes for quota in self.quotas]
        floors[number] = 0
        return self._named(range(len(self.parts)), floors, keep, now_s)

    def victims_of(self, number: int, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        """``victims`` out of partition *number* alone."""
        return self._named([number], [0] * len(self.parts), keep, now_s)

    def _named(
        self,
        numbers: Sequence[int],
        floors: Sequence[int],
        keep: Callable[[int], bool],
        now_s: float,
    ) -> Iterator[int]:
        named: set[int] = set()
        used, shares = list(self._used), self._shares()

        def stays(row: int) -> bool:
            return self._waits(row, named) or (row not in named and keep(row))

        # What waited for a chunk of another partition gets its turn in the next round.
        is_news = True
        while is_news:
            is_news = False
            open_parts = {n: self.parts[n].victims(stays, now_s) for n in numbers}
            while open_parts:
                number = max(open_parts, key=lambda n: (used[n] - shares[n], -n))
                row = next(open_parts[number], NO_ROW)
                if row in named:
                    continue
                if not row or used[number] - self._sizes[row] < floors[number]:
                    del open_parts[number]
                    continue
                named.add(row)
                used[number] -= self._sizes[row]
                is_news = self._link_count > 0
                yield row

    @override
    def __len__(self) -> int:
        return sum(map(len, self.parts))


@dataclass(frozen=True, slots=True)
class PartitionUse:
    """What a tenant or category takes of a tier."""

    name: str
    used_bytes: int
    quota: Quota


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """Whom a tier evicts by, its name, and what another size of the tier would be worth.

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
        cls, name: str, policy: EvictionPolicy, what_if: WhatIf | None, names: Sequence[str]
    ) -> PolicyReport:
        """Return the report of *policy*, called *name*, whose partitions are called *names*."""
        partitions: list[PartitionUse] = []
        if isinstance(policy, PartitionedEviction):
            partitions = [
                PartitionUse(names[number] or "others", policy.used_bytes(number), quota)
                for number, quota in enumerate(policy.quotas)
            ]
            policy = policy.parts[0]
        curve = {p.scale: p.hit_ratio for p in what_if.curve()} if what_if is not None else {}
        known = {scale: ratio for scale, ratio in curve.items() if ratio is not None}
        return cls(name, int(getattr(policy, "fallbacks", 0)), known, partitions)

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
