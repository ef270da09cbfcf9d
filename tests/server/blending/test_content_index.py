"""The ContentIndex: by hand where the rules are, and against a dictionary."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from helpers.documents import make_content_index
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.proto.types import ROOT, ChainDigest, ChunkKey, Namespace
from kvstore.server.blending.content_index import (
    MAX_CONTEXT,
    MAX_VARIANTS,
    ContentIndex,
    Learned,
    Measured,
    Named,
)
from kvstore.server.blending.scores import NO_IMPACT, UNKNOWN_IMPACT, Context
from kvstore.server.index.hints import UNKNOWN_CONTENT

SPACE, OTHER_SPACE = Namespace(b"s" * 16), Namespace(b"t" * 16)
UNMEASURED = -1.0


def digest(number: int) -> ChainDigest:
    return ChainDigest(number.to_bytes(16, "big"))


def content(number: int) -> bytes:
    return b"content" + number.to_bytes(9, "big")


def chunk(
    number: int,
    of: int = 1,
    *,
    behind: int = 0,
    position: int = 64,
    space: Namespace = SPACE,
    tokens: int = 16,
) -> Named:
    """Return chunk *number* with content *of*, behind another chunk; 0 is the start."""
    return Named(ChunkKey(space + digest(number)), digest(behind), content(of), tokens, position)


def keys_of(index: ContentIndex, of: int, space: Namespace = SPACE) -> list[int]:
    return [int.from_bytes(one.key[16:], "big") for one in index.variants(space, content(of))]


def filled(*chunks: Named) -> ContentIndex:
    index = make_content_index(1000)
    for one in chunks:
        assert index.note(one) is None
    return index


def test_another_tenant_or_model_never_sees_them() -> None:
    index = filled(chunk(1))
    assert keys_of(index, 1, OTHER_SPACE) == []


def test_a_frame_that_does_not_say_what_it_holds_is_not_taken_in() -> None:
    index = filled(chunk(1)._replace(content=UNKNOWN_CONTENT))
    assert index.counts()[1] == 0


def test_facts_say_where_a_variant_stood_and_behind_what() -> None:
    index = filled(chunk(1, position=0), chunk(2, of=2, behind=1, position=16))
    facts = index.facts(chunk(2).key)
    assert facts is not None
    assert (facts.position, facts.parent, facts.tokens) == (16, digest(1), 16)
    assert list(facts.context) == [Context(content(1), 16, 16.0)]
    assert (facts.impact, facts.deviation, facts.reports) == (UNKNOWN_IMPACT, UNMEASURED, 0)


def test_context_that_is_not_here_any_more_is_a_chunk_nobody_has() -> None:
    index = filled(chunk(1, position=32), chunk(2, of=2, behind=1, position=48))
    facts = index.facts(chunk(2).key)
    assert facts is not None
    assert list(facts.context) == [
        Context(UNKNOWN_CONTENT, 32, 32.0),
        Context(content(1), 16, 16.0),
    ]


def test_context_is_looked_at_so_far_back_and_no_farther() -> None:
    chain = [chunk(n, of=n, behind=n - 1, position=16 * (n - 1)) for n in range(1, 40)]
    facts = filled(*chain).facts(chain[-1].key)
    assert facts is not None
    assert len(facts.context) == MAX_CONTEXT + 1
    assert sum(one.tokens for one in facts.context) == chain[-1].position


def test_parents_in_a_circle_end() -> None:
    index = filled(chunk(1, behind=2, position=1 << 31), chunk(2, of=2, behind=1, position=5))
    facts = index.facts(chunk(1).key)
    assert facts is not None
    assert len(facts.context) <= MAX_CONTEXT + 1


def test_of_one_more_variant_the_oldest_unused_goes() -> None:
    index = filled(*(chunk(n, behind=100 + n, position=n) for n in range(1, MAX_VARIANTS + 1)))
    for number in (2, 3):
        index.chose([(chunk(number).key, 0.9)])
    gone = index.note(chunk(9, behind=109, position=9))
    assert gone == chunk(4).key  # 1 stands nearest to a prompt's start, 2 and 3 saved something
    assert sorted(keys_of(index, 1)) == [1, 2, 3, 5, 9]


def test_the_variant_that_depends_least_on_its_context_always_stays() -> None:
    index = filled(*(chunk(n, behind=100 + n, position=n) for n in range(1, MAX_VARIANTS + 1)))
    low = Measured(0.1, (Context(content(7), 16, 0.001),), 15.0)
    assert index.report(chunk(3).key, low)
    for number in range(10, 40):
        index.note(chunk(number, behind=100 + number, position=number))
    assert 3 in keys_of(index, 1)
    assert len(keys_of(index, 1)) == MAX_VARIANTS


def test_of_variants_used_alike_the_one_goes_of_which_most_has_to_be_recomputed() -> None:
    """Cache-Craft's score decides, not age: uses times the share that is kept, 1 - CFO."""
    numbers = range(1, MAX_VARIANTS + 1)
    index = filled(*(chunk(n, behind=100 + n, position=n) for n in numbers))
    for number in numbers:
        mass = 9.0 if number == 4 else 0.1 * number
        index.report(chunk(number).key, Measured(UNMEASURED, (Context(content(7), 16, mass),), 4.0))
    index.recall([Learned(chunk(9).key, 0.6, UNMEASURED, 0.0, 1.0, 1, ())])
    gone = index.note(chunk(9, behind=109, position=9))
    assert gone == chunk(4).key


