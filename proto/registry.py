"""A name-to-class table that loads its entries on first use."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Registry(Generic[T]):
    """Classes of one kind by name; modules with heavy imports load only when named."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._paths: dict[str, str] = {}

    def register(self, name: str, path: str) -> None:
        """Add ``path`` (``"package.module:Class"``) under *name*. Raises ValueError if taken."""
        if name in self._paths:
            raise ValueError(f"{self._kind} {name!r} is already registered")
        self._paths[name] = path

    def load(self, name: str) -> type[T]:
        """Import and return the class registered under *name*. Raises LookupError."""
        try:
            module, _, attribute = self._paths[name].partition(":")
        except KeyError:
            known = ", ".join(self)
            raise LookupError(f"unknown {self._kind} {name!r}; known: {known}") from None
        return cast(type[T], getattr(import_module(module), attribute))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._paths))

    def __contains__(self, name: object) -> bool:
        return name in self._paths
