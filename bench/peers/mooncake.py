"""Mooncake Store 0.3.13 over TCP: a master, a process that lends memory, and a client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.lib.processes import (
    LineProcess,
    free_port,
    line_process,
    make_venv,
    serving_peer,
    shared_libraries,
)

VERSION = "Mooncake Store 0.3.13"
CLIENT = Path(__file__).parent / "mooncake_client.py"
SEGMENT_BYTES = 1 << 30
LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnl-3.so.200": "libnl-3-200",
    "libnl-route-3.so.200": "libnl-route-3-200",
    "libnuma.so.1": "libnuma1",
}


@dataclass(frozen=True, slots=True)
class Mooncake:
    """An installed Mooncake, a scratch *folder*, and the path of its shared libraries."""

    python: Path
    folder: Path
    libraries: str

    @classmethod
    def install(cls, venvs: Path, folder: Path) -> Mooncake:
        """Make its virtual environment if necessary. Raises PeerSkippedError."""
        python = make_venv(venvs, "mooncake")
        return cls(python, folder, shared_libraries(venvs, LIBRARIES))

    @contextmanager
    def client(self, object_bytes: int) -> Iterator[LineProcess]:
        """Run the store; yield a client whose answers are ``store_s`` and ``load_s``."""
        rpc, http, metrics = (free_port() for _ in range(3))
        env = ["env", f"LD_LIBRARY_PATH={self.libraries}"] if self.libraries else []
        command = [
            *env, str(self.python.with_name("mooncake_master")), f"--rpc_port={rpc}",
            "--rpc_address=127.0.0.1", "--enable_http_metadata_server=true",
            "--http_metadata_server_host=127.0.0.1", f"--http_metadata_server_port={http}",
            "--metrics_host=127.0.0.1", f"--metrics_port={metrics}",
        ]  # fmt: skip
        places = [f"http://127.0.0.1:{http}/metadata", f"127.0.0.1:{rpc}"]
        with ExitStack() as stack:
            log = self.folder / "mooncake-master.log"
            stack.enter_context(serving_peer(command, [rpc, http], log))
            for task, size in (("segment", SEGMENT_BYTES), ("client", object_bytes)):
                log = self.folder / f"mooncake-{task}.log"
                arguments = ("-P", str(CLIENT), task, str(free_port()), *places, str(size))
                command = [*env, str(self.python), *arguments]
                program = stack.enter_context(line_process(command, log))
            yield program
