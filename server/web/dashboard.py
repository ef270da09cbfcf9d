"""The Dashboard: what its page shows, looked at once a second for all who read it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from kvstore.server.web.markup import Html

EVERY_S = 1.0
"""Between two looks while somebody reads; nobody reads: nothing is done."""

Sections = Mapping[str, Html]
"""Parts of the page by their ids."""


class Dashboard:
    """Shares one look a second between its readers. For one event loop.

    *render* takes a while and is called in a thread; *clock* returns monotonic seconds.
    """

    def __init__(self, render: Callable[[], Sections], clock: Callable[[], float]) -> None:
        self._render = render
        self._clock = clock
        self._lock = asyncio.Lock()  # one look at a time
        self._sections: Sections = {}
        self._number = 0
        self._at_s = 0.0

    async def sections(self) -> Sections:
        """Return what there is to show, a second old at most."""
        return (await self._fresh())[1]

    async def after(self, number: int) -> tuple[int, Sections]:
        """Wait for a look behind look *number*; return its number and what there is to show."""
        left_s = self._at_s + EVERY_S - self._clock()
        if number == self._number and left_s > 0:
            await asyncio.sleep(left_s)
        return await self._fresh()

    async def _fresh(self) -> tuple[int, Sections]:
        async with self._lock:
            if not self._number or self._clock() - self._at_s >= EVERY_S:
                self._sections = await asyncio.to_thread(self._render)
                self._number += 1
                self._at_s = self._clock()
            return self._number, self._sections
