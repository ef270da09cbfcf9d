"""The transformers connector over a real server, against the model's own results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from contracts.connector import ConnectorContract
from helpers.local_server import LocalServer
from helpers.torch_engine import (
    OPTIONS,
    greedy,
    ids_of,
    kept,
    left_padded,
    plain_tokens,
    prefill,
    random_ids,
    stored_tokens,
)
from transformers import (
    AttentionInterface,
    BatchEncoding,
    PreTrainedModel,
    StaticCache,
)
from transformers.generation.streamers import BaseStreamer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from typing_extensions import override

from kvstore.client import Chunk, Client
from kvstore.client.engines.base import Connector
from kvstore.client.engines.transformers import TransformersConnector, generation, representation_of
from kvstore.client.engines.transformers.cache import as_argument
from kvstore.client.engines.transformers.generation import QUERIES
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.types import Model

Connect = Callable[[], TransformersConnector]


class TestTransformersConnector(ConnectorContract):
    """The suite of every connector, over the trained model."""

    vocabulary = 4096

    @pytest.fixture(autouse=True)
    def _engine(self, tinylm: PreTrainedModel, tokenizer: Any) -> None:
        self.model = tinylm
        self.identity = representation_of(tinylm, tokenizer)

    @override
    def representation(self) -> Model:
        return self.identity

    @override
    def make_connector(self, client: Client) -> Connector:
        return TransformersConnector(client, self.model, durable=True)

    @override
    def generate(self, connector: Connector | None, prompt: list[int]) -> list[int]:
        if connector is None:
            return plain_tokens(self.model, ids_of(prompt))
        return stored_tokens(cast(TransformersConnector, connector), ids_of(prompt))

    @override
    def generate_within(
        self, connector: Connector, prompt: list[int], deadline_ms: int
    ) -> list[int]:
        return stored_tokens(cast(TransformersConnector, connector), ids_of(prompt), deadline_ms)


class Streamed(BaseStreamer):
    """What a streamer was handed."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @override
    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.reshape(-1).tolist()

    @override
    def end(self) -> None:
        self.tokens.append(-1)


