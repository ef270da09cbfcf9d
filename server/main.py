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
from typing import TextIO, cast

import structlog
from structlog.typing import Processor

from kvstore.proto.errors import KVStoreError
from kvstore.server.node import Node
from kvstore.server.security.rate_limits import LogLimit
from kvstore.server.settings.process_limits import check_memory, raise_limit
from kvstore.server.settings.settings import Settings, load_config
from kvstore.server.settings.values import join_endpoint, parse_endpoint
from kvstore.server.telemetry.tracing import add_request_id

GRACE_S = 20.0
KEPT_BYTES = 64 << 20
"""Freed memory that each allocator arena keeps for the next message."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD_BYTES = 32 << 20
EXIT_CANNOT_START = 2

logger = structlog.get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal. Return the exit status: 0, or 2 when it could not start."""
    try:
        os.umask(0o077)  # other users must not read its files
        config = load_config(sys.argv[1:] if argv is None else argv)
        _set_up_logs(config)
        keep_freed_memory()
        raise_limit()
        check_memory(config)
        node = Node(config)
    except KVStoreError as error:
        print(f"kvstore-server: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    if node.trust.authenticator.is_open and not config.insecure:
        logger.warning(
            "every user of this host can read and write all chunks",
            fix="give --auth-keys, or --insecure if that is intended",
        )
    signals, out = _listen_for_signals(), _Output(sys.stdout)
    node.start()
    gc.freeze()  # permanent objects: collecting them stops all calls for 0.1 s or more
    where = join_endpoint(parse_endpoint(config.listen)[0], node.port)
    tiers = ",".join(config.tiers)
    recovered = f"recovered_chunks={node.recovered_chunks}"
    out.write(f"kvstore-server listening on {where} tiers={tiers} {recovered}\n")
    while os.read(signals, 1)[0] == signal.SIGHUP:
        logger.info("SIGHUP", does="nothing; keys and certificates are reloaded on change")
    clean = node.stop(GRACE_S)
    out.write(f"kvstore-server stopped clean={str(clean).lower()}\n")
    return 0


class _Output:
    """A standard stream whose reader may be gone: further output is lost, and neither a call nor
    the exit of the process fails.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # Python flushes the rest at exit
            os.close(nowhere)

    def flush(self) -> None:
        """Do nothing: ``write`` flushes."""


def _listen_for_signals() -> int:
    """Return a descriptor from which the numbers of received signals can be read.

    The kernel may deliver a signal to any thread, while Python's handlers run in the main thread;
    reading the descriptor wakes the main thread in any case.
    """
    signals, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return signals


def keep_freed_memory() -> None:
    """Make glibc keep memory freed by messages of a megabyte, rather than return it each time.

    Page faults would cost more than all copies of the message: this raised gets over gRPC from
    0.41 to 1.05 GB/s.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


def _set_up_logs(config: Settings) -> None:
    renderer: Processor = structlog.dev.ConsoleRenderer(colors=False)
    if config.log_format == "json":
        renderer = structlog.processors.JSONRenderer()
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
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _Output(sys.stderr))),
    )
