"""Groups: small numbers for the tenants and categories whose chunks are told apart."""

from __future__ import annotations

MAX_GROUPS = 15
"""Those that came first; statistics of all others are kept together, as group 0."""


class GroupTable:
    """Numbers of (tenant, category), in the order in which they came. Not thread-safe."""

    def __init__(self, limit: int = MAX_GROUPS) -> None:
        self._limit = limit
        self._numbers: dict[tuple[str, str], int] = {}

    def names(self) -> list[tuple[str, str]]:
        """Return the groups, in the order of their numbers, the first of which is 1."""
        return list(self._numbers)

    def number(self, tenant: str, category: str) -> int:
        """Return the group's number, 1 to the limit; 0 for those that came after."""
        name = (tenant, category)
        known = self._numbers.get(name)
        if known is None:
            if len(self._numbers) >= self._limit:
                return 0
            known = self._numbers[name] = len(self._numbers) + 1
        return known
