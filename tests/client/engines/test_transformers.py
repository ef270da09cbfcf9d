"""The transformers connector over a real server, against the model's own results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

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
    logits,
    plain_tokens,
    prefill,
    random_ids,
    stored_tokens,
)
from transformers import (
    BatchEncoding,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)
from transformers.generation.streamers import BaseStreamer
from typing_extensions import override

from kvstore.client import Client
from kvstore.client.engines.base import Connector
from kvstore.client.engines.transformers import TransformersConnector, representation_of
from kvstore.client.engines.transformers.cache import as_argument
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


# --- the same bits as the engine's own cache


def test_logits_after_a_loaded_prefix_are_those_after_the_prefix_in_memory(
    connect: Connect, tinylm: PreTrainedModel
) -> None:
    input_ids = random_ids(230)
    own = prefill(tinylm, input_ids[:, :192])
    connect().save(input_ids[:, :192], own)
    cache, hit_tokens = connect().load(input_ids[:, :193])
    assert hit_tokens == 192
    assert all(map(torch.equal, kept(cache), kept(own)))
    rest = input_ids[:, 192:]
    assert torch.equal(logits(tinylm, rest, cache), logits(tinylm, rest, own))


@pytest.mark.parametrize("length", [100, 128])
def test_a_prompt_that_is_stored_whole_leaves_its_last_token_to_compute(
    connect: Connect, tinylm: PreTrainedModel, length: int
) -> None:
    input_ids = random_ids(length)
    own = prefill(tinylm, input_ids)
    connect().save(input_ids, own)
    cache, hit_tokens = connect().load(input_ids)
    assert hit_tokens == cache.get_seq_length() == length - 1
    own.crop(-1)
    last = input_ids[:, -1:]
    assert torch.equal(logits(tinylm, last, cache), logits(tinylm, last, own))


def test_loading_allocates_the_prefix_once_and_puts_it_into_the_cache_as_it_is(
    connect: Connect, tinylm: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    input_ids = random_ids(200)
    connect().save(input_ids[:, :192], prefill(tinylm, input_ids[:, :192]))
    connector = connect()
    rooms: list[int] = []
    get_chunks = connector.client.get_chunks

    def spy(keys: Any, out: Any, **more: Any) -> Any:
        rooms.extend(part.data_ptr() for parts in out[0][0] for part in parts)
        return get_chunks(keys, out, **more)

    monkeypatch.setattr(connector.client, "get_chunks", spy)
    cache, _ = connector.load(input_ids)
    assert [part.data_ptr() for part in kept(cache)] == rooms


# --- the same tokens


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


def test_a_conversation_extends_its_chain_turn_by_turn(
    connect: Connect, tinylm: PreTrainedModel
) -> None:
    hits, history = [], random_ids(150)
    for turn in range(3):
        connector = connect()
        tokens = stored_tokens(connector, history)
        assert tokens == plain_tokens(tinylm, history)
        hits.append(connector.stats().hit_tokens)
        history = torch.cat([ids_of(tokens), random_ids(70, seed=turn + 1)], 1)
    # Whole chunks of what the turn before asked and was answered.
    assert hits == [0, 128, 192]


def test_what_was_generated_is_stored_but_for_its_last_token(connect: Connect) -> None:
    everything = connect().generate(random_ids(120), greedy()).output.sequences
    assert connect().load(everything)[1] == everything.shape[1] - 1 - 3  # 64 + 64 of 132 - 1
    assert connect().load(everything[:, :129])[1] == 128


def test_asking_for_a_cache_salt_hits_only_what_was_stored_with_it(
    connect: Connect, tinylm: PreTrainedModel
) -> None:
    input_ids = random_ids(100)
    connect().generate(input_ids, greedy(), extra=[b"salt"])
    assert connect().load(input_ids)[1] == 0
    assert connect().load(input_ids, extra=[b"salt"])[1] == 99


def test_a_static_cache_starts_from_the_store_too(
    connect: Connect, tinylm: PreTrainedModel
) -> None:
    input_ids = random_ids(150)
    without = plain_tokens(tinylm, input_ids)
    settings = greedy()
    settings.cache_implementation = "static"
    for hit in (0, 149):
        found = connect().generate(input_ids, settings)
        assert found.output.sequences[0].tolist() == without
        assert found.hit_tokens == hit


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
    assert torch.equal(found.output.sequences[:, -3:], own[:, -3:])
    assert found.output.sequences.shape[1] == (48 if len(counts) > 1 else 43)


SMALL: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "kind", "dtype"),
    [
        (LlamaConfig(**SMALL), LlamaForCausalLM, torch.bfloat16),
        (MistralConfig(**SMALL, sliding_window=None), MistralForCausalLM, torch.float16),
        (Qwen2Config(**SMALL), Qwen2ForCausalLM, torch.float32),
        (Qwen3Config(**SMALL, head_dim=32), Qwen3ForCausalLM, torch.bfloat16),
    ],
    ids=["llama", "mistral", "qwen2", "qwen3"],
)
def test_each_architecture_comes_back_bit_for_bit(
    server: LocalServer, tokenizer: Any, config: Any, kind: Any, dtype: torch.dtype
) -> None:
    torch.manual_seed(7)
    model: PreTrainedModel = kind(config).to(dtype).eval()
    client = server.connect("auto", representation_of(model, tokenizer), OPTIONS)
    connector = TransformersConnector(client, model)
    input_ids = random_ids(150, vocabulary=256)
    own = prefill(model, input_ids[:, :128])
    assert connector.save(input_ids[:, :128], own) == 2
    cache, hit_tokens = connector.load(input_ids)
    assert hit_tokens == 128
    rest = input_ids[:, 128:]
    assert torch.equal(logits(model, rest, cache), logits(model, rest, own))


# --- a disk that lies, other models, and what is refused


def test_one_bit_that_flipped_on_disk_ends_the_hit_before_its_chunk(
    make_server: Callable[..., LocalServer],
    tmp_path: Path,
    tinylm: PreTrainedModel,
    identity: Model,
) -> None:
    input_ids = random_ids(193)
    server = make_server()
    client = server.connect("auto", identity, OPTIONS)
    own = prefill(tinylm, input_ids[:, :192])
    assert TransformersConnector(client, tinylm, durable=True).save(input_ids[:, :192], own) == 3
    server.close()
    row = kept(own)[7][0, 2, 100].numpy().tobytes()  # of a token of the second chunk
    assert flip_bit(tmp_path / "disk", row) == 1
    connector = TransformersConnector(make_server().connect("auto", identity, OPTIONS), tinylm)
    assert stored_tokens(connector, input_ids) == plain_tokens(tinylm, input_ids)
    stats = connector.stats()
    assert (stats.hit_tokens, stats.miss_tokens) == (64, 129)
    # The damaged chunk was forgotten and stored again.
    assert connector.load(input_ids)[1] == 192


def flip_bit(folder: Path, found: bytes) -> int:
    """Flip one bit in the middle of *found* in the files below *folder*; return how often."""
    flipped = 0
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        at = content.find(found)
        if at >= 0:
            at += len(found) // 2
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([content[at] ^ 4]))
            flipped += 1
    return flipped


def test_what_is_not_interchangeable_is_not_hit(
    server: LocalServer, tinylm: PreTrainedModel, load_tinylm: Any, tokenizer: Any
) -> None:
    ids = random_ids(150)

    def connect(model: PreTrainedModel, revision: str = "r1", **more: Any) -> TransformersConnector:
        identity = representation_of(model, tokenizer, revision, **more)
        return TransformersConnector(server.connect("auto", identity, OPTIONS), model)

    connect(tinylm).save(ids, prefill(tinylm, ids))
    assert connect(tinylm).load(ids)[1] == 149
    ropes = [
        {"rope_type": "default", "rope_theta": 10_000.0},
        {"rope_type": "linear", "rope_theta": 500_000.0, "factor": 2.0},
    ]
    for other in (
        connect(tinylm, "r2"),
        connect(tinylm, adapter_digest="5ad1"),
        connect(load_tinylm(torch.bfloat16)),
        *(connect(load_tinylm(rope_parameters=rope)) for rope in ropes),
    ):
        assert other.load(ids)[1] == 0


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


def test_settings_are_taken_as_the_model_takes_them(
    connect: Connect, tinylm: PreTrainedModel
) -> None:
    ids, engine = random_ids(40), cast(Any, tinylm)
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    done = connect().generate(ids, **settings).output.sequences
    assert done.tolist() == engine.generate(ids, **settings).tolist()
    assert done.shape == (1, 45)
    assert connect().generate(ids, greedy(), max_new_tokens=3).output.sequences.shape == (1, 43)


def test_what_is_no_prompt_and_no_setting_is_refused_by_name(connect: Connect) -> None:
    connector = connect()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"input_ids": "words"}, "input_ids='str': give a tensor, lists"),
        ({"input_ids": [[3, 4], [5]]}, "input_ids='list': give a tensor, lists"),
        ({"input_ids": [[0.5]]}, r"input_ids='torch.float32': give whole numbers"),
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
        ("token_healing", True),
    ]  # fmt: skip
    refused += [({"input_ids": [[3]], name: value}, name) for name, value in settings]
    for given, words in refused:
        with pytest.raises(InvalidRequestError, match=words):
            connector.generate(**given)
    with pytest.raises(InvalidRequestError, match="one prompt"):
        connector.load(random_ids(40).repeat(2, 1))


def test_a_static_cache_and_a_batchs_are_not_saved(connect: Connect, tinylm: Any) -> None:
    prompt = random_ids(40)
    cache = StaticCache(config=tinylm.config, max_cache_len=64)
    with torch.inference_mode():
        tinylm(prompt, **as_argument(cache))
    with pytest.raises(ModelError, match="StaticCache"):
        connect().save(prompt, cache)
    with pytest.raises(InvalidRequestError, match="cache="):
        connect().save(prompt, prefill(tinylm, prompt.repeat(2, 1)))


def test_a_client_of_another_model_is_refused(
    server: LocalServer, tinylm: PreTrainedModel, load_tinylm: Any, tokenizer: Any
) -> None:
    other = load_tinylm(torch.bfloat16)
    client = server.connect("auto", representation_of(other, tokenizer), OPTIONS)
    with pytest.raises(ModelError, match="representation_of"):
        TransformersConnector(client, tinylm)
