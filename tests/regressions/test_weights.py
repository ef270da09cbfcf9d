"""Weights that a name leaves out: two models of one name, and weights that change in place."""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.local_server import LocalServer
from helpers.prompts import SMALL
from helpers.torch_engine import OPTIONS, logits, plain_tokens, prefill, random_ids, stored_tokens
from helpers.vllm_stand_ins import FullAttentionSpec, cache_config, engine_config
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from kvstore.client.blend.engine import Blender
from kvstore.client.blend.gate import GuardedBlender
from kvstore.client.blend.plan import SegmentRange
from kvstore.client.blend.store import StoreSource, store_prefill
from kvstore.client.engines.sglang.pages import PageSettings, PageStore, RankInfo, WeightsEpoch
from kvstore.client.engines.transformers import TransformersConnector, representation_of
from kvstore.client.engines.transformers.blend_adapter import TransformersAdapter
from kvstore.client.engines.vllm import identity as vllm_identity
from kvstore.client.engines.vllm.identity import shape_of
from kvstore.client.segments import SegmentQuery
from kvstore.proto.errors import InvalidRequestError, ModelError

HASHES = [hashlib.sha256(bytes([number])).hexdigest() for number in range(3)]
PAGE, LAYERS, HEADS, DIM = 16, 2, 2, 8
COMMIT = "8f2c1d4e" * 5
NO_REVISIONS = ["main", "master", "HEAD", "latest", "COMMIT", "<commit>", "refs/heads/main"]
UNSAID = ["", "main", "COMMIT", "v1.0", "step-500", "20260101"]
PROMPT = random_ids(150, 96)
OTHER = random_ids(100, 96, seed=1)


