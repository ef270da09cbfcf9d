"""Code shared by benchmarks."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""
TRACES = ROOT / "data" / "traces"
