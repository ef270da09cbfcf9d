"""Gates as `kvstore status --all` shows them, and what `kvstore blend calibrate` refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.local_server import LocalServer

from kvstore.cli.__main__ import main
from kvstore.proto import kvstore_pb2 as pb
from kvstore.server.blending.gates import TRIALS


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*argv: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(argv)
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out + shown.err

    return run


def open_gate(server: LocalServer, tag: str) -> None:
    client = server.connect()
    good = pb.ShadowResult(agreement=1.0, tokens=64)
    for _ in range(TRIALS):
        client.report_reuse(pb.ReportReuseRequest(tag=tag, ratio=0.3, shadow=good))


def test_gates_are_shown_with_what_they_were_held_to(
    server: LocalServer, run: Callable[..., tuple[int, str]]
) -> None:
    status, shown = run("status", server.address, "--all")
    assert (status, "rag" in shown, "blend_resolves" in shown) == (0, False, True)
    open_gate(server, "rag")
    status, shown = run("status", server.address, "--all")
    assert (status, "tag rag: open at ratio 0.3" in shown) == (0, True)
    status, shown = run("status", server.address, "--json")
    [gate] = json.loads(shown)["gates"]
    assert (gate["tag"], gate["open"], gate["agreement"]) == ("rag", True, 1.0)


def test_a_folder_without_a_model_is_refused(
    tmp_path: Path, run: Callable[..., tuple[int, str]]
) -> None:
    pytest.importorskip("transformers")
    status, shown = run("blend", "calibrate", str(tmp_path), "--text", str(tmp_path / "text"))
    assert status == 2
    assert "model=" in shown