def test_arguments_that_choose_or_hand_out_tokens_go_to_the_model(
    connect: Connect, tinylm: PreTrainedModel
) -> None:
    ids, engine = random_ids(200), cast(Any, tinylm)
    likeliest = plain_tokens(tinylm, ids)[200]

    def forbid(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([likeliest]), -torch.inf)

    def short(found: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.tensor([found.shape[1] >= 205])

    given: dict[str, Any] = {"logits_processor": [forbid], "stopping_criteria": [short]}
    own = Streamed()
    wanted = engine.generate(ids, generation_config=greedy(), streamer=own, **given)[0].tolist()
    assert len(wanted) == 205
    assert own.tokens == [*wanted, -1]
    for hit_tokens in (0, 192):
        streamed = Streamed()
        found = connect().generate(ids, greedy(), streamer=streamed, **given)
        assert found.hit_tokens == hit_tokens
        assert found.output.sequences[0].tolist() == wanted
        assert streamed.tokens == own.tokens


def test_asking_for_a_cache_salt_hits_only_what_was_stored_with_it(
    connect: Connect, tinylm: PreTrainedModel
) -> None:
    input_ids = random_ids(100)
    connect().generate(input_ids, greedy(), extra=[b"salt"])
    assert connect().load(input_ids)[1] == 0
    assert connect().load(input_ids, extra=[b"salt"])[1] == 99


@pytest.mark.parametrize("whose", ["the call's", "the model's"])
def test_a_static_cache_starts_from_the_store_too(
    connect: Connect, tinylm: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    input_ids = random_ids(150)
    without = plain_tokens(tinylm, input_ids)
    settings = greedy()
    of: Any = settings if whose == "the call's" else tinylm.generation_config
    monkeypatch.setattr(of, "cache_implementation", "static")
    for hit in (0, 149):
        found = connect().generate(input_ids, settings)
        assert found.output.sequences[0].tolist() == without
        assert found.hit_tokens == hit
        assert isinstance(found.output.past_key_values, StaticCache)


def test_a_model_in_torch_compile_is_the_model(
    server: LocalServer, connect: Connect, tinylm: PreTrainedModel, tokenizer: Any
) -> None:
    compiled: Any = torch.compile(tinylm, backend="eager")
    ids, identity = random_ids(150), representation_of(compiled, tokenizer)
    assert identity == representation_of(tinylm, tokenizer)
    connector = TransformersConnector(server.connect("auto", identity, OPTIONS), compiled)
    assert stored_tokens(connector, ids) == plain_tokens(tinylm, ids)
    assert connect().load(ids)[1] == 149


def test_prompts_of_a_batch_start_each_from_its_own_prefix(
    connect: Connect, tinylm: PreTrainedModel
) -> None:
    prompts = [random_ids(count, seed=count)[0] for count in (150, 40, 97)]
    batch, mask = left_padded(prompts)
    engine: Any = tinylm
    own = engine.generate(batch, generation_config=greedy(), attention_mask=mask)
    connect().generate(prompts[0][None], greedy())
    for hits in ((149, 0, 0), (149, 39, 96)):
        found = connect().generate(batch, greedy(), attention_mask=mask)
        assert torch.equal(found.output.sequences, own)
        assert found.row_hits == hits


def test_padding_that_every_row_has_changes_nothing(
    connect: Connect, tinylm: PreTrainedModel
) -> None:
    """Caches are as wide as the longest prompt: what they held was taken for other tokens."""
    prompts = [random_ids(count, seed=count)[0] for count in (90, 40)]
    batch, mask = left_padded(prompts)
    wide, seen = (torch.nn.functional.pad(one, (5, 0)) for one in (batch, mask))
    engine: Any = tinylm
    own = engine.generate(batch, generation_config=greedy(), attention_mask=mask)
    found = connect().generate(wide, greedy(), attention_mask=seen)
    assert torch.equal(found.output.sequences[:, :5], wide[:, :5])
    assert torch.equal(found.output.sequences[:, 5:], own)
    for prompt in prompts:
        stored = connect().generate(prompt[None], greedy())
        assert stored.output.sequences[0].tolist() == plain_tokens(tinylm, prompt[None])
        assert stored.hit_tokens == len(prompt) - 1


@pytest.mark.parametrize("counts", [(40,), (40, 30)])
def test_a_maximum_length_counts_padding_as_the_model_counts_it(
    connect: Connect, tinylm: PreTrainedModel, counts: tuple[int, ...]
) -> None:
    batch, mask = left_padded([random_ids(count, seed=count)[0] for count in counts])
    wide, seen = (torch.nn.functional.pad(one, (5, 0)) for one in (batch, mask))
    settings = greedy()
    settings.max_new_tokens, settings.max_length = None, 48
    engine: Any = tinylm
    own = engine.generate(wide, max_length=48, generation_config=settings, attention_mask=seen)
    found = connect().generate(wide, settings, attention_mask=seen)
    assert torch.equal(found.output.sequences, own)
    assert own.shape[1] == 48


def test_padding_without_a_mask_is_found_as_the_model_finds_it(
    connect: Connect, tinylm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings of a call may leave out which token pads: the model's own say it."""
    connector = connect()
    monkeypatch.setattr(tinylm.generation_config, "pad_token_id", 0)
    batch, mask = left_padded([random_ids(count, seed=count)[0] for count in (40, 30)])
    ids = batch * mask
    settings = greedy()
    settings.pad_token_id = None
    for prompts in (ids, torch.nn.functional.pad(ids[:1], (5, 0))):
        own = tinylm.generate(prompts, generation_config=settings)
        for _ in range(2):
            found = connector.generate(prompts, settings)
            assert torch.equal(found.output.sequences, own)
        assert found.row_hits == tuple(int(row.ne(0).sum()) - 1 for row in prompts)
    with pytest.raises(InvalidRequestError, match="pad on the left"):
        connector.generate(ids.flip(1), settings)


def test_what_a_call_leaves_out_the_models_own_settings_say(
    connect: Connect, tinylm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beams and drafts were taken from there, and what they left in the cache was stored."""
    connector = connect()
    for name, value in (("num_beams", 2), ("prompt_lookup_num_tokens", 3)):
        monkeypatch.setattr(tinylm.generation_config, name, value)
        with pytest.raises(InvalidRequestError, match=name):
            connector.generate(random_ids(40), greedy())
        monkeypatch.undo()


# --- misuse is refused in words


def test_what_a_tokenizer_returns_and_lists_are_prompts_too(
    connect: Connect, tinylm: PreTrainedModel
) -> None:
    ids = random_ids(40)
    without = plain_tokens(tinylm, ids)
    batch = BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    given: list[Any] = [ids, batch, ids.tolist(), ids[0].tolist(), ids.int(), ids.numpy()]
    for hit, prompt in enumerate(given):
        done = connect().generate(prompt, greedy())
        assert done.output.sequences[0].tolist() == without
        assert done.hit_tokens == (39 if hit else 0)
    assert connect().generate(**batch, generation_config=greedy()).hit_tokens == 39
    assert connect().load(ids[0].tolist())[1] == 39


def test_what_is_no_prompt_and_no_setting_is_refused_by_name(connect: Connect) -> None:
    connector = connect()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"input_ids": "words"}, "input_ids='str': give a tensor, lists"),
        ({"input_ids": [[3, 4], [5]]}, "input_ids='list': give a tensor, lists"),
        ({"input_ids": [[0.5]]}, r"input_ids='torch.float32': give integers"),
        ({"input_ids": None}, "input_ids='NoneType': give a tensor"),
        ({"input_ids": torch.empty((1, 0), dtype=torch.long)}, "give prompts of"),
        ({"input_ids": {"input_ids": [[3]], "pixel_values": 1}}, "'pixel_values': give input_ids"),
        ({"input_ids": [[3, 4]], "pixel_values": 1}, "pixel_values=1: give a setting"),
        ({"input_ids": [[3, 4]], "max_tokens": 8}, "max_tokens=8: give a setting"),
        ({"input_ids": [[3]], "config": greedy(), "generation_config": greedy()}, "given twice"),
    ]
    # Padding that is not on the left: a hole, on the right, no token, another length.
    masks = ([1, 0, 1], [1, 1, 0], [0, 0, 0], [1, 1])
    refused += [
        ({"input_ids": [[3, 4, 5]], "attention_mask": [mask]}, "attention_mask") for mask in masks
    ]
    # Settings that need another cache.
    settings = [
        ("num_beams", 2), ("num_return_sequences", 2), ("use_cache", False),
        ("cache_implementation", "quantized"), ("cache_implementation", "offloaded"),
        ("token_healing", True), ("prompt_lookup_num_tokens", 3), ("assistant_early_exit", 2),
    ]  # fmt: skip
    refused += [({"input_ids": [[3]], name: value}, name) for name, value in settings]
    for given, words in refused:
        with pytest.raises(InvalidRequestError, match=words):
            connector.generate(**given)
    typed = {"input_ids": [[3, 4]], "token_type_ids": [[0, 1]]}
    for wrong, words in (
        (random_ids(40).repeat(2, 1), "one prompt"),
        ({"input_ids": [[3, 4]], "attention_mask": [[0, 1]]}, "without padding"),
        (typed, "token_type_ids"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            connector.load(wrong)


def test_a_static_cache_and_a_batchs_are_not_saved(connect: Connect, tinylm: Any) -> None:
    prompt = random_ids(40)
    cache = StaticCache(config=tinylm.config, max_cache_len=64)
    with torch.inference_mode():
        tinylm(prompt, **as_argument(cache))
    with pytest.raises(ModelError, match="StaticCache"):
        connect().save(prompt, cache)
    with pytest.raises(ModelError, match="cache='tuple': give one of this model"):
        connect().save(prompt, cast(Any, tuple(kept(prefill(tinylm, prompt)))))
    with pytest.raises(InvalidRequestError, match="cache="):
        connect().save(prompt, prefill(tinylm, prompt.repeat(2, 1)))


def test_a_client_of_another_model_is_refused(
    server: LocalServer, tinylm: PreTrainedModel, load_tinylm: Any, tokenizer: Any
) -> None:
    other = load_tinylm(torch.bfloat16)
    client = server.connect("auto", representation_of(other, tokenizer), OPTIONS)
    with pytest.raises(ModelError, match="representation_of"):
        TransformersConnector(client, tinylm)


# --- what attention tokens get goes with their chunks


PROMPT = random_ids(150)
"""Two chunks of 64 tokens and some."""

Server = Callable[..., LocalServer]
Put = list[Chunk]


@pytest.fixture
def with_codec(
    make_server: Server, tinylm: PreTrainedModel, identity: Model
) -> Callable[..., TransformersConnector]:
    """Make a connector to a server whose disk has a codec."""

    def make(codec: str, model: PreTrainedModel = tinylm, **more: Any) -> TransformersConnector:
        client = make_server("--codec", f"disk={codec}").connect("auto", identity, OPTIONS)
        return TransformersConnector(client, model, **more)

    return make


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Callable[[TransformersConnector], Put]:
    """Return the chunks that a connector puts from now on."""

    def watched(connector: TransformersConnector) -> Put:
        chunks: Put = []
        own = connector.client.put_chunks

        def noting(some: Any, **more: Any) -> Any:
            chunks.extend(some)
            return own(some, **more)

        monkeypatch.setattr(connector.client, "put_chunks", noting)
        return chunks

    return watched


def attention_of(model: PreTrainedModel, prompt: torch.Tensor) -> np.ndarray:
    """What each token gets of the last ones that see it, by transformers' own account."""
    engine: Any = model
    engine.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            given = torch.stack(engine(prompt, output_attentions=True).attentions)
    finally:
        engine.set_attn_implementation("sdpa")
    last = given.mean((0, 1, 2))[-QUERIES:]
    found: np.ndarray = (last.sum(0) / (last > 0).sum(0)).numpy()
    return found


def test_a_prompts_chunks_say_what_attention_their_tokens_get(
    with_codec: Any, put: Any, tinylm: PreTrainedModel
) -> None:
    connector = with_codec("kvq:2,importance")
    chunks = put(connector)
    output = connector.generate(PROMPT, greedy(80)).output
    wanted, own = attention_of(tinylm, PROMPT), kept(prefill(tinylm, PROMPT))
    assert output.sequences[0].tolist()[:162] == plain_tokens(tinylm, PROMPT), "as without"
    pairs = zip(kept(output.past_key_values), own, strict=True)
    assert all(torch.equal(part[:, :, :150], wanted) for part, wanted in pairs)
    assert [chunk.position for chunk in chunks] == [0, 64, 128, 128, 192]
    for chunk, start in zip(chunks, (0, 64, 128), strict=False):
        assert chunk.importance is not None
        np.testing.assert_allclose(chunk.importance, wanted[start : start + 64], rtol=1e-3)
    assert [chunk.importance for chunk in chunks[3:]] == [None, None]  # with generated tokens


def test_the_tokens_behind_a_hit_are_weighed_as_those_of_a_whole_prompt(
    with_codec: Any, put: Any, tinylm: PreTrainedModel
) -> None:
    connector = with_codec("kvq:2,importance")
    connector.generate(PROMPT[:, :64], greedy(1))
    chunks = put(connector)
    assert connector.generate(PROMPT, greedy(1)).hit_tokens == 64
    assert [chunk.position for chunk in chunks] == [64, 128]
    wanted = attention_of(tinylm, PROMPT)
    np.testing.assert_allclose(chunks[0].importance, wanted[64:128], rtol=1e-3)


def test_attention_that_has_no_hash_is_noted_as_any_other(
    with_codec: Any, put: Any, load_tinylm: Any
) -> None:
    class Own(dict[str, object]):
        __call__ = staticmethod(sdpa_attention_forward)

    AttentionInterface.register("without_a_hash", Own())
    model = load_tinylm()
    model.config._attn_implementation = "without_a_hash"
    connector = with_codec("kvq:2,importance", model)
    chunks = put(connector)
    assert stored_tokens(connector, PROMPT) == plain_tokens(model, PROMPT)
    assert chunks[0].importance is not None


def test_static_caches_batches_and_other_attention_are_stored_without_a_word_of_it(
    with_codec: Any, put: Any, load_tinylm: Any
) -> None:
    connector = with_codec("kvq:2,importance")
    chunks = put(connector)
    connector.generate(PROMPT, greedy(2), cache_implementation="static")
    ids, mask = left_padded([PROMPT[0, 1:], PROMPT[0, 20:]])
    connector.generate(ids, greedy(2), attention_mask=mask)
    other = TransformersConnector(connector.client, load_tinylm(attn_implementation="eager"))
    other.generate(PROMPT[:, 2:], greedy(2))
    assert len(chunks) >= 8
    assert {chunk.importance for chunk in chunks} == {None}


def test_numbers_that_are_none_are_not_taken_for_importance(
    with_codec: Any, put: Any, load_tinylm: Any
) -> None:
    model = load_tinylm()
    connector = with_codec("kvq:2,importance", model)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.fill_(float("nan"))
    chunks = put(connector)
    connector.generate(PROMPT, greedy(1))
    assert {chunk.importance for chunk in chunks} == {None}


@pytest.mark.parametrize(
    ("looks", "asked"),
    [
        (torch.OutOfMemoryError("of the device"), 1),
        (map(torch.zeros, range(1, 7)), 6),  # what differs in length cannot be stacked
    ],
    ids=["no memory", "no stack"],
)
def test_attention_that_cannot_be_noted_fails_no_request(
    with_codec: Any, put: Any, tinylm: PreTrainedModel, monkeypatch: pytest.MonkeyPatch,
    looks: Any, asked: int,
) -> None:  # fmt: skip
    connector, look = with_codec("kvq:2,importance"), Mock(side_effect=looks)
    chunks = put(connector)
    monkeypatch.setattr(generation, "mean_attention", look)
    found = connector.generate(PROMPT, greedy(2))
    assert found.output.sequences[0].tolist() == plain_tokens(tinylm, PROMPT)[:152]
    assert {chunk.importance for chunk in chunks} == {None}
    assert look.call_count == asked
