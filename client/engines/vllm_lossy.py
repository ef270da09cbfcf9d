"""Which of an engine's blocks do not hold exact KV: those that were loaded from lossy copies.

vLLM's own prefix cache gives a block to every request whose prompt begins alike. What is computed
behind such a block is not exact either, so nothing of it may be stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MAX_LOSSY_BLOCKS = 131_072
"""Blocks that are known by vLLM's hashes of them; once there were more, any may be lossy."""


class LossyBlocks:
    """The hashes of blocks that were loaded lossy. For the scheduler's thread.

    None is forgotten: nobody tells when vLLM gives a block up. Once one could not be remembered,
    as there are too many or it has no hash, ``is_over`` is true: from then on every block that a
    request finds in vLLM's own cache counts as lossy.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._hashes: set[Any] = set()
        self.is_over = False

    def note(self, request: Any, start: int, stop: int) -> None:
        """Take note that tokens *start* to *stop* of *request* were loaded lossy."""
        first, last = start // self._block_tokens, -(-stop // self._block_tokens)
        found = self._hashes_of(request)[first:last]
        more = set(found) - self._hashes
        is_too_many = len(self._hashes) + len(more) > MAX_LOSSY_BLOCKS
        if is_too_many or len(found) < last - first:
            self.is_over = True
        else:
            self._hashes |= more

    def exact_tokens(self, request: Any, tokens: int) -> int:
        """Return how many of the first *tokens* of *request* are exact, which it found in vLLM's
        own cache.
        """
        if not (self._hashes or self.is_over):
            return tokens
        if self.is_over:
            return 0
        blocks = -(-tokens // self._block_tokens)
        found = self._hashes_of(request)[:blocks]
        lossy = (number for number, one in enumerate(found) if one in self._hashes)
        return min(tokens, next(lossy, len(found)) * self._block_tokens)

    def _hashes_of(self, request: Any) -> Sequence[Any]:
        """Return the hashes of the whole blocks of *request*; nothing where they are of others."""
        hashes: Sequence[Any] = getattr(request, "block_hashes", ())
        is_of_blocks = len(hashes) <= request.num_tokens // self._block_tokens
        return hashes if is_of_blocks else ()
