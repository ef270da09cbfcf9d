"""Which revisions name weights, and what the files of a folder hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.client.engines.identity import SAMPLE_STRIDE, is_exact, weights_name
from kvstore.proto.errors import ModelError

COMMIT = "8f2c1d4e" * 5


@pytest.mark.parametrize(
    "revision",
    [COMMIT, "8f2c1d4", "8F2C1D4", "sha256:5f1e22ab", "run-7f3a9c21-step-1200", "0" * 40, "c" * 64],
)
def test_a_commit_or_a_digest_says_which_weights_they_are(revision: str) -> None:
    assert is_exact(revision)


@pytest.mark.parametrize(
    "revision",
    ["", "main", "v1.0", "step-1000000", "20260101", "checkpoint-500", "8f2c1d", "decade-facade",
     "release2a3b4c5d6"],
)  # fmt: skip
def test_branches_tags_dates_and_numbers_do_not(revision: str) -> None:
    assert not is_exact(revision)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model-1.safetensors").write_bytes(bytes(4 * SAMPLE_STRIDE))
    (tmp_path / "model" / "model-2.safetensors").write_bytes(b"small")
    return tmp_path / "model"


def written(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(data)


@pytest.mark.parametrize("at", [0, 9, SAMPLE_STRIDE - 1, 2 * SAMPLE_STRIDE + 5])
def test_a_stated_commit_is_beside_a_sample_of_the_files(folder: Path, at: int) -> None:
    before = weights_name(str(folder), COMMIT)
    assert before.startswith(f"{COMMIT}+sample=")
    written(folder / "model-1.safetensors", at, b"x")
    assert weights_name(str(folder), COMMIT) != before


@pytest.mark.parametrize("stated", ["", "main"])
def test_without_one_every_byte_of_the_files_counts(folder: Path, stated: str) -> None:
    before = weights_name(str(folder), stated)
    written(folder / "model-1.safetensors", 3 * SAMPLE_STRIDE + 777_777, b"x")
    assert weights_name(str(folder), stated) != before
    assert before.startswith(stated)


def test_files_that_go_and_other_names_are_other_weights(folder: Path) -> None:
    before = weights_name(str(folder), COMMIT)
    (folder / "model-2.safetensors").rename(folder / "model-3.safetensors")
    renamed = weights_name(str(folder), COMMIT)
    (folder / "model-3.safetensors").unlink()
    assert len({before, renamed, weights_name(str(folder), COMMIT)}) == 3


def test_the_path_of_a_hugging_face_cache_has_the_commit() -> None:
    path = f"/models/hub/models--tiny/snapshots/{COMMIT}"
    assert weights_name(path) == COMMIT
    assert weights_name(path, "main") == f"main+{COMMIT}"
    assert weights_name("org/model", "", COMMIT) == COMMIT


def test_a_folder_without_weights_and_a_name_without_a_commit_are_refused(tmp_path: Path) -> None:
    for model in (str(tmp_path), "org/model"):
        with pytest.raises(ModelError, match="is no folder of weights here"):
            weights_name(model, "main")
