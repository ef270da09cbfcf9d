"""Where prefixes can end, against the sentence that says it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from contracts.chunks import make_representation
from contracts.ends import HYBRID, STATES, WIDE
from contracts.policy import info, key
from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto.key_table import NO_ROW
from kvstore.proto.types import KVLayout
from kvstore.server.index.chunk_index import ChunkIndex, ResumeRequirements

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
    index = ChunkIndex(["cpu"])
    for number, (has_window, has_state, tokens) in enumerate(drawn):
        layout = KVLayout.of(WHOLE, tokens, window=has_window, state=has_state)
        index.add("cpu", [replace(info(number), layout=layout)])
    index.needs[key(0)[:16]] = ResumeRequirements(state, window)

    def can_end(count: int) -> bool:
        seen, at = 0, count
        while at and seen < window:
            has_window, _, tokens = drawn[at - 1]
            if not has_window:
                return False
            seen, at = seen + tokens, at - 1
        return not state or drawn[count - 1][1]

    deepest = max((n for n in range(1, len(drawn) + 1) if can_end(n)), default=0)
    rows = index.prefix([key(number) for number in range(len(drawn))])
    assert len(index.usable(rows)) == deepest


def test_a_chunk_lacks_what_another_put_of_it_has() -> None:
    index = ChunkIndex(["cpu"])
    less, none = (KVLayout.of(HYBRID, 16, window=window, state=False) for window in (True, False))
    with_window, bare = index.add("cpu", [replace(info(0), layout=less)])[0], NO_ROW
    assert index.is_less_complete(with_window, KVLayout.of(HYBRID, 16))
    assert not index.is_less_complete(with_window, less)
    assert not index.is_less_complete(with_window, none)
    assert index.is_less_complete(bare, less)
