"""kvstore codecs: what this machine's codecs do, as a table and as JSON."""

from __future__ import annotations

import json

import pytest

from kvstore.cli import codecs as codecs_module
from kvstore.cli.codecs import every_name, measure_all
from kvstore.cli.exits import EXIT_USAGE
from kvstore.cli.main import main
from kvstore.codecs.base import CODECS
from kvstore.proto.errors import UnknownCodecError


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["codecs", *argv])
    shown = capsys.readouterr()
    return int(stop.value.code or 0), shown.out, shown.err


def test_the_figures_of_a_codec_are_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "raw", "zplane", "--json")
    assert status == 0
    report = json.loads(out)
    assert [row["codec"] for row in report["codecs"]] == ["raw", "zplane"]
    raw, packed = report["codecs"]
    assert (raw["accuracy"], raw["break_even_bytes_per_s"]) == ("exact", 0)
    assert packed["ratio"] > 1.2
    expected = packed["decode_bytes_per_s"] * (1 - 1 / packed["ratio"])
    assert packed["break_even_bytes_per_s"] == pytest.approx(expected, rel=1e-3)
    assert report["not_measured"] == {}


def test_the_table_names_each_codec_and_says_what_it_was_measured_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codecs_module, "BUDGET_S", 0.0)
    status, out, _ = run(capsys, "zplane", "raw")
    assert status == 0
    for word in ("zplane", "raw", "exact", "numpy", "even", "synthetic"):
        assert word in out


def test_a_codec_that_does_not_exist_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "zplane:9", "raw")
    assert (status, out) == (EXIT_USAGE, "")
    assert "zplane:9" in err


def test_a_codec_that_cannot_be_measured_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(name: str, *_: object) -> object:
        raise UnknownCodecError(name, "no tables for it")

    monkeypatch.setattr(codecs_module, "measure", fail)
    speeds, missing = measure_all(["zplane"])
    assert speeds == []
    assert "no tables" in missing["zplane"]
    assert "no tables" in codecs_module.speeds_as_json(speeds, missing)


def test_every_codec_is_measured_unless_some_are_named() -> None:
    assert sorted(every_name()) == list(CODECS)
    assert every_name()[0] == "raw"
