"""The pages of the HTTP port: metrics, and the dashboard for authorized callers."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from kvstore.proto.errors import KVStoreError, PermissionDeniedError, UnauthenticatedError
from kvstore.server.api.service import Backend
from kvstore.server.security.authenticator import CERTIFICATE as X509
from kvstore.server.security.authenticator import SCHEME
from kvstore.server.security.authorization import Authorizer
from kvstore.server.security.sessions import Principal
from kvstore.server.settings.settings import Settings
from kvstore.server.settings.values import is_loopback, parse_endpoint
from kvstore.server.web.dashboard import EVERY_S, MEDIA, Dashboard
from kvstore.server.web.gauges import CONTENT_TYPE, MetricsText, gauges
from kvstore.server.web.http_server import CERTIFICATE, HttpServer, TlsFiles

MAX_READERS = 16
"""Limit of live pages; a further one is answered 503 and stays static."""
METHOD = "Dashboard"
"""Name of a refused page in the audit log."""

_WHERE = "kvstore: /metrics. The dashboard is for this host only, or over TLS: see --http-tls\n"
_REALM = {"WWW-Authenticate": 'Basic realm="kvstore", charset="UTF-8"'}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Pages:
    """The application of the HTTP port. For its own thread only."""

    def __init__(
        self, config: Settings, authorizer: Authorizer, metrics: MetricsText, dashboard: Dashboard
    ) -> None:
        # This host sees all pages. Other hosts see the dashboard over TLS with authentication or
        # with --insecure; and the metrics with credentials or with --open-pages.
        is_guarded = config.http_tls and config.authenticates_callers
        self._shows_dashboard = config.insecure or is_guarded
        self._guards_metrics = not (config.open_pages or config.insecure)
        self._authorizer = authorizer
        self._metrics = metrics
        self._dashboard = dashboard
        self._readers = 0
        self.is_ending: Callable[[], bool] = lambda: False
        names = ("metrics", "data", "events", *MEDIA)
        self.app = Starlette(routes=[Route(f"/{name}", self._answer) for name in names])

    def _refusal(self, request: Request, *, is_page: bool) -> Response | None:
        # By the socket's addresses: the connection does not leave this host.
        ends = request.client, request.scope.get("server")
        is_local = all(end is not None and is_loopback(end[0]) for end in ends)
        if is_local and not is_loopback((request.url.hostname or "").strip("[]")):
            # DNS rebinding: another site's name may resolve to this host.
            return PlainTextResponse("use localhost or 127.0.0.1\n", 421)
        if is_page and not is_local and not self._shows_dashboard:
            return PlainTextResponse(_WHERE, 403)
        if is_page or (self._guards_metrics and not is_local):
            try:
                self._check(request)
            except PermissionDeniedError as error:
                return PlainTextResponse(f"{error}\n", 403, _HEADERS)
            except UnauthenticatedError as error:
                return PlainTextResponse(f"{error}\n", 401, _HEADERS | _REALM)
        return None

    def _check(self, request: Request, *, is_noted: bool = True) -> None:
        given = request.headers.get("authorization", "")
        pem: bytes = request.scope.get("state", {}).get(CERTIFICATE, b"")
        principal: Principal | None = None
        try:
            proof = [("authorization", _bearer(given))] if given else []
            certificate = {X509: [pem]} if pem else {}
            principal = self._authorizer.authenticator.principal_of(proof, certificate)
            if "admin" not in principal.roles:
                raise PermissionDeniedError(f"{principal.name} lacks the role 'admin'")
        except KVStoreError as error:
            if is_noted and (given or pem):  # else a browser's first request, before its login
                host, port = request.client or ("", 0)
                peer = f"http:{host}:{port}"
                outcome = type(error).__name__
                self._authorizer.note(principal, METHOD, outcome, peer=lambda: peer)
            raise

    async def _answer(self, request: Request) -> Response:
        name = request.url.path.removeprefix("/")
        refusal = self._refusal(request, is_page=name != "metrics")
        if refusal is not None:
            return refusal
        if name == "metrics":
            text = await asyncio.to_thread(self._metrics.text)
            return Response(text, headers={"Content-Type": CONTENT_TYPE})
        if name == "data":
            data = await self._dashboard.text()
            return Response(data, media_type="application/json", headers=_HEADERS)
        if name in MEDIA:
            media_type, body = MEDIA[name]
            return Response(body, media_type=media_type, headers=_HEADERS)
        if self._readers >= MAX_READERS:
            full = "too many live pages\n"
            return PlainTextResponse(full, 503, _HEADERS)
        events = self._events(request)
        return StreamingResponse(events, media_type="text/event-stream", headers=_HEADERS)

    async def _events(self, request: Request) -> AsyncIterator[str]:
        """Yield the page's data every second while the caller is authorized."""
        self._readers += 1
        try:
            yield "retry: 2000\n\n"
            while not self.is_ending() and not await request.is_disconnected():
                self._check(request, is_noted=False)
                yield f"data: {await self._dashboard.text()}\n\n"
                await asyncio.sleep(EVERY_S)
        except KVStoreError:
            return
        finally:
            self._readers -= 1


def _bearer(given: str) -> str:
    """Return the token that a browser sends as the password, with any user name."""
    scheme, _, value = given.partition(" ")
    if scheme.lower() != "basic":
        return given
    try:
        text = base64.b64decode(value, validate=True).decode()
    except ValueError:  # no base64, or no text in it
        raise UnauthenticatedError("send a token as the password") from None
    return SCHEME + text.partition(":")[2]


def open_http(config: Settings, backend: Backend, authorizer: Authorizer) -> HttpServer:
    """Serve the metrics and the dashboard at ``--http``. Raises InvalidRequestError."""
    store = backend.store
    metrics = MetricsText(
        store.counters,
        lambda: gauges(store, len(backend.sessions), backend.directory),
        list(store.tiers.slots),
    )
    dashboard = Dashboard(backend)
    tls: TlsFiles | None = None
    if config.http_tls and config.tls_cert is not None and config.tls_key is not None:
        tls = (config.tls_cert, config.tls_key, config.tls_client_ca)
    pages = Pages(config, authorizer, metrics, dashboard)
    server = HttpServer(parse_endpoint(config.http), pages.app, tls, dashboard.tick)
    pages.is_ending = server.is_ending
    return server
