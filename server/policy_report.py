"""A PolicyReport: what a tier's policy does now, why, and what another size would be worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.proto import kvstore_pb2 as pb
from kvstore.server.policy.adaptive import AdaptiveEviction, Choice
from kvstore.server.policy.base import EvictionPolicy
from kvstore.server.policy.partitions import PartitionedEviction, Quota
from kvstore.server.policy.what_if import WhatIf


@dataclass(frozen=True, slots=True)
class PartitionUse:
    """What a tenant or category takes of a tier."""

    name: str
    used_bytes: int
    quota: Quota
    choice: Choice | None = None
    """What is followed for it alone, and why; None where nothing is chosen."""


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """Whom a tier evicts by. ``follows``, ``why`` and ``hit_ratios`` are of one that chooses.

    ``curve`` has the hit ratio, of chunks, by how many times the tier's size; it is empty until
    enough was asked for.
    """

    name: str
    follows: str = ""
    why: str = ""
    hit_ratios: Mapping[str, float] | None = None
    switches: int = 0
    fallbacks: int = 0
    """Times that ranking took too long, and leaf-LRU chose instead."""
    curve: Mapping[float, float] | None = None
    partitions: Sequence[PartitionUse] = ()

    @classmethod
    def of(
        cls, name: str, policy: EvictionPolicy, what_if: WhatIf | None, names: Sequence[str]
    ) -> PolicyReport:
        """Return the report of *policy*, called *name*, whose partitions are called *names*."""
        partitions: list[PartitionUse] = []
        if isinstance(policy, PartitionedEviction):
            partitions = [
                PartitionUse(
                    names[number] or "others",
                    policy.used_bytes(number),
                    quota,
                    _choice(policy.parts[number]),
                )
                for number, quota in enumerate(policy.quotas)
            ]
            policy = policy.parts[0]
        curve = {p.scale: p.hit_ratio for p in what_if.curve()} if what_if is not None else {}
        known = {scale: ratio for scale, ratio in curve.items() if ratio is not None}
        if not isinstance(policy, AdaptiveEviction):
            fallbacks = int(getattr(policy, "fallbacks", 0))
            return cls(name, name, fallbacks=fallbacks, curve=known, partitions=partitions)
        choice = policy.why()
        return cls(
            name,
            choice.policy,
            _why(choice),
            known_ratios(choice),
            choice.switches,
            curve=known,
            partitions=partitions,
        )

    def fill(self, status: pb.TierStatus) -> None:
        """Write the report into a tier's status."""
        status.policy.name, status.policy.follows = self.name, self.follows
        status.policy.why = self.why
        status.policy.hit_ratios.update(self.hit_ratios or {})
        for scale, ratio in (self.curve or {}).items():
            status.what_if.add(scale=scale, hit_ratio=ratio)
        for one in self.partitions:
            status.partitions.add(
                name=one.name,
                used_bytes=one.used_bytes,
                quota_bytes=one.quota.limit_bytes,
                guaranteed_bytes=one.quota.guaranteed_bytes,
                follows=one.choice.policy if one.choice else "",
                why=_why(one.choice) if one.choice else "",
                hit_ratios=known_ratios(one.choice) if one.choice else {},
            )


def _choice(policy: EvictionPolicy) -> Choice | None:
    return policy.why() if isinstance(policy, AdaptiveEviction) else None


def known_ratios(choice: Choice) -> dict[str, float]:
    """Return the hit ratios of the candidates of which one is known."""
    return {one: ratio for one, ratio in choice.hit_ratios.items() if ratio is not None}


def _why(choice: Choice) -> str:
    told = ", ".join(f"{one} {ratio:.1%}" for one, ratio in known_ratios(choice).items())
    return f"hits of a sample of 1 in {round(1 / choice.sample_rate)}: {told or 'none yet'}"
