"""The kvstore-server command."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence

import structlog

from kvstore.proto.errors import KVStoreError
from kvstore.server.config import ServerConfig, load_config
from kvstore.server.memory_limit import check_memory
from kvstore.server.node import Node
from kvstore.server.rate_limit import LogLimit
from kvstore.server.rpc.request_ids import add_request_id

GRACE_S = 20.0
KEPT_BYTES = 64 << 20
"""Freed memory that each allocator arena keeps for the next message."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD_BYTES = 32 << 20
EXIT_CANNOT_START = 2

logger = structlog.get_logger(__name__)


def create_server(config: ServerConfig) -> tuple[Node, int]:
    """Build a server and bind it; return it, not yet started, with the port it got."""
    node = Node(config)
    return node, node.port


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop. Returns the exit status: 0, or 2 when it could not start."""
    try:
        os.umask(0o077)  # what it writes is nobody else's to read
        config = load_config(sys.argv[1:] if argv is None else argv)
        _set_up_logs(config)
        keep_freed_memory()
        check_memory(config)
        node, port = create_server(config)
    except KVStoreError as error:
        print(f"kvstore-server: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    if node.trust.authenticator.is_open and not config.insecure:
        logger.warning(
            "every user of this host can read and write all chunks",
            fix="give --auth-keys, or --insecure where that is meant",
        )
    told = _listen_for_signals()
    node.start()
    gc.freeze()  # what is there now stays: to look through it stops all calls for 0.1 s or more
    host, _ = config.listen_address
    print(
        f"kvstore-server listening on {host}:{port} tiers={','.join(config.tiers)} "
        f"recovered_chunks={node.recovered_chunks}",
        flush=True,
    )
    os.read(told, 1)
    clean = node.stop(GRACE_S)
    print(f"kvstore-server stopped clean={str(clean).lower()}", flush=True)
    return 0


def _listen_for_signals() -> int:
    """Return a descriptor that can be read once SIGTERM or SIGINT has come.

    Python's handlers run in the main thread, which waits on; a kernel may give the signal to any
    other. What is written here wakes the main thread whoever got it.
    """
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return told


def keep_freed_memory() -> None:
    """Have glibc keep what messages of a megabyte free, rather than give it back each time.

    Faulting the pages in again costs more than all copies of the message together: gets over
    gRPC went from 0.41 to 1.05 GB/s with this.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


def _set_up_logs(config: ServerConfig) -> None:
    renderer = (
        structlog.processors.JSONRenderer()
        if config.log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=False)
    )
    structlog.configure(
        processors=[
            LogLimit(time.monotonic),
            structlog.processors.add_log_level,
            add_request_id,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[config.log_level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
