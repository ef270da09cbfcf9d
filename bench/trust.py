"""What trust costs and what it holds: tables for people, then one JSON line.

Each part measures one promise in a file of its own and adds its figures to the report. A part that
this machine cannot run says so and is skipped. Run ``python -m bench.trust``; ``--only NAME`` runs
some parts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from bench.report import Report

Part = Callable[[Report, Path], None]
"""Measures, and adds to the report; has an empty folder for what it needs."""

PARTS = {
    "tls": "bench.trust_tls",
    "encryption": "bench.trust_encryption",
    "timing": "bench.trust_timing",
    "neighbour": "bench.trust_neighbour",
    "load": "bench.trust_load",
    "faults": "bench.trust_faults",
}
"""The parts by name; each module has a function ``measure`` that is a Part."""


def run(names: Sequence[str]) -> Report:
    """Run the parts of *names*, one after another, and return what they found."""
    report = Report("trust")
    for name in names:
        part: Part = import_module(PARTS[name]).measure
        print(f"trust: {name}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="kvstore-trust-") as folder:
            part(report, Path(folder))
    return report


def main(argv: Sequence[str] | None = None) -> None:
    """Run what the flags ask for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    options = parser.parse_args(argv)
    run(options.only).print(only_json=options.json)


if __name__ == "__main__":
    main()
