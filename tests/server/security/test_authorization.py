"""Roles: who may call what, of its own and of others."""

from __future__ import annotations

import os
from typing import Any

import pytest
from contracts.chunks import make_representation

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import PermissionDeniedError
from kvstore.proto.unix_socket import METHODS as LOCAL_METHODS
from kvstore.server.security.authorization import ANY, METHODS, Authorizer, role_for
from kvstore.server.security.sessions import Principal, SessionTable
from kvstore.server.settings.settings import Settings

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


TABLE = SessionTable(1000, 1000, lambda _: b"", lambda: 0.0, os.urandom)
AUTHORIZER = Authorizer(Settings(), TABLE, lambda: 0.0)


def caller(*roles: str) -> Principal:
    return Principal("key:1", "acme", frozenset(roles))


def may(role: str, method: str, request: Any = None) -> bool:
    """Whether who has *role* alone may call *method*."""
    try:
        AUTHORIZER.admit(caller(role), method, request)
    except PermissionDeniedError:
        return False
    return True


def test_each_role_may_do_what_is_its_own_and_nothing_else() -> None:
    for name in sorted(METHODS):
        for role in ["read", "write", "admin"]:
            own = {"read": SEES, "write": CHANGES, "admin": RULES}[role]
            session = TABLE.open(
                make_representation(), "engine", "acme", caller(role), frozenset({role})
            )
            kind = {"Explain": pb.ExplainRequest, "Events": pb.EventsRequest}.get(name)
            request = kind and kind(session_id=session.session_id)
            expected = name in own or METHODS[name] == ANY
            assert may(role, f"/kvstore.v1.KVStore/{name}", request) is expected


def test_a_method_without_a_row_is_for_nobody() -> None:
    for method in ("/kvstore.v1.KVStore/Dump", "/other.v1.Thing/Do"):
        with pytest.raises(PermissionDeniedError):
            AUTHORIZER.admit(caller("read", "write", "admin"), method)


def test_clearing_and_listing_what_is_others_is_for_admins() -> None:
    for name, kind in (("Clear", pb.ClearRequest), ("Spaces", pb.SpacesRequest)):
        own = {"Clear": "write", "Spaces": "read"}[name]
        for tenant, role in (("", own), ("acme", own), ("zeta", "admin"), ("*", "admin")):
            request = kind(tenant=tenant)
            assert [one for one in ("read", "write", "admin") if may(one, name, request)] == [role]
    assert may("read", "Spaces", pb.SpacesRequest(tenant="pool:library"))
    assert not may("write", "Clear", pb.ClearRequest(tenant="pool:library"))
    assert may("admin", "Clear", pb.ClearRequest(tenant="pool:library"))


def test_explain_of_the_whole_server_and_reflection_are_for_admins() -> None:
    explain = "/kvstore.v1.KVStore/Explain"
    assert not may("read", explain, pb.ExplainRequest())
    assert may("admin", explain, pb.ExplainRequest())
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    assert role_for(reflection) == "admin"
