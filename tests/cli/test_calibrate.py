"""Calibrations: assets out of dumps and of models, gates opened by trials at a server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contracts.codec import template
from helpers.asset_samples import GQA, MLA, MODEL, smooth
from helpers.coarse_codec import RoughCodec, coarse_codec
from helpers.kvstore_command import Kvstore
from helpers.local_server import LocalServer
from helpers.lossy_copies import leave_on_disk
from helpers.torch_engine import OPTIONS, prefill, random_ids
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvstore.cli.trials import load_model
from kvstore.client.chunk import to_torch
from kvstore.client.engines.transformers import TransformersConnector, representation_of
from kvstore.codecs.assets import Asset, AssetKind, AssetRegistry
from kvstore.codecs.base import Part
from kvstore.codecs.cachegen import CachegenCodec
from kvstore.codecs.calibration import make_asset, read_dumps
from kvstore.codecs.rope import inverse_frequencies
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.blend import ReuseReport, ShadowResult, accuracy_tag
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.keys import representation_digest
from kvstore.proto.types import Accuracy, Component, DType, KVLayout, LayerKind
from kvstore.server.blending import gates
from kvstore.server.blending.gates import TRIALS

TINYLM = Path(__file__).resolve().parents[2] / "data" / "tinylm"
Run = Callable[..., tuple[int, str]]
ServerMaker = Callable[..., LocalServer]
NAMES = {LayerKind.attention: ("key", "value"), LayerKind.mla: ("latent",)}
TYPES = (DType.bfloat16, DType.float16, DType.float32)


@pytest.fixture(autouse=True)
def no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress bars of transformers leave a thread behind."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)


@pytest.fixture
def few_trials(monkeypatch: pytest.MonkeyPatch) -> int:
    """So many open a gate."""
    monkeypatch.setattr(gates, "TRIALS", 4)
    return 4


def safetensors(layers: list[list[Part]], component: Component) -> bytes:
    tensors = {
        f"layer.{number}.{name}": to_torch(part, component.dtype).contiguous()
        for number, parts in enumerate(layers)
        for name, part in zip(NAMES[component.kind], parts, strict=True)
    }
    return save(tensors, {"by": "test"})


def npy(path: Path, layers: list[list[Part]], component: Component) -> Path:
    kinds = {DType.bfloat16: "<u2", DType.float16: "<f2", DType.float32: "<f4"}
    np.save(path, np.array(layers).view(kinds[component.dtype]))
    return path


def dumps(folder: Path, component: Component = GQA) -> list[Path]:
    return [npy(folder / f"{n}.npy", smooth(component, n), component) for n in range(4)]


def made(folder: Path, sources: list[Path]) -> Asset:
    return make_asset(AssetKind.cachegen, read_dumps(sources, MODEL), folder)[1]


@pytest.mark.parametrize("component", [GQA, MLA], ids=lambda component: component.kind.name)
def test_an_asset_from_dumps_codes_the_models_chunks(
    component: Component, tmp_path: Path, kvstore: Kvstore
) -> None:
    out = tmp_path / "assets"
    sources = dumps(tmp_path, component)
    run = kvstore("calibrate", "cachegen", *sources, "--out", out, "--representation", MODEL.hex())
    assert (run.status, run.err) == (0, "")
    registry = AssetRegistry()
    assert registry.load_folder(out) == 1
    assert registry.for_model(AssetKind.cachegen, MODEL).digest.hex() in run.out
    codec, layout = CachegenCodec(1, registry), KVLayout((component,))
    room = np.empty(codec.max_frame_bytes(layout), np.uint8)
    header = codec.encode(template(layout), [smooth(component, 99)], room)
    assert header.accuracy is Accuracy.bounded
    assert header.frame_bytes < component.layers * component.layer_bytes


def test_each_calibration_is_the_next_edition_and_the_same_samples_make_the_same_tables(
    tmp_path: Path,
) -> None:
    first, second = (made(tmp_path / "assets", dumps(tmp_path)) for _ in range(2))
    assert (first.edition, second.edition) == (1, 2)
    assert len(list((tmp_path / "assets").iterdir())) == 2
    for name, table in first.tables.items():
        assert np.array_equal(table, second.tables[name])


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.name)
def test_safetensors_and_npy_are_the_same_samples(dtype: DType, tmp_path: Path) -> None:
    component = Component(LayerKind.attention, dtype, 2, 2, 64, 300)
    layers = smooth(component, 1)
    (tmp_path / "a.safetensors").write_bytes(safetensors(layers, component))
    npy(tmp_path / "a.npy", layers, component)
    one, other = (read_dumps([tmp_path / f"a.{kind}"], MODEL) for kind in ("safetensors", "npy"))
    assert one.component == other.component
    assert [position for _, position in one.chunks] == [0, 256]
    for left, right in zip(one.chunks, other.chunks, strict=True):
        assert left[1] == right[1]
        for a, b in zip(left[0][0], right[0][0], strict=True):
            assert all(map(np.array_equal, a, b))
    assert np.array_equal(np.asarray(one.chunks[1][0][0][1][0]), layers[1][0][:, 256:])


def test_a_model_is_calibrated_from_a_text(tmp_path: Path, kvstore: Kvstore) -> None:
    rows = (TINYLM / "heldout.jsonl").read_text().splitlines()
    text = tmp_path / "text.txt"
    text.write_text("\n".join(json.loads(row)["text"] for row in rows[:4]))
    options = ("--out", tmp_path, "--text", text, "--tokens", 600)
    for kind in AssetKind:
        run = kvstore("calibrate", kind.name, TINYLM, *options)
        assert run.status == 0, run.err
    registry = AssetRegistry()
    assert registry.load_folder(tmp_path) == 3
    representation = representation_of(*load_model(TINYLM))
    asset = registry.for_model(AssetKind.cachegen, representation_digest(representation))
    assert asset.tables["0.anchors"].shape == (6, 2, 4, 32)
    tables = registry.for_model(AssetKind.kvtc, asset.representation).tables
    assert tables["0.basis"].shape[:3] == (6, 2, 128)
    rope = inverse_frequencies(representation.rope, 32)
    assert rope is not None
    assert np.array_equal(tables["0.rope"], rope)
    statistics = registry.for_model(AssetKind.kvq, asset.representation).tables
    assert statistics["0.scales"].shape == (6, 2, 128)
    assert np.array_equal(statistics["0.rope"], rope)


# --- what is refused


def test_what_is_missing_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvstore: Kvstore
) -> None:
    monkeypatch.chdir(tmp_path)
    digest = ("--representation", "00" * 16)
    for argv, message in (
        (("absent",), "sources='absent': no such folder"),
        (("Model-0.5B",), "sources='Model-0.5B': no such folder"),
        (("x.npy",), "need the model's representation digest"),
        (("x.npy", "--representation", "zz"), "representation='zz'"),
        (("x.npy", *digest), "dump='x.npy': cannot be read"),
        (("x.txt", *digest), "give .npy or .safetensors"),
        ((".",), "needs a text"),
        ((".", "."), "give one model"),
        ((".", "--text", "absent.txt"), "absent.txt"),
        ((".", "--text", "t", "--tokens", "5"), "tokens=5"),
    ):
        run = kvstore("calibrate", "cachegen", *argv, "--out", tmp_path / "assets")
        assert (run.status, run.err.startswith("kvstore: "), message in run.err) == (2, True, True)
        assert not (tmp_path / "assets").exists()
    run = kvstore("calibrate", "kvtc", TINYLM)
    assert (run.status, "out=None: give --out DIR" in run.err) == (2, True)


def test_arrays_that_are_no_kv_are_refused_by_name(tmp_path: Path) -> None:
    for array in (
        np.zeros((2, 2, 2, 64, 8), np.float64),
        np.zeros((2, 3, 2, 64, 8), np.float32),
        np.zeros((2, 2, 64, 8), np.float32),
        np.zeros((2, 2, 0, 64, 8), np.float32),
        np.array([{}], dtype=object),
    ):
        np.save(tmp_path / "a.npy", array)
        with pytest.raises(InvalidRequestError, match=r"a\.npy"):
            read_dumps([tmp_path / "a.npy"], MODEL)


def test_dumps_of_rotated_keys_make_no_asset_of_kvtc_but_latents_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="give the model and a text"):
        make_asset(AssetKind.kvtc, read_dumps(dumps(tmp_path), MODEL), tmp_path)
    latents = read_dumps(dumps(tmp_path, MLA), MODEL)
    assert make_asset(AssetKind.kvtc, latents, tmp_path)[1].kind is AssetKind.kvtc


def test_dumps_of_two_models_with_nan_or_too_short_are_refused(tmp_path: Path) -> None:
    one = npy(tmp_path / "a.npy", smooth(GQA, 1), GQA)
    other = npy(tmp_path / "b.npy", smooth(MLA, 1), MLA)
    with pytest.raises(InvalidRequestError, match=r"b\.npy.*another model"):
        read_dumps([one, other], MODEL)
    layers = smooth(GQA, 1)
    layers[2][1][0, 5, 5] = 0x7FC0
    with pytest.raises(InvalidRequestError, match="NaN or infinity"):
        made(tmp_path / "assets", [npy(tmp_path / "a.npy", layers, GQA)])
    short = Component(LayerKind.attention, DType.bfloat16, 1, 1, 64, 15)
    with pytest.raises(InvalidRequestError, match="at least 16 tokens"):
        read_dumps([npy(tmp_path / "b.npy", smooth(short, 1), short)], MODEL)


def test_a_damaged_asset_in_the_folder_stops_and_nothing_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "assets"
    folder.mkdir()
    (folder / "old.kvasset").write_bytes(b"KVAS")
    with pytest.raises(InvalidRequestError, match=r"old\.kvasset"):
        made(folder, dumps(tmp_path))
    assert [path.name for path in folder.iterdir()] == ["old.kvasset"]


@settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_safetensors_bytes_are_refused_or_read(data: st.DataObject, tmp_path: Path) -> None:
    component = Component(LayerKind.attention, DType.bfloat16, 1, 1, 4, 16)
    body = bytearray(safetensors(smooth(component, 1), component))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(body), 320) - 1))
        body[at] = data.draw(st.integers(0, 255) | st.sampled_from(b'0123456789[]{},":'))
    path = tmp_path / "a.safetensors"
    path.write_bytes(bytes(body[: data.draw(st.integers(1, len(body)))]))
    try:
        samples = read_dumps([path], MODEL)
    except InvalidRequestError:
        return
    assert samples.component.head_dim * samples.component.kv_heads <= len(body)


@pytest.fixture
def rough_codec(monkeypatch: pytest.MonkeyPatch, few_trials: int) -> Iterator[None]:
    """``rough`` is a codec that states no bound."""
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
def gate(rough_codec: None, prompts: Path, kvstore: Kvstore) -> Run:
    def gate(server: LocalServer | None, *more: str, model: Path = TINYLM) -> tuple[int, str]:
        address = "127.0.0.1:1" if server is None else server.address
        usual = ["--codec", "rough", "--prompts", str(prompts), "--chunk-tokens", "64"]
        told = kvstore("calibrate", "gate", model, "--address", address, *usual, *more)
        return told.status, told.out + told.err

    return gate


def store_prompts(
    server: LocalServer, prompts: Path, *, lossy: bool = True
) -> TransformersConnector:
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
    make_server: ServerMaker, prompts: Path, gate: Run
) -> None:
    server = make_server(
        "--codec", "disk=rough", "--blend-divergence", "1", "--blend-agreement", "0"
    )
    connector = store_prompts(server, prompts)
    lossy = [json.loads(prompts.read_text().splitlines()[1])["tokens"]]
    assert connector.load(lossy)[1] == 64
    status, shown = gate(server)
    assert status == 0, shown
    assert "tag accuracy:approximate:rough: open" in shown
    assert "agreement" in shown
    assert connector.load(lossy)[1] == 128
    bad = ShadowResult(50.0, 0.0, 64)
    report = ReuseReport(accuracy_tag("rough"), shadow=bad)
    while connector.client.report_reuse(report).is_open:
        pass
    assert connector.load(lossy)[1] == 64
    assert gate(server)[0] == 0, "and opened again"


def test_prompts_that_cannot_be_compared_are_said_to_be_so(
    make_server: ServerMaker, prompts: Path, gate: Run
) -> None:
    server = make_server("--codec", "disk=rough")
    assert "none of 5 prompts is stored under this model's identity" in gate(server)[1]
    store_prompts(server, prompts, lossy=False)
    status, shown = gate(server)
    assert (status, "no approximate copy by rough was read of 5 prompts" in shown) == (2, True)
    assert server.counter("blend_shadows") == 0


def test_a_codec_that_is_too_far_off_stays_closed_and_prompts_that_did_not_count_are_named(
    make_server: ServerMaker, prompts: Path, gate: Run
) -> None:
    server = make_server("--codec", "disk=rough", "--blend-divergence", "1e-9")
    connector = store_prompts(server, prompts)
    status, shown = gate(server)
    assert status == 1, shown
    assert "tag accuracy:approximate:rough: closed" in shown
    assert "divergence" in shown
    ids = random_ids(148, seed=9)
    tokens = ids[0].tolist()
    connector.save(ids, prefill(load_model(TINYLM)[0], ids))
    leave_on_disk(server, connector.client.keys(tokens)[2:])
    prompts.write_text(f"{json.dumps({'tokens': tokens})}\n{prompts.read_text()}")
    status, shown = gate(server)
    assert status == 1
    assert "1 of the prompts did not count" in shown
    assert "(lines 1)" in shown
    assert server.counter("blend_shadows") == 4 + 1 + 4


def test_what_cannot_be_is_refused_by_name_before_a_server_is_asked(
    gate: Run, prompts: Path, tmp_path: Path
) -> None:
    for more, message in (
        (["--prompts", "absent.jsonl"], "prompts='absent.jsonl'"),
        (["--codec", "mp3"], "codec='mp3': use one of"),
        (["--codec", "lossless"], "codec='lossless': use one of"),
        (["--codec", ""], "codec='': use one of"),
        (["--codec", "kvt"], "codec='kvt': use kvtc, which replaces kvt"),
        (["--codec", "kivi:4"], "; copies of other codecs need no gate"),
    ):
        status, shown = gate(None, *more)
        assert (status, message in shown) == (2, True), shown
    status, shown = gate(None, model=tmp_path)
    assert (status, f"model='{tmp_path}'" in shown) == (2, True), shown
    for line in ("{}", "[1]", '{"tokens": "ab"}', '{"tokens": []}', "prompt"):
        prompts.write_text(f'{{"prompt": "It was"}}\n\n{line}\n')
        status, shown = gate(None)
        assert (status, "prompts='line 3'" in shown) == (2, True), shown


SMALL_PROMPTS = ("--documents", "2", "--document-tokens", "16", "--question-tokens", "8")
WORDS = ["the", "house", "of", "Morven", "was", "built", "by", "Selma", "in", "May", "and", "sold"]


def make_model(folder: Path, *, looks_around: bool) -> Path:
    """Save a Llama whose logits come from each token alone, or from all before it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        initializer_range=0.3 if looks_around else 0.02, tie_word_embeddings=not looks_around,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    if looks_around:
        model.lm_head.weight.data.mul_(4)  # sure of what it says
    else:
        torch.nn.init.normal_(model.model.embed_tokens.weight)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINYLM / name, folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    draw = torch.Generator().manual_seed(3)
    places = torch.randint(0, len(WORDS), (900,), generator=draw).tolist()
    path = tmp_path / "text"
    path.write_text(" ".join(WORDS[place] for place in places))
    return path


