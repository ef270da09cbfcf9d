"""Known namespaces over a restart: their bytes, bad ones, and what explain says after it."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from conftest import ServerMaker
from golden.history_samples import PATH, PATH_V2, saved, with_spaces
from hypothesis import given
from hypothesis import strategies as st
from local_server import DEADLINE_MS, LocalServer
from prompts import SMALL, other_revision, store

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.types import DIGEST_BYTES, ChunkKey, Namespace
from kvstore.server.index.known_models import MAX_SPACES, ModelNamespace, ModelRegistry
from kvstore.server.index.saved_history import (
    MAX_SPACE_BYTES,
    SavedHistory,
    pack_spaces,
    unpack_spaces,
)


def space(number: int, client: str = "engine") -> ModelNamespace:
    return ModelNamespace(Namespace(number.to_bytes(16, "little")), "acme", client, SMALL)


def test_the_golden_file_of_version_2_is_read_and_written_as_ever() -> None:
    data = PATH_V2.read_bytes()
    assert SavedHistory.unpack(data).spaces == list(with_spaces().spaces)
    assert with_spaces().pack() == data
    assert data[:4] == PATH.read_bytes()[:4]


def test_a_file_of_version_1_has_no_spaces() -> None:
    assert SavedHistory.unpack(PATH.read_bytes()).spaces == ()
    assert saved().pack()[4:6] == b"\1\0"


def test_no_more_are_written_than_are_remembered() -> None:
    many = [space(number) for number in range(MAX_SPACES + 5)]
    assert unpack_spaces(pack_spaces(many)) == many[5:]
    assert unpack_spaces(pack_spaces([space(1, "x" * MAX_SPACE_BYTES), space(2)])) == [space(2)]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\1\0\0",
        struct.pack("<I", MAX_SPACES + 1),
        struct.pack("<I", 2) + pack_spaces([space(1)])[4:],
        pack_spaces([space(1)]) + b"\0",
        pack_spaces([space(1)])[:-1],
        struct.pack("<I16sHHI", 1, b"", 0, 0, 1 << 20) + bytes(1 << 20),
        struct.pack("<I16sHHI", 1, b"", 1, 0, 0) + b"\xff",
        struct.pack("<I16sHHI", 1, b"", 0, 0, 4) + b"\xff\xff\xff\xff",
        struct.pack("<I16sHHI", 1, b"", 0, 0, 0),
    ],
    ids=["none", "cut", "many", "fewer", "more", "short", "large", "text", "message", "empty"],
)
def test_bytes_that_are_no_records_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidFrameError, match="spaces"):
        unpack_spaces(data)


@given(st.binary(max_size=300))
def test_noise_is_refused_or_read(noise: bytes) -> None:
    for data in (noise, struct.pack("<I", 1) + noise):
        with suppress(InvalidFrameError):
            unpack_spaces(data)


def test_of_what_is_restored_the_latest_stay() -> None:
    spaces = ModelRegistry()
    spaces.restore([space(number) for number in range(MAX_SPACES + 3)])
    assert len(spaces.all()) == MAX_SPACES
    assert spaces.all()[0] == space(MAX_SPACES + 2)


def asked(server: LocalServer, keys: list[ChunkKey]) -> pb.ExplainResponse:
    request = pb.ExplainRequest(
        key_namespace=keys[0][:DIGEST_BYTES], digests=b"".join(k[DIGEST_BYTES:] for k in keys)
    )
    return server.dial().call("Explain", request, DEADLINE_MS, pb.ExplainResponse)


def test_explain_knows_other_identities_after_a_restart(
    make_server: ServerMaker,
) -> None:
    server = make_server()
    ours = server.connect("auto")
    store(ours, 1, 3)
    theirs = server.connect("auto", other_revision(SMALL))
    keys = theirs.keys([*range(48)])
    spaces = {ours.namespace, theirs.namespace}
    server.close()
    again = make_server()
    known = {one.namespace: one.client for one in again.node.store.spaces.all()}
    assert set(known) == spaces
    reply = asked(again, list(keys))
    assert {one.state for one in reply.chunks} == {"unknown"}
    assert [near.chunks for near in reply.near] == [3]
