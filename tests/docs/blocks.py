"""The fenced blocks of the documentation's pages, and the commands in them.

A block's language says what is done with it: ``bash`` is run, unless a comment before it says
``not run:`` and why, and then its flags are checked; ``yaml`` and ``json`` are parsed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "data/*/*.md", "examples/*.md", "examples/*/*.md")
    for path in ROOT.glob(pattern)
)

LANGUAGES = ("", "bash", "ini", "json", "python", "vectors", "yaml")
"""Those without a language are no code: output, tables of bytes."""

_FENCED = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>\w*)\n(.*?)^```", re.M | re.S
)
_BREAKS = {"|", "||", "&&", ";", "&", "(", ")"}
_REDIRECTS = {">", ">>", "<", "2>", ">&"}


@dataclass(frozen=True)
class Block:
    """One block: where it begins, what it is, and why it is not run (empty: it is)."""

    page: str
    line: int
    language: str
    why_not: str
    text: str

    def lines(self) -> Iterator[str]:
        """Yield its commands, each on one logical line, comments left out."""
        held = ""
        for line in self.text.splitlines(keepends=True):
            held += line
            try:
                words = shlex.split(held, comments=True)
            except ValueError:  # a quote is open
                continue
            if not held.endswith("\\\n"):
                if words:
                    yield held.strip().replace("\\\n", " ")
                held = ""
        assert not held, f"{self.page}:{self.line} ends within a command"


def blocks(page: str) -> list[Block]:
    """Return the blocks of *page*, a path from the root."""
    text = (ROOT / page).read_text()
    return [
        Block(
            page,
            text.count("\n", 0, found.start()) + 1,
            found["language"],
            (found["mark"] or "").partition("not run: ")[2],
            found[3],
        )
        for found in _FENCED.finditer(text)
    ]


def commands(line: str) -> list[list[str]]:
    """Return the words of each command of a line: a pipe's are several.

    Assignments before it, where its output goes, and ``sudo`` are left out.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    skip = False
    for word in lexer:
        if skip:
            skip = False
        elif word in _BREAKS:
            found.append([])
        elif word in _REDIRECTS:
            skip = True
        elif found[-1] or not re.match(r"[A-Z_]+=|sudo$", word):
            found[-1].append(word)
    return [words for words in found if words]
