"""The pages of the HTTP port, without a browser: what they say, to whom, and how much."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ServerMaker
from helpers.credentials import Authority
from helpers.local_server import LocalServer, eventually
from helpers.prompts import store
from helpers.trust_world import World

from kvstore.server.security.authenticator import Authenticator
from kvstore.server.telemetry.metrics import MAX_TENANTS, OTHERS, Counters
from kvstore.server.web import http_server
from kvstore.server.web.dashboard import EVERY_S, MAX_PAGE_BYTES, MEDIA, Dashboard
from kvstore.server.web.gauges import MetricsText
from kvstore.server.web.http_pages import MAX_READERS, METHOD, Pages
from kvstore.server.web.http_server import MAX_CONNECTIONS

WAIT_S = 20.0


def ask(
    server: LocalServer, path: str, headers: Mapping[str, str] | None = None, method: str = "GET"
) -> tuple[int, str, http.client.HTTPMessage]:
    port = server.node.http_port
    assert port is not None
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request(method, path, headers=dict(headers or {}))
        reply = connection.getresponse()
        return reply.status, reply.read().decode(), reply.headers
    finally:
        connection.close()


@pytest.fixture
def served(make_server: ServerMaker) -> LocalServer:
    return make_server("--http", "127.0.0.1:0")


def test_the_page_has_what_the_server_did(served: LocalServer) -> None:
    client = served.connect("grpc")
    keys = store(client, 1, 6)
    client.lookup(keys=keys)
    client.lookup(keys=[*keys, *client.keys(list(range(5000, 5064)))])
    client.get_chunks(keys)
    served.settled()
    assert ask(served, "/")[2]["Content-Type"] == "text/html; charset=utf-8"
    status, body, headers = ask(served, "/data")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    data = json.loads(body)
    assert ["cpu", "disk"] in [way[:2] for way in data["now"]["flows"]]
    last = [row[:2] for row in data["prefixes"]]
    assert [keys[-1][16:].hex()[:12], client.model.model_id] in last
    assert data["ratios"] == [0.75]
    assert {tier["policy"] for tier in data["tiers"]} == {"hit_density"}
    assert data["tenants"] == [["default", 12, 16]]
    finds = served.node.counters.finds()
    assert finds.tiers == {"cpu": 12}
    assert (finds.asked, finds.ready) == ({"default": 16}, {"default": 12})
    assert served.node.counters.moves().keys() == {("cpu", "disk")}
    assert sum(served.node.counters.times()["Lookup"].counts) == 2


def test_all_that_the_page_loads_is_its_own_and_small(served: LocalServer) -> None:
    store(served.connect("grpc"), 1, 40)
    _, body, headers = ask(served, "/")
    size = len(ask(served, "/data")[1]) + sum(len(data) for _, data in MEDIA.values())
    assert size <= MAX_PAGE_BYTES
    for part in (
        data.decode().replace("http://www.w3.org/2000/svg", "") for _, data in MEDIA.values()
    ):
        assert "http://" not in part
        assert "https://" not in part
        assert "innerHTML" not in part
        assert "outerHTML" not in part
    for name, (media_type, data) in MEDIA.items():
        status, got, said = ask(served, f"/{name}")
        assert (status, got.encode()) == (200, data)
        assert said["Content-Type"].startswith(media_type)
    assert "style=" not in body, "the policy allows none"
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-store")
    assert ask(served, "/nothing")[0] == 404
    assert ask(served, "/", method="POST")[0] == 405


class Events:
    """A reader of the page's events."""

    def __init__(self, server: LocalServer, headers: Mapping[str, str] | None = None) -> None:
        assert server.node.http_port is not None
        self.connection = http.client.HTTPConnection(
            "127.0.0.1", server.node.http_port, timeout=WAIT_S
        )
        self.connection.request("GET", "/events", headers=dict(headers or {}))
        self.reply = self.connection.getresponse()

    def next(self) -> dict[str, Any] | None:
        while line := self.reply.readline():
            if line.startswith(b"data: "):
                parts: dict[str, Any] = json.loads(line[6:])
                return parts
        return None

    def close(self) -> None:
        self.reply.close()
        self.connection.close()


