"""Names of a model's weights: which revisions are exact, and what the files of a model hold."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from blake3 import blake3

from kvstore.proto.errors import ModelError

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""Files that hold weights."""

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tekken.json")
"""Files that say what token ids stand for."""

SAMPLE_STRIDE = 1 << 20
"""A sample has the first so many bytes of a file, and SAMPLED of each so many that follow."""

SAMPLED = 64

EPOCH_BYTES = 16
"""Random bytes that name weights of which nobody says what they are."""

_HEXADECIMAL = re.compile(r"(?<![0-9a-z])[0-9a-f]{7,}(?![0-9a-z])")
_COMMIT = re.compile(r"/snapshots/([0-9a-f]{40})(/|$)")
_FULL_DIGITS = 32

_Marks: TypeAlias = tuple[tuple[Path, int, int], ...]


def is_exact(revision: str) -> bool:
    """Return whether *revision* has a commit or a digest in it: seven hexadecimal digits or more.

    Branches and tags move, and dates and numbers of steps are given to more than one model.
    """
    found = _HEXADECIMAL.findall(revision.lower())
    return any(
        len(word) >= _FULL_DIGITS or not (word.isdecimal() or word.isalpha()) for word in found
    )


def weights_name(model: str, stated: str = "", commit: str = "") -> str:
    """Return a name of the weights of *model*, a folder or a name, that changes when they do.

    *stated*: the revision that a user gave. An exact one is taken, of a folder with a sample of
    its files; one that is not is resolved: to the commit in the path of a Hugging Face cache, to
    a digest of all files of another folder, to the *commit* that a hub's model was downloaded at.
    Files are those of ``weights_files``.
    Raises ModelError for weights that none of this names.
    """
    files = weights_files(model)
    if is_exact(stated):
        return f"{stated}+sample={weights_sample(files).hex()}" if files else stated
    in_path = _COMMIT.search(model)
    if in_path:
        found = in_path[1]
    elif files:
        found = f"weights={_whole(_marks(files)).hex()}"
    elif commit:
        found = commit
    else:
        fix = (
            f"give a commit or a digest of the weights: {model!r} is no folder of weights here, "
            "and a branch, a tag or nothing does not say which they are"
        )
        raise ModelError("model_revision", stated, fix)
    return f"{stated}+{found}" if stated else found


def weights_files(model: str) -> list[Path]:
    """Return the files of weights in a folder, and of their settings and tokenizer; else none."""
    folder = Path(model)
    if not model or not folder.is_dir():
        return []
    files = {file for pattern in WEIGHTS for file in folder.glob(pattern)}
    beside = [folder / name for name in ("config.json", *TOKENIZERS)] if files else []
    return sorted(files.union(file for file in beside if file.is_file()))


def weights_sample(files: Sequence[Path]) -> bytes:
    """Return a digest of the names and sizes of *files*, and of some of what each holds."""
    return _sample(_marks(files))


def _marks(files: Sequence[Path]) -> _Marks:
    return tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files)


@lru_cache(maxsize=8)
def _whole(marks: _Marks) -> bytes:
    return files_digest([file for file, *_ in marks])


@lru_cache(maxsize=8)
def _sample(marks: _Marks) -> bytes:
    digest = blake3()
    for file, size, _ in marks:
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb", buffering=0) as opened:
            digest.update(opened.read(SAMPLE_STRIDE))
            for at in range(SAMPLE_STRIDE, size, SAMPLE_STRIDE):
                digest.update(os.pread(opened.fileno(), SAMPLED, at))
    return digest.digest()


def files_digest(files: Sequence[Path]) -> bytes:
    """Return a digest of the names and the bytes of *files*, 32 bytes."""
    digest = blake3(max_threads=blake3.AUTO)
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update_mmap(file)
    return digest.digest()
