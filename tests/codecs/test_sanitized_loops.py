"""The compiled loops under the address and undefined-behaviour sanitizers.

A library of its own is compiled with them, and read hostile and golden frames with in a process of
its own. ``--fuzz-frames`` says how many hostile ones; a tenth of them here by default.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.proto import native
from kvstore.proto.native import build

TESTS = Path(__file__).resolve().parents[1]
PROGRAM = TESTS / "helpers" / "sanitized_tests.py"
FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1")
FRAMES = 1000
SUITES = (
    "codecs/test_hostile_frames.py",
    "codecs/test_golden.py",
    "codecs/test_rans.py",
    "proto/test_copy_loop.py",
)
DEFAULT_FRAMES = 10_000


def runtimes() -> list[str]:
    """Return the sanitizers' libraries, which have to be loaded first; none without them."""
    found = []
    for name in ("libasan.so", "libubsan.so"):
        command = ["cc", f"-print-file-name={name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found.append(done.stdout.strip())
    return found if all(map(os.path.isabs, found)) else []


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not runtimes():
        pytest.skip("the compiler has no sanitizers: install gcc's libasan and libubsan")
    out = tmp_path_factory.mktemp("sanitized") / "_loops.so"
    build.build(out, FLAGS)
    return out


def run(library: Path, path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=0",
        "LD_PRELOAD": " ".join(runtimes()),
        "PYTHONMALLOC": "malloc",  # each block has its own bounds
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)]),
    }
    command = [sys.executable, str(PROGRAM), str(library), path, *arguments]
    return subprocess.run(
        command, env=environment, cwd=TESTS.parent, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", native.paths())
def test_no_frame_makes_a_loop_leave_its_buffers_or_its_numbers(
    library: Path, path: str, pytestconfig: pytest.Config
) -> None:
    wanted = int(pytestconfig.getoption("--fuzz-frames"))
    frames = FRAMES if wanted == DEFAULT_FRAMES else wanted
    suites = [str(TESTS / name) for name in SUITES]
    done = run(library, path, *suites, f"--fuzz-frames={frames}", "-o", "timeout=7200")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_a_loop_that_leaves_its_buffer_is_noticed(library: Path, tmp_path: Path) -> None:
    test = tmp_path / "test_beyond.py"
    test.write_text(
        "import numpy as np\n"
        "from kvstore.proto.buffers import addresses\n"
        "from kvstore.proto.native import loops\n"
        "def test_beyond():\n"
        "    short, codes = np.zeros(1000, np.float32), np.zeros(4000, np.uint8)\n"
        "    loops().kvq_add(*addresses(short, codes), 4000)\n"
    )
    done = run(library, native.paths()[0], str(test))
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
