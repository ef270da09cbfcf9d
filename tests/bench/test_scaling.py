"""bench.scaling with small sizes."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench import scaling


def test_it_prints_its_keys_and_draws_its_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling, "CHUNK_COUNTS", (512, 1024))
    monkeypatch.setattr(scaling, "CLIENT_COUNTS", (1, 2))
    monkeypatch.setattr(scaling, "CLIENT_LOOKUPS", 40)
    monkeypatch.setattr(scaling, "SAMPLES", 3)
    monkeypatch.setattr(scaling, "DISK_CHUNKS", 512)
    scaling.main(["--plot", str(tmp_path / "plot.svg")])
    *table, line = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert result["bench"] == "scaling"
    assert {"lookup_1e6_vs_1e3", "metadata_mb_1e6", "evict_us"} < set(result["values"])
    values = result["values"]
    # So few chunks take less memory than earlier tests release meanwhile.
    assert all(value > 0 for name, value in values.items() if "metadata" not in name)
    assert any("gpu,cpu,disk,redis" in row for row in table)
    drawing = ElementTree.parse(tmp_path / "plot.svg").getroot()
    lines = list(drawing.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == 4
