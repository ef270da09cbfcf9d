"""bench.paths: its counts and the server's import cycles.

Also the output of every benchmark without anything to measure.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from bench.engines import __main__ as engines
from bench.engines.hangs import HANG_KEYS
from bench.lib import ROOT
from bench.paths import circles_of, imports_of


def test_the_servers_modules_import_each_other_in_no_circle() -> None:
    assert circles_of(imports_of(ROOT / "server", "kvstore.server")) == set()


def test_modules_that_import_each_other_by_way_of_others_are_a_circle() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": {"e2"}, "e2": {"e"}}
    assert circles_of(imports) == {frozenset("abc"), frozenset({"e", "e2"})}


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


COMMANDS = (
    "blend", "cluster", "codecs", "engines", "gpu", "layers", "local", "lossy_hits",
    "paths", "peers", "policy", "scaling", "slo", "trust",
)  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_describes_itself_and_has_json(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module = import_module(f"bench.{name}")
    if not hasattr(module, "main"):
        module = import_module(f"bench.{name}.__main__")
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: it would measure")
@pytest.mark.parametrize("part", ["copies", "engines"])
def test_without_a_cuda_device_nothing_is_measured_and_nothing_fails(part: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", part, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    *text, last = done.stdout.splitlines()
    assert text == ["skipped: no CUDA device"]
    assert json.loads(last) == {"bench": "gpu", "values": {}}


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ([], engines.KEYS),
        (["--only", "stores"], ["store_overhead"]),
        (["--only", "hang"], HANG_KEYS),
    ],
)
def test_without_the_environment_of_engines_every_key_names_the_make_target(
    words: list[str],
    keys: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(engines, "PYTHON", tmp_path / "python")
    assert engines.main(["--json", *words]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["skipped"] == dict.fromkeys(keys, "no vLLM: run make vllm-env")
