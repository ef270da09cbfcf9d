"""Staging memory: what a client shares with its server to put through."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence

import numpy as np

from kvstore.client.transport import Outgoing
from kvstore.proto import unix_socket
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.frame import ALIGN_BYTES, FLAG_UNSUMMED

PARTS = 4
"""It is written part by part, while the server reads those before."""


class StagingMemory:
    """A memfd of PARTS parts, each of at least *part_bytes*. ``descriptor`` is for the server."""

    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = -(-part_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.size_bytes = PARTS * self._part_bytes
        self.descriptor = unix_socket.create_memfd("kvstore-staging", self.size_bytes)
        try:
            memory = mmap.mmap(self.descriptor, self.size_bytes)
            unix_socket.add_seals(self.descriptor, unix_socket.STAGING_SEALS)
        except OSError:
            os.close(self.descriptor)
            raise
        self._memory: Bytes = np.frombuffer(memory, np.uint8)

    def groups(self, chunks: Sequence[Outgoing]) -> Iterator[list[Outgoing]]:
        """Cut *chunks* into groups that fit one part each. Raises InvalidRequestError."""
        group: list[Outgoing] = []
        used_bytes = 0
        for chunk in chunks:
            room_bytes = _aligned(chunk.frame_bytes)
            if room_bytes > self._part_bytes:
                raise InvalidRequestError(
                    "staging_bytes", self.size_bytes, f"give {PARTS * room_bytes}"
                )
            if group and used_bytes + room_bytes > self._part_bytes:
                yield group
                group, used_bytes = [], 0
            group.append(chunk)
            used_bytes += room_bytes
        if group:
            yield group

    def write(self, part: int, group: Sequence[Outgoing], wanted: Sequence[int]) -> list[int]:
        """Encode the wanted chunks of *group* into one part; return the offset of each."""
        offset = part * self._part_bytes
        offsets = []
        for chunk, is_wanted in zip(group, wanted, strict=True):
            if is_wanted:
                # The server sums what it copies; to sum here too would read it all twice.
                chunk.encode(self._memory[offset : offset + chunk.frame_bytes], FLAG_UNSUMMED)
                offsets.append(offset)
                offset += _aligned(chunk.frame_bytes)
        return offsets

    def close_descriptor(self) -> None:
        """Close ours, once the server has its own. Call once."""
        os.close(self.descriptor)

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        self._memory = np.empty(0, np.uint8)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
