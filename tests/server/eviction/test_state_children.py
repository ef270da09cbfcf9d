"""Who is below whom, beside dictionaries."""

from __future__ import annotations

import numpy as np

from kvstore.server.eviction.states.tree import ROOT, NodeColumns


def test_children_are_found_by_parent_and_token_whatever_came_and_went() -> None:
    """Few tokens, so that children share buckets; enough of them that the table grows."""
    table, rng = NodeColumns(), np.random.default_rng(3)
    children: dict[tuple[int, int], int] = {}
    free = [table.add(0, b"") for _ in range(699)]
    for _ in range(4000):
        parent, token = int(rng.integers(0, 40)), int(rng.integers(-3, 30)) * 65_537
        number = children.get((parent, token), ROOT)
        assert table.find(parent, token) == number
        if number:
            table.unlink(number)
            del children[parent, token]
            free.append(number)
        elif free:
            number = children[parent, token] = free.pop()
            table.edges[number] = np.array([token, 7], np.int32).tobytes()
            table.link(number, parent)
    assert len(children) > 300
    for parent in range(40):
        mine = {number for (above, _), number in children.items() if above == parent}
        assert set(table.children(parent)) == mine
        assert table.counts[parent] == len(mine)
        assert all(table.parents[number] == parent for number in mine)
