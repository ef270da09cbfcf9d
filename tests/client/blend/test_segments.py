"""Segments cut and named, and the values of blending that are checked at birth."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.client.blend.plan import NamedChunk, NamedSegment, SegmentRange, name_segments
from kvstore.proto.blend import MAX_SEGMENTS, ContextMass, ShadowResult, check_tag
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.keys import chain_digest, chain_digests, content_digest, tokens_le32
from kvstore.proto.types import MIN_CHUNK_TOKENS, ROOT

CHUNK = 32


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def chunks_of(segments: Sequence[NamedSegment]) -> list[NamedChunk]:
    return [chunk for one in segments for chunk in one.chunks]


def test_a_prompt_without_ranges_has_the_names_that_keys_gives_it() -> None:
    prompt = tokens(3 * CHUNK + 20)
    [segment] = name_segments(prompt, [], CHUNK, [b"salt"])
    assert not segment.approximate
    assert [one.digest for one in segment.chunks] == chain_digests(prompt, CHUNK, [b"salt"])


def test_a_document_has_the_same_contents_wherever_it_stands() -> None:
    document = tokens(80, 1000)
    found = []
    for head in (0, 7, 64):
        prompt = tokens(head) + document + tokens(9, 5000)
        segments = name_segments(prompt, [SegmentRange(head, head + 80)], CHUNK)
        [one] = [segment for segment in segments if segment.approximate]
        assert [chunk.start - head for chunk in one.chunks] == [0, 32, 64]
        found.append([chunk.content for chunk in one.chunks])
        assert found[-1][0] == content_digest(tokens_le32(document[:CHUNK]))
    assert found[0] == found[1] == found[2]


def test_a_short_end_joins_the_chunk_before_it() -> None:
    segments = name_segments(tokens(2 * CHUNK + 5), [], CHUNK)
    assert [(one.start, one.stop) for one in chunks_of(segments)] == [(0, 32), (32, 69)]


def test_where_there_is_no_room_it_is_in_no_chunk() -> None:
    [segment] = name_segments(tokens(8192 + 5), [], 8192)
    assert [(one.start, one.stop) for one in segment.chunks] == [(0, 8192)]
    assert segment.stop == 8192 + 5


def test_what_is_too_short_for_a_chunk_is_still_part_of_the_chain() -> None:
    prompt = tokens(5) + tokens(CHUNK, 100)
    _, document = name_segments(prompt, [SegmentRange(5, 5 + CHUNK)], CHUNK)
    [chunk] = document.chunks
    head = chain_digest(ROOT, tokens_le32(prompt[:5]))
    assert chunk.parent == head
    assert chunk.digest == chain_digest(head, tokens_le32(prompt[5:]))


def test_extras_are_in_every_content_and_once_in_the_chain() -> None:
    prompt = tokens(2 * CHUNK)
    plain, salted = (chunks_of(name_segments(prompt, [], CHUNK, e)) for e in ((), (b"image",)))
    for one, other in zip(plain, salted, strict=True):
        assert one.content != other.content
        assert one.digest != other.digest
    second = tokens_le32(prompt[CHUNK:])
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


WRONG: dict[str, tuple[str, Callable[[], object]]] = {
    "past the end": ("segments", lambda: name_segments(tokens(40), [SegmentRange(10, 41)])),
    "over one another": (
        "segments", lambda: name_segments(tokens(40), [SegmentRange(0, 20), SegmentRange(19, 40)]),
    ),
    "too many": (
        "segments",
        lambda: name_segments(
            tokens(600), [SegmentRange(2 * n, 2 * n + 1) for n in range(MAX_SEGMENTS)]
        ),
    ),
    "tiny chunks": ("chunk_tokens", lambda: name_segments(tokens(40), [], 8)),
    "no tokens": ("tokens", lambda: name_segments([1.5, 2.5], [])),  # type: ignore[list-item]
    "backwards": ("segment", lambda: SegmentRange(5, 4)),
    "a mass that is no number": (
        "context.mass", lambda: ContextMass(bytes(16), 16, float("nan")),
    ),
    "an agreement above 1": ("shadow.agreement", lambda: ShadowResult(0.0, 1.1, 1)),
    "a tag of many lines": ("tag", lambda: check_tag("a\nb")),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused_by_name(case: str) -> None:
    field, make = WRONG[case]
    with pytest.raises(InvalidRequestError, match=rf"^{field}="):
        make()
