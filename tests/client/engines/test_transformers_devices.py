"""The transformers connector with model and cache on a device, and its twin on the CPU."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from helpers.local_server import LocalServer
from helpers.slow_device import SlowDevice
from helpers.torch_engine import OPTIONS, greedy, left_padded, prefill, random_ids
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, Gemma2Config, Lfm2Config, PreTrainedModel
from typing_extensions import override

from kvstore.client.engines.transformers import TransformersConnector, representation_of
from kvstore.client.engines.transformers import loads as transformers_loads
from kvstore.client.engines.transformers.cache import CacheShape, TokenShape
from kvstore.client.engines.transformers.loads import Staging, chunk_bytes
from kvstore.proto.device import HostDevice, HostStream, Stream

BASE: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "windows in every other layer": (Gemma2Config, {"head_dim": 16, "sliding_window": 70}),
    "convolutions beside attention": (Lfm2Config, {"full_attn_idxs": [1, 3], "block_ff_dim": 96}),
}


class CountingDevice(HostDevice):
    """Counts the copies of its streams, and what host memory was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0
        self.staged: list[int] = []

    @override
    def staging(self, size_bytes: int) -> torch.Tensor:
        self.staged.append(size_bytes)
        return super().staging(size_bytes)

    @override
    def current_stream(self) -> Stream:
        return CountingStream(self)


class CountingStream(HostStream):
    def __init__(self, device: CountingDevice) -> None:
        self._device = device

    @override
    def copy(self, out: torch.Tensor, data: torch.Tensor) -> None:
        self._device.copies += 1
        super().copy(out, data)


@pytest.fixture(scope="module")
def trained(load_tinylm: Any) -> Any:
    """The trained model in bfloat16."""
    return load_tinylm(torch.bfloat16)


def make_model(kind: str, trained: Any) -> Any:
    """The trained model, or a small random one of KINDS, in bfloat16."""
    if kind == "full attention":
        return copy.deepcopy(trained)
    config, settings = KINDS[kind]
    torch.manual_seed(5)
    makers: Any = AutoModelForCausalLM
    return makers.from_config(config(**(BASE | settings)), dtype=torch.bfloat16).eval()


def connect(
    server: LocalServer, model: PreTrainedModel, tokenizer: Any, device: HostDevice | None = None
) -> TransformersConnector:
    client = server.connect("auto", representation_of(model, tokenizer), OPTIONS)
    return TransformersConnector(client, model, device=device)


