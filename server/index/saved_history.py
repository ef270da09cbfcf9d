"""The history file: what policies have learned, over a restart. docs/format.md has its bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import as_bytes, checksum
from kvstore.proto.errors import InvalidFrameError, KVStoreError
from kvstore.proto.messages import representation_from_message, representation_to_message
from kvstore.proto.types import DIGEST_BYTES, KEY_BYTES, Namespace
from kvstore.server.eviction.access_history import OWNS, AccessHistory
from kvstore.server.eviction.policy import Rows
from kvstore.server.eviction.reuse_statistics import AGE_BINS
from kvstore.server.index.known_models import MAX_SPACES, ModelNamespace
from kvstore.tiers.disk_io import write_durably

CHUNK = np.dtype(
    [
        ("key", f"V{KEY_BYTES}"),
        ("age_s", "<f8"),
        ("flops", "<f8"),
        ("left_s", "<f8"),
        ("chunks", "<u2"),
        ("hits", "u1"),
        ("turns", "u1"),
        ("own", "u1"),
        ("priority", "u1"),
        ("zeros", "V2"),
    ]
)
"""What is kept of a chunk. ``age_s``: since it was asked for; ``left_s``: to live, 0 for ever."""

CLASS = np.dtype([("code", "<u4"), ("asked", "<f4", AGE_BINS), ("forgotten", "<f4", AGE_BINS)])
"""What is kept of a class: how many of its chunks were asked for, or forgotten, by bin of age."""

COARSER = 1 << 31
"""Set in the code of a coarser class; the rest is its number."""

_MERGED_AT = 512
"""Chunks that waited are counted at so many times, not each at its own."""


@dataclass(frozen=True, slots=True)
class HistoryState:
    """``chunks`` are of dtype CHUNK, ``classes`` of CLASS, ``groups`` in the order of numbers.

    ``fill`` may be called for an AccessHistory that was told of nothing yet.
    """

    groups: tuple[int, ...]
    classes: NDArray[np.void]
    chunks: NDArray[np.void]

    @classmethod
    def of(cls, history: AccessHistory, rows: Rows, now_s: float) -> HistoryState:
        """Return what *history* knows; the chunks are those of *rows*, without their keys."""
        time_s = history.time_s(now_s)
        history.table.settle(time_s)
        rows = rows[rows < len(history.hits)]
        seen = history.columns()
        chunks = np.zeros(len(rows), CHUNK)
        chunks["age_s"] = np.maximum(time_s - seen.last_s[rows], 0.0)
        chunks["flops"] = seen.flops[rows]
        for name in ("chunks", "hits", "turns", "own"):
            chunks[name] = getattr(seen, name)[rows]
        count = history.kinds.count
        classes = np.zeros(count, CLASS)
        codes = history.kinds.codes()
        classes["code"] = np.where(codes < 0, COARSER | np.arange(count), codes)
        classes["asked"], classes["forgotten"] = history.table.ended(count)
        return cls(history.kinds.groups, classes, chunks)

    def fill(self, history: AccessHistory, rows: Rows, now_s: float) -> None:
        """Let *history* know it, the chunks under *rows*. Raises InvalidRequestError."""
        time_s = history.time_s(now_s)
        for group in self.groups:
            history.kinds.group(group)
        self._fill_table(history)
        if not len(rows):
            return
        history.reach(int(rows.max()))
        seen = history.columns()
        order = np.argsort(-self.chunks["age_s"], kind="stable")
        for part in np.array_split(order, min(_MERGED_AT, len(order))):
            mine, last_s = rows[part], time_s - float(self.chunks["age_s"][part[0]])
            seen.last_s[mine] = last_s
            seen.flops[mine] = self.chunks["flops"][part]
            for name in ("chunks", "hits", "turns", "own"):
                getattr(seen, name)[mine] = self.chunks[name][part]
            contexts = history.kinds.contexts(seen.turns[mine], seen.chunks[mine])
            classes = history.kinds.of(seen.own[mine], seen.hits[mine], contexts)
            seen.classes[mine] = classes
            history.table.wait(classes, last_s)
        history.table.refresh(time_s, history.kinds.count)

    def _fill_table(self, history: AccessHistory) -> None:
        first = self.classes["code"]
        numbers = [
            int(code) & ~COARSER if code & COARSER else history.kinds.number(int(code))
            for code in first.tolist()
        ]
        count = len(history.kinds.coarse)
        asked, forgotten = np.zeros((2, count, AGE_BINS))
        fits = np.array([number < count for number in numbers], bool)
        at = np.array(numbers, np.intp)[fits]
        np.add.at(asked, at, self.classes["asked"][fits])
        np.add.at(forgotten, at, self.classes["forgotten"][fits])
        history.table.learned(asked, forgotten)


MAX_SPACE_BYTES = 1 << 14
"""Of one record; a Representation that takes more is not kept."""
MAX_RECORDS_BYTES = 4 + MAX_SPACES * MAX_SPACE_BYTES

_COUNT = struct.Struct("<I")
_RECORD = struct.Struct(f"<{DIGEST_BYTES}sHHI")


def pack_spaces(spaces: Sequence[ModelNamespace]) -> bytes:
    """Return the records of the last MAX_SPACES of *spaces*, in their order."""
    records = [
        record for one in spaces[-MAX_SPACES:] if len(record := _pack(one)) <= MAX_SPACE_BYTES
    ]
    return _COUNT.pack(len(records)) + b"".join(records)


def _pack(space: ModelNamespace) -> bytes:
    message = representation_to_message(space.representation)
    parts = (
        space.tenant.encode()[:0xFFFF],
        space.client.encode()[:0xFFFF],
        message.SerializeToString(deterministic=True),
    )
    return _RECORD.pack(space.namespace, *map(len, parts)) + b"".join(parts)


def unpack_spaces(data: bytes) -> list[ModelNamespace]:
    """Parse all of *data*. Raises InvalidFrameError."""
    try:
        (count,) = _COUNT.unpack_from(data)
        if count > MAX_SPACES:
            raise InvalidFrameError("spaces", count, f"at most {MAX_SPACES}")
        spaces, at = [], _COUNT.size
        for _ in range(count):
            one, at = _unpack(data, at)
            spaces.append(one)
    except (struct.error, UnicodeDecodeError, DecodeError):
        raise InvalidFrameError("spaces", len(data), "they do not end, or are no text") from None
    if at != len(data):
        raise InvalidFrameError("spaces", len(data), "there is more behind them")
    return spaces


def _unpack(data: bytes, at: int) -> tuple[ModelNamespace, int]:
    name, *sizes = _RECORD.unpack_from(data, at)
    at += _RECORD.size
    parts = []
    for size in sizes:
        parts.append(data[at : at + size])
        at += size
    if at > len(data) or _RECORD.size + sum(sizes) > MAX_SPACE_BYTES:
        raise InvalidFrameError("spaces", sum(sizes), "more than there is, or than one may have")
    tenant, client, message = parts
    try:
        kind = representation_from_message(pb.Representation.FromString(message))
    except KVStoreError as error:
        raise InvalidFrameError("spaces", name.hex(), str(error)) from None
    return ModelNamespace(Namespace(name), tenant.decode(), client.decode(), kind), at


FILE_NAME = "history.kvh"
MAX_CHUNKS = 1 << 19
"""Chunks in a file; of more, those that left longest ago are not kept. 32 MiB of them."""

MAX_CLASSES = 4096
MAX_GROUPS = 1024
MAX_FILE_BYTES = (
    (1 << 20) + MAX_CHUNKS * CHUNK.itemsize + MAX_CLASSES * CLASS.itemsize + MAX_RECORDS_BYTES
)

_MAGIC = b"KVHS"
_PLAIN, _WITH_SPACES = 1, 2
"""Versions: the second has namespaces behind the chunks."""
_HEAD = struct.Struct("<4sHHIIII")
_NAMES = struct.Struct("<HH")
_TAIL = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class SavedHistory:
    """``groups``: tenant and category by group number, from 1; ``state``: the rest.

    ``spaces``: what namespaces stand for, those whose last session opened first first.
    """

    groups: Sequence[tuple[str, str]]
    state: HistoryState
    spaces: Sequence[ModelNamespace] = ()

    def pack(self) -> bytes:
        """Return the bytes of the file."""
        state = self.state
        chunks = state.chunks[-MAX_CHUNKS:]
        groups = list(self.groups[:MAX_GROUPS])
        numbers = np.array(state.groups, "<u4").tobytes()
        parts = [
            _HEAD.pack(
                _MAGIC, _WITH_SPACES if self.spaces else _PLAIN, AGE_BINS, len(groups),
                len(state.groups), len(state.classes), len(chunks),
            ),
            *(_packed(*names) for names in groups),
            numbers,
            state.classes.tobytes(),
            chunks.tobytes(),
            pack_spaces(self.spaces) if self.spaces else b"",
        ]  # fmt: skip
        body = b"".join(parts)
        return body + _TAIL.pack(checksum(as_bytes(body)))

    @classmethod
    def unpack(cls, data: bytes) -> SavedHistory:
        """Parse the bytes of a file. Raises InvalidFrameError, also for future versions."""
        if not _HEAD.size + _TAIL.size <= len(data) <= MAX_FILE_BYTES:
            raise InvalidFrameError("history", len(data), "not the size of a history file")
        body = data[: -_TAIL.size]
        if _TAIL.unpack_from(data, len(body))[0] != checksum(as_bytes(body)):
            raise InvalidFrameError("history", "checksum", "the file is damaged")
        magic, version, bins, *counts = _HEAD.unpack_from(body)
        if (magic, bins) != (_MAGIC, AGE_BINS) or version not in (_PLAIN, _WITH_SPACES):
            raise InvalidFrameError("history", (magic, version, bins), "not this version's")
        group_count, number_count, class_count, chunk_count = counts
        at, groups = _HEAD.size, []
        for _ in range(min(group_count, MAX_GROUPS)):
            names, at = _unpacked(body, at)
            groups.append(names)
        sizes = 4 * number_count, class_count * CLASS.itemsize, chunk_count * CHUNK.itemsize
        end = at + sum(sizes)
        fits = end < len(body) if version == _WITH_SPACES else end == len(body)
        if not fits or len(groups) != group_count:
            raise InvalidFrameError("history", len(body), "its counts do not add up")
        numbers = np.frombuffer(body, "<u4", number_count, at)
        classes = np.frombuffer(body, CLASS, class_count, at + sizes[0])
        chunks = np.frombuffer(body, CHUNK, chunk_count, at + sizes[0] + sizes[1])
        state = HistoryState(tuple(numbers.tolist()), classes, chunks)
        _check(state)
        return cls(groups, state, unpack_spaces(body[end:]) if end < len(body) else ())


def _packed(tenant: str, category: str) -> bytes:
    names = tenant.encode(), category.encode()
    return _NAMES.pack(*map(len, names)) + b"".join(names)


def _unpacked(body: bytes, at: int) -> tuple[tuple[str, str], int]:
    try:
        tenant, category = _NAMES.unpack_from(body, at)
        middle = at + _NAMES.size + tenant
        end = middle + category
        return (body[at + _NAMES.size : middle].decode(), body[middle:end].decode()), end
    except (struct.error, UnicodeDecodeError):
        raise InvalidFrameError("history", at, "its names do not end, or are no text") from None


def _check(state: HistoryState) -> None:
    """Refuse numbers that nobody could have counted."""
    chunks, classes = state.chunks, state.classes
    for name in ("age_s", "flops", "left_s"):
        if not (np.isfinite(chunks[name]).all() and (chunks[name] >= 0).all()):
            raise InvalidFrameError(name, "below 0, or no number", "the file is not ours")
    if not ((chunks["own"] < OWNS).all() and (chunks["hits"] > 0).all()):
        raise InvalidFrameError("own", "or hits", "the file is not ours")
    for name in ("asked", "forgotten"):
        if not (np.isfinite(classes[name]).all() and (classes[name] >= 0).all()):
            raise InvalidFrameError(name, "below 0, or no number", "the file is not ours")


def write_history(folder: Path, saved: SavedHistory) -> None:
    """Put the file into *folder* in one step: the one before it or this, never half of it.

    Raises OSError.
    """
    write_durably(folder / FILE_NAME, saved.pack())


def read_history(folder: Path) -> SavedHistory | None:
    """Return what the file in *folder* has; None without one. Raises InvalidFrameError, OSError."""
    try:
        with open(folder / FILE_NAME, "rb") as file:
            return SavedHistory.unpack(file.read(MAX_FILE_BYTES + 1))
    except FileNotFoundError:
        return None
