"""Other codecs on the same tensors: LMCache's and ZipNN, each in an environment of its own.

Tensors go to them and come back in ``.npy`` files; what they read is compared by its digest
with what ours read. Times are processor seconds, taken inside the opponent's process, which
keeps to one core. KIVI's layout and AIBrix's plain zstd are written here after what is published.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from bench.codecs.kv import Bits, Floats, bits_per_value, digest, to_bits, to_floats
from bench.lib.processes import Asked, asking, make_venv
from bench.peers.lmcache import QUIET, TORCH

LMCACHE_CLIENT = Path(__file__).parent / "lmcache_client.py"
ZIPNN_CLIENT = Path(__file__).parent / "zipnn_client.py"


@dataclass(frozen=True, slots=True)
class Coded:
    """What a codec made of some tensors: its bits per value, all included, and what came back."""

    codec: str
    setting: str
    bits_per_value: float
    decoded: Bits


@dataclass(frozen=True, slots=True)
class Speed:
    """Processor seconds of one encode and one decode, and the bytes in between."""

    encode_s: float
    decode_s: float
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class TensorFile:
    """Tensors where an opponent reads them."""

    path: Path
    bits: NDArray[np.uint16]
    digest: int

    @classmethod
    def write(cls, path: Path, bits: NDArray[np.uint16]) -> TensorFile:
        """Write *bits* to *path*, an ``.npy`` file."""
        np.save(path, bits)
        return cls(path, bits, digest(bits))

    def check(self, answer: dict[str, float]) -> None:
        """Raise ValueError unless the opponent read the same."""
        if answer["digest"] != self.digest:
            raise ValueError(f"{self.path.name}: the opponent read other tensors")


Table = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Bins:
    """CacheGen's levels of quantisation, a number for each layer of K and of V."""

    name: str
    key_bins: tuple[int, ...]
    value_bins: tuple[int, ...]

    @classmethod
    def spread(cls, name: str, layers: int, keys: Table, values: Table) -> Bins:
        """Return the bins of 32-layer tables on *layers*: pairs of (first layer of 32, bins)."""
        tables = [
            tuple(
                next(bins for start, bins in reversed(table) if 32 * layer >= start * layers)
                for layer in range(layers)
            )
            for table in (keys, values)
        ]
        return cls(name, *tables)


def cachegen_levels(layers: int) -> list[Bins]:
    """Return the three levels of CacheGen's artifact (``QUANT_LEVEL``), on *layers* layers."""
    return [
        Bins.spread("level 1", layers, [(0, 16), (20, 12)], [(0, 16), (2, 12)]),
        Bins.spread("level 2", layers, [(0, 32), (10, 16)], [(0, 32), (2, 16)]),
        Bins.spread("level 3", layers, [(0, 32)], [(0, 32)]),
    ]


@dataclass(frozen=True, slots=True)
class LMCacheCodecs:
    """LMCache's serializers in a running client, for *model*, a folder with its config."""

    asked: Asked
    folder: Path
    model: Path

    def knows(self, layers: int) -> bool:
        """Whether ``model`` has that many layers, so that LMCache's own bins fit."""
        config = json.loads((self.model / "config.json").read_text())
        return bool(config["num_hidden_layers"] == layers)

    def cachegen(self, tensors: TensorFile, bins: Bins | None = None) -> Coded:
        """CacheGen as released, with the bins LMCache has for the model, or *bins*."""
        setting = "own bins" if bins is None else bins.name
        return self._coded("cachegen", setting, tensors, self._bins(tensors, bins))

    def fp8(self, tensors: TensorFile) -> Coded:
        """The cast of its fp8 serializer."""
        return self._coded("fp8", "bare cast", tensors, {})

    def turboquant(self, tensors: TensorFile, preset: str, head_dim: int) -> Coded:
        """A preset of TurboQuant on heads of *head_dim*, no layer left out."""
        request = {"preset": f"turboquant_{preset}", "head_dim": head_dim}
        return self._coded("turboquant", f"{preset} d{head_dim}", tensors, request)

    def time_cachegen(self, tensors: TensorFile, bins: Bins) -> Speed:
        """Return what one encode and one decode of the only window took, in one thread."""
        answer = self._ask("time_cachegen", tensors, self._bins(tensors, bins))
        return speed_of(answer)

    def _bins(self, tensors: TensorFile, bins: Bins | None) -> dict[str, Any]:
        request = {"tokens": tensors.bits.shape[3], "model": str(self.model)}
        if bins is None:
            return request
        return {**request, "key_bins": bins.key_bins, "value_bins": bins.value_bins}

    def _coded(
        self, codec: str, setting: str, tensors: TensorFile, request: dict[str, Any]
    ) -> Coded:
        decoded = self.folder / "decoded.npy"
        answer = self._ask(codec, tensors, {**request, "decoded": str(decoded)})
        bits = bits_per_value(int(answer["stored_bytes"]), tensors.bits.size)
        found = np.load(decoded, allow_pickle=False)
        return Coded(f"lmcache {codec}", setting, bits, found)

    def _ask(self, do: str, tensors: TensorFile, request: dict[str, Any]) -> dict[str, float]:
        answer = self.asked.ask(json.dumps({"do": do, "tensors": str(tensors.path), **request}))
        tensors.check(answer)
        return answer


