"""Assets out of KV dumps and out of a model, by the command."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from contracts.codec import template
from helpers.asset_samples import GQA, MLA, MODEL, smooth
from helpers.kvstore_command import Kvstore
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.codecs.assets import Asset, AssetKind, AssetShelf
from kvstore.codecs.base import Part
from kvstore.codecs.cachegen import CachegenCodec
from kvstore.codecs.calibration import make_asset, read_dumps
from kvstore.codecs.rope import inverse_frequencies
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.keys import representation_digest
from kvstore.proto.types import Accuracy, Component, DType, KVLayout, LayerKind

TINYLM = Path(__file__).resolve().parents[2] / "data" / "tinylm"
NAMES = {LayerKind.attention: ("key", "value"), LayerKind.mla: ("latent",)}
TYPES = {DType.bfloat16: "BF16", DType.float16: "F16", DType.float32: "F32"}


def safetensors(layers: list[list[Part]], component: Component) -> bytes:
    """Return *layers* as the file format has it: header size, JSON, tensors."""
    rows: dict[str, object] = {"__metadata__": {"by": "test"}}
    body = b""
    for number, parts in enumerate(layers):
        for name, part in zip(NAMES[component.kind], parts, strict=True):
            data = part.tobytes()
            rows[f"layer.{number}.{name}"] = {
                "dtype": TYPES[component.dtype],
                "shape": list(part.shape),
                "data_offsets": [len(body), len(body) + len(data)],
            }
            body += data
    header = json.dumps(rows).encode()
    return struct.pack("<Q", len(header)) + header + body


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
    shelf = AssetShelf()
    assert shelf.load_folder(out) == 1
    assert shelf.for_model(AssetKind.cachegen, MODEL).digest.hex() in run.out
    codec, layout = CachegenCodec(1, shelf), KVLayout((component,))
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
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvstore.client.engines.transformers.identity import representation_of

    rows = (TINYLM / "heldout.jsonl").read_text().splitlines()
    text = tmp_path / "text.txt"
    text.write_text("\n".join(json.loads(row)["text"] for row in rows[:4]))
    options = ("--out", tmp_path, "--text", text, "--tokens", 600)
    for kind in AssetKind:
        run = kvstore("calibrate", kind.name, TINYLM, *options)
        assert run.status == 0, run.err
    shelf = AssetShelf()
    assert shelf.load_folder(tmp_path) == 3
    model = AutoModelForCausalLM.from_pretrained(TINYLM, dtype="auto")
    representation = representation_of(model, AutoTokenizer.from_pretrained(TINYLM))
    asset = shelf.for_model(AssetKind.cachegen, representation_digest(representation))
    assert asset.tables["0.anchors"].shape == (6, 2, 4, 32)
    tables = shelf.for_model(AssetKind.kvtc, asset.representation).tables
    assert tables["0.basis"].shape[:3] == (6, 2, 128)
    rope = inverse_frequencies(representation.rope, 32)
    assert rope is not None
    assert np.array_equal(tables["0.rope"], rope)
    statistics = shelf.for_model(AssetKind.kvq, asset.representation).tables
    assert statistics["0.scales"].shape == (6, 2, 128)
    assert np.array_equal(statistics["0.rope"], rope)


# --- what is refused


def test_what_is_missing_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvstore: Kvstore
) -> None:
    monkeypatch.chdir(tmp_path)
    digest = ("--representation", "00" * 16)
    for argv, message in (
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
    for component, is_refused in [(GQA, True), (MLA, False)]:
        folder = tmp_path / component.kind.name
        folder.mkdir()
        samples = read_dumps(dumps(folder, component), MODEL)
        if is_refused:
            with pytest.raises(InvalidRequestError, match="give the model and a text"):
                make_asset(AssetKind.kvtc, samples, folder)
        else:
            assert make_asset(AssetKind.kvtc, samples, folder)[1].kind is AssetKind.kvtc


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
