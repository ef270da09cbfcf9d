"""The documentation, held to the code: examples run, and names, values and links are true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

import pytest
from conftest import ServerMaker
from docs.blocks import PAGES
from docs.flags import command_flags, script_flags
from golden.samples import vectors
from helpers.local_server import LocalServer
from pydantic.fields import FieldInfo

from kvstore.cli.app import REMOVED
from kvstore.proto.messages import unpack_info
from kvstore.server.settings.loading import REPLACED, as_written, flag_of
from kvstore.server.settings.settings import Settings, load_config
from kvstore.server.settings.values import Limits, parse_size
from kvstore.server.telemetry.metrics import COUNTERS
from kvstore.tiers.disk import DEFAULT_FILE_BYTES
from kvstore.tiers.disk_files import DirectoryId, DiskDirectory
from kvstore.tiers.disk_index import IndexRow, pack_owner, pack_row
from kvstore.tiers.redis_chunks import KeyNames, Manifest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("cli", "client", "codecs", "proto", "server", "tiers")
DEFAULT_ADDRESS = "127.0.0.1:7420"

OTHER_FLAGS = {
    "--build-arg", "--enable-hierarchical-cache", "--from-file", "--hicache-storage-backend",
    "--hicache-storage-backend-extra-config", "--install-completion", "--kv-events-config",
    "--kv-transfer-config", "--model-path", "--page-size", "--revision", "--set",
}  # fmt: skip
"""Flags in the documentation of programs that are not ours."""

OWN_DEFAULTS = {
    "limits": "[below](#limits-by-name)",
    "disk": "4GiB:~/.cache/kvstore/disk",
    "socket_path": "/tmp/kvstore-UID/{port}.sock",
    "events_keys": "~/.local/state/kvstore/events",
}
"""Defaults that depend on the machine or on other settings, as the page writes them."""


def text(page: str) -> str:
    return (ROOT / page).read_text()


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the tables under *heading*, headers and rules left out."""
    _, _, section = text(page).partition(f"\n{heading}\n")
    assert section, f"{page} has no {heading}"
    section = re.split(r"\n##+ ", section)[0]
    tables = re.findall(r"(?:^\|.*\n)+", section, re.M)
    return [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for table in tables
        for line in table.splitlines()[2:]
    ]


