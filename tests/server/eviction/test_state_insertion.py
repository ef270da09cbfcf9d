"""Which states a request leaves: examples."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.server.eviction.states.cache import Checkpoints, insert_speculatively
from kvstore.server.eviction.states.tree import CheckpointTree, HybridModel

SMALL = HybridModel("small", 1, 1, 1, 8, 4)


def admit(tree: CheckpointTree, sequence: str, reused: int = 0) -> Checkpoints:
    tokens = np.frombuffer(sequence.encode(), np.uint8).astype(np.int32)
    return insert_speculatively(tree, tree.match(tokens), tokens, reused)


@pytest.mark.parametrize(
    ("before", "sequence", "reused", "branch", "end"),
    [
        ([], "abc", 0, None, 3),  # the first: its end only
        (["abcd"], "abx", 0, 2, 3),  # leaves another inside its edge
        (["abcd"], "abx", 2, None, 3),  # that position was not computed
        (["abcd"], "xyz", 0, None, 3),  # shares nothing
        (["abcd"], "abcdef", 4, None, 6),  # goes on: the next turn of a conversation
        (["abcd"], "abcdef", 0, None, 6),  # an end that went is no part that many share
        (["abcd", "abx"], "aby", 0, 2, 3),  # a known branch that has no state
        (["abcd"], "ab", 0, None, 2),  # ends where it parts: one state
        (["abcd"], "abcd", 0, None, 4),  # the same again
        (["abcd"], "abcd", 4, None, None),  # and nothing of it was computed
    ],
)
def test_a_request_leaves_states_where_it_parts_and_where_it_ends(
    before: list[str], sequence: str, reused: int, branch: int | None, end: int | None
) -> None:
    tree = CheckpointTree(SMALL)
    for one in before:
        admit(tree, one)

    found = admit(tree, sequence, reused)

    assert (found.branch.depth if found.branch else None) == branch
    assert (found.end.depth if found.end else None) == end


def test_a_branch_that_has_its_state_is_not_named_again() -> None:
    tree = CheckpointTree(SMALL)
    admit(tree, "abcd")
    parts = admit(tree, "abx").branch
    assert parts is not None
    tree.hold(parts)

    assert admit(tree, "aby").branch is None


def words(rng: np.random.Generator) -> str:
    return "".join(rng.choice(list("ab"), rng.integers(1, 12)))


def test_at_most_two_states_are_named_for_any_request() -> None:
    tree = CheckpointTree(SMALL)
    rng = np.random.default_rng(4)
    counts = {sum(node is not None for node in admit(tree, words(rng))[2:]) for _ in range(300)}

    assert counts == {1, 2}
