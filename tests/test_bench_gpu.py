"""The benchmark of the gpu tier where there is no GPU: it says so, and that is no failure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: it would measure")
def test_without_a_cuda_device_nothing_is_measured_and_nothing_fails() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    *text, last = done.stdout.splitlines()
    assert text == ["skipped: no CUDA device"]
    assert json.loads(last) == {"bench": "gpu", "values": {}}
