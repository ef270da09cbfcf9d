"""Stand-ins for packages that matter on a GPU alone: importable, and of no use."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any


def _nothing(*args: Any, **_: Any) -> Any:
    """Be a decorator, or make one."""
    return args[0] if args and callable(args[0]) else _nothing


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else _nothing


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> _Module:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = "0"  # type: ignore[attr-defined]


def import_sglang() -> None:
    """Make SGLang importable on a machine without a GPU.

    What torch and transformers ask of the same packages is asked before, and answered truly.
    """
    for asks_for_triton in ("torch._dynamo", "torch._inductor.runtime.triton_compat"):
        importlib.import_module(asks_for_triton)
    import transformers.image_utils
    import transformers.utils.import_utils

    transformers.utils.import_utils.is_torchvision_available()
    sys.meta_path.insert(0, _Finder(("torchvision", "triton")))
