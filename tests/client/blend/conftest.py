"""Makes the benchmarks importable, last on the path; and one thread for tensors this small."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.blend_world import OPTIONS, STORED, make_model
from helpers.local_server import LocalServer

from kvstore.client import Client
from kvstore.client.blend.engine import Blender
from kvstore.client.engines.transformers.blend_adapter import TransformersAdapter

sys.path.append(str(Path(__file__).resolve().parents[3]))


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def blender() -> Blender:
    """Of a small Llama in float32: the model that ``client`` is of."""
    return Blender(TransformersAdapter(make_model("llama", torch.float32)))


@pytest.fixture
def client(server: LocalServer) -> Client:
    return server.connect("auto", STORED, OPTIONS)
