"""Makes model assets: from a model and a text, or from dumps of its KV."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from numpy.typing import NDArray

from kvstore.cli.kv_dumps import Samples, read_dumps
from kvstore.codecs.assets import (
    SUFFIX,
    Asset,
    AssetKind,
    asset_name,
    pack_asset,
    parse_asset,
    read_asset,
)
from kvstore.codecs.cachegen_profile import CachegenProfile
from kvstore.codecs.kvqs_profile import KvqsProfile
from kvstore.codecs.kvt_profile import KvtProfile
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import DIGEST_BYTES, MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS

Tables: TypeAlias = Mapping[str, NDArray[Any]]

_NEEDS = ("torch", "transformers")


def check_extras(model: Path) -> None:
    """Raise InvalidRequestError where what runs *model* is not installed."""
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        fix = f"needs {' and '.join(missing)}: pip install 'kvstore-server[transformers]'"
        raise InvalidRequestError("model", str(model), fix)


def read_text(option: str, path: Path) -> str:
    """Return the text in the file *path* that *option* names. Raises InvalidRequestError."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(option, str(path), str(error)) from None


@dataclass(frozen=True, slots=True)
class Calibration:
    """What to make an asset from. ``text`` belongs to a model, ``representation`` to dumps.

    ``sources`` is a folder of a transformers model or files of KV; at most ``tokens`` tokens
    of the text are used.
    """

    kind: str
    sources: Sequence[Path]
    folder: Path
    text: Path | None = None
    representation: str | None = None
    tokens: int = 8192
    chunk_tokens: int = 256

    def __post_init__(self) -> None:
        if self.kind not in _MAKERS:
            raise InvalidRequestError("kind", self.kind, f"use one of {', '.join(_MAKERS)}")
        if not MIN_CHUNK_TOKENS <= self.chunk_tokens <= MAX_CHUNK_TOKENS:
            fix = f"{MIN_CHUNK_TOKENS} to {MAX_CHUNK_TOKENS}"
            raise InvalidRequestError("chunk_tokens", self.chunk_tokens, fix)
        if self.tokens < self.chunk_tokens:
            raise InvalidRequestError("tokens", self.tokens, "give at least a chunk's")

    def samples(self) -> Samples:
        """Read or compute the samples. Raises InvalidRequestError that says what is missing."""
        first = self.sources[0]
        if not first.is_dir():
            return read_dumps(self.sources, self._digest(), self.chunk_tokens)
        if len(self.sources) > 1:
            raise InvalidRequestError("sources", len(self.sources), "give one model, or dumps")
        if self.text is None:
            raise InvalidRequestError("text", None, "a model needs a text to read")
        check_extras(first)
        text = read_text("text", self.text)
        from kvstore.cli.model_samples import run_model

        return run_model(first, text, self.tokens, self.chunk_tokens)

    def _digest(self) -> bytes:
        """Return the representation digest that dumps cannot tell."""
        text = self.representation or ""
        try:
            digest = bytes.fromhex(text)
        except ValueError:
            digest = b""
        if len(digest) != DIGEST_BYTES:
            fix = f"dumps need the model's representation digest, {2 * DIGEST_BYTES} hex digits"
            raise InvalidRequestError("representation", self.representation, fix)
        return digest


def calibrate(calibration: Calibration) -> tuple[Path, Asset]:
    """Make the asset, write it into the folder under the next edition, return both."""
    samples = calibration.samples()
    tables = _MAKERS[calibration.kind](samples)
    kind = AssetKind[calibration.kind]
    folder = calibration.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        edition = 1 + newest_edition(folder, kind, samples.representation)
        data = pack_asset(kind, samples.representation, edition, tables)
        asset = parse_asset(data)
        path = folder / asset_name(asset)
        _write(path, data)
    except OSError as error:
        raise InvalidRequestError("out", str(folder), str(error)) from None
    return path, asset


def newest_edition(folder: Path, kind: AssetKind, representation: bytes) -> int:
    """Return the highest edition of such assets in *folder*, 0 when there is none.

    Raises InvalidRequestError for a file there that is damaged.
    """
    assets = map(read_asset, sorted(folder.glob(f"*{SUFFIX}")))
    mine = (a.edition for a in assets if (a.kind, a.representation) == (kind, representation))
    return max(mine, default=0)


def _write(path: Path, data: bytes) -> None:
    """Write *data* so that a reader of the folder sees all of it or nothing."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(data)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _cachegen(samples: Samples) -> Tables:
    profile = CachegenProfile([samples.component], samples.depths)
    for sample in samples.chunks:
        profile.measure(sample.tensors)
    for sample in samples.chunks:
        profile.count(sample.tensors)
    return profile.tables()


def _kvt(samples: Samples) -> Tables:
    return _of_turned(KvtProfile, samples)


def _kvqs(samples: Samples) -> Tables:
    return _of_turned(KvqsProfile, samples)


def _of_turned(kind: type[KvtProfile | KvqsProfile], samples: Samples) -> Tables:
    if samples.rope is None and samples.component.parts == 2:
        fix = "it turns keys back, and dumps do not say by what: give the model and a text"
        raise InvalidRequestError("sources", "dumps", fix)
    profile = kind([samples.component], samples.rope)
    for sample in samples.chunks:
        profile.add(sample.tensors, sample.position)
    return profile.tables()


_MAKERS: dict[str, Callable[[Samples], Tables]] = {
    "cachegen": _cachegen,
    "kvt": _kvt,
    "kvqs": _kvqs,
}
