"""A blend against the engine's own prefill, against concatenation, and with damaged parts."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.blend_world import (
    LLAMA3,
    MODELS,
    SUFFIX,
    YARN,
    World,
    distance,
    make_model,
    make_world,
)
from helpers.torch_engine import greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from kvstore.client.blend.engine import MAX_SINKS, Blender, MemorySource
from kvstore.client.blend.layer_pass import LayerKV, RopeSpec, place_segments, reads, rerotate
from kvstore.client.blend.plan import BlendPlan, Origin, Segment
from kvstore.client.blend.selectors import SELECTORS, computed_rows, sink_rows
from kvstore.client.engines.transformers.blend_adapter import BlendedCache, TransformersAdapter
from kvstore.client.engines.transformers.cache import as_argument
from kvstore.proto.errors import InvalidRequestError, ModelError, TierUnavailableError
from kvstore.proto.hf_config import rope_parameters
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
    for wrong in (-1, len(small.tokens)):
        with pytest.raises(InvalidRequestError, match="logits_from"):
            small.blender.prefill(small.tokens, logits_from=wrong)


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


def test_gaps_are_computed_and_not_charged_to_the_ratio() -> None:
    gap = make_world(kinds=("approx", "miss", "approx"))
    for name in NAMES:
        found = gap.blender.blend(gap.plan(0.01, selector=name), gap.source)
        assert found.report.rows[-1] == 40 + SUFFIX + found.report.selected.numel()
        assert found.report.selected.numel() <= 2
        assert not found.report.failure


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


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
@pytest.mark.parametrize("head", [0, 20, 100, 400])
def test_attention_by_blocks_is_attention_by_one_mask(name: str, head: int) -> None:
    """Of scattered rows, behind *head* without a gap."""
    small = make_world(name)
    adapter, generator = adapter_of(small), torch.Generator().manual_seed(3)
    is_computed = torch.rand(400, generator=generator) < 0.6
    is_computed[:head] = True
    rows = is_computed.nonzero().flatten()
    shape = (adapter.kv_heads, 400, adapter.head_dim)
    kv = (
        torch.randn(shape, generator=generator, dtype=torch.float64),
        torch.randn(shape, generator=generator, dtype=torch.float64),
    )
    query = torch.randn(4, len(rows), 16, generator=generator, dtype=torch.float64)
    found = adapter.attend(0, query, rows, kv)
    keys, values = (part.repeat_interleave(2, 0) for part in kv)
    scores = query @ keys.mT / 4.0
    mask = reads(rows, 0, 400, adapter.window[0])
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    assert distance(found, (weights @ values).transpose(0, 1).flatten(1)) < 1e-12
    assert distance(adapter.attention_mass(0, query, rows, kv), weights.sum(0).mean(0)) < 1e-12


# --- prompts without a prefix, whose first tokens are attention sinks


@pytest.fixture(scope="module")
def swapped(world: World) -> tuple[BlendPlan, MemorySource]:
    """Two chunks in the other order, stored out of a prompt that they began."""
    first, second = world.tokens[16:64], world.tokens[64:104]
    stored = world.blender.prefill((*first, *second)).kv
    spans = enumerate([(48, 88), (0, 48)])
    source = MemorySource({at: [(k[:, a:b], v[:, a:b]) for k, v in stored] for at, (a, b) in spans})
    tokens = (*second, *first, *world.tokens[-SUFFIX:])
    segments = (
        Segment(0, 40, "approx", src_pos=48),
        Segment(40, 88, "approx", src_pos=0),
        Segment(88, len(tokens), "miss"),
    )
    return BlendPlan(tokens, segments), source


@pytest.mark.parametrize(
    ("name", "sinks"),
    [("hkvd", 1), ("query_attention", 2), ("hybrid", MAX_SINKS), ("first_k", MAX_SINKS)],
)
def test_the_first_rows_are_computed_at_every_ratio_as_a_full_prefill_computes_them(
    world: World, swapped: tuple[BlendPlan, MemorySource], name: str, sinks: int
) -> None:
    plan, source = swapped
    full = world.blender.prefill(plan.tokens)
    for ratio in (0.0, 0.3):
        tried = replace(plan, selector=name, ratio=ratio)
        found = Blender(adapter_of(world), sinks=sinks).blend(tried, source)
        assert not found.report.failure
        assert set(range(sinks)) <= set(found.report.selected.tolist())
        for kv, wanted in zip(found.kv, full.kv, strict=True):
            for part, other in zip(kv, wanted, strict=True):
                torch.testing.assert_close(part[:, :sinks], other[:, :sinks])


def test_a_chunk_that_began_its_prompt_has_its_own_sinks_computed(
    world: World, swapped: tuple[BlendPlan, MemorySource]
) -> None:
    """Where rows are chosen at all, though none of its own are."""
    plan, source = swapped
    first, second, question = plan.segments
    for src_pos, count in ((0, 2), (1, 1), (2, 0)):
        second = replace(second, src_pos=src_pos, ratio=0.0)
        for ratio, wanted in ((0.0, 0), (0.3, count)):
            tried = replace(plan, segments=(first, second, question), ratio=ratio)
            found = Blender(adapter_of(world), sinks=2).blend(tried, source)
            own = [row for row in found.report.selected.tolist() if row >= second.start]
            assert own == list(range(second.start, second.start + wanted))


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


def _evicted(_: object) -> dict[int, LayerKV]:
    raise TierUnavailableError("redis", "gone")


CHANGES: dict[str, Callable[[dict[int, Any]], dict[int, Any]]] = {
    "evicted": _evicted,
    "left out": lambda found: {index: kv for index, kv in found.items() if index != 2},
    "truncated": lambda found: {**found, 2: tuple(part[:, :-1] for part in found[2])},
    "of another type": lambda found: {**found, 2: tuple(part.float() for part in found[2])},
}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("first_k", "evicted"), ("hkvd", "evicted"), ("hybrid", "evicted"), ("hkvd", "left out"),
        ("stored_priority", "truncated"), ("query_attention", "of another type"),
    ],
)  # fmt: skip
def test_a_source_that_fails_on_the_way_costs_time_and_nothing_else(
    world: World, name: str, change: str
) -> None:
    class Failing(MemorySource):
        def layer(self, i: int) -> Mapping[int, LayerKV]:
            found = super().layer(i)
            return found if i < 2 else CHANGES[change](dict(found))

    found = world.blender.blend(world.plan(0.2, selector=name), Failing(world.stored))
    assert found.report.failure
    assert not found.is_blended
    assert found.report.selected.numel() == 0
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


HEAD_DIM = 64


def named(scaling: str, **factors: float) -> RopeParameters:
    return RopeParameters(1e4, HEAD_DIM, scaling, tuple(sorted(factors.items())))


def factors_of(settings: dict[str, object]) -> dict[str, float]:
    return {k: float(str(v)) for k, v in settings.items() if k not in ("rope_type", "rope_theta")}


FAMILIES = {
    "default": named("default"),
    "linear": named("linear", factor=4.0),
    "ntk": named("ntk", factor=4.0),
    "yarn": named("yarn", **factors_of(YARN)),
    "llama3": named("llama3", **factors_of(LLAMA3)),
    "partial": RopeParameters(1e4, 24),
}


def spec(name: str) -> RopeSpec:
    found = RopeSpec.of(FAMILIES[name], HEAD_DIM)
    assert found is not None
    return found


def some_keys(tokens: int = 32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, tokens, HEAD_DIM, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(
    name=st.sampled_from(sorted(FAMILIES)),
    seed=st.integers(0, 1 << 30),
    old=st.integers(0, 1 << 20),
    new=st.integers(0, 1 << 20),
)
@settings(max_examples=30, deadline=None)
def test_the_error_is_at_most_two_units_in_the_last_place(
    dtype: torch.dtype, name: str, seed: int, old: int, new: int
) -> None:
    rope = spec(name)
    stored = some_keys(3, seed).to(dtype)
    places = torch.arange(3)
    moved = rerotate(stored, places + old, places + new, rope)
    exact = keys_by_math(stored.double(), places + old, places + new, rope)
    unit = torch.finfo(dtype).eps * 2.0 ** torch.floor(torch.log2(exact.abs()))
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((moved.double() - exact).abs() / unit.clamp_min(least)).max() <= 2


def keys_by_math(stored: Tensor, old: Tensor, new: Tensor, rope: RopeSpec) -> Tensor:
    """The exact turn, number by number, with Python's own cosine and sine."""
    exact, pairs = stored.clone(), len(rope.frequencies)
    table = torch.tensor(rope.frequencies, dtype=torch.float32)
    for token in range(len(new)):
        before = (old[token].float() * table).tolist()
        after = (new[token].float() * table).tolist()
        for pair in range(pairs):
            angle = after[pair] - before[pair]
            x, y = stored[:, token, pair], stored[:, token, pair + pairs]
            exact[:, token, pair] = x * math.cos(angle) - y * math.sin(angle)
            exact[:, token, pair + pairs] = y * math.cos(angle) + x * math.sin(angle)
    return exact


