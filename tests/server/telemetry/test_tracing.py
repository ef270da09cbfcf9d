"""Tracing, request ids, recordings of requests, and metrics."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import pytest
import zmq
from blake3 import blake3
from conftest import ProcessMaker, ServerMaker
from helpers.credentials import KeyRing
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import assert_reads, keys_of, store, tokens
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from simulation.clock import FakeClock

from kvstore.client import Access, ClientOptions
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import kvstore_pb2_grpc
from kvstore.proto.errors import InvalidRequestError, LeaseExpiredError, PermissionDeniedError
from kvstore.proto.types import DIGEST_BYTES, KEY_BYTES, ChunkKey
from kvstore.server import node
from kvstore.server.settings.settings import load_config
from kvstore.server.telemetry import request_trace
from kvstore.server.telemetry import tracing as module
from kvstore.server.telemetry.metrics import COUNTERS, TIMED, Counters
from kvstore.server.telemetry.request_trace import IDLE_S, NAME_BYTES, RequestLog, check_local
from kvstore.server.telemetry.tracing import HEADER, MAX_ID_CHARS, RequestId, Tracing, open_tracing
from kvstore.server.web.event_publisher import END
from kvstore.server.web.gauges import MetricsText

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
        server.node.store.catalog.drop_copy("cpu", key)
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


def test_no_span_and_no_published_event_has_a_token_a_prompt_or_a_salt(
    traces: Traces, make_server: ServerMaker, tmp_path: Path
) -> None:
    ring, secret, folder = KeyRing(tmp_path / "keys"), tmp_path / "secret", tmp_path / "p"
    secret.write_bytes(b"canary-in-the-salt" * 2)
    folder.mkdir(mode=0o700)
    proof = ring.make("canary-tenant")
    server = make_server(
        *("--auth-keys", str(ring.path), "--secret-file", str(secret), "--tiers", "cpu"),
        *("--events-replay", f"ipc:{folder / 'r'}"),
    )
    options = ClientOptions("grpc", chunk_tokens=16, deadline_ms=20_000, access=Access(token=proof))
    client = server.connect(options=options)
    keys = store(client, 7, 3)
    assert_reads(client, keys)
    with client.events() as pages:
        next(pages)
    traces.one(f"{SERVICE}/Events")
    spans = "".join(span.to_json() for span in traces.all())
    salt, prompt = node.tenant_salts(server.config)("canary-tenant"), tokens(7, 48)[:4]
    hidden = [proof, proof[17:], "canary", ", ".join(map(str, prompt)), salt.hex()]
    hidden += [key[DIGEST_BYTES:].hex() for key in keys]
    assert f"{SERVICE}/Put" in spans
    assert [one for one in hidden if one in spans] == []

    def published() -> bytes:
        with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
            reader.connect(f"ipc://{folder / 'r'}")
            reader.send_multipart((b"", bytes(8)))
            told = b""
            while not told.endswith(END):
                assert reader.poll(DEADLINE_MS)
                told += b"".join(reader.recv_multipart())
        return told

    assert eventually(lambda: all(bytes(key) in published() for key in keys))
    ids = b"".join(one.to_bytes(4, "little") for one in prompt)
    raw, secrets = published(), [proof.encode(), proof[17:].encode(), b"canary", salt, ids]
    assert [one for one in secrets if one in raw] == []


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


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(KEY_BYTES, "big"))


def chain(*numbers: int) -> list[ChunkKey]:
    return [key(number) for number in numbers]


def names(text: bytes) -> list[bytes]:
    return [text[at : at + NAME_BYTES] for at in range(0, len(text), NAME_BYTES)]


@pytest.fixture
def recorder(clock: FakeClock) -> RequestLog:
    return RequestLog(clock)


def test_nothing_is_kept_before_somebody_reads_and_a_second_reader_joins(
    recorder: RequestLog,
) -> None:
    recorder.note(chain(1, 2), 0, 0)
    first = recorder.read(0, 0)
    assert (first.lookups, first.last, first.lost) == ([], 0, 0)
    assert first.recording
    recorder.note(chain(1), 0, 0)
    second = recorder.read(0, 0)
    assert (second.recording, second.last) == (first.recording, 1)
    recorder.note(chain(2), 0, 0)
    assert len(recorder.read(second.recording, second.last).lookups) == 1
    page = recorder.read(first.recording, 1 << 40)  # what never was
    assert (page.lookups, page.last, page.lost) == ([], 2, 0)


def test_lookups_are_read_once_in_order_with_times_of_their_own(
    recorder: RequestLog, clock: FakeClock
) -> None:
    clock.advance(5.0)
    recording = recorder.read(0, 0).recording
    clock.advance(1.5)
    recorder.note(chain(1, 2), 1, 500)
    clock.advance(1.0)
    recorder.note([], 0, 0)
    page = recorder.read(recording, 0)
    assert [(one.at_s, len(one.names), one.ready, one.tokens) for one in page.lookups] == [
        (1.5, 16, 1, 500),
        (2.5, 0, 0, 0),
    ]
    assert (page.last, page.lost) == (2, 0)
    assert recorder.read(recording, page.last).lookups == []
    recorder.note(chain(3), 0, 0)
    later = recorder.read(recording, page.last)
    assert (len(later.lookups), later.last) == (1, 3)


def test_equal_chunks_have_equal_names_in_a_recording_and_others_in_the_next(
    recorder: RequestLog, clock: FakeClock
) -> None:
    seen = []
    for _ in range(2):
        recording = recorder.read(0, 0).recording
        recorder.note(chain(1, 2), 0, 0)
        recorder.note(chain(1, 3), 0, 0)
        one, other = (names(x.names) for x in recorder.read(recording, 0).lookups)
        assert one[0] == other[0]
        assert one[1] != other[1]
        seen.append(one[0])
        clock.advance(IDLE_S + 1)
    assert seen[0] != seen[1]
    assert blake3(key(1)).digest(NAME_BYTES) not in seen
    assert key(1)[-NAME_BYTES:] not in seen


def test_a_recording_that_nobody_reads_ends_and_leaves_nothing(
    recorder: RequestLog, clock: FakeClock
) -> None:
    recording = recorder.read(0, 0).recording
    recorder.note(chain(1), 0, 0)
    for _ in range(2):
        clock.advance(IDLE_S)
        assert len(recorder.read(recording, 0).lookups) == 1, "somebody reads it"
    clock.advance(IDLE_S + 1)
    recorder.note(chain(2), 0, 0)
    assert recorder._recording is None
    with pytest.raises(InvalidRequestError, match="begin another"):
        recorder.read(recording, 0)


def test_it_keeps_no_more_than_its_limits_and_says_what_was_lost(
    recorder: RequestLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_trace, "LOG_LOOKUPS", 10)
    monkeypatch.setattr(request_trace, "LOG_CHUNKS", 25)
    recording = recorder.read(0, 0).recording
    for number in range(30):
        recorder.note(chain(number), 0, 0)
    page = recorder.read(recording, 5)
    assert (len(page.lookups), page.last, page.lost) == (10, 30, 15)
    for number in range(3):
        recorder.note(chain(*range(number, number + 10)), 0, 0)
    page = recorder.read(recording, 30)
    assert (len(page.lookups), page.last, page.lost) == (2, 33, 1)


def test_pages_are_cut_and_go_on_where_they_ended(
    recorder: RequestLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_trace, "PAGE_LOOKUPS", 4)
    monkeypatch.setattr(request_trace, "PAGE_CHUNKS", 6)
    recording, after, sizes = recorder.read(0, 0).recording, 0, []
    for number in range(7):
        recorder.note(chain(number, 100), 0, 0)
    recorder.note(chain(*range(9)), 0, 0)
    for _ in range(5):
        page = recorder.read(recording, after)
        sizes.append(len(page.lookups))
        after = page.last
    assert sizes == [3, 3, 1, 1, 0]
    assert after == 8


def test_callers_on_the_host_may_read_and_no_others() -> None:
    for peer in ["unix:", "unix:/run/s", "ipv4:127.0.0.1:5", "ipv6:%5B::1%5D:5"]:
        check_local(peer)
    for peer in ["", "ipv4:10.0.0.7:5", "ipv6:%5B2001:db8::1%5D:5", "x:127.0.0.1"]:
        with pytest.raises(PermissionDeniedError, match="own host"):
            check_local(peer)


def test_threads_lose_no_count() -> None:
    counters = Counters()

    def count_up(_: int) -> None:
        for _ in range(500):
            counters.add("get_chunks")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(count_up, range(8)))
    assert counters["get_chunks"] == 4_000


def test_every_series_is_served_from_the_start_and_then_as_it_stands() -> None:
    counters, gauge = Counters(), ("tier_used_bytes", "bytes taken", "cpu", 4096.0)

    def scrape() -> list[str]:
        return MetricsText(counters, lambda: [gauge], ("cpu", "disk")).text().decode().splitlines()

    lines = scrape()
    for name in COUNTERS:
        assert f"kvstore_{name}_total 0.0" in lines
    for method in TIMED:
        assert f'kvstore_call_seconds_count{{method="{method}"}} 0.0' in lines
    for series in (
        'tier_found_chunks_total{tier="disk"}',
        'flow_chunks_total{source="cpu",target="disk"}',
        'tenant_ready_chunks_total{tenant="others"}',
    ):
        assert f"kvstore_{series} 0.0" in lines
    counters.add("get_bytes", 7)
    counters.note_move("disk", "cpu", 40)
    counters.note_call("Get", 0.003)
    lines = scrape()
    for series in (
        "get_bytes_total 7.0",
        'tier_used_bytes{tier="cpu"} 4096.0',
        'flow_bytes_total{source="disk",target="cpu"} 40.0',
        'call_seconds_bucket{le="0.002",method="Get"} 0.0',
        'call_seconds_bucket{le="0.005",method="Get"} 1.0',
        'call_seconds_sum{method="Get"} 0.003',
    ):
        assert f"kvstore_{series}" in lines
