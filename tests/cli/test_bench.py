"""kvstore bench and kvstore drain against a server, and kvstore codecs."""

from __future__ import annotations

import json

import numpy as np
import pytest
from helpers.kvstore_command import Kvstore
from helpers.local_server import LocalServer
from helpers.prompts import chunks_of, keys_of

from kvstore.cli import bench
from kvstore.cli.app import EXIT_NOT_HELD, EXIT_STORE, EXIT_USAGE
from kvstore.client.client import Client
from kvstore.codecs.base import NAMES_BY_ID
from kvstore.proto.errors import ShuttingDownError, UnknownCodecError


def few(server: LocalServer, *more: str) -> tuple[str, ...]:
    return ("bench", "--address", server.address, "--chunks", "6", "--chunk-bytes", "20000", *more)


def test_all_that_was_put_comes_back_and_nothing_stays(
    server: LocalServer, kvstore: Kvstore
) -> None:
    for transport in ("auto", "grpc"):
        run = kvstore(*few(server, "--json", "--transport", transport))
        figures = json.loads(run.out)
        assert run.status == 0
        assert (figures["stored"], figures["right"], figures["held"]) == (6, 6, True)
        assert figures["put_s"] > 0 < figures["get_s"]
        assert server.settled().tiers[0][1].chunks == 0


def test_bytes_that_come_back_wrong_are_said(
    server: LocalServer, kvstore: Kvstore, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Client.get_chunks

    def wrong(self: Client, keys: list[bytes], out: list[list[list[list[np.ndarray]]]]) -> object:
        found = honest(self, keys, out)  # type: ignore[arg-type]
        out[2][0][0][1].view(np.uint16)[0, 0, 0] ^= 1
        return found

    monkeypatch.setattr(Client, "get_chunks", wrong)
    run = kvstore(*few(server))
    assert (run.status, "6 stored, 5 verified" in run.out) == (EXIT_NOT_HELD, True)


def test_what_cannot_be_run_is_refused_by_name(kvstore: Kvstore) -> None:
    for argv, named in (
        (("bench", "--chunks", "0"), "chunks"),
        (("bench", "--chunk-bytes", "3"), "chunk_bytes"),
        (("bench", "--transport", "pigeon"), "transport"),
        (("bench", "--chunks", "4096", "--chunk-bytes", 64 << 20), "chunks"),
        (("drain", "--within", "0"), "within"),
        (("codecs", "lossless:9", "raw"), "lossless:9"),
    ):
        run = kvstore(*argv)
        assert (run.status, run.out, named in run.err) == (EXIT_USAGE, "", True), argv


def test_a_drained_server_has_saved_all_and_takes_nothing(
    server: LocalServer, kvstore: Kvstore
) -> None:
    client = server.connect()
    keys = keys_of(client, 1, 3)
    client.put_chunks(chunks_of(client, keys))
    run = kvstore("drain", "--address", server.address)
    assert (run.status, "is on disk" in run.out) == (0, True)
    with pytest.raises(ShuttingDownError):
        client.put_chunks(chunks_of(client, keys_of(client, 2, 1)))
    assert client.lookup(keys=keys).ready == 3
    assert kvstore("drain", "--address", "127.0.0.1:1", "--within", "1").status == EXIT_STORE


# --- codecs


def test_the_figures_of_a_codec_are_printed_as_json_and_as_a_table(
    kvstore: Kvstore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = kvstore("codecs", "raw", "lossless", "--json")
    report = json.loads(run.out)
    assert (run.status, [row["codec"] for row in report["codecs"]]) == (0, ["raw", "lossless"])
    raw, packed = report["codecs"]
    assert (raw["accuracy"], raw["break_even_bytes_per_s"]) == ("exact", 0)
    assert packed["ratio"] > 1.2
    expected = packed["decode_bytes_per_s"] * (1 - 1 / packed["ratio"])
    assert packed["break_even_bytes_per_s"] == pytest.approx(expected, rel=1e-3)
    assert report["not_measured"] == {}
    monkeypatch.setattr(bench, "CODEC_BUDGET_S", 0.0)
    run = kvstore("codecs", "lossless", "raw")
    for word in ("lossless", "raw", "exact", "numpy", "even", "synthetic"):
        assert word in run.out


def test_a_codec_that_cannot_be_measured_is_named_with_the_reason(
    kvstore: Kvstore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str, *_: object) -> object:
        raise UnknownCodecError(name, "no tables for it")

    monkeypatch.setattr("kvstore.codecs.speed.measure", fail)
    run = kvstore("codecs", "--json")
    report = json.loads(run.out)
    assert (run.status, report["codecs"]) == (0, [])
    assert sorted(report["not_measured"]) == sorted(NAMES_BY_ID.values()), (
        "every one, unless some are named"
    )
    assert next(iter(report["not_measured"])) == "raw"
    assert "no tables" in report["not_measured"]["lossless"]