def test_the_rules_are_those_of_transformers() -> None:
    for name in ("llama", "llama-linear", "llama-yarn", "llama-llama3", "qwen3"):
        model = make_model(name)
        rope, table = RopeSpec.of(rope_parameters(model.config), 16), model.model.rotary_emb
        assert rope is not None
        assert rope.frequencies == pytest.approx(table.inv_freq.tolist(), rel=1e-6)
        assert rope.gain == pytest.approx(table.attention_scaling, rel=1e-9)


def test_what_cannot_be_turned_is_refused_by_name() -> None:
    for scaling in ("dynamic", "longrope", "of my own"):
        with pytest.raises(ModelError, match=scaling):
            RopeSpec.of(named(scaling, factor=2.0), HEAD_DIM)
    with pytest.raises(ModelError, match="fewer channels"):
        rerotate(some_keys()[..., :32], torch.arange(32), torch.arange(32), spec("default"))
    for numbers, gain in (((), 1.0), ((math.nan,), 1.0), ((1.0,), 0.0)):
        with pytest.raises(ModelError):
            RopeSpec(numbers, gain)
    assert RopeSpec.of(named("none"), HEAD_DIM) is None, "a model without a rotation"


@pytest.fixture(scope="module")
def single() -> World:
    return make_world(dtype=torch.float32)


