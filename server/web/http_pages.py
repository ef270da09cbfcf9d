"""The pages of the HTTP port: the metrics, and the dashboard for whoever may see it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from kvstore.proto.errors import KVStoreError, PermissionDeniedError, UnauthenticatedError
from kvstore.server.security.authenticator import CERTIFICATE as X509
from kvstore.server.security.authenticator import SCHEME, Authenticator
from kvstore.server.security.sessions import Principal
from kvstore.server.settings.settings import Settings
from kvstore.server.settings.values import is_loopback
from kvstore.server.telemetry.metrics import Gauge
from kvstore.server.web.dashboard import MEDIA, Dashboard, Subject, Viewer
from kvstore.server.web.gauges import CONTENT_TYPE, MetricsText, gauges
from kvstore.server.web.http_server import CERTIFICATE, HttpServer, TlsFiles

if TYPE_CHECKING:
    from kvstore.server.security.setup import Trust


MAX_READERS = 16
"""Pages that are kept up to date at once; a further one is answered 503 and stays as it was."""

OnRefused = Callable[[Principal | None, str, str], None]
"""Told of each refusal of who brought a proof: who it was, the error, and from where."""

_WHERE = "kvstore: /metrics. The dashboard is for this machine, or goes over TLS: see --http-tls\n"
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


@dataclass(frozen=True, slots=True)
class Exposure:
    """What of the HTTP port is for other hosts; this machine has all of it.

    ``shows_dashboard``: nobody on the way can read or change the page, or that was accepted.
    ``asks_for_metrics``: who reads them says who they are, too.
    """

    shows_dashboard: bool = False
    asks_for_metrics: bool = True


class Pages:
    """The application of the HTTP port. For its own thread alone."""

    def __init__(
        self,
        metrics: MetricsText,
        dashboard: Dashboard,
        authenticator: Authenticator,
        exposure: Exposure,
        on_refused: OnRefused = lambda who, outcome, peer: None,
    ) -> None:
        self._metrics = metrics
        self._dashboard = dashboard
        self._authenticator = authenticator
        self._exposure = exposure
        self._on_refused = on_refused
        self._readers = 0
        self.app = Starlette(
            routes=[
                Route("/metrics", self._guarded(self._get_metrics, is_page=False)),
                Route("/data", self._guarded(self._get_data)),
                Route("/events", self._guarded(self._get_events)),
                *(Route(f"/{name}", self._guarded(self._get_media)) for name in MEDIA),
            ]
        )

    # --- who may

    def _guarded(
        self, answer: Callable[[Request], Awaitable[Response]], *, is_page: bool = True
    ) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            is_local = _is_local(request)
            if is_local and not _is_own_name(request.url.hostname or ""):
                # A page of elsewhere may have had its name point here.
                return PlainTextResponse("ask for it as localhost or 127.0.0.1\n", 421)
            if is_page and not is_local and not self._exposure.shows_dashboard:
                return PlainTextResponse(_WHERE, 403)
            if is_page or (self._exposure.asks_for_metrics and not is_local):
                try:
                    self._check(request, self._on_refused)
                except PermissionDeniedError as error:
                    return PlainTextResponse(f"{error}\n", 403, _HEADERS)
                except UnauthenticatedError as error:
                    return PlainTextResponse(f"{error}\n", 401, _HEADERS | _REALM)
            return await answer(request)

        return guarded

    def _check(self, request: Request, on_refused: OnRefused) -> None:
        """See that an admin asks. Raises UnauthenticatedError, PermissionDeniedError."""
        given = request.headers.get("authorization", "")
        pem: bytes = request.scope.get("state", {}).get(CERTIFICATE, b"")
        principal: Principal | None = None
        try:
            proof = [("authorization", _bearer(given))] if given else []
            principal = self._authenticator.principal_of(proof, {X509: [pem]} if pem else {})
            if not principal.is_admin():
                raise PermissionDeniedError(f"{principal.name} has not the role 'admin'")
        except KVStoreError as error:
            if given or pem:  # else a browser asks what it should bring
                host, port = request.client or ("", 0)
                on_refused(principal, type(error).__name__, f"http:{host}:{port}")
            raise

    # --- pages

    async def _get_metrics(self, request: Request) -> Response:
        text = await asyncio.to_thread(self._metrics.text)
        return Response(text, media_type=None, headers={"Content-Type": CONTENT_TYPE})

    async def _get_data(self, request: Request) -> Response:
        text = await self._dashboard.text()
        return Response(text, media_type="application/json", headers=_HEADERS)

    async def _get_media(self, request: Request) -> Response:
        media_type, data = MEDIA[request.url.path.removeprefix("/")]
        return Response(data, media_type=media_type, headers=_HEADERS)

    async def _get_events(self, request: Request) -> Response:
        if self._readers >= MAX_READERS:
            return PlainTextResponse(
                "as many pages are open as are kept up to date\n", 503, _HEADERS
            )
        return StreamingResponse(
            self._events(request), media_type="text/event-stream", headers=_HEADERS
        )

    async def _events(self, request: Request) -> AsyncIterator[str]:
        """Yield what the page shows whenever it was looked at anew, while who asked may see it."""
        self._readers += 1
        try:
            yield "retry: 2000\n\n"
            number = 0
            while not await request.is_disconnected():
                number, text = await self._dashboard.after(number)
                try:
                    self._check(request, lambda *_: None)
                except KVStoreError:
                    return
                yield f"data: {text}\n\n"
        finally:
            self._readers -= 1


def _bearer(given: str) -> str:
    """Return a token from what browsers send: its password, whatever the name beside it."""
    scheme, _, value = given.partition(" ")
    if scheme.lower() != "basic":
        return given
    try:
        text = base64.b64decode(value, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise UnauthenticatedError("bring a token as the password") from None
    return SCHEME + text.partition(":")[2]


def _is_own_name(host: str) -> bool:
    return is_loopback(host.strip("[]"))


def _is_local(request: Request) -> bool:
    """Whether the connection does not leave this machine, by the kernel's word."""
    ends = request.client, request.scope.get("server")
    return all(end is not None and is_loopback(end[0]) for end in ends)


