"""Whatever bytes a parser is given, it takes them or refuses them by name."""

from __future__ import annotations

import pytest
from fuzz.targets import SEEDS, TARGETS, try_target
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = {"codec": 8, "config": 15}
"""Of those that take long; `codecs/test_hostile_frames.py` changes frames of all codecs."""


@pytest.mark.parametrize("name", TARGETS)
def test_no_bytes_crash_a_parser(name: str) -> None:
    seeds = SEEDS[name]
    taken: list[bool] = []

    @given(st.data())
    @settings(
        max_examples=EXAMPLES.get(name, 80), deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def run(data: st.DataObject) -> None:
        is_changed: bool = data.draw(st.booleans())
        if seeds and is_changed:
            changed = bytearray(data.draw(st.sampled_from(seeds)))
            for _ in range(data.draw(st.integers(0, 4))):
                changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(
                    st.integers(0, 255)
                )
            cut = data.draw(st.integers(0, len(changed)))
            taken.append(
                try_target(name, bytes(changed[:cut] if data.draw(st.booleans()) else changed))
            )
        else:
            taken.append(try_target(name, data.draw(st.binary(max_size=700))))

    run()
    assert False in taken, "rubbish was never refused"


@pytest.mark.parametrize("name", [name for name, seeds in SEEDS.items() if seeds])
def test_what_is_right_is_taken(name: str) -> None:
    """Or the changes above would be changes of rubbish."""
    taken = [try_target(name, seed) for seed in SEEDS[name]]
    if name in ("rpc", "bulk_word"):  # most methods want other messages, most words a payload
        assert name == "bulk_word" or any(taken)
    elif name == "redis_manifest":  # of another key
        assert taken == [False]
    else:
        assert all(taken)