def checkpoint(folder: Path, weights: bytes) -> str:
    """Write the files of a checkpoint; return its path."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(weights * (1 << 18))
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)


@pytest.fixture
def experiments(tmp_path: Path) -> tuple[str, str, str]:
    """Two checkpoints of one name, and a copy of the first on another host."""
    one = checkpoint(tmp_path / "runs" / "exp1" / "checkpoint-500", b"one of 8")
    other = checkpoint(tmp_path / "runs" / "exp2" / "checkpoint-500", b"another8")
    return one, other, checkpoint(tmp_path / "host" / "checkpoint-500", b"one of 8")


Pages = Callable[[str, str], PageStore]


@pytest.fixture
def pages(server: LocalServer, request: pytest.FixtureRequest) -> Pages:
    """Attach the store to an SGLang engine of the weights in a folder, with a revision."""

    def make(folder: str, revision: str) -> PageStore:
        stated = {"address": server.address, "model_revision": revision, "deadline_ms": 20_000}
        buffer = torch.arange(2 * LAYERS * 3 * PAGE * HEADS * DIM, dtype=torch.float32)
        pool: Any = SimpleNamespace(
            layout="layer_first", page_size=PAGE, start_layer=0, layer_num=LAYERS,
            kv_buffer=buffer.reshape(2, LAYERS, 3 * PAGE, HEADS, DIM),
            get_dummy_flat_data_page=lambda: torch.zeros(buffer.nbytes // 3, dtype=torch.uint8),
        )  # fmt: skip
        store = PageStore(pool, RankInfo(is_mla=False), PageSettings.parse(stated, folder))
        request.addfinalizer(store.client.close)
        return store

    return make


@pytest.mark.parametrize("revision", [*UNSAID, COMMIT])
def test_sglang_24758_checkpoints_of_one_name_never_read_each_others_pages(
    experiments: tuple[str, str, str], pages: Pages, revision: str
) -> None:
    """sglang#24758, #33268: an engine is known by the name that it serves, which checkpoints of
    several runs have, so one was given what another had stored."""
    one, other, copy = (pages(folder, revision) for folder in experiments)
    assert one.store(HASHES, [one.page(number) for number in range(3)], ()) == [True] * 3
    assert (other.count(HASHES), copy.count(HASHES)) == (0, 3)


@pytest.mark.parametrize("revision", UNSAID)
def test_sglang_24758_a_hubs_model_without_a_commit_is_refused(revision: str) -> None:
    """The same of a name that is no folder: what ``main`` is of differs by the day."""
    with pytest.raises(ModelError, match=r"model_revision.*commit or a digest"):
        PageSettings.parse({"model_revision": revision}, "org/model")
    assert PageSettings.parse({"model_revision": COMMIT}, "org/model").weights.revision == COMMIT


@pytest.mark.parametrize("revision", [*UNSAID, COMMIT])
def test_sglang_24758_the_same_of_vllm(experiments: tuple[str, str, str], revision: str) -> None:
    """And so in the connector for vLLM, where the revision may be left out."""

    def identity(folder: str) -> Any:
        config = engine_config(folder)
        shape = shape_of(config, cache_config(FullAttentionSpec()))
        return vllm_identity.model_of(config, shape, revision)

    one, other, copy = map(identity, experiments)
    assert one == copy != other


@pytest.mark.parametrize("revision", NO_REVISIONS)
def test_sglang_33268_what_is_no_revision_is_refused_of_any_client(revision: str) -> None:
    """The same typed into a Model: the branch of an example, or its placeholder."""
    with pytest.raises(ModelError, match="model_revision"):
        replace(SMALL, model_revision=revision)


# --- weights that change while an engine runs


class Words:
    """A tokenizer, as far as an identity needs one."""

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(96)}


SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def llama(seed: int = 3) -> Any:
    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=512))
    return model.eval()


def windowed() -> Any:
    torch.manual_seed(3)
    model: Any = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=40))
    return model.eval()


def connector(server: LocalServer, model: Any, revision: str | None = None) -> Any:
    identity = representation_of(model, Words(), revision)  # type: ignore[arg-type]
    return TransformersConnector(server.connect("auto", identity, OPTIONS), model)


def scaled(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(1.5)


def one_element(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[7, 5] += 1


def written_through_data(model: Any) -> None:
    weight = model.model.layers[1].self_attn.k_proj.weight
    weight.data.copy_(torch.randn_like(weight))


def loaded(model: Any) -> None:
    model.load_state_dict(llama(seed=4).state_dict())


def replaced(model: Any) -> None:
    model.model.layers[0].self_attn.v_proj = llama(seed=5).model.layers[0].self_attn.v_proj


@pytest.mark.parametrize("change", [scaled, one_element, written_through_data, loaded, replaced])
def test_lmdeploy_4917_after_weights_changed_nothing_older_is_loaded(
    server: LocalServer, change: Callable[[Any], None]
) -> None:
    """lmdeploy#4917, vllm#9744, NeMo-RL#4018: training puts new weights into an engine that runs,
    and prompts went on from KV of the old ones."""
    model = llama()
    engine = connector(server, model)
    assert engine.generate(PROMPT, max_new_tokens=4).hit_tokens == 0
    assert engine.generate(PROMPT, max_new_tokens=4).hit_tokens == 149
    change(model)
    assert engine.load(PROMPT)[1] == 0
    assert stored_tokens(engine, PROMPT) == plain_tokens(model, PROMPT)
    assert engine.load(PROMPT)[1] == 149
    # An engine that begins with the old weights is given those.
    assert connector(server, llama()).load(PROMPT)[1] == 149


@pytest.mark.parametrize("make", [llama, windowed])
@pytest.mark.parametrize("prompts", [1, 2])
def test_lmdeploy_4917_what_is_computed_while_weights_change_is_not_stored(
    server: LocalServer, make: Callable[[], Any], prompts: int
) -> None:
    """The same where a trainer writes while ``generate`` runs: KV of both was stored."""
    model = make()
    engine = connector(server, model)

    def train(*_: Any) -> None:
        hook.remove()
        scaled(model)

    hook = model.model.layers[0].register_forward_pre_hook(train)
    generated = engine.generate(PROMPT.repeat(prompts, 1), max_new_tokens=2)
    fresh = connector(server, make())
    assert (generated.hit_tokens, fresh.load(PROMPT)[1]) == (0, 0)
    cache = generated.output.past_key_values
    assert prompts > 1 or engine.save(PROMPT, cache) == 0
    # What is computed without a change is stored.
    fresh.generate(PROMPT.repeat(prompts, 1), max_new_tokens=2)
    assert fresh.load(PROMPT)[1] >= 128
    engine.generate(PROMPT.repeat(prompts, 1), max_new_tokens=2)
    assert engine.load(PROMPT)[1] >= 128


class Packed(torch.nn.Parameter):
    """A weight of another class than torch's own, as bitsandbytes has."""


