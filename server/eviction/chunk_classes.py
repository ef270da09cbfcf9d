"""The classes that chunks are put in by what a store knows of them, and their numbers."""

from __future__ import annotations

from array import array
from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.errors import InvalidRequestError

MAX_CLASSES = 1024
"""Numbers there are; chunks that would need another are of their coarser class."""

MAX_GROUPS = 8
"""Groups told apart; the others are one."""

HINTS = 3
"""What an engine may say of the reuse of a chunk: 0 nothing, 1 discard, 2 keep."""

_FREQUENCIES = 3
_TURNS = 5
_LENGTHS = 3
OWNS = (MAX_GROUPS + 2) * HINTS * 2
"""What may be a chunk's own is below this."""

_CONTEXTS = _TURNS * _LENGTHS * _FREQUENCIES
_UNKNOWN = 65_535
_CODE_OF_OWN = np.arange(256, dtype=np.intp) * _CONTEXTS
_TURN_OF = np.searchsorted([1, 2, 3, 6], np.arange(256), side="right")
_CODE_OF_TURN: list[int] = (_TURN_OF * (_LENGTHS * _FREQUENCIES)).tolist()
_FREQUENCY_OF = np.clip(np.arange(256), 1, _FREQUENCIES) - 1
_SHORT_TOKENS, _LONG_TOKENS = 1_000, 16_000


class ChunkClasses:
    """Numbers of classes, given at first sight.

    A class is: how often the chunk was asked for (1, 2, more), the turn of its conversation (0,
    1, 2, 3 to 5, more), how long the prompt was (below 1 k, below 16 k tokens, more), and what
    is the chunk's *own*: its group, what was hinted of its reuse, and whether it is the end of
    a prompt that fills no chunk. The coarser class has frequency, hint and end only.
    """

    def __init__(self, chunk_tokens: int) -> None:
        """Classes of chunks of *chunk_tokens* tokens."""
        coarser = _FREQUENCIES * HINTS * 2
        self.count = coarser
        """Numbers given; those of the coarser classes come first, without any chunk."""
        self.coarse = np.zeros(MAX_CLASSES, np.intp)
        """The number of the coarser class of each."""
        self.coarse[:coarser] = np.arange(coarser)
        self._listed = array("H", [_UNKNOWN]) * (OWNS * _CONTEXTS)
        self._numbers = np.frombuffer(self._listed, np.uint16)
        """The same, as numpy sees it."""
        self._ends = [_SHORT_TOKENS / chunk_tokens, _LONG_TOKENS / chunk_tokens]
        self._groups: dict[int, int] = {}

    def group(self, group: int) -> int:
        """Return the number of a group: 0 for 0, then one each, then one for all others."""
        if not group:
            return 0
        if group not in self._groups and len(self._groups) < MAX_GROUPS:
            self._groups[group] = 1 + len(self._groups)
        return self._groups.get(group, MAX_GROUPS + 1)

    @property
    def groups(self) -> tuple[int, ...]:
        """The groups told apart, in the order of their numbers."""
        return tuple(self._groups)

    def context(self, turn: int, chunks: int) -> int:
        """Return what chunks have in common that were asked for in one prompt."""
        return _CODE_OF_TURN[turn] + bisect_right(self._ends, chunks) * _FREQUENCIES

    def contexts(self, turns: NDArray[np.uint8], chunks: NDArray[np.uint16]) -> NDArray[np.intp]:
        """Return ``context`` of each of several."""
        lengths = np.searchsorted(self._ends, chunks, side="right")
        return (_TURN_OF[turns] * _LENGTHS + lengths) * _FREQUENCIES

    def of(
        self,
        own: NDArray[np.uint8],
        hits: NDArray[np.uint8],
        context: NDArray[np.intp] | int,
    ) -> NDArray[np.uint16]:
        """Return the classes of chunks."""
        codes = _CODE_OF_OWN[own]
        codes += _FREQUENCY_OF[hits]
        codes += context
        numbers = self._numbers[codes]
        if numbers.max(initial=0) == _UNKNOWN:
            for code in dict.fromkeys(codes[numbers == _UNKNOWN].tolist()):
                self._numbers[code] = self._new(code)
            numbers = self._numbers[codes]
        return numbers

    def of_one(self, own: int, hits: int, context: int) -> int:
        """Return the class of one chunk."""
        frequency = hits if hits < _FREQUENCIES else _FREQUENCIES
        code = own * _CONTEXTS + (frequency or 1) - 1 + context
        number = self._listed[code]
        if number == _UNKNOWN:
            number = self._listed[code] = self._new(code)
        return number

    def codes(self) -> NDArray[np.intp]:
        """Return what each number stands for, as ``number`` takes it; -1 for coarser classes."""
        found = np.full(self.count, -1, np.intp)
        codes = np.flatnonzero(self._numbers != _UNKNOWN)
        numbers = self._numbers[codes]
        found[numbers] = codes
        found[: _FREQUENCIES * HINTS * 2] = -1
        return found

    def number(self, code: int) -> int:
        """Return the number of what ``codes`` of another run has. Raises InvalidRequestError."""
        if not 0 <= code < len(self._numbers):
            raise InvalidRequestError("code", code, f"below {len(self._numbers)}")
        if self._numbers[code] == _UNKNOWN:
            self._numbers[code] = self._new(code)
        return self._numbers.item(code)

    def _new(self, code: int) -> int:
        own, frequency = code // _CONTEXTS, code % _FREQUENCIES
        coarser = own % (HINTS * 2) * _FREQUENCIES + frequency
        if self.count == MAX_CLASSES:
            return coarser
        number = self.count
        self.count += 1
        self.coarse[number] = coarser
        return number


def pack_own(group: int, reuse: int) -> int:
    """Return what is a whole chunk's own; one more for an end that fills no chunk."""
    return (group * HINTS + reuse) * 2


def with_hint(own: NDArray[np.uint8], reuse: int) -> NDArray[np.uint8]:
    """Return what is the chunks' own after *reuse* was said of them."""
    of_group = own - own % np.uint8(HINTS * 2)
    hinted: NDArray[np.uint8] = of_group + own % np.uint8(2) + np.uint8(2 * reuse)
    return hinted


def hint_of(own: int) -> int:
    """Return what was said of the reuse of the chunk."""
    return own // 2 % HINTS


def is_partial(own: int) -> bool:
    """Whether the chunk is an end that fills no chunk."""
    return own % 2 == 1