@pytest.fixture
def calibrate(kvstore: Kvstore) -> Run:
    """Run the command at a server on a model; return its status and what it printed."""

    def run(server: LocalServer, model: Path, *more: object) -> tuple[int, str]:
        at = ("--tag", "rag", "--address", server.address)
        told = kvstore("blend", "calibrate", model, *at, *more)
        return told.status, told.out + told.err

    return run


def gate_of(server: LocalServer) -> pb.Gate:
    status = server.dial().call("Status", pb.StatusRequest(), 5000, pb.StatusResponse)
    (gate,) = status.gates
    assert gate.tag == "rag"
    return gate


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", looks_around=False)


def test_a_model_that_blends_badly_stays_closed(
    make_server: ServerMaker, calibrate: Run, tmp_path: Path, text: Path
) -> None:
    server = make_server("--limits", "blend_ratio=0.6")
    model = make_model(tmp_path / "model", looks_around=True)
    assert calibrate(server, model, "--text", text, *SMALL_PROMPTS)[0] == 1
    gate = gate_of(server)
    assert not gate.open
    assert gate.why.startswith("closed at 0.6")
    assert gate.agreement < 0.95
    assert server.counter("blend_shadows") == TRIALS <= 200


@pytest.mark.usefixtures("few_trials")
@pytest.mark.parametrize("has_prefix", [True, False])
def test_prompts_begin_with_the_prefix_that_is_given_or_what_stands_for_bos(
    server: LocalServer, calibrate: Run, model: Path, text: Path, tmp_path: Path, has_prefix: bool
) -> None:
    """It is all that is exact: the prefix, or the text's first tokens where there is no BOS."""
    if has_prefix:
        prefix = tmp_path / "system"
        prefix.write_text(" ".join(WORDS * 3))
        chunks = len(AutoTokenizer.from_pretrained(model)(prefix.read_text())["input_ids"]) // 16
        assert chunks > 1
        more: tuple[object, ...] = ("--prefix", prefix)
    else:
        settings = model / "tokenizer_config.json"
        named = json.loads(settings.read_text())
        settings.write_text(json.dumps({**named, "bos_token": None}))
        chunks, more = 1, ()
    assert calibrate(server, model, "--text", text, *SMALL_PROMPTS, *more)[0] == 0
    exact = server.counter("blend_exact_chunks") / server.counter("blend_shadows")
    assert exact == chunks


