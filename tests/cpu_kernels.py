"""The CUDA kernels, compiled for the CPU by g++ and run thread by thread: the same source."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from kvstore.codecs.frame_kernels import SOURCE, THREADS, Argument, Launch

_NAMES = ["sum_blocks", "chain_blocks", "finish_segments"]
_NAMES += [f"{way}_{size}" for way in ("scatter", "gather") for size in (1, 2, 4, 8, 16)]

_SHIM = r"""
#include <cstring>
#include <string>
#include <utility>
#define __device__
#define __global__
struct Index { unsigned x, y; };
static Index blockIdx, threadIdx, blockDim, gridDim;
static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
#include "SOURCE"

template <class A> static A as(unsigned long long value) { return (A)value; }

template <class... A, size_t... I>
static void run(void (*kernel)(A...), const unsigned long long* given, std::index_sequence<I...>) {
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
            for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x)
                kernel(as<A>(given[I])...);
}

template <class... A>
static int launch(void (*kernel)(A...), const unsigned long long* given, unsigned count) {
    if (count != sizeof...(A)) return 2;
    run(kernel, given, std::index_sequence_for<A...>{});
    return 0;
}

extern "C" int launch_kernel(
    const char* name, unsigned x, unsigned y, unsigned threads,
    const unsigned long long* given, unsigned count
) {
    gridDim = {x, y};
    blockDim = {threads, 1};
    CASES
    return 1;
}
"""


def compile_kernels(folder: Path) -> Launch:
    """Compile the source of the kernels into *folder* and return how to run them."""
    cases = [f'if (!strcmp(name, "{n}")) return launch({n}, given, count);' for n in _NAMES]
    text = _SHIM.replace("SOURCE", str(SOURCE)).replace("CASES", "\n    ".join(cases))
    (folder / "kernels.cpp").write_text(text)
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-g", "-shared", "-fPIC", "-fsanitize=undefined",
         "-fno-sanitize-recover", "-static-libubsan", "-Wall", "-Wno-unknown-pragmas",
         "-o", folder / "kernels.so", folder / "kernels.cpp"],
        check=True,
    )  # fmt: skip
    library = ctypes.CDLL(str(folder / "kernels.so"))

    def launch(name: str, grid: tuple[int, int], arguments: Sequence[Argument]) -> None:
        given = [a.data_ptr() if isinstance(a, torch.Tensor) else int(a) for a in arguments]
        array = (ctypes.c_uint64 * len(given))(*given)
        assert library.launch_kernel(name.encode(), *grid, THREADS, array, len(given)) == 0, name

    return launch
