"""A blend against the engine's own prefill, against concatenation, and with damaged parts."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.blend_world import MODELS, SUFFIX, World, distance, make_world

from kvstore.client.blend import engine as engine_module
from kvstore.client.blend.engine import Blender, MemorySource
from kvstore.client.blend.layer_pass import (
    LayerKV,
    RopeSpec,
    place_segments,
    positions_of,
    reads,
    rerotate,
    runs_of,
)
from kvstore.client.blend.plan import BlendPlan, Origin
from kvstore.client.blend.selectors import SELECTORS
from kvstore.client.engines.transformers.blend_adapter import TransformersAdapter
from kvstore.client.engines.transformers.cache import as_argument
from kvstore.proto.errors import InvalidRequestError, TierUnavailableError
from kvstore.proto.types import RopeParameters

NAMES = sorted(SELECTORS)


@pytest.fixture(scope="module")
def world() -> World:
    return make_world()


def adapter_of(world: World) -> TransformersAdapter:
    return TransformersAdapter(world.model)


def rotation_of(world: World) -> RopeSpec:
    found = adapter_of(world).rope[0]
    assert found is not None
    return found


# --- both ends of the ratio


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float64) for name in MODELS), ("llama", torch.float32)],
    ids=str,
)
def test_all_rows_computed_is_the_engines_full_prefill(name: str, dtype: torch.dtype) -> None:
    small = make_world(name, dtype, chunks=(40, 33, 24))
    wanted = small.full_logits()
    found = small.blender.blend(small.plan(1.0), small.source)
    # To the bit; a window is masked by blocks of rows here and at once there.
    bound = 1e-12 if "window" in name else 0.0
    assert distance(found.logits, wanted) <= bound
    assert distance(small.blender.prefill(small.tokens).logits, small.own_logits(0)) <= bound
    assert not found.is_blended
    assert found.report.load_s == 0
    nothing = small.blender.blend(small.plan(0.0), small.source)
    assert distance(nothing.logits, wanted) > 0.1


def test_no_rows_computed_is_the_stored_chunks_moved_and_joined(world: World) -> None:
    found = world.blender.blend(world.plan(0.0), world.source)
    assert found.report.rows == (SUFFIX,) * len(found.report.rows)
    rope = rotation_of(world)
    for index, segment in enumerate(world.segments[1:-1], 1):
        new = torch.arange(segment.start, segment.end)
        old = torch.arange(len(new)) + segment.src_pos
        for layer, (keys, values) in enumerate(found.kv):
            stored_keys, stored_values = world.stored[index][layer]
            span = slice(segment.start, segment.end)
            assert torch.equal(keys[:, span], rerotate(stored_keys, old, new, rope))
            assert torch.equal(values[:, span], stored_values)


def test_the_suffix_reads_joined_chunks_as_the_engine_reads_a_cache(world: World) -> None:
    """The engine's own forward over a cache of the concatenation gives the same logits."""
    from transformers import DynamicCache

    found = world.blender.blend(world.plan(0.0), world.source)
    cache = DynamicCache(config=world.model.config)
    first = len(world.tokens) - SUFFIX
    for layer, (keys, values) in enumerate(found.kv):
        cache.update(keys[None, :, :first], values[None, :, :first], layer)
    with torch.inference_mode():
        suffix = torch.tensor([world.tokens[first:]])
        wanted = world.model(suffix, **as_argument(cache)).logits[0]
    assert distance(found.logits, wanted) <= 1e-12


# --- what follows


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3"])
def test_what_is_decoded_and_scored_behind_a_prefill_is_the_engines_own(name: str) -> None:
    small = make_world(name, chunks=(40, 33, 24))
    prompt = torch.tensor([small.tokens])
    full = small.blender.prefill(small.tokens, logits_from=len(small.tokens) - 1)
    follows, logits = small.blender.decode(small.tokens, full, 6)
    own = small.model.generate(
        prompt, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(prompt)
    )
    assert follows == own[0, len(small.tokens) :].tolist()
    with torch.inference_mode():
        wanted = small.model(torch.tensor([[*small.tokens, *follows]])).logits[0, -7:-1]
    assert distance(logits, wanted) < 1e-11
    assert distance(small.blender.score(small.tokens, full, follows), wanted) < 1e-11
    assert full.kv[0][0].shape[1] == len(small.tokens), "the prompt's own KV is left as it is"


