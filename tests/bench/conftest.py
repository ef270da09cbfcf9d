"""Makes the benchmarks importable: last on the path, as the root's other folders shadow modules."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
