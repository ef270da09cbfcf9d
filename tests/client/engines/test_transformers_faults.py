"""The transformers connector when the store fails or lies, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from helpers.local_server import LocalServer
from helpers.server_process import ServerProcess
from helpers.torch_engine import (
    OPTIONS,
    greedy,
    kept,
    plain_tokens,
    prefill,
    random_ids,
    stored_tokens,
)
from transformers import BatchEncoding, PreTrainedModel, StaticCache

from kvstore.client import Client
from kvstore.client.engines.transformers import TransformersConnector, representation_of
from kvstore.client.engines.transformers.cache import as_argument
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.types import Model

Connect = Callable[[], TransformersConnector]


# --- the store fails, or lies


def test_a_server_killed_between_lookup_and_get_is_a_counted_miss(
    server_process: Callable[..., ServerProcess],
    tmp_path: Path,
    tinylm: PreTrainedModel,
    identity: Model,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = server_process("--cpu", "16MiB", "--disk", f"16MiB:{tmp_path / 'disk'}")
    process.start()
    input_ids = random_ids(200)
    with Client(process.address, identity, OPTIONS) as client:
        connector = TransformersConnector(client, tinylm)
        without = plain_tokens(tinylm, input_ids)
        assert stored_tokens(connector, input_ids) == without
        assert connector.stats().stored_chunks > 0

        def killing(*given: Any, own: Any = client.get_chunks, **named: Any) -> Any:
            process.kill()
            return own(*given, **named)

        monkeypatch.setattr(client, "get_chunks", killing)
        assert stored_tokens(connector, input_ids) == without
        stats = connector.stats()
    assert (stats.hit_tokens, stats.miss_tokens) == (0, 400)
    assert sum(stats.load_errors.values()) == 1
    assert set(stats.store_errors) == {"TierUnavailableError"}


@pytest.fixture
def stored_on_disk(
    make_server: Callable[..., LocalServer], tinylm: PreTrainedModel, identity: Model
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
    identity: Model,
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


def hit_by(server: LocalServer, model: PreTrainedModel, identity: Model) -> int:
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


def test_a_batch_is_loaded_and_saved_prompt_by_prompt(connect: Connect) -> None:
    with pytest.raises(InvalidRequestError, match="one prompt"):
        connect().load(random_ids(40).repeat(2, 1))


@pytest.mark.parametrize(
    "mask",
    [[[1, 0, 1]], [[1, 1, 0]], [[0, 0, 0]], [[1, 1]]],
    ids=["hole", "right", "none", "short"],
)
def test_padding_that_is_not_on_the_left_is_refused(connect: Connect, mask: Any) -> None:
    with pytest.raises(InvalidRequestError, match="attention_mask"):
        connect().generate(random_ids(3), attention_mask=torch.tensor(mask))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("num_beams", 2),
        ("num_return_sequences", 2),
        ("use_cache", False),
        ("cache_implementation", "quantized"),
        ("cache_implementation", "offloaded"),
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


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"input_ids": "words"}, "input_ids='str': give a tensor, lists"),
        ({"input_ids": [[3, 4], [5]]}, "input_ids='list': give a tensor, lists"),
        ({"input_ids": [[0.5]]}, r"input_ids='torch.float32': give whole numbers"),
        ({"input_ids": None}, "input_ids='NoneType': give a tensor"),
        ({"input_ids": {"input_ids": [[3]], "pixel_values": 1}}, "'pixel_values': give input_ids"),
        ({"input_ids": [[3, 4]], "attention_mask": [[1]]}, "attention_mask"),
        ({"input_ids": [[3, 4]], "pixel_values": 1}, "pixel_values=1: give a setting"),
        ({"input_ids": [[3, 4]], "max_tokens": 8}, "max_tokens=8: give a setting"),
        ({"input_ids": [[3]], "config": greedy(), "generation_config": greedy()}, "given twice"),
    ],
)
def test_what_is_no_prompt_and_no_setting_is_refused_by_name(
    connect: Connect, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        connect().generate(**given)


def test_a_static_cache_is_refused(connect: Connect, tinylm: PreTrainedModel) -> None:
    cache = StaticCache(config=tinylm.config, max_cache_len=64)
    prompt = random_ids(40)
    with torch.inference_mode():
        tinylm(prompt, **as_argument(cache))
    with pytest.raises(ModelError, match="StaticCache"):
        connect().save(prompt, cache)


def test_a_client_of_another_model_is_refused(
    server: LocalServer, tinylm: PreTrainedModel, load_tinylm: Any, tokenizer: Any
) -> None:
    other = load_tinylm(torch.bfloat16)
    client = server.connect("auto", representation_of(other, tokenizer), OPTIONS)
    with pytest.raises(ModelError, match="representation_of"):
        TransformersConnector(client, tinylm)
