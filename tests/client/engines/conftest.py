"""The trained model of the checkout, and engines over a server."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.local_server import LocalServer
from helpers.slow_device import SlowDevice
from helpers.torch_engine import OPTIONS
from helpers.vllm_steps import Engine
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvstore.client.engines.transformers import TransformersConnector, representation_of
from kvstore.client.engines.vllm.blocks import side_by_side
from kvstore.proto.types import Model

TINYLM = Path(__file__).resolve().parents[3] / "data" / "tinylm"

ModelLoader = Callable[..., PreTrainedModel]
Connect = Callable[[], TransformersConnector]


@pytest.fixture(scope="session")
def load_tinylm() -> ModelLoader:
    """Load the trained model with *settings* that differ from its own, in float32 by default."""

    def load(dtype: torch.dtype = torch.float32, **settings: Any) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            TINYLM, dtype=dtype, **settings
        )
        return model

    return load


@pytest.fixture(scope="session")
def tinylm(load_tinylm: ModelLoader) -> PreTrainedModel:
    """The trained model in float32."""
    return load_tinylm()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Its tokenizer."""
    return AutoTokenizer.from_pretrained(TINYLM)


@pytest.fixture
def identity(tinylm: PreTrainedModel, tokenizer: Any) -> Model:
    return representation_of(tinylm, tokenizer)


@pytest.fixture
def connect(server: LocalServer, tinylm: PreTrainedModel, identity: Model) -> Connect:
    """Make connectors with a client each."""

    def make() -> TransformersConnector:
        return TransformersConnector(server.connect("auto", identity, OPTIONS), tinylm)

    return make


@pytest.fixture
def start_at(request: pytest.FixtureRequest) -> Callable[..., Engine]:
    """Start what vLLM does around its connector, over a server; closed in the end."""

    def make(address: str, on_device: bool = False, **settings: Any) -> Engine:
        if on_device:
            settings = {"packing": side_by_side, "device": SlowDevice(), **settings}
        engine = Engine(address, **settings)
        request.addfinalizer(engine.close)
        return engine

    return make


@pytest.fixture
def start(server: LocalServer, start_at: Callable[..., Engine]) -> Callable[..., Engine]:
    """Do so on the test's server."""
    return partial(start_at, server.address)
