"""Blending out of a real server, what it is told of attention, and the gate over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers.blend_world import LAYERS, STORED, make_model, random_tokens
from helpers.local_server import LocalServer

from kvstore.client import Client
from kvstore.client.blend.cost import Action, BlendPlanner, Decision, Speed, Work
from kvstore.client.blend.engine import Blender, BlendResult, MemorySource
from kvstore.client.blend.gate import SHADOW_TOKENS, GuardedBlender, compare
from kvstore.client.blend.layer_pass import EngineAdapter
from kvstore.client.blend.plan import BlendPlan, NamedChunk, SegmentRange, name_segments
from kvstore.client.blend.store import MAX_CONTEXT, StoreSource, measured_prefill, store_prefill
from kvstore.client.engines.transformers.blend_adapter import TransformersAdapter
from kvstore.client.options import TransportName
from kvstore.client.planning import LinkMeter
from kvstore.client.segments import SegmentMatch, SegmentQuery
from kvstore.proto.blend import ChunkReport, ReuseReport, ShadowResult
from kvstore.proto.errors import ModelError
from kvstore.proto.types import LayerKind, PutOutcome
from kvstore.server.blending.gates import TRIALS

TRIAL = SegmentQuery(is_trial=True)
HEAD, SUFFIX = 20, 9


FIRST, SECOND = random_tokens(1, 48), random_tokens(2, 40)


def _prompt(seed: int, *documents: list[int]) -> tuple[list[int], list[SegmentRange]]:
    prompt, ranges = random_tokens(seed, HEAD), []
    for document in documents:
        ranges.append(SegmentRange(len(prompt), len(prompt) + len(document)))
        prompt += document
    return prompt + random_tokens(seed + 1, SUFFIX), ranges


def _far(found: BlendResult, wanted: BlendResult) -> float:
    """The largest difference of their suffixes' logits."""
    return float((found.logits[-SUFFIX:] - wanted.logits[-SUFFIX:]).abs().max())


def _open_gate(client: Client) -> None:
    good = ShadowResult(0.0, 1.0, 64)
    for _ in range(TRIALS):
        gate = client.report_reuse(ReuseReport(ratio=0.3, shadow=good))
    assert gate.is_open


def _without_shadow(resolved: SegmentMatch) -> SegmentMatch:
    """The same answer for a request that is not compared."""
    resolved.found = replace(resolved.found, is_shadow=False)
    return resolved


def _store(client: Client, blender: Blender, seed: int, *documents: list[int]) -> None:
    prompt, ranges = _prompt(seed, *documents)
    puts = store_prefill(client, blender.prefill(prompt), prompt, ranges)
    assert {put.outcome for put in puts} == {PutOutcome.stored}


def _resolve(client: Client, seed: int, *documents: list[int]) -> tuple[SegmentMatch, list[int]]:
    prompt, ranges = _prompt(seed, *documents)
    return client.find_segments(prompt, ranges, TRIAL), prompt


def _at_hand(blender: Blender) -> MemorySource:
    """What ``_store(client, blender, 10, FIRST, SECOND)`` leaves, for the two in other order."""
    stored = blender.prefill(_prompt(10, FIRST, SECOND)[0]).kv
    spans = {1: (68, 108), 2: (20, 68)}
    return MemorySource(
        {at: [(k[:, a:b], v[:, a:b]) for k, v in stored] for at, (a, b) in spans.items()}
    )


def test_a_document_is_one_segment_of_the_plan_where_it_stood_in_one_piece(
    client: Client, blender: Blender
) -> None:
    _store(client, blender, 10, FIRST, SECOND)
    resolved, prompt = _resolve(client, 20, SECOND, FIRST)
    with resolved, StoreSource(resolved, prompt, client.model) as source:
        found = [(one.start, one.end, one.kind, one.src_pos) for one in source.plan.segments]
        assert found == [
            (0, 20, "miss", 0),
            (20, 60, "approx", 68),
            (60, 108, "approx", 20),
            (108, 117, "miss", 0),
        ]
        assert source.loaded_bytes > 88 * LAYERS * 2 * 2 * 16 * 4


def test_blending_from_the_store_is_blending_from_memory(client: Client, blender: Blender) -> None:
    _store(client, blender, 10, FIRST, SECOND)
    resolved, prompt = _resolve(client, 20, SECOND, FIRST)
    with resolved, StoreSource(resolved, prompt, client.model) as source:
        plan = replace(source.plan, selector="hkvd")
        got, wanted = blender.blend(plan, source), blender.blend(plan, _at_hand(blender))
        whole = blender.blend(plan.with_ratio(1.0), source)
    assert _far(whole, blender.prefill(prompt)) <= 1e-5
    assert got.is_blended
    assert torch.equal(got.logits, wanted.logits)
    assert torch.equal(got.report.selected, wanted.report.selected)


