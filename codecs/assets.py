"""Model assets: files with the tables that a codec needs for one model.

An asset is made offline by ``kvstore calibrate``, belongs to one Model and is named by the digest
of its bytes, which frames that need it carry. docs/format.md specifies the file; it holds only
arrays, and its checksum is verified before use.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvstore.proto.buffers import checksum
from kvstore.proto.errors import InvalidRequestError, ModelError, UnknownCodecError
from kvstore.proto.types import DIGEST_BYTES

MAGIC = b"KVAS"
VERSION = 1
SUFFIX = ".kvasset"
MAX_ASSET_BYTES = 1 << 29
MAX_TABLES = 64
MAX_EDITION = (1 << 32) - 1
_ALIGN_BYTES = 64
_NAME_BYTES = 16
_CHECKSUM_BYTES = 8

_FIXED = struct.Struct("<4sHHIIQ16s24x")
_ROW = struct.Struct("<16sBB6x4IQ16x")
_DTYPES = ("<u1", "<u2", "<f2", "<f4")

Table: TypeAlias = NDArray[Any]

assert _FIXED.size == _ROW.size == 64


class AssetKind(IntEnum):
    """The codec of an asset, by its number in the file."""

    cachegen = 1
    kvtc = 2
    kvq = 3


@dataclass(frozen=True, slots=True, eq=False)
class Asset:
    """One checked asset. ``tables`` are read-only arrays by name.

    ``representation`` is the representation digest of the model; of two assets of one kind and
    model the higher ``edition`` encodes, and both decode. ``digest`` is that of the file's bytes.
    """

    kind: AssetKind
    representation: bytes
    edition: int
    tables: Mapping[str, Table]
    digest: bytes

    def table(self, name: str, dtype: str, shape: tuple[int, ...]) -> Table:
        """Return the table *name*. Raises InvalidRequestError for another dtype or shape.

        A -1 in *shape* matches any extent.
        """
        found = self.tables.get(name)
        if found is None:
            raise InvalidRequestError("asset", name, f"{self.kind.name} needs this table")
        is_like = found.ndim == len(shape) and all(
            want in (-1, have) for want, have in zip(shape, found.shape, strict=True)
        )
        if found.dtype != np.dtype(dtype) or not is_like:
            have = (found.dtype.str, found.shape)
            raise InvalidRequestError(f"asset table {name}", have, f"must be {dtype} {shape}")
        return found


def asset_name(asset: Asset) -> str:
    """Return the file name of *asset*: kind, model and edition."""
    return f"{asset.kind.name}-{asset.representation.hex()}-{asset.edition:04d}{SUFFIX}"


def pack_asset(
    kind: AssetKind, representation: bytes, edition: int, tables: Mapping[str, Table]
) -> bytes:
    """Return the bytes of an asset. Raises InvalidRequestError beyond a limit."""
    if len(representation) != DIGEST_BYTES:
        raise InvalidRequestError("representation", representation.hex(), "give a whole digest")
    if not 0 < edition <= MAX_EDITION:
        raise InvalidRequestError("edition", edition, "count from 1")
    if not 1 <= len(tables) <= MAX_TABLES:
        raise InvalidRequestError("tables", len(tables), f"1 to {MAX_TABLES}")
    out, rows = bytearray(_FIXED.size + _ROW.size * len(tables)), b""
    for name, table in sorted(tables.items()):
        out += bytes(-len(out) % _ALIGN_BYTES)
        rows += _pack_row(name, table, len(out))
        out += np.ascontiguousarray(table).tobytes()
    size = len(out) + _CHECKSUM_BYTES
    if size > MAX_ASSET_BYTES:
        raise InvalidRequestError("asset", size, f"at most {MAX_ASSET_BYTES} bytes")
    _FIXED.pack_into(out, 0, MAGIC, VERSION, kind, len(tables), edition, size, representation)
    out[_FIXED.size : _FIXED.size + len(rows)] = rows
    return bytes(out + struct.pack("<Q", checksum(bytes(out))))


def _pack_row(name: str, table: Table, start: int) -> bytes:
    text = name.encode()
    if not 0 < len(text) <= _NAME_BYTES or table.dtype.str.replace("|", "<") not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise InvalidRequestError("table", (name, table.dtype.str), f"a short name and {known}")
    if not 1 <= table.ndim <= 4 or 0 in table.shape:
        raise InvalidRequestError("table", (name, table.shape), "one to four extents, none empty")
    shape = (*table.shape, *[1] * (4 - table.ndim))
    code = _DTYPES.index(table.dtype.str.replace("|", "<"))
    return _ROW.pack(text, code, table.ndim, *shape, start)


def parse_asset(data: bytes) -> Asset:
    """Check and return the asset in *data*; its tables are views of it.

    Raises InvalidRequestError if it is no asset, of a later version, truncated, damaged or
    inconsistent.
    """
    if len(data) < _FIXED.size + _CHECKSUM_BYTES or data[:4] != MAGIC:
        raise InvalidRequestError("asset", data[:4], f"an asset starts with {MAGIC!r}")
    _, version, kind, count, edition, size, representation = _FIXED.unpack_from(data)
    if version != VERSION:
        raise InvalidRequestError("asset version", version, f"this reader supports {VERSION}")
    if size != len(data) or size > MAX_ASSET_BYTES:
        raise InvalidRequestError("asset", len(data), f"its header states {size} bytes")
    end = size - _CHECKSUM_BYTES
    if checksum(data[:end]) != int.from_bytes(data[end:], "little"):
        raise InvalidRequestError("asset checksum", data[end:].hex(), "damaged: calibrate again")
    if kind not in AssetKind.__members__.values() or not edition:
        raise InvalidRequestError("asset kind", (kind, edition), "made by a newer version")
    if not 1 <= count <= MAX_TABLES or _FIXED.size + _ROW.size * count > end:
        raise InvalidRequestError("asset tables", count, f"1 to {MAX_TABLES}")
    tables = dict(_tables(data, count, end))
    if len(tables) != count:
        raise InvalidRequestError("asset tables", sorted(tables), "a name occurs twice")
    digest = blake3(data).digest(length=DIGEST_BYTES)
    return Asset(AssetKind(kind), representation, edition, MappingProxyType(tables), digest)


def _tables(data: bytes, count: int, end: int) -> Iterator[tuple[str, Table]]:
    at = _FIXED.size + _ROW.size * count
    for index in range(count):
        name, code, extents, *shape, start = _ROW.unpack_from(data, _FIXED.size + _ROW.size * index)
        text = name.rstrip(b"\0")
        is_known = text.isascii() and code < len(_DTYPES) and 1 <= extents <= 4
        if not text or not is_known or shape[extents:] != [1] * (4 - extents):
            raise InvalidRequestError("asset table", (name, code, extents), "unknown here")
        items = shape[0] * shape[1] * shape[2] * shape[3]
        dtype = np.dtype(_DTYPES[code])
        at += -at % _ALIGN_BYTES
        if start != at or not 0 < items <= (end - at) // dtype.itemsize:
            raise InvalidRequestError("asset table", (text, start, shape), "outside the asset")
        table = np.frombuffer(data, dtype, items, at).reshape(shape[:extents])
        at += table.nbytes
        yield text.decode(), table
    if at != end:
        raise InvalidRequestError("asset tables", at, f"must end at {end}")


def read_asset(path: Path) -> Asset:
    """Read the asset in the file *path*. Raises InvalidRequestError, naming the file."""
    try:
        if path.stat().st_size > MAX_ASSET_BYTES:
            raise InvalidRequestError("asset", path.name, f"at most {MAX_ASSET_BYTES} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise InvalidRequestError("asset", str(path), str(error)) from None
    try:
        return parse_asset(data)
    except InvalidRequestError as error:
        raise InvalidRequestError("asset", str(path), str(error)) from None


MAX_ASSETS = 256


class AssetRegistry:
    """Assets by digest, and by kind and model. Thread-safe.

    The lock guards the two dictionaries; assets are immutable.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_digest: dict[bytes, Asset] = {}
        self._newest: dict[tuple[AssetKind, bytes], Asset] = {}

    def add(self, asset: Asset) -> None:
        """Add *asset* unless it is present.

        Raises InvalidRequestError for another asset of the same edition, or beyond MAX_ASSETS.
        """
        use = (asset.kind, asset.representation)
        with self._lock:
            if asset.digest in self._by_digest:
                return
            if len(self._by_digest) >= MAX_ASSETS:
                raise InvalidRequestError("assets", len(self._by_digest), f"at most {MAX_ASSETS}")
            newest = self._newest.get(use)
            if newest is not None and newest.edition == asset.edition:
                what = f"{asset.kind.name} edition {asset.edition}"
                raise InvalidRequestError("asset", what, "two of the same edition: remove one")
            self._by_digest[asset.digest] = asset
            if newest is None or newest.edition < asset.edition:
                self._newest[use] = asset

    def load_folder(self, folder: Path) -> int:
        """Add every asset in *folder*, files named ``*.kvasset``; return their number.

        Raises InvalidRequestError, naming the file, for one that is damaged or of a later version.
        """
        if not folder.is_dir():
            raise InvalidRequestError("assets", str(folder), "give a folder that exists")
        paths = sorted(folder.glob(f"*{SUFFIX}"))
        for path in paths:
            self.add(read_asset(path))
        return len(paths)

    def for_model(self, kind: AssetKind, representation: bytes) -> Asset:
        """Return the asset with which *kind* encodes the model of *representation*.

        Raises UnknownCodecError when there is none: the model then lacks that codec.
        """
        with self._lock:
            found = self._newest.get((kind, representation))
            others = sum(known is kind for known, _ in self._newest)
        if found is None:
            wanted = f"{kind.name} for model {representation.hex()}"
            known = f"assets of {others} other models, and kvstore calibrate makes one"
            raise UnknownCodecError(wanted, known)
        return found

    def any_named(self, kind: AssetKind, digest: bytes) -> Asset:
        """Return the asset of *digest*, of any model. Raises UnknownCodecError."""
        with self._lock:
            found = self._by_digest.get(digest)
            count = len(self._by_digest)
        if found is None or found.kind is not kind:
            raise UnknownCodecError(f"{kind.name} with asset {digest.hex()}", f"{count} others")
        return found

    def named(self, kind: AssetKind, digest: bytes, representation: bytes) -> Asset:
        """Return the asset of *digest* for a frame of the model of *representation*.

        Raises UnknownCodecError when it is unknown or of another kind, ModelError when it belongs
        to another model than the frame.
        """
        found = self.any_named(kind, digest)
        if found.representation != representation:
            fix = f"the frame's model is {representation.hex()}"
            raise ModelError("asset.representation", found.representation.hex(), fix)
        return found


ASSETS = AssetRegistry()
"""The assets of this process, loaded at start from the configured folder."""
