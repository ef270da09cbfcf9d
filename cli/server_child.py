"""A ServerChild: a kvstore-server of our own, in a folder of its own, for as long as we want."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from kvstore.proto.errors import KVStoreError

DISK_SIZE = "512MiB"
START_S = 60.0
STOP_S = 30.0
_MARK = "kvstore-server listening on "


class ServerChild:
    """One kvstore-server process on a free port of the loopback; *folder* keeps its disk tier.

    What *flags* do not say is the server's default. May be started again after its end; the
    disk is then the same and the port another.
    """

    def __init__(self, folder: Path, flags: Sequence[str] = ()) -> None:
        self.log_file = folder / "server.log"
        self._command = [
            sys.executable, "-m", "kvstore.server",
            "--listen", "127.0.0.1:0",
            "--disk", f"{DISK_SIZE}:{folder / 'disk'}",
            "--socket-path", str(folder / "{port}.sock"),
            *flags,
        ]  # fmt: skip
        self._process: subprocess.Popen[str] | None = None
        self.address = ""
        self.greeting = ""

    def start(self) -> None:
        """Start it and wait until it listens. Raises KVStoreError with its own last words."""
        with self.log_file.open("a") as log:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                self._command, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._process = process
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], START_S)
        line = process.stdout.readline().strip() if ready else ""
        if not line.startswith(_MARK):
            self.kill()
            words = self.log_file.read_text().splitlines()[-1:] or ["it said nothing"]
            raise KVStoreError(f"kvstore-server did not start: {words[0]}")
        self.greeting = line
        self.address = line.removeprefix(_MARK).split()[0]

    def kill(self) -> None:
        """End it as kill -9 does. Nothing it holds is saved."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Let it drain and end."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()

    def __enter__(self) -> ServerChild:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
