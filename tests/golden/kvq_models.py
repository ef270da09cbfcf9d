"""The model family of kvq, computed: ``PYTHONPATH=src:tests python tests/golden/kvq_models.py``.

Writes codecs/kvq_models.bin, once: what frames were written with never changes. A test holds
the file against what is computed here, which may differ by a rounding on another machine.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PATH = Path(__file__).parents[2] / "codecs" / "kvq_models.bin"

SCALES, SYMBOLS, ZERO, SLOTS = 32, 128, 64, 4096
ESCAPE_BITS = 16
LEAST_TERNARY = 24

Doubles = NDArray[np.float64]


def gaussian(edge: Doubles, scale: float) -> Doubles:
    """Distribution function of a normal of standard deviation *scale*."""
    return np.array([0.5 * (1 + math.erf(e / (scale * math.sqrt(2)))) for e in edge])


def laplace(edge: Doubles, scale: float) -> Doubles:
    """Distribution function of a Laplace of standard deviation *scale*."""
    tail = 0.5 * np.exp(-np.abs(edge) * math.sqrt(2) / scale)
    return np.where(edge < 0, tail, 1 - tail)


FAMILY = [
    (shape, 2.0 ** (-2.5 + 0.25 * scale))
    for scale in range(SCALES)
    for shape in (gaussian, laplace)
]


def frequencies() -> NDArray[np.uint16]:
    """Return the models of the base, u16 (64, 128): symbol q + 64, and 0 for an escape."""
    q = np.arange(-63, 64).astype(np.float64)
    rows = np.zeros((len(FAMILY), SYMBOLS), np.int64)
    for row, (shape, scale) in zip(rows, FAMILY, strict=True):
        share = shape(q + 0.5, scale) - shape(q - 0.5, scale)
        tail = np.exp(-np.abs(q) / (4 * scale + 1))
        share = 0.998 * share + 0.002 * tail / tail.sum()
        row[0] = max(2, round(SLOTS * (1 - float(share.sum()))))
        counts = np.maximum(1, np.round(share * (SLOTS - 2 - row[0])))
        row[1:] = np.where(share * SLOTS > 0.3, counts, 0)
        row[ZERO] += SLOTS - row.sum()
    return rows.astype(np.uint16)


def costs(rows: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Return what each symbol costs, u16 (64, 128), in 1/256 bit."""
    wide = rows.astype(np.float64)
    bits = 12 - np.log2(np.maximum(wide, 1))
    bits = np.where(wide > 0, bits, bits[:, :1])
    bits[:, 0] += ESCAPE_BITS
    bits[wide == 0] += ESCAPE_BITS
    return np.round(256 * bits).astype(np.uint16)


def ternary() -> NDArray[np.uint16]:
    """Return the models of a refinement, u16 (64, 3, 3).

    Model, then min(|q|, 2), then which third of the old step: towards zero, middle, away.
    """
    out = np.zeros((len(FAMILY), 3, 3), np.int64)
    for rows, (shape, scale) in zip(out, FAMILY, strict=True):
        for size, row in enumerate(rows):
            edges = size + np.array([-3, -1, 1, 3]) / 6
            share = np.maximum(np.diff(shape(edges, scale)), 1e-30)
            share = 0.98 * share / share.sum() + 0.02 / 3
            row[:] = np.maximum(np.round(share * SLOTS), LEAST_TERNARY)
            row[1] += SLOTS - row.sum()
    return out.astype(np.uint16)


def content() -> bytes:
    """Return the file: frequencies, costs and ternary models, one after another."""
    rows = frequencies()
    return b"".join(table.astype("<u2").tobytes() for table in (rows, costs(rows), ternary()))


def main() -> int:
    """Write the file unless it is there."""
    if PATH.exists():
        sys.stderr.write(f"{PATH.name} exists; frames were written with it\n")
        return 1
    PATH.write_bytes(content())
    return 0


if __name__ == "__main__":
    sys.exit(main())
