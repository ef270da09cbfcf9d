"""The HTTP port, as the configuration asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvstore.server.settings.settings import Settings
from kvstore.server.web.gauges import gauges

if TYPE_CHECKING:
    from kvstore.server.security.principal import Principal
    from kvstore.server.security.setup import Trust
    from kvstore.server.web.dashboard_view import Subject
    from kvstore.server.web.http_pages import Exposure
    from kvstore.server.web.http_server import HttpServer


METHOD = "Dashboard"
"""What a page that was refused is called in the audit log."""


class HttpPort:
    """The metrics and the dashboard, served from birth to ``close``. ``tick`` now and then.

    Raises InvalidRequestError for an address that cannot be had.
    """

    def __init__(self, config: Settings, subject: Subject, trust: Trust) -> None:
        from kvstore.server.web.dashboard import Dashboard
        from kvstore.server.web.dashboard_page import sections_of
        from kvstore.server.web.dashboard_view import Viewer
        from kvstore.server.web.http_pages import Pages
        from kvstore.server.web.http_server import HttpServer, TlsFiles
        from kvstore.server.web.metrics_text import MetricsText

        assert config.http_address is not None
        store, sessions = subject.store, subject.sessions
        tiers = [slot.name for slot in store.tiers.slots.values()]
        levels = lambda: gauges(store, len(sessions), subject.directory)  # noqa: E731
        metrics = MetricsText(subject.counters, levels, tiers)
        self._viewer = viewer = Viewer(subject)
        dashboard = Dashboard(lambda: sections_of(viewer.view()), time.monotonic)

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
    from kvstore.server.web.http_pages import Exposure

    is_guarded = config.http_tls and config.asks_who_calls
    return Exposure(
        shows_dashboard=config.insecure or is_guarded,
        asks_for_metrics=not (config.open_pages or config.insecure),
    )
