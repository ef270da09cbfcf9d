"""Policies by name."""

from __future__ import annotations

import pytest

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import POLICIES, REPLACED_POLICIES
from kvstore.server.eviction.access_history import AccessHistory
from kvstore.server.eviction.hit_density import HitDensityEviction
from kvstore.server.eviction.policy import make_policy


@pytest.mark.parametrize("name", POLICIES)
def test_every_name_makes_a_policy_that_knows_nothing_yet(name: str) -> None:
    assert len(make_policy(name, AccessHistory())) == 0


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


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidRequestError, match="hit_density"):
        make_policy("fifo", AccessHistory())


@pytest.mark.parametrize("name", REPLACED_POLICIES)
def test_a_name_that_is_gone_is_refused_with_its_successor(name: str) -> None:
    with pytest.raises(
        InvalidRequestError, match=f"{name}.*: {REPLACED_POLICIES[name]}, which replaces"
    ):
        make_policy(name, AccessHistory())