def test_one_that_began_a_prompt_stays_where_there_is_room_and_gives_way_like_any_other() -> None:
    """It depends on nothing before it, but its first token is an attention sink."""
    index = filled(chunk(1, behind=0, position=0))
    for number in range(10, 10 + MAX_VARIANTS - 1):
        assert index.note(chunk(number, behind=100 + number, position=number)) is None
    facts = index.facts(chunk(1).key)
    assert facts is not None
    assert (facts.impact, facts.parent) == (UNKNOWN_IMPACT, ROOT)
    assert index.note(chunk(30, behind=130, position=30)) == chunk(1).key
    assert 10 in keys_of(index, 1)  # nearest to the beginning of its prompt


def test_contents_beyond_the_limit_are_left_out_and_counted() -> None:
    index = make_content_index(2)
    for number in (1, 2, 3):
        index.note(chunk(number, of=number))
    index.note(chunk(4, of=1, behind=9))
    assert index.counts()[:3] == (2, 3, 1)
    assert index.forget(chunk(2).key)
    index.note(chunk(3, of=3))
    assert keys_of(index, 3) == [3]


def test_reports_are_averaged_and_attention_replaces_guesses() -> None:
    index = filled(chunk(1, behind=9))
    key = chunk(1).key
    context = (Context(content(5), 16, 2.0),)
    index.report(key, Measured(4.0, context, 8.0))
    index.report(key, Measured(8.0, (), 0.0))
    index.report(key, Measured(UNMEASURED, (), 0.0))
    facts = index.facts(key)
    assert facts is not None
    assert facts.deviation == pytest.approx(5.0)
    assert facts.reports == 3
    assert tuple(facts.context) == context
    assert NO_IMPACT < facts.impact < 1.0


def test_what_is_gone_takes_no_report() -> None:
    index = filled(chunk(1))
    assert index.forget(chunk(1).key)
    assert not index.forget(chunk(1).key)
    assert not index.report(chunk(1).key, Measured(1.0, (), 0.0))


Step = tuple[str, int, int]
steps = st.lists(
    st.tuples(st.sampled_from(["note", "forget"]), st.integers(1, 25), st.integers(1, 4)),
    max_size=120,
)


@settings(max_examples=60, deadline=None)
@given(steps, st.integers(1, 4))
def test_it_holds_what_a_dictionary_of_lists_would(steps: Sequence[Step], limit: int) -> None:
    index = make_content_index(limit)
    model: dict[int, list[int]] = {}
    of: dict[int, int] = {}
    for verb, number, wanted in steps:
        key = chunk(number).key
        if verb == "forget":
            assert index.forget(key) == (number in of)
            if number in of:
                model[of[number]].remove(number)
                if not model[of[number]]:
                    del model[of[number]]
                del of[number]
        elif number not in of:
            gone = index.note(chunk(number, of=wanted, behind=99, position=number))
            if wanted not in model and len(model) == limit:
                assert gone is None
                continue
            of[number] = wanted
            model.setdefault(wanted, []).insert(0, number)
            if len(model[wanted]) > MAX_VARIANTS:
                assert gone is not None
                left = int.from_bytes(gone[16:], "big")
                assert left != min(model[wanted])  # the nearest to the start stands in for all
                model[wanted].remove(left)
                del of[left]
            else:
                assert gone is None
        for one in range(1, 5):
            assert keys_of(index, one) == model.get(one, [])
        assert index.counts()[:2] == (len(model), len(of))
