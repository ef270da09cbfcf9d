"""A real redis-server for tests, in memory only, on a free port of the loopback."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from helpers.credentials import Authority
from redis import Redis
from redis.exceptions import ConnectionError, TimeoutError

_START_S = 30.0


def free_port() -> int:
    """Return a free port of the loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A server's CA, certificate and key, PEM files."""

    ca: Path
    cert: Path
    key: Path

    @classmethod
    def make(cls, folder: Path, *hosts: str) -> TlsFiles:
        """Make a CA in *folder*, and a certificate for the loopback and *hosts*."""
        authority = Authority(folder)
        return cls(authority.path, *authority.issue("redis", hosts=("127.0.0.1", *hosts)))

    @property
    def options(self) -> tuple[str, ...]:
        """The server's options; clients need no certificate."""
        return (
            *("--tls-ca-cert-file", str(self.ca), "--tls-cert-file", str(self.cert)),
            *("--tls-key-file", str(self.key), "--tls-auth-clients", "no"),
            *("--tls-replication", "yes"),
        )


class RedisProcess:
    """One server that can be stopped, frozen and started again on the same port."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        port: int | None = None,
        watching: Path | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        """Run with further *options*; as a Sentinel with *watching*, its configuration.

        With *tls* there is no plain port.
        """
        program = shutil.which("redis-server")
        if program is None:
            raise RuntimeError("redis-server is not on PATH: `make test` installs it")
        self.port = port or free_port()
        scheme, more = ("rediss", f"?ssl_ca_certs={tls.ca}") if tls else ("redis", "")
        self.url = f"{scheme}://127.0.0.1:{self.port}/0{more}"
        self.tls = tls
        self.client = Redis.from_url(self.url, socket_timeout=_START_S, protocol=2)
        mode = ("--save", "", "--appendonly", "no")
        self._command = [
            *(program, *((str(watching), "--sentinel") if watching else ())),
            *(("--port", "0", "--tls-port") if tls else ("--port",)),
            *(
                str(self.port),
                *(tls.options if tls else ()),
                "--bind",
                "127.0.0.1",
                "--dir",
                str(folder),
            ),
            *(() if watching else mode),
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + _START_S
        while True:
            try:
                self.client.ping()
            except (ConnectionError, TimeoutError) as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.stop()
                    raise RuntimeError(f"redis-server does not reply: {error}") from None
                time.sleep(0.02)
            else:
                return

    def stop(self) -> None:
        """Kill the server; its data is lost. Idempotent."""
        self.client.connection_pool.disconnect()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop the process: it accepts connections but does not reply."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def reset(self) -> None:
        """Reset a server to its initial state."""
        if self._process is None:
            self.start()
        self.client.config_set("maxmemory", 0)
        self.client.config_set("maxmemory-policy", "noeviction")
        self.client.config_set("requirepass", "")
        for user in self.client.acl_users():
            if user not in ("default", b"default"):
                self.command("ACL", "DELUSER", user)
        self.client.flushall()

    def command(self, *words: str | bytes) -> object:
        return self.client.execute_command(*words)  # type: ignore[no-untyped-call]

    def value(self, name: bytes) -> bytes:
        value = self.client.get(name)
        assert isinstance(value, bytes)
        return value

    def names(self) -> list[bytes]:
        return sorted(self.client.scan_iter(count=1000))
