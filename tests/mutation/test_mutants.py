"""The mutants fit the code of today, and the runner tells what tests notice."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mutation.__main__ import MUTANTS, ROOT, Mutant, MutantError, Result, load, table

MUTANT = Mutant("m", "a.py::A.f", "x < 1", "x < 2", "the bound", ("tests/a.py",))
SOURCE = "class A:\n    def f(self, x):\n        return x < 1\n\n\ndef f(x):\n    return x < 1\n"


def defined(path: Path) -> set[str]:
    kinds = ast.FunctionDef | ast.ClassDef
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}


def test_every_mutant_applies_to_the_code_as_it_is() -> None:
    for mutant in load():
        assert mutant.applied((ROOT / mutant.file).read_text())
        assert mutant.breaks.endswith(".")


def test_the_tests_of_every_mutant_exist() -> None:
    contracts = {name for path in (ROOT / "tests/contracts").glob("*.py") for name in defined(path)}
    names: dict[str, set[str]] = {}
    for mutant in load():
        assert mutant.tests, mutant.id
        for test in mutant.tests:
            file, *parts = test.partition("[")[0].split("::")
            assert (ROOT / file).is_file(), f"{mutant.id}: {file}"
            known = names.setdefault(file, defined(ROOT / file) | contracts)
            assert known.issuperset(parts), f"{mutant.id}: {test}"


def test_a_mutant_changes_its_function_alone() -> None:
    assert MUTANT.applied(SOURCE) == SOURCE.replace("x < 1", "x < 2", 1)


@pytest.mark.parametrize(
    ("function", "text", "says"),
    [
        ("a.py::A.f", "x < 3", "found 0 times"),
        ("a.py::A.f", "x", "found 2 times"),
        ("a.py::A.g", "x < 1", "'a.py::A.g' is not in its file"),
    ],
)
def test_a_mutant_whose_text_is_not_there_is_an_error(function: str, text: str, says: str) -> None:
    with pytest.raises(MutantError, match=says):
        Mutant("m", function, text, "y", "the bound", ()).applied(SOURCE)


def test_the_table_ends_with_how_many_were_killed() -> None:
    results = {"m": Result("killed", 2.0)}
    other = Mutant("n", *(getattr(MUTANT, name) for name in Mutant.__slots__[1:]))
    lines = table([MUTANT, other], results).splitlines()
    assert lines[0].split() == ["m", "killed", "2.0"]
    assert lines[1].split()[:3] == ["n", "not", "run"]
    assert lines[-1] == "killed 1 of 2"


def test_every_package_has_mutants() -> None:
    packages = {mutant.file.partition("/")[0] for mutant in load(MUTANTS)}
    assert packages == {"proto", "codecs", "tiers", "server", "client", "cli"}