class Wrapped(torch.Tensor):
    """A weight that is made of others and has no address, as torchao has."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it with these
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        bare = [arg.held if isinstance(arg, Wrapped) else arg for arg in args]
        found = func(*bare, **(kwargs or {}))
        return Wrapped(found) if func is torch.ops.aten.detach.default else found


def wrapped(weight: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(Wrapped(weight), requires_grad=False)


@pytest.mark.parametrize("make", [Packed, wrapped])
def test_lmdeploy_4917_weights_of_a_quantisations_class_are_seen_to_be_replaced(
    server: LocalServer, make: Callable[[torch.Tensor], torch.nn.Parameter]
) -> None:
    """The same where weights are of a class that is no Parameter of torch's own."""
    model = llama()
    engine = connector(server, model)
    projection = model.model.layers[0].self_attn.v_proj
    for seed in (5, 6):
        # Twice, as the second may lie where the one before was.
        for other in (7, seed):
            projection.weight = make(llama(other).model.layers[0].self_attn.v_proj.weight.detach())
        assert engine.load(PROMPT)[1] == 0
        assert stored_tokens(engine, PROMPT) == plain_tokens(model, PROMPT)
        assert engine.load(PROMPT)[1] == 149


def test_weights_that_were_replaced_are_freed_before_the_next_prompt(server: LocalServer) -> None:
    model = llama()
    projection = model.model.layers[0].self_attn.v_proj
    memory = projection.weight.detach().numpy().copy()
    projection.weight = torch.nn.Parameter(torch.from_numpy(memory))
    engine = connector(server, model)
    engine.load(PROMPT)
    is_there = weakref.ref(memory)
    del memory
    replaced(model)
    del projection
    gc.collect()
    assert is_there() is None


NOTICES: dict[str, Callable[[Any], object]] = {
    "nobody before save": lambda engine: None,
    "reset": lambda engine: engine.reset(),
    "load": lambda engine: engine.load(OTHER),
    "generate": lambda engine: engine.generate(OTHER, max_new_tokens=1),
}


@pytest.mark.parametrize("who", NOTICES)
def test_lmdeploy_4917_a_cache_of_the_weights_before_is_not_stored(
    server: LocalServer, who: str
) -> None:
    """The same where the engine computes by itself, between ``load`` and ``save``: nobody knows
    when a cache that the connector did not return was computed."""
    model = llama()
    engine = connector(server, model)
    cache = prefill(model, PROMPT)
    mine, _ = engine.load(PROMPT)
    logits(model, PROMPT, mine)
    scaled(model)
    NOTICES[who](engine)
    assert engine.save(PROMPT, cache) == 0
    assert engine.save(PROMPT, mine) == 0
    assert engine.save(PROMPT, prefill(model, PROMPT)) == 0
    new, hit_tokens = engine.load(PROMPT)
    logits(model, PROMPT, new)
    assert (hit_tokens, engine.save(PROMPT, new)) == (0, 3)


def test_lmdeploy_4917_a_cache_that_generate_returned_is_stored_until_weights_change(
    server: LocalServer,
) -> None:
    model = llama()
    engine = connector(server, model)
    scaled(model)
    first, second = (
        engine.generate(prompt, max_new_tokens=1).output.past_key_values
        for prompt in (PROMPT, OTHER)
    )
    logits(model, OTHER, first)
    logits(model, PROMPT, second)
    assert engine.save(torch.cat([PROMPT, OTHER], 1), first) == 2
    scaled(model)
    engine.reset()
    assert engine.save(torch.cat([OTHER, PROMPT], 1), second) == 0


def test_lmdeploy_4917_a_cache_is_not_stored_under_a_name_that_was_given_twice(
    server: LocalServer,
) -> None:
    """Weights that take turns: what is computed of the second is not known as the first's."""
    model = llama()
    engine = connector(server, model)
    engine.reset("run-7f3a9c21-step-1")
    cache, _ = engine.load(PROMPT)
    scaled(model)
    engine.reset("run-7f3a9c21-step-2")
    logits(model, PROMPT, cache)
    engine.reset("run-7f3a9c21-step-1")
    assert engine.save(PROMPT, cache) == 0


def test_nemo_rl_4018_engines_that_name_new_weights_share_what_is_of_them(
    server: LocalServer,
) -> None:
    """NeMo-RL#4018: after each update of the weights all workers had to begin anew."""
    workers = [llama(), llama()]
    one, other = (connector(server, model) for model in workers)
    one.generate(PROMPT, max_new_tokens=1)
    for model in workers:
        scaled(model)
    for worker in (one, other):
        worker.reset("run-7f3a9c21-step-2")
        assert worker.load(PROMPT)[1] == 0
    one.generate(PROMPT, max_new_tokens=1)
    assert other.load(PROMPT)[1] == 149
    other.reset()
    assert other.load(PROMPT)[1] == 0
    with pytest.raises(InvalidRequestError, match="revision='step-2'"):
        other.reset("step-2")