METHOD = "Dashboard"
"""What a page that was refused is called in the audit log."""


class HttpPort:
    """The metrics and the dashboard, served from birth to ``close``. ``tick`` now and then.

    Raises InvalidRequestError for an address that cannot be had.
    """

    def __init__(self, config: Settings, subject: Subject, trust: Trust) -> None:
        assert config.http_address is not None
        store, sessions = subject.store, subject.sessions
        tiers = [slot.name for slot in store.tiers.slots.values()]

        def levels() -> list[Gauge]:
            return gauges(store, len(sessions), subject.directory)

        metrics = MetricsText(subject.counters, levels, tiers)
        self._viewer = viewer = Viewer(subject)
        dashboard = Dashboard(viewer.data, time.monotonic)

        def on_refused(who: Principal | None, outcome: str, peer: str) -> None:
            trust.authorizer.note(who, METHOD, outcome, peer=lambda: peer)

        pages = Pages(metrics, dashboard, trust.authenticator, exposure_of(config), on_refused)
        tls = None
        if config.http_tls and config.tls_cert is not None and config.tls_key is not None:
            tls = TlsFiles(config.tls_cert, config.tls_key, config.tls_client_ca)
        self._server: HttpServer = HttpServer(config.http_address, pages.app, tls)
        self.port = self._server.port
        self.close: Callable[[], None] = self._server.close

    def tick(self) -> None:
        """Keep count over time; take in a certificate that was replaced."""
        self._viewer.tick()
        self._server.tick()


def exposure_of(config: Settings) -> Exposure:
    """Return what of the port is for other hosts."""

    is_guarded = config.http_tls and config.authenticates_callers
    return Exposure(
        shows_dashboard=config.insecure or is_guarded,
        asks_for_metrics=not (config.open_pages or config.insecure),
    )
