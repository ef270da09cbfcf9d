"""What a plan says and refuses."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.client.blend.plan import BlendPlan, Segment
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.keys import content_digest, tokens_le32

TOKENS = tuple(range(100, 160))
CHUNK = Segment(0, 40, "approx", src_pos=3)
SUFFIX = Segment(40, 60, "miss")


def plan(*segments: Segment, **settings: Any) -> BlendPlan:
    return BlendPlan(TOKENS, segments or (CHUNK, SUFFIX), **settings)


def test_a_plan_counts_its_tokens_by_kind() -> None:
    found = plan(Segment(0, 16, "exact", src_pos=0), Segment(16, 40, "approx"), SUFFIX)
    assert [found.count(kind) for kind in ("exact", "approx", "miss")] == [16, 24, 20]


@pytest.mark.parametrize(
    ("segments", "fix"),
    [
        ((Segment(0, 40, "approx"),), "end at the prompt's end"),
        ((Segment(0, 30, "approx"), SUFFIX), "start at 30"),
        ((Segment(0, 41, "approx"), SUFFIX), "start at 41"),
        ((SUFFIX,), "start at 0"),
        ((CHUNK, Segment(40, 60, "approx")), "logits are wanted"),
        ((CHUNK, SUFFIX, Segment(60, 61, "miss")), "end at the prompt's end"),
    ],
)
def test_segments_tile_the_prompt_and_the_last_is_computed(
    segments: tuple[Segment, ...], fix: str
) -> None:
    with pytest.raises(InvalidRequestError, match=fix):
        plan(*segments)


def test_a_plan_without_segments_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="segments"):
        BlendPlan(TOKENS, ())


@pytest.mark.parametrize(
    "settings",
    [
        {"ratio": 1.5},
        {"ratio": float("nan")},
        {"ratio": -0.1},
    ],
)
def test_numbers_out_of_their_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(reversed(settings))):
        plan(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"start": -1, "end": 4},
        {"start": 4, "end": 4},
        {"kind": "almost"},
        {"src_pos": -2},
        {"ratio": -0.1},
        {"scores": (1.0, 2.0)},
    ],
)
def test_a_segment_is_checked_at_birth(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        Segment(**{"start": 0, "end": 4, "kind": "approx", **settings})


def test_tokens_that_are_not_those_of_the_digest_are_refused() -> None:
    digest = content_digest(tokens_le32(TOKENS[:40]))
    plan(Segment(0, 40, "approx", digest), SUFFIX)
    with pytest.raises(InvalidRequestError, match="others"):
        BlendPlan((7, *TOKENS[1:]), (Segment(0, 40, "approx", digest), SUFFIX))
    with pytest.raises(InvalidRequestError, match="others"):
        plan(Segment(0, 39, "approx", digest), Segment(39, 60, "miss"))
    with pytest.raises(InvalidRequestError, match="others"):
        plan(Segment(0, 40, "approx", digest, extra=(b"image",)), SUFFIX)


def test_a_higher_ratio_raises_that_of_segments_that_had_less() -> None:
    own = Segment(0, 20, "approx", ratio=0.1)
    more = Segment(20, 40, "approx", ratio=0.9)
    found = plan(own, more, SUFFIX).with_ratio(0.5)
    assert [segment.ratio for segment in found.segments] == [0.5, 0.9, None]
    assert plan(own, more, SUFFIX).chosen_tokens(0.5) == 20 * 0.5 + 20 * 0.9


def test_what_is_left_out_is_computed_in_its_place() -> None:
    found = plan().without("approx")
    assert [(s.start, s.end, s.kind) for s in found.segments] == [
        (0, 40, "miss"),
        (40, 60, "miss"),
    ]
