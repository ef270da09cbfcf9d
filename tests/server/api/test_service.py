"""The service over the bare wire: what it refuses, in which words, and that nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from contracts.chunks import make_representation
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helpers.bare_wire import Wire, reheaded, wire_to
from helpers.local_server import DEADLINE_MS, LocalServer, eventually, open_session
from helpers.prompts import MEDIUM, SMALL, frame_of, store
from structlog.testing import capture_logs

from kvstore.client import Client
from kvstore.client.connection import translate
from kvstore.client.options import MAX_DEADLINE_MS as CLIENT_MAX_DEADLINE_MS
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import kvstore_pb2_grpc
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    ChunkCorruptError,
    DeadlineError,
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    LayoutMismatchError,
    LeaseExpiredError,
    ModelError,
    PermissionDeniedError,
    QuotaExceededError,
    ShuttingDownError,
    TierFullError,
    TierUnavailableError,
    UnauthenticatedError,
    UnknownCodecError,
)
from kvstore.proto.frame import FLAG_RESTORED, parse_header
from kvstore.proto.messages import FEATURE_DURABLE_PUT
from kvstore.proto.types import Accuracy, ChunkKey, PutOutcome
from kvstore.server.api import admin_calls
from kvstore.server.api.interceptors import MAX_MESSAGE_CHARS
from kvstore.server.api.put_stream import PutStream
from kvstore.server.settings.values import MAX_DEADLINE_MS

ServerMaker = Callable[..., LocalServer]

DIGESTS = bytes(range(16)) + bytes(range(16, 32))
"""Two chain digests."""


# --- numbers and batches

WITH_DIGESTS = ("Lookup", "Get", "Pin", "Unpin", "Delete", "Stat", "Reserve")


def ask(wire: Wire, method: str, **fields: Any) -> object:
    """Send a request of *method* in the way that it is sent."""
    if method == "Put":
        return wire.put(pb.PutRequest(frame_bytes=1, data=b"x", **fields))
    fields = {"ttl_ms": 1, **fields} if method == "Pin" else fields
    request = getattr(pb, f"{method}Request")(**fields)
    return (wire.stream if method in ("Get", "List") else wire.call)(method, request)


def test_deadline_beyond_the_limit_is_refused(server: LocalServer, wire: Wire) -> None:
    assert CLIENT_MAX_DEADLINE_MS == MAX_DEADLINE_MS
    with server.unchanged():
        for method in ("Lookup", "Get", "Put", "Drain"):
            fields = {} if method in ("Put", "Drain") else {"digests": DIGESTS}
            with pytest.raises(InvalidRequestError, match="deadline_ms=600001: at most 600000"):
                ask(wire, method, deadline_ms=600_001, **fields)


def test_batch_that_is_ragged_or_over_the_limit_is_refused(make_server: ServerMaker) -> None:
    server = make_server("--limits", "max_batch_chunks=4")
    wire = wire_to(server)
    with server.unchanged():
        for method in WITH_DIGESTS:
            with pytest.raises(InvalidRequestError, match="digests=31: give 16 bytes per chunk"):
                ask(wire, method, digests=DIGESTS[:31])
            with pytest.raises(InvalidRequestError, match="digests=5: at most 4 chunks in one"):
                ask(wire, method, digests=bytes(80))
        for method, name in (
            ("Release", "lease_ids"), ("Abort", "reservation_ids"), ("Commit", "reservation_ids")
        ):  # fmt: skip
            fields = {"offsets": [0] * 5} if method == "Commit" else {}
            with pytest.raises(InvalidRequestError, match=f"{name}=5: at most 4"):
                ask(wire, method, **{name: [1] * 5}, **fields)
    frames = [frame_of(wire.key(seed), SMALL) for seed in range(1, 6)]
    messages = [pb.PutRequest(frame_bytes=len(f), data=f.tobytes()) for f in frames]
    with pytest.raises(InvalidRequestError, match="frames=5: at most 4"):
        wire.put(*messages)
    assert server.settled().tiers[0][1].chunks == 4


def test_number_outside_its_range_is_refused(server: LocalServer, wire: Wire) -> None:
    with server.unchanged():
        for method, fields, message in (
            ("Pin", {"digests": DIGESTS, "ttl_ms": 0}, "ttl_ms=0: use 1 to 86400000"),
            ("Pin", {"digests": DIGESTS, "ttl_ms": 86_400_001}, "ttl_ms=86400001: use 1 to"),
            ("Lookup", {"min_accuracy": 4}, "min_accuracy=4: use 0 to 3"),
            ("Commit", {"reservation_ids": [1]}, "offsets=0: give one for each"),
            ("Get", {"digests": DIGESTS, "via": 9}, "^via=9"),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                ask(wire, method, **fields)


# --- sessions and leases


def test_session_beyond_the_limit_is_refused(make_server: ServerMaker) -> None:
    server = make_server("--max-sessions", "1")
    wire = wire_to(server)
    with pytest.raises(QuotaExceededError, match="this server reached max_sessions=1"):
        wire_to(server)
    for _ in range(2):
        wire.call("CloseSession", pb.CloseSessionRequest())
    with pytest.raises(LeaseExpiredError):
        wire.call("Heartbeat", pb.HeartbeatRequest())
    wire_to(server)


def test_lease_beyond_the_session_s_limit_is_refused(make_server: ServerMaker) -> None:
    server = make_server("--limits", "max_leases_per_session=2")
    wire = wire_to(server)
    wire.put_frame(frame_of(wire.key(), SMALL))
    request = pb.LookupRequest(digests=wire.key()[16:], lease=True)
    first = wire.call("Lookup", request)
    wire.call("Lookup", request)
    with pytest.raises(QuotaExceededError, match="max_leases_per_session=2"):
        wire.call("Lookup", request)
    assert wire.call("Release", pb.ReleaseRequest(lease_ids=[first.lease_id])).released == 1
    assert wire.call("Lookup", request).lease_id
    digests = wire.key()[16:]
    assert wire.call("Pin", pb.PinRequest(digests=digests, ttl_ms=60_000)).pinned == 1
    assert wire.call("Unpin", pb.UnpinRequest(digests=digests)).unpinned == 1


# --- draining


def test_draining_server_refuses_new_work_and_serves_what_it_has(
    server: LocalServer, wire: Wire
) -> None:
    wire.put_frame(frame_of(wire.key(), SMALL))
    assert wire.call("Drain", pb.DrainRequest(deadline_ms=DEADLINE_MS)).clean
    with pytest.raises(ShuttingDownError, match="no new puts"):
        wire.put_frame(frame_of(wire.key(2), SMALL))
    with pytest.raises(ShuttingDownError, match="no new sessions"):
        wire_to(server)
    heartbeat = wire.call("Heartbeat", pb.HeartbeatRequest())
    assert heartbeat.draining
    assert heartbeat.server.boot_id == wire.terms.server.boot_id
    assert wire.call("Status", pb.StatusRequest()).state == "draining"
    with grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        def is_serving(service: str) -> bool:
            request = health_pb2.HealthCheckRequest(service=service)
            return stub.Check(request, timeout=20).status == 1  # type: ignore[no-any-return]

        assert eventually(lambda: not is_serving("readiness"))
        assert is_serving("liveness"), "nobody restarts it for that"
    assert wire.stream("Get", pb.GetRequest(digests=wire.key()[16:]))


def test_durable_puts_are_offered_while_the_codec_of_the_disk_loses_nothing(
    make_server: ServerMaker, server: LocalServer, wire: Wire, tmp_path: Path
) -> None:
    def offered(wire: Wire = wire) -> bool:
        return bool(wire.call("Status", pb.StatusRequest()).server.features & FEATURE_DURABLE_PUT)

    for codec, is_durable in (("auto", True), ("auto:bounded", False)):
        flags = ("--disk", f"16MiB:{tmp_path / codec}", "--codec", f"disk={codec}")
        assert offered(wire_to(make_server(*flags, "--socket", "off"))) is is_durable
    (disk,) = server.node.store.tiers.lower
    assert offered()
    disk.encoder.use("kvq:2", " (auto)")
    assert eventually(lambda: not offered())
    disk.encoder.use("raw", " (auto)")
    assert eventually(offered)


# --- frames


def _flipped(at: int, bits: int = 1) -> Callable[[Bytes], Bytes]:
    def flip(frame: Bytes) -> Bytes:
        frame[at] ^= bits
        return frame

    return flip


BAD_FRAMES: dict[str, tuple[Callable[[Bytes], Bytes], type[KVStoreError], str]] = {
    "flipped bit in the header": (
        _flipped(70), InvalidFrameError, "header checksum=.*: the header is damaged",
    ),
    "flipped bit in the payload": (
        _flipped(-1), ChunkCorruptError, "layer 1 fails its checksum; it was dropped, put it again",
    ),
    "codec of the future": (
        lambda frame: reheaded(frame, codec_id=99), UnknownCodecError, "codec=99: .* known: 0, 2",
    ),
    "key of another namespace": (
        lambda frame: reheaded(frame, key=ChunkKey(bytes(16) + parse_header(frame).key[16:])),
        ModelError, "key='0000.*: not in this session's namespace .*; open a session with",
    ),
    "layout of another model": (
        lambda frame: frame_of(parse_header(frame).key, make_representation(layers=3)),
        LayoutMismatchError, "layout=.*: this session's is KVLayout",
    ),
    "identity of another model": (
        lambda frame: reheaded(frame, representation=bytes(16)), InvalidRequestError,
        "representation='0000.*: the frame is of another model's KV",
    ),
    "restored from a lossy copy": (
        lambda frame: reheaded(frame, flags=FLAG_RESTORED), InvalidRequestError,
        "accuracy='exact': restored or lossy KV is never stored as an original",
    ),
    "lossy": (
        lambda frame: reheaded(frame, accuracy=Accuracy.bounded), InvalidRequestError,
        "accuracy='bounded': restored or lossy KV is never stored as an original",
    ),
}  # fmt: skip


def test_bad_frame_is_refused_with_its_reason_and_leaves_nothing(
    server: LocalServer, wire: Wire
) -> None:
    with server.unchanged():
        for what, (change, kind, message) in BAD_FRAMES.items():
            with pytest.raises(kind, match=message):
                wire.put_frame(change(frame_of(wire.key(), SMALL)))
            found = wire.call("Lookup", pb.LookupRequest(digests=wire.key()[16:]))
            assert (found.ready, found.pending) == (0, 0), what


def test_frame_over_the_server_s_limit_is_refused(make_server: ServerMaker) -> None:
    server = make_server("--max-frame-bytes", "64KiB")
    connection = server.dial()
    wire = Wire(connection, open_session(connection, MEDIUM))
    frame = frame_of(wire.key(), MEDIUM, 64)
    with server.unchanged(), pytest.raises(InvalidRequestError, match=r"frame_bytes=.* at most 65"):
        wire.put_frame(frame)


def _component(field: str, value: int) -> Callable[[pb.ReserveRequest], None]:
    return lambda request: setattr(request.layouts[0].components[0], field, value)


BAD_RESERVES: list[tuple[Callable[[pb.ReserveRequest], object], type[KVStoreError], str]] = [
    (lambda r: r.frame_bytes.pop(), InvalidRequestError, "digests=2: give as many parents"),
    (
        lambda r: r.layout.__setitem__(1, 7), InvalidRequestError,
        "layout=7: index into layouts",
    ),
    (_component("kind", 77), InvalidRequestError, "layout='77 is not.*use a known kind"),
    (_component("kv_heads", 3), LayoutMismatchError, "this session's is KVLayout"),
    (
        lambda r: r.layouts[0].components.extend([pb.Component()] * 64),
        InvalidRequestError, "layout=65: at most 64 components",
    ),
    (
        lambda r: r.layouts[0].extents.extend(65 * [pb.Extent()]),
        InvalidRequestError, "layout=65: at most 64 components",
    ),
    (
        lambda r: r.frame_bytes.__setitem__(1, 1 << 63), InvalidRequestError,
        f"frame_bytes={1 << 63}: at most",
    ),
]  # fmt: skip


def test_bad_reserve_is_refused_whole(server: LocalServer, wire: Wire) -> None:
    with server.unchanged():
        for change, kind, message in BAD_RESERVES:
            request = wire.reserve(2304, 2304)
            change(request)
            with pytest.raises(kind, match=message):
                wire.call("Reserve", request)


def test_reserve_beyond_the_session_s_quota_gives_all_of_it_back(make_server: ServerMaker) -> None:
    server = make_server("--limits", "max_reservations_per_session=2")
    wire = wire_to(server)
    with (
        server.unchanged(),
        pytest.raises(QuotaExceededError, match="max_reservations_per_session=2: release some"),
    ):
        wire.call("Reserve", wire.reserve(2304, 2304, 2304))


def test_commit_without_staging_or_shared_memory_is_refused_and_changes_nothing(
    make_server: ServerMaker, wire: Wire
) -> None:
    reserved = wire.call("Reserve", wire.reserve(2304))
    ids = reserved.reservation_ids
    with pytest.raises(InvalidRequestError, match="attach staging memory first"):
        wire.call("Commit", pb.CommitRequest(reservation_ids=ids, offsets=[0]))
    assert wire.call("Abort", pb.AbortRequest(reservation_ids=ids)).aborted == 1
    assert wire.call("Abort", pb.AbortRequest(reservation_ids=ids)).aborted == 0
    other = wire_to(make_server("--tiers", "cpu", "--socket", "off"))
    with pytest.raises(InvalidRequestError, match="this server has no shared memory; use Put"):
        other.call("Commit", pb.CommitRequest(reservation_ids=[1], offsets=[0]))


@pytest.fixture
def attached(server: LocalServer) -> tuple[Wire, Client]:
    """A client with staging memory, and its session on the bare wire."""
    client = server.connect("shm")
    assert client.transport_name == "shm"
    session = next(iter(server.node.sessions.by_id.values()))
    terms = pb.OpenSessionResponse(session_id=session.session_id, key_namespace=session.namespace)
    return Wire(server.dial(), terms), client


def test_bad_commit_leaves_nothing_of_the_other_frames(
    server: LocalServer, attached: tuple[Wire, Client]
) -> None:
    wire, client = attached
    with server.unchanged():
        for offset in (1 << 40, (1 << 64) - 1, 64 << 20):  # outside the staging memory
            ids = wire.call("Reserve", wire.reserve(2304, 2304)).reservation_ids
            with pytest.raises(InvalidFrameError):
                wire.call("Commit", pb.CommitRequest(reservation_ids=ids, offsets=[offset, 0]))
        ids = wire.call("Reserve", wire.reserve(2304)).reservation_ids
        request = pb.CommitRequest(reservation_ids=[12345, *ids], offsets=[0, 0])
        with pytest.raises(LeaseExpiredError, match="reservation_id=12345: spent, aborted or not"):
            wire.call("Commit", request)
    store(client, 1, 2)


def test_reservation_of_another_session_cannot_be_committed_or_aborted(
    server: LocalServer, attached: tuple[Wire, Client]
) -> None:
    wire, _ = attached
    owner = wire_to(server)
    ids = owner.call("Reserve", owner.reserve(2304)).reservation_ids
    with pytest.raises(LeaseExpiredError, match="not this session's"):
        wire.call("Commit", pb.CommitRequest(reservation_ids=ids, offsets=[0]))
    assert wire.call("Abort", pb.AbortRequest(reservation_ids=ids)).aborted == 0
    assert owner.call("Abort", pb.AbortRequest(reservation_ids=ids)).aborted == 1


# --- put streams


STORED = bytes([PutOutcome.stored])


def first(frame: bytes, frame_bytes: int | None = None) -> pb.PutRequest:
    """Return the message that opens a frame."""
    size = len(frame) if frame_bytes is None else frame_bytes
    return pb.PutRequest(frame_bytes=size, data=frame)


Stream = Callable[[bytes], list[pb.PutRequest]]

BAD_STREAMS: dict[str, tuple[Stream, type[KVStoreError], str]] = {
    "frame of 2^63 bytes": (
        lambda f: [first(f, 1 << 63)], InvalidRequestError, f"frame_bytes={1 << 63}: the header",
    ),
    "frame of no bytes": (
        lambda f: [first(f, 0)], InvalidRequestError, "frame_bytes=0: give it with a frame's first",
    ),
    "one byte less than its header says": (
        lambda f: [first(f[:-1])], InvalidRequestError, "frame_bytes=2367: the header has 2368",
    ),
    "data beyond the frame's end": (
        lambda f: [first(f[:1000], len(f)), pb.PutRequest(data=f[1000:] + b"x")],
        InvalidFrameError, "data=2369: the frame has 2368 bytes",
    ),
    "data beyond the end at once": (
        lambda f: [first(f + b"x", len(f))], InvalidFrameError, "data=2369: the frame has 2368",
    ),
    "a message without data": (
        lambda f: [first(f[:1000], len(f)), pb.PutRequest()],
        InvalidFrameError, "data=1000: the frame has 2368 bytes",
    ),
    "the end inside the frame": (
        lambda f: [first(f[:1000], len(f))], InvalidFrameError,
        "frame=1000: the stream ended inside it",
    ),
    "the end inside the header": (
        lambda f: [first(f[:200], len(f))], InvalidFrameError, "header_bytes=.*: does not fit",
    ),
    "session that changes to an unknown one": (
        lambda f: [first(f[:1000], len(f)), pb.PutRequest(session_id=7, data=f[1000:])],
        LeaseExpiredError, "session_id=7: closed, expired",
    ),
}  # fmt: skip


@pytest.mark.parametrize("exists", [False, True], ids=["new", "exists"])
def test_bad_stream_is_refused_and_leaves_nothing(
    server: LocalServer, wire: Wire, exists: bool
) -> None:
    frame = frame_of(wire.key(), SMALL)
    assert len(frame) == 2368
    if exists:
        assert wire.put_frame(frame).outcomes == STORED
    for what, (stream, kind, message) in BAD_STREAMS.items():
        with server.unchanged(), pytest.raises(kind, match=message):
            wire.put(*stream(frame.tobytes()))
        assert server.usage().tiers[0][1].chunks == exists, what


ERRORS: list[KVStoreError] = [
    KVStoreError("something else"),
    InvalidRequestError("field", "välue", "give another"),
    InvalidFrameError("magic", b"\xff\x00", "expected another"),
    ModelError("rope", None, "give it"),
    LayoutMismatchError("shape", (1, 2), "give (2, 1)"),
    UnknownCodecError(99, "0, 1"),
    LeaseExpiredError("gone"),
    TierFullError("cpu", 10, 3),
    QuotaExceededError("max_x", 3, "this server"),
    ChunkCorruptError(bytes(32), "layer 1 fails"),
    TierUnavailableError("disk", "it is\nbroken"),
    DeadlineError("too late"),
    ShuttingDownError("bye"),
    UnauthenticatedError("who?"),
    PermissionDeniedError("no"),
]

BUG = ZeroDivisionError("the password is swordfish")


def test_error_of_ours_arrives_as_itself_cut_where_it_is_too_long_to_travel(
    server: LocalServer, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "ü" * 100_000
    errors = [*ERRORS, LeaseExpiredError(text)]
    monkeypatch.setattr(server.node.store, "lookup", Mock(side_effect=errors))
    with grpc.insecure_channel(server.address) as channel:
        stub = kvstore_pb2_grpc.KVStoreStub(channel)
        for error in errors:
            with pytest.raises(grpc.RpcError) as caught:
                stub.Lookup(pb.LookupRequest(session_id=wire.terms.session_id), timeout=20)
            assert caught.value.code() is grpc.StatusCode[error.status]
            arrived = translate(caught.value)
            assert type(arrived) is type(error)
            cut = str(error) == text
            assert str(arrived) == (text[: MAX_MESSAGE_CHARS - 3] + "..." if cut else str(error))

    def tree(root: type[KVStoreError]) -> set[type[KVStoreError]]:
        return {root}.union(*map(tree, root.__subclasses__()))

    ours = {kind for kind in tree(KVStoreError) if kind.__module__ == KVStoreError.__module__}
    assert {kind for kind in ours if not kind.__name__.startswith("_")} == set(map(type, ERRORS))


@pytest.mark.parametrize(
    ("error", "arrives"),
    [
        (LeaseExpiredError("gone"), LeaseExpiredError("gone")),
        (BUG, KVStoreError("internal error; see the server's log")),
    ],
    ids=["ours", "a bug"],
)
def test_error_in_a_call_of_any_kind_comes_after_its_replies_and_a_bug_only_to_the_log(
    server: LocalServer, wire: Wire, monkeypatch: pytest.MonkeyPatch,
    error: Exception, arrives: KVStoreError,
) -> None:  # fmt: skip
    for seed in (1, 2, 3):
        wire.put_frame(frame_of(wire.key(seed), SMALL))
    one = pb.ChunkStat(leases=1)
    monkeypatch.setattr(admin_calls, "LIST_PAGE_CHUNKS", 1)
    monkeypatch.setattr(admin_calls, "_chunk_stat", Mock(side_effect=[one, one, error]))
    monkeypatch.setattr(server.node.store, "lookup", Mock(side_effect=error))
    monkeypatch.setattr(PutStream, "take", Mock(side_effect=error))
    request = pb.ListRequest(session_id=wire.terms.session_id)
    with capture_logs() as logs:
        replies = wire.connection.stream("List", request, DEADLINE_MS)
        assert [list(next(replies).chunks) for _ in range(2)] == [[one]] * 2
        for call in (
            partial(next, replies),
            partial(ask, wire, "Lookup"),
            partial(ask, wire, "Put"),
        ):
            with pytest.raises(KVStoreError) as caught:
                call()
            assert (type(caught.value), str(caught.value)) == (type(arrives), str(arrives))
    broken = [line["exc_info"] for line in logs if line["event"] == "internal error"]
    assert broken == ([error] * 3 if error is BUG else [])