def assert_same_tokens(model: Any, found: torch.Tensor, own: torch.Tensor, mask: Any) -> None:
    """*found* and *own*, (prompts, tokens), are alike up to where two tokens were as likely.

    A prompt that is computed in other pieces is rounded otherwise.
    """
    for row, (mine, theirs) in enumerate(zip(found, own, strict=True)):
        differ = (mine != theirs).nonzero()
        if not len(differ):
            continue
        at = int(differ[0])
        ids = theirs[int((mask[row] == 0).sum()) : at]
        with torch.no_grad():
            logits = model(ids[None]).logits[0, -1].float()
        gap = float(logits[theirs[at]] - logits[mine[at]])
        assert gap <= 4 * torch.finfo(model.dtype).eps * float(logits.abs().max())


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        *(("cpu", kind) for kind in ("full attention", *KINDS)),
        *(pytest.param("cuda", k, marks=pytest.mark.gpu) for k in ("full attention", *KINDS)),
    ],
)
def test_on_each_device_tokens_are_the_same_without_with_and_from_the_store(
    server: LocalServer, trained: Any, tokenizer: Any, device: str, kind: str
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device: its twin on the CPU runs the same code")
    model = make_model(kind, trained).to(device)
    twin = CountingDevice() if device == "cpu" else None
    prompts = [random_ids(count, 256, count)[0] for count in (150, 1, 97)]
    for some in (prompts[:1], prompts):
        batch, mask = (part.to(device) for part in left_padded(some))
        own = model.generate(batch, generation_config=greedy(), attention_mask=mask)
        for _ in range(2):
            connector = connect(server, model, tokenizer, twin)
            found = connector.generate(batch, greedy(), attention_mask=mask)
            assert_same_tokens(model, found.output.sequences, own, mask)
            stats = connector.stats()
            assert (stats.load_errors, stats.store_errors) == ({}, {})
        assert found.row_hits[0] in (149, 128), "whole chunks where windows and states are kept"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_a_device_loads_is_what_it_stored_bit_for_bit(
    server: LocalServer, trained: Any, tokenizer: Any, device: str
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device: its twin on the CPU runs the same code")
    model = make_model("full attention", trained).to(device)
    input_ids = random_ids(230).to(device)
    twin = CountingDevice() if device == "cpu" else None
    with torch.inference_mode():
        own = model(input_ids).past_key_values
        assert connect(server, model, tokenizer, twin).save(input_ids, own) == 4
    cache, hit = connect(server, model, tokenizer, twin).load(input_ids)
    assert hit == 229
    layers: Any = cache.layers
    for mine, theirs in zip(layers, own.layers, strict=True):
        assert mine.keys.device.type == device
        assert torch.equal(mine.keys, theirs.keys[:, :, :229])
        assert torch.equal(mine.values, theirs.values[:, :, :229])


# --- what is copied, and when


def test_a_chunk_of_all_layers_is_one_copy_each_way_through_memory_made_once(
    server: LocalServer, tinylm: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = chunk_bytes(CacheShape.of(tinylm), OPTIONS.chunk_tokens)
    monkeypatch.setattr(transformers_loads, "RING_BYTES", 2 * size + 1)
    device = CountingDevice()
    connector = connect(server, tinylm, tokenizer, device)
    input_ids = random_ids(5 * 64 + 20)  # more chunks than the ring has places for
    own: Any = prefill(tinylm, input_ids)
    assert connector.save(input_ids, own) == 6
    assert device.copies == 6
    cache, hit = connector.load(input_ids)
    assert (hit, device.copies) == (5 * 64 + 19, 12)
    assert device.staged == [2 * size]
    layers: Any = cache.layers
    for mine, theirs in zip(layers, own.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys[:, :, :hit])


def test_host_memory_is_read_only_after_the_work_before_a_store_and_its_copy() -> None:
    device = SlowDevice()
    keys = torch.zeros(2, 4, 8)
    device.compute.launch(lambda: keys.fill_(7))  # the forward that the store comes behind
    shape = CacheShape(1, (TokenShape(0, 2, (8, 8), torch.float32),), ())
    staging = Staging(device, torch.device("cpu"), shape, 4)
    assert (staging.to_host([[[keys]]])[0][0][0] == 7).all()


def test_what_is_computed_behind_a_load_waits_for_its_copies(
    server: LocalServer, tinylm: Any, tokenizer: Any
) -> None:
    input_ids = random_ids(128)
    own: Any = prefill(tinylm, input_ids)
    connect(server, tinylm, tokenizer).save(input_ids, own)
    device = SlowDevice()
    cache, hit = connect(server, tinylm, tokenizer, device).load(input_ids)
    assert (hit, device.streams) == (127, []), "only the engine's own stream is used"
    layers: Any = cache.layers
    assert torch.equal(layers[0].keys, own.layers[0].keys[:, :, :hit])


def test_a_device_that_fails_is_a_counted_miss(
    server: LocalServer, tinylm: Any, tokenizer: Any
) -> None:
    device = SlowDevice()
    device.fails = True
    connector = connect(server, tinylm, tokenizer, device)
    input_ids = random_ids(70)
    own: Any = prefill(tinylm, input_ids)
    assert connector.save(input_ids, own) == 0
    assert connect(server, tinylm, tokenizer).save(input_ids, own) == 1
    cache, hit = connector.load(input_ids)
    assert (hit, cache.get_seq_length()) == (0, 0)
    stats = connector.stats()
    assert stats.load_errors == stats.store_errors == {"TierUnavailableError": 1}


# --- tensors name their device


FACTORIES = {
    torch.arange, torch.as_tensor, torch.empty, torch.full, torch.ones, torch.rand, torch.tensor,
    torch.zeros,
}  # fmt: skip


class Placed(TorchFunctionMode):
    """Fails where the connector makes a tensor and does not say on which device."""

    made = 0

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        if func in FACTORIES and caller.startswith("kvstore.client.engines.transformers"):
            self.made += 1
            assert (kwargs or {}).get("device") is not None, f"{func.__name__} in {caller}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_that_the_connector_makes_names_its_device(
    server: LocalServer, trained: Any, tokenizer: Any, kind: str
) -> None:
    model = make_model(kind, trained)
    batch, mask = left_padded([random_ids(count, 256, count)[0] for count in (70, 1)])
    with Placed() as placed:
        for _ in range(2):
            connector = connect(server, model, tokenizer, CountingDevice())
            connector.generate(batch, greedy(2), attention_mask=mask)
    assert placed.made > 0
