"""Prompts cut and named, the plans made of them, and what neither takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.client.blend.plan import (
    BlendPlan,
    NamedChunk,
    NamedSegment,
    Segment,
    SegmentRange,
    name_segments,
)
from kvstore.proto.blend import ContextMass, ShadowResult, check_tag
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.keys import chain_digest, chain_digests, content_digest, tokens_le32
from kvstore.proto.types import MIN_CHUNK_TOKENS, ROOT

TOKENS = tuple(range(100, 160))
CHUNK = Segment(0, 40, "approx", src_pos=3)
SUFFIX = Segment(40, 60, "miss")


def plan(*segments: Segment, **settings: Any) -> BlendPlan:
    return BlendPlan(TOKENS, segments or (CHUNK, SUFFIX), **settings)


def test_a_plan_counts_its_tokens_by_kind() -> None:
    found = plan(Segment(0, 16, "exact", src_pos=0), Segment(16, 40, "approx"), SUFFIX)
    assert [found.count(kind) for kind in ("exact", "approx", "miss")] == [16, 24, 20]


def segment(**settings: Any) -> Segment:
    return Segment(**{"start": 0, "end": 4, "kind": "approx", **settings})


def ranged(*spans: tuple[int, int], prompt: int = 40, **settings: Any) -> list[NamedSegment]:
    return name_segments(range(prompt), [SegmentRange(*span) for span in spans], **settings)


WRONG: list[tuple[str, str, Callable[[], object]]] = [
    ("segments", "end at the prompt's end", lambda: plan(Segment(0, 40, "approx"))),
    ("segment.start", "start at 30", lambda: plan(Segment(0, 30, "approx"), SUFFIX)),
    ("segment.start", "start at 41", lambda: plan(Segment(0, 41, "approx"), SUFFIX)),
    ("segment.start", "start at 0", lambda: plan(SUFFIX)),
    ("segments", "logits are wanted", lambda: plan(CHUNK, Segment(40, 60, "approx"))),
    ("segments", "end at", lambda: plan(CHUNK, SUFFIX, Segment(60, 61, "miss"))),
    ("segments", "1 to", lambda: BlendPlan(TOKENS, ())),
    ("tokens", "1 to", lambda: BlendPlan((), (SUFFIX,))),
    ("ratio", "from 0 to 1", lambda: plan(ratio=1.5)),
    ("ratio", "from 0 to 1", lambda: plan(ratio=float("nan"))),
    ("ratio", "from 0 to 1", lambda: plan(ratio=-0.1)),
    ("segment", "start < end", lambda: segment(start=-1)),
    ("segment", "start < end", lambda: segment(start=4)),
    ("segment.kind", "exact, approx or miss", lambda: segment(kind="almost")),
    ("segment.src_pos", "0 or more", lambda: segment(src_pos=-2)),
    ("segment.ratio", "from 0 to 1", lambda: segment(ratio=-0.1)),
    ("segment.scores", "each of 4", lambda: segment(scores=(1.0, 2.0))),
    ("segments", "up to 40", lambda: ranged((10, 41))),
    ("segments", "in order", lambda: ranged((0, 20), (19, 40))),
    ("segments", "at most", lambda: ranged(*((2 * n, 2 * n + 1) for n in range(256)), prompt=600)),
    ("chunk_tokens", "", lambda: ranged(chunk_tokens=8)),
    ("tokens", "", lambda: name_segments([1.5, 2.5], [])),  # type: ignore[list-item]
    ("segment", "start below stop", lambda: SegmentRange(5, 4)),
    ("context.mass", "", lambda: ContextMass(bytes(16), 16, float("nan"))),
    ("shadow.agreement", "", lambda: ShadowResult(0.0, 1.1, 1)),
    ("tag", "", lambda: check_tag("a\nb")),
]


def test_what_cannot_be_is_refused_by_name() -> None:
    for field, fix, make in WRONG:
        with pytest.raises(InvalidRequestError) as caught:
            make()
        said = str(caught.value)
        assert (said.startswith(f"{field}="), fix in said) == (True, True), (field, said)


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


# --- segments and their names

SIZE = 32


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def chunks_of(segments: Sequence[NamedSegment]) -> list[NamedChunk]:
    return [chunk for one in segments for chunk in one.chunks]


def test_a_prompt_without_ranges_has_the_names_that_keys_gives_it() -> None:
    prompt = tokens(3 * SIZE + 20)
    [segment] = name_segments(prompt, [], SIZE, [b"salt"])
    assert not segment.approximate
    assert [one.digest for one in segment.chunks] == chain_digests(prompt, SIZE, [b"salt"])


def test_a_document_has_the_same_contents_wherever_it_stands() -> None:
    document = tokens(80, 1000)
    found = []
    for head in (0, 7, 64):
        prompt = tokens(head) + document + tokens(9, 5000)
        segments = name_segments(prompt, [SegmentRange(head, head + 80)], SIZE)
        [one] = [segment for segment in segments if segment.approximate]
        assert [chunk.start - head for chunk in one.chunks] == [0, 32, 64]
        found.append([chunk.content for chunk in one.chunks])
        assert found[-1][0] == content_digest(tokens_le32(document[:SIZE]))
    assert found[0] == found[1] == found[2]


def test_a_short_end_joins_the_chunk_before_it_where_there_is_room() -> None:
    segments = name_segments(tokens(2 * SIZE + 5), [], SIZE)
    assert [(one.start, one.stop) for one in chunks_of(segments)] == [(0, 32), (32, 69)]
    [segment] = name_segments(tokens(8192 + 5), [], 8192)
    assert [(one.start, one.stop) for one in segment.chunks] == [(0, 8192)]
    assert segment.stop == 8192 + 5


def test_what_is_too_short_for_a_chunk_is_still_part_of_the_chain() -> None:
    prompt = tokens(5) + tokens(SIZE, 100)
    _, document = name_segments(prompt, [SegmentRange(5, 5 + SIZE)], SIZE)
    [chunk] = document.chunks
    head = chain_digest(ROOT, tokens_le32(prompt[:5]))
    assert chunk.parent == head
    assert chunk.digest == chain_digest(head, tokens_le32(prompt[5:]))


def test_extras_are_in_every_content_and_once_in_the_chain() -> None:
    prompt = tokens(2 * SIZE)
    plain, salted = (chunks_of(name_segments(prompt, [], SIZE, e)) for e in ((), (b"image",)))
    for one, other in zip(plain, salted, strict=True):
        assert one.content != other.content
        assert one.digest != other.digest
    second = tokens_le32(prompt[SIZE:])
    assert salted[1].digest == chain_digest(salted[0].digest, second)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 400),
    st.lists(st.integers(0, 400), max_size=8),
    st.sampled_from([16, 32, 100]),
)
def test_segments_tile_the_prompt_and_chunks_their_segments(
    count: int, cuts: list[int], size: int
) -> None:
    bounds = sorted({min(cut, count) for cut in cuts})
    pairs = zip(bounds[::2], bounds[1::2], strict=False)
    ranges = [SegmentRange(start, stop) for start, stop in pairs if start < stop]
    segments = name_segments(tokens(count), ranges, size)
    at = 0
    for one in segments:
        assert one.start == at
        for chunk in one.chunks:
            assert chunk.start == at
            assert chunk.tokens >= MIN_CHUNK_TOKENS
            at = chunk.stop
        assert 0 <= one.stop - at < MIN_CHUNK_TOKENS
        at = one.stop
    assert at == count
    wanted = {(one.start, one.stop) for one in ranges}
    assert {(one.start, one.stop) for one in segments if one.approximate} == wanted