@pytest.mark.parametrize("revision", [None, "main", "v1.0", COMMIT])
def test_sglang_24758_models_of_one_revision_and_other_weights_share_nothing(
    server: LocalServer, revision: str | None
) -> None:
    """And so in the connector for transformers."""
    one, other, copy = (connector(server, llama(seed), revision) for seed in (3, 4, 3))
    one.generate(PROMPT, max_new_tokens=1)
    assert (other.load(PROMPT)[1], copy.load(PROMPT)[1]) == (0, 149)


class Updates:
    """What SGLang says of its weights, and what ranks agree upon."""

    version = "default"
    drawn = 0

    def agree(self) -> bytes:
        self.drawn += 1
        return b"%d" % self.drawn

    def epoch(self, *, resets_on_flush: bool = True) -> WeightsEpoch:
        return WeightsEpoch(lambda: self.version, self.agree, resets_on_flush=resets_on_flush)


def test_sglang_26792_pages_of_older_weights_are_never_loaded_nor_stored_as_new_ones(
    experiments: tuple[str, str, str], pages: Pages
) -> None:
    """sglang#26792: an update of the weights flushed memory alone, and pages came from storage."""
    engine, store = Updates(), pages(experiments[0], COMMIT)
    epoch = engine.epoch()
    places = [store.page(number) for number in range(3)]
    assert store.store(epoch.named(HASHES), places, ()) == [True] * 3
    engine.version = "step-1"
    assert epoch.named(HASHES) == [], "pages of both weights are about"
    epoch.flushed()
    assert store.count(epoch.named(HASHES)) == 0
    store.store(epoch.named(HASHES), places, ())
    epoch.flushed()
    assert store.count(epoch.named(HASHES)) == 0, "a flush may come with weights of no version"
    engine.version = "sha256-7f3a9c21"
    epoch.flushed()
    store.store(epoch.named(HASHES), places, ())
    engine.version = "default"
    worker = engine.epoch()
    engine.version = "sha256-7f3a9c21"
    worker.flushed()
    assert store.count(worker.named(HASHES)) == 3


def test_sglang_26792_a_flush_alone_keeps_what_is_stored_where_a_user_says_so() -> None:
    """The same for those who flush to measure what storage brings: ``reset_on_flush`` false."""
    engine = Updates()
    epoch = engine.epoch(resets_on_flush=False)
    epoch.flushed()
    assert epoch.named(HASHES) == HASHES
    engine.version = "step-1"
    epoch.flushed()
    assert not set(epoch.named(HASHES)) & set(HASHES)


# --- and while prompts are blended


def blended(server: LocalServer, model: Any, seed: int) -> tuple[Any, Any, Any]:
    """Return a client, a blender of it, and a prompt of two documents behind a head of *seed*."""
    client = server.connect("auto", representation_of(model, Words()), OPTIONS)  # type: ignore[arg-type]
    tokens = [*random_ids(20, 96, seed=seed)[0].tolist(), *random_ids(90, 96)[0].tolist()]
    ranges = [SegmentRange(20, 60), SegmentRange(60, 101)]
    return client, Blender(TransformersAdapter(model)), (tokens, ranges)


def test_lmdeploy_4917_nothing_older_is_blended_once_weights_changed(server: LocalServer) -> None:
    """The same of blending: what is computed with the new weights is found, by the same engine
    alone."""
    model = llama()
    client, blender, (first, ranges) = blended(server, model, 5)
    _, _, (second, _) = blended(server, model, 6)
    store_prefill(client, blender.prefill(first), first, ranges)
    gated = GuardedBlender(client, blender, SegmentQuery(is_trial=True), selector="first_k")
    assert gated.run(second, ranges).shadow is not None
    resolved = client.find_segments(second, ranges, SegmentQuery(is_trial=True))
    scaled(model)
    with resolved, StoreSource(resolved, second, client.model) as source:
        old = blender.blend(source.plan, source)
    assert not old.is_blended
    assert set(old.report.refused.values()) == {"other weights"}
    done = gated.run(second, ranges)
    assert not done.result.is_blended
    assert torch.equal(done.result.logits, blender.prefill(second).logits)
    store_prefill(client, blender.prefill(first), first, ranges)
    again = gated.run(second, ranges)
    assert again.shadow is not None


def test_lmdeploy_4917_kv_of_mixed_weights_is_not_stored(server: LocalServer) -> None:
    model = llama()
    client, blender, (tokens, ranges) = blended(server, model, 5)

    hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: scaled(model))
    mixed = blender.prefill(tokens)
    hook.remove()
    assert store_prefill(client, mixed, tokens, ranges) == []
    with client.find_segments(tokens, ranges, SegmentQuery(is_trial=True)) as resolved:
        assert list(resolved.chunks()) == []
    assert store_prefill(client, blender.prefill(tokens), tokens, ranges) != []
