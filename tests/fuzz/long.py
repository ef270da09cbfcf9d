"""Fuzzing with coverage, by atheris: ``python tests/fuzz/long.py SECONDS [TARGET ...]``.

Each target runs in a process of its own and begins with its seeds. `make fuzz` runs all of them.
Without the package it says so and ends with 0.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CRASHES = Path(__file__).parents[2] / "build" / "fuzz"
"""Where an input that crashed or was slow is kept."""
MEMORY_MB = 2048
MAX_BYTES = 4096


def fuzz_one(name: str, seconds: int, corpus: Path) -> None:
    """Fuzz *name*; libFuzzer ends the process, with another status than 0 after a crash."""
    atheris: Any = import_module("atheris")

    with atheris.instrument_imports(include=["kvstore"]):
        from fuzz.targets import SEEDS, try_target

    for number, seed in enumerate(SEEDS[name]):
        (corpus / str(number)).write_bytes(seed)

    def once(data: bytes) -> None:
        try_target(name, data)

    CRASHES.mkdir(parents=True, exist_ok=True)
    limits = (f"-max_total_time={seconds}", f"-max_len={MAX_BYTES}", f"-rss_limit_mb={MEMORY_MB}")
    kept = f"-artifact_prefix={CRASHES}/{name}-"
    atheris.Setup([sys.argv[0], *limits, kept, "-print_final_stats=1", str(corpus)], once)
    atheris.Fuzz()


def main() -> int:
    """Run what was asked for; return 1 when a target crashed."""
    if sys.argv[1] == "--one":
        with tempfile.TemporaryDirectory() as corpus:
            fuzz_one(sys.argv[2], int(sys.argv[3]), Path(corpus))
        return 0
    if find_spec("atheris") is None:
        print("skipped: atheris is not installed: pip install atheris==3.0.0")
        return 0
    from fuzz.targets import TARGETS

    seconds, names = int(sys.argv[1]), sys.argv[2:] or list(TARGETS)
    crashed = []
    for name in names:
        command = [sys.executable, __file__, "--one", name, str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        runs = [line for line in done.stderr.splitlines() if "executed_units" in line]
        print(f"{name:16} {'crashed' if done.returncode else 'held'} {' '.join(runs)}", flush=True)
        if done.returncode:
            crashed.append(name)
            print(done.stderr[-3000:])
    return int(bool(crashed))


if __name__ == "__main__":
    sys.exit(main())
