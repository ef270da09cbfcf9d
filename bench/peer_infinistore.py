"""InfiniStore 0.2.35 over TCP, through its own benchmark.

Its server registers RDMA devices when it starts, for TCP connections too, and ends without one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.peer_process import (
    PeerSkippedError,
    free_port,
    make_venv,
    run,
    serving_peer,
    shared_libraries,
)

VERSION = "InfiniStore 0.2.35"
LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnl-3.so.200": "libnl-3-200",
    "libnl-route-3.so.200": "libnl-route-3-200",
}
_SPEEDS = re.compile(r"write cache: ([0-9.]+) MB/s, read cache: ([0-9.]+) MB/s")


def parse_speeds(text: str) -> tuple[float, float]:
    """Return MB/s of writes and reads from its benchmark's output. Raises PeerSkippedError."""
    found = _SPEEDS.search(text)
    if found is None:
        raise PeerSkippedError("its benchmark printed no speeds")
    return float(found[1]), float(found[2])


@dataclass(frozen=True, slots=True)
class InfiniStore:
    """An installed InfiniStore, a scratch *folder*, and where its shared libraries lie."""

    python: Path
    folder: Path
    libraries: str

    @classmethod
    def install(
        cls, venvs: Path, folder: Path, devices: Path = Path("/sys/class/infiniband")
    ) -> InfiniStore:
        """Make its virtual environment unless it is there. Raises PeerSkippedError."""
        if not devices.is_dir() or not any(devices.iterdir()):
            raise PeerSkippedError("its server ends without an RDMA device, for TCP too")
        python = make_venv(venvs, "infinistore", ["torch==2.13.0"])
        return cls(python, folder, shared_libraries(venvs, LIBRARIES))

    @contextmanager
    def server(self) -> Iterator[int]:
        """Run its server with 1 GB; yield its port."""
        port, manage = free_port(), free_port()
        command = [
            *self._env(), str(self.python.with_name("infinistore")), "--host", "127.0.0.1",
            "--service-port", str(port), "--manage-port", str(manage), "--prealloc-size", "1",
        ]  # fmt: skip
        with serving_peer(command, [port], self.folder / "infinistore.log"):
            yield port

    def bench(self, port: int) -> tuple[float, float]:
        """Return MB/s of writes and reads: 128 MB over TCP in blocks of 2 MiB."""
        (program,) = self.python.parents[1].glob("lib/*/site-packages/infinistore/benchmark.py")
        flags = ["--service-port", str(port), "--size", "128", "--block-size", "2048"]
        return parse_speeds(run([*self._env(), self.python, program, *flags], 120))

    def _env(self) -> list[str]:
        return ["env", f"LD_LIBRARY_PATH={self.libraries}"] if self.libraries else []
