"""The ROUTER socket of the bulk channel, with every limit that ZeroMQ has."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvstore.proto import bulk
from kvstore.proto.errors import InvalidRequestError
from kvstore.server.bulk.zmq_connections import ConnectionCap
from kvstore.server.bulk.zmq_keys import CurveKeys
from kvstore.server.settings.units import is_loopback, parse_endpoint

if TYPE_CHECKING:
    import zmq

SEND_QUEUE_MESSAGES = 4096
"""Waiting for one peer: what its requests' credit can come to, and some. Past it, it is dropped."""
RECEIVE_QUEUE_MESSAGES = 64
SOCKET_BUFFER_BYTES = 4 << 20
_ANY_HOST = ("0.0.0.0", "::", "*")  # noqa: S104 - compared with


def bind_router(
    endpoint: str, keys: CurveKeys | None, most: int, refused: Callable[[], object]
) -> tuple[zmq.Socket[bytes], ConnectionCap, str]:
    """Bind *endpoint*, host:port or ipc:PATH; return the socket, what holds it to *most*
    connections (*refused* is called for each beyond) and the address to connect to.

    The address has ``*`` for the host when every interface is bound. The socket has a context
    of its own. Raises InvalidRequestError.
    """
    import zmq

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.router_mandatory = True
    router.sndhwm = SEND_QUEUE_MESSAGES
    router.rcvhwm = RECEIVE_QUEUE_MESSAGES
    router.maxmsgsize = bulk.MAX_WIRE_BYTES
    router.heartbeat_ivl = bulk.HEARTBEAT_MS
    router.heartbeat_timeout = bulk.SILENCE_MS
    router.handshake_ivl = bulk.SILENCE_MS
    if keys is not None:
        router.curve_server = True
        router.curve_publickey, router.curve_secretkey = keys.public, keys.secret
    cap = ConnectionCap(router, most, refused)
    try:
        return router, cap, bind_to(router, endpoint)
    except zmq.ZMQError as error:
        cap.close()
        router.close(0)
        context.term()
        fix = f"{error.strerror}; is it taken? choose another address"
        raise InvalidRequestError("zmq", endpoint, fix) from None


def bind_to(router: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind a socket to *endpoint*, host:port or ipc:PATH; return the address to connect to."""
    if endpoint.startswith("ipc:"):
        router.bind(f"ipc://{endpoint.removeprefix('ipc:')}")
        return _bound(router)
    host, port = parse_endpoint(endpoint)
    router.ipv6 = ":" in host
    router.bind(f"tcp://{f'[{host}]' if ':' in host else host}:{port}")
    bound = _bound(router)
    return f"tcp://*:{urlsplit(bound).port}" if host in _ANY_HOST else bound


def _bound(router: zmq.Socket[bytes]) -> str:
    import zmq

    bound = router.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.rstrip(b"\0").decode()


def is_private(endpoint: str) -> bool:
    """Whether only this machine can reach *endpoint*: then it goes without encryption."""
    return endpoint.startswith("ipc:") or is_loopback(parse_endpoint(endpoint)[0])
