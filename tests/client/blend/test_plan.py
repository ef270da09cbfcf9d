"""Prompts cut and named, the plans made of them, and which rows each selector chooses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
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
from kvstore.client.blend.selectors import SELECTORS, check_selector, measure_of, pick_share
from kvstore.proto.blend import check_tag
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.keys import chain_digest, chain_digests, content_digest, tokens_le32
from kvstore.proto.types import MIN_CHUNK_TOKENS, ROOT

TOKENS = tuple(range(100, 160))
CHUNK = Segment(0, 40, "approx", src_pos=3)
SUFFIX = Segment(40, 60, "miss")


def plan(*segments: Segment, **settings: Any) -> BlendPlan:
    return BlendPlan(TOKENS, segments or (CHUNK, SUFFIX), **settings)


def segment(**settings: Any) -> Segment:
    return Segment(**{"start": 0, "end": 4, "kind": "approx", **settings})


def ranged(*spans: tuple[int, int], prompt: int = 40, **settings: Any) -> list[NamedSegment]:
    return name_segments(range(prompt), [SegmentRange(*span) for span in spans], **settings)


WRONG: list[tuple[str, str, Callable[[], object]]] = [
    ("segments", "end at the prompt's end", lambda: plan(Segment(0, 40, "approx"))),
    ("segment.start", "start at 30", lambda: plan(Segment(0, 30, "approx"), SUFFIX)),
    ("segment.start", "start at 41", lambda: plan(Segment(0, 41, "approx"), SUFFIX)),
    ("segment.start", "start at 0", lambda: plan(SUFFIX)),
    ("segments", "logits are needed", lambda: plan(CHUNK, Segment(40, 60, "approx"))),
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
    ("segment", "start < stop", lambda: SegmentRange(5, 4)),
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
    with pytest.raises(InvalidRequestError, match="differ"):
        BlendPlan((7, *TOKENS[1:]), (Segment(0, 40, "approx", digest), SUFFIX))
    with pytest.raises(InvalidRequestError, match="differ"):
        plan(Segment(0, 39, "approx", digest), Segment(39, 60, "miss"))
    with pytest.raises(InvalidRequestError, match="differ"):
        plan(Segment(0, 40, "approx", digest, extra=(b"image",)), SUFFIX)


def test_a_higher_ratio_raises_that_of_segments_that_had_less() -> None:
    own = Segment(0, 20, "approx", ratio=0.1)
    more = Segment(20, 40, "approx", ratio=0.9)
    found = plan(own, more, SUFFIX).with_ratio(0.5)
    assert [segment.ratio for segment in found.segments] == [0.5, 0.9, None]
    assert plan(own, more, SUFFIX).chosen_tokens(0.5) == 20 * 0.5 + 20 * 0.9


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
    st.integers(0, 400), st.lists(st.integers(0, 400), max_size=8), st.sampled_from([16, 32, 100])
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


def chunks(ratio: float = 0.2, **settings: Any) -> BlendPlan:
    """4 tokens of prefix, chunks of 10 and 10, 2 to compute."""
    segments = (
        Segment(0, 4, "exact", src_pos=0),
        Segment(4, 14, "approx", scores=settings.pop("first_scores", None)),
        Segment(14, 24, "approx", scores=settings.pop("second_scores", None)),
        Segment(24, 26, "miss"),
    )
    return BlendPlan(tuple(range(26)), segments, ratio=ratio, **settings)


def numbers(**at: float) -> torch.Tensor:
    found = torch.zeros(26)
    for place, value in at.items():
        found[int(place[1:])] = value
    return found


def test_hkvd_keeps_the_rows_that_deviate_most() -> None:
    deviation = numbers(p5=1, p9=4, p15=3, p20=2, p23=9)
    assert SELECTORS["hkvd"](chunks(), deviation).tolist() == [9, 15, 20, 23]


def test_first_rows_are_taken_by_first_k_and_where_nothing_is_known_to_choose_by() -> None:
    some = chunks(first_scores=tuple(float(i) for i in range(10)))  # the second segment has none
    for name, one in (("first_k", chunks()), ("hkvd", chunks()), ("stored_priority", some)):
        assert SELECTORS[name](one, None).tolist() == [4, 5, 14, 15]
    assert measure_of(chunks(selector="hkvd"), 1) is None
    assert measure_of(chunks(selector="hkvd"), 2) == "deviation"


def test_stored_priority_takes_the_highest_scores() -> None:
    rising = tuple(float(i) for i in range(10))
    found = chunks(first_scores=rising, second_scores=rising[::-1])
    assert SELECTORS["stored_priority"](found, None).tolist() == [12, 13, 14, 15]


def test_hybrid_weighs_attention_by_the_scores() -> None:
    scores = tuple(1.0 if i == 3 else 0.0 for i in range(10))
    found = chunks(0.1, first_scores=scores, second_scores=scores)
    attention = numbers(p7=2, p11=5, p17=3, p22=4)
    assert SELECTORS["query_attention"](found, attention).tolist() == [11, 22]
    assert SELECTORS["hybrid"](found, attention).tolist() == [7, 17]
    assert SELECTORS["hybrid"](chunks(0.1), attention).tolist() == [11, 22]


def test_a_segment_with_a_ratio_of_its_own_keeps_to_it() -> None:
    scores = tuple(i / 10 for i in range(10))
    segments = (
        Segment(0, 10, "approx", ratio=0.4, scores=scores),
        Segment(10, 20, "approx", scores=scores),
        Segment(20, 21, "miss"),
    )
    own = BlendPlan(tuple(range(21)), segments, ratio=0.2)
    attention = torch.zeros(21)
    attention[[1, 2, 11, 12]] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    assert SELECTORS["hybrid"](own, attention).tolist() == [1, 2, 8, 9, 11, 19]
    assert pick_share(own, torch.arange(21.0)).tolist() == [6, 7, 8, 9, 18, 19]


@given(scores=st.lists(st.integers(0, 5), min_size=1, max_size=40), ratio=st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_picked_rows_rise_and_none_left_is_better(scores: list[int], ratio: float) -> None:
    size = len(scores)
    segments = (Segment(0, size, "approx"), Segment(size, size + 1, "miss"))
    own = BlendPlan(tuple(range(size + 1)), segments, ratio=ratio)
    found = pick_share(own, torch.tensor([*scores, 9.0])).tolist()
    assert found == sorted(set(found))
    assert len(found) == math.ceil(ratio * size - 1e-9)
    left = set(range(size)) - set(found)
    if found and left:
        assert max(scores[i] for i in left) <= min(scores[i] for i in found)


def test_a_selector_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match=r"oracle.*hkvd.*hybrid"):
        check_selector("oracle")
