"""Policies by name, and the PolicyContract over each of them."""

from __future__ import annotations

import pytest
from contracts.policy import PolicyContract
from typing_extensions import override

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import POLICIES, REPLACED_POLICIES
from kvstore.server.eviction.access_history import AccessHistory
from kvstore.server.eviction.hit_density import HitDensityEviction
from kvstore.server.eviction.policy import EvictionPolicy, make_policy


class NamedPolicyContract(PolicyContract):
    """The contract for the policy that is called ``name``, beside the history it ranks by."""

    name = ""

    @override
    def make_policy(self) -> EvictionPolicy:
        return make_policy(self.name, AccessHistory())

    @override
    def make_pair(self) -> tuple[EvictionPolicy, AccessHistory]:
        history = AccessHistory()
        return make_policy(self.name, history), history


class TestLru(NamedPolicyContract):
    name = "lru"


class TestMarconi(NamedPolicyContract):
    name = "marconi"


class TestDiscardBit(NamedPolicyContract):
    name = "discard_hint"


class TestLearned(NamedPolicyContract):
    name = "learned"


class TestHitDensity(NamedPolicyContract):
    name = "hit_density"


def test_every_policy_that_has_a_name_is_held_to_the_contract() -> None:
    assert {kind.name for kind in NamedPolicyContract.__subclasses__()} == set(POLICIES)


def test_a_clock_reaches_the_policy_whose_decisions_have_a_deadline() -> None:
    asked = 0

    def clock() -> float:
        nonlocal asked
        asked += 1
        return 0.0

    policy = make_policy("hit_density", AccessHistory(), clock)
    assert isinstance(policy, HitDensityEviction)
    policy.insert(1, 0, 10, 0.0)
    assert list(policy.victims(lambda _: False, 0.0)) == [1]
    assert asked > 0


def test_a_name_that_is_no_policys_is_refused_with_those_that_are_or_its_successor() -> None:
    with pytest.raises(InvalidRequestError, match="hit_density"):
        make_policy("fifo", AccessHistory())
    for name, successor in REPLACED_POLICIES.items():
        with pytest.raises(InvalidRequestError, match=f"{name}.*: {successor}, which replaces"):
            make_policy(name, AccessHistory())
