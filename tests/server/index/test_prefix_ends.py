"""Where prefixes can end, against the sentence that says it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from contracts.chunks import make_representation
from contracts.ends import HYBRID, STATES, WIDE
from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto.types import KVLayout
from kvstore.server.index.chunk_index import ResumeRequirements, StateCheckpoints

WHOLE = replace(make_representation(), layer_groups=(*HYBRID.layer_groups,))

chunks = st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(16, 40)), max_size=12)


@pytest.mark.parametrize(
    ("model", "needs"),
    [
        (make_representation(), ResumeRequirements()),
        (STATES, ResumeRequirements(state=True)),
        (HYBRID, ResumeRequirements(state=True, window_tokens=11)),
        (WIDE, ResumeRequirements(window_tokens=33)),
    ],
)
def test_a_models_layers_say_what_the_end_of_a_prefix_needs(model, needs) -> None:  # type: ignore[no-untyped-def]
    assert ResumeRequirements.of_groups(model.layer_groups) == needs


@given(chunks, st.booleans(), st.integers(0, 90))
def test_a_prefix_ends_at_the_deepest_state_whose_windows_reach(
    drawn: list[tuple[bool, bool, int]], state: bool, window: int
) -> None:
    ends, needs = StateCheckpoints(), ResumeRequirements(state, window)
    ends.flags.frombytes(bytes(len(drawn) + 1))
    sizes = {}
    for row, (has_window, has_state, tokens) in enumerate(drawn, 1):
        layout = KVLayout.of(WHOLE, tokens, window=has_window, state=has_state)
        ends.flags[row] = ResumeRequirements.of_layout(layout).flags
        sizes[row] = tokens
    rows = np.arange(1, len(drawn) + 1)

    def can_end(count: int) -> bool:
        seen, at = 0, count
        while at and seen < window:
            has_window, _, tokens = drawn[at - 1]
            if not has_window:
                return False
            seen, at = seen + tokens, at - 1
        return not state or drawn[count - 1][1]

    deepest = max((n for n in range(1, len(drawn) + 1) if can_end(n)), default=0)
    assert ends.usable(needs, rows, sizes.__getitem__) == deepest


def test_a_chunk_lacks_what_another_put_of_it_has() -> None:
    ends = StateCheckpoints()
    ends.flags.append(ResumeRequirements.of_layout(KVLayout.of(HYBRID, 16, state=False)).flags)
    assert ends.is_less_complete(0, KVLayout.of(HYBRID, 16))
    assert not ends.is_less_complete(0, KVLayout.of(HYBRID, 16, state=False))
    assert not ends.is_less_complete(0, KVLayout.of(HYBRID, 16, window=False, state=False))
    ends.flags[0] = 0
    assert ends.is_less_complete(0, KVLayout.of(HYBRID, 16, state=False))
