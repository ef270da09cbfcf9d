"""The PeerServer: bounded service for other servers of the fleet.

Peers only read CPU memory: their requests begin no load or copy, and no policy counts them, as a
server that reads a chunk often keeps it itself.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from operator import attrgetter

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.bulk import found_rows, keys_of
from kvstore.proto.errors import InvalidRequestError, QuotaExceededError
from kvstore.proto.types import ChunkKey
from kvstore.server.settings.values import Limits
from kvstore.server.store.reads import LayerPart
from kvstore.server.tiering.moves import Moves

_SPAN = attrgetter("index", "start", "stop")


class PeerServer:
    """Answers finds and gets of peers from CPU memory, within *limits* for all of them in total.

    Thread-safe.
    """

    def __init__(self, moves: Moves, limits: Limits) -> None:
        self._catalog = moves.catalog
        self._cpu = moves.tiers.cpu_tier
        self._counters = moves.counters
        self._limits = limits
        self._lock = threading.Lock()  # guards the two below
        self._requests = 0
        self._under_way_bytes = 0

    @contextmanager
    def admitted(self, size_bytes: int = 0) -> Iterator[None]:
        """Count a request of *size_bytes* while it is answered.

        Raises QuotaExceededError when too many requests or bytes are in flight.
        """
        limits = self._limits
        with self._lock:
            sums = (
                ("peer_requests", self._requests + 1, limits.peer_requests),
                ("peer_bytes", self._under_way_bytes + size_bytes, limits.peer_bytes),
            )
            past = [(name, limit) for name, value, limit in sums if value > limit]
            if not past:
                self._requests += 1
                self._under_way_bytes += size_bytes
        if past:
            self._counters.add("peer_refused_requests")
            raise QuotaExceededError(*past[0], "this server")
        try:
            yield
        finally:
            with self._lock:
                self._requests -= 1
                self._under_way_bytes -= size_bytes

    def find(self, request: pb.FindRequest) -> pb.FindResponse:
        """Return the requested chunks that are in memory. Raises InvalidRequestError."""
        keys = keys_of(request, self._limits.max_batch_chunks)
        self._counters.add("peer_asked_chunks", len(keys))
        return found_rows(self._catalog.infos_on(self._cpu.name, keys))

    def parts(self, request: pb.GetRequest) -> Generator[LayerPart, None, None]:
        """Yield the requested frames in memory, or their ranges, up to the first missing one.

        The parts are valid until the generator ends. Raises InvalidRequestError.
        """
        limit = self._limits.max_batch_chunks
        keys = keys_of(request, limit)
        if len(request.ranges) > limit:
            raise InvalidRequestError("ranges", len(request.ranges), f"at most {limit}")
        whole: list[tuple[int, int, int | None]] = [(at, 0, None) for at in range(len(keys))]
        held: list[ChunkKey] = []
        try:
            for index, start, stop in map(_SPAN, request.ranges) if request.ranges else whole:
                if index >= len(keys):
                    continue
                key = keys[index]
                copies = self._catalog.hold(key)
                held.append(key)
                frame = self._cpu.peek(key) if self._cpu.name in copies else None
                if frame is None:
                    return
                data = frame[start:stop]
                if len(data):
                    self._counters.add("peer_served_bytes", len(data))
                    yield LayerPart(index, self._cpu.name, len(frame), start, data)
                if start == 0:
                    self._counters.add("peer_served_chunks")
        finally:
            for key in held:
                self._catalog.release_hold(key)
