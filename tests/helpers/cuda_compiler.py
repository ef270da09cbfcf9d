"""CUDA's run-time compiler, from its wheel: it needs neither a GPU nor a driver."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ARCHITECTURES = ["sm_75", "sm_80", "sm_90", "sm_100"]


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of one kernel, a thread and a block."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


def _library() -> ctypes.CDLL:
    found = importlib.util.find_spec("nvidia.cuda_nvrtc")
    assert found is not None, "install nvidia-cuda-nvrtc-cu12"
    (folder,) = found.submodule_search_locations or []
    return ctypes.CDLL(str(Path(folder) / "lib" / "libnvrtc.so.12"))


def compile_cuda(sources: Sequence[Path], architecture: str, *flags: str) -> tuple[int, str, bytes]:
    """Compile *sources*, concatenated; return status (0: success), log and binary."""
    compiler = _library()
    program = ctypes.c_void_p()
    text = b"".join(source.read_bytes() for source in sources)
    name = sources[-1].name.encode()
    assert not compiler.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None)
    every = [f"--gpu-architecture={architecture}", *flags]
    given = (ctypes.c_char_p * len(every))(*(flag.encode() for flag in every))
    status = compiler.nvrtcCompileProgram(program, len(every), given)
    size = ctypes.c_size_t()
    compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    compiler.nvrtcGetProgramLog(program, log)
    binary = ctypes.create_string_buffer(0)
    if not status:
        compiler.nvrtcGetCUBINSize(program, ctypes.byref(size))
        binary = ctypes.create_string_buffer(size.value)
        assert not compiler.nvrtcGetCUBIN(program, binary)
    assert not compiler.nvrtcDestroyProgram(ctypes.byref(program))
    return status, log.value.decode(), binary.raw


def resources(sources: Sequence[Path], architecture: str, *flags: str) -> dict[str, Resources]:
    """Return the resources of each kernel of *sources*, as the assembler reports them."""
    status, log, _ = compile_cuda(sources, architecture, *flags, "--ptxas-options=-v")
    assert not status, log
    found = {}
    for name, text in re.findall(r"Compiling entry function '(\w+)'(.*?)Compile time", log, re.S):
        numbers = [
            int(match[1]) if (match := re.search(pattern, text)) else 0
            for pattern in (
                r"Used (\d+) registers",
                r"(\d+) bytes spill stores",
                r"(\d+) bytes smem",
            )
        ]
        found[name] = Resources(*numbers)
    return found
