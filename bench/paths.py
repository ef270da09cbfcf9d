"""Size of the code on a request's path: ``python -m bench.paths [--json]``.

Counts the files and functions that one Put and one Get of a chunk run: in the server over gRPC on
the request's thread, in the client over shared memory on the caller's thread. Also hand-written
lines and modules, import cycles among the server's modules, threads of an idle server, and the
time of ``import kvstore`` and ``kvstore --help``.
"""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FrameType

from bench.lib import ROOT
from bench.lib.report import Part, Report, run_parts, timed
from bench.lib.workload import SMALL, connect, make_chunks, serving
from kvstore.client import Client

SERVER_PACKAGES = ("server", "tiers", "proto")
CLIENT_PACKAGES = ("client", "cli")
STUBS = "kvstore_pb2"
"""Prefix of the names of generated files."""
Threads = str | tuple[str, ...]
"""Prefixes of thread names."""
TIERS = ("--tiers", "cpu,disk", "--cpu", "64MiB", "--disk")
QUIET_S = 3.0
"""A server works on for a moment after its start."""


class Tracer:
    """Records which functions of *folders* are called, by thread, while ``recording``."""

    def __init__(self, *folders: str) -> None:
        self._folders = tuple(f"{ROOT / folder}/" for folder in folders)
        self.recording = False
        self.called: dict[str, set[CodeType]] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if self.recording and event == "call":
            code = frame.f_code
            if str(Path(code.co_filename).resolve()).startswith(self._folders):
                self.called.setdefault(threading.current_thread().name, set()).add(code)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Trace this thread, and threads that start within the block."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def record(self) -> Iterator[None]:
        self.called = {}
        self.recording = True
        try:
            yield
        finally:
            self.recording = False

    def of(self, threads: Threads) -> tuple[int, int]:
        """Return the number of files and functions that *threads* called."""
        found = [codes for name, codes in self.called.items() if name.startswith(threads)]
        codes = set[CodeType]().union(*found)
        return len({code.co_filename for code in codes}), len(codes)


def measure_requests(report: Report, folder: Path) -> None:
    """Count what a server in this process runs for one chunk, over gRPC."""
    from kvstore.server.node import Node
    from kvstore.server.settings.settings import load_config

    tracer = Tracer("server")
    places = ("--listen", "127.0.0.1:0", "--socket", "off", "--log-level", "error")
    with tracer.installed():
        node = Node(load_config([*TIERS, f"64MiB:{folder}", *places]))
        node.start()
        try:
            with connect(f"127.0.0.1:{node.port}", SMALL, transport="grpc") as client:
                put, get = put_and_get(client, tracer, 1, ("rpc-write", "rpc"))
        finally:
            node.stop(5.0)
    report.add("put_files", put[0], "of the server, on the request's thread", "25")
    report.add("put_functions", put[1], "the same", "60")
    report.add("get_files", get[0], "of a get out of memory", "19")
    report.add("get_functions", get[1], "the same", "42")


def put_and_get(
    client: Client, tracer: Tracer, count: int, threads: tuple[Threads, Threads]
) -> list[tuple[int, int]]:
    """Return the files and functions of one put and one get, each on its *threads*."""
    for seed in range(3):  # the last has no one-time work
        keys, chunks = make_chunks(client, count, seed)
        with tracer.record():
            client.put_chunks(chunks)
        found = [tracer.of(threads[0])]
        client.get_chunks(keys)  # maps the slab
        with tracer.record():
            assert len(client.get_chunks(keys)) == count
        found.append(tracer.of(threads[1]))
    return found


