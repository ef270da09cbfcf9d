"""A lease as its holder sees it: chunks that stay readable until it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

from kvstore.client.forks import FORKS
from kvstore.client.tensors import LayerTensors
from kvstore.client.view import ChunkView, View
from kvstore.codecs.base import ChunkTensors
from kvstore.proto.errors import LeaseExpiredError
from kvstore.proto.plans import NO_HINTS, Hints
from kvstore.proto.types import ChunkKey, Match


class Lease:
    """``match`` says what is ready; ``keys`` are those chunks. Leave the ``with`` to release."""

    def __init__(
        self,
        keys: Sequence[ChunkKey],
        match: Match,
        read: Callable[[Sequence[LayerTensors] | None], list[ChunkTensors]],
        release: Callable[[Sequence[int], Hints], None],
        view: View,
    ) -> None:
        self.match = match
        self.keys = list(keys)
        self._read = read
        self._release = release
        self._view = view
        self._is_released = not match.lease_id
        self._process = FORKS.process

    def view(self, index: int) -> ChunkView | None:
        """Return the chunk of ``keys[index]`` where it lies in the server's memory.

        None when it lies elsewhere or memory is not shared: ``get`` reads it then. Raises
        LeaseExpiredError after the release, past the lease's time or in a child process,
        ChunkCorruptError.
        """
        FORKS.check(self._process, "the lease")
        if self._is_released:
            raise LeaseExpiredError(f"lease_id={self.match.lease_id}: released; lease again")
        return self._view(index)

    def get(self, out: Sequence[LayerTensors] | None = None) -> list[ChunkTensors]:
        """Read the leased chunks, into *out* where given, as ``Client.get_chunks`` does.

        Raises LeaseExpiredError after the release, past the lease's time or in a child.
        """
        FORKS.check(self._process, "the lease")
        if not self.keys:
            return []
        return self._read(out)

    def release(self, hints: Hints = NO_HINTS) -> None:
        """End the lease, and say what is known of its chunks by now. Idempotent.

        A child leaves it to the parent.
        """
        if not self._is_released:
            self._is_released = True
            if self._process is not FORKS.process:
                return
            self._release(self.match.leases, hints)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