def test_a_server_that_stops_ends_its_readers_without_a_word(
    served: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    reader = Events(served)
    assert reader.next() is not None
    served.stop()
    while reader.next() is not None:
        continue
    reader.close()
    assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []


def test_readers_are_bounded_and_room_comes_back(served: LocalServer) -> None:
    readers = [Events(served) for _ in range(MAX_READERS)]
    assert all(reader.next() for reader in readers)
    status, body, _ = ask(served, "/events")
    assert (status, "too many live pages" in body) == (503, True)
    assert ask(served, "/")[0] == 200
    for reader in readers:
        reader.close()

    def is_free() -> bool:
        reader = Events(served)
        try:
            return reader.reply.status == 200
        finally:
            reader.close()

    assert eventually(is_free)


def link_to(server: LocalServer, from_host: str = "127.0.0.1") -> socket.socket:
    assert server.node.http_port is not None
    place = ("127.0.0.1", server.node.http_port)
    return socket.create_connection(place, WAIT_S, source_address=(from_host, 0))


def test_connections_are_bounded(served: LocalServer) -> None:
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            stack.enter_context(link_to(served))
        assert eventually(lambda: ask(served, "/metrics")[0] == 503)
    assert eventually(lambda: ask(served, "/metrics")[0] == 200)


def test_a_header_that_does_not_end_is_refused(served: LocalServer) -> None:
    with link_to(served) as line:
        line.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000)
        assert b"400" in line.recv(100)


def test_a_second_request_that_does_not_end_is_not_waited_for(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "SILENT_S", 0.3)
    server = make_server("--http", "127.0.0.1:0")
    with ExitStack() as stack:
        silent = stack.enter_context(link_to(server))
        with suppress(ConnectionError):  # who asks for nothing is hung up on
            assert silent.recv(1) == b""
        links = []
        for _ in range(MAX_CONNECTIONS):
            link = stack.enter_context(link_to(server))
            link.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert link.recv(1 << 20)
            link.sendall(b"GET /met")
            links.append(link)
        for link in links:
            with suppress(ConnectionError):
                while link.recv(1 << 20):
                    pass
        assert ask(server, "/metrics")[0] == 200


def test_one_address_does_not_take_the_connections_of_others(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "SILENT_S", 600.0)
    server = make_server("--http", "127.0.0.1:0")

    def is_answered() -> bool:
        with suppress(ConnectionError), link_to(server, "127.0.0.2") as one:
            one.sendall(b"GET /metrics HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
            return one.recv(100).startswith(b"HTTP/1.1 200")
        return False  # while the others are being hung up on

    with ExitStack() as stack:
        for _ in range(2 * MAX_CONNECTIONS):
            stack.enter_context(link_to(server))
        assert eventually(is_answered)


def test_one_look_serves_all_who_ask_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    now = [0.0]

    def look() -> dict[str, int]:
        looks.append(now[0])
        return {"now": len(looks)}

    async def play() -> None:
        dashboard = Dashboard(_backend(lambda: now[0]))
        monkeypatch.setattr(dashboard, "data", look)
        found = await asyncio.gather(*(dashboard.text() for _ in range(8)))
        assert set(found) == {'{"now":1}'}
        now[0] = EVERY_S
        assert [await dashboard.text() for _ in range(2)] == ['{"now":2}'] * 2

    asyncio.run(play())
    assert looks == [0.0, EVERY_S]


def test_pages_of_elsewhere_cannot_ask_by_a_name_that_points_here(served: LocalServer) -> None:
    for host in ["evil.example", "10.0.0.1", "127.0.0.1.evil.example"]:
        for path in ("/", "/data", "/events", "/metrics"):
            assert ask(served, path, {"Host": host})[0] == 421
        assert ask(served, "/", {"Host": "localhost:9420"})[0] == 200


@pytest.fixture
def world(tmp_path: Path, no_leaks: None) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(*flags: str) -> World:
        made.append(World(tmp_path, *flags))
        return made[-1]

    yield make
    for one in made:
        one.close()


def basic(token: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"me:{token}".encode()).decode()}


