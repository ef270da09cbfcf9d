"""Finds the weight of a score by replaying what was asked for, a little at every request."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.policy import EvictionPolicy

_GROUP = 16
"""Chunks for which room is made at once in a replay."""

ShadowMaker = Callable[[Sequence[int], float], EvictionPolicy]
"""Makes a policy for rows 1 to n, of which it is given the classes by row, and an alpha."""


@dataclass(frozen=True)
class TunerTerms:
    """What is recorded, tried and scored, and how much of the replay is done at a request."""

    window_factor: int = 5
    """Requests to record, for each before the first eviction."""
    scored_requests: int = 500
    """Of the recorded, the last so many count."""
    alphas: tuple[float, ...] = tuple(step / 10 for step in range(21))
    hysteresis: float = 0.01
    """How much more than the first alpha another has to save, as a share."""
    ring_chunks: int = 1 << 15
    """Of the requests recorded the last are kept, with this many chunks."""
    slice_chunks: int = 16
    """Chunks of the replay that are done at each request."""

    def __post_init__(self) -> None:
        for name in ("window_factor", "scored_requests", "ring_chunks", "slice_chunks"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(name, getattr(self, name), "at least 1")
        if not self.alphas or not all(0.0 <= alpha < math.inf for alpha in self.alphas):
            raise InvalidRequestError("alphas", self.alphas, "at least one, none negative")
        if not 0.0 <= self.hysteresis < math.inf:
            raise InvalidRequestError("hysteresis", self.hysteresis, "a share, not negative")


class _Ring:
    """The last chunks of requests, at most so many. 14 bytes each."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows, self._sizes = array("I"), array("Q")
        self._kinds, self._begins = array("B"), array("B")
        self._next = 0
        self._is_new = True

    def begin(self) -> None:
        """Let what follows be another request."""
        self._is_new = True

    def append(self, row: int, size_bytes: int, kind: int) -> None:
        """Put another chunk behind the request, in the place of the oldest if there is no more."""
        chunk = (row, size_bytes, kind, self._is_new)
        columns = (self._rows, self._sizes, self._kinds, self._begins)
        for column, value in zip(columns, chunk, strict=True):
            if len(column) < self._limit:
                column.append(value)
            else:
                column[self._next] = value
        self._next = (self._next + 1) % self._limit
        self._is_new = False

    def unrolled(self) -> tuple[array[int], array[int], array[int], array[int]]:
        """Return rows, sizes and classes, the oldest first, and where each request begins."""
        at = self._next if len(self._rows) == self._limit else 0
        columns = (self._rows, self._sizes, self._kinds, self._begins)
        rows, sizes, kinds, begins = (column[at:] + column[:at] for column in columns)
        starts = array("I", [place for place, flag in enumerate(begins) if flag or not place])
        return rows, sizes, kinds, starts

    def __len__(self) -> int:
        return len(self._rows)


class _Recorded(NamedTuple):
    """Requests to replay: chunks by number from 1, and where each request begins."""

    numbers: array[int]
    sizes: array[int]
    starts: array[int]
    kinds: array[int]
    """By number."""


