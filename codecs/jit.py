"""How loops over bytes are compiled: by numba, with no lock held and nothing kept in files.

Only modules that are loaded when the extra ``cpu-fast`` is there import this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba import types

Loop = TypeVar("Loop", bound=Callable[..., Any])

_OPTIONS: Any = {"nogil": True, "cache": False, "fastmath": False}
"""numba's cache files are pickles, which nothing here reads; floats stay IEEE's."""

u8, u16, u32, u64, i64 = types.uint8, types.uint16, types.uint32, types.uint64, types.int64
void = types.void


def read_only(dtype: Any, ndim: int = 1) -> Any:
    """Return numba's type of a C-ordered array that is only read, at any address."""
    return types.Array(dtype, ndim, "C", readonly=True, aligned=False)


def written(dtype: Any, ndim: int = 1) -> Any:
    """Return numba's type of a C-ordered array that is written, at any address."""
    return types.Array(dtype, ndim, "C", aligned=False)


def compiled(returned: Any, *arguments: Any) -> Callable[[Loop], Loop]:
    """Return the decorator for a loop of that signature, compiled at once."""
    decorate: Callable[[Loop], Loop] = numba.njit(returned(*arguments), **_OPTIONS)
    return decorate


def inner(loop: Loop) -> Loop:
    """Mark what compiled loops call: compiled with them, for the types they have."""
    found: Loop = numba.njit(**_OPTIONS)(loop)
    return found
