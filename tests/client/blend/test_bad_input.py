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
from helpers.blend_world import STORED, VOCABULARY, random_tokens
from helpers.local_server import DEADLINE_MS, LocalServer
from typing_extensions import override

from kvstore.client import Client
from kvstore.client.blend import gate as gate_module
from kvstore.client.blend.engine import Blender
from kvstore.client.blend.gate import GuardedBlender, ShadowEval
from kvstore.client.blend.plan import SegmentRange, name_segments
from kvstore.client.blend.store import StoreSource, store_prefill
from kvstore.client.engines.transformers import TransformersConnector
from kvstore.client.engines.transformers.blend_adapter import BlendedCache
from kvstore.client.engines.transformers.cache import as_argument
from kvstore.client.options import TransportName
from kvstore.client.segments import SegmentMatch, SegmentQuery
from kvstore.client.transports.base import Outgoing, PutTerms, cut_header
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.frame import FLAG_RESTORED, FrameTemplate
from kvstore.proto.keys import representation_digest
from kvstore.proto.types import ChunkKey, KVLayout, PutOutcome, RopeParameters

by_each_transport = pytest.mark.parametrize("transport", ["shm", "grpc", "tcp"])
TRIAL = SegmentQuery(is_trial=True)
SUFFIX = 9
DOCUMENT = random_tokens(1, 48)
BEFORE = ([*random_tokens(2, 20), *DOCUMENT, *random_tokens(3, SUFFIX)], [SegmentRange(20, 68)])
ASKED = ([*random_tokens(4, 36), *DOCUMENT, *random_tokens(5, SUFFIX)], [SegmentRange(36, 84)])
OTHER_ROPE: dict[str, Any] = {"rope": RopeParameters(5e5, 16)}
OTHER_ADAPTER: dict[str, Any] = {"adapter_digest": "blake3:of a LoRA"}


@pytest.fixture
def server(make_server: Callable[..., LocalServer]) -> LocalServer:
    return make_server("--bulk", "127.0.0.1:0")


@pytest.fixture
def client(client: Client, blender: Blender) -> Client:
    """Of a server that has the document behind another head."""
    puts = store_prefill(client, blender.prefill(BEFORE[0]), *BEFORE)
    assert {put.outcome for put in puts} == {PutOutcome.stored}
    return client


def assert_computed(
    blender: Blender, resolved: SegmentMatch, client: Client
) -> tuple[str, set[str]]:
    """Fail unless the answer is a full prefill's; return why it, or its segments, were computed."""
    with StoreSource(resolved, ASKED[0], client.model) as source:
        found = blender.blend(source.plan.with_ratio(0.2), source)
    assert not found.is_blended
    wanted = blender.prefill(ASKED[0]).logits[-SUFFIX:]
    assert float((found.logits - wanted).abs().max()) <= 1e-5
    return found.report.failure, set(found.report.refused.values())


# --- whose KV is given out


def test_chunks_of_another_rotation_adapter_or_model_are_found_by_nobody(
    server: LocalServer, client: Client
) -> None:
    with client.find_segments(*ASKED, TRIAL) as resolved:
        assert len(list(resolved.chunks())) == 3
    for change in (OTHER_ROPE, OTHER_ADAPTER, {"model_revision": "b" * 40}):
        other = server.connect("auto", replace(STORED, **change))
        with other.find_segments(*ASKED, TRIAL) as resolved:
            assert list(resolved.chunks()) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [(OTHER_ROPE, "another rotation"), (OTHER_ADAPTER, "another adapter")],
    ids=["rotation", "adapter"],
)
def test_an_engine_that_is_not_what_its_client_says_computes_instead(
    server: LocalServer, blender: Blender, change: dict[str, Any], reason: str
) -> None:
    """The client's Model is of another rotation or adapter than the engine's own."""
    client = server.connect("auto", replace(STORED, **change))
    store_prefill(client, blender.prefill(BEFORE[0]), *BEFORE)
    with client.find_segments(*ASKED, TRIAL) as resolved:
        assert assert_computed(blender, resolved, client) == ("", {reason})


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


@by_each_transport
def test_frames_with_other_tokens_a_shorter_chunk_or_another_place_are_not_used(
    server: LocalServer, client: Client, transport: TransportName
) -> None:
    reader = server.connect(transport, STORED)
    with reader.find_segments(*ASKED, TRIAL) as resolved:
        one, another = list(resolved.chunks())[:2]
        for wrong in (
            replace(one, asked=replace(one.asked, content=b"x" * 16)),
            replace(one, asked=replace(one.asked, stop=one.asked.stop - 1)),
            replace(one, best=replace(one.best, position=one.best.position + 1)),
        ):
            assert list(resolved.layers([wrong])) == []
            assert {len(layer.tensors) for layer in resolved.layers([another, wrong])} == {1}


def test_variants_that_are_deleted_mid_plan_are_computed(client: Client, blender: Blender) -> None:
    resolved = client.find_segments(*ASKED, TRIAL)
    resolved.release()
    for entry in client.list():
        client.delete(keys=[ChunkKey(client.namespace + entry.digest)])
    assert "LeaseExpiredError" in assert_computed(blender, resolved, client)[0]


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
        assert "LayoutMismatchError" in assert_computed(blender, resolved, client)[0]


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
    assert server.counter("blend_reports") == 0
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


@by_each_transport
def test_kv_that_is_marked_as_blended_is_refused_by_every_way_in(
    server: LocalServer, transport: TransportName
) -> None:
    client = server.connect(transport, STORED)
    one = name_segments(*BEFORE, 16)[0].chunks[0]
    layout = KVLayout.of(STORED, one.tokens)
    key = ChunkKey(client.namespace + one.digest)
    template = FrameTemplate(key, one.parent, representation_digest(STORED), one.content, layout)
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


def test_a_connector_stores_nothing_of_what_was_generated_from_a_blend(
    client: Client, blender: Blender
) -> None:
    model = blender.adapter._model  # type: ignore[attr-defined]
    with (
        client.find_segments(*ASKED, TRIAL) as resolved,
        StoreSource(resolved, ASKED[0], STORED) as source,
    ):
        result = blender.blend(source.plan, source)
    assert result.is_blended
    with pytest.raises(InvalidRequestError, match="blended"):
        store_prefill(client, result, ASKED[0], [])
    ids = torch.tensor([ASKED[0]])
    cache = BlendedCache.of(model, result)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), **as_argument(cache), max_new_tokens=4,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    before = {entry.digest for entry in client.list()}
    with pytest.raises(ModelError, match="BlendedCache"):
        TransformersConnector(client, model).save(output, cache)
    assert {entry.digest for entry in client.list()} == before
