"""Reserve, Commit, Abort and Put over the bare wire: what is refused, and that nothing leaks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.bare_wire import Wire, wire_to
from helpers.local_server import LocalServer
from helpers.prompts import SMALL, frame_of, store

from kvstore.client import Client
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    LayoutMismatchError,
    LeaseExpiredError,
    QuotaExceededError,
)
from kvstore.proto.types import PutOutcome

ServerMaker = Callable[..., LocalServer]


def _component(field: str, value: int) -> Callable[[pb.ReserveRequest], None]:
    return lambda request: setattr(request.layouts[0].components[0], field, value)


BAD_RESERVES: list[tuple[Callable[[pb.ReserveRequest], object], type[KVStoreError], str]] = [
    (lambda r: r.frame_bytes.pop(), InvalidRequestError, "digests=2: give as many parents"),
    (lambda r: r.layout.insert(0, 7), InvalidRequestError, "digests=2: give as many parents"),
    (
        lambda r: r.layout.__setitem__(1, 7), InvalidRequestError,
        "layout=7: index into layouts",
    ),
    (_component("kind", 77), InvalidRequestError, "layout='77 is not.*we know"),
    (_component("kv_heads", 3), LayoutMismatchError, "this session's is KVLayout"),
    (
        lambda r: r.layouts[0].ClearField("components"), LayoutMismatchError,
        "a chunk has at least one component",
    ),
    (_component("tokens", 15), LayoutMismatchError, "tokens=15: a chunk has 16 to 8192"),
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


STORED, EXISTS = bytes([PutOutcome.stored]), bytes([PutOutcome.exists])


def first(frame: bytes, frame_bytes: int | None = None) -> pb.PutRequest:
    """Return the message that opens a frame."""
    size = len(frame) if frame_bytes is None else frame_bytes
    return pb.PutRequest(frame_bytes=size, data=frame)


Stream = Callable[[bytes], list[pb.PutRequest]]

BAD_STREAMS: dict[str, tuple[Stream, type[KVStoreError], str]] = {
    "frame of 2^63 bytes": (
        lambda f: [first(f, 1 << 63)], InvalidRequestError, f"frame_bytes={1 << 63}: its header",
    ),
    "frame of no bytes": (
        lambda f: [first(f, 0)], InvalidRequestError, "frame_bytes=0: give it with a frame's first",
    ),
    "one byte less than its header says": (
        lambda f: [first(f[:-1])], InvalidRequestError, "frame_bytes=2367: its header: 2368",
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


def test_frame_in_many_small_messages_is_stored_and_an_empty_stream_is_answered(
    server: LocalServer, wire: Wire
) -> None:
    with server.unchanged():
        assert wire.put().outcomes == b""
    frame = frame_of(wire.key(), SMALL).tobytes()
    rest = [pb.PutRequest(data=frame[at : at + 7]) for at in range(400, len(frame), 7)]
    head = first(frame[:400], len(frame))
    head.durable = True
    assert wire.put(head, *rest).outcomes == STORED
    assert server.node.store.catalog.holders(wire.key()) == ["cpu", "disk"]


def test_durable_stream_without_a_disk_is_refused_before_its_session_is_noted(
    make_server: Callable[..., LocalServer],
) -> None:
    server = make_server("--tiers", "cpu")
    wire = wire_to(server)
    message = first(frame_of(wire.key(), SMALL).tobytes())
    message.durable = True
    session = server.node.sessions.by_id[wire.terms.session_id]
    heard_at = session.heard_at
    with (
        server.unchanged(),
        pytest.raises(InvalidRequestError, match="durable=True: start the server with a disk tier"),
    ):
        wire.put(message)
    assert session.heard_at == heard_at