def generated(single: World, cache: BlendedCache | None) -> list[int]:
    ids = torch.tensor([single.tokens])
    engine: Any = single.model
    output = engine.generate(
        ids, generation_config=greedy(6), attention_mask=torch.ones_like(ids), **as_argument(cache)
    )
    found: list[int] = output[0].tolist()
    return found


def test_generating_from_a_blend_is_generating_without_one_where_all_rows_are_computed(
    single: World,
) -> None:
    for ratio, is_same in ((1.0, True), (0.0, False)):
        result = single.blender.blend(single.plan(ratio), single.source)
        found = generated(single, BlendedCache.of(single.model, result))
        assert (found == generated(single, None)) == is_same


def test_a_model_and_a_number_of_sinks_that_cannot_be_are_refused_by_name(world: World) -> None:
    other = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16))
    with pytest.raises(ModelError, match="GPT2LMHeadModel"):
        TransformersAdapter(other)
    adapted: Any = make_model()
    adapted.peft_config = {"default": object()}
    with pytest.raises(ModelError, match="give its digest"):
        TransformersAdapter(adapted)
    assert TransformersAdapter(adapted, "blake3:of it").origin.adapter_digest == "blake3:of it"
    hooked: Any = make_model()
    hooked.model.layers[0].register_forward_hook(print)
    with pytest.raises(ModelError, match="model='hooks'"):
        TransformersAdapter(hooked)
    rounded: Any = make_model(dtype=torch.float32)
    with pytest.raises(ModelError, match="do not cast it"):
        TransformersAdapter(rounded.to(torch.bfloat16))
    for sinks in (-1, MAX_SINKS + 1):
        with pytest.raises(InvalidRequestError, match="sinks"):
            Blender(adapter_of(world), sinks=sinks)


# The same test for every device: nothing of the path is of one alone.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_blend_on_a_device_is_that_of_float64_on_the_cpu(single: World, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device: its twin on the CPU runs the same code")
    exact = make_world()
    engine: Any = make_model(dtype=torch.float32)
    blender = Blender(TransformersAdapter(engine.to(device)))
    for name in SELECTORS:
        wanted = exact.blender.blend(exact.plan(0.3, selector=name), exact.source)
        found = blender.blend(single.plan(0.3, selector=name), single.source)
        assert found.logits.device.type == device
        assert {part.device.type for kv in found.kv for part in kv} == {device}
        assert set(found.report.selected.tolist()) == set(wanted.report.selected.tolist())
        assert torch.allclose(found.logits.cpu().double(), wanted.logits, atol=1e-3)


@pytest.mark.parametrize(("selector", "chosen"), [("hkvd", 11), ("query_attention", 10)])
def test_a_sink_is_charged_to_the_ratio_by_who_measures_attention_alone(
    selector: str, chosen: int
) -> None:
    segments = (Segment(0, 100, "approx", src_pos=0), Segment(100, 120, "miss"))
    plan = BlendPlan(tuple(range(120)), segments, ratio=0.1, selector=selector)
    falling = torch.arange(120.0, 0.0, -1.0)
    rows = computed_rows(plan, sink_rows(plan, 1), falling)
    assert int((rows < 100).sum()) == chosen
