"""What no blend may believe, from a real server to the engine: each is refused by name, found by
nobody or computed, and the answer is the full prefill's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.blend_world import LAYERS, VOCABULARY, make_model
from helpers.local_server import DEADLINE_MS, LocalServer
from typing_extensions import override

from kvstore.client import Client, ClientOptions
from kvstore.client.blend import gate as gate_module
from kvstore.client.blend.engine import Blender
from kvstore.client.blend.gate import GuardedBlender, ShadowEval
from kvstore.client.blend.plan import SegmentRange, name_segments
from kvstore.client.blend.store import StoreSource, store_prefill
from kvstore.client.engines.transformers import TransformersConnector
from kvstore.client.engines.transformers.blend_adapter import BlendedCache, TransformersAdapter
from kvstore.client.engines.transformers.cache import as_argument
from kvstore.client.options import TransportName
from kvstore.client.segments import SegmentMatch, SegmentQuery
from kvstore.client.transports.base import Outgoing, PutTerms, cut_header
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.frame import FLAG_RESTORED, FrameTemplate
from kvstore.proto.keys import representation_digest
from kvstore.proto.types import (
    ChunkKey,
    DType,
    KVLayout,
    LayerGroup,
    LayerKind,
    Model,
    PutOutcome,
    RopeParameters,
)

TRANSPORTS: tuple[TransportName, ...] = ("shm", "grpc", "tcp")
TRIAL = SegmentQuery(is_trial=True)
SUFFIX = 9


def _tokens(seed: int, count: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (count,), generator=draw).tolist()


DOCUMENT = _tokens(1, 48)
STORED = ([*_tokens(2, 20), *DOCUMENT, *_tokens(3, SUFFIX)], [SegmentRange(20, 68)])
ASKED = ([*_tokens(4, 36), *DOCUMENT, *_tokens(5, SUFFIX)], [SegmentRange(36, 84)])
GROUP = LayerGroup(LayerKind.attention, DType.float32, tuple(range(LAYERS)), 2, 16)


@pytest.fixture(scope="module")
def blender() -> Blender:
    return Blender(TransformersAdapter(make_model("llama", torch.float32)))


@pytest.fixture(scope="module")
def representation(blender: Blender) -> Model:
    rope = blender.adapter.origin.rope
    return Model("tiny", "a" * 40, "none", "none", (GROUP,), rope, "tokens")


@pytest.fixture
def server(make_server: Callable[..., LocalServer]) -> LocalServer:
    return make_server("--bulk", "127.0.0.1:0")


def connected(
    server: LocalServer, representation: Model, transport: TransportName = "auto"
) -> Client:
    options = ClientOptions(transport, chunk_tokens=16, deadline_ms=DEADLINE_MS)
    return server.connect(transport, representation, options)


@pytest.fixture
def client(server: LocalServer, blender: Blender, representation: Model) -> Client:
    """Of a server that has the document behind another head."""
    client = connected(server, representation)
    puts = store_prefill(client, blender.prefill(STORED[0]), *STORED)
    assert {put.outcome for put in puts} == {PutOutcome.stored}
    return client


def assert_computed(blender: Blender, resolved: SegmentMatch, client: Client) -> str:
    """Fail unless the answer is a full prefill's; return why it was computed."""
    with StoreSource(resolved, ASKED[0], client.model) as source:
        found = blender.blend(source.plan.with_ratio(0.2), source)
    assert not found.is_blended
    wanted = blender.prefill(ASKED[0]).logits[-SUFFIX:]
    assert float((found.logits - wanted).abs().max()) <= 1e-5
    return found.report.failure


# --- whose KV is given out


@pytest.mark.parametrize(
    "change",
    [
        {"rope": RopeParameters(5e5, 16)},
        {"adapter_digest": "blake3:of a LoRA"},
        {"model_revision": "b" * 40},
    ],
    ids=["rotation", "adapter", "weights"],
)
def test_chunks_of_another_rotation_adapter_or_model_are_found_by_nobody(
    server: LocalServer,
    client: Client,
    representation: Model,
    change: dict[str, Any],
) -> None:
    with client.find_segments(*ASKED, TRIAL) as resolved:
        assert len(list(resolved.chunks())) == 3
    other = connected(server, replace(representation, **change))
    with other.find_segments(*ASKED, TRIAL) as resolved:
        assert list(resolved.chunks()) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rope": RopeParameters(5e5, 16)}, "another rotation"),
        ({"adapter_digest": "blake3:of a LoRA"}, "another adapter"),
    ],
    ids=["rotation", "adapter"],
)
def test_an_engine_that_is_not_what_its_client_says_computes_instead(
    server: LocalServer,
    blender: Blender,
    representation: Model,
    change: dict[str, Any],
    reason: str,
) -> None:
    """The client's Model is of another rotation or adapter than the engine's own."""
    client = connected(server, replace(representation, **change))
    store_prefill(client, blender.prefill(STORED[0]), *STORED)
    with (
        client.find_segments(*ASKED, TRIAL) as resolved,
        StoreSource(resolved, ASKED[0], client.model) as source,
    ):
        found = blender.blend(source.plan, source)
    assert set(found.report.refused.values()) == {reason}
    assert not found.is_blended
    wanted = blender.prefill(ASKED[0]).logits[-SUFFIX:]
    assert float((found.logits - wanted).abs().max()) <= 1e-5


