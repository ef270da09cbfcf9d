"""Policies by name, each loaded when first used."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import policy_instead_of
from kvstore.server.eviction.access_history import AccessHistory
from kvstore.server.eviction.policy import EvictionPolicy

_PLACES = {  # of each of proto's POLICIES
    "lru": "lru:LruEviction",
    "marconi": "marconi:MarconiEviction",
    "hit_density": "hit_density:HitDensityEviction",
    "discard_hint": "lru:DiscardHintEviction",
    "learned": "learned:LearnedEviction",
}


def make_policy(
    name: str, history: AccessHistory, clock: Callable[[], float] | None = None
) -> EvictionPolicy:
    """Return a new policy, which ranks by *history*.

    Decisions that take long by *clock*, in seconds, end in the order of LRU; without one none
    does, and they are the same in every run. Raises InvalidRequestError.
    """
    place = _PLACES.get(name)
    if place is None:
        raise InvalidRequestError("policy", name, policy_instead_of(name))
    module, _, noun = place.partition(":")
    kind: Callable[..., EvictionPolicy] = getattr(
        import_module(f"kvstore.server.eviction.{module}"), noun
    )
    if name == "lru":
        return kind()
    return kind(history, clock=clock) if name in ("hit_density", "learned") else kind(history)
