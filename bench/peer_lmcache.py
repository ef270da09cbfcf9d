"""LMCache 0.5.6: its own benchmarks, its multiprocess server, and a client of that.

``lmcache bench l2`` drives an L2 adapter inside one process. ``lmcache bench server --mode cpu``
drives the server from a second process, which shares its KV memory with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.peer_process import (
    Asked,
    PeerSkippedError,
    asking,
    free_port,
    make_venv,
    run,
    serving_peer,
)

VERSION = "LMCache 0.5.6"
CLIENT = Path(__file__).parent / "peer_lmcache_client.py"
REQUEST_SHAPE = "(2,1024,16,8,128):float16:8"
"""Eight layers: 512 tokens of it are 16.8 MB, a request of its own benchmark."""
Adapter = Mapping[str, str | int]
"""What its command line takes as JSON."""
QUIET = ("env", "LMCACHE_DISABLE_BANNER=1", "LMCACHE_LOG_LEVEL=WARNING")


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """The shortest of each step of a request, in seconds."""

    lookup_s: float
    store_s: float
    retrieve_s: float


def parse_l2(text: str) -> tuple[float, float]:
    """Return the shortest store and load of ``lmcache bench l2 --format json``, in seconds.

    Raises PeerSkippedError.
    """
    try:
        metrics = json.loads(text)["metrics"]
        found = {part["operation"]: part for part in metrics.values() if "operation" in part}
        for name in ("Store", "Load"):
            if found[name]["total_success"] != found[name]["total_keys"]:
                raise PeerSkippedError(f"its {name.lower()} lost keys")
        store_ms, load_ms = (found[name]["duration_min_ms"] for name in ("Store", "Load"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PeerSkippedError(f"its report is not understood: {error!r}") from None
    return store_ms / 1e3, load_ms / 1e3


def parse_server(text: str) -> RequestTimes:
    """Read what ``lmcache bench server --format json`` wrote. Raises PeerSkippedError."""
    try:
        metrics = json.loads(text)["metrics"]
        if metrics["results"]["checksum_fail"] or not metrics["results"]["checksum_ok"]:
            raise PeerSkippedError("its checksums do not match")
        parts = ("warm_lookup", "cold_store", "warm_retrieve")
        return RequestTimes(*(metrics[part][f"{part}_min"] / 1e3 for part in parts))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PeerSkippedError(f"its report is not understood: {error!r}") from None


@dataclass(frozen=True, slots=True)
class LMCache:
    """An installed LMCache and a scratch *folder* for its logs and files."""

    python: Path
    folder: Path

    @classmethod
    def install(cls, venvs: Path, folder: Path) -> LMCache:
        """Make its virtual environment unless it is there. Raises PeerSkippedError."""
        return cls(make_venv(venvs, "lmcache", ["torch==2.13.0"]), folder)

    def bench_l2(self, adapter: Adapter, count: int, object_bytes: int) -> tuple[float, float]:
        """Run ``lmcache bench l2``: *count* objects in one submit, a warm-up and three rounds.

        Returns the seconds of the shortest store and load. Raises PeerSkippedError.
        """
        report = self.folder / "l2.json"
        run(
            [
                *self._command("bench", "l2"), "--l2-adapter", json.dumps(dict(adapter)),
                "--num-keys", str(count), "--data-size-kb", str(object_bytes >> 10),
                "--rounds", "3", "--warmup-rounds", "1", "--format", "json",
                "--output", str(report),
            ],
            120,
        )  # fmt: skip
        return parse_l2(report.read_text())

    @contextmanager
    def server(self, cpu_gib: float, adapter: Adapter | None) -> Iterator[Server]:
        """Run its multiprocess server on *cpu_gib* of memory, with an L2 adapter or without."""
        port, http = free_port(), free_port()
        flags = [
            "--port", str(port), "--http-port", str(http), "--l1-size-gb", str(cpu_gib),
            "--no-l1-use-lazy", "--disable-observability", "--eviction-policy", "LRU",
        ]  # fmt: skip
        if adapter is not None:
            flags += ["--l2-adapter", json.dumps(dict(adapter))]
        with serving_peer(
            [*self._command("server"), *flags], [port, http], self.folder / "lmcache-server.log"
        ):
            yield Server(self, f"tcp://localhost:{port}", f"http://localhost:{http}")

    def _command(self, *words: str) -> list[str]:
        return [*QUIET, str(self.python.with_name("lmcache")), *words]


@dataclass(frozen=True, slots=True)
class Server:
    """A running multiprocess server."""

    peer: LMCache
    url: str
    http_url: str

    def bench(self, first: int, count: int) -> RequestTimes:
        """Run ``lmcache bench server``: *count* requests of 16.8 MB, numbered from *first*."""
        report = self.peer.folder / "server.json"
        run(
            [
                *self.peer._command("bench", "server"), "--rpc-url", self.url,
                "--url", self.http_url, "--mode", "cpu", "--transfer-mode", "lmcache_driven",
                "--kvcache-shape-spec", REQUEST_SHAPE, "--start", str(first),
                "--end", str(first + count), "--interval", "0.01", "--format", "json",
                "--output", str(report),
            ],
            120,
        )  # fmt: skip
        return parse_server(report.read_text())

    @contextmanager
    def client(self, instance: int) -> Iterator[Asked]:
        """Run a client that stores and reads chunks of 1 MiB."""
        command = [*QUIET, str(self.peer.python), str(CLIENT), self.url, str(instance)]
        with asking(command, self.peer.folder / f"lmcache-client-{instance}.log") as asked:
            yield asked
