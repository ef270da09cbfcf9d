"""kvstore bench and kvstore drain against a server, and kvstore codecs."""

from __future__ import annotations

import json

import numpy as np
import pytest
from helpers.local_server import LocalServer
from helpers.prompts import chunks_of, keys_of

from kvstore.cli import bench
from kvstore.cli.__main__ import main
from kvstore.cli.app import EXIT_NOT_HELD, EXIT_STORE, EXIT_USAGE
from kvstore.cli.bench import every_name
from kvstore.client.client import Client
from kvstore.codecs.base import CODECS
from kvstore.proto.errors import ShuttingDownError, UnknownCodecError


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    return int(ended.value.code or 0)


def few(server: LocalServer, *more: str) -> tuple[str, ...]:
    return ("bench", "--address", server.address, "--chunks", "6", "--chunk-bytes", "20000", *more)


@pytest.mark.parametrize("transport", ["auto", "grpc"])
def test_all_that_was_put_comes_back_and_nothing_stays(
    server: LocalServer, capsys: pytest.CaptureFixture[str], transport: str
) -> None:
    assert run(*few(server, "--json", "--transport", transport)) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["stored"], figures["right"], figures["held"]) == (6, 6, True)
    assert figures["put_s"] > 0 < figures["get_s"]
    assert server.settled().tiers[0][1].chunks == 0


def test_bytes_that_come_back_wrong_are_said(
    server: LocalServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Client.get_chunks

    def wrong(self: Client, keys: list[bytes], out: list[list[list[list[np.ndarray]]]]) -> object:
        found = honest(self, keys, out)  # type: ignore[arg-type]
        out[2][0][0][1].view(np.uint16)[0, 0, 0] ^= 1
        return found

    monkeypatch.setattr(Client, "get_chunks", wrong)
    assert run(*few(server)) == EXIT_NOT_HELD
    assert "6 stored, 5 verified" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--chunks", "0"), "chunks"),
        (("--chunk-bytes", "3"), "chunk_bytes"),
        (("--transport", "pigeon"), "transport"),
        (("--chunks", "4096", "--chunk-bytes", str(64 << 20)), "chunks"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], named: str
) -> None:
    assert run("bench", *argv) == EXIT_USAGE
    assert named in capsys.readouterr().err


def test_a_drained_server_has_saved_all_and_takes_nothing(
    server: LocalServer, capsys: pytest.CaptureFixture[str]
) -> None:
    client = server.connect()
    keys = keys_of(client, 1, 3)
    client.put_chunks(chunks_of(client, keys))
    assert run("drain", "--address", server.address) == 0
    assert "is on disk" in capsys.readouterr().out
    with pytest.raises(ShuttingDownError):
        client.put_chunks(chunks_of(client, keys_of(client, 2, 1)))
    assert client.lookup(keys=keys).ready == 3


def test_a_drain_of_nobody_and_in_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("drain", "--within", "0") == EXIT_USAGE
    assert "within" in capsys.readouterr().err
    assert run("drain", "--address", "127.0.0.1:1", "--within", "1") == EXIT_STORE


# --- codecs


def run_codecs(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = run("codecs", *argv)
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_the_figures_of_a_codec_are_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run_codecs(capsys, "raw", "zplane", "--json")
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
    monkeypatch.setattr(bench, "CODEC_BUDGET_S", 0.0)
    status, out, _ = run_codecs(capsys, "zplane", "raw")
    assert status == 0
    for word in ("zplane", "raw", "exact", "numpy", "even", "synthetic"):
        assert word in out


def test_a_codec_that_does_not_exist_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_codecs(capsys, "zplane:9", "raw")
    assert (status, out) == (EXIT_USAGE, "")
    assert "zplane:9" in err


def test_a_codec_that_cannot_be_measured_is_named_with_the_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str, *_: object) -> object:
        raise UnknownCodecError(name, "no tables for it")

    monkeypatch.setattr("kvstore.codecs.speed.measure", fail)
    status, out, _ = run_codecs(capsys, "zplane", "--json")
    report = json.loads(out)
    assert (status, report["codecs"]) == (0, [])
    assert "no tables" in report["not_measured"]["zplane"]


def test_every_codec_is_measured_unless_some_are_named() -> None:
    assert sorted(every_name()) == list(CODECS)
    assert every_name()[0] == "raw"
