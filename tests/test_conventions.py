"""The house's rules, checked on the sources themselves."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import setuptools  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
ROOMS = ("cli", "client", "codecs", "proto", "server", "tiers")
FOLDERS = (*ROOMS, "bench", "data", "tests")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
STUBS = ("kvstore_pb2.py", "kvstore_pb2.pyi", "kvstore_pb2_grpc.py")

SERIALIZERS = {"pickle", "_pickle", "marshal", "dill", "cloudpickle", "shelve", "jsonpickle"}
RUNS_CODE = {
    "eval", "exec", "__import__", "torch.load", "yaml.load", "yaml.load_all", "yaml.full_load",
    "yaml.full_load_all", "yaml.unsafe_load", "yaml.unsafe_load_all",
}  # fmt: skip
READS_ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb"}
SUPPRESS = {"suppress", "contextlib.suppress"}
BROAD = {"Exception", "BaseException"}

Nodes = list[ast.AST]

MAY_READ_ENVIRONMENT = {"server/settings/loading.py:"}
MAY_CATCH_ALL = {
    "server/api/interceptors.py:",
    "server/tiering/work_queue.py:",
    "client/engines/base.py:",
}


def sources() -> list[str]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found.append(ROOT / "src" / "kvstore" / "__init__.py")
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def nodes_of(text: str) -> Nodes:
    return list(ast.walk(ast.parse(text)))


def run(*argv: str | Path, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in argv],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=240,
    )


# --- rules over the nodes of one syntax tree: each yields the lines that break it


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def spelled(node: ast.expr) -> str:
    """A name and its attributes; of anything else the attributes alone."""
    if isinstance(node, ast.Attribute):
        return f"{spelled(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def code_running(nodes: Nodes) -> Iterator[int]:
    for node in nodes:
        for name in imported(node):
            if name.partition(".")[0] in SERIALIZERS or name in RUNS_CODE:
                yield node.lineno  # type: ignore[attr-defined]
        if isinstance(node, ast.Attribute | ast.Name) and spelled(node) in RUNS_CODE:
            yield node.lineno
        if isinstance(node, ast.Call) and spelled(node.func).endswith("import_module"):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            if any(str(name).partition(".")[0] in SERIALIZERS for name in names):
                yield node.lineno
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and _is_true(node.value):
            yield node.value.lineno


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def environment_reads(nodes: Nodes) -> Iterator[int]:
    for node in nodes:
        if isinstance(node, ast.Attribute) and spelled(node) in READS_ENVIRONMENT:
            yield node.lineno
        if READS_ENVIRONMENT & set(imported(node)):
            yield node.lineno  # type: ignore[attr-defined]


def broad_handlers(nodes: Nodes) -> Iterator[int]:
    """Handlers and suppress() calls that keep every error; to clean up and raise again is fine."""
    for node in nodes:
        if isinstance(node, ast.ExceptHandler):
            last = node.body[-1]
            raised_again = isinstance(last, ast.Raise) and last.exc is None
            if _is_broad(node.type) and not raised_again:
                yield node.lineno
        if isinstance(node, ast.Call) and spelled(node.func) in SUPPRESS:
            yield from (arg.lineno for arg in node.args if _is_broad(arg))


def _is_broad(kind: ast.expr | None) -> bool:
    if isinstance(kind, ast.Tuple):
        return any(map(_is_broad, kind.elts))
    return kind is None or spelled(kind) in BROAD


def slow_drops(nodes: Nodes) -> Iterator[int]:
    """Of a dictionary, the oldest entry deleted by name.

    CPython looks for it past all that were deleted before: O(n) each in a table that stays full.
    An OrderedDict's ``popitem(last=False)`` takes one step.
    """
    for node in nodes:
        if isinstance(node, ast.Delete):
            for target in node.targets:
                if isinstance(target, ast.Subscript):
                    table = ast.unparse(target.value)
                    if ast.unparse(target.slice) == f"next(iter({table}))":
                        yield node.lineno


Rule = Callable[[Nodes], Iterator[int]]
RULES: tuple[Rule, ...] = (
    code_running, environment_reads, broad_handlers, slow_drops,
)  # fmt: skip


@cache
def breaches() -> dict[Rule, list[str]]:
    """What breaks each rule, as FILE:LINE; each source is parsed once."""
    found: dict[Rule, list[str]] = {rule: [] for rule in RULES}
    for name in sources():
        nodes = nodes_of((ROOT / name).read_text())
        for rule in RULES:
            found[rule] += [f"{name}:{line}" for line in rule(nodes)]
    return found


def broken(rule: Rule, *allowed: str) -> list[str]:
    """Where *rule* is broken outside *allowed* files and folders."""
    return [place for place in breaches()[rule] if not place.startswith(allowed)]


def test_nothing_in_the_project_can_run_code_from_data() -> None:
    assert broken(code_running) == []


def test_only_the_configuration_reads_the_environment() -> None:
    assert broken(environment_reads, "tests/", *MAY_READ_ENVIRONMENT) == []


def test_no_table_drops_its_oldest_entry_by_looking_for_it() -> None:
    assert broken(slow_drops, "tests/") == []


def test_every_error_is_kept_in_three_places_only() -> None:
    assert broken(broad_handlers, *MAY_CATCH_ALL) == []


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (code_running, "import pickle"),
        (code_running, "from marshal import loads"),
        (code_running, "import yaml\nyaml.load(text, Loader)"),
        (code_running, "from yaml import unsafe_load"),
        (code_running, "def f(x):\n    return eval(x)"),
        (code_running, "run = exec"),
        (code_running, "__import__('os')"),
        (code_running, "importlib.import_module('dill')"),
        (code_running, "torch.load(path)"),
        (code_running, "np.load(path, allow_pickle=True)"),
        (environment_reads, "import os\nx = os.environ['A']"),
        (environment_reads, "import os\nx = os.getenv('A')"),
        (environment_reads, "from os import environ as e"),
        (broad_handlers, "try:\n    f()\nexcept:\n    pass"),
        (broad_handlers, "try:\n    f()\nexcept Exception:\n    raise ValueError"),
        (broad_handlers, "try:\n    f()\nexcept (OSError, BaseException) as e:\n    print(e)"),
        (broad_handlers, "with contextlib.suppress(Exception):\n    f()"),
        (slow_drops, "del self.x[next(iter(self.x))]"),
    ],
)
def test_the_rules_find_what_they_are_for(rule: Rule, text: str) -> None:
    assert list(rule(nodes_of(text)))


def test_the_rules_leave_the_rest_alone() -> None:
    for rule, text in [
        (code_running, "yaml.safe_load(text)\nmodel.eval()\nnp.load(p, allow_pickle=False)"),
        (environment_reads, "os.path.join('a')"),
        (broad_handlers, "try:\n    f()\nexcept BaseException:\n    undo()\n    raise"),
        (broad_handlers, "try:\n    f()\nexcept OSError:\n    pass"),
        (slow_drops, "del x[next(iter(y))]\nx.popitem(last=False)"),
    ]:
        assert list(rule(nodes_of(text))) == []


# --- layers


def test_every_room_imports_only_what_its_floor_allows() -> None:
    done = run(BIN / "lint-imports", "--no-cache", PYTHONPATH=str(ROOT / "src"))
    assert done.returncode == 0, done.stdout + done.stderr


def loaded_by(module: str, *watched: str) -> str:
    """Which of *watched* a fresh interpreter has loaded after importing *module*."""
    probe = f"import sys, {module}\nprint(*sorted(set({watched!r}) & set(sys.modules)))"
    done = run(sys.executable, "-c", probe, PYTHONPATH=str(ROOT / "src"))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_starting_the_server_loads_no_tensor_library() -> None:
    assert loaded_by("kvstore.server.main", "torch", "cupy", "transformers") == ""


def test_the_client_loads_neither_torch_nor_the_servers_rooms() -> None:
    assert loaded_by("kvstore.client", "torch", "kvstore.server", "kvstore.tiers") == ""


# --- packaging


def packages() -> set[str]:
    found = {"kvstore"}
    for room in ROOMS:
        folders = {path.parent for path in (ROOT / room).rglob("*.py")} | {ROOT / room}
        found |= {"kvstore." + ".".join(path.relative_to(ROOT).parts) for path in folders}
    return found


def copy_of_the_tree(target: Path) -> Path:
    """Copy what a checkout has, links as links, without what checks and builds left behind."""
    left_behind = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache", "_loops.so")
    for name in ("src", *ROOMS):
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=left_behind)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target / name)
    return target


def build(tree: Path, kind: str) -> subprocess.CompletedProcess[str]:
    """Build *tree* as pip does, without what is installed here: a kvstore, maybe, by a link."""
    packages = Path(setuptools.__file__).parents[1]
    code = f"import sys\nsys.path.append({str(packages)!r})\nfrom setuptools import build_meta\n"
    return run(
        sys.executable,
        "-S",
        "-c",
        f"{code}build_meta.build_{kind}('dist')",
        cwd=tree,
        PYTHONPATH="",
    )


def wheel_files() -> set[str]:
    """What a wheel holds beside the compiled loops: tests/cli/test_demo.py runs on it alone."""
    return {"kvstore/py.typed", "kvstore/__init__.py"} | {
        f"kvstore/{path.relative_to(ROOT).as_posix()}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so")
    }


def test_every_room_is_linked_and_setuptools_finds_every_package() -> None:
    where = PROJECT["tool"]["setuptools"]["packages"]["find"]["where"]
    assert set(setuptools.find_packages(ROOT / where[0])) == packages()
    for room in ROOMS:
        link = ROOT / "src" / "kvstore" / room
        assert link.is_symlink()
        assert link.readlink() == Path("..", "..", room)
    missing = [name for name in packages() if not (_folder(name) / "__init__.py").is_file()]
    assert missing == []


def _folder(package: str) -> Path:
    return ROOT / "src" / Path(*package.split("."))


def test_the_wheel_holds_every_module_and_nothing_else_of_the_tree(tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path)
    done = build(tree, "wheel")
    assert done.returncode == 0, done.stderr
    path = next(tree.glob("dist/*.whl"))
    assert re.search("-py3-none-(?!any)", path.name)  # the loops use nothing of Python's
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
    assert wheel_files() - names == set()
    assert "kvstore/proto/native/_loops.so" in names
    tops = {name.partition("/")[0].partition("-")[0] for name in names}
    assert tops == {"kvstore", "kvstore_server"}


def test_nobody_is_told_to_install_another_project_of_the_name_of_the_package() -> None:
    assert PROJECT["project"]["name"] == "kvstore-server"
    assert set(PROJECT["project"]["scripts"]) == {"kvstore", "kvstore-server"}
    extras = "|".join(PROJECT["project"]["optional-dependencies"])
    wrong = re.compile(rf"\bkvstore\[({extras})|pip install (-U )?'?kvstore\b(?!-)")
    texts = [*sources(), "README.md", "SECURITY.md", "Dockerfile", "Makefile"]
    texts += [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")]
    assert [name for name in texts if wrong.search((ROOT / name).read_text())] == []


def test_the_sdist_holds_every_module(tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path)
    done = build(tree, "sdist")
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tree.glob("dist/*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {f"src/{name}" for name in wheel_files()} - names == set()


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_checkout_that_lost_its_links_fails_to_build(kind: str, tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path)
    for room in ROOMS:
        link = tree / "src" / "kvstore" / room
        target = str(link.readlink())
        link.unlink()
        link.write_text(target)  # what git writes where links are switched off
    done = build(tree, kind)
    assert done.returncode != 0
    assert "No module named 'kvstore" in done.stderr


def test_the_committed_stubs_are_those_of_the_service_definition(tmp_path: Path) -> None:
    done = run(
        sys.executable,
        *("-m", "grpc_tools.protoc", "-Ikvstore/proto=../proto", f"--python_out={tmp_path}"),
        *(f"--pyi_out={tmp_path}", f"--grpc_python_out={tmp_path}", "kvstore/proto/kvstore.proto"),
        cwd=ROOT / "src",
    )
    assert done.returncode == 0, done.stderr
    for name in STUBS:
        generated = (tmp_path / "kvstore" / "proto" / name).read_bytes()
        assert generated == (ROOT / "proto" / name).read_bytes(), f"{name}: run make proto"


def test_the_constraints_pin_each_package_exactly_and_every_requirement() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r"[\w.-]+==[0-9][0-9a-z.]*", line)] == []
    pinned = {_canonical(line.partition("==")[0]) for line in pins}
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    chosen = [one for name in ("dev", "transformers", "gpu", "gpu-cuda12") for one in extras[name]]
    wanted = [*project["dependencies"], *chosen]
    names = {_canonical(re.split(r"[\[<>=~! ;]", line)[0]) for line in wanted}
    assert names - pinned == set()


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# --- what a newcomer sees


def test_the_readme_shows_the_two_commands_and_make_has_them() -> None:
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in readme
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_make_alone_lists_every_target_that_says_what_it_does() -> None:
    done = run("make", "--no-print-directory")
    assert done.returncode == 0, done.stderr
    listed = {line.split()[0] for line in done.stdout.splitlines()}
    assert listed >= {".venv", "demo", "test", "check", "bench", "proto", "format", "lint",
                      "types", "layers", "clean", "help"}  # fmt: skip
