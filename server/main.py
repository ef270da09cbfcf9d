"""The kvstore-server command."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO, cast

import structlog
from structlog.typing import EventDict, Processor

from kvstore.proto.errors import KVStoreError
from kvstore.server.node import Node
from kvstore.server.security.rate_limits import LogLimit
from kvstore.server.settings.loading import flag_of
from kvstore.server.settings.process_limits import check_memory, raise_limit
from kvstore.server.settings.settings import Settings, load_config
from kvstore.server.settings.values import join_endpoint, parse_endpoint
from kvstore.server.telemetry.tracing import add_request_id

GRACE_S = 20.0
STDOUT, STDERR = 1, 2
KEPT_BYTES = 64 << 20
"""Freed memory that each allocator arena keeps for the next message."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD_BYTES = 32 << 20
EXIT_CANNOT_START = 2

logger = structlog.get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal. Return the exit status: 0, or 2 when it could not start."""
    _open_missing()
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
    if node.authorizer.authenticator.is_open and not config.insecure:
        logger.warning(
            "every user of this host can read and write all chunks",
            fix="give --auth-keys, or --insecure if that is intended",
        )
    for name, tier in config.unused:
        fix = f"add {tier} to --tiers, or leave {flag_of(name)} out"
        logger.warning("a setting has no effect: its tier is not used", setting=name, fix=fix)
    signals, out = _listen_for_signals(), _Output(STDOUT)
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
    """A standard stream that never blocks. Lines that its reader does not take at once are lost;
    the next line that is written has their number.
    """

    def __init__(self, descriptor: int) -> None:
        if os.isatty(descriptor):  # poll(2) reports room for a byte, and a write waits for more
            with suppress(OSError):  # opened again, as the flags of the other are not ours alone
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                descriptor = os.open(f"/proc/self/fd/{descriptor}", flags)
        self._descriptor = descriptor
        self._room = select.poll()
        self._room.register(descriptor, select.POLLOUT)
        self._lost, self._is_cut = 0, False

    def write(self, text: str) -> None:
        data = text.encode(errors="replace")
        if self._is_cut:
            data = b"\n" + data
        for start in range(0, len(data), select.PIPE_BUF):
            piece = data[start : start + select.PIPE_BUF]
            if not self._takes(piece):
                self._lost += 1
                self._is_cut = self._is_cut or start > 0
                return
        self._lost, self._is_cut = 0, False

    def _takes(self, piece: bytes) -> bool:
        """Write at most PIPE_BUF bytes if poll(2) reports room for them."""
        try:
            count = os.write(self._descriptor, piece) if self._room.poll(0) else 0
        except OSError:
            return False
        self._is_cut = self._is_cut or 0 < count < len(piece)
        return count == len(piece)

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def add_lost(self, _: object, __: str, fields: EventDict) -> EventDict:
        """Add the number of lines lost before this one: a processor of structlog."""
        if self._lost:
            fields["lost"] = self._lost
        return fields


def _open_missing() -> None:
    """Open /dev/null for closed standard streams, or the next file opened becomes one of them."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        pass
    os.close(descriptor)


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
    out = _Output(STDERR)
    renderer: Processor = structlog.dev.ConsoleRenderer(colors=False)
    if config.log_format == "json":
        renderer = structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            LogLimit(time.monotonic),
            out.add_lost,
            structlog.processors.add_log_level,
            add_request_id,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[config.log_level.upper()]
        ),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", out)),
    )
