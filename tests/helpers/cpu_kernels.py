"""The CUDA kernels, compiled for the CPU by g++ and run thread by thread: the same source.

Threads of a block that synchronize (ballots, shuffles, barriers) are coroutines, resumed in turn.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from kvstore.codecs.frame_kernels import SOURCE, THREADS, Argument, Launch

_NAMES = ["sum_blocks", "chain_blocks", "finish_segments", "scatter_and_sum", "read_words"]
_NAMES += [f"{way}_{size}" for way in ("scatter", "gather") for size in (1, 2, 4, 8, 16)]

_SHIM = r"""
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
struct Index { unsigned x, y; };
static Index blockIdx, threadIdx, blockDim, gridDim;
static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
RUNNER
#include "SOURCE"

template <class A> static A as(unsigned long long value) { return (A)value; }

template <class... A, size_t... I>
static int run(void (*kernel)(A...), const unsigned long long* given, std::index_sequence<I...>) {
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
            if (int wrong = run_block([&] { kernel(as<A>(given[I])...); })) return wrong;
    return 0;
}

template <class... A>
static int launch(void (*kernel)(A...), const unsigned long long* given, unsigned count) {
    if (count != sizeof...(A)) return 2;
    return run(kernel, given, std::index_sequence_for<A...>{});
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

_ONE_BY_ONE = r"""
template <class F> static int run_block(F call) {
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) call();
    return 0;
}
"""

_IN_STEP = r"""
#include <csetjmp>
#include <functional>
#include <memory>
#include <ucontext.h>
#include <vector>

struct Group { unsigned arrived = 0, generation = 0; unsigned long long slots[2][32] = {}; };
struct Thread {
    ucontext_t start; jmp_buf at; bool is_started = false, is_done = false;
    std::unique_ptr<char[]> stack{new char[65536]};
};
static std::vector<Thread> threads;
static std::vector<Group> warps;
static Group block;
static jmp_buf scheduler;
static unsigned long progress;
static std::function<void()> body;

static void enter() {
    body();
    threads[threadIdx.x].is_done = true;
    ++progress;
    _longjmp(scheduler, 1);
}

static void meet(Group& group, unsigned size) {
    const unsigned mine = group.generation, self = threadIdx.x;
    if (++group.arrived == size) {
        group.arrived = 0;
        ++group.generation;
        ++progress;
        return;
    }
    while (group.generation == mine)
        if (!_setjmp(threads[self].at)) _longjmp(scheduler, 1);
}

template <class F> static int run_block(F call) {
    body = call;
    threads = std::vector<Thread>(blockDim.x);
    warps = std::vector<Group>(blockDim.x / 32);
    block = Group();
    for (bool is_live = true; is_live;) {
        is_live = false;
        const unsigned long before = progress;
        for (volatile unsigned i = 0; i < blockDim.x; ++i) {
            Thread& thread = threads[i];
            if (thread.is_done) continue;
            is_live = true;
            threadIdx.x = i;
            if (_setjmp(scheduler)) continue;
            if (thread.is_started) _longjmp(thread.at, 1);
            thread.is_started = true;
            getcontext(&thread.start);
            thread.start.uc_stack.ss_sp = thread.stack.get();
            thread.start.uc_stack.ss_size = 65536;
            makecontext(&thread.start, enter, 0);
            setcontext(&thread.start);
        }
        if (is_live && progress == before) return 3;  // deadlock: no thread advances
    }
    return 0;
}

static const unsigned long long* exchange(unsigned long long value) {
    Group& warp = warps[threadIdx.x / 32];
    unsigned long long* slots = warp.slots[warp.generation & 1];
    slots[threadIdx.x % 32] = value;
    meet(warp, 32);
    return slots;
}
static void __syncthreads() { meet(block, blockDim.x); }
static unsigned __ballot_sync(unsigned, bool value) {
    const unsigned long long* slots = exchange(value);
    unsigned all = 0;
    for (unsigned i = 0; i < 32; ++i) all |= (unsigned)slots[i] << i;
    return all;
}
template <class T> static T __shfl_sync(unsigned, T value, unsigned lane) {
    return (T)exchange(value)[lane % 32];
}
template <class T> static T __shfl_up_sync(unsigned, T value, unsigned distance) {
    const unsigned lane = threadIdx.x % 32;
    return (T)exchange(value)[lane >= distance ? lane - distance : lane];
}
static unsigned atomicOr(unsigned* place, unsigned value) {
    const unsigned before = *place;
    *place |= value;
    return before;
}
static unsigned __popc(unsigned value) { return __builtin_popcount(value); }
static float __uint_as_float(unsigned bits) { float out; memcpy(&out, &bits, 4); return out; }
static unsigned __float_as_uint(float value) { unsigned out; memcpy(&out, &value, 4); return out; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static int __float2int_rn(float value) { return (int)lrintf(value); }
template <class T> static T min(T a, T b) { return b < a ? b : a; }
"""


def compile_kernels(
    folder: Path, sources: Sequence[Path] = (SOURCE,), names: Sequence[str] = _NAMES,
    threads: int = THREADS,
) -> Launch:  # fmt: skip
    """Compile *sources*, concatenated, into *folder*; return a function that runs their kernels."""
    cases = [f'if (!strcmp(name, "{n}")) return launch({n}, given, count);' for n in names]
    source = "".join(each.read_text() for each in sources)
    runner = _IN_STEP if re.search(r"_sync|__syncthreads", source) else _ONE_BY_ONE
    (folder / "kernels.cu").write_text(source)
    text = _SHIM.replace("RUNNER", runner).replace("SOURCE", str(folder / "kernels.cu"))
    (folder / "kernels.cpp").write_text(text.replace("CASES", "\n    ".join(cases)))
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-g", "-shared", "-fPIC", "-fsanitize=undefined",
         "-fno-sanitize-recover", "-static-libubsan", "-ffp-contract=off", "-Wall",
         "-Wno-unknown-pragmas", "-Wno-unused-function", "-o", folder / "kernels.so",
         folder / "kernels.cpp"],
        check=True,
    )  # fmt: skip
    library = ctypes.CDLL(str(folder / "kernels.so"))

    def launch(name: str, grid: tuple[int, int], arguments: Sequence[Argument]) -> None:
        given = [a.data_ptr() if isinstance(a, torch.Tensor) else int(a) for a in arguments]
        array = (ctypes.c_uint64 * len(given))(*given)
        wrong = library.launch_kernel(name.encode(), *grid, threads, array, len(given))
        assert wrong == 0, (name, wrong)

    return launch


def guarded(size_bytes: int) -> torch.Tensor:
    """Return bytes between protected pages: an access past the end crashes."""
    page = mmap.PAGESIZE
    rounded = -(-size_bytes // page) * page
    memory = mmap.mmap(-1, rounded + 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for at in (start, start + page + rounded):
        assert not protect(ctypes.c_void_p(at), ctypes.c_size_t(page), 0), ctypes.get_errno()
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[page + rounded - size_bytes : page + rounded]
