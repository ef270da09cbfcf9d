from __future__ import annotations

import pytest

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import PermissionDeniedError
from kvstore.proto.unix_socket import METHODS as LOCAL_METHODS
from kvstore.server.security.authorization import ANY, METHODS, check_role, role_for
from kvstore.server.security.sessions import Principal

SERVICE = pb.DESCRIPTOR.services_by_name["KVStore"]
SEES = {"Lookup", "Plan", "Get", "Release", "LendPeer", "Resolve", "Stat", "List", "Explain"}
SEES |= {"Spaces", "Events", "Slab", "Extent"}
OF_THE_SOCKET = {"Slab", "Extent", "Ring"}
CHANGES = {
    *(
        "Put",
        "Reserve",
        "Commit",
        "Abort",
        "PutDevice",
        "AnnouncePuts",
        "Weigh",
        "ReportReuse",
        "Ring",
    ),
    *("Pin", "Unpin", "Delete", "Clear"),
}
RULES = {"SetQuota", "Drain", "Trace", "Scrub"}


def test_every_rpc_has_a_row_and_every_row_an_rpc() -> None:
    assert set(METHODS) == {method.name for method in SERVICE.methods} | OF_THE_SOCKET
    assert {method.name for method in LOCAL_METHODS.values()} <= set(METHODS)


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize("role", ["read", "write", "admin"])
def test_each_role_may_do_what_is_its_own_and_nothing_else(name: str, role: str) -> None:
    caller = Principal("key:1", "acme", frozenset({role}))
    may = {"read": SEES, "write": CHANGES, "admin": RULES}[role]
    of_a_session = {"Explain": pb.ExplainRequest, "Events": pb.EventsRequest}.get(name)
    request = of_a_session and of_a_session(session_id=1)
    if name in may or METHODS[name] == ANY:
        check_role(caller, f"/kvstore.v1.KVStore/{name}", request)
    else:
        with pytest.raises(PermissionDeniedError, match=name):
            check_role(caller, f"/kvstore.v1.KVStore/{name}", request)


def test_a_method_without_a_row_is_for_nobody() -> None:
    caller = Principal("key:1", "acme", frozenset({"read", "write", "admin"}))
    for method in ("/kvstore.v1.KVStore/Dump", "/other.v1.Thing/Do"):
        with pytest.raises(PermissionDeniedError):
            check_role(caller, method)


def test_clearing_and_listing_what_is_others_is_for_admins() -> None:
    for name, kind in (("Clear", pb.ClearRequest), ("Spaces", pb.SpacesRequest)):
        own = {"Clear": "write", "Spaces": "read"}[name]
        for tenant, role in (("", own), ("acme", own), ("zeta", "admin"), ("*", "admin")):
            assert role_for(name, kind(tenant=tenant), "acme") == role
    assert role_for("Spaces", pb.SpacesRequest(tenant="pool:library"), "acme") == "read"
    assert role_for("Clear", pb.ClearRequest(tenant="pool:library"), "acme") == "admin"


def test_explain_of_the_whole_server_and_reflection_are_for_admins() -> None:
    assert role_for("/kvstore.v1.KVStore/Explain", pb.ExplainRequest()) == "admin"
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    assert role_for(reflection) == "admin"
