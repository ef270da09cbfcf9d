"""What a model computes behind a lossy copy is never stored, however it is computed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from helpers.coarse_codec import CoarseCodec, coarse_codec
from helpers.local_server import LocalServer
from helpers.lossy_copies import leave_on_disk
from helpers.torch_engine import (
    OPTIONS,
    greedy,
    kept,
    left_padded,
    plain_tokens,
    prefill,
    random_ids,
)
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from kvstore.client.engines.transformers import TransformersConnector, generation, representation_of
from kvstore.client.engines.transformers.cache import as_argument
from kvstore.proto.blend import ReuseReport, ShadowResult, accuracy_tag
from kvstore.proto.errors import DeadlineError, InvalidRequestError
from kvstore.proto.types import Accuracy, ChunkKey, Model
from kvstore.server.blending import gates

PROMPT = random_ids(300)
"""Four chunks of 64 tokens and some; three are stored, of the second a lossy copy only."""
OTHER = random_ids(150, seed=7)

Connect = Callable[..., TransformersConnector]
Use = Callable[[TransformersConnector, TransformersConnector], object]


@pytest.fixture
def server(make_server: Callable[..., LocalServer]) -> Iterator[LocalServer]:
    with coarse_codec():
        yield make_server("--codec", "disk=coarse")


@pytest.fixture
def connect(server: LocalServer, tinylm: PreTrainedModel, identity: Model) -> Connect:
    """Make connectors with a client each."""

    def make(accuracy: str = "bounded", **settings: Any) -> TransformersConnector:
        client = server.connect("auto", identity, OPTIONS)
        return TransformersConnector(client, tinylm, accuracy=accuracy, **settings)

    return make


@pytest.fixture
def keys(server: LocalServer, connect: Connect, tinylm: PreTrainedModel) -> list[ChunkKey]:
    """Store the first chunks of PROMPT; return the keys of all."""
    writer = connect("exact")
    writer.save(PROMPT[:, :192], prefill(tinylm, PROMPT[:, :192]))
    named = writer.client.keys(PROMPT[0].tolist())
    leave_on_disk(server, named[1:2])
    return named


def test_a_call_reads_lossy_copies_only_if_it_or_its_connector_says_so(
    connect: Connect, keys: list[ChunkKey], tinylm: PreTrainedModel
) -> None:
    for of_connector, of_call, hit in (
        ("exact", None, 64), ("exact", "bounded", 192), ("bounded", None, 192),
        ("bounded", "exact", 64), ("approximate", None, 192),  # which bounded ones are, too
    ):  # fmt: skip
        connector = connect(of_connector)
        cache, hit_tokens = connector.load(PROMPT, accuracy=of_call)
        assert hit_tokens == hit
        own = kept(prefill(tinylm, PROMPT[:, :hit]))
        is_exact = all(map(torch.equal, kept(cache), own))
        assert is_exact is (hit == 64)
    within = connect("exact").generate(PROMPT, greedy(1), deadline_ms=20_000)
    assert within.hit_tokens == 64


def generated(reader: TransformersConnector, _: TransformersConnector) -> None:
    reader.generate(PROMPT, greedy(90))


def with_a_static_cache(reader: TransformersConnector, _: TransformersConnector) -> None:
    settings = greedy(90)
    settings.cache_implementation = "static"
    reader.generate(PROMPT, settings)


def generated_within_a_deadline(reader: TransformersConnector, _: TransformersConnector) -> None:
    found = reader.generate(PROMPT, greedy(90), deadline_ms=20_000)
    assert found.hit_tokens == 192


def saved_from_a_copy(reader: TransformersConnector, _: TransformersConnector) -> None:
    cache, hit_tokens = reader.load(PROMPT)
    reader.save(PROMPT, computed(reader, copy.deepcopy(cache), hit_tokens), hit_tokens)


def saved_by_another(reader: TransformersConnector, other: TransformersConnector) -> None:
    other.save(PROMPT, computed(reader, *reader.load(PROMPT)))


def saved_what_generate_returned(
    reader: TransformersConnector, other: TransformersConnector
) -> None:
    output = reader.generate(PROMPT, greedy(90)).output
    other.save(output.sequences, output.past_key_values)


def in_a_batch(reader: TransformersConnector, _: TransformersConnector) -> None:
    ids, mask = left_padded([PROMPT[0], OTHER[0]])
    reader.generate(ids, greedy(90), attention_mask=mask)


def computed(reader: TransformersConnector, cache: Any, hit_tokens: int) -> Any:
    """Compute the rest of PROMPT."""
    with torch.inference_mode():
        reader._model(PROMPT[:, hit_tokens:], **as_argument(cache))
    return cache


WAYS = [
    generated, generated_within_a_deadline, with_a_static_cache, saved_from_a_copy,
    saved_by_another, saved_what_generate_returned, in_a_batch,
]  # fmt: skip


@pytest.mark.parametrize("use", WAYS)
def test_nothing_computed_behind_a_lossy_copy_is_stored(
    connect: Connect, keys: list[ChunkKey], use: Use
) -> None:
    reader, other = connect(), connect("exact")
    use(reader, other)
    client = other.client
    assert client.stat(keys=keys[3:]) == []
    assert client.lookup(keys=keys).ready == 1
    assert reader.stats().lossy_hit_tokens > 0
    unstored = [each.stats().lossy_unstored_chunks for each in (reader, other)]
    assert sum(unstored) >= 2
    assert reader.counts()["lossy_hit_tokens"] == reader.stats().lossy_hit_tokens


def test_what_an_exact_call_computes_is_stored_in_the_lossy_copys_place(
    connect: Connect, keys: list[ChunkKey], tinylm: PreTrainedModel
) -> None:
    reader = connect()
    reader.generate(PROMPT, greedy())
    reader.generate(PROMPT, greedy(), accuracy="exact")
    found = connect("exact").generate(PROMPT, greedy())
    assert found.hit_tokens == 299
    assert found.output.sequences[0].tolist() == plain_tokens(tinylm, PROMPT)


@pytest.fixture
def boundless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the disk's codec state no bound, and a gate open after four comparisons."""
    monkeypatch.setattr(CoarseCodec, "accuracy", Accuracy.approximate)
    monkeypatch.setattr(gates, "TRIALS", 4)


