"""PeerRuns: frames that a thread reads one after the other, asked of a peer in one request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from kvstore.proto.types import ChunkKey
from kvstore.server.cluster.peer import Peer
from kvstore.server.cluster.stream_link import StreamLink


@dataclass(slots=True)
class _Run:
    peer: Peer
    link: StreamLink
    lent: ExitStack
    """Gives the link back."""


class PeerRuns:
    """The links over which more is coming, one a thread. Thread-safe.

    Who reads something else than what comes next hangs up on it.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def sender(self, key: ChunkKey) -> Peer | None:
        """Return who is sending *key* to this thread next; else nobody is sending to it."""
        run: _Run | None = getattr(self._of_thread, "run", None)
        if run is not None and run.link.coming == key:
            return run.peer
        self._end(run)
        return None

    @contextmanager
    def link(self, peer: Peer, within_s: float) -> Iterator[StreamLink]:
        """Lend a link to *peer* for a frame, the one that it comes over if it is being sent.

        Raises as ``Peer.lend`` does.
        """
        run: _Run | None = getattr(self._of_thread, "run", None)
        self._of_thread.run = None
        if run is not None and run.peer is not peer:
            self._end(run)
            run = None
        with ExitStack() if run is None else run.lent as lent:
            link = lent.enter_context(peer.lend(within_s)) if run is None else run.link
            yield link
            if link.coming is not None:
                self._of_thread.run = _Run(peer, link, lent.pop_all())

    def end(self) -> None:
        """Hang up on who is still sending to this thread."""
        self._end(getattr(self._of_thread, "run", None))

    def _end(self, run: _Run | None) -> None:
        self._of_thread.run = None
        if run is not None:
            run.lent.close()