def test_logits_are_those_from_a_position_on(world: World) -> None:
    first = len(world.tokens) - SUFFIX
    found = world.blender.prefill(world.tokens, logits_from=first)
    assert distance(found.logits, world.full_logits()) == 0
    for wrong in (-1, len(world.tokens)):
        with pytest.raises(InvalidRequestError, match="logits_from"):
            world.blender.prefill(world.tokens, logits_from=wrong)


# --- between them


def test_only_as_many_rows_are_computed_as_the_ratio_allows(world: World) -> None:
    allowed = 0.25 * len(world.approx()) + 3  # first_k rounds up in each segment
    for name in NAMES:
        report = world.blender.blend(world.plan(0.25, selector=name), world.source).report
        assert 0 < report.selected.numel() <= allowed
        assert set(report.selected.tolist()) <= set(world.approx())
        assert report.rows[-1] == report.selected.numel() + SUFFIX


def test_hkvd_computes_all_rows_up_to_its_check_layer_and_chooses_by_true_deviation(
    world: World,
) -> None:
    found = world.blender.blend(world.plan(0.15, selector="hkvd"), world.source)
    count = len(world.approx())
    assert found.report.rows[0] == count + SUFFIX
    assert found.report.rows[1] == found.report.selected.numel() + SUFFIX
    full = world.blender.prefill(world.tokens)
    stored = place_segments(
        adapter_of(world), world.plan(), 1, {i: s[1] for i, s in world.stored.items()}
    )
    wanted = (full.kv[1][1] - stored[1]).square().sum((0, 2))
    rows = torch.tensor(world.approx())
    best = rows[torch.argsort(wanted[rows], descending=True)][: found.report.selected.numel()]
    assert set(best.tolist()) == set(found.report.selected.tolist())
    assert found.report.deviation is not None
    assert found.report.deviation[rows] == pytest.approx(wanted[rows], rel=1e-4)


def test_rows_computed_before_any_stale_one_are_exact(world: World) -> None:
    """With the first chunk computed whole, its rows are those of the full prefill."""
    segments = list(world.segments)
    segments[1] = replace(segments[1], ratio=0.999999)
    plan = BlendPlan(world.tokens, tuple(segments), ratio=0.0, selector="first_k")
    found, full = world.blender.blend(plan, world.source), world.blender.prefill(world.tokens)
    span = slice(segments[1].start, segments[1].end)
    for (_, got), (_, wanted) in zip(found.kv, full.kv, strict=True):
        assert distance(got[:, span], wanted[:, span]) < 1e-11


def test_gaps_are_computed_and_not_charged_to_the_ratio() -> None:
    gap = make_world(kinds=("approx", "miss", "approx"))
    for name in NAMES:
        found = gap.blender.blend(gap.plan(0.01, selector=name), gap.source)
        assert found.report.rows[-1] == 40 + SUFFIX + found.report.selected.numel()
        assert found.report.selected.numel() <= 2
        assert not found.report.failure


def test_a_source_is_told_rows_that_are_known_before_it_brings_any(world: World) -> None:
    class Listening(MemorySource):
        def narrow(self, rows: Sequence[int]) -> None:
            events.append(set(rows))

        def layer(self, i: int) -> Mapping[int, LayerKV]:
            events.append(i)
            return super().layer(i)

    suffix = set(range(len(world.tokens) - SUFFIX, len(world.tokens)))
    for name in NAMES:
        events: list[int | set[int]] = []
        found = world.blender.blend(world.plan(0.2, selector=name), Listening(world.stored))
        computed = set(found.report.selected.tolist()) | suffix
        told = [computed] if name in ("first_k", "stored_priority") else []
        assert events[: len(told)] == told
        assert all(isinstance(event, int) for event in events[len(told) :])