def test_a_server_that_turns_keys_otherwise_is_refused_by_name(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = client.model
    monkeypatch.setattr(client._link, "model", replace(own, rope=RopeParameters(9e9, 16)))
    with pytest.raises(ModelError, match="rope="):
        client.find_segments(*ASKED, TRIAL)


# --- what comes is not what was named


def test_token_ids_that_do_not_match_the_digest_are_refused_by_name(client: Client) -> None:
    """A plan of one chunk holds its digest against the prompt's tokens."""
    document = SegmentRange(36, 52)
    with client.find_segments(ASKED[0], [document], TRIAL) as resolved:
        assert len(list(resolved.chunks())) == 1
        other = list(ASKED[0])
        other[40] = (other[40] + 1) % VOCABULARY
        with pytest.raises(InvalidRequestError, match=r"segment\.chunk_id"):
            StoreSource(resolved, other, client.model)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("field", ["content", "stop", "position"])
def test_frames_with_other_tokens_a_shorter_chunk_or_another_place_are_not_used(
    server: LocalServer,
    client: Client,
    blender: Blender,
    representation: Model,
    transport: TransportName,
    field: str,
) -> None:
    reader = connected(server, representation, transport)
    with reader.find_segments(*ASKED, TRIAL) as resolved:
        chunks = list(resolved.chunks())
        one = chunks[0]
        wrong = {
            "content": replace(one, asked=replace(one.asked, content=b"x" * 16)),
            "stop": replace(one, asked=replace(one.asked, stop=one.asked.stop - 1)),
            "position": replace(one, best=replace(one.best, position=one.best.position + 1)),
        }[field]
        assert list(resolved.layers([wrong])) == []
        layers = list(resolved.layers([chunks[1], wrong]))
        assert {len(layer.tensors) for layer in layers} == {1}


def test_variants_that_are_deleted_mid_plan_are_computed(
    server: LocalServer, client: Client, blender: Blender
) -> None:
    resolved = client.find_segments(*ASKED, TRIAL)
    resolved.release()
    for entry in client.list():
        client.delete(keys=[ChunkKey(client.namespace + entry.digest)])
    assert "LeaseExpiredError" in assert_computed(blender, resolved, client)


def test_variants_that_went_under_their_lease_are_computed(
    server: LocalServer, client: Client, blender: Blender
) -> None:
    """A tier lost them, whatever was promised."""
    server.settled()
    with client.find_segments(*ASKED, TRIAL) as resolved:
        store = server.node.store
        key = ChunkKey(client.namespace + list(resolved.chunks())[2].best.digest)
        for name in ("cpu", "disk"):
            slot = store.tiers.slots[name]
            store.moves.eviction.delete_from(slot, key)
            store.catalog.forget(name, key)
        assert "LayoutMismatchError" in assert_computed(blender, resolved, client)


def test_an_engine_that_reports_nonsense_is_refused_and_answers_all_the_same(
    server: LocalServer, client: Client, blender: Blender, monkeypatch: pytest.MonkeyPatch
) -> None:
    nonsense = ShadowEval(-1.0, 7.0, 9, 7.0, 9)
    monkeypatch.setattr(gate_module, "worse", lambda *_: nonsense)
    done = GuardedBlender(client, blender, TRIAL).run(*ASKED)
    assert "InvalidRequestError" in done.failure
    assert "shadow.divergence" in done.failure
    count = len(done.result.logits)
    wanted = blender.prefill(ASKED[0], logits_from=len(ASKED[0]) - count).logits
    assert torch.equal(done.result.logits, wanted)
    assert server.counter("blend_refused_reports") == 1
    with client.find_segments(*ASKED, TRIAL) as resolved:
        assert all(one.best.reports == 0 for one in resolved.chunks())
        assert resolved.found.gate.shadows == 0


# --- blended KV is no original


class _Marked(Outgoing):
    """A chunk of blended KV, marked as such."""

    @override
    def encode(self, out: Bytes, flags: int = 0) -> None:
        super().encode(out, flags | FLAG_RESTORED)

    @override
    def pieces(self, room: Callable[[int], Bytes]) -> list[Bytes]:
        frame = room(self.frame_bytes)
        self.encode(frame)
        return cut_header(frame)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_kv_that_is_marked_as_blended_is_refused_by_every_way_in(
    server: LocalServer, representation: Model, transport: TransportName
) -> None:
    client = connected(server, representation, transport)
    one = name_segments(STORED[0], STORED[1], 16)[0].chunks[0]
    layout = KVLayout.of(representation, one.tokens)
    key = ChunkKey(client.namespace + one.digest)
    digest = representation_digest(representation)
    template = FrameTemplate(key, one.parent, digest, one.content, layout)
    parts = [[[np.zeros(c.shape, "u4")] * c.parts] * c.layers for c in layout.components]
    put = client._link.connected().put
    try:
        (result,) = put([_Marked(template, parts)], PutTerms(False, DEADLINE_MS))
        said = result.reason
        assert result.outcome is not PutOutcome.stored
    except InvalidRequestError as error:
        said = str(error)
    assert "never stored as an original" in said
    assert client.lookup(keys=[key]).ready == 0
    assert server.usage().tiers[0][1].chunks == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_connector_stores_nothing_of_what_was_generated_from_a_blend(
    server: LocalServer,
    client: Client,
    blender: Blender,
    representation: Model,
    transport: TransportName,
) -> None:
    model = blender.adapter._model  # type: ignore[attr-defined]
    own = connected(server, representation, transport)
    with (
        own.find_segments(*ASKED, TRIAL) as resolved,
        StoreSource(resolved, ASKED[0], representation) as source,
    ):
        result = blender.blend(source.plan, source)
    assert result.is_blended
    ids = torch.tensor([ASKED[0]])
    cache = BlendedCache.of(model, result)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), **as_argument(cache), max_new_tokens=4,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    before = {entry.digest for entry in own.list()}
    connector = TransformersConnector(own, model)
    with pytest.raises(ModelError, match="BlendedCache"):
        connector.save(output, cache)
    assert {entry.digest for entry in own.list()} == before
