"""Pain 19: what is stored and never found, as there is too much of it for one request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contracts.chunks import make_representation
from helpers.documents import put_prompt, read, report_of, shadowed
from helpers.plain_engine import load_prompt
from helpers.prompts import equal, tensors_of, tokens
from helpers.server_process import ServerProcess

from kvstore.cli.__main__ import main
from kvstore.client import Client, ClientOptions
from kvstore.client.blend.plan import SegmentRange
from kvstore.client.chunk import LayerTensors
from kvstore.client.engines.base import Connector
from kvstore.client.engines.prefix import Span
from kvstore.client.options import TransportName
from kvstore.client.segments import SegmentQuery
from kvstore.codecs.base import ChunkTensors, empty_tensors
from kvstore.proto.keys import chunk_key
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

        stored = load_prompt(self.connector, prompt, room).stored_tokens  # type: ignore[arg-type]
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
    found, though all of it was stored. Here: one more than a request takes, and many more."""
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


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_vllm_44780_a_prompt_longer_than_one_request_is_blended_to_its_end(
    address: str, transport: TransportName
) -> None:
    """1,100 chunks, of which a Resolve and a report take 1,024: a document behind another head, and
    a prompt that was put itself."""
    document = tokens(44_780, 1_099 * 16)
    options = ClientOptions(transport, chunk_tokens=16, deadline_ms=60_000)
    with Client(address, TINY, options) as client:
        count: dict[int, tuple[int, int]] = {}
        for head in (tokens(1, 16), tokens(2, 16)):
            prompt, ranges = [*head, *document], [SegmentRange(16, 1_100 * 16)]
            if not count:
                put_prompt(client, prompt, ranges)
            with client.find_segments(
                prompt, ranges, SegmentQuery(transport, is_trial=True)
            ) as resolved:
                found = list(resolved.chunks())
                count[head[0]] = (len(found), sum(one.is_exact for one in found))
                for one, tensors in zip(found, read(resolved), strict=True):
                    key = chunk_key(client.namespace, one.best.digest)
                    assert equal(tensors, tensors_of(key, TINY, one.wanted.tokens))
                report = report_of(resolved, shadowed())
                report = replace(report, tag=transport, ratio=resolved.found.gate.ratio)
                shadows = client.report_reuse(report).shadows
            assert resolved.found.exact_prefix == count[head[0]][1]
        assert list(count.values()) == [(1_100, 1_100), (1_099, 0)]
        assert shadows == 2


def test_vllm_44780_a_prompt_longer_than_one_request_is_explained_to_its_end(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """4,200 chunks, of which 4,097 were put and one of them dropped: each has its reason."""
    prompt = np.random.default_rng(3).integers(0, 32_000, 4_200 * 16).tolist()
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(prompt))
    with Client(address, TINY, ClientOptions(chunk_tokens=16, deadline_ms=60_000)) as client:
        LongPrompts(client).store(np.array(prompt[: 4_097 * 16]))
        argv = ["explain", "--address", address, "--namespace", client.namespace.hex()]
        argv += ["--tokens", str(path), "--chunk-tokens", "16", "--json"]

        def explained() -> Any:
            with pytest.raises(SystemExit) as ended:
                main(argv)
            out, err = capsys.readouterr()
            assert (ended.value.code or 0, err) == (0, "")
            return json.loads(out)

        found = explained()
        assert (found["hit_chunks"], found["left_out"]) == (4_097, 0)
        states = [one["state"] for one in found["chunks"]]
        assert states == ["ready"] * 4_097 + ["unknown"] * 103
        client.delete(keys=[client.keys(prompt)[1_500]])
        found = explained()
    states = [one["state"] for one in found["chunks"]]
    assert found["hit_chunks"] == 1_500
    assert states[1_501:4_097] == ["behind"] * 2_596
    reasons = {one["reason"] for one in found["chunks"][1_501:4_097]}
    assert reasons == {"cached, but the earlier chunk 1500 is not"}
