"""What a client returns of chunks and of the server: frozen values, whatever the server sent."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, is_dataclass
from typing import Any

import pytest
from helpers.local_server import LocalServer
from helpers.prompts import store

from kvstore.client.server_state import stat_from_message, status_from_message
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import KVStoreError
from kvstore.proto.types import Accuracy, LayerKind


def test_no_message_leaves_the_client(server: LocalServer) -> None:
    client = server.connect()
    keys = store(client, 1, 2)
    status = client.status()
    assert all(map(is_dataclass, [*client.list(), status]))
    first: Any = client.stat(keys=keys)[0]
    with pytest.raises(FrozenInstanceError):
        first.hits = 1
    assert first.copies[0].accuracy is Accuracy.exact
    assert first.components[0].kind is LayerKind.attention
    assert (first.expires_s, first.pinned_s) == (None, 0.0)
    assert status.counters["put_stored_chunks"] == 2
    assert status.directory is None


def test_a_time_that_is_unknown_is_none() -> None:
    assert stat_from_message(pb.ChunkStat(idle_s=-1)).idle_s is None
    assert stat_from_message(pb.ChunkStat(idle_s=2.5, expires_s=9)).expires_s == 9


def test_a_reply_with_a_number_that_stands_for_nothing_is_an_error_of_the_store() -> None:
    message = pb.ChunkStat(copies=[pb.Copy(tier="cpu", accuracy=77)])
    with pytest.raises(KVStoreError, match="77"):
        stat_from_message(message)


def test_a_server_in_a_directory_names_the_other_nodes() -> None:
    directory = pb.Directory(node_id="a", standing="known")
    directory.nodes.add(node_id="b", grpc_address="b:7420")
    status = status_from_message(pb.StatusResponse(directory=directory))
    assert status.directory is not None
    assert [node.grpc_address for node in status.directory.nodes] == ["b:7420"]
