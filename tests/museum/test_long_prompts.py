"""Pain 19: what is stored and never found, as there is too much of it for one request."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from contracts.chunks import make_representation
from server_process import ServerProcess

from kvstore.client import Client, ClientOptions
from kvstore.client.engines.base import Connector, Span
from kvstore.client.tensors import LayerTensors
from kvstore.codecs.base import ChunkTensors, empty_tensors
from kvstore.proto.types import DType, KVLayout

TINY = make_representation(layers=1, kv_heads=1, head_dim=2, dtype=DType.uint8)
"""A frame of 16 tokens of it has 448 bytes."""


class LongPrompts:
    """An engine whose KV is the token ids' lowest bytes."""

    def __init__(self, client: Client) -> None:
        self.connector = Connector(client)
        self.room: list[ChunkTensors] = []

    def store(self, prompt: np.ndarray) -> int:
        """Store a prompt; return how many chunks were new."""

        def source(span: Span) -> LayerTensors:
            return [[_parts(prompt, span)]]

        return self.connector.store_chunks(prompt, source)  # type: ignore[arg-type]

    def load(self, prompt: np.ndarray) -> int:
        """Load a prompt, and check what came; return how many tokens did."""
        spans: list[Span] = []

        def room(asked: object) -> list[ChunkTensors]:
            spans.extend(asked)  # type: ignore[arg-type]
            self.room = [empty_tensors(KVLayout.of(TINY, b - a)) for a, b in spans]
            return self.room

        stored = self.connector.load_chunks(prompt, room).stored_tokens  # type: ignore[arg-type]
        for span, found in zip(spans, self.room, strict=True):
            if span[1] <= stored:
                assert all(map(np.array_equal, found[0][0], _parts(prompt, span)))
        return stored


def _parts(prompt: np.ndarray, span: Span) -> tuple[np.ndarray, np.ndarray]:
    rows = prompt[slice(*span)].astype(np.uint8)
    part = np.repeat(rows[None, :, None], 2, axis=2)
    return part, part


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    process = ServerProcess(
        tmp_path_factory.mktemp("server"),
        "--tiers",
        "cpu",
        "--cpu",
        "64MiB",
        "--log-level",
        "error",
    )
    process.start()
    yield process.address
    process.kill()


@pytest.mark.parametrize("chunk_tokens", [16, 256])
def test_vllm_44780_a_prompt_longer_than_one_request_is_a_hit_to_its_end(
    address: str, chunk_tokens: int
) -> None:
    """vllm#44780, sglang#17018: of prompts past a limit on blocks or keys in one call nothing was
    found, though all of it was stored.

    Here 4,097 chunks of 16 tokens, and 4,688 of 256, are one more than a request takes and many
    more; all of them are stored, found and read, and of a long prompt that shares ten chunks, ten.
    """
    count = {16: 65_552, 256: 1_200_000}[chunk_tokens]
    prompt = np.random.default_rng(chunk_tokens).integers(0, 32_000, count)
    options = ClientOptions(chunk_tokens=chunk_tokens, deadline_ms=60_000)
    with Client(address, TINY, options) as client:
        engine = LongPrompts(client)
        chunks = -(-count // chunk_tokens)
        assert engine.store(prompt) == chunks
        assert engine.store(prompt) == 0
        assert engine.load(prompt) == count
        other = prompt.copy()
        other[10 * chunk_tokens :] += 1
        assert engine.load(other) == 10 * chunk_tokens
        assert engine.connector.stats().load_errors == {}
        assert engine.connector.stats().store_errors == {}
