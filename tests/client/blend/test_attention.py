"""What chunks attended to, as it is measured beside a prefill and as the store is told of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.blend_world import make_model, random_tokens
from helpers.local_server import LocalServer

from kvstore.client import Client
from kvstore.client.blend.engine import Blender
from kvstore.client.blend.layer_pass import EngineAdapter
from kvstore.client.blend.plan import NamedChunk, SegmentRange, name_segments
from kvstore.client.blend.store import MAX_CONTEXT, measured_prefill, store_prefill
from kvstore.client.engines.transformers.blend_adapter import TransformersAdapter
from kvstore.client.segments import SegmentQuery
from kvstore.proto.blend import ChunkReport

RANGES = [SegmentRange(16, 64), SegmentRange(64, 104)]
PROMPT = random_tokens(1, 120)


@pytest.fixture
def adapter(blender: Blender) -> EngineAdapter:
    return blender.adapter


def chunks_of(tokens: list[int], size: int = 16) -> list[NamedChunk]:
    segments = name_segments(tokens, RANGES, size)
    return [one for segment in segments for one in segment.chunks]


def weights_of(adapter: EngineAdapter) -> torch.Tensor:
    """The model's own attention, (tokens, tokens): mean over its layers and heads."""
    model = adapter._model  # type: ignore[attr-defined]
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        found = model(torch.tensor([PROMPT]), output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return torch.stack(found)[:, 0].mean((0, 1))


def test_masses_are_the_sums_of_the_models_own_weights(adapter: EngineAdapter) -> None:
    chunks = chunks_of(PROMPT)
    result, report = measured_prefill(adapter, PROMPT, chunks, rows=len(PROMPT))
    weights = weights_of(adapter)
    assert [row.digest for row in report.chunks] == [one.digest for one in chunks]
    for number, (one, row) in enumerate(zip(chunks, report.chunks, strict=True)):
        rows = weights[one.start : one.stop]
        assert len(row.context) == number
        for mass, before in zip(row.context, chunks, strict=False):
            wanted = float(rows[:, before.start : before.stop].sum())
            assert mass.mass == pytest.approx(wanted, rel=1e-3, abs=1e-4)
            assert (mass.content, mass.tokens) == (before.content, before.tokens)
        own = float(rows[:, one.start : one.stop].sum())
        assert row.intra_mass == pytest.approx(own, rel=1e-3)
    wanted_logits = Blender(adapter).prefill(PROMPT).logits
    assert torch.equal(result.logits, wanted_logits)


def test_a_few_rows_say_about_the_same(adapter: EngineAdapter) -> None:
    chunks = chunks_of(PROMPT)
    _, every = measured_prefill(adapter, PROMPT, chunks, rows=len(PROMPT))
    _, some = measured_prefill(adapter, PROMPT, chunks)
    for chunk, one, other in zip(chunks, every.chunks, some.chunks, strict=True):
        assert abs(one.intra_mass - other.intra_mass) < 0.2 * chunk.tokens
        whole = other.intra_mass + sum(mass.mass for mass in other.context)
        assert 0 < whole <= 1.001 * chunk.tokens


def test_no_more_context_is_told_than_is_taken(adapter: EngineAdapter) -> None:
    prompt = random_tokens(2, 20 * 16 + 5)
    chunks = list(name_segments(prompt, [], 16)[0].chunks)
    _, report = measured_prefill(adapter, prompt, chunks)
    assert len(report.chunks[-1].context) == MAX_CONTEXT
    assert report.chunks[-1].context[-1].content == chunks[-2].content


def test_a_content_that_stands_twice_is_told_once(adapter: EngineAdapter) -> None:
    once = random_tokens(3, 16)
    prompt = once + once + random_tokens(4, 16)
    chunks = list(name_segments(prompt, [], 16)[0].chunks)
    _, report = measured_prefill(adapter, prompt, chunks)
    assert [mass.content for mass in report.chunks[2].context] == [chunks[0].content]


def test_weights_that_are_no_numbers_are_told_to_nobody(adapter: EngineAdapter) -> None:
    class Broken(TransformersAdapter):
        def attention_mass(self, *args: object) -> torch.Tensor:
            return torch.full((len(PROMPT),), torch.nan)

    broken = Broken(make_model("llama", torch.float32))
    assert not measured_prefill(broken, PROMPT, chunks_of(PROMPT))[1].chunks


# --- told to a store


def _elsewhere() -> tuple[list[int], list[SegmentRange]]:
    prompt = [*random_tokens(7, 32), *PROMPT[64:104], *PROMPT[16:64], *random_tokens(8, 9)]
    return prompt, [SegmentRange(32, 72), SegmentRange(72, 120)]


def test_variants_are_scored_by_what_they_were_seen_to_attend_to(
    client: Client, adapter: EngineAdapter
) -> None:
    result, seen = measured_prefill(adapter, PROMPT, chunks_of(PROMPT))
    store_prefill(client, result, PROMPT, RANGES, attention=seen)
    sizes = {bytes(one.digest): one.tokens for one in chunks_of(PROMPT)}
    impacts = {row.digest: _impact(row, sizes[row.digest]) for row in seen.chunks}
    with client.find_segments(*_elsewhere(), SegmentQuery(is_trial=True)) as resolved:
        found = list(resolved.chunks())
        assert len(found) == 5
        for one in found:
            assert one.best.reports == 1
            assert 0.5 < one.best.context_impact < 1
            assert one.best.context_impact == pytest.approx(impacts[one.best.digest], abs=1e-3)


def _impact(one: ChunkReport, size: int) -> float:
    """Equations 9 to 11, written down again."""
    outer = sum(mass.mass / (size * mass.tokens) for mass in one.context)
    return float(torch.sigmoid(torch.tensor(outer / (one.intra_mass / size**2))))


def test_a_store_that_will_not_hear_of_it_has_the_chunks_all_the_same(
    server: LocalServer, client: Client, adapter: EngineAdapter
) -> None:
    result, seen = measured_prefill(adapter, PROMPT, chunks_of(PROMPT))
    first, second, *rest = seen.chunks
    seen = replace(seen, chunks=(first, replace(second, intra_mass=1e6), *rest))
    puts = store_prefill(client, result, PROMPT, RANGES, attention=seen)
    assert {put.outcome.name for put in puts} == {"stored"}
    assert server.counter("blend_refused_reports") == 1
    with client.find_segments(*_elsewhere(), SegmentQuery(is_trial=True)) as resolved:
        assert all(one.best.reports == 0 for one in resolved.chunks())
