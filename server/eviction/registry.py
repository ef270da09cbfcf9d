"""Policies by name, each loaded when first used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.eviction.access_history import AccessHistory
from kvstore.server.eviction.policy import EvictionPolicy

_PLACES = {
    "lru": "lru:LruEviction",
    "marconi": "marconi:MarconiEviction",
    "hit_density": "hit_density:HitDensityEviction",
    "discard_hint": "discard_hint:DiscardHintEviction",
    "learned": "learned:LearnedEviction",
}

POLICIES = tuple(_PLACES)
"""The names there are."""

REPLACED = {
    "adaptive": "hit_density",
    "discard_bit": "discard_hint",
    "gdsf": "hit_density",
    "lfu": "hit_density",
    "marconi_linear": "hit_density",
    "s3fifo": "hit_density",
}
"""Names that are gone, and what to write instead."""

_HAVE_DEADLINES = {"hit_density", "learned"}


def instead_of(name: str, known: Sequence[str] = POLICIES) -> str:
    """Return what to write for *name*, which is none of *known*: its successor, or one of them."""
    if name in REPLACED:
        return f"{REPLACED[name]}, which replaces {name}"
    return f"one of {', '.join(known)}"


def make_policy(
    name: str, history: AccessHistory, clock: Callable[[], float] | None = None
) -> EvictionPolicy:
    """Return a new policy, which ranks by *history*.

    Decisions that may take long end in the order of LRU where *clock*, in seconds, says that
    they do; without one they take the time they take, and are the same in every run.
    Raises InvalidRequestError.
    """
    place = _PLACES.get(name)
    if place is None:
        raise InvalidRequestError("policy", name, instead_of(name))
    module, _, noun = place.partition(":")
    kind = getattr(import_module(f"kvstore.server.eviction.{module}"), noun)
    policy: EvictionPolicy
    if name == "lru":
        policy = kind()
    elif name in _HAVE_DEADLINES:
        policy = kind(history, clock=clock)
    else:
        policy = kind(history)
    return policy