def test_where_callers_are_asked_the_page_is_for_admins(world: Callable[..., World]) -> None:
    guarded = world("--http", "127.0.0.1:0")
    server = guarded.server
    status, _, headers = ask(server, "/")
    assert status == 401
    assert headers["WWW-Authenticate"].startswith("Basic ")
    for path in ("/", "/data", "/events", "/dashboard.js"):
        assert ask(server, path)[0] == 401
        assert ask(server, path, basic("kvs_000000000000_wrong"))[0] == 401
        for proof in ("Basic ???", "Basic \xe9"):
            assert ask(server, path, {"Authorization": proof})[0] == 401
        assert ask(server, path, basic(guarded.acme))[0] == 403
    assert ask(server, "/", basic(guarded.admin))[0] == 200
    assert ask(server, "/", {"Authorization": f"Bearer {guarded.admin}"})[0] == 200
    assert ask(server, "/metrics")[0] == 200, "as before: whoever is on this machine"


def test_events_end_with_the_key_that_asked_for_them(world: Callable[..., World]) -> None:
    guarded = world("--http", "127.0.0.1:0")
    key = guarded.ring.make("ops", "admin")
    guarded.server.node.authorizer.authenticator.refresh()
    reader = Events(guarded.server, basic(key))
    assert reader.next() is not None
    guarded.ring.revoke(key)
    guarded.server.node.authorizer.authenticator.refresh()
    while reader.next() is not None:
        continue
    reader.close()


def ask_tls(
    guarded: World, path: str, headers: Mapping[str, str], cert: tuple[Path, Path] | None = None
) -> int:
    """Return the status over TLS; 0 where there is no connection."""
    context = ssl.create_default_context(cafile=str(guarded.ca.path))
    if cert:
        context.load_cert_chain(*cert)
    port = guarded.server.node.http_port
    connection = http.client.HTTPSConnection("localhost", port, timeout=WAIT_S, context=context)
    try:
        connection.request("GET", path, headers=dict(headers))
        return connection.getresponse().status
    except (http.client.HTTPException, OSError):
        return 0
    finally:
        connection.close()


def test_over_tls_all_of_it_goes_to_admins_and_a_certificate_may_be_replaced(
    world: Callable[..., World],
) -> None:
    guarded = world("--http", "0.0.0.0:0", "--http-tls")
    assert ask_tls(guarded, "/", {}) == 401
    assert ask_tls(guarded, "/", basic(guarded.reader)) == 403
    admin = basic(guarded.admin)
    assert ask_tls(guarded, "/", admin) == 200
    guarded.ca.issue("server", hosts=("elsewhere",))
    assert eventually(lambda: ask_tls(guarded, "/", admin) == 0), "the new one is of another host"
    guarded.ca.issue("server")
    assert eventually(lambda: ask_tls(guarded, "/", admin) == 200)
    with pytest.raises((OSError, http.client.HTTPException)):
        ask(guarded.server, "/metrics")  # in plain text


def test_handshakes_that_stall_are_bounded_and_keep_no_other_address_out(
    world: Callable[..., World],
) -> None:
    guarded = world("--http", "127.0.0.1:0", "--http-tls")
    with ExitStack() as stack:
        links = [stack.enter_context(link_to(guarded.server)) for _ in range(3 * MAX_CONNECTIONS)]
        for link in links[2 * MAX_CONNECTIONS :]:
            with suppress(ConnectionError):
                assert link.recv(1) == b""
        context = ssl.create_default_context(cafile=str(guarded.ca.path))
        with link_to(guarded.server, "127.0.0.2") as link:
            context.wrap_socket(link, server_hostname="localhost").close()


def test_an_authority_that_was_replaced_certifies_no_callers_any_more(
    world: Callable[..., World], tmp_path: Path
) -> None:
    former, latter = Authority(tmp_path, "former"), Authority(tmp_path, "latter")
    gone = former.issue("gone", tenant="ops", roles=("admin",))
    boss = latter.issue("boss", tenant="ops", roles=("admin",))
    bundle = tmp_path / "bundle"
    shutil.copy(former.path, bundle)
    guarded = world("--http", "127.0.0.1:0", "--http-tls", "--tls-client-ca", str(bundle))
    assert ask_tls(guarded, "/", {}, gone) == 200
    shutil.copy(latter.path, bundle)
    assert eventually(lambda: ask_tls(guarded, "/", {}, boss) == 200)
    assert ask_tls(guarded, "/", {}, gone) == 0


