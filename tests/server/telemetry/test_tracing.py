"""Tracing and request ids: whose spans and lines are whose, and what is in them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest
from conftest import ProcessMaker, ServerMaker
from helpers.credentials import KeyRing
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import assert_reads, keys_of, store, tokens
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvstore.client import Access, ClientOptions
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import kvstore_pb2_grpc
from kvstore.proto.errors import InvalidRequestError, LeaseExpiredError
from kvstore.proto.types import DIGEST_BYTES
from kvstore.server import node
from kvstore.server.settings.settings import load_config
from kvstore.server.telemetry import tracing as module
from kvstore.server.telemetry.tracing import (
    HEADER,
    MAX_ID_CHARS,
    RequestId,
    Tracing,
    open_tracing,
)

SERVICE = "kvstore.v1.KVStore"


class Traces:
    """What a server traced."""

    def __init__(self) -> None:
        self._memory = InMemorySpanExporter()
        self.tracing = Tracing(SimpleSpanProcessor(self._memory), share=1.0)

    def all(self) -> list[ReadableSpan]:
        return list(self._memory.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        """Return the only span of that name, once it has ended."""
        assert eventually(lambda: bool(self.named(name)))
        (span,) = self.named(name)
        return span

    def forget(self) -> None:
        self._memory.clear()


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Traces:
    made = Traces()
    monkeypatch.setattr(node, "open_tracing", lambda endpoint, share: made.tracing)
    return made


@pytest.fixture
def provider() -> Iterator[TracerProvider]:
    """What the program that calls traces with."""
    made = TracerProvider(shutdown_on_exit=False)
    yield made
    made.shutdown()


def ids(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def parent(span: ReadableSpan) -> tuple[int, int] | None:
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)


def test_a_call_has_a_span_and_what_it_reads_from_tiers_has_spans_in_it(
    traces: Traces, make_server: ServerMaker
) -> None:
    server = make_server("--cpu", "4MiB", "--limits", "cpu_slab_bytes=4MiB")
    client = server.connect("grpc")
    keys = store(client, 1, 2)
    put = traces.one(f"{SERVICE}/Put")
    assert eventually(lambda: len(traces.named("disk write")) == 2)
    server.settled()
    writes = traces.named("disk write")
    assert [parent(span) for span in writes] == [ids(put)] * 2
    for key in keys:
        server.node.store.catalog.cast_out("cpu", key)
        server.node.store.tiers.cpu_tier.delete(key)
        server.node.store.catalog.purged("cpu", key)
    traces.forget()
    assert_reads(client, keys)
    get = traces.one(f"{SERVICE}/Get")
    reads = traces.named("disk read")
    assert {parent(span) for span in reads} == {ids(get)}
    assert dict(get.attributes or {}) == {
        "rpc.system": "grpc",
        "rpc.service": SERVICE,
        "rpc.method": "Get",
        "rpc.grpc.status_code": 0,
        "kvstore.chunks": 2,
        "kvstore.request_id": (get.attributes or {})["kvstore.request_id"],
    }
    said = {"kvstore.tier": "disk", "kvstore.done": True}
    assert [dict(span.attributes or {}) for span in reads] == [said] * 2


def test_calls_over_the_unix_socket_and_streams_have_spans_of_their_own(
    traces: Traces, make_server: ServerMaker
) -> None:
    """Neither carries a trace, so each is a first; what it asks of tiers is in it."""
    server = make_server(
        "--cpu", "4MiB", "--limits", "cpu_slab_bytes=4MiB", "--bulk", "127.0.0.1:0"
    )
    far = server.connect("tcp")
    keys = store(far, 1, 2)
    put = traces.one("tcp/Put")
    assert parent(put) is None
    server.settled()
    assert {parent(span) for span in traces.named("disk write")} == {ids(put)}
    near = server.connect("shm")
    assert near.lookup(keys=keys).ready == 2
    looked_up = traces.one("unix/Lookup")
    assert parent(looked_up) is None
    assert dict(looked_up.attributes or {}) == {
        "rpc.system": "kvstore",
        "rpc.service": "unix",
        "rpc.method": "Lookup",
        "kvstore.chunks": 2,
    }
    traces.forget()
    assert_reads(far, keys)
    assert traces.one("tcp/Get").status.is_ok


def test_the_callers_trace_goes_on_in_the_server(
    traces: Traces, server: LocalServer, provider: TracerProvider
) -> None:
    client = server.connect("grpc")
    keys = keys_of(client, 1, 2)
    with provider.get_tracer("engine").start_as_current_span("prefill") as span:
        client.lookup(keys=keys)
        context = span.get_span_context()
    looked_up = traces.one(f"{SERVICE}/Lookup")
    assert parent(looked_up) == (context.trace_id, context.span_id)
    traces.forget()
    client.lookup(keys=keys)
    assert parent(traces.one(f"{SERVICE}/Lookup")) is None


def test_a_refused_call_says_by_which_error_and_not_why(
    traces: Traces, server: LocalServer
) -> None:
    connection = server.dial()
    with pytest.raises(LeaseExpiredError):
        connection.call("Lookup", pb.LookupRequest(session_id=77), DEADLINE_MS, pb.LookupResponse)
    span = traces.one(f"{SERVICE}/Lookup")
    attributes = dict(span.attributes or {})
    assert attributes["kvstore.error"] == "LeaseExpiredError"
    assert attributes["rpc.grpc.status_code"] == grpc.StatusCode.ABORTED.value[0]
    assert not span.status.is_ok
    assert "session_id" not in span.to_json()
    assert span.events == ()


def test_no_span_has_a_token_a_prompt_a_key_or_a_salt(
    traces: Traces, make_server: ServerMaker, tmp_path: Path
) -> None:
    ring, secret = KeyRing(tmp_path / "keys"), tmp_path / "secret"
    secret.write_bytes(b"canary-in-the-salt" * 2)
    proof = ring.make("canary-tenant")
    server = make_server("--auth-keys", str(ring.path), "--secret-file", str(secret))
    options = ClientOptions("grpc", chunk_tokens=16, deadline_ms=20_000, access=Access(token=proof))
    client = server.connect(options=options)
    keys = store(client, 7, 3)
    assert_reads(client, keys)
    client.delete(keys=keys)
    with client.events() as pages:
        next(pages)
    traces.one(f"{SERVICE}/Events")
    written = "".join(span.to_json() for span in traces.all())
    prompt = ", ".join(map(str, tokens(7, 48)[:4]))
    hidden = [proof, proof[17:], "canary", prompt, *(key[DIGEST_BYTES:].hex() for key in keys)]
    assert f"{SERVICE}/Put" in written
    assert [one for one in hidden if one in written] == []


def test_a_server_without_an_endpoint_or_a_gpu_loads_neither_opentelemetry_nor_torch() -> None:
    program = (
        "import sys\n"
        "import kvstore.server.main\n"
        "from kvstore.server.settings.settings import Settings\n"
        "from kvstore.server.node import Node\n"
        "import kvstore.client\n"
        "Node(Settings(tiers=('cpu',), listen='127.0.0.1:0', socket_path='off')).stop(1.0)\n"
        "heavy = {'torch', 'cupy', 'transformers', 'opentelemetry'}\n"
        "print(sorted(heavy & {name.partition('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_a_collector_that_is_not_there_costs_no_call_and_no_stop(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EXPORT_TIMEOUT_S", 0.1)
    server = make_server("--tracing-endpoint", "http://127.0.0.1:1", "--tracing-share", "1")
    client = server.connect("grpc")
    assert_reads(client, store(client, 1, 2))
    client.close()
    assert server.stop()


def test_an_endpoint_that_is_none_is_refused() -> None:
    for url in ["127.0.0.1:4317", "ftp://h:1", "http://h", "http://h:1/path", "http://u:p@h:1"]:
        with pytest.raises(InvalidRequestError, match="tracing"):
            load_config(["--tracing-endpoint", url])


def test_without_opentelemetry_the_start_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(InvalidRequestError, match=r"kvstore-server\[tracing\]"):
        open_tracing("http://127.0.0.1:1", 1.0)


MADE_UP = re.compile(r"[0-9a-f]{16}")


def test_an_id_that_would_spoil_the_log_is_not_taken() -> None:
    for given in ["", "a\nb", "é", "x" * (MAX_ID_CHARS + 1), b"bytes"]:
        assert MADE_UP.fullmatch(str(RequestId(1, partial(tuple, ((HEADER, given),)))))


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
