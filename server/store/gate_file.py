"""The gate file: which models' gates are open, over a restart. docs/format.md has its bytes."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import structlog

from kvstore.proto.blend import MAX_TAG_CHARS, check_number, check_tag
from kvstore.proto.buffers import as_bytes, checksum
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError, KVStoreError
from kvstore.server.blending.gates import MAX_GATES, GateName, Gates, GateState
from kvstore.server.settings.values import MAX_RATIO
from kvstore.tiers.disk_io import write_durably

FILE_NAME = "gates.kvg"
MAX_MODEL_CHARS = 256
MAX_FILE_BYTES = 64 + MAX_GATES * (64 + 4 * (MAX_TAG_CHARS + MAX_MODEL_CHARS))

_MAGIC = b"KVGT"
_VERSION = 1
_HEAD = struct.Struct("<4sHH")
_ROW = struct.Struct("<16sddddHH")
_TAIL = struct.Struct("<Q")

SavedGate: TypeAlias = tuple[GateName, str, GateState]

logger = structlog.get_logger(__name__)


def pack_gates(gates: Sequence[SavedGate]) -> bytes:
    """Return the bytes of the file."""
    rows = [_packed(*one) for one in gates[-MAX_GATES:]]
    body = _HEAD.pack(_MAGIC, _VERSION, len(rows)) + b"".join(rows)
    return body + _TAIL.pack(checksum(as_bytes(body)))


def _packed(name: GateName, model: str, gate: GateState) -> bytes:
    texts = name[1].encode(), model[:MAX_MODEL_CHARS].encode()
    numbers = gate.ratio, gate.agreement, gate.divergence, gate.speedup
    return _ROW.pack(name[0], *numbers, *map(len, texts)) + b"".join(texts)


def unpack_gates(data: bytes) -> list[SavedGate]:
    """Parse the bytes of a file. Raises InvalidFrameError, also for future versions."""
    if not _HEAD.size + _TAIL.size <= len(data) <= MAX_FILE_BYTES:
        raise InvalidFrameError("gates", len(data), "not the size of a gate file")
    body = data[: -_TAIL.size]
    if _TAIL.unpack_from(data, len(body))[0] != checksum(as_bytes(body)):
        raise InvalidFrameError("gates", "checksum", "the file is damaged")
    magic, version, count = _HEAD.unpack_from(body)
    if (magic, version) != (_MAGIC, _VERSION):
        raise InvalidFrameError("gates", (magic, version), "not this version's")
    at, gates = _HEAD.size, []
    try:
        for _ in range(count):
            gate, at = _unpacked(body, at)
            gates.append(gate)
    except (struct.error, UnicodeDecodeError, InvalidRequestError):
        raise InvalidFrameError("gates", at, "its rows are none of ours") from None
    if at != len(body) or count > MAX_GATES:
        raise InvalidFrameError("gates", count, "its counts do not add up")
    return gates


def _unpacked(body: bytes, at: int) -> tuple[SavedGate, int]:
    space, ratio, agreement, divergence, speedup, tag_bytes, model_bytes = _ROW.unpack_from(
        body, at
    )
    middle = at + _ROW.size + tag_bytes
    end = middle + model_bytes
    tag, model = body[at + _ROW.size : middle].decode(), body[middle:end].decode()
    if end > len(body):
        raise InvalidFrameError("gates", at, "a row does not end")
    check_number("ratio", ratio, MAX_RATIO)
    check_number("agreement", agreement, 1.0)
    check_number("divergence", divergence)
    gate = GateState(
        is_open=True, ratio=ratio, agreement=agreement, divergence=divergence,
        why="calibrated before the last start", is_calibrated=True,
        speedup=speedup if 0 <= speedup < math.inf else -1.0,
    )  # fmt: skip
    return ((space, check_tag(tag)), model, gate), end


class GateKeeper:
    """Keeps the gate file of *folder*. For one thread, after ``load``."""

    def __init__(self, gates: Gates, folder: Path) -> None:
        self._gates = gates
        self._path = folder / FILE_NAME
        self._saved = gates.changes

    def load(self) -> int:
        """Open the gates that an earlier run had open; a file that cannot be used is none."""
        try:
            with open(self._path, "rb") as file:
                return self._gates.restore(unpack_gates(file.read(MAX_FILE_BYTES + 1)))
        except FileNotFoundError:
            return 0
        except (KVStoreError, OSError) as error:
            logger.warning("which gates were open is lost; they are closed", reason=str(error))
            return 0

    def save_if_changed(self) -> bool:
        """Write the file if a gate changed since. Return whether it was written."""
        changes = self._gates.changes
        if changes == self._saved:
            return False
        try:
            write_durably(self._path, pack_gates(self._gates.save()))
        except OSError as error:
            logger.warning("which gates are open was not saved", reason=str(error))
            return False
        finally:
            self._saved = changes
        return True
