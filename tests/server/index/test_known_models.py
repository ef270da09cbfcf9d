"""Namespaces and what they stand for, compared field by field; which tokens of a chunk matter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.local_server import LocalServer
from helpers.prompts import MEDIUM, SMALL, keys_of, parts_of

from kvstore.client import Chunk, ClientOptions
from kvstore.client.options import TransportName
from kvstore.codecs.base import ChunkTensors, empty_tensors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.keys import namespace, representation_digest
from kvstore.proto.types import (
    Accuracy,
    ChunkKey,
    DType,
    KVLayout,
    LayerGroup,
    LayerKind,
    Model,
    PutOutcome,
    RopeParameters,
)
from kvstore.server.index import known_models
from kvstore.server.index.known_models import (
    OVERHEAD_BYTES,
    KnownModels,
    ModelNamespace,
    ModelRegistry,
    differences,
    nearest,
)
from kvstore.server.security.sessions import Session
from kvstore.tiers.base import DEFAULT_TENANT

(GROUP,) = SMALL.layer_groups


def session(kind: Model = SMALL, tenant: str = "default", number: int = 1) -> Session:
    space = namespace(tenant.encode(), kind)
    digest = representation_digest(kind)
    return Session(number, tenant, f"engine {number}", kind, space, digest, b"", 0.0)


def revision(number: int) -> Model:
    return replace(SMALL, model_revision=f"{number:040x}")


def of(spaces: ModelRegistry, one: Session) -> ModelNamespace:
    found = spaces.of(one.namespace)
    assert found is not None
    return found


def test_what_differs_is_named_with_both_values() -> None:
    groups = (replace(GROUP, dtype=DType.float16, layer_ids=tuple(range(32))),)
    rope = RopeParameters(10_000.0, 8, "linear", (("factor", 4.0),))
    for changes, found in (
        ({}, []),
        ({"adapter_digest": "sha256:5f"}, [("adapter_digest", "none", "sha256:5f")]),
        (
            {"layer_groups": groups},
            [
                ("layer_groups[0].dtype", "bfloat16", "float16"),
                ("layer_groups[0].layer_ids", "0 to 1", "0 to 31"),
            ],
        ),
        (
            {"rope": rope},
            [("rope.scaling", "default", "linear"), ("rope.factors", "none", "(('factor', 4.0),)")],
        ),
    ):
        assert differences(SMALL, replace(SMALL, **changes)) == found
    more = LayerGroup(LayerKind.attention, DType.float16, (2, 3), 2, 8)
    lacking = differences(SMALL, replace(SMALL, layer_groups=(GROUP, more)))
    assert {one.field.partition(".")[0] for one in lacking} == {"layer_groups[1]"}
    assert {one.stored for one in lacking} == {"none"}


def test_the_nearest_come_first_and_other_tenants_not_at_all() -> None:
    spaces = ModelRegistry()
    asked = session()
    far = replace(revision(2), adapter_digest="sha256:5f")
    for one in (session(far), session(revision(1)), session(revision(3), "acme"), asked):
        spaces.note(one)
    near = nearest(of(spaces, asked), spaces.others(of(spaces, asked)))
    assert [space.representation for space, _ in near] == [revision(1), far]
    assert [len(differing) for _, differing in near] == [1, 2]


def test_of_the_tenant_with_the_most_the_space_opened_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_models, "MAX_SPACES", 6)
    spaces = ModelRegistry()
    for number in range(2):
        spaces.note(session(revision(number), "acme"))
    for number in (*range(300), 297, 300):
        spaces.note(session(revision(number), "zeta", number))
    kept = [(space.tenant, space.representation) for space in spaces.all()]
    assert kept == [
        *(("zeta", revision(number)) for number in (300, 297, 299, 298)),
        *(("acme", revision(number)) for number in (1, 0)),
    ]
    assert spaces.of(session(revision(2), "zeta").namespace) is None


# --- which tokens matter


ServerMaker = Callable[..., LocalServer]
TOKENS = 64
IMPORTANT = (3, 40)
"""As many as get a quarter of the step."""


def numbers() -> ChunkTensors:
    out = empty_tensors(KVLayout.of(MEDIUM, TOKENS))
    draw = np.random.default_rng(0)
    for part in parts_of(out):
        part[...] = draw.normal(0, 1, part.shape).astype(np.float32).view(np.uint32) >> 16
    return out


def errors(one: ChunkTensors, other: ChunkTensors) -> np.ndarray:
    """Return each token's root mean square error."""
    pairs = zip(parts_of(one), parts_of(other), strict=True)
    squares = [
        ((a.astype(np.uint32) << 16).view("f4") - (b.astype(np.uint32) << 16).view("f4")) ** 2
        for a, b in pairs
    ]
    found: np.ndarray = np.sqrt(np.concatenate(squares).mean((0, 2)))
    return found


