"""Block tables of requests, followed where vLLM does not tell them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from kvstore.client.engines.vllm.messages import FollowedTables


def step(
    new: dict[str, list[int]] | None = None,
    more: dict[str, list[int] | None] | None = None,
    resumed: Sequence[str] = (),
    over: Sequence[str] = (),
) -> Any:
    """vllm.v1.core.sched.output.SchedulerOutput of 0.26, for one block table a request."""
    more = more or {}
    cached = SimpleNamespace(
        req_ids=list(more), resumed_req_ids=set(resumed),
        new_block_ids=[None if blocks is None else (blocks,) for blocks in more.values()],
    )  # fmt: skip
    first = [SimpleNamespace(req_id=a, block_ids=(b,)) for a, b in (new or {}).items()]
    return SimpleNamespace(
        finished_req_ids=set(over), scheduled_new_reqs=first, scheduled_cached_reqs=cached
    )


def test_a_request_has_the_blocks_of_all_its_steps_and_none_once_it_is_over() -> None:
    given, tables = [1, 2], FollowedTables()
    tables.follow(step(new={"a": given, "b": [7]}))
    tables.follow(step(more={"a": [3], "b": None}))
    assert (tables.of("a"), tables.of("b")) == ([[1, 2, 3]], [[7]])
    assert given == [1, 2], "vLLM's own list is left as it is"
    tables.follow(step(over=["a"]))
    assert (list(tables.of("a")), tables.of("b")) == ([], [[7]])


def test_a_request_that_was_preempted_has_the_blocks_it_was_given_anew() -> None:
    tables = FollowedTables()
    tables.follow(step(new={"a": [1, 2]}))
    tables.follow(step(more={"a": [8, 9, 4]}, resumed=["a"]))
    assert tables.of("a") == [[8, 9, 4]]


def test_a_request_that_nobody_told_of_has_none() -> None:
    tables = FollowedTables()
    tables.follow(step(more={"a": [3]}))
    assert list(tables.of("a")) == []
