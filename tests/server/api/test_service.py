"""The service over the bare wire: what it refuses, in which words, and that nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.bare_wire import Wire, wire_to
from helpers.local_server import DEADLINE_MS, LocalServer, eventually, open_session
from helpers.prompts import SMALL, frame_of, other_revision

from kvstore.client.options import MAX_DEADLINE_MS as CLIENT_MAX_DEADLINE_MS
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    InvalidRequestError,
    LeaseExpiredError,
    QuotaExceededError,
    ShuttingDownError,
    TierUnavailableError,
)
from kvstore.proto.messages import FEATURE_DURABLE_PUT
from kvstore.server.api.validation import MAX_DEADLINE_MS

ServerMaker = Callable[..., LocalServer]

DIGESTS = bytes(range(16)) + bytes(range(16, 32))
"""Two chain digests."""


@pytest.fixture
def wire(server: LocalServer) -> Wire:
    return wire_to(server)


# --- numbers and batches


CALLS_WITH_DEADLINE: dict[str, Callable[[Wire], object]] = {
    "Lookup": lambda wire: wire.call(
        "Lookup", pb.LookupRequest(digests=DIGESTS, deadline_ms=600_001)
    ),
    "Get": lambda wire: wire.stream("Get", pb.GetRequest(digests=DIGESTS, deadline_ms=600_001)),
    "Put": lambda wire: wire.put(pb.PutRequest(frame_bytes=1, data=b"x", deadline_ms=600_001)),
    "Drain": lambda wire: wire.call("Drain", pb.DrainRequest(deadline_ms=600_001)),
}


@pytest.mark.parametrize("method", CALLS_WITH_DEADLINE)
def test_deadline_beyond_the_limit_is_refused(server: LocalServer, wire: Wire, method: str) -> None:
    with (
        server.unchanged(),
        pytest.raises(InvalidRequestError, match="deadline_ms=600001: at most 600000"),
    ):
        CALLS_WITH_DEADLINE[method](wire)


def test_client_and_server_agree_on_the_longest_deadline() -> None:
    assert CLIENT_MAX_DEADLINE_MS == MAX_DEADLINE_MS


CALLS_WITH_DIGESTS: dict[str, Callable[[Wire, bytes], object]] = {
    "Lookup": lambda wire, packed: wire.call("Lookup", pb.LookupRequest(digests=packed)),
    "Get": lambda wire, packed: wire.stream("Get", pb.GetRequest(digests=packed)),
    "Pin": lambda wire, packed: wire.call("Pin", pb.PinRequest(digests=packed, ttl_ms=1)),
    "Unpin": lambda wire, packed: wire.call("Unpin", pb.UnpinRequest(digests=packed)),
    "Delete": lambda wire, packed: wire.call("Delete", pb.DeleteRequest(digests=packed)),
    "Stat": lambda wire, packed: wire.call("Stat", pb.StatRequest(digests=packed)),
    "Reserve": lambda wire, packed: wire.call("Reserve", pb.ReserveRequest(digests=packed)),
}


@pytest.mark.parametrize("method", CALLS_WITH_DIGESTS)
def test_ragged_digests_are_refused(server: LocalServer, wire: Wire, method: str) -> None:
    with (
        server.unchanged(),
        pytest.raises(InvalidRequestError, match="digests=31: give 16 bytes per chunk"),
    ):
        CALLS_WITH_DIGESTS[method](wire, DIGESTS[:31])


@pytest.mark.parametrize("method", CALLS_WITH_DIGESTS)
def test_batch_over_the_limit_is_refused(make_server: ServerMaker, method: str) -> None:
    server = make_server("--limits", "max_batch_chunks=4")
    wire = wire_to(server)
    with (
        server.unchanged(),
        pytest.raises(InvalidRequestError, match="digests=5: at most 4 chunks in one batch"),
    ):
        CALLS_WITH_DIGESTS[method](wire, bytes(80))


@pytest.mark.parametrize(
    ("method", "request_", "message"),
    [
        ("Release", pb.ReleaseRequest(lease_ids=[1] * 5), "lease_ids=5: at most 4"),
        ("Abort", pb.AbortRequest(reservation_ids=[1] * 5), "reservation_ids=5: at most 4"),
        (
            "Commit",
            pb.CommitRequest(reservation_ids=[1] * 5, offsets=[0] * 5),
            "reservation_ids=5: at most 4",
        ),
    ],
)
def test_list_of_ids_over_the_limit_is_refused(
    make_server: ServerMaker, method: str, request_: Any, message: str
) -> None:
    server = make_server("--limits", "max_batch_chunks=4")
    request_.session_id = 0
    with pytest.raises(InvalidRequestError, match=message):
        wire_to(server).call(method, request_)


def test_stream_of_more_frames_than_a_batch_ends_at_the_limit(make_server: ServerMaker) -> None:
    server = make_server("--limits", "max_batch_chunks=4")
    wire = wire_to(server)
    frames = [frame_of(wire.key(seed), SMALL) for seed in range(1, 6)]
    messages = [pb.PutRequest(frame_bytes=len(f), data=f.tobytes()) for f in frames]
    with pytest.raises(InvalidRequestError, match="frames=5: at most 4"):
        wire.put(*messages)
    assert server.settled().tiers[0][1].chunks == 4


@pytest.mark.parametrize(
    ("method", "request_", "message"),
    [
        ("Pin", pb.PinRequest(digests=DIGESTS, ttl_ms=0), "ttl_ms=0: use 1 to 86400000"),
        ("Pin", pb.PinRequest(digests=DIGESTS, ttl_ms=86_400_001), "ttl_ms=86400001: use 1 to"),
        ("Lookup", pb.LookupRequest(min_accuracy=4), "min_accuracy=4: use 0 to 3"),
        ("Commit", pb.CommitRequest(reservation_ids=[1]), "offsets=0: give one for each"),
    ],
)
def test_number_outside_its_range_is_refused(
    server: LocalServer, wire: Wire, method: str, request_: Any, message: str
) -> None:
    request_.session_id = 0
    with server.unchanged(), pytest.raises(InvalidRequestError, match=message):
        wire.call(method, request_)


# --- sessions and leases


def _calls_of_a_session() -> dict[str, Callable[[Wire], object]]:
    calls: dict[str, Callable[[Wire], object]] = {
        "Heartbeat": lambda wire: wire.call("Heartbeat", pb.HeartbeatRequest()),
        "Clear": lambda wire: wire.call("Clear", pb.ClearRequest()),
        "List": lambda wire: wire.stream("List", pb.ListRequest()),
        "Release": lambda wire: wire.call("Release", pb.ReleaseRequest(lease_ids=[1])),
        "Commit": lambda wire: wire.call("Commit", pb.CommitRequest()),
        "Abort": lambda wire: wire.call("Abort", pb.AbortRequest()),
        "Put": lambda wire: wire.put(pb.PutRequest(frame_bytes=1, data=b"x")),
    }

    def bind(call: Callable[[Wire, bytes], object]) -> Callable[[Wire], object]:
        return lambda wire: call(wire, DIGESTS)

    return calls | {method: bind(call) for method, call in CALLS_WITH_DIGESTS.items()}


CALLS_OF_A_SESSION = _calls_of_a_session()


@pytest.mark.parametrize("method", CALLS_OF_A_SESSION)
def test_call_of_an_unknown_session_says_to_open_one(
    server: LocalServer, wire: Wire, method: str
) -> None:
    wire.terms.session_id = 42
    with (
        server.unchanged(),
        pytest.raises(LeaseExpiredError, match=r"session_id=42: closed, expired or .*; open a"),
    ):
        CALLS_OF_A_SESSION[method](wire)


def test_session_of_an_earlier_start_of_the_server_is_unknown(make_server: ServerMaker) -> None:
    old = wire_to(make_server("--tiers", "cpu"))
    old_boot = old.terms.server.boot_id
    stopped = make_server("--tiers", "cpu", "--socket", "off")
    later = Wire(stopped.dial(), old.terms)
    with pytest.raises(LeaseExpiredError, match="of an earlier start; open a session"):
        later.call("Heartbeat", pb.HeartbeatRequest())
    assert open_session(later.connection).server.boot_id != old_boot


def test_closed_session_is_unknown_and_closing_it_again_is_no_error(wire: Wire) -> None:
    for _ in range(2):
        wire.call("CloseSession", pb.CloseSessionRequest())
    with pytest.raises(LeaseExpiredError):
        wire.call("Heartbeat", pb.HeartbeatRequest())


def test_session_beyond_the_limit_is_refused(make_server: ServerMaker) -> None:
    server = make_server("--max-sessions", "1")
    wire = wire_to(server)
    with pytest.raises(QuotaExceededError, match="this server reached max_sessions=1"):
        wire_to(server)
    wire.call("CloseSession", pb.CloseSessionRequest())
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


def test_lease_of_another_session_can_neither_be_read_under_nor_released(
    server: LocalServer, wire: Wire
) -> None:
    wire.put_frame(frame_of(wire.key(), SMALL))
    digests = wire.key()[16:]
    lease_id = wire.call("Lookup", pb.LookupRequest(digests=digests, lease=True)).lease_id
    other = wire_to(server)
    with pytest.raises(LeaseExpiredError, match=f"lease_id={lease_id}: .* not this session's"):
        other.stream("Get", pb.GetRequest(digests=digests, lease_id=lease_id))
    assert other.call("Release", pb.ReleaseRequest(lease_ids=[lease_id])).released == 0
    assert wire.call("Release", pb.ReleaseRequest(lease_ids=[lease_id])).released == 1


def test_one_model_cannot_name_another_s_chunks(server: LocalServer, wire: Wire) -> None:
    wire.put_frame(frame_of(wire.key(), SMALL))
    digests = wire.key()[16:]
    connection = server.dial()
    stranger = Wire(connection, open_session(connection, other_revision(SMALL)))
    assert wire.call("Lookup", pb.LookupRequest(digests=digests)).ready == 1
    assert stranger.call("Lookup", pb.LookupRequest(digests=digests)).ready == 0
    assert stranger.stream("Get", pb.GetRequest(digests=digests)) == []
    assert stranger.call("Delete", pb.DeleteRequest(digests=digests)).deleted == 0
    assert stranger.call("Clear", pb.ClearRequest()).deleted == 0
    assert stranger.stream("List", pb.ListRequest()) == []
    assert wire.call("Lookup", pb.LookupRequest(digests=digests)).ready == 1


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
    assert wire.call("Heartbeat", pb.HeartbeatRequest()).draining
    assert wire.call("Status", pb.StatusRequest()).state == "draining"
    assert wire.stream("Get", pb.GetRequest(digests=wire.key()[16:]))


def test_every_reply_carries_the_boot_id_and_the_features(
    make_server: ServerMaker, wire: Wire
) -> None:
    boot_id = wire.terms.server.boot_id
    assert wire.terms.server.features == 3
    for method, request in (
        ("Heartbeat", pb.HeartbeatRequest()),
        ("Lookup", pb.LookupRequest()),
        ("Status", pb.StatusRequest()),
        ("Unpin", pb.UnpinRequest()),
    ):
        assert wire.call(method, request).server.boot_id == boot_id


def test_durable_puts_are_offered_while_the_codec_of_the_disk_loses_nothing(
    server: LocalServer, wire: Wire
) -> None:
    def offered() -> bool:
        return bool(wire.call("Status", pb.StatusRequest()).server.features & FEATURE_DURABLE_PUT)

    (disk,) = server.node.store.tiers.lower
    assert offered()
    disk.encoder.use("kvq:2", " (auto)")
    assert eventually(lambda: not offered())
    disk.encoder.use("raw", " (auto)")
    assert eventually(offered)


def test_server_without_disk_and_socket_offers_neither_feature(make_server: ServerMaker) -> None:
    server = make_server("--tiers", "cpu", "--socket", "off")
    terms = wire_to(server).terms
    assert (terms.server.features, terms.socket_path, terms.attach_token) == (0, "", b"")
    assert server.connect("auto").transport_name == "grpc"
    with pytest.raises(TierUnavailableError, match="shm"):
        server.connect("shm").keys(range(16))


def test_a_way_of_getting_that_is_not_known_is_refused(server: LocalServer, wire: Wire) -> None:
    with pytest.raises(InvalidRequestError, match=r"^via=9"):
        wire.stream("Get", pb.GetRequest(digests=wire.key()[16:], via=9))  # type: ignore[arg-type]
    assert server.usage().leases == 0