def weights() -> np.ndarray:
    found = np.full(TOKENS, 0.5, np.float32)
    found[list(IMPORTANT)] = 9
    found[10] = 0
    return found


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_tokens_that_were_said_to_matter_are_kept_more_exactly(
    make_server: ServerMaker, transport: TransportName
) -> None:
    server = make_server("--codec", "disk=kvq:1,importance")
    options = ClientOptions(transport, chunk_tokens=TOKENS, deadline_ms=20_000)
    client = server.connect(representation=MEDIUM, options=options)
    told, silent = keys_of(client, 1, 1)[0], keys_of(client, 2, 1)[0]
    tensors = numbers()
    chunk = Chunk(told, tensors, position=TOKENS, importance=weights())
    puts = client.put_chunks([chunk, replace(chunk, key=silent, importance=None)])
    assert {put.outcome for put in puts} == {PutOutcome.stored}
    server.settled()
    server.leave_memory([told, silent])
    weighed, plain = (
        errors(client.get_chunks([key], accuracy=Accuracy.bounded)[0], tensors)
        for key in (told, silent)
    )
    assert (weighed[list(IMPORTANT)] < 0.5 * plain[list(IMPORTANT)]).all()
    assert weighed[10] > 1.5 * plain[10]


@pytest.mark.parametrize(
    ("flags", "is_told"),
    [
        (("--codec", "disk=kvq:1"), False),
        (("--tenant-codecs", f"{DEFAULT_TENANT}/disk=kvq:1,importance"), True),
        (("--tenant-codecs", "acme/disk=kvq:1,importance"), False),
    ],
    ids=["nobody's", "the tenant's", "another's"],
)
def test_what_matters_is_said_where_a_codec_asks_alone(
    make_server: ServerMaker, flags: tuple[str, str], is_told: bool
) -> None:
    server = make_server(*flags)
    options = ClientOptions("shm", chunk_tokens=TOKENS)
    client = server.connect(representation=MEDIUM, options=options)
    assert not client.weighs  # no session yet
    client.put_chunks([Chunk(keys_of(client, 1, 1)[0], numbers(), importance=weights())])
    assert client.weighs is is_told
    assert bool(server.node.store.models.weights_bytes) is is_told


def test_importance_that_is_not_the_chunks_is_refused_before_anything_is_sent_and_after(
    server: LocalServer,
) -> None:
    options = ClientOptions("shm", chunk_tokens=TOKENS)
    client = server.connect(representation=MEDIUM, options=options)
    key = keys_of(client, 1, 1)[0]
    bad: list[Any] = [
        np.ones(TOKENS - 1, np.float32),
        np.ones(TOKENS, np.float64),
        np.full(TOKENS, np.nan, np.float32),
        np.full(TOKENS, -1, np.float32),
    ]
    for wrong in bad:
        with pytest.raises(InvalidRequestError, match="importance"):
            client.put_chunks([Chunk(key, numbers(), importance=wrong)])
    assert client.lookup(keys=[key]).ready == 0
    for weights in ([], [b""], [b"1", b"2"], [bytes(8193)]):
        with pytest.raises(InvalidRequestError, match="weights"):
            client._link.ask("Weigh", pb.WeighRequest(weights=weights), [key], pb.WeighResponse)


def test_no_more_is_kept_than_the_limit_and_the_oldest_goes() -> None:
    table = KnownModels(3 * (OVERHEAD_BYTES + 10))
    keys = [ChunkKey(bytes([i]) * 32) for i in range(5)]
    for key in keys:
        table.note_importance(key, bytes(10))
        table.note_importance(key, bytes(10))
    assert table.weights_bytes == 3 * (OVERHEAD_BYTES + 10)
    assert set(table._weights) == set(keys[2:])