def in_backticks(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# --- examples


def python_blocks() -> list[tuple[str, bool, str]]:
    """Return each python block: its page, whether it is marked to run, and its code."""
    found = []
    for page in PAGES:
        blocks = re.finditer(r"(<!-- runs -->\n)?^```python\n(.*?)^```", text(page), re.M | re.S)
        found += [(page, block[1] is not None, block[2]) for block in blocks]
    return found


def test_every_python_example_is_one_that_runs() -> None:
    assert [page for page, is_marked, _ in python_blocks() if not is_marked] == []


def test_the_examples_show_each_way_to_connect() -> None:
    code = "".join(code for _, _, code in python_blocks())
    for name in ("Client(", "AsyncClient(", "TransformersConnector(", "import torch"):
        assert name in code


def test_the_examples_of_a_page_run_one_after_another(server: LocalServer, tmp_path: Path) -> None:
    """All pages in one process, which loads torch once; each in a namespace of its own."""
    pages = sorted({page for page, _, _ in python_blocks()})
    for number, page in enumerate(pages):
        code = "\n".join(code for name, _, code in python_blocks() if name == page)
        assert DEFAULT_ADDRESS in code
        path = tmp_path / f"page{number}.py"
        path.write_text(code.replace(DEFAULT_ADDRESS, server.address))
    run_all = "import runpy, sys; [runpy.run_path(path) for path in sys.argv[1:]]"
    paths = [str(tmp_path / f"page{number}.py") for number in range(len(pages))]
    done = subprocess.run(
        [sys.executable, "-c", run_all, *paths],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert server.counter("get_chunks") > 0


# --- flags and settings


def help_of_the_server(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        load_config(["--help-all"])
    return capsys.readouterr().out


def flags_in(page: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text(page)))


def test_every_flag_that_is_named_exists(capsys: pytest.CaptureFixture[str]) -> None:
    known = OTHER_FLAGS | command_flags() | script_flags()
    known |= set(re.findall(r"--[a-z-]*[a-z]", help_of_the_server(capsys)))
    gone = {flag_of(name) for name in REPLACED}
    gone |= {word for old in REMOVED for word in old.split() if word.startswith("--")}
    named = {
        flag: page
        for page in PAGES
        for flag in flags_in(page)
        if page != "CHANGELOG.md" or flag not in gone
    }
    assert {flag: page for flag, page in named.items() if flag not in known} == {}
    assert set(named) >= OTHER_FLAGS


def described(field: FieldInfo) -> str:
    """Return the description on one line."""
    return " ".join((field.description or "").split())


def default_of(name: str, field: FieldInfo) -> str:
    if name in OWN_DEFAULTS:
        return OWN_DEFAULTS[name]
    value = field.default
    if value is None:
        return "none"
    if isinstance(value, bool):
        return {False: "off", True: "on"}[value]
    written = as_written(value, field)
    return "none" if written is None else str(written)


def test_the_table_of_settings_is_that_of_the_server() -> None:
    expected = [
        [f"`{flag_of(name)}`", f"`{name}`", default_of(name, field), described(field)]
        for name, field in Settings.model_fields.items()
    ]
    assert rows("docs/operations.md", "## Settings") == expected


def test_the_table_of_limits_by_name_is_that_of_the_server() -> None:
    texts = Limits().texts()
    expected = [[f"`{n}`", texts[n], described(f)] for n, f in Limits.model_fields.items()]
    assert rows("docs/operations.md", "### Limits by name") == expected


# --- counters and gauges


def test_the_tables_of_metrics_are_those_of_the_metrics_page(make_server: ServerMaker) -> None:
    server = make_server("--http", "127.0.0.1:0")
    url = f"http://127.0.0.1:{server.node.http_port}/metrics"
    with urllib.request.urlopen(url, timeout=20) as reply:
        lines = reply.read().decode().splitlines()
    served = {re.split(r"[ {]", line)[0] for line in lines if not line.startswith("#")}
    cells = (row[0] for row in rows("docs/operations.md", "## Look at it"))
    named = {name.partition("{")[0] for cell in cells for name in in_backticks(cell)}
    assert named == served
    assert {f"kvstore_{name}_total" for name in COUNTERS} <= served


# --- limits


def stated(cell: str) -> float:
    cell = cell.replace(" ", "")
    return float(cell) if re.fullmatch(r"[0-9.]+", cell) else parse_size(cell)


def test_every_constant_among_the_limits_has_the_value_of_the_code() -> None:
    checked = 0
    for name_cell, value_cell, module_cell, _ in rows("docs/limits.md", "## Table"):
        (module,) = in_backticks(module_cell)
        code = import_module(f"kvstore.{module.removesuffix('.py').replace('/', '.')}")
        for name in in_backticks(name_cell):
            if re.fullmatch("[A-Z_]+", name):
                assert stated(value_cell) == getattr(code, name), name
                checked += 1
    assert checked > 20


def test_every_setting_among_the_limits_has_its_default() -> None:
    defaults = {flag_of(n): default_of(n, f) for n, f in Settings.model_fields.items()}
    defaults |= {f"--limits {name}": text for name, text in Limits().texts().items()}
    defaults["--disk"] = defaults["--disk"].partition(":")[0]
    checked = 0
    for name_cell, value_cell, *_ in rows("docs/limits.md", "## Table"):
        flags = [name for name in in_backticks(name_cell) if name.startswith("--")]
        if flags:
            values = [value.replace(" ", "") for value in value_cell.split(",")]
            assert values == [defaults[flag] for flag in flags]
            checked += len(flags)
    assert checked > 10


@pytest.mark.parametrize(("program", "heading"), [("local", "Keys"), ("scaling", "Scaling")])
def test_the_page_of_benchmarks_has_the_keys_that_are_printed(program: str, heading: str) -> None:
    printed = re.findall(r"report\.add\(\s*\"(\w+)\"", text(f"bench/{program}.py"))
    told = [in_backticks(row[0])[0] for row in rows("docs/benchmarks.md", f"## {heading}")]
    assert sorted(told) == sorted(printed)


# --- bytes


def test_the_vectors_of_the_places_of_frames_are_what_the_code_writes(tmp_path: Path) -> None:
    v = vectors()
    info = unpack_info(bytes.fromhex(v["raw_index_row"]))
    row = pack_row(IndexRow(info, 1, 8192, 7)).hex()
    assert row == v["disk_row_start"] + v["raw_index_row"] + v["disk_row_end"]
    key, owner = pack_owner(1, "default")
    assert (key.hex(), owner.hex()) == (v["owner_key"], v["owner_row"])
    identity = DirectoryId("00112233445566778899aabbccddeeff", 1, 2)
    assert identity.line().decode() == v["disk_set_line"] + "\n"
    write_id = bytes.fromhex("0011223344556677")
    manifest = Manifest.of(info, 1 << 21, write_id, 1_700_000_000_000_000)
    assert manifest.raw.hex() == v["manifest_start"] + v["raw_index_row"] + v["manifest_end"]
    names = KeyNames("kvs:1:")
    assert names.manifest(info.key).decode() == v["manifest_name"]
    assert names.parts(manifest)[0].decode() == v["part_name"]
    DiskDirectory(tmp_path, 1 << 20, DEFAULT_FILE_BYTES, 0, ExitStack()).close()
    assert (tmp_path / "FORMAT").read_text() == v["format_line"] + "\n"


# --- all pages


@pytest.mark.parametrize("page", PAGES)
def test_no_page_names_a_path_of_a_developers_machine(page: str) -> None:
    private = r"(?<![\w.])/(?:work|root|home|Users|tmp(?!/kvstore-UID/))\b[^\s`)]*"
    assert re.findall(private, text(page)) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_every_file_in_backticks_exists(page: str) -> None:
    folder = (ROOT / page).parent
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text(page))
    assert [link for link in links if not (folder / link).exists()] == []
    files = [name for name in in_backticks(text(page)) if re.fullmatch(r"[\w./-]+/[\w.-]+", name)]
    ours = [name for name in files if name.partition("/")[0] in (*ROOMS, "bench", "docs", "tests")]
    assert [name for name in ours if "<" not in name and not (ROOT / name).exists()] == []
