"""How far a request travels through the code: ``python -m bench.paths [--json]``.

Counts the server's files and functions that one Put and one Get of a chunk pass on their request
thread over gRPC, the product's hand-written lines and modules, modules of the server that import
each other in a circle, and the threads of an idle server.
"""

from __future__ import annotations

import ast
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

from bench.report import Report, parse_flags
from bench.workload import SMALL, make_chunks, serving
from kvstore.client import Client, ClientOptions

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("server", "tiers", "proto")
STUBS = "kvstore_pb2"
"""How the names of files begin that a compiler wrote."""
QUIET_S = 3.0
"""After its start a server compiles and reads on for a moment."""


class Tracer:
    """Records which functions of *folder* are called, by thread, while ``recording``."""

    def __init__(self, folder: Path) -> None:
        self._folder = f"{folder}/"
        self.recording = False
        self.called: dict[str, set[CodeType]] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Take note of a call, for ``threading.setprofile``."""
        if self.recording and event == "call":
            code = frame.f_code
            if str(Path(code.co_filename).resolve()).startswith(self._folder):
                self.called.setdefault(threading.current_thread().name, set()).add(code)

    @contextmanager
    def record(self) -> Iterator[None]:
        """Forget what was, and record what is called until this is left."""
        self.called = {}
        self.recording = True
        try:
            yield
        finally:
            self.recording = False

    def of(self, threads: str) -> tuple[int, int]:
        """Return how many files and functions the threads passed whose names begin so."""
        found = [codes for name, codes in self.called.items() if name.startswith(threads)]
        codes = set[CodeType]().union(*found)
        return len({code.co_filename for code in codes}), len(codes)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    only_json = parse_flags(argv, __doc__ or "")
    report = Report("paths")
    measure_requests(report)
    measure_product(report)
    measure_threads(report)
    report.print(only_json=only_json)
    return 0


def measure_requests(report: Report) -> None:
    """One chunk put and read over gRPC, traced in this process."""
    from kvstore.server.node import Node
    from kvstore.server.settings.settings import load_config

    tracer = Tracer(ROOT / "server")
    threading.setprofile(tracer)
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--tiers", "cpu,disk", "--cpu", "64MiB", "--disk", f"64MiB:{folder}/disk")
        places = ("--listen", "127.0.0.1:0", "--socket", "off", "--log-level", "error")
        node = Node(load_config([*flags, *places]))
        node.start()
        try:
            options = ClientOptions("grpc")
            with Client(f"127.0.0.1:{node.port}", SMALL, options) as client:
                for seed in range(3):  # what is done once is done before the last
                    keys, chunks = make_chunks(client, 1, seed)
                    with tracer.record():
                        client.put_chunks(chunks)
                    put = tracer.of("rpc-write")
                    with tracer.record():
                        assert len(client.get_chunks(keys)) == 1
                    get = tracer.of("rpc")
        finally:
            threading.setprofile(None)
            node.stop(5.0)
    report.add("put_files", put[0], "of the server, on the request's thread", "25")
    report.add("put_functions", put[1], "the same", "60")
    report.add("get_files", get[0], "of a get out of memory", "19")
    report.add("get_functions", get[1], "the same", "42")


def measure_product(report: Report) -> None:
    """Lines and modules of server, tiers and proto, and circles among the server's."""
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    files = [path for path in files if not path.name.startswith(STUBS)]
    lines = sum(len(path.read_text().splitlines()) for path in files)
    modules = [path for path in files if path.name != "__init__.py"]
    report.add("product_lines", lines, "hand-written, of server, tiers and proto", "33,000")
    report.add("modules", len(modules), "of them", "150")
    report.add(
        "upward_imports", len(upward_imports()), "between the server's folders, by their order", "0"
    )
    circles = circles_of(imports_of(ROOT / "server", "kvstore.server"))
    report.add(
        "circles", len(circles), "groups of the server's modules that import each other", "0"
    )
    for circle in circles:
        report.note("circle", str(len(circle)), ", ".join(sorted(circle)))


def upward_imports() -> list[tuple[str, str]]:
    """Return the server's modules that import one of a folder above their own, and what."""
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
    """Return which modules of *package*, in *folder*, each of them imports as it is loaded."""
    names = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        names[".".join((package, *parts)).removesuffix(".__init__")] = path
    return {
        name: {one for one in _imported(ast.parse(path.read_text()).body, names) if one != name}
        for name, path in names.items()
    }


def _imported(body: Sequence[ast.stmt], names: Mapping[str, Path]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (one for one in inner if one in names)
            if node.module in names:
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)


def circles_of(imports: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules of which each imports all others, by way of others or not."""
    reached = {name: _reach(name, imports) for name in imports}
    circles: list[set[str]] = []
    for name in imports:
        circle = {other for other in reached[name] if name in reached[other]}
        if circle and circle not in circles:
            circles.append(circle)
    return circles


def _reach(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        new = imports[left.pop()] - found
        found |= new
        left += new
    return found


def measure_threads(report: Report) -> None:
    """Threads of a server process that nobody talks to."""
    with tempfile.TemporaryDirectory() as folder:
        disk = Path(folder) / "disk"
        flags = ("--tiers", "cpu,disk", "--cpu", "64MiB", "--disk", f"64MiB:{disk}")
        with serving(*flags, disk=disk) as (_, pid):
            time.sleep(QUIET_S)
            count = len(list(Path(f"/proc/{pid}/task").iterdir()))
    report.add("idle_threads", count, "of a server with memory and disk", "20")


if __name__ == "__main__":
    sys.exit(main())