@pytest.mark.parametrize("transport", ["shm", "grpc", "tcp"])
def test_rows_that_are_chosen_beforehand_are_not_loaded(
    make_server: Callable[..., LocalServer], blender: Blender, transport: TransportName
) -> None:
    server = make_server("--bulk", "127.0.0.1:0")
    client = server.connect(transport, STORED)
    _store(client, blender, 10, FIRST, SECOND)
    _open_gate(client)
    prompt, ranges = _prompt(20, SECOND, FIRST)
    found = {}
    for selector in ("hkvd", "first_k"):
        with client.find_segments(prompt, ranges) as resolved:
            resolved = _without_shadow(resolved)
            before = server.counter("get_bytes")
            with StoreSource(resolved, prompt, client.model) as source:
                plan = replace(source.plan, selector=selector).with_ratio(0.5)
                result = blender.blend(plan, source)
                assert result.is_blended, result.report.failure
                sent = server.counter("get_bytes") - before
                found[selector] = (sent, source.loaded_bytes, len(source.left_out), result)
    whole, cut = found["hkvd"], found["first_k"]
    assert (whole[2], cut[2]) == (0, 44 + HEAD + SUFFIX)
    row_bytes, cut_chunks = LAYERS * 2 * 2 * 16 * 4, 4
    if transport != "shm":
        assert whole[0] - cut[0] == 44 * row_bytes - 8 * LAYERS * cut_chunks
    assert 0.8 < (whole[1] - cut[1]) / (44 * row_bytes) < 1.6  # headers are shared out, too
    assert torch.equal(cut[3].logits, blender.blend(plan, _at_hand(blender)).logits)


def test_the_last_chunk_of_a_prompt_is_computed_though_it_is_there(
    client: Client, blender: Blender
) -> None:
    prompt = random_tokens(5, 48)
    store_prefill(client, blender.prefill(prompt), prompt, [])
    with client.find_segments(prompt, []) as resolved:
        assert resolved.found.exact_prefix == 3
        source = StoreSource(resolved, prompt, client.model)
        assert [(one.start, one.kind) for one in source.plan.segments] == [
            (0, "exact"),
            (32, "miss"),
        ]


def test_a_server_that_is_gone_costs_time_and_nothing_else(
    server: LocalServer, client: Client, blender: Blender
) -> None:
    _store(client, blender, 10, FIRST)
    server.stop()
    prompt, ranges = _prompt(20, FIRST)
    found = GuardedBlender(client, blender, TRIAL).run(prompt, ranges)
    assert found.failure
    wanted = blender.prefill(prompt, logits_from=len(prompt) - SUFFIX).logits
    assert torch.equal(found.result.logits, wanted)


def test_models_with_other_layers_are_refused(client: Client, blender: Blender) -> None:
    resolved, prompt = _resolve(client, 20, FIRST)
    latent = replace(client.model.layer_groups[0], kind=LayerKind.mla)
    with resolved, pytest.raises(ModelError, match="layer_groups"):
        StoreSource(resolved, prompt, replace(client.model, layer_groups=(latent,)))


def test_trials_answer_from_the_full_prefill_and_teach_the_store(
    client: Client, blender: Blender
) -> None:
    _store(client, blender, 10, FIRST, SECOND)
    prompt, ranges = _prompt(20, SECOND, FIRST)
    # first_k narrows, and is not heard: what was left out could not be measured.
    gated = GuardedBlender(client, blender, TRIAL, selector="first_k", planner=Deciding("full"))
    done = gated.run(prompt, ranges)
    assert (done.failure, done.decision) == ("", None), "it is compared whatever it costs"
    assert done.shadow is not None
    assert done.gate is not None
    assert done.gate.shadows == 1
    assert done.gate.speedup > 0
    first = len(prompt) - SUFFIX
    assert torch.equal(done.result.logits, blender.prefill(prompt, logits_from=first).logits)
    with client.find_segments(prompt, ranges, TRIAL) as resolved:
        found = list(resolved.chunks())
        assert all(len(one.priority) == one.wanted.tokens for one in found)
        assert all(one.best.deviation > 0 for one in found)
        assert sum(one.best.reports for one in found) == len(found)


def test_what_is_told_is_the_worse_of_the_question_and_of_what_follows_it(
    client: Client, blender: Blender
) -> None:
    _store(client, blender, 10, FIRST, SECOND)
    prompt, ranges = _prompt(20, SECOND, FIRST)
    resolved, _ = _resolve(client, 20, SECOND, FIRST)
    with resolved, StoreSource(resolved, prompt, client.model) as source:
        blended = blender.blend(replace(source.plan, selector="first_k"), source)
    full = blender.prefill(prompt)
    follows, wanted = blender.decode(prompt, full, SHADOW_TOKENS)
    question = compare(full.logits[-SUFFIX:], blended.logits)
    answer = compare(wanted, blender.score(prompt, blended, follows))
    done = GuardedBlender(client, blender, TRIAL, selector="first_k").run(prompt, ranges)
    assert done.shadow is not None
    assert done.shadow.tokens == SUFFIX + SHADOW_TOKENS
    assert question.divergence != pytest.approx(answer.divergence, rel=0.01)
    assert done.shadow.divergence == pytest.approx(max(question.divergence, answer.divergence))
    assert done.gate is not None
    assert done.gate.divergence == pytest.approx(done.shadow.divergence)
    assert done.gate.agreement == pytest.approx(done.shadow.agreement)