def test_a_model_that_blends_well_on_the_questions_that_are_given_has_its_gate_opened(
    server: LocalServer, calibrate: Run, model: Path, tmp_path: Path, few_trials: int,
    kvstore: Kvstore,
) -> None:  # fmt: skip
    shown = kvstore("status", server.address, "--all").out
    assert ("rag" in shown, "blend_resolves" in shown) == (False, True)
    documents = [" ".join(WORDS * times) for times in (2, 3, 4)]
    row = json.dumps({"documents": documents, "question": "Who built the house?"})
    questions = tmp_path / "questions"
    questions.write_text(f"{row}\n\n{row}\n")
    status, shown = calibrate(server, model, "--questions", questions)
    assert (status, "open at ratio 0.300" in shown) == (0, True)
    assert server.counter("blend_variant_chunks") >= 2 * few_trials
    gate = gate_of(server)
    assert (gate.open, gate.calibrated, gate.shadows) == (True, True, 0)
    assert gate.ratio == pytest.approx(0.3)
    assert gate.agreement > 0.95
    assert server.counter("blend_shadows") == few_trials
    assert server.usage().tiers[0][1].chunks == 0, "what was stored for trials is deleted"
    assert "tag rag: open at ratio 0.3" in kvstore("status", server.address, "--all").out
    [told] = json.loads(kvstore("status", server.address, "--json").out)["gates"]
    assert (told["tag"], told["open"], told["agreement"]) == ("rag", True, gate.agreement)


