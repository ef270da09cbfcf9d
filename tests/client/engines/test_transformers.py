"""The transformers connector over a real server, against the model's own results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from contracts.connector import ConnectorContract
from local_server import DEADLINE_MS, LocalServer
from server_process import ServerProcess
from transformers import (
    DynamicCache,
    GenerationConfig,
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
from typing_extensions import override

from kvstore.client import Client, ClientOptions
from kvstore.client.engines.base import Connector, Prefix, Room
from kvstore.client.engines.transformers import TransformersConnector, representation_of
from kvstore.proto.errors import InvalidRequestError, RepresentationError
from kvstore.proto.types import Representation

OPTIONS = ClientOptions(chunk_tokens=64, deadline_ms=DEADLINE_MS, retry_after_ms=1)

TEXTS = [
    "The connection pool keeps idle sockets open so that the next request can be sent at once. "
    * 9,
    "In the beginning the clerk wrote every name by hand, and knew every reader. " * 10,
    "SELECT name, count(*) FROM readers JOIN loans USING (reader_id) GROUP BY name; " * 8,
]


def greedy(new_tokens: int = 12) -> GenerationConfig:
    """Settings whose tokens depend on nothing but the logits."""
    return GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=new_tokens, do_sample=False, eos_token_id=1, pad_token_id=1
    )


def ids_of(tokens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([tokens])


def plain_tokens(model: PreTrainedModel, input_ids: torch.Tensor) -> list[int]:
    """What the model generates by itself."""
    engine: Any = model
    output = engine.generate(
        input_ids, generation_config=greedy(), attention_mask=torch.ones_like(input_ids)
    )
    tokens: list[int] = output[0].tolist()
    return tokens


def stored_tokens(connector: TransformersConnector, input_ids: torch.Tensor) -> list[int]:
    """What it generates through the store."""
    tokens: list[int] = connector.generate(input_ids, greedy()).output.sequences[0].tolist()
    return tokens


def kept(cache: Any) -> list[torch.Tensor]:
    """K and V of every layer."""
    return [part for layer in cache.layers for part in (layer.keys, layer.values)]


def prefill(model: PreTrainedModel, input_ids: torch.Tensor) -> DynamicCache:
    with torch.inference_mode():
        return cast(DynamicCache, model(input_ids).past_key_values)


def logits(model: PreTrainedModel, input_ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    with torch.inference_mode():
        return cast(torch.Tensor, model(input_ids, past_key_values=cache).logits)


class TestTransformersConnector(ConnectorContract):
    """The suite of every connector, over the trained model."""

    vocabulary = 4096

    @pytest.fixture(autouse=True)
    def _engine(self, tinylm: PreTrainedModel, tokenizer: Any) -> None:
        self.model = tinylm
        self.identity = representation_of(tinylm, tokenizer)

    @override
    def representation(self) -> Representation:
        return self.identity

    @override
    def make_connector(self, client: Client) -> Connector:
        return TransformersConnector(client, self.model, durable=True)

    @override
    def generate(self, connector: Connector | None, prompt: list[int]) -> list[int]:
        if connector is None:
            return plain_tokens(self.model, ids_of(prompt))
        return stored_tokens(cast(TransformersConnector, connector), ids_of(prompt))


@pytest.fixture
def identity(tinylm: PreTrainedModel, tokenizer: Any) -> Representation:
    return representation_of(tinylm, tokenizer)


@pytest.fixture
def connect(
    server: LocalServer, tinylm: PreTrainedModel, identity: Representation
) -> Callable[[], TransformersConnector]:
    """Make connectors with a client each."""

    def make() -> TransformersConnector:
        return TransformersConnector(server.connect("auto", identity, OPTIONS), tinylm)

    return make


Connect = Callable[[], TransformersConnector]


def random_ids(tokens: int, vocabulary: int = 4096, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (1, tokens), generator=generator)


# --- the same bits as the engine's own cache


@pytest.mark.parametrize("held", [64, 192])
def test_logits_after_a_loaded_prefix_are_those_after_the_prefix_in_memory(
    connect: Connect, tinylm: PreTrainedModel, held: int
) -> None:
    input_ids = random_ids(230)
    own = prefill(tinylm, input_ids[:, :held])
    connect().save(input_ids[:, :held], own)
    cache, hit_tokens = connect().load(input_ids[:, : held + 1])
    assert hit_tokens == held
    assert all(map(torch.equal, kept(cache), kept(own)))
    rest = input_ids[:, held:]
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
    load_chunks = connector.load_chunks

    def spy(tokens: Sequence[int], room: Room, extra: Sequence[bytes] = ()) -> Prefix:
        def watched(spans: Any) -> Any:
            out: Any = room(spans)
            rooms.extend(part.data_ptr() for layer in out[0][0] for part in layer)
            return out

        return load_chunks(tokens, watched, extra)

    monkeypatch.setattr(connector, "load_chunks", spy)
    cache, _ = connector.load(input_ids)
    assert [part.data_ptr() for part in kept(cache)] == rooms


# --- the same tokens


@pytest.mark.parametrize("text", TEXTS)
def test_greedy_tokens_are_the_same_without_with_and_from_the_store(
    connect: Connect, tinylm: PreTrainedModel, tokenizer: Any, text: str
) -> None:
    input_ids = ids_of(tokenizer(text)["input_ids"][:180])
    without = plain_tokens(tinylm, input_ids)
    assert stored_tokens(connect(), input_ids) == without
    reader = connect()
    assert stored_tokens(reader, input_ids) == without
    assert reader.stats().hit_tokens == 179


def test_a_conversation_extends_its_chain_turn_by_turn(
    connect: Connect, tinylm: PreTrainedModel, tokenizer: Any
) -> None:
    hits, history = [], list(tokenizer(TEXTS[0])["input_ids"])[:150]
    for turn in range(3):
        connector = connect()
        tokens = stored_tokens(connector, ids_of(history))
        assert tokens == plain_tokens(tinylm, ids_of(history))
        hits.append(connector.stats().hit_tokens)
        history = tokens + list(tokenizer(f"Question {turn}. {TEXTS[1]}")["input_ids"])[:70]
    assert hits[0] == 0
    # Whole chunks of what the turn before asked and was answered.
    assert hits[1:] == [128, 192]


def test_what_was_generated_is_stored_but_for_its_last_token(
    connect: Connect, tinylm: PreTrainedModel
) -> None:
    input_ids = random_ids(120)
    output = connect().generate(input_ids, greedy()).output
    everything = output.sequences
    assert connect().load(everything)[1] == everything.shape[1] - 1 - 3  # 64 + 64 of 132 - 1
    assert connect().load(everything[:, :129])[1] == 128


def test_asking_for_a_cache_salt_hits_only_what_was_stored_with_it(
    connect: Connect, tinylm: PreTrainedModel
) -> None:
    input_ids = random_ids(100)
    connect().generate(input_ids, greedy(), extra=[b"salt"])
    assert connect().load(input_ids)[1] == 0
    assert connect().load(input_ids, extra=[b"salt"])[1] == 99


SMALL: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (LlamaConfig(**SMALL), LlamaForCausalLM),
        (MistralConfig(**SMALL, sliding_window=None), MistralForCausalLM),
        (Qwen2Config(**SMALL), Qwen2ForCausalLM),
        (Qwen3Config(**SMALL, head_dim=32), Qwen3ForCausalLM),
    ],
    ids=["llama", "mistral", "qwen2", "qwen3"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_architecture_and_dtype_comes_back_bit_for_bit(
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


# --- the store fails, or lies


class KilledMidway(TransformersConnector):
    """Its server is killed between the lookup and the get."""

    process: ServerProcess

    @override
    def load_chunks(self, tokens: Sequence[int], room: Room, extra: Sequence[bytes] = ()) -> Prefix:
        def killing(spans: Any) -> Any:
            self.process.kill()
            return room(spans)

        return super().load_chunks(tokens, killing, extra)


def test_a_server_killed_between_lookup_and_get_is_a_counted_miss(
    server_process: Callable[..., ServerProcess],
    tmp_path: Path,
    tinylm: PreTrainedModel,
    identity: Representation,
) -> None:
    process = server_process("--cpu", "16MiB", "--disk", f"16MiB:{tmp_path / 'disk'}")
    process.start()
    input_ids = random_ids(200)
    with Client(process.address, identity, OPTIONS) as client:
        connector = KilledMidway(client, tinylm)
        connector.process = process
        without = plain_tokens(tinylm, input_ids)
        assert stored_tokens(connector, input_ids) == without
        assert connector.stats().stored_chunks > 0
        assert stored_tokens(connector, input_ids) == without
        stats = connector.stats()
    assert (stats.hit_tokens, stats.miss_tokens) == (0, 400)
    assert sum(stats.load_errors.values()) == 1
    assert set(stats.store_errors) == {"TierUnavailableError"}


@pytest.fixture
def stored_on_disk(
    make_server: Callable[..., LocalServer], tinylm: PreTrainedModel, identity: Representation
) -> torch.Tensor:
    """A prompt of three chunks, on the disk of a server that was stopped."""
    input_ids = random_ids(193)
    server = make_server()
    client = server.connect("auto", identity, OPTIONS)
    connector = TransformersConnector(client, tinylm, durable=True)
    assert connector.save(input_ids[:, :192], prefill(tinylm, input_ids[:, :192])) == 3
    server.close()
    return input_ids


@pytest.mark.parametrize(("token", "hit_tokens"), [(10, 0), (100, 64), (190, 128)])
def test_one_bit_that_flipped_on_disk_ends_the_hit_before_its_chunk(
    make_server: Callable[..., LocalServer],
    stored_on_disk: torch.Tensor,
    tmp_path: Path,
    tinylm: PreTrainedModel,
    identity: Representation,
    token: int,
    hit_tokens: int,
) -> None:
    input_ids = stored_on_disk
    values = kept(prefill(tinylm, input_ids[:, :192]))[7]
    row = values[0, 2, token].numpy().tobytes()
    assert flip_bit(tmp_path / "disk", row) == 1
    connector = TransformersConnector(make_server().connect("auto", identity, OPTIONS), tinylm)
    assert stored_tokens(connector, input_ids) == plain_tokens(tinylm, input_ids)
    stats = connector.stats()
    assert (stats.hit_tokens, stats.miss_tokens) == (hit_tokens, 193 - hit_tokens)
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


# --- what is not interchangeable is not hit


def hit_by(server: LocalServer, model: PreTrainedModel, identity: Representation) -> int:
    """Store a prompt as the identity at hand, return how much of it *identity* hits."""
    connector = TransformersConnector(server.connect("auto", identity, OPTIONS), model)
    return connector.load(random_ids(150))[1]


@pytest.fixture
def stored_as_r1(server: LocalServer, tinylm: PreTrainedModel, tokenizer: Any) -> LocalServer:
    identity = representation_of(tinylm, tokenizer, "r1")
    connector = TransformersConnector(server.connect("auto", identity, OPTIONS), tinylm)
    input_ids = random_ids(150)
    connector.save(input_ids, prefill(tinylm, input_ids))
    assert hit_by(server, tinylm, identity) == 149
    return server


def test_another_revision_hits_nothing(
    stored_as_r1: LocalServer, tinylm: PreTrainedModel, tokenizer: Any
) -> None:
    assert hit_by(stored_as_r1, tinylm, representation_of(tinylm, tokenizer, "r2")) == 0


def test_another_adapter_hits_nothing(
    stored_as_r1: LocalServer, tinylm: PreTrainedModel, tokenizer: Any
) -> None:
    adapted = representation_of(tinylm, tokenizer, "r1", adapter_digest="5ad1")
    assert hit_by(stored_as_r1, tinylm, adapted) == 0


def test_another_dtype_hits_nothing(
    stored_as_r1: LocalServer, load_tinylm: Any, tokenizer: Any
) -> None:
    model = load_tinylm(torch.bfloat16)
    assert hit_by(stored_as_r1, model, representation_of(model, tokenizer, "r1")) == 0


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10_000.0},
        {"rope_type": "linear", "rope_theta": 500_000.0, "factor": 2.0},
        {"rope_type": "linear", "rope_theta": 500_000.0, "factor": 4.0},
    ],
)
def test_another_rotation_hits_nothing(
    stored_as_r1: LocalServer, load_tinylm: Any, tokenizer: Any, rope: dict[str, Any]
) -> None:
    model = load_tinylm(rope_parameters=rope)
    assert hit_by(stored_as_r1, model, representation_of(model, tokenizer, "r1")) == 0


# --- misuse is refused in words


def test_a_batch_is_refused(connect: Connect) -> None:
    with pytest.raises(InvalidRequestError, match="one prompt"):
        connect().generate(random_ids(40).repeat(2, 1))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("num_beams", 2),
        ("num_return_sequences", 2),
        ("use_cache", False),
        ("cache_implementation", "static"),
        ("token_healing", True),
    ],
)
def test_settings_that_need_another_cache_are_refused(
    connect: Connect, setting: str, value: object
) -> None:
    settings = greedy()
    setattr(settings, setting, value)
    with pytest.raises(InvalidRequestError, match=setting):
        connect().generate(random_ids(40), settings)


def test_a_static_cache_is_refused(connect: Connect, tinylm: PreTrainedModel) -> None:
    cache = StaticCache(config=tinylm.config, max_cache_len=64)
    prompt = random_ids(40)
    with torch.inference_mode():
        tinylm(prompt, past_key_values=cache)
    with pytest.raises(RepresentationError, match="StaticCache"):
        connect().save(prompt, cache)


def test_a_client_of_another_model_is_refused(
    server: LocalServer, tinylm: PreTrainedModel, load_tinylm: Any, tokenizer: Any
) -> None:
    other = load_tinylm(torch.bfloat16)
    client = server.connect("auto", representation_of(other, tokenizer), OPTIONS)
    with pytest.raises(RepresentationError, match="representation_of"):
        TransformersConnector(client, tinylm)
