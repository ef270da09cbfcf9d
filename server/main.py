"""The kvstore-server command."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Sequence

import structlog

from kvstore.proto.errors import KVStoreError
from kvstore.server.config import ServerConfig, load_config
from kvstore.server.node import Node

GRACE_S = 20.0
EXIT_CANNOT_START = 2


def create_server(config: ServerConfig) -> tuple[Node, int]:
    """Build a server and bind it; return it, not yet started, with the port it got."""
    node = Node(config)
    return node, node.port


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop. Returns the exit status: 0, or 2 when it could not start."""
    try:
        config = load_config(sys.argv[1:] if argv is None else argv)
        _set_up_logs(config)
        node, port = create_server(config)
    except KVStoreError as error:
        print(f"kvstore-server: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    node.start()
    host, _ = config.listen_address
    print(
        f"kvstore-server listening on {host}:{port} tiers={','.join(config.tiers)} "
        f"recovered_chunks={node.recovered_chunks}",
        flush=True,
    )
    stop.wait()
    clean = node.stop(GRACE_S)
    print(f"kvstore-server stopped clean={str(clean).lower()}", flush=True)
    return 0


def _set_up_logs(config: ServerConfig) -> None:
    renderer = (
        structlog.processors.JSONRenderer()
        if config.log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=False)
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[config.log_level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
