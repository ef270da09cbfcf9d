"""Pinned host memory that pageable bytes pass through on their way to and from a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from queue import SimpleQueue

import torch

from kvstore.proto.buffers import Bytes, copy_bytes
from kvstore.proto.device import Device, Event, Stream

PIECES_PER_LANE = 2


@dataclass(slots=True, eq=False)
class _Piece:
    """``busy`` is the event of the last copy that used it."""

    tensor: torch.Tensor
    bytes: Bytes
    busy: Event | None = None

    def settle(self) -> None:
        """Wait until the device is done with it."""
        if self.busy is not None:
            self.busy.synchronize()
            self.busy = None


class Staging:
    """*lanes* transfers at once, each through two pieces of *piece_bytes*; others wait.

    One piece is filled or emptied by the host while the device copies the other. Thread-safe.
    """

    def __init__(self, device: Device, lanes: int, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._lanes: SimpleQueue[list[_Piece]] = SimpleQueue()
        for _ in range(lanes):
            tensors = [device.staging(piece_bytes) for _ in range(PIECES_PER_LANE)]
            self._lanes.put([_Piece(tensor, tensor.numpy()) for tensor in tensors])

    @contextmanager
    def _lane(self) -> Iterator[list[_Piece]]:
        lane = self._lanes.get()
        try:
            yield lane
        finally:
            self._lanes.put(lane)

    def upload(self, stream: Stream, out: torch.Tensor, data: Bytes) -> None:
        """Queue copies of *data* to the device; *data* may be reused at once."""
        with self._lane() as lane:
            for piece, start in zip(cycle(lane), self._starts(data), strict=False):
                part = data[start : start + self._piece_bytes]
                piece.settle()
                copy_bytes(piece.bytes[: len(part)], part)
                stream.copy(out[start : start + len(part)], piece.tensor[: len(part)])
                piece.busy = stream.record()

    def download(self, stream: Stream, out: Bytes, data: torch.Tensor) -> None:
        """Copy *data* from the device to *out*; done when this returns."""
        with self._lane() as lane:
            under_way: list[tuple[_Piece, Bytes]] = []
            for piece, start in zip(cycle(lane), self._starts(out), strict=False):
                part = out[start : start + self._piece_bytes]
                if len(under_way) == len(lane):
                    _land(*under_way.pop(0))
                piece.settle()
                stream.copy(piece.tensor[: len(part)], data[start : start + len(part)])
                piece.busy = stream.record()
                under_way.append((piece, part))
            for landing in under_way:
                _land(*landing)

    def _starts(self, data: Bytes) -> range:
        return range(0, len(data), self._piece_bytes)


def _land(piece: _Piece, part: Bytes) -> None:
    piece.settle()
    copy_bytes(part, piece.bytes[: len(part)])