def speed_of(answer: dict[str, float]) -> Speed:
    """Return what an opponent's *answer* says."""
    return Speed(answer["encode_s"], answer["decode_s"], int(answer["stored_bytes"]))


@contextmanager
def lmcache_codecs(venvs: Path, folder: Path, model: Path) -> Iterator[LMCacheCodecs]:
    """Run LMCache's codecs until the block ends. Raises PeerSkippedError."""
    python = make_venv(venvs, "lmcache", TORCH)
    command = [*QUIET, str(python), "-P", str(LMCACHE_CLIENT)]
    with asking(command, folder / "lmcache-codecs.log") as asked:
        yield LMCacheCodecs(asked, folder, model)


@dataclass(frozen=True, slots=True)
class LosslessCoder:
    """ZipNN in a running client."""

    asked: Asked

    def time(self, tensors: TensorFile) -> Speed:
        """Return what one encode and one decode of all of it took."""
        answer = self.asked.ask(str(tensors.path))
        tensors.check(answer)
        return speed_of(answer)


@contextmanager
def zipnn_coder(venvs: Path, folder: Path) -> Iterator[LosslessCoder]:
    """Run ZipNN until the block ends. Raises PeerSkippedError."""
    python = make_venv(venvs, "zipnn", TORCH)
    with asking([python, "-P", ZIPNN_CLIENT], folder / "zipnn.log") as asked:
        yield LosslessCoder(asked)


AIBRIX_LEVEL = 3
"""What zstd takes when nobody says."""


def kivi(bits: Bits, code_bits: int, group: int) -> Coded:
    """Quantise as KIVI does (Liu et al., ICML 2024, section 3.2).

    Keys per channel over *group* tokens, values per token over *group* channels, each group by
    its smallest value and a step, both float16. Channels of all heads stand side by side, as
    this model's heads are narrower than a group. No recent tokens are left as they are: a
    stored chunk has none.
    """
    windows, layers, _, tokens = bits.shape[:4]
    numbers = to_floats(bits)
    keys = numbers[:, :, 0].reshape(windows, layers, tokens // group, group, -1)
    values = numbers[:, :, 1].reshape(windows, layers, tokens, -1, group)
    halves = [(keys, 3), (values, 4)]
    decoded = [
        _affine(part, axis, code_bits).reshape(numbers[:, :, 0].shape) for part, axis in halves
    ]
    stored = [part.size * code_bits // 8 + part.size // group * 4 for part, _ in halves]
    return Coded(
        "kivi", f"{code_bits} bit g{group}", bits_per_value(sum(stored), bits.size),
        to_bits(np.stack(decoded, 2)),
    )  # fmt: skip


def _affine(numbers: Floats, axis: int, code_bits: int) -> Floats:
    """Return *numbers* after codes of *code_bits* between the ends of each group along *axis*."""
    most = 2**code_bits - 1
    low = numbers.min(axis, keepdims=True).astype(np.float16).astype(np.float32)
    step = (numbers.max(axis, keepdims=True) - low) / np.float32(most)
    step = np.maximum(step.astype(np.float16).astype(np.float32), np.float32(1e-7))
    codes = np.clip(np.rint((numbers - low) / step), 0, most)
    restored: Floats = codes * step + low
    return restored


def aibrix_time(bits: NDArray[Any]) -> Speed:
    """Return what zstd takes for the bytes of *bits* as they are, as AIBrix's compressor does."""
    data = np.ascontiguousarray(bits).view(np.uint8).reshape(-1)
    started = time.process_time()
    stored = zstandard.ZstdCompressor(AIBRIX_LEVEL).compress(data.data)
    encoded = time.process_time()
    found = zstandard.ZstdDecompressor().decompress(stored)
    decoded = time.process_time()
    if found != data.tobytes():
        raise ValueError("zstd: came back changed")
    return Speed(encoded - started, decoded - encoded, len(stored))
