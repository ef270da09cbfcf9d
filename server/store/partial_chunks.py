"""A partial chunk: its room, and which layers and heads of it have come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import Part
from kvstore.codecs.portions import decode_portion
from kvstore.codecs.raw import RawCodec, raw_header
from kvstore.proto.buffers import Bytes, as_bytes, checksum, copy_bytes
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.frame import FrameHeader, FrameTemplate, pack_header
from kvstore.proto.plans import NO_HINTS, Hints
from kvstore.proto.types import Portion
from kvstore.server.security.sessions import Session
from kvstore.tiers.base import Reservation

_FREE, _CLAIMED, _COVERED = range(3)
_RAW = RawCodec()

Claim: TypeAlias = "list[NDArray[np.bool_]]"
"""Which tiles a writer fills: for each extent of its portion, (layers, heads)."""


class PartialChunk:
    """One chunk whose portions come one by one, into the room of its raw frame.

    Of each component a layer's head is a tile: free, claimed by one writer, or covered. Whoever
    owns the chunk guards everything but ``fill`` and ``sum_up``, which touch claimed tiles only.
    ``until`` is when it is given up.
    """

    def __init__(self, reservation: Reservation, room: Bytes, tenant: str, until: float) -> None:
        self.reservation = reservation
        self.info = info = reservation.info
        self.tenant = tenant
        self.until = until
        self.sessions: set[int] = set()
        """Who has a part in it and lives."""
        self.hints: Hints = NO_HINTS
        self.writers = 0
        """Who writes into the room at this moment."""
        self.is_sealing = False
        """It is whole, and about to be visible: nobody begins it anew, and nobody drops it."""
        self.is_dropped = False
        """Its room is freed by the last of them."""
        self._room = room
        self._facts: FrameHeader | None = None
        self._prefill_flops = 0.0
        blank = raw_header(FrameTemplate(info.key, info.parent, b"", b"", info.layout))
        self._tensors = _RAW.views(blank, room)
        self._tiles = [np.full((c.layers, c.kv_heads), _FREE) for c in info.layout.components]
        end = blank.header_bytes
        for row in blank.segments:  # what no segment covers, and no checksum
            room[end : int(row["offset"])] = 0
            end = int(row["offset"]) + int(row["stored_bytes"])

    def join(self, session: Session, portion: Portion, parent: bytes) -> None:
        """Have *session* take part. Raises InvalidRequestError when it speaks of another chunk."""
        _same("layout", portion.whole, self.info.layout)
        _same("parent", parent.hex(), self.info.parent.hex())
        self.sessions.add(session.session_id)

    def agree(self, header: FrameHeader, hints: Hints) -> None:
        """Take the facts of a first portion, compare those of another with them.

        Raises InvalidRequestError naming what contradicts what came before.
        """
        if self._facts is None:
            self._facts = header
        _same("content", header.content.hex(), self._facts.content.hex())
        _same("position", header.position, self._facts.position)
        self._prefill_flops = max(self._prefill_flops, header.prefill_flops)
        self.hints = self.hints if hints == NO_HINTS else hints

    # --- tiles

    def claim(self, portion: Portion) -> Claim:
        """Return which tiles of *portion* nobody has claimed before: they are the caller's."""
        claim = []
        for tiles in self._tiles_of(portion):
            claim.append(tiles == _FREE)
            tiles[claim[-1]] = _CLAIMED
        self.writers += 1
        return claim

    def leave(self, portion: Portion, claim: Claim, *, is_filled: bool) -> bool:
        """End a claim; return whether the chunk is whole by that."""
        self.writers -= 1
        for tiles, ours in zip(self._tiles_of(portion), claim, strict=True):
            tiles[ours] = _COVERED if is_filled else _FREE
        is_any = any(ours.any() for ours in claim)
        return is_filled and is_any and all((tiles == _COVERED).all() for tiles in self._tiles)

    def _tiles_of(self, portion: Portion) -> list[NDArray[Any]]:
        return [
            self._tiles[number][one.first_layer : one.layer_stop, one.first_head : one.head_stop]
            for number, one in portion.numbered
        ]

    # --- bytes

    def fill(self, header: FrameHeader, frame: Bytes, portion: Portion, claim: Claim) -> None:
        """Verify *frame*, of *portion*, and decode what is claimed of it into the room.

        Raises as ``decode_portion``; what was claimed then holds rubbish.
        """
        out: list[list[list[Part]]] = []
        beside: list[tuple[list[Part], list[Part], NDArray[np.bool_]]] = []
        for (number, one), ours in zip(portion.numbered, claim, strict=True):
            layers = self._tensors[number][one.first_layer : one.layer_stop]
            out.append([])
            for parts, heads in zip(layers, ours, strict=True):
                places = [part[one.first_head : one.head_stop] for part in parts]
                if heads.all():
                    out[-1].append(places)
                else:  # another writer's bytes stay as they are
                    out[-1].append([np.empty(place.shape, place.dtype) for place in places])
                    beside.append((out[-1][-1], places, heads))
        decode_portion(header, frame, out)
        for parts, places, heads in beside:
            _copy_heads(parts, places, heads)

    def sum_up(self) -> FrameHeader:
        """Write the header of the whole frame, and return it."""
        info, facts = self.info, self._facts
        assert facts is not None
        template = FrameTemplate(
            info.key, info.parent, facts.representation, facts.content, info.layout,
            facts.position, self._prefill_flops,
        )  # fmt: skip
        blank = raw_header(template)
        sums = [checksum(blank.segment(self._room, index)) for index in range(len(blank.segments))]
        header = raw_header(template, sums)
        copy_bytes(self._room[: header.header_bytes], as_bytes(pack_header(header)))
        return header


def _copy_heads(parts: Sequence[Part], places: Sequence[Part], heads: NDArray[np.bool_]) -> None:
    for part, place in zip(parts, places, strict=True):
        place[heads] = part[heads]


def _same(name: str, given: object, known: object) -> None:
    if given != known:
        fix = f"another writer of this chunk stated {known}"
        raise InvalidRequestError(name, given, fix)