class Deciding(BlendPlanner):
    """Has measured both ways, unless told otherwise, and decides as it is told to."""

    def __init__(self, action: Action, *, is_new: bool = False) -> None:
        super().__init__(LAYERS, Speed(0.0, 0.0, 1e-4, 1e-9), LinkMeter(1e9))
        self.action: Action = action
        for meter in () if is_new else (self.full, self.blend):
            meter.observe(Work.of([100], 100, 0), 1.0)

    def choose(
        self, plan: BlendPlan, token_bytes: float, *, can_skip_rows: bool = False
    ) -> Decision:
        assert token_bytes > 2 * LAYERS * 2 * 16 * 4  # heads, head_dim, bytes, and a frame's own
        assert can_skip_rows, "frames are raw"
        return Decision(self.action, 0.5, 1.0, 2.0)

    def wait_s(self, tokens: int, size_bytes: int) -> float:
        return 60.0


@pytest.fixture
def unwatched(
    client: Client, blender: Blender, monkeypatch: pytest.MonkeyPatch
) -> tuple[Client, list[int], list[SegmentRange]]:
    """A client whose gate is open and whose requests are not compared, and a prompt."""
    _store(client, blender, 10, FIRST, SECOND)
    _open_gate(client)
    find = client.find_segments
    monkeypatch.setattr(
        client, "find_segments", lambda *given: _without_shadow(find(*given)), raising=True
    )
    return client, *_prompt(20, SECOND, FIRST)


def test_a_prompt_that_is_not_worth_blending_is_computed_and_nothing_loaded(
    unwatched: tuple[Client, list[int], list[SegmentRange]], blender: Blender, server: LocalServer
) -> None:
    client, prompt, ranges = unwatched
    before = server.counter("get_bytes")
    done = GuardedBlender(client, blender, planner=Deciding("full")).run(prompt, ranges)
    assert done.decision is not None
    assert done.decision.action == "full"
    assert server.counter("get_bytes") == before
    assert server.settled().leases == 0
    assert torch.equal(done.result.logits, blender.prefill(prompt).logits[-SUFFIX:])


def test_a_prompt_that_is_worth_it_is_blended_at_the_ratio_that_was_decided(
    unwatched: tuple[Client, list[int], list[SegmentRange]], blender: Blender
) -> None:
    client, prompt, ranges = unwatched
    done = GuardedBlender(client, blender, planner=Deciding("blend")).run(prompt, ranges)
    assert done.failure == done.result.report.failure == ""
    assert done.result.is_blended
    assert done.plan is not None
    assert done.plan.ratio == 0.5
    assert done.result.report.selected.numel() == 44  # of 88


def test_nothing_is_decided_by_speeds_that_nobody_measured(
    unwatched: tuple[Client, list[int], list[SegmentRange]], blender: Blender
) -> None:
    """A full prefill is measured first, then a blend; both are then weighed."""
    client, prompt, ranges = unwatched
    gated = GuardedBlender(client, blender, planner=Deciding("full", is_new=True))
    first = gated.run(prompt, ranges)
    assert first.decision is not None
    assert first.decision.action == "full"
    assert not first.result.is_blended
    second = gated.run(prompt, ranges)
    assert second.decision is None
    assert second.result.is_blended
    assert gated.run(prompt, ranges).decision == Decision("full", 0.5, 1.0, 2.0)


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


def test_no_more_context_is_told_than_is_taken_and_a_content_that_stands_twice_once(
    adapter: EngineAdapter,
) -> None:
    once = random_tokens(3, 16)
    for prompt in (random_tokens(2, 20 * 16 + 5), once + once + random_tokens(4, 16)):
        chunks = list(name_segments(prompt, [], 16)[0].chunks)
        _, report = measured_prefill(adapter, prompt, chunks)
        told = [mass.content for mass in report.chunks[-1].context]
        assert len(told) == (1 if prompt[:16] == once else MAX_CONTEXT)
        assert told[-1] == (chunks[0] if prompt[:16] == once else chunks[-2]).content


@pytest.mark.parametrize("mass", [torch.nan, torch.inf, -1.0])
def test_weights_that_are_no_numbers_are_told_to_nobody(mass: float) -> None:
    class Broken(TransformersAdapter):
        def attention_mass(self, *args: object) -> torch.Tensor:
            return torch.full((len(PROMPT),), mass)

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
