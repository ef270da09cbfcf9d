"""Mutation testing: break the product on purpose, one place at a time, and run the tests that
should notice.

``python -m tests.mutation`` applies the mutants of mutants.toml in copies of this checkout, never
in the checkout itself. Results stay in build/mutation, with the output of each run.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = Path(__file__).with_name("mutants.toml")
KEPT = ROOT / "build" / "mutation"

WORKERS = 2
ALL_S = 75 * 60.0
"""After so long no further mutant is begun, and runs that are under way are cut off."""
EACH_S = 150.0
"""What the tests of one mutant may take; they take at most 60 s without it."""

KILLED, SURVIVED, TIMED_OUT, NOT_RUN = "killed", "survived", "timed out", "not run"
FAILS_ANYWAY = "fails without it"
BROKEN = "cannot be run"

_NO_TESTS = {2, 3, 4, 5}
"""Exit statuses of pytest that say nothing about the mutant: interrupted, usage, no tests."""
_LEFT_OUT = (".git", ".venv", "build", "dist", ".hypothesis", "*.egg-info", ".*_cache")


class MutantError(Exception):
    """A mutant that does not fit the code of today."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One way to break the product.

    ``function`` is FILE::QUALIFIED.NAME; ``text`` stands in it once and becomes ``replacement``;
    ``breaks`` says what is then wrong; ``tests`` are pytest's node ids.
    """

    id: str
    function: str
    text: str
    replacement: str
    breaks: str
    tests: tuple[str, ...]

    @property
    def file(self) -> str:
        """The file that it changes, from the root of the checkout."""
        return self.function.partition("::")[0]

    def applied(self, source: str) -> str:
        """Return *source*, the file's text, with the mutant in it. Raises MutantError."""
        start, stop = _extent(source, self.function)
        body = source[start:stop]
        found = body.count(self.text)
        if found != 1 or self.text == self.replacement:
            raise MutantError(
                f"{self.id}: text is found {found} times in {self.function}, give one that is "
                f"there once: {self.text!r}"
            )
        changed = source[:start] + body.replace(self.text, self.replacement) + source[stop:]
        try:
            ast.parse(changed)
        except SyntaxError as error:
            raise MutantError(f"{self.id}: replacement is no Python: {error}") from None
        return changed

    def digest(self) -> str:
        """Name the mutant, the file and the tests as they are now."""
        paths = [self.file, *sorted({test.partition("::")[0] for test in self.tests})]
        parts = [repr(self).encode(), *((ROOT / path).read_bytes() for path in paths)]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a mutant. ``digest`` is that of what was run."""

    outcome: str
    seconds: float
    digest: str = ""


def _extent(source: str, function: str) -> tuple[int, int]:
    """Return where the function's text begins and ends in *source*."""
    node: ast.AST = ast.parse(source)
    for name in function.partition("::")[2].split("."):
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        inner = [one for one in ast.walk(node) if isinstance(one, kinds) and one.name == name]
        if not inner:
            raise MutantError(f"function {function!r} is not in its file")
        node = inner[0]
    lines = source.splitlines(keepends=True)
    first, last = node.lineno - 1, node.end_lineno  # type: ignore[attr-defined]
    return len("".join(lines[:first])), len("".join(lines[:last]))


def load(path: Path = MUTANTS) -> list[Mutant]:
    """Return the mutants of a file. Raises MutantError."""
    rows = tomllib.loads(path.read_text())["mutant"]
    mutants = [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]
    if len({one.id for one in mutants}) < len(mutants):
        raise MutantError("two mutants have one id")
    return mutants