def test_rows_that_were_left_out_are_never_read(world: World) -> None:
    """Whatever stands in rows that are computed, the result is the same."""
    first = world.blender.blend(world.plan(0.2, selector="first_k"), world.source)
    damaged = {i: [(k.clone(), v.clone()) for k, v in kv] for i, kv in world.stored.items()}
    for index, segment in enumerate(world.segments[1:-1], 1):
        is_inside = (first.report.selected >= segment.start) & (first.report.selected < segment.end)
        rows = first.report.selected[is_inside] - segment.start
        for keys, values in damaged[index]:
            keys[:, rows], values[:, rows] = torch.nan, torch.nan
    again = world.blender.blend(world.plan(0.2, selector="first_k"), MemorySource(damaged))
    assert torch.equal(first.logits, again.logits)


# --- the mask


@pytest.mark.parametrize("window", [None, 5])
def test_runs_as_sequences_of_their_own_are_the_mask_by_position(window: int | None) -> None:
    generator = torch.Generator().manual_seed(2)
    rows = (torch.rand(90, generator=generator) < 0.4).nonzero().flatten()
    runs = runs_of(rows)
    assert positions_of(runs).tolist() == rows.tolist()
    for start, end in runs:
        aligned = torch.ones(end - start, end, dtype=torch.bool).tril(start)  # bottom right
        if window is not None:
            aligned &= ~torch.ones_like(aligned).tril(start - window)
        assert torch.equal(reads(torch.arange(start, end), 0, end, window), aligned)
    assert runs_of(torch.empty(0, dtype=torch.int64)) == []


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_attention_by_runs_is_attention_by_one_mask(name: str) -> None:
    small = make_world(name)
    adapter, generator = adapter_of(small), torch.Generator().manual_seed(3)
    rows = (torch.rand(400, generator=generator) < 0.6).nonzero().flatten()
    shape = (adapter.kv_heads, 400, adapter.head_dim)
    kv = (
        torch.randn(shape, generator=generator, dtype=torch.float64),
        torch.randn(shape, generator=generator, dtype=torch.float64),
    )
    query = torch.randn(4, len(rows), 16, generator=generator, dtype=torch.float64)
    found = adapter.attend(0, query, runs_of(rows), kv)
    keys, values = (part.repeat_interleave(2, 0) for part in kv)
    scores = query @ keys.mT / 4.0
    mask = reads(rows, 0, 400, adapter.window[0])
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    assert distance(found, (weights @ values).transpose(0, 1).flatten(1)) < 1e-12
    assert distance(adapter.attention_mass(0, query, rows, kv), weights.sum(0).mean(0)) < 1e-12


# --- negative controls


def test_what_is_damaged_is_seen_wherever_it_is_loaded_and_nowhere_else(world: World) -> None:
    """Of a chunk below a ratio of 1, of the prefix also where it is loaded alone."""
    prefix = world.plan(0.15).without("approx")
    chosen = world.plan(0.15, selector="first_k")
    for index, plan, is_seen in (
        (2, chosen, True), (2, world.plan(1.0), False), (2, prefix, False),
        (0, world.plan(0.9), True), (0, prefix, True), (0, world.plan(1.0), False),
    ):  # fmt: skip
        damaged = {i: [(k, v.clone()) for k, v in kv] for i, kv in world.stored.items()}
        damaged[index][3][1].add_(1.0)
        found = world.blender.blend(plan, MemorySource(damaged)).logits
        wanted = world.blender.blend(plan, world.source).logits
        assert (distance(found, wanted) > 1e-3) == is_seen


def test_a_prefix_alone_is_the_engines_own_behind_it(world: World) -> None:
    found = world.blender.blend(world.plan(0.15).without("approx"), world.source)
    assert not found.is_blended
    assert found.report.rows[0] == len(world.tokens) - len(world.segments[0])
    assert distance(found.logits, world.full_logits()) <= 1e-12


# --- what is refused, and what fails


