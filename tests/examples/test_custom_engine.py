"""The example of an engine, against a real store."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from helpers.local_server import LocalServer

import kvstore

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "custom_engine.py"


def test_a_prompt_is_computed_once(server: LocalServer, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(PROGRAM))["main"](server.address)
    assert capsys.readouterr().out.splitlines() == [
        "0 of 600 tokens came from the store", "599 of 600 tokens came from the store",
    ]  # fmt: skip


def test_blocks_hold_what_was_computed_and_a_store_that_is_gone_costs_nothing(
    server: LocalServer,
) -> None:
    program = runpy.run_path(str(PROGRAM))
    tokens = list(range(100))
    with kvstore.Client(server.address, program["MODEL"]) as client:
        first, second = program["Engine"](client), program["Engine"](client)
        assert first.serve(tokens, range(7)) == 0
        assert second.serve(tokens, range(9, 16)) == 99
        assert torch.equal(first.pages[:, :7], second.pages[:, 9:16])
    with kvstore.Client("127.0.0.1:1", program["MODEL"]) as client:
        assert program["Engine"](client).serve(tokens, range(7)) == 0
