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


# --- numbers and batches

WITH_DIGESTS = ("Lookup", "Get", "Pin", "Unpin", "Delete", "Stat", "Reserve")
SESSION_ONLY = ("Heartbeat", "Clear", "List", "Release", "Commit", "Abort", "Put")
OF_A_SESSION = (*WITH_DIGESTS, *SESSION_ONLY)


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


def test_call_of_an_unknown_session_says_to_open_one(server: LocalServer, wire: Wire) -> None:
    wire.terms.session_id = 42
    with server.unchanged():
        for method in OF_A_SESSION:
            fields = {"digests": DIGESTS} if method in WITH_DIGESTS else {}
            with pytest.raises(
                LeaseExpiredError, match=r"session_id=42: closed, expired or .*; open a"
            ):
                ask(wire, method, **fields)


def test_session_of_an_earlier_start_of_the_server_is_unknown_and_what_is_offered_now_is_told(
    make_server: ServerMaker,
) -> None:
    old = wire_to(make_server("--tiers", "cpu"))
    old_boot = old.terms.server.boot_id
    stopped = make_server("--tiers", "cpu", "--socket", "off")
    later = Wire(stopped.dial(), old.terms)
    offered = open_session(later.connection)
    assert (offered.server.features, offered.socket_path, offered.attach_token) == (0, "", b"")
    with pytest.raises(LeaseExpiredError, match="of an earlier start; open a session"):
        later.call("Heartbeat", pb.HeartbeatRequest())
    assert offered.server.boot_id != old_boot
    assert stopped.connect("auto").transport_name == "grpc"
    with pytest.raises(TierUnavailableError, match="shm"):
        stopped.connect("shm").keys(range(16))


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
    heartbeat = wire.call("Heartbeat", pb.HeartbeatRequest())
    assert heartbeat.draining
    assert heartbeat.server.boot_id == wire.terms.server.boot_id
    assert wire.call("Status", pb.StatusRequest()).state == "draining"
    assert wire.stream("Get", pb.GetRequest(digests=wire.key()[16:]))


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