def test_what_cannot_be_tried_is_refused_by_name(
    server: LocalServer, calibrate: Run, model: Path, tmp_path: Path
) -> None:
    questions, tokenizer = tmp_path / "questions", model / "tokenizer.json"
    strip = {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | strip))
    good = '{"documents": ["one", "two"], "question": "which?"}'
    for line in (
        "{", "[]", '{"documents": ["one", "two"]}',
        '{"documents": ["one"], "question": "which?"}',
        '{"documents": ["one", ""], "question": "which?"}',
        '{"documents": ["one", " "], "question": "which?"}',
        '{"documents": ["one", "two"], "question": " "}',
        '{"documents": [1, 2], "question": "which?"}',
        '{"documents": ["one", "two"], "question": null}',
    ):  # fmt: skip
        questions.write_text(f"{good}\n{line}\n")
        status, shown = calibrate(server, model, "--questions", questions)
        assert (status, "questions='line 2'" in shown) == (2, True), shown
    questions.write_text("\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    for argv, said in (
        ((model, "--questions", questions), "give at least one line"),
        ((model,), "give --text FILE or --questions FILE"),
        ((model, "--text", questions), "give at least"),
        ((empty, "--text", questions), "model="),
    ):
        status, shown = calibrate(server, *argv)
        assert (status, said in shown) == (2, True), shown
