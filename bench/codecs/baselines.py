"""Other codecs on the same tensors: LMCache's and ZipNN, each in its own environment.

Tensors are passed in ``.npy`` files; digests check that both sides read the same. Times are
processor seconds measured inside the baseline's process, which is pinned to one core. KIVI's layout
and AIBrix's plain zstd are implemented here as published.
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
    """The result of a codec: bits per value, headers included, and the decoded tensors."""

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
        """Write *bits* to an ``.npy`` file named by their digest."""
        path = folder / f"{digest(bits):x}.npy"
        np.save(path, bits)
        return cls(path, bits, digest(bits))

    def check(self, reply: dict[str, float]) -> None:
        if reply["digest"] != self.digest:
            raise ValueError(f"{self.path.name}: the baseline read other tensors")


TINYLM_LAYERS: int = json.loads((TINYLM / "config.json").read_text())["num_hidden_layers"]


@dataclass(frozen=True, slots=True)
class LMCacheCodecs:
    """LMCache's serializers in a running client, configured for tinylm."""

    program: LineProcess
    folder: Path

    def coded(self, codec: str, setting: str, tensors: TensorFile, **request: Any) -> Coded:
        decoded = self.folder / "decoded.npy"
        reply = self._request(codec, tensors, decoded=str(decoded), **request)
        bits = bits_per_value(int(reply["stored_bytes"]), tensors.bits.size)
        found = np.load(decoded, allow_pickle=False)
        return Coded(f"lmcache {codec}", setting, bits, found)

    def time_cachegen(self, tensors: TensorFile) -> Speed:
        """Time one encode and one decode of the only window, in one thread.

        With 32 bins in all layers, the finest level of its artifact.
        """
        bins = [32] * tensors.bits.shape[1]
        reply = self._request("time_cachegen", tensors, bins=bins)
        return Speed(reply["encode_s"], reply["decode_s"])

    def _request(self, do: str, tensors: TensorFile, **request: Any) -> dict[str, float]:
        fields = {"do": do, "tensors": str(tensors.path), "tokens": tensors.bits.shape[3]}
        reply = self.program.request(json.dumps({**fields, "model": str(TINYLM), **request}))
        tensors.check(reply)
        return reply


@dataclass(frozen=True, slots=True)
class Baselines:
    """LMCache's codecs and ZipNN, each running, or the reason why not."""

    folder: Path
    lmcache: LMCacheCodecs | str
    zipnn: Callable[[TensorFile], Speed] | str

    @classmethod
    @contextmanager
    def running(cls, venvs: Path, folder: Path) -> Iterator[Baselines]:
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
    reply = program.request(str(tensors.path))
    tensors.check(reply)
    return Speed(reply["encode_s"], reply["decode_s"])


AIBRIX_LEVEL = 3
"""zstd's default."""


def kivi(bits: Bits, code_bits: int, group: int) -> Coded:
    """Quantise as KIVI does (Liu et al., ICML 2024, section 3.2).

    Keys per channel over *group* tokens, values per token over *group* channels, each group by
    its smallest value and a step, both float16. Channels of all heads are adjacent, as this
    model's heads are narrower than a group. A stored chunk has no recent tokens to keep exact.
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
    """Return *numbers* quantised to *code_bits* in the range of each group along *axis*."""
    most = 2**code_bits - 1
    low = numbers.min(axis, keepdims=True).astype(np.float16).astype(np.float32)
    step = (numbers.max(axis, keepdims=True) - low) / np.float32(most)
    step = np.maximum(step.astype(np.float16).astype(np.float32), np.float32(1e-7))
    codes = np.clip(np.rint((numbers - low) / step), 0, most)
    restored: Floats = codes * step + low
    return restored


def aibrix_time(bits: NDArray[Any]) -> Speed:
    """Time zstd on the plain bytes of *bits*, as in AIBrix's compressor."""
    data = np.ascontiguousarray(bits).view(np.uint8).reshape(-1)
    started = time.process_time()
    stored = zstandard.ZstdCompressor(AIBRIX_LEVEL).compress(data.data)
    encoded = time.process_time()
    found = zstandard.ZstdDecompressor().decompress(stored)
    decoded = time.process_time()
    if found != data.tobytes():
        raise ValueError("zstd: wrong bytes")
    return Speed(encoded - started, decoded - encoded)
