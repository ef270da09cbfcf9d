"""Tables on terminals of any width and elsewhere: nothing in them is cut."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvstore.cli.app import Grid

ID = "96732432a2736b7df7b1c4a0e5d9f218"
REASON = "evicted from disk 40 s before: no tier below was to have a copy"


def grid() -> Grid:
    rows = [(ID, "evicted", REASON), (ID[::-1], "[red]unknown[/]", "never\nstored")]
    return Grid(("digest", "state", "why"), rows)


def shown(width: int, *, is_terminal: bool, rows: Grid | None = None) -> list[str]:
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=is_terminal, soft_wrap=True, color_system=None
    )
    console.print(rows or grid())
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [20, 80])
def test_where_there_is_no_terminal_each_row_is_one_line_of_plain_columns(width: int) -> None:
    head, first, second = shown(width, is_terminal=False)
    assert head.split() == ["digest", "state", "why"]
    assert first == f"{ID}  evicted          {REASON}"
    assert second == f"{ID[::-1]}  [red]unknown[/]  never stored"


def test_a_terminal_that_is_wide_enough_shows_the_same() -> None:
    assert shown(200, is_terminal=True) == shown(80, is_terminal=False)


def test_a_terminal_that_is_too_narrow_wraps_the_last_column_alone() -> None:
    lines = shown(80, is_terminal=True)
    assert max(map(len, lines)) <= 80
    assert sum(ID in line for line in lines) == 1
    told = "".join(line[len(ID) + 2 + len("[red]unknown[/]") + 2 :].strip() + " " for line in lines)
    assert REASON in " ".join(told.split())


def test_a_terminal_too_narrow_for_that_shows_each_cell_in_a_line_of_its_own() -> None:
    lines = shown(50, is_terminal=True)
    assert f"digest: {ID}" in lines
    assert "state:  evicted" in lines
    assert REASON in " ".join(" ".join(lines).split())


def test_a_terminal_never_breaks_a_word() -> None:
    for width in range(20, 120, 5):
        made = Grid(("at", "digest", "why"), [("0", ID, f"revision: {'f' * 40} asked")], wraps=2)
        words = " ".join(shown(width, is_terminal=True, rows=made)).split()
        assert ID in words, width
        assert "f" * 40 in words, width
