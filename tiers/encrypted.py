"""EncryptedTier: another tier, whose medium stores only encrypted frames.

An encrypted frame is cut into cells of ``CELL_BYTES``; the first begins with the header, and each
ends with its tag of 16 bytes. Cell i is encrypted with the nonce *prefix* (8 bytes) and i (4 bytes,
big-endian), and with the header and the chunk's key as additional data: a cell that is changed,
moved, cut off, or of another chunk, tenant, epoch or version of the frame fails authentication.

A frame's key is HKDF-SHA256 (RFC 5869) of its tenant's key with the frame's random salt; a tenant's
key is HKDF of the epoch's key. No two frames share a key, so nonces may be counters (the STREAM of
Hoang, Reyhanitabar, Rogaway and Vizar, CRYPTO 2015, section 7, as in Tink).
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from typing_extensions import override

from kvstore.proto.buffers import Bytes, as_bytes, copy_bytes
from kvstore.proto.errors import ChunkCorruptError, TierUnavailableError
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.tiers.base import DEFAULT_TENANT, Reservation, Tier, TierStats, check_range

CELL_BYTES = 1 << 18
"""Fits a core's cache: a cell is decrypted right after it is read, in the time of a copy."""
TAG_BYTES = 16
HEADER_BYTES = 64
RANDOM_BYTES = 32

_MAGIC = b"KVSE"
_VERSION = 1
# magic, version, three zeros, epoch, reserved, bytes of the frame, tenant, salt, nonce prefix
_HEADER = struct.Struct("<4sB3sIIQ8s24s8s")
_NONCE = struct.Struct(">8sI")
_DATA_BYTES = CELL_BYTES - TAG_BYTES
"""Data bytes of a cell. The first cell's include the header."""
_TENANT_INFO, _FRAME_INFO = b"kvstore at rest 1 tenant", b"kvstore at rest 1 frame"


class UnknownKeyError(Exception):
    """Encrypted with an unknown key, or not encrypted at all."""


class Cell(NamedTuple):
    """A cell: *start* to *stop* of the frame, at *place* of the encrypted frame."""

    number: int
    start: int
    stop: int
    place: int


