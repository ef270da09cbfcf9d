"""`kvstore calibrate gate`: which lossy copies of a model are near enough, at a real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.coarse_codec import RoughCodec, coarse_codec
from helpers.kvstore_command import Kvstore
from helpers.local_server import LocalServer
from helpers.lossy_copies import leave_on_disk
from helpers.torch_engine import OPTIONS, prefill, random_ids

from kvstore.cli.trials import load_model
from kvstore.client.engines.transformers import TransformersConnector, representation_of
from kvstore.proto.blend import ReuseReport, ShadowResult, accuracy_tag
from kvstore.proto.types import Accuracy
from kvstore.server.blending import gates

TINYLM = Path(__file__).parents[2] / "data" / "tinylm"

Run = Callable[..., tuple[int, str]]
MakeServer = Callable[..., LocalServer]


@pytest.fixture(autouse=True)
def few_trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Progress bars of transformers leave a thread behind; four comparisons open a gate.

    ``rough`` is a codec that states no bound.
    """
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    monkeypatch.setattr(gates, "TRIALS", 4)
    monkeypatch.setattr(RoughCodec, "accuracy", Accuracy.approximate)
    with coarse_codec():
        yield


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Five prompts of two chunks and some."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"tokens": random_ids(170, seed=seed)[0].tolist()} for seed in range(5)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def run(prompts: Path, kvstore: Kvstore) -> Run:
    def run(server: LocalServer | None, *more: str, model: Path = TINYLM) -> tuple[int, str]:
        address = "127.0.0.1:1" if server is None else server.address
        usual = ["--codec", "rough", "--prompts", str(prompts), "--chunk-tokens", "64"]
        told = kvstore("calibrate", "gate", model, "--address", address, *usual, *more)
        return told.status, told.out + told.err

    return run


def store(server: LocalServer, prompts: Path, *, lossy: bool = True) -> TransformersConnector:
    """Store the first chunks of the prompts, of all but the first prompt lossy copies only."""
    model, tokenizer = load_model(TINYLM)
    client = server.connect("auto", representation_of(model, tokenizer), OPTIONS)
    connector = TransformersConnector(client, model, accuracy="approximate")
    for number, line in enumerate(prompts.read_text().splitlines()):
        tokens = json.loads(line)["tokens"][:128]
        connector.save([tokens], prefill(model, random_ids(170, seed=number)[:, :128]))
        if lossy and number:
            leave_on_disk(server, client.keys(tokens)[1:])
    return connector


def test_a_codec_that_is_near_enough_has_its_gate_opened_and_later_closed_again(
    make_server: MakeServer, prompts: Path, run: Run
) -> None:
    server = make_server(
        "--codec", "disk=rough", "--blend-divergence", "1", "--blend-agreement", "0"
    )
    connector = store(server, prompts)
    lossy = [json.loads(prompts.read_text().splitlines()[1])["tokens"]]
    assert connector.load(lossy)[1] == 64
    status, shown = run(server)
    assert status == 0, shown
    assert "tag accuracy:approximate:rough: open" in shown
    assert "agreement" in shown
    assert connector.load(lossy)[1] == 128
    bad = ShadowResult(50.0, 0.0, 64)
    report = ReuseReport(accuracy_tag("rough"), shadow=bad)
    while connector.client.report_reuse(report).is_open:
        pass
    assert connector.load(lossy)[1] == 64
    assert run(server)[0] == 0, "and opened again"


def test_a_codec_that_is_too_far_off_stays_closed_and_its_figures_are_shown(
    make_server: MakeServer, prompts: Path, run: Run
) -> None:
    server = make_server("--codec", "disk=rough", "--blend-divergence", "1e-9")
    store(server, prompts)
    status, shown = run(server)
    assert status == 1, shown
    assert "tag accuracy:approximate:rough: closed" in shown
    assert "divergence" in shown


def test_prompts_that_cannot_be_compared_are_said_to_be_so(
    make_server: MakeServer, prompts: Path, run: Run
) -> None:
    server = make_server("--codec", "disk=rough")
    assert "none of 5 prompts is stored under this model's name" in run(server)[1]
    store(server, prompts, lossy=False)
    status, shown = run(server)
    assert (status, "no copy by rough without a bound was read of 5 prompts" in shown) == (2, True)
    assert server.counter("blend_shadows") == 0


def test_prompts_that_did_not_count_are_named_and_a_gate_that_closed_is_tried_again(
    make_server: MakeServer, prompts: Path, run: Run
) -> None:
    server = make_server("--codec", "disk=rough", "--blend-divergence", "1e-9")
    connector = store(server, prompts)
    assert run(server)[0] == 1
    ids = random_ids(148, seed=9)
    tokens = ids[0].tolist()
    connector.save(ids, prefill(load_model(TINYLM)[0], ids))
    leave_on_disk(server, connector.client.keys(tokens)[2:])
    prompts.write_text(f"{json.dumps({'tokens': tokens})}\n{prompts.read_text()}")
    status, shown = run(server)
    assert status == 1
    assert "1 of the prompts did not count" in shown
    assert "(lines 1)" in shown
    assert server.counter("blend_shadows") == 4 + 1 + 4


def test_what_cannot_be_is_refused_by_name_before_a_server_is_asked(
    run: Run, prompts: Path, tmp_path: Path
) -> None:
    for more, message in (
        (["--prompts", "absent.jsonl"], "prompts='absent.jsonl'"),
        (["--codec", "mp3"], "codec='mp3': use one of"),
        (["--codec", "lossless"], "codec='lossless': use one of"),
        (["--codec", ""], "codec='': use one of"),
        (["--codec", "kvt"], "codec='kvt': use kvtc, which replaces kvt"),
        (["--codec", "kivi:4"], "; copies by other codecs are read without a gate"),
    ):
        status, shown = run(None, *more)
        assert (status, message in shown) == (2, True), shown
    status, shown = run(None, model=tmp_path)
    assert (status, f"model='{tmp_path}'" in shown) == (2, True), shown
    for line in ("{}", "[1]", '{"tokens": "ab"}', '{"tokens": []}', "prompt"):
        prompts.write_text(f'{{"prompt": "It was"}}\n\n{line}\n')
        status, shown = run(None)
        assert (status, "prompts='line 3'" in shown) == (2, True), shown
