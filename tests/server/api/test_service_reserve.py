"""Reserve, Commit and Abort over the bare wire: what is refused, and that nothing leaks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.bare_wire import Wire, wire_to
from helpers.local_server import LocalServer
from helpers.prompts import chunks_of, keys_of

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

ServerMaker = Callable[..., LocalServer]


@pytest.fixture
def wire(server: LocalServer) -> Wire:
    return wire_to(server)


def _short(request: pb.ReserveRequest) -> None:
    del request.frame_bytes[0]


def _astray(request: pb.ReserveRequest) -> None:
    request.layout[1] = 7


def _strange_kind(request: pb.ReserveRequest) -> None:
    request.layouts[0].components[0].kind = 77


def _other_layout(request: pb.ReserveRequest) -> None:
    request.layouts[0].components[0].kv_heads = 3


def _no_components(request: pb.ReserveRequest) -> None:
    request.layouts[0].ClearField("components")


def _too_few_tokens(request: pb.ReserveRequest) -> None:
    request.layouts[0].components[0].tokens = 15


def _huge(request: pb.ReserveRequest) -> None:
    request.frame_bytes[1] = 1 << 63


BAD_RESERVES: dict[str, tuple[Callable[[pb.ReserveRequest], None], type[KVStoreError], str]] = {
    "one size short": (_short, InvalidRequestError, "digests=2: give as many parents"),
    "layout that is not there": (_astray, InvalidRequestError, "layout=7: index into layouts"),
    "kind of the future": (_strange_kind, InvalidRequestError, "layout='77 is not.*we know"),
    "heads of another model": (_other_layout, LayoutMismatchError, "this session's is KVLayout"),
    "no components": (_no_components, LayoutMismatchError, "a chunk has at least one component"),
    "too few tokens": (_too_few_tokens, LayoutMismatchError, "tokens=15: a chunk has 16 to 8192"),
    "size of 2^63": (_huge, InvalidRequestError, f"frame_bytes={1 << 63}: at most"),
}


@pytest.mark.parametrize("what", BAD_RESERVES)
def test_bad_reserve_is_refused_whole(server: LocalServer, wire: Wire, what: str) -> None:
    change, kind, message = BAD_RESERVES[what]
    request = wire.reserve(2304, 2304)
    change(request)
    with server.unchanged(), pytest.raises(kind, match=message):
        wire.call("Reserve", request)


def test_reserve_beyond_the_session_s_quota_gives_all_of_it_back(make_server: ServerMaker) -> None:
    server = make_server("--limits", "max_reservations_per_session=2")
    wire = wire_to(server)
    with (
        server.unchanged(),
        pytest.raises(QuotaExceededError, match="max_reservations_per_session=2: release some"),
    ):
        wire.call("Reserve", wire.reserve(2304, 2304, 2304))


def test_commit_without_staging_memory_is_refused_and_changes_nothing(wire: Wire) -> None:
    reserved = wire.call("Reserve", wire.reserve(2304))
    ids = reserved.reservation_ids
    with pytest.raises(InvalidRequestError, match="attach staging memory first"):
        wire.call("Commit", pb.CommitRequest(reservation_ids=ids, offsets=[0]))
    assert wire.call("Abort", pb.AbortRequest(reservation_ids=ids)).aborted == 1
    assert wire.call("Abort", pb.AbortRequest(reservation_ids=ids)).aborted == 0


def test_commit_on_a_server_without_shared_memory_says_what_to_do(
    make_server: ServerMaker,
) -> None:
    wire = wire_to(make_server("--socket", "off"))
    with pytest.raises(InvalidRequestError, match="this server has no shared memory; use Put"):
        wire.call("Commit", pb.CommitRequest(reservation_ids=[1], offsets=[0]))


@pytest.fixture
def attached(server: LocalServer) -> tuple[Wire, Client]:
    """A client with staging memory, and its session on the bare wire."""
    client = server.connect("shm")
    assert client.transport_name == "shm"
    session = next(iter(server.node.sessions.by_id.values()))
    terms = pb.OpenSessionResponse(session_id=session.session_id, key_namespace=session.namespace)
    return Wire(server.dial(), terms), client


@pytest.mark.parametrize("offset", [1 << 40, (1 << 64) - 1, 64 << 20])
def test_commit_from_outside_the_staging_memory_is_refused_and_leaves_nothing(
    server: LocalServer, attached: tuple[Wire, Client], offset: int
) -> None:
    wire, _ = attached
    with server.unchanged():
        reserved = wire.call("Reserve", wire.reserve(2304, 2304))
        request = pb.CommitRequest(reservation_ids=reserved.reservation_ids, offsets=[offset, 0])
        with pytest.raises(InvalidFrameError):
            wire.call("Commit", request)


def test_commit_of_a_reservation_that_is_not_there_leaves_nothing_of_the_others(
    server: LocalServer, attached: tuple[Wire, Client]
) -> None:
    wire, client = attached
    with server.unchanged():
        reserved = wire.call("Reserve", wire.reserve(2304))
        request = pb.CommitRequest(
            reservation_ids=[12345, *reserved.reservation_ids], offsets=[0, 0]
        )
        with pytest.raises(LeaseExpiredError, match="reservation_id=12345: spent, aborted or not"):
            wire.call("Commit", request)
    keys = keys_of(client, 1, 2)
    assert [put.outcome for put in client.put_chunks(chunks_of(client, keys))] == [0, 0]


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
