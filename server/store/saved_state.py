"""Learned state that survives a restart: files of sections, each with its own checksum.

docs/format.md specifies the bytes.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import structlog
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.blend import UNKNOWN, check_tag
from kvstore.proto.buffers import checksum
from kvstore.proto.errors import InvalidFrameError, KVStoreError
from kvstore.proto.messages import as_message, representation_from_message
from kvstore.proto.types import DIGEST_BYTES, Namespace
from kvstore.server.blending.content_index import MAX_LEARNED, Learned
from kvstore.server.blending.gates import MAX_GATES, GateName, GateState
from kvstore.server.eviction.access_history import CHUNK, CLASS, OWNS, SavedHistory
from kvstore.server.eviction.reuse_statistics import AGE_BINS
from kvstore.server.index.known_models import MAX_SPACES, ModelNamespace
from kvstore.server.settings.values import MAX_RATIO
from kvstore.server.store.store import Store
from kvstore.tiers.disk_io import write_durably

FILE_NAME = "history.kvh"
GATES_FILE_NAME = "gates.kvh"
MAX_FILE_BYTES = 64 << 20
SAVE_EVERY_S = 300.0
"""A power cut loses what was learned since the last save, and no chunk."""
RETRY_GATES_S = 10.0
"""Gates are saved when one changes, as a closed gate must not be open after a crash; this is the
pause after a failed save."""
MAX_MODEL_BYTES = 1 << 14
"""A larger serialized model is not saved."""
MAX_NAME_CHARS = 256
"""Longer names of models and clients are cut."""

_MAGIC, _VERSION = b"KVHS", 3
_HEAD = struct.Struct("<4sHH")
_ROW = struct.Struct("<8sQQ")
_SUM = struct.Struct("<Q")

logger = structlog.get_logger(__name__)

Sections: TypeAlias = Mapping[str, bytes | memoryview]
SavedGate: TypeAlias = tuple[GateName, GateState]
_T = TypeVar("_T")


def pack_sections(sections: Sections) -> bytes:
    """Return the content of a file."""
    rows = [_ROW.pack(n.encode(), len(data), checksum(data)) for n, data in sections.items()]
    table = _HEAD.pack(_MAGIC, _VERSION, len(rows)) + b"".join(rows)
    return b"".join([table, _SUM.pack(checksum(table)), *sections.values()])


def unpack_sections(data: bytes) -> dict[str, memoryview]:
    """Return the undamaged sections of a file.

    Raises InvalidFrameError for another version or a damaged table of sections.
    """
    view = memoryview(data)
    if not _HEAD.size <= len(data) <= MAX_FILE_BYTES:
        raise InvalidFrameError("history", len(data), "not the size of a history file")
    magic, version, count = _HEAD.unpack_from(data)
    if (magic, version) != (_MAGIC, _VERSION):
        raise InvalidFrameError("history", (magic, version), "not this version's")
    end = _HEAD.size + count * _ROW.size
    table, at = view[:end], end + _SUM.size
    if len(data) < at or _SUM.unpack_from(data, end)[0] != checksum(table):
        raise InvalidFrameError("history", "checksum", "its table of sections is damaged")
    sections = {}
    for name, size, stated_sum in _ROW.iter_unpack(table[_HEAD.size :]):
        part = view[at : at + size]
        at += size
        if len(part) == size and checksum(part) == stated_sum:
            sections[name.rstrip(b"\0").decode("latin-1")] = part
    return sections


# --- sections in JSON

_Digest = Annotated[bytes, Field(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Positive = Annotated[float, Field(ge=0)]
_Count = Annotated[int, Field(ge=0, lt=1 << 32)]


class _Groups(NamedTuple):
    age_bins: int
    names: list[tuple[str, str]]
    groups: list[_Count]


class _Model(NamedTuple):
    namespace: _Digest
    tenant: str
    client: str
    representation: Annotated[bytes, Field(min_length=1, max_length=MAX_MODEL_BYTES)]


class _Gate(NamedTuple):
    namespace: _Digest
    tag: Annotated[str, AfterValidator(check_tag)]
    model: Annotated[str, Field(max_length=MAX_NAME_CHARS)]
    ratio: Annotated[float, Field(ge=0, le=MAX_RATIO)]
    agreement: _Share
    divergence: _Positive
    speedup: float


_JSON = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", allow_inf_nan=False)
_GROUPS = TypeAdapter(_Groups, config=_JSON)
_MODELS = TypeAdapter(Annotated[list[_Model], Field(max_length=MAX_SPACES)], config=_JSON)
_GATES = TypeAdapter(Annotated[list[_Gate], Field(max_length=MAX_GATES)], config=_JSON)
_VARIANTS = TypeAdapter(Annotated[list[Learned], Field(max_length=MAX_LEARNED)], config=_JSON)


def _section(sections: Sections, name: str) -> bytes:
    if name not in sections:
        raise InvalidFrameError(name, "checksum", "damaged or missing")
    return bytes(sections[name])


def _parsed(rows: TypeAdapter[_T], sections: Sections, name: str) -> _T:
    try:
        return rows.validate_json(_section(sections, name))
    except ValidationError as error:
        raise InvalidFrameError(name, error.error_count(), "invalid rows") from None


def pack_models(spaces: Sequence[ModelNamespace]) -> bytes:
    """Return the section ``models`` with the last MAX_SPACES of *spaces*, in order."""
    rows = []
    for one in spaces[-MAX_SPACES:]:
        data = as_message(pb.Representation, one.representation).SerializeToString(
            deterministic=True
        )
        if len(data) <= MAX_MODEL_BYTES:
            rows.append(_Model(one.namespace, one.tenant, one.client[:MAX_NAME_CHARS], data))
    return _MODELS.dump_json(rows)


def unpack_models(sections: Sections) -> list[ModelNamespace]:
    """Return the models of namespaces. Raises InvalidFrameError."""
    spaces = []
    for row in _parsed(_MODELS, sections, "models"):
        try:
            kind = representation_from_message(pb.Representation.FromString(row.representation))
        except (KVStoreError, DecodeError) as error:
            raise InvalidFrameError("models", row.namespace.hex(), str(error)) from None
        spaces.append(ModelNamespace(Namespace(row.namespace), row.tenant, row.client, kind))
    return spaces


def pack_gates(gates: Sequence[SavedGate]) -> bytes:
    """Return the section ``gates`` for open gates."""
    rows = [
        _Gate(*name, g.model[:MAX_NAME_CHARS], g.ratio, g.agreement, g.divergence, g.speedup)
        for name, g in gates
    ]
    return _GATES.dump_json(rows)


def unpack_gates(sections: Sections) -> list[SavedGate]:
    """Return the gates that were open. Raises InvalidFrameError."""
    gates: list[SavedGate] = []
    for row in _parsed(_GATES, sections, "gates"):
        gate = GateState(
            is_open=True, ratio=row.ratio, agreement=row.agreement, divergence=row.divergence,
            why="calibrated before the last start", is_calibrated=True,
            speedup=row.speedup if row.speedup >= 0 else UNKNOWN, tag=row.tag, model=row.model,
        )  # fmt: skip
        gates.append(((row.namespace, row.tag), gate))
    return gates


def pack_variants(rows: Sequence[Learned]) -> bytes:
    """Return the section ``variants``, in the order of *rows*."""
    return _VARIANTS.dump_json(list(rows))


def unpack_variants(sections: Sections) -> list[Learned]:
    """Return the engine reports on variants. Raises InvalidFrameError."""
    return _parsed(_VARIANTS, sections, "variants")


# --- state of eviction policies


def pack_history(saved: SavedHistory) -> dict[str, bytes]:
    """Return the three sections of *saved*, usable only together."""
    groups = _Groups(AGE_BINS, list(saved.names), list(saved.groups))
    return {
        "groups": _GROUPS.dump_json(groups),
        "classes": saved.classes.tobytes(),
        "chunks": saved.chunks.tobytes(),
    }


def unpack_history(sections: Sections, elapsed_s: float = 0.0) -> SavedHistory:
    """Return the state of policies, aged by *elapsed_s*. Raises InvalidFrameError."""
    groups = _parsed(_GROUPS, sections, "groups")
    if groups.age_bins != AGE_BINS:
        raise InvalidFrameError("age_bins", groups.age_bins, "not this version's")
    classes = _array(sections, "classes", CLASS, ("asked", "forgotten"))
    chunks = _array(sections, "chunks", CHUNK, ("age_s", "flops", "left_s"))
    if not ((chunks["own"] < OWNS).all() and (chunks["hits"] > 0).all()):
        raise InvalidFrameError("own", "or hits", "the file is not ours")
    chunks["age_s"] += elapsed_s
    mortal = chunks["left_s"] > 0
    chunks["left_s"][mortal] = (chunks["left_s"][mortal] - elapsed_s).clip(min=1e-9)
    return SavedHistory(groups.names, groups.groups, classes, chunks)


def _array(
    sections: Sections, name: str, row: np.dtype[Any], positive: Sequence[str]
) -> NDArray[np.void]:
    """Return a section of rows; fields *positive* must be finite and not negative."""
    data = _section(sections, name)
    if len(data) % row.itemsize:
        raise InvalidFrameError(name, len(data), f"no multiple of {row.itemsize} bytes")
    found = np.frombuffer(data, row).copy()
    for field in positive:
        if not ((found[field] >= 0) & (found[field] < math.inf)).all():
            raise InvalidFrameError(field, "below 0, or no number", "the file is not ours")
    return found


class SavedState:
    """Saves what *store* learned in *folder*. For one thread, after ``load``.

    *wall* returns seconds since 1970: ages advance while no server runs.
    """

    def __init__(self, store: Store, folder: Path, wall: Callable[[], float]) -> None:
        self._store = store
        self._gates = store.blends.gates
        self._path = folder / FILE_NAME
        self._gates_path = folder / GATES_FILE_NAME
        self._clock = store.moves.clock
        self._wall = wall
        self._saved_s = self._retry_s = self._clock()
        self._gate_changes = self._gates.changes

    def load(self) -> None:
        """Restore the state of an earlier run, first of all; unusable parts are counted."""
        store, gates = self._store, self._gates
        learned: dict[str, Callable[[Sections, float], object]] = {
            "history": lambda found, age_s: store.catalog.restore(unpack_history(found, age_s)),
            "models": lambda found, _: store.spaces.restore(unpack_models(found)),
            "variants": lambda found, _: store.blends.contents.recall(unpack_variants(found)),
        }
        self._load(self._path, learned)
        self._load(self._gates_path, {"gates": lambda found, _: gates.restore(unpack_gates(found))})

    def _load(self, path: Path, parts: Mapping[str, Callable[[Sections, float], object]]) -> None:
        lost: dict[str, str] = {}
        try:
            with open(path, "rb") as file:
                elapsed_s = max(0.0, self._wall() - os.fstat(file.fileno()).st_mtime)
                sections = unpack_sections(file.read(MAX_FILE_BYTES + 1))
        except FileNotFoundError:
            return
        except (KVStoreError, OSError) as error:
            lost, parts = {path.name: str(error)}, {}
        for name, restore in parts.items():
            try:
                restore(sections, elapsed_s)
            except KVStoreError as error:
                lost[name] = str(error)
        if lost:
            self._store.counters.add("unusable_histories")
            logger.warning("saved state is unusable", **lost)

    def save_if_due(self) -> None:
        """Write the gates if one changed, and the history every SAVE_EVERY_S."""
        now_s = self._clock()
        if self._gate_changes != self._gates.changes and now_s >= self._retry_s:
            self._save_gates()
        if now_s - self._saved_s >= SAVE_EVERY_S:
            self._save_history()

    def save(self) -> bool:
        """Write both files, each atomically. Return whether both succeeded."""
        return self._save_gates() & self._save_history()

    def _save_gates(self) -> bool:
        changes = self._gates.changes
        if not _is_written(self._gates_path, {"gates": pack_gates(self._gates.save())}):
            self._retry_s = self._clock() + RETRY_GATES_S
            return False
        self._gate_changes = changes
        return True

    def _save_history(self) -> bool:
        store, self._saved_s = self._store, self._clock()
        sections = {
            **pack_history(store.catalog.save()),
            "models": pack_models(store.spaces.all()[::-1]),
            "variants": pack_variants(store.blends.contents.learned()),
        }
        return _is_written(self._path, sections)


def _is_written(path: Path, sections: Sections) -> bool:
    try:
        write_durably(path, pack_sections(sections))
    except OSError as error:
        logger.warning("state not saved", reason=str(error))
        return False
    return True
