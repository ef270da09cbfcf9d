"""kvstore bench and kvstore drain, against a server."""

from __future__ import annotations

import json

import numpy as np
import pytest
from local_server import LocalServer
from prompts import chunks_of, keys_of

from kvstore.cli.exits import EXIT_NOT_HELD, EXIT_STORE, EXIT_USAGE
from kvstore.cli.main import main
from kvstore.client.client import Client
from kvstore.proto.errors import ShuttingDownError


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
    assert "6 stored, 5 right" in capsys.readouterr().out


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
