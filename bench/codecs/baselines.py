"""Other codecs on the same tensors: LMCache's and ZipNN, each in an environment of its own.

Tensors go to them and come back in ``.npy`` files; what they read is compared by its digest
with what ours read. Times are processor seconds, taken inside the opponent's process, which
keeps to one core. KIVI's layout and AIBrix's plain zstd are written here after what is published.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from bench.codecs.kv import Bits, Floats, bits_per_value, digest, to_bits, to_floats
from bench.lib.processes import Command, LineProcess, PeerSkippedError, line_process, make_venv
from bench.lib.traces import TINYLM
from bench.peers.lmcache import QUIET, TORCH


@dataclass(frozen=True, slots=True)
class Coded:
    """What a codec made of some tensors: its bits per value, all included, and what came back."""

    codec: str
    setting: str
    bits_per_value: float
    decoded: Bits


class Speed(NamedTuple):
    """Processor seconds of one encode and one decode."""

    encode_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class TensorFile:
    path: Path
    bits: NDArray[np.uint16]
    digest: int

    @classmethod
    def write(cls, folder: Path, bits: NDArray[np.uint16]) -> TensorFile:
        """Write *bits* to an ``.npy`` file that their digest names."""
        path = folder / f"{digest(bits):x}.npy"
        np.save(path, bits)
        return cls(path, bits, digest(bits))

    def check(self, answer: dict[str, float]) -> None:
        if answer["digest"] != self.digest:
            raise ValueError(f"{self.path.name}: the opponent read other tensors")


TINYLM_LAYERS: int = json.loads((TINYLM / "config.json").read_text())["num_hidden_layers"]


@dataclass(frozen=True, slots=True)
class LMCacheCodecs:
    """LMCache's serializers in a running client, told that they serve tinylm."""

    program: LineProcess
    folder: Path

    def coded(self, codec: str, setting: str, tensors: TensorFile, **request: Any) -> Coded:
        decoded = self.folder / "decoded.npy"
        answer = self._ask(codec, tensors, decoded=str(decoded), **request)
        bits = bits_per_value(int(answer["stored_bytes"]), tensors.bits.size)
        found = np.load(decoded, allow_pickle=False)
        return Coded(f"lmcache {codec}", setting, bits, found)

    def time_cachegen(self, tensors: TensorFile) -> Speed:
        """Return what one encode and one decode of the only window took, in one thread.

        With 32 bins in all layers, the finest level of its artifact.
        """
        bins = [32] * tensors.bits.shape[1]
        answer = self._ask("time_cachegen", tensors, bins=bins)
        return Speed(answer["encode_s"], answer["decode_s"])

    def _ask(self, do: str, tensors: TensorFile, **request: Any) -> dict[str, float]:
        named = {"do": do, "tensors": str(tensors.path), "tokens": tensors.bits.shape[3]}
        answer = self.program.request(json.dumps({**named, "model": str(TINYLM), **request}))
        tensors.check(answer)
        return answer


@dataclass(frozen=True, slots=True)
class Opponents:
    """LMCache's codecs and what times ZipNN, each running, or why it cannot be had."""

    folder: Path
    lmcache: LMCacheCodecs | str
    zipnn: Callable[[TensorFile], Speed] | str

    @classmethod
    @contextmanager
    def running(cls, venvs: Path, folder: Path) -> Iterator[Opponents]:
        with ExitStack() as stack:

            def start(name: str) -> LineProcess | str:
                try:
                    client = Path(__file__).with_name(f"{name}_client.py")
                    command: Command = [*QUIET, make_venv(venvs, name, TORCH), "-P", client]
                    return stack.enter_context(line_process(command, folder / f"{name}.log"))
                except PeerSkippedError as error:
                    return str(error)

            lmcache, zipnn = start("lmcache"), start("zipnn")
            yield cls(
                folder,
                lmcache if isinstance(lmcache, str) else LMCacheCodecs(lmcache, folder),
                zipnn if isinstance(zipnn, str) else partial(_zipnn_time, zipnn),
            )


def _zipnn_time(program: LineProcess, tensors: TensorFile) -> Speed:
    answer = program.request(str(tensors.path))
    tensors.check(answer)
    return Speed(answer["encode_s"], answer["decode_s"])


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
    return Speed(encoded - started, decoded - encoded)