def test_a_certificate_opens_the_page_and_refusals_are_written_down(
    world: Callable[..., World], tmp_path: Path
) -> None:
    """Of browsers the first question brings nothing: that is no refusal."""
    ca, log = Authority(tmp_path, "callers"), tmp_path / "audit"
    guarded = world(
        *("--http", "0.0.0.0:0", "--http-tls", "--tls-client-ca", str(ca.path)),
        *("--audit-log", str(log)),
    )
    other = Authority(tmp_path, "others").issue("boss2", tenant="x", roles=("admin",))
    assert ask_tls(guarded, "/", {}, ca.issue("boss", tenant="ops", roles=("admin",))) == 200
    assert ask_tls(guarded, "/", {}, ca.issue("engine", tenant="acme")) == 403
    assert ask_tls(guarded, "/", {}, other) == 0
    assert ask_tls(guarded, "/", {}) == 401
    assert ask_tls(guarded, "/", basic("kvs_000000000000_wrong")) == 401
    assert ask_tls(guarded, "/", basic(guarded.admin)) == 200
    guarded.close()
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    refused = [(row.get("who", ""), row["outcome"]) for row in rows if row["rpc"] == METHOD]
    assert refused == [("cert:engine", "PermissionDeniedError"), ("", "UnauthenticatedError")]


Answer = tuple[int, str]


def asked_by(client: str, flags: str, path: str, host: str = "10.0.0.9") -> Answer:
    """Return what a caller from the address *client*, without a proof, is answered."""
    authenticator = Authenticator(None, None, takes_certificates=True)
    names = ("insecure", "http_tls", "authenticates_callers", "open_pages")
    config: Any = SimpleNamespace(**{name: name in flags for name in names})
    trust: Any = SimpleNamespace(authenticator=authenticator)
    metrics = MetricsText(Counters(), list, ["cpu"])
    pages = Pages(config, trust, metrics, Dashboard(_backend(time.monotonic)))
    sent: list[dict[str, Any]] = []
    scope = {
        "type": "http", "method": "GET", "path": path, "root_path": "", "query_string": b"",
        "scheme": "http", "headers": [(b"host", host.encode())], "client": (client, 1),
        "server": ("127.0.0.1" if client == "127.0.0.1" else "10.0.0.9", 9420),
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(pages.app(scope, receive, send))  # type: ignore[arg-type]
    return sent[0]["status"], b"".join(one.get("body", b"") for one in sent).decode()


def test_other_hosts_get_what_the_settings_expose() -> None:
    for client, flags, page_status, metrics_status in [
        ("127.0.0.1", "", 401, 200),
        ("10.0.0.1", "", 403, 401),
        ("10.0.0.1", "http_tls", 403, 401),
        ("10.0.0.1", "open_pages", 403, 200),
        ("10.0.0.1", "http_tls authenticates_callers", 401, 401),
        ("10.0.0.1", "insecure", 401, 200),
    ]:
        host = "localhost" if client == "127.0.0.1" else "10.0.0.9:9420"
        status, body = asked_by(client, flags, "/", host)
        assert (status, "--http-tls" in body) == (page_status, page_status == 403)
        assert asked_by(client, flags, "/events", host)[0] == page_status
        assert asked_by(client, flags, "/metrics", host)[0] == metrics_status


def _backend(clock: Callable[[], float], **parts: Any) -> Any:
    """What the dashboard looks at."""
    checks, identity = SimpleNamespace(clock=clock), SimpleNamespace(version="1", started_at=0.0)
    parts = {"store": SimpleNamespace(counters=Counters())} | parts
    return SimpleNamespace(checks=checks, identity=identity, **parts)


def test_tenants_beyond_the_limit_are_counted_together() -> None:
    import numpy as np

    counters = Counters()
    for number in range(MAX_TENANTS + 5):
        counters.note_lookup(f"t{number}", 3, np.array([0, 1], np.uint8), ("cpu", "disk"))
    finds = counters.finds()
    assert len(finds.asked) == MAX_TENANTS + 1
    assert (finds.asked[OTHERS], finds.ready[OTHERS]) == (15, 10)
    assert finds.tiers == {"cpu": MAX_TENANTS + 5, "disk": MAX_TENANTS + 5}
    counters.note_move("cpu", "disk", 10)
    counters.note_move("cpu", "disk", 5)
    assert counters.moves() == {("cpu", "disk"): (2, 15)}
