"""Opens the bulk channel, as the settings say."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.bulk.tcp_requests import StreamTerms
from kvstore.server.bulk.tcp_server import StreamPlane
from kvstore.server.security.authorization import Door
from kvstore.server.security.sessions import SessionTable
from kvstore.server.settings.settings import Settings
from kvstore.server.settings.values import is_loopback, join_endpoint, parse_endpoint

if TYPE_CHECKING:
    from kvstore.server.bulk.service import BulkService

YIELD_S = 0.001
"""Before a part for another server, while this one's own clients are sent frames."""
_ANY_HOST = ("0.0.0.0", "::", "*")  # noqa: S104 - compared with
_BACKLOG = 128


class BulkAt(NamedTuple):
    """What clients and peers are told: where the channel is, and its certificate."""

    address: str = ""
    certificate: bytes = b""


def open_streams(
    config: Settings,
    service: BulkService,
    sessions: SessionTable,
    door: Door,
    clock: Callable[[], float],
    most_streams: int,
) -> tuple[StreamPlane, BulkAt]:
    """Return the channel at ``config.bulk``, in plain text where only this machine can reach it.

    Raises InvalidRequestError when the address cannot be had.
    """
    host, port = parse_endpoint(config.bulk)
    tls = None
    if not is_loopback(host):
        from kvstore.proto.tls import make_tls

        tls = make_tls()
    listener, address = listen(host, port)

    def pause() -> None:
        if service.is_busy:
            time.sleep(YIELD_S)

    threads = config.limits.peer_requests + 1
    terms = StreamTerms(
        sessions, door, service, threads, config.workers, clock, pause, most_streams
    )
    streams = StreamPlane(listener, address, tls.context if tls else None, terms)
    return streams, BulkAt(address, tls.certificate if tls else b"")


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """Bind *host* and *port*; return the listener, and the address to connect to.

    Raises InvalidRequestError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = host.replace("*", _ANY_HOST[0])
        listener = socket.create_server((bound, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        fix = f"{error.strerror}; is it taken? choose another address"
        raise InvalidRequestError("bulk", join_endpoint(host, port), fix) from None
    named = "*" if host in _ANY_HOST else f"[{host}]" if ":" in host else host
    return listener, f"tcp://{named}:{listener.getsockname()[1]}"
