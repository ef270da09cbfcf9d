"""Compiles the loops: ``python build.py`` writes ``_loops.so`` beside the sources.

It needs a C compiler and the C library's headers but no Python headers, so that one library
serves all Python versions. ``setup.py`` calls it when the package is built.
"""

from __future__ import annotations

import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARY = "_loops.so"
SOURCES = ("kvq", "planes", "rans", "sums")
"""Files compiled once per path; ``paths`` is compiled once."""
FLAGS = (
    "-O3", "-std=c11", "-D_GNU_SOURCE", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra",
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
"""Without contraction, so that all paths write the same bytes."""
X86_PATHS = {
    "avx512": (
        "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vbmi2",
    ),
    "avx2": ("-mavx2", "-mbmi2"),
}  # fmt: skip
COMPILERS = ("cc", "gcc", "clang")
NO_COMPILER = "kvstore needs a C compiler to be installed from source: install gcc and libc6-dev"


def build(out: Path, extra: Sequence[str] = ()) -> None:
    """Compile and link to the file *out*, atomically.

    *extra* are further flags. Raises SystemExit if there is no compiler, or it fails.
    """
    compiler = next(filter(shutil.which, COMPILERS), None)
    if compiler is None:
        raise SystemExit(NO_COMPILER)
    paths: dict[str, tuple[str, ...]] = {"portable": ()}
    if platform.machine().lower() in ("x86_64", "amd64"):
        paths |= X86_PATHS
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        objects = [_compiled(compiler, "paths", [*extra], Path(scratch, "paths.o"))]
        for path, flags in paths.items():
            for source in SOURCES:
                wanted = [f"-DPATH={path}", *flags, *extra]
                made = Path(scratch, f"{source}_{path}.o")
                objects.append(_compiled(compiler, source, wanted, made))
        linked = Path(scratch, LIBRARY)
        _run([compiler, "-shared", *extra, "-o", str(linked), *map(str, objects), "-lm"])
        linked.replace(out)


def _compiled(compiler: str, source: str, flags: Sequence[str], out: Path) -> Path:
    _run([compiler, *FLAGS, *flags, "-c", "-o", str(out), str(FOLDER / f"{source}.c")])
    return out


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}\n{done.stderr}")


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER / LIBRARY)