def measure_product(report: Report, _folder: Path) -> None:
    """Count the product's lines and modules, and the server's upward imports and cycles."""
    for prefix, packages, bars in (
        ("product_", SERVER_PACKAGES, ("33,000", "150")),
        ("client_", CLIENT_PACKAGES, ("18,000", "70")),
    ):
        files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
        files = [path for path in files if not path.name.startswith(STUBS)]
        lines = sum(len(path.read_text().splitlines()) for path in files)
        modules = sum(path.name != "__init__.py" for path in files)
        report.add(f"{prefix}lines", lines, f"hand-written, in {', '.join(packages)}", bars[0])
        name = f"{prefix}modules".removeprefix("product_")
        report.add(name, modules, "of them", bars[1])
    upwards, circles = upward_imports(), circles_of(imports_of(ROOT / "server", "kvstore.server"))
    report.add("upward_imports", len(upwards), "between the server's folders, by their order", "0")
    what = "groups of the server's modules that import each other"
    report.add("circles", len(circles), what, "0")


def upward_imports() -> list[tuple[str, str]]:
    """Return (file, imported module) of each import from a layer above the file's own."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(each["layers"] for each in contracts["contracts"] if "containers" in each)
    order = {name.strip(): at for at, layer in enumerate(layers) for name in layer.split("|")}
    found = []
    for path in (ROOT / "server").rglob("*.py"):
        own = path.relative_to(ROOT / "server").with_suffix("").parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            named = node.module if isinstance(node, ast.ImportFrom) else None
            folder = (named or "").removeprefix("kvstore.server.").partition(".")[0]
            if own in order and order.get(folder, len(order)) < order[own]:
                found.append((str(path.relative_to(ROOT)), str(named)))
    return found


def imports_of(folder: Path, package: str) -> dict[str, set[str]]:
    """Return for each module of *package*, in *folder*, those it imports when it loads."""
    names = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        names[".".join((package, *parts)).removesuffix(".__init__")] = path
    return {
        name: set(_imported(ast.parse(path.read_text()).body)) & names.keys() - {name}
        for name, path in names.items()
    }


def _imported(body: Sequence[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def circles_of(imports: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """Return the groups of modules that import each other, directly or not."""
    reached, before = dict(imports), dict[str, set[str]]()
    while reached != before:
        before = reached
        reached = {
            name: got.union(*(before[other] for other in got)) for name, got in before.items()
        }
    circles = (frozenset(o for o in got if name in reached[o]) for name, got in reached.items())
    return {circle for circle in circles if circle}


def measure_process(report: Report, folder: Path) -> None:
    """Count the threads of an idle server process; then what a client runs for three chunks over
    shared memory, on the calling thread and its decode threads: each may take any chunk.
    """
    with serving(*TIERS, f"64MiB:{folder}") as (address, pid):
        time.sleep(QUIET_S)
        count = len(list(Path(f"/proc/{pid}/task").iterdir()))
        report.add("idle_threads", count, "of a server with memory and disk", "20")
        tracer = Tracer("client", "codecs", "proto")
        threads = (threading.current_thread().name, "kvstore-copy")
        with tracer.installed(), connect(address, SMALL, transport="shm") as client:
            put, get = put_and_get(client, tracer, 3, (threads, threads))
    for name, (files, functions), most in (("get", get, "45"), ("put", put, "60")):
        report.add(f"client_{name}_files", files, "over shared memory, with its decoding", "14")
        report.add(f"client_{name}_functions", functions, "the same", most)


def measure_starts(report: Report, _folder: Path) -> None:
    """Time whole processes, in ms: ``import kvstore``, the client, and ``--help``."""
    client = "import kvstore.client, sys; assert 'torch' not in sys.modules"
    for name, words, bar in (
        ("import_ms", ("-c", "import kvstore"), "150"),
        ("import_client_ms", ("-c", client), ""),
        ("help_ms", ("-m", "kvstore.cli", "--help"), "200"),
    ):
        start = partial(
            subprocess.run, [sys.executable, *words], check=True, stdout=subprocess.DEVNULL
        )
        taken_s = statistics.median(timed(start) for _ in range(7))
        report.add(name, 1000 * taken_s, "of a new process", bar)


PARTS: dict[str, Part] = {
    "requests": measure_requests,
    "process": measure_process,
    "product": measure_product,
    "starts": measure_starts,
}


def main(argv: Sequence[str] | None = None) -> None:
    run_parts("paths", PARTS, argv, __doc__)


if __name__ == "__main__":
    main()
