"""Request ids: the lines of one call have one, whoever made it up."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial

import grpc
import pytest
from conftest import ProcessMaker

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import kvstore_pb2_grpc
from kvstore.server.telemetry.tracing import (
    CURRENT,
    HEADER,
    MAX_ID_CHARS,
    NUMBERS,
    RequestId,
    add_request_id,
)
from kvstore.server.tiering.work_queue import WorkQueue

MADE_UP = re.compile(r"[0-9a-f]{16}")


def line() -> dict[str, object]:
    fields: dict[str, object] = {}
    add_request_id(None, "", fields)
    return fields


@contextmanager
def call(metadata: Callable[[], object] = tuple) -> Iterator[None]:
    """A call that brought *metadata* along is at work."""
    CURRENT.set(RequestId(next(NUMBERS), metadata))
    yield
    CURRENT.set(None)


def test_all_lines_of_a_call_have_the_id_that_it_brought_along() -> None:
    assert line() == {}
    with call(lambda: ((HEADER, "abc-1"), ("other", "x"))):
        assert line() == line() == {"request_id": "abc-1"}
    assert line() == {}


def test_a_call_without_one_gets_one_of_its_own() -> None:
    with call():
        first = line()["request_id"]
        assert line()["request_id"] == first
    with call():
        assert line()["request_id"] != first
    assert MADE_UP.fullmatch(str(first))


def test_an_id_that_would_spoil_the_log_is_not_taken() -> None:
    for given in ["", "a\nb", "é", "x" * (MAX_ID_CHARS + 1), b"bytes"]:
        assert MADE_UP.fullmatch(str(RequestId(1, partial(tuple, ((HEADER, given),)))))


def test_what_a_call_has_moved_has_its_id_too() -> None:
    seen: list[object] = []
    with closing(WorkQueue({"queue": 1}, 10, time.monotonic)) as work_queue:
        with call(lambda: ((HEADER, "abc-1"),)):
            ticket = work_queue.submit(
                "queue", b"one", lambda: seen.append(line().get("request_id"))
            )
        assert ticket is not None
        work_queue.wait(ticket, time.monotonic() + 20)
        other = work_queue.submit("queue", b"two", lambda: seen.append(line().get("request_id")))
        assert other is not None
        work_queue.wait(other, time.monotonic() + 20)
    assert seen == ["abc-1", None]


def test_every_line_of_a_servers_log_is_json_and_refusals_have_their_ids(
    server_process: ProcessMaker,
) -> None:
    server = server_process("--log-format", "json", "--log-level", "info", "--tiers", "cpu")
    server.start()
    with grpc.insecure_channel(server.address) as channel:
        stub = kvstore_pb2_grpc.KVStoreStub(channel)
        for metadata in (((HEADER, "from-the-caller"),), ()):
            with pytest.raises(grpc.RpcError):
                stub.Lookup(pb.LookupRequest(session_id=7), metadata=metadata, timeout=20)
            with pytest.raises(grpc.RpcError):
                list(stub.Get(pb.GetRequest(session_id=7), metadata=metadata, timeout=20))
        with pytest.raises(grpc.RpcError):
            stub.OpenSession(pb.OpenSessionRequest(client="x" * 200), timeout=20)
    assert server.terminate() == 0
    lines = [json.loads(text) for text in server.errors.splitlines()]
    refused = [one for one in lines if one["event"] == "refused"]
    ids = [one["request_id"] for one in refused]
    assert ids[:2] == ["from-the-caller"] * 2
    assert all(MADE_UP.fullmatch(one) for one in ids[2:])
    assert len(set(ids[2:])) == len(ids) - 2 == 3
