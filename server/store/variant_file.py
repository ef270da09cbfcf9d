"""The variant file: what engines reported of variants, over a restart. docs/format.md has it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from kvstore.proto.blend import ContextMass, check_number
from kvstore.proto.buffers import as_bytes, checksum
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError, KVStoreError
from kvstore.proto.types import KEY_BYTES, ChunkKey
from kvstore.server.blending.content_index import MAX_CONTEXT, MAX_LEARNED, Contents, Learned
from kvstore.server.blending.scores import Context
from kvstore.tiers.disk_io import write_durably

FILE_NAME = "variants.kvv"
SAVE_EVERY_S = 60.0

_MAGIC = b"KVVR"
_VERSION = 1
_HEAD = struct.Struct("<4sHH")
_ROW = struct.Struct("<32sffffIH")
_MASS = struct.Struct("<16sIf")
_TAIL = struct.Struct("<Q")
MAX_FILE_BYTES = 64 + MAX_LEARNED * (_ROW.size + MAX_CONTEXT * _MASS.size)
_TOP_USES = 1e9

logger = structlog.get_logger(__name__)


def pack_variants(rows: Sequence[Learned]) -> bytes:
    """Return the bytes of the file."""
    kept = rows[-MAX_LEARNED:]
    body = [_HEAD.pack(_MAGIC, _VERSION, len(kept))]
    for one in kept:
        numbers = one.impact, one.deviation, one.overlap, one.uses
        body.append(_ROW.pack(one.key, *numbers, one.reports, len(one.context)))
        body += [_MASS.pack(*mass) for mass in one.context]
    data = b"".join(body)
    return data + _TAIL.pack(checksum(as_bytes(data)))


def unpack_variants(data: bytes) -> list[Learned]:
    """Parse the bytes of a file. Raises InvalidFrameError, also for future versions."""
    if not _HEAD.size + _TAIL.size <= len(data) <= MAX_FILE_BYTES:
        raise InvalidFrameError("variants", len(data), "not the size of a variant file")
    body = data[: -_TAIL.size]
    if _TAIL.unpack_from(data, len(body))[0] != checksum(as_bytes(body)):
        raise InvalidFrameError("variants", "checksum", "the file is damaged")
    magic, version, count = _HEAD.unpack_from(body)
    if (magic, version) != (_MAGIC, _VERSION) or count > MAX_LEARNED:
        raise InvalidFrameError("variants", (magic, version, count), "not this version's")
    at, rows = _HEAD.size, []
    try:
        for _ in range(count):
            row, at = _unpacked(body, at)
            rows.append(row)
    except (struct.error, InvalidRequestError):
        raise InvalidFrameError("variants", at, "its rows are none of ours") from None
    if at != len(body):
        raise InvalidFrameError("variants", count, "its counts do not add up")
    return rows


def _unpacked(body: bytes, at: int) -> tuple[Learned, int]:
    key, impact, deviation, overlap, uses, reports, masses = _ROW.unpack_from(body, at)
    if masses > MAX_CONTEXT:
        raise InvalidRequestError("context", masses, f"at most {MAX_CONTEXT}")
    at += _ROW.size
    context = []
    for _ in range(masses):
        told = ContextMass(*_MASS.unpack_from(body, at))
        context.append(Context(told.content, told.tokens, told.mass))
        at += _MASS.size
    check_number("impact", impact, 1.0)
    check_number("overlap", overlap, 1.0)
    check_number("uses", uses, _TOP_USES)
    if deviation != -1.0:
        check_number("deviation", deviation)
    learned = Learned(ChunkKey(key), impact, deviation, overlap, uses, reports, tuple(context))
    assert len(key) == KEY_BYTES
    return learned, at


class VariantKeeper:
    """Keeps the variant file of *folder*. For one thread, after ``load``. *clock*: seconds."""

    def __init__(self, contents: Contents, folder: Path, clock: Callable[[], float]) -> None:
        self._contents = contents
        self._path = folder / FILE_NAME
        self._clock = clock
        self._saved_at_s = clock()
        self._saved = contents.report_count

    def load(self) -> int:
        """Take in what an earlier run learned; a file that cannot be used is none."""
        try:
            with open(self._path, "rb") as file:
                rows = unpack_variants(file.read(MAX_FILE_BYTES + 1))
        except FileNotFoundError:
            return 0
        except (KVStoreError, OSError) as error:
            logger.warning("what was learned of variants is lost", reason=str(error))
            return 0
        self._contents.recall(rows)
        return len(rows)

    def save_if_due(self, *, is_last: bool = False) -> bool:
        """Write the file if there were reports since, and a minute is over or it is the *last*
        time. Return whether it was written.
        """
        count = self._contents.report_count
        is_due = is_last or self._clock() - self._saved_at_s >= SAVE_EVERY_S
        if count == self._saved or not is_due:
            return False
        self._saved, self._saved_at_s = count, self._clock()
        try:
            write_durably(self._path, pack_variants(self._contents.learned()))
        except OSError as error:
            logger.warning("what was learned of variants was not saved", reason=str(error))
            return False
        return True
