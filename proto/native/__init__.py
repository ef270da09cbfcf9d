"""The compiled loops over payload bytes: C functions that run without the interpreter lock.

Functions take addresses and sizes; the caller has checked shapes, dtypes and order. They are
compiled once for each of ``PATHS``, with identical results; the processor's best is chosen at
run time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

ABI = 1
"""The library's version; equals ``ABI`` in ``paths.c``."""
PATHS = {"avx512": 4, "avx2": 2, "portable": 1}
"""The library's bit for each path, fastest first."""
NO_MEMORY = -2

LIBRARY = Path(__file__).with_name("_loops.so")
_BUILD = f"run python {LIBRARY.with_name('build.py')}"

_P, _I, _I32, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "copy_summed": (None, (_P, ctypes.c_uint64, _I32)),
    "copy_frame": (None, (_P, ctypes.c_uint64, _P, _P, _P, _I32, _I32)),
    "scatter_summed": (None, (_P, ctypes.c_uint64)),
    "read_summed": (ctypes.c_uint64, (_P, ctypes.c_uint64, _I32)),
    "split_bfloat16": (None, (_P, _P, _P, _I)),
    "join_bfloat16": (None, (_P, _P, _P, _I)),
    "split_float16": (None, (_P, _P, _P, _I)),
    "join_float16": (None, (_P, _P, _P, _I)),
    "split_float32": (None, (_P, _P, _P, _P, _P, _I)),
    "join_float32": (None, (_P, _P, _P, _P, _P, _I)),
    "sieve_squeeze": (_I, (_P, _I, _P, _P, _P, _I, _P)),
    "sieve_spread": (_I, (_P, _I, _P, _P, _P, _P, _I)),
    "grouped_bounds": (None, (_P, _P, _P, _I, _I, _I, _I32)),
    "grouped_quantise": (_I, (_P, _P, _P, _P, _P, _I, _I, _I, _I32, _F, _F)),
    "grouped_expand": (None, (_P, _P, _P, _P, _I, _I, _I, _I32, _I32)),
    "rans_encode": (_I, (_P, _P, _P, _P, _P, _P, _I, _I, _I)),
    "rans_decode": (_I, (_P, _P, _P, _P, _P, _P, _I, _I, _I)),
    "kvq_quantise": (_I, (_P, ctypes.c_double, _P, _P, _P)),
    "kvq_dequantise": (_I, (_P, _P, _P)),
    "kvq_quotients": (_I, (_P, _I, _P)),
    "kvq_contexts": (None, (_P, _P, _P, _I, _I)),
    "kvq_add": (None, (_P, _P, _I)),
    "kvq_refine": (_I, (_P, _P)),
    "kvq_move": (None, (_P, _P, _P, _I, _I)),
}


class Loops:
    """The functions of one path, by name: ``loops.kvq_add(...)``. Thread-safe."""

    def __init__(self, path: str) -> None:
        """Raise ImportError if the library is missing or of another build."""
        self.path = path
        for name, (returned, arguments) in _FUNCTIONS.items():
            function = getattr(_library(), f"{name}_{path}", None)
            if function is None:
                raise ImportError(f"{LIBRARY} has no {name}: {_BUILD}")
            function.restype, function.argtypes = returned, arguments
            setattr(self, name, function)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., int]: ...


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    if not LIBRARY.is_file():
        raise ImportError(f"{LIBRARY} is missing: {_BUILD}")
    try:
        library = ctypes.CDLL(str(LIBRARY))
        found = library.kvstore_loops_abi()
    except (OSError, AttributeError) as error:
        raise ImportError(f"{LIBRARY} cannot be used ({error}): {_BUILD}") from None
    if found != ABI:
        raise ImportError(f"{LIBRARY} is of another version ({found}, not {ABI}): {_BUILD}")
    return library


@lru_cache(maxsize=1)
def paths() -> tuple[str, ...]:
    """Return the paths that this processor supports, fastest first."""
    bits = int(_library().kvstore_loops_paths())
    return tuple(path for path, bit in PATHS.items() if bits & bit)


@lru_cache(maxsize=len(PATHS) + 1)
def loops(path: str | None = None) -> Loops:
    """Return the functions of *path*; None: of the fastest."""
    return Loops(path or paths()[0])


def done(found: int) -> int:
    """Return a function's result *found*. Raises MemoryError for NO_MEMORY."""
    if found == NO_MEMORY:
        raise MemoryError("no memory for a loop's scratch")
    return found
