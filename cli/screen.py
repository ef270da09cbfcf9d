"""The terminal, as commands write to it: text alone, whoever it came from."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text
from typing_extensions import override

from kvstore.proto.text import printable


class Screen(Console):
    """A Console that takes every text as it is: no markup in it, and nothing that is obeyed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    @override
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)