def report(codec: str, agreement: float) -> ReuseReport:
    """What tells the gate of *codec* of a comparison."""
    shadow = ShadowResult(2 - 2 * agreement, agreement, 64)
    return ReuseReport(accuracy_tag(codec), shadow=shadow)


@pytest.mark.usefixtures("boundless")
def test_copies_without_a_bound_are_read_once_comparisons_have_opened_the_models_gate(
    connect: Connect, keys: list[ChunkKey]
) -> None:
    reader = connect("approximate")
    assert reader.load(PROMPT)[1] == 64
    for number in range(4):
        assert reader.load(PROMPT)[1] == 64
        view = connect("exact").calibrate(PROMPT, "coarse")
        assert view is not None
        assert view.is_open is (number == 3), view
    assert reader.load(PROMPT)[1] == 192
    assert connect("bounded").load(PROMPT)[1] == 64
    assert connect("exact").calibrate(OTHER, "coarse") is None
    assert reader.client.lookup(keys=keys).ready == 1, "a comparison stores nothing"


@pytest.mark.usefixtures("boundless", "keys")
def test_a_gate_closes_by_itself_when_answers_are_too_far_from_those_of_a_full_prefill(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = connect("approximate")
    for _ in range(4):
        reader.calibrate(PROMPT, "coarse")
    found = [reader.generate(PROMPT, greedy()).hit_tokens for _ in range(3)]
    assert found == [192] * 3, "which were compared, and near enough"

    monkeypatch.setattr(generation, "comparison", lambda *_: report("coarse", 0.0))
    hits = [reader.generate(PROMPT, greedy(), accuracy="approximate").hit_tokens for _ in range(3)]
    assert hits[:2] == [192, 64], "it closed with the first, and what followed was exact"
    assert connect("approximate").allowed(Accuracy.approximate).least is Accuracy.bounded
    assert reader.stats().load_errors == {}


@pytest.mark.usefixtures("boundless", "keys")
def test_each_codec_has_a_gate_of_its_own(
    server: LocalServer, connect: Connect, tinylm: PreTrainedModel
) -> None:
    reader, calibrator = connect("approximate"), connect("exact")
    store_roughly(server, connect, tinylm, OTHER)
    for _ in range(4):
        assert calibrator.calibrate(PROMPT, "rough") is None
        calibrator.calibrate(PROMPT, "coarse")
    assert (reader.load(PROMPT)[1], reader.load(OTHER)[1]) == (192, 64)
    assert (reader.stats().gated_chunks, reader.stats().misses["gate"]) == (1, 1)
    for _ in range(4):
        view = calibrator.calibrate(OTHER, "rough")
    assert view is not None
    assert view.is_open
    assert reader.load(OTHER)[1] == 128
    while calibrator.client.report_reuse(report("rough", 0.0)).is_open:
        pass
    assert (reader.load(PROMPT)[1], reader.load(OTHER)[1]) == (192, 64)


def store_roughly(
    server: LocalServer, connect: Connect, model: PreTrainedModel, prompt: torch.Tensor
) -> None:
    """Store two chunks of *prompt*, of the second a copy by another codec only."""
    server.node.store.tiers.slots["disk"].encoder.use("rough")
    writer = connect("exact")
    writer.save(prompt[:, :128], prefill(model, prompt[:, :128]))
    leave_on_disk(server, writer.client.keys(prompt[0].tolist())[1:2])


@pytest.mark.usefixtures("boundless", "keys")
def test_a_prompt_that_is_stored_to_its_end_is_compared_over_more_than_its_last_token(
    connect: Connect, tinylm: PreTrainedModel
) -> None:
    writer = connect("exact")
    writer.save(PROMPT, prefill(tinylm, PROMPT), from_token=192)
    assert connect("bounded").load(PROMPT)[1] == 64
    for number in range(4):
        view = writer.calibrate(PROMPT, "coarse")
        assert view is not None
        assert (view.is_open, view.shadows) == (number == 3, (number + 1) % 4)


@pytest.mark.usefixtures("boundless", "keys")
def test_without_an_answer_about_the_gate_it_counts_as_closed(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = connect("approximate")
    for _ in range(4):
        reader.calibrate(PROMPT, "coarse")

    def late(_: object) -> object:
        raise DeadlineError("late")

    monkeypatch.setattr(reader.client, "report_reuse", late)
    assert reader.load(PROMPT)[1] == 64
    assert reader.stats().load_errors == {"DeadlineError": 1}


def test_an_accuracy_that_is_none_is_refused_by_name(connect: Connect) -> None:
    reader, wrong = connect(), cast("Any", ["exact"])
    with pytest.raises(InvalidRequestError, match="accuracy"):
        connect("lossy")
    with pytest.raises(InvalidRequestError, match="accuracy"):
        reader.load(PROMPT, accuracy=wrong)
    with pytest.raises(InvalidRequestError, match="accuracy"):
        reader.generate(PROMPT, greedy(), accuracy="")


def test_a_model_that_keeps_windows_is_read_exactly_only(
    server: LocalServer, tokenizer: Any
) -> None:
    config = MistralConfig(
        vocab_size=4096, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=40,
    )  # fmt: skip
    model: PreTrainedModel = MistralForCausalLM(config)
    client = server.connect("auto", representation_of(model, tokenizer), OPTIONS)
    with pytest.raises(InvalidRequestError, match="accuracy"):
        TransformersConnector(client, model, accuracy="bounded")
    with pytest.raises(InvalidRequestError, match="accuracy"):
        TransformersConnector(client, model).generate(PROMPT, accuracy="bounded")