def encrypted_bytes(frame_bytes: int) -> int:
    """Return the encrypted size of a frame of *frame_bytes*."""
    data = HEADER_BYTES + frame_bytes
    return data + TAG_BYTES * -(-data // _DATA_BYTES)


def largest_frame_bytes(sealed: int) -> int:
    """Return the size of the largest frame that takes at most *sealed* bytes encrypted."""
    return max(0, sealed - HEADER_BYTES - TAG_BYTES * -(-sealed // CELL_BYTES))


def cells(frame_bytes: int, start: int = 0, stop: int | None = None) -> Iterator[Cell]:
    """Yield the cells that hold bytes *start* to *stop* of a frame."""
    stop = frame_bytes if stop is None else stop
    number = (HEADER_BYTES + start) // _DATA_BYTES
    while (begin := max(0, number * _DATA_BYTES - HEADER_BYTES)) < stop:
        end = min(frame_bytes, (number + 1) * _DATA_BYTES - HEADER_BYTES)
        yield Cell(number, begin, end, max(HEADER_BYTES, number * CELL_BYTES))
        number += 1


@lru_cache(maxsize=4096)
def _tenant_key(epoch_key: bytes, tenant_tag: bytes) -> bytes:
    return _hkdf(epoch_key, b"", _TENANT_INFO + tenant_tag)


def _hkdf(key: bytes, salt: bytes, info: bytes) -> bytes:
    """Return 32 bytes of HKDF-SHA256: one round of expansion."""
    return hmac.digest(hmac.digest(salt or bytes(32), key, "sha256"), info + b"\x01", "sha256")


@dataclass(frozen=True, slots=True)
class FrameCipher:
    """The header of one encrypted frame, and the cipher of its cells."""

    header: bytes
    prefix: bytes
    cipher: AESGCM
    additional: bytes

    def seal(self, cell: Cell, data: Bytes, out: Bytes) -> None:
        """Encrypt *data* into *out*, which is longer by a tag."""
        nonce = _NONCE.pack(self.prefix, cell.number)
        self.cipher.encrypt_into(nonce, data.data, self.additional, out.data)

    def open(self, cell: Cell, sealed: Bytes, out: Bytes) -> bool:
        """Decrypt *sealed* into *out*, which is shorter by a tag; False if authentication fails."""
        nonce = _NONCE.pack(self.prefix, cell.number)
        try:
            self.cipher.decrypt_into(nonce, sealed.data, self.additional, out.data)
        except InvalidTag:
            return False
        return True


class KeyRing:
    """Keys by epoch; *keys* returns the current ones, and the last epoch's encrypts.
    *random_bytes* returns each frame's unique salt and nonce prefix. Thread-safe.
    """

    def __init__(
        self, keys: Callable[[], Mapping[int, bytes]], random_bytes: Callable[[int], bytes]
    ) -> None:
        self._keys = keys
        self._random_bytes = random_bytes

    def new(self, key: ChunkKey, frame_bytes: int, tenant: str) -> FrameCipher:
        """Return a cipher for a frame of *tenant*. Raises UnknownKeyError without any key."""
        keys = self._keys()
        if not keys:
            raise UnknownKeyError("no key to encrypt with")
        epoch = max(keys)
        tag = hmac.digest(keys[epoch], tenant.encode(), "sha256")[:8]
        random = self._random_bytes(RANDOM_BYTES)
        header = _HEADER.pack(
            _MAGIC, _VERSION, bytes(3), epoch, 0, frame_bytes, tag, random[:24], random[24:]
        )
        return _frame_cipher(header, keys[epoch], key)

    def cipher_for(self, header: bytes, key: ChunkKey, frame_bytes: int) -> FrameCipher:
        """Return the cipher of the frame of chunk *key*. Raises UnknownKeyError for an unknown
        epoch, ChunkCorruptError for a header that is not of a frame of *frame_bytes*.
        """
        magic, version, zeros, epoch, more, stated, *_ = _HEADER.unpack(header)
        if (magic, version) != (_MAGIC, _VERSION):
            raise UnknownKeyError("not encrypted, or by a later version")
        if zeros.strip(b"\0") or more or stated != frame_bytes:
            raise ChunkCorruptError(key, "its header is not that of the encrypted frame")
        epoch_key = self._keys().get(epoch)
        if epoch_key is None:
            raise UnknownKeyError(f"epoch {epoch} is not among the keys")
        return _frame_cipher(header, epoch_key, key)


def _frame_cipher(header: bytes, epoch_key: bytes, key: ChunkKey) -> FrameCipher:
    *_, tag, salt, prefix = _HEADER.unpack(header)
    frame_key = _hkdf(_tenant_key(epoch_key, tag), salt, _FRAME_INFO)
    return FrameCipher(header, prefix, AESGCM(frame_key), header + key)


READ_CELLS = 4
"""Cells read at once: a megabyte, still in a core's cache when it is decrypted."""


_INNER = (
    "name", "survives_restart", "shared", "reads_ahead", "capacity_bytes", "dropped_rows",
    "prefetch", "chunks_sharing_block", "tenant_of", "flush",
)  # fmt: skip
"""Attributes taken from the inner tier unchanged."""


class EncryptedTier(Tier):
    """*inner*, encrypted with *keys*. Sizes are of plain frames; slack covers the encryption.

    Damaged, unencrypted frames and those with an unknown key raise ChunkCorruptError; on a shared
    medium, where another node may have the key, the latter two are absent.
    """

    def __init__(self, inner: Tier, keys: KeyRing) -> None:
        self.inner = inner
        self._keys = keys
        self.shares_files = False
        self.max_frame_bytes = largest_frame_bytes(inner.max_frame_bytes)
        for name in _INNER:
            setattr(self, name, getattr(inner, name))

    @property
    @override
    def write_error(self) -> str:
        return self.inner.write_error

    @override
    def allocated_bytes(self, size_bytes: int) -> int:
        return self.inner.allocated_bytes(encrypted_bytes(size_bytes))

    # --- writing

    @override
    def reserve(self, info: ChunkInfo, tenant: str = DEFAULT_TENANT) -> Reservation:
        sealed = replace(info, size_bytes=encrypted_bytes(info.size_bytes))
        inner = self.inner.reserve(sealed, tenant)
        return Reservation(info, tenant, inner.reserved_bytes, inner)

    @override
    def write(self, reservation: Reservation, frame: Bytes) -> None:
        reservation.check(frame)
        try:
            cipher = self._keys.new(reservation.info.key, len(frame), reservation.tenant)
        except UnknownKeyError as error:
            raise TierUnavailableError(self.name, str(error)) from None
        sealed = np.empty(encrypted_bytes(len(frame)), np.uint8)
        sealed[:HEADER_BYTES] = as_bytes(cipher.header)
        for cell in cells(len(frame)):
            end = cell.place + cell.stop - cell.start + TAG_BYTES
            cipher.seal(cell, frame[cell.start : cell.stop], sealed[cell.place : end])
        self.inner.write(_inner(reservation), sealed)

    @override
    def seal(self, reservation: Reservation, *, durable: bool = False) -> bool:
        return self.inner.seal(_inner(reservation), durable=durable)

    @override
    def abort(self, reservation: Reservation) -> None:
        self.inner.abort(_inner(reservation))

    # --- reading

    @override
    def read(
        self, key: ChunkKey, out: Bytes, offset: int = 0, verifier: FrameVerifier | None = None
    ) -> bool:
        (info,) = self.find([key])
        if info is None:
            return False
        check_range(info.size_bytes, offset, len(out))
        header: Bytes = np.empty(HEADER_BYTES, np.uint8)
        buffer: Bytes = np.empty(READ_CELLS * CELL_BYTES, np.uint8)
        cipher = self._cipher_for(header, info) if self.inner.read(key, header) else None
        found = cells(info.size_bytes, offset, offset + len(out))
        while cipher is not None and (group := list(islice(found, READ_CELLS))):
            first, last = group[0].place, group[-1]
            sealed = buffer[: last.place - first + last.stop - last.start + TAG_BYTES]
            if not self.inner.read(key, sealed, first):
                return False
            for cell in group:
                if not _decrypt(cipher, out, offset, cell, sealed[cell.place - first :]):
                    raise ChunkCorruptError(key, "the stored bytes do not decrypt")
            if verifier is not None:
                verifier.update(min(last.stop, len(out)))
        return cipher is not None

    def _cipher_for(self, header: Bytes, info: ChunkInfo) -> FrameCipher | None:
        """Return the cipher of a header; None if only another node may have its key."""
        try:
            return self._keys.cipher_for(header.tobytes(), info.key, info.size_bytes)
        except UnknownKeyError as error:
            if self.shared:
                return None
            raise ChunkCorruptError(info.key, str(error)) from None

    # --- metadata

    @override
    def find(self, keys: Sequence[ChunkKey]) -> list[ChunkInfo | None]:
        return [info and _plain(info) for info in self.inner.find(keys)]

    @override
    def scan(self) -> Iterator[ChunkInfo]:
        for sealed in self.inner.scan():
            info = _plain(sealed)
            if info is not None:
                yield info

    @override
    def delete(self, key: ChunkKey) -> bool:
        return self.inner.delete(key)

    @override
    def stats(self) -> TierStats:
        return self.inner.stats()

    @override
    def eviction_run(self, key: ChunkKey, size_bytes: int, tenant: str) -> list[ChunkKey]:
        return self.inner.eviction_run(key, encrypted_bytes(size_bytes), tenant)

    @override
    def close(self) -> None:
        self.inner.close()


def _decrypt(cipher: FrameCipher, out: Bytes, offset: int, cell: Cell, sealed: Bytes) -> bool:
    """Decrypt the part of *cell* that lies in *out*, which begins at *offset* of the frame."""
    size = cell.stop - cell.start
    sealed = sealed[: size + TAG_BYTES]
    start, stop = cell.start - offset, cell.stop - offset
    if start >= 0 and stop <= len(out):
        return cipher.open(cell, sealed, out[start:stop])
    whole = np.empty(size, np.uint8)
    if not cipher.open(cell, sealed, whole):
        return False
    begin, end = max(0, start), min(stop, len(out))
    copy_bytes(out[begin:end], whole[begin - start : end - start])
    return True


def _plain(info: ChunkInfo) -> ChunkInfo | None:
    """Return *info* with the size of its frame; None for a size that no frame has."""
    size = largest_frame_bytes(info.size_bytes)
    is_exact = size > 0 and encrypted_bytes(size) == info.size_bytes
    return replace(info, size_bytes=size) if is_exact else None


def _inner(reservation: Reservation) -> Reservation:
    if not isinstance(reservation.place, Reservation):
        raise reservation.spent()
    return reservation.place
