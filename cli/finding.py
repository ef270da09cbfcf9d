"""A Finding: one check's answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from kvstore.server.settings.settings import Settings

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's answer; ``fix`` is empty when it is ok."""

    check: str
    state: State
    saw: str
    fix: str = ""


Check = Callable[[Settings], Iterator[Finding]]
