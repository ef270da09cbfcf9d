"""bench.paths: what it counts, and that the server's modules import each other in no circle."""

from __future__ import annotations

import json
import subprocess
import sys

from bench.lib import ROOT
from bench.paths import circles_of, imports_of


def test_the_servers_modules_import_each_other_in_no_circle() -> None:
    assert circles_of(imports_of(ROOT / "server", "kvstore.server")) == []


def test_modules_that_import_each_other_by_way_of_others_are_a_circle() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": {"e2"}, "e2": {"e"}}
    assert circles_of(imports) == [{"a", "b", "c"}, {"e", "e2"}]


def test_a_run_prints_every_key() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.paths", "--json"],
        cwd=ROOT, env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)["values"]
    assert set(values) == {
        "put_files", "put_functions", "get_files", "get_functions", "product_lines", "modules",
        "upward_imports", "circles", "idle_threads", "client_lines", "client_modules",
        "client_get_files", "client_get_functions", "client_put_files", "client_put_functions",
        "import_ms", "import_client_ms", "help_ms",
    }  # fmt: skip
    assert 10 < values["get_files"] < values["put_files"] < values["put_functions"]
    assert 5 < values["client_get_files"] < values["client_get_functions"]
    assert values["upward_imports"] == 0
    assert values["idle_threads"] <= 20
