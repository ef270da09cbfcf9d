"""A real kvstore-server for tests, on a free port of the loopback."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_START_S = 60.0
_STOP_S = 60.0
_LISTENING = re.compile(r"kvstore-server listening on (\S+):(\d+) tiers=\S+ recovered_chunks=(\d+)")


def _source_path() -> str:
    """Return PYTHONPATH with this checkout first, then the current entries."""
    others = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(one for one in (str(_ROOT / "src"), others) if one)


class ServerProcess:
    """One server that can be killed and started again on the same port and the same disk.

    *flags* follow ``--listen`` and ``--socket``.
    """

    def __init__(self, folder: Path, *flags: str) -> None:
        self.socket_path = folder / "s.sock"
        self.errors_path = folder / "server-errors.txt"
        self.port = 0
        self.recovered_chunks = 0
        self.output = ""
        self.environment: dict[str, str] = {}
        """Extra variables; changes apply at the next start."""
        self.has_socket = True
        """Whether ``--socket`` is given."""
        self.launcher: list[str] = []
        """A command that starts the server, such as one that enters another network."""
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def errors(self) -> str:
        """Its standard error since the first start."""
        return self.errors_path.read_text()

    def start(self) -> None:
        self.spawn()
        found = _LISTENING.search(self._wait_for_line())
        if found is None:
            status = self.wait()
            raise RuntimeError(f"kvstore-server exited with status {status}: {self.errors}")
        self.port = int(found[2])
        self.recovered_chunks = int(found[3])

    def spawn(self) -> None:
        self.output = ""
        listen = f"127.0.0.1:{self.port}"
        path = ("--socket", str(self.socket_path)) if self.has_socket else ()
        with self.errors_path.open("ab") as errors:
            self._process = subprocess.Popen(
                [
                    *(*self.launcher, sys.executable, "-m", "kvstore.server", "--listen", listen),
                    *(*path, *self._flags),
                ],
                cwd=self.socket_path.parent,
                env={**os.environ, "PYTHONPATH": _source_path(), **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )

    def _wait_for_line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        deadline = time.monotonic() + _START_S
        while "\n" not in self.output and time.monotonic() < deadline:
            if select.select([pipe], [], [], 0.5)[0]:
                text = os.read(pipe, 4096).decode()
                if not text:
                    break
                self.output += text
        return self.output

    def wait(self) -> int:
        """Wait for the process to exit; return its status."""
        assert self._process is not None
        rest, _ = self._process.communicate(timeout=_STOP_S)
        self.output += rest.decode()
        return self._process.returncode

    def terminate(self) -> int:
        assert self._process is not None
        self._process.terminate()
        return self.wait()

    def kill(self) -> None:
        """Kill the server with SIGKILL if it runs, and wait for it."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process = None

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process; after SIGSTOP wait until all threads have stopped."""
        assert self._process is not None
        self._process.send_signal(number)
        deadline = time.monotonic() + _STOP_S
        while number is signal.SIGSTOP and not _is_stopped(self.pid):
            assert time.monotonic() < deadline, "some threads still run"
            time.sleep(0.001)


def _is_stopped(pid: int) -> bool:
    """Whether all threads of a process are stopped (proc(5): state T)."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(") ")[2].startswith("T") for stat in stats)