class AlphaTuner:
    """Sets alpha once, as Marconi does (Pan et al., MLSys 2025).

    At the first eviction a window is set: ``window_factor`` times the requests so far. When
    there were that many, what was recorded is replayed against an empty tier of the same size,
    once for each alpha, and the one that saves the most FLOPs in the last ``scored_requests``
    is taken; the first alpha, unless another saves more by ``hysteresis``.

    Ours departs in two ways, both of which bound it: only the last requests of the window are
    kept, and the replay goes on by ``slice_chunks`` at each request, never at an eviction.
    Memory: 14 bytes a chunk recorded, and one shadow of the policy.
    """

    def __init__(
        self, make_shadow: ShadowMaker, flops_per_byte: Sequence[float], terms: TunerTerms
    ) -> None:
        """*flops_per_byte*: what a byte of each class saves, in any unit."""
        self._make_shadow = make_shadow
        self._flops_per_byte = flops_per_byte
        self._terms = terms
        self._ring = _Ring(terms.ring_chunks)
        self._last = NO_ROW
        """The last chunk of the request that is being recorded."""
        self._requests = self._window = self._capacity_bytes = 0
        self._search: Generator[None, None, float] | None = None
        self.alpha: float | None = None
        """What was found; None until then."""

    @property
    def _is_recording(self) -> bool:
        return self._search is None and self.alpha is None

    @property
    def recorded_chunks(self) -> int:
        """Chunks recorded, each time it was in a request."""
        return len(self._ring)

    def asked(self, chunks: Sequence[tuple[int, int, int]]) -> None:
        """A request found these chunks, as (row, size in bytes, class); do a slice of work."""
        self._requests += 1
        if self._is_recording and self._window and self._requests > self._window:
            self._search = self._find()
        if self._is_recording:
            self._ring.begin()
            for chunk in chunks:
                self._ring.append(*chunk)
            self._last = chunks[-1][0] if chunks else NO_ROW
        elif self._search is not None:
            self._advance(self._search)

    def stored(self, parent: int, row: int, size_bytes: int, kind: int) -> None:
        """A chunk came; it is of the request before if it continues what that has."""
        if self._is_recording:
            if parent != self._last:
                self._ring.begin()
            self._ring.append(row, size_bytes, kind)
            self._last = row

    def evicting(self, here_bytes: int) -> None:
        """A chunk goes from a tier that has *here_bytes* with it; only the first time counts."""
        if self._requests and not self._window:
            self._window = self._terms.window_factor * self._requests
            self._capacity_bytes = here_bytes

    def _advance(self, search: Generator[None, None, float]) -> None:
        for _ in range(self._terms.slice_chunks):
            try:
                next(search)
            except StopIteration as end:
                self.alpha = end.value
                self._search = None
                self._ring = _Ring(1)
                return

    def _find(self) -> Generator[None, None, float]:
        """Return the best alpha, having yielded once for every chunk of every replay."""
        rows, sizes, row_kinds, starts = self._ring.unrolled()
        known, places = np.unique(np.frombuffer(rows, np.uint32), return_inverse=True)
        numbers = array("I", (places + 1).astype(np.uint32).tobytes())
        kinds = array("B", bytes(len(known) + 1))
        np.frombuffer(kinds, np.uint8)[numbers] = row_kinds
        recorded = _Recorded(numbers, sizes, starts, kinds)
        first, *others = self._terms.alphas
        best = first
        saved = least = yield from self._replay(recorded, first)
        for alpha in others:
            saves = yield from self._replay(recorded, alpha)
            if saves > saved and saves > least * (1.0 + self._terms.hysteresis):
                best, saved = alpha, saves
        return best

    def _replay(self, recorded: _Recorded, alpha: float) -> Generator[None, None, float]:
        """Return the FLOPs saved in the requests that count, in units of a class and byte."""
        rows, sizes, starts, kinds = recorded
        policy = self._make_shadow(kinds, alpha)
        here = array("Q", bytes(8 * len(kinds)))
        """The size of each chunk that is here."""
        free_bytes, saved = self._capacity_bytes, 0.0
        for number, start in enumerate(starts):
            end = starts[number + 1] if number + 1 < len(starts) else len(rows)
            chain = rows[start:end]
            found = next((at for at, row in enumerate(chain) if not here[row]), len(chain))
            if len(starts) - number <= self._terms.scored_requests:
                saved += sum(here[row] * self._flops_per_byte[kinds[row]] for row in chain[:found])
            policy.touch(np.array(chain[:found], np.intp), 0.0)
            for _ in range(found):
                yield
            above, own = chain[found - 1] if found else NO_ROW, set(chain)
            for at in range(found, len(chain), _GROUP):
                group = chain[at : at + _GROUP]
                group_sizes = sizes[start + at : start + at + len(group)]
                missing_bytes = sum(
                    size for row, size in zip(group, group_sizes, strict=True) if not here[row]
                )
                free_bytes += self._make_room(policy, here, own, missing_bytes - free_bytes)
                for row, size_bytes in zip(group, group_sizes, strict=True):
                    if not here[row] and free_bytes >= size_bytes:
                        policy.insert(row, above, size_bytes, 0.0)
                        here[row] = size_bytes
                        free_bytes -= size_bytes
                    above = row
                    yield
                if not here[above]:
                    break
        return saved

    def _make_room(
        self, policy: EvictionPolicy, here: array[int], kept: set[int], need_bytes: int
    ) -> int:
        """Evict until *need_bytes* are free, or nothing may go; return how many that freed."""
        freed_bytes = 0
        while freed_bytes < need_bytes:
            victim = next(policy.victims(kept.__contains__, 0.0), NO_ROW)
            if not victim:
                break
            policy.remove(victim)
            freed_bytes += here[victim]
            here[victim] = 0
        return freed_bytes
