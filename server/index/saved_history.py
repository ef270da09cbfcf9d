"""What policies have learned, in the form in which a restart goes on with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.types import KEY_BYTES
from kvstore.server.eviction.access_history import AccessHistory
from kvstore.server.eviction.policy import Rows
from kvstore.server.eviction.reuse_statistics import AGE_BINS

CHUNK = np.dtype(
    [
        ("key", f"V{KEY_BYTES}"),
        ("age_s", "<f8"),
        ("flops", "<f8"),
        ("left_s", "<f8"),
        ("chunks", "<u2"),
        ("hits", "u1"),
        ("turns", "u1"),
        ("own", "u1"),
        ("priority", "u1"),
        ("zeros", "V2"),
    ]
)
"""What is kept of a chunk. ``age_s``: since it was asked for; ``left_s``: to live, 0 for ever."""

CLASS = np.dtype([("code", "<u4"), ("asked", "<f4", AGE_BINS), ("forgotten", "<f4", AGE_BINS)])
"""What is kept of a class: how many of its chunks were asked for, or forgotten, by bin of age."""

COARSER = 1 << 31
"""Set in the code of a coarser class; the rest is its number."""

MAX_CHUNKS = 1 << 19
"""Of more, those that left longest ago are not kept. 32 MiB of them."""

_MERGED_AT = 512
"""Chunks that waited are counted at so many times, not each at its own."""


@dataclass(frozen=True, slots=True)
class SavedHistory:
    """``names``: tenant and category by group number, from 1; ``groups``: the numbers of those
    with statistics of their own, in order. ``classes`` are of dtype CLASS, ``chunks`` of CHUNK.
    """

    names: Sequence[tuple[str, str]]
    groups: Sequence[int]
    classes: NDArray[np.void]
    chunks: NDArray[np.void]

    @classmethod
    def of(
        cls, names: Sequence[tuple[str, str]], history: AccessHistory, rows: Rows, now_s: float
    ) -> SavedHistory:
        """Return what *history* knows; the chunks are those of *rows*, without their keys."""
        time_s = history.time_s(now_s)
        history.table.settle(time_s)
        seen = history.columns()
        chunks = np.zeros(len(rows), CHUNK)
        chunks["age_s"] = np.maximum(time_s - seen.last_s[rows], 0.0)
        for name in ("flops", "chunks", "hits", "turns", "own"):
            chunks[name] = getattr(seen, name)[rows]
        count = history.kinds.count
        classes = np.zeros(count, CLASS)
        codes = history.kinds.codes()
        classes["code"] = np.where(codes < 0, COARSER | np.arange(count), codes)
        classes["asked"], classes["forgotten"] = history.table.ended(count)
        return cls(names, history.kinds.groups, classes, chunks)

    def fill(self, history: AccessHistory, rows: Rows, now_s: float) -> None:
        """Let an empty *history* know it, chunks under *rows*. Raises InvalidRequestError."""
        time_s = history.time_s(now_s)
        for group in self.groups:
            history.kinds.group(group)
        self._fill_table(history)
        if not len(rows):
            return
        history.reach(int(rows.max()))
        seen = history.columns()
        order = np.argsort(-self.chunks["age_s"], kind="stable")
        for part in np.array_split(order, min(_MERGED_AT, len(order))):
            mine, last_s = rows[part], time_s - float(self.chunks["age_s"][part[0]])
            seen.last_s[mine] = last_s
            for name in ("flops", "chunks", "hits", "turns", "own"):
                getattr(seen, name)[mine] = self.chunks[name][part]
            contexts = history.kinds.contexts(seen.turns[mine], seen.chunks[mine])
            classes = history.kinds.of(seen.own[mine], seen.hits[mine], contexts)
            seen.classes[mine] = classes
            history.table.wait(classes, last_s)
        history.table.refresh(time_s, history.kinds.count)

    def _fill_table(self, history: AccessHistory) -> None:
        numbers = [
            code & ~COARSER if code & COARSER else history.kinds.number(code)
            for code in self.classes["code"].tolist()
        ]
        count = len(history.kinds.coarse)
        asked, forgotten = np.zeros((2, count, AGE_BINS))
        fits = np.array([number < count for number in numbers], bool)
        at = np.array(numbers, np.intp)[fits]
        np.add.at(asked, at, self.classes["asked"][fits])
        np.add.at(forgotten, at, self.classes["forgotten"][fits])
        history.table.learned(asked, forgotten)