class Copy:
    """A copy of the checkout for one worker, in *folder*."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ended = False
        shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))

    def try_out(self, mutant: Mutant, until: float) -> str:
        """Return the outcome of a mutant; its last test run ends at *until* (monotonic, s)."""
        file = self._folder / mutant.file
        source = file.read_text()
        self._write(file, mutant.applied(source))
        try:
            outcome = self._run(mutant, "with", until)
        finally:
            self._write(file, source)
        if outcome is not KILLED:
            return outcome
        # Tests that fail without the mutant as well have not noticed it.
        unchanged = self._run(mutant, "without", until)
        return KILLED if unchanged is SURVIVED else FAILS_ANYWAY

    def end(self) -> None:
        """End the run that is under way, and begin no other."""
        self._is_ended = True
        if self._process is not None:
            _end_group(self._process)

    def _write(self, file: Path, text: str) -> None:
        """Write *file* and forget its compiled form, which may look as new as the text."""
        file.write_text(text)
        Path(cache_from_source(str(file))).unlink(missing_ok=True)

    def _run(self, mutant: Mutant, how: str, until: float) -> str:
        limit_s = min(EACH_S, until - time.monotonic())
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
        path = os.pathsep.join((str(self._folder / "src"), str(self._folder / "tests")))
        with (KEPT / f"{mutant.id}-{how}.txt").open("wb") as output:
            self._process = process = subprocess.Popen(
                [*command, *mutant.tests],
                cwd=self._folder,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # so that its servers end with it
            )
            try:
                status = process.wait(max(0.0, limit_s))
            except subprocess.TimeoutExpired:
                return TIMED_OUT if limit_s == EACH_S else NOT_RUN
            finally:
                _end_group(process)
        if self._is_ended:
            return NOT_RUN
        if status in _NO_TESTS:
            return BROKEN
        return KILLED if status else SURVIVED


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_all(
    mutants: Iterable[Mutant], results: dict[str, Result], workers: int
) -> Iterator[tuple[str, Result]]:
    """Yield each mutant's id and result as it comes, and keep it in *results* and in a file."""
    until = time.monotonic() + ALL_S
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvstore-mutation-") as folder:
        every = [Copy(Path(folder, str(number))) for number in range(workers)]
        copies: SimpleQueue[Copy] = SimpleQueue()
        for one in every:
            copies.put(one)

        def work(mutant: Mutant) -> tuple[str, Result]:
            copy, started = copies.get(), time.monotonic()
            try:
                outcome = copy.try_out(mutant, until) if started < until else NOT_RUN
            finally:
                copies.put(copy)
            digest = "" if outcome is NOT_RUN else mutant.digest()
            return mutant.id, Result(outcome, time.monotonic() - started, digest)

        with ThreadPoolExecutor(workers) as pool:
            waiting = [pool.submit(work, mutant) for mutant in mutants]
            try:
                for done in as_completed(waiting):
                    name, result = done.result()
                    results[name] = result
                    _keep(results)
                    yield name, result
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for copy in every:
                    copy.end()


def _keep(results: Mapping[str, Result]) -> None:
    text = json.dumps({name: asdict(result) for name, result in results.items()}, indent=1)
    draft = KEPT / "results.json.new"
    draft.write_text(text)
    draft.replace(KEPT / "results.json")


def _kept() -> dict[str, Result]:
    try:
        rows = json.loads((KEPT / "results.json").read_text())
    except FileNotFoundError:
        return {}
    return {name: Result(**row) for name, row in rows.items()}


def table(mutants: Iterable[Mutant], results: Mapping[str, Result]) -> str:
    """Return a line a mutant, and last how many of them were killed."""
    lines, killed, total = [], 0, 0
    for mutant in mutants:
        result = results.get(mutant.id, Result(NOT_RUN, 0.0))
        lines.append(f"{mutant.id:<32} {result.outcome:<17} {result.seconds:6.1f}")
        killed += result.outcome == KILLED
        total += 1
    return "\n".join([*lines, f"killed {killed} of {total}"])


def main(argv: list[str] | None = None) -> int:
    """Run what the command line says; return 0 if every mutant of it was killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--only", metavar="ID", help="run this mutant alone")
    parser.add_argument(
        "--resume", action="store_true", help="leave out what was run and has not changed since"
    )
    parser.add_argument("--workers", type=int, default=WORKERS, help="mutants at a time")
    given = parser.parse_args(argv)
    mutants = load()
    chosen = [one for one in mutants if given.only in (None, one.id)]
    if not chosen:
        parser.error(f"--only {given.only}: no such mutant, see {MUTANTS}")
    for one in chosen:
        one.applied((ROOT / one.file).read_text())
    results = _kept() if given.resume or given.only else {}
    due = [
        one
        for one in chosen
        if not given.resume or results.get(one.id, Result("", 0.0)).digest != one.digest()
    ]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for name, result in run_all(due, results, given.workers):
        print(f"{name}: {result.outcome}", file=sys.stderr, flush=True)
    print(table(chosen, results))
    return 0 if all(results[one.id].outcome == KILLED for one in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
