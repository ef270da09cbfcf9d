"""The PolicyContract over every policy that has a name."""

from __future__ import annotations

import pytest
from contracts.policy import PolicyContract
from typing_extensions import override

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import POLICIES
from kvstore.server.eviction.access_history import AccessHistory
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


class TestMarconi(NamedPolicyContract):
    name = "marconi"


class TestDiscardBit(NamedPolicyContract):
    name = "discard_hint"


class TestLearned(NamedPolicyContract):
    name = "learned"


class TestHitDensity(NamedPolicyContract):
    name = "hit_density"


ELSEWHERE = {"lru"}
"""Held to the contract in files of their own."""


def test_every_policy_that_has_a_name_is_held_to_the_contract() -> None:
    held = {kind.name for kind in NamedPolicyContract.__subclasses__()}
    assert held | ELSEWHERE == set(POLICIES)
    assert not held & ELSEWHERE


def test_a_name_that_is_no_policys_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidRequestError, match="discard_hint"):
        make_policy("best", AccessHistory())