def test_a_segment_of_another_origin_is_computed_and_the_report_says_why(world: World) -> None:
    segments = list(world.segments)
    for origin, refused in (
        (Origin(RopeParameters(5e5, 16)), {2: "another rotation"}),
        (Origin(RopeParameters(1e4, 16, "linear", (("factor", 2.0),))), {2: "another rotation"}),
        (Origin(RopeParameters(1e4, 16), "blake3:of a LoRA"), {2: "another adapter"}),
        (adapter_of(world).origin, {}),
    ):
        segments[2] = replace(segments[2], origin=origin)
        plan = BlendPlan(world.tokens, tuple(segments), ratio=0.0)
        report = world.blender.blend(plan, world.source).report
        assert report.refused == refused
        assert report.rows[0] == SUFFIX + len(segments[2]) * len(refused)


class _Failing(MemorySource):
    """Gives layers up to one, and then does what it is told."""

    def __init__(self, world: World, change: Any) -> None:
        super().__init__(world.stored)
        self._change = change

    def layer(self, i: int) -> Mapping[int, LayerKV]:
        found = dict(super().layer(i))
        return found if i < 2 else dict(self._change(found))


def _evicted(found: dict[int, LayerKV]) -> dict[int, LayerKV]:
    raise TierUnavailableError("redis", "gone")


def _left_out(found: dict[int, LayerKV]) -> dict[int, LayerKV]:
    return {index: kv for index, kv in found.items() if index != 2}


def _truncated(found: dict[int, LayerKV]) -> dict[int, LayerKV]:
    keys, values = found[2]
    return {**found, 2: (keys[:, :-1], values[:, :-1])}


def _narrower(found: dict[int, LayerKV]) -> dict[int, LayerKV]:
    keys, values = found[2]
    return {**found, 2: (keys.float(), values.float())}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("first_k", _evicted), ("hkvd", _evicted), ("hybrid", _evicted), ("hkvd", _left_out),
        ("stored_priority", _truncated), ("query_attention", _narrower),
    ],
)  # fmt: skip
def test_a_source_that_fails_on_the_way_costs_time_and_nothing_else(
    world: World, name: str, change: Any
) -> None:
    found = world.blender.blend(world.plan(0.2, selector=name), _Failing(world, change))
    assert found.report.failure
    assert not found.is_blended
    assert found.report.selected.numel() == 0
    assert distance(found.logits, world.full_logits()) < 1e-12


def test_a_layer_that_does_not_come_is_not_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuck(MemorySource):
        def layer(self, i: int) -> Mapping[int, LayerKV]:
            if i == 1:
                released.wait(60)
            return super().layer(i)

    released = threading.Event()
    monkeypatch.setattr(engine_module, "LAYER_WAIT_S", 0.2)
    found = world.blender.blend(world.plan(0.2), Stuck(world.stored))
    released.set()
    assert "DeadlineError" in found.report.failure
    assert distance(found.logits, world.full_logits()) < 1e-12


def test_a_layer_is_loaded_while_the_one_before_it_is_computed(world: World) -> None:
    """Layer 1 arrives only once layer 0 was embedded and asked for: neither waits for both."""

    class Handing(MemorySource):
        def layer(self, i: int) -> Mapping[int, LayerKV]:
            if i == 1:
                assert is_computing.wait(60)
                overlapped.set()
            return super().layer(i)

    class Watched(TransformersAdapter):
        def qkv(self, layer: int, hidden: Any, positions: Any) -> Any:
            if layer == 0:
                is_computing.set()
                assert overlapped.wait(60)
            return super().qkv(layer, hidden, positions)

    is_computing, overlapped = threading.Event(), threading.Event()
    blender = Blender(Watched(world.model))
    found = blender.blend(world.plan(0.2, selector="first_k"), Handing(world.stored))
    assert not found.report.failure


def test_a_defect_of_the_engine_is_not_taken_for_one_of_the_store(world: World) -> None:
    class Broken(TransformersAdapter):
        def post(self, layer: int, hidden: Any, attention: Any) -> Any:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        Blender(Broken(world.model)).blend(world.plan(0.2), world.source)
