"""Frames as they lie encrypted on a medium: cells of AES-256-GCM behind a header.

An encrypted frame is cut into cells of ``CELL_BYTES``; the first begins with the header, and each
ends with its tag of 16 bytes. Cell i is sealed under the nonce *prefix* (8 bytes) and i (4 bytes,
big-endian), with the header and the chunk's key as additional data: a cell that is changed, moved,
cut off, or of another chunk, tenant, epoch or version of the frame does not open.

The key of a frame is HKDF-SHA256 (RFC 5869) of that of its tenant with the frame's random salt, and
the key of a tenant HKDF of that of the epoch: no two frames share a key, so that nonces may count
(the STREAM of Hoang, Reyhanitabar, Rogaway and Vizar, CRYPTO 2015, section 7, as Tink builds it).
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import ChunkCorruptError
from kvstore.proto.types import ChunkKey

CELL_BYTES = 1 << 18
"""What a core caches: a cell is decrypted where it was just read, in the time of a copy."""
TAG_BYTES = 16
HEADER_BYTES = 64
RANDOM_BYTES = 32

_MAGIC = b"KVSE"
_VERSION = 1
# magic, version, three zeros, epoch, reserved, bytes of the frame, tenant, salt, nonce prefix
_HEADER = struct.Struct("<4sB3sIIQ8s24s8s")
_NONCE = struct.Struct(">8sI")
_FIRST_BYTES = CELL_BYTES - HEADER_BYTES - TAG_BYTES
_OTHER_BYTES = CELL_BYTES - TAG_BYTES
_TENANT_INFO, _FRAME_INFO = b"kvstore at rest 1 tenant", b"kvstore at rest 1 frame"


class UnknownEpochError(Exception):
    """Encrypted under a key that is not here, or not encrypted at all."""


class Cell(NamedTuple):
    """Where a cell is: *start* to *stop* of the frame, and where it begins on the medium."""

    number: int
    start: int
    stop: int
    place: int


def sealed_bytes(frame_bytes: int) -> int:
    """Return the bytes that a frame of *frame_bytes* takes encrypted."""
    more = max(0, frame_bytes - _FIRST_BYTES)
    return HEADER_BYTES + frame_bytes + TAG_BYTES * (1 + -(-more // _OTHER_BYTES))


def frame_bytes_of(sealed: int) -> int:
    """Return the bytes of the frame that takes *sealed* encrypted; 0 where none does."""
    frame_bytes = sealed - HEADER_BYTES - TAG_BYTES * -(-sealed // CELL_BYTES)
    return frame_bytes if frame_bytes > 0 and sealed_bytes(frame_bytes) == sealed else 0


def largest_frame_bytes(sealed: int) -> int:
    """Return the largest frame that takes at most *sealed* bytes encrypted."""
    return max(0, sealed - HEADER_BYTES - TAG_BYTES * -(-sealed // CELL_BYTES))


def cells(frame_bytes: int, start: int = 0, stop: int | None = None) -> Iterator[Cell]:
    """Yield the cells that hold bytes *start* to *stop* of a frame."""
    stop = frame_bytes if stop is None else stop
    number = 0 if start < _FIRST_BYTES else 1 + (start - _FIRST_BYTES) // _OTHER_BYTES
    while True:
        begin = _FIRST_BYTES + (number - 1) * _OTHER_BYTES if number else 0
        end = min(frame_bytes, _FIRST_BYTES + number * _OTHER_BYTES)
        if begin >= stop:
            return
        yield Cell(number, begin, end, number * CELL_BYTES if number else HEADER_BYTES)
        number += 1


@lru_cache(maxsize=4096)
def _tenant_key(epoch_key: bytes, tenant_tag: bytes) -> bytes:
    return _hkdf(epoch_key, b"", _TENANT_INFO + tenant_tag)


def _hkdf(key: bytes, salt: bytes, info: bytes) -> bytes:
    """Return 32 bytes of HKDF-SHA256: one round of its expansion."""
    return hmac.digest(hmac.digest(salt or bytes(32), key, "sha256"), info + b"\x01", "sha256")


@dataclass(frozen=True, slots=True)
class Envelope:
    """The header of one encrypted frame and what opens and seals its cells."""

    header: bytes
    prefix: bytes
    cipher: AESGCM
    additional: bytes

    def seal(self, cell: Cell, data: Bytes, out: Bytes) -> None:
        """Encrypt *data* into *out*, which is a tag longer."""
        nonce = _NONCE.pack(self.prefix, cell.number)
        self.cipher.encrypt_into(nonce, data.data, self.additional, out.data)

    def open(self, cell: Cell, sealed: Bytes, out: Bytes) -> bool:
        """Decrypt *sealed* into *out*, which is a tag shorter; False if it was not sealed so."""
        nonce = _NONCE.pack(self.prefix, cell.number)
        try:
            self.cipher.decrypt_into(nonce, sealed.data, self.additional, out.data)
        except InvalidTag:
            return False
        return True


class AtRestKeys:
    """Keys by epoch, which *keys* returns as they are now; the last epoch's is sealed with.

    *random_bytes* gives what no two frames may share. Thread-safe.
    """

    def __init__(
        self, keys: Callable[[], Mapping[int, bytes]], random_bytes: Callable[[int], bytes]
    ) -> None:
        self._keys = keys
        self._random_bytes = random_bytes

    def new(self, key: ChunkKey, frame_bytes: int, tenant: str) -> Envelope:
        """Return an envelope for a frame of *tenant*. Raises UnknownEpochError without any key."""
        keys = self._keys()
        if not keys:
            raise UnknownEpochError("no key to encrypt with")
        epoch = max(keys)
        tag = hmac.digest(keys[epoch], tenant.encode(), "sha256")[:8]
        random = self._random_bytes(RANDOM_BYTES)
        header = _HEADER.pack(
            _MAGIC, _VERSION, bytes(3), epoch, 0, frame_bytes, tag, random[:24], random[24:]
        )
        return _envelope(header, keys[epoch], key)

    def known(self, header: bytes, key: ChunkKey, frame_bytes: int) -> Envelope:
        """Return the envelope of what lies under *key*.

        Raises UnknownEpochError for a key that is not here, ChunkCorruptError for a header that
        is not that of a frame of *frame_bytes*.
        """
        magic, version, zeros, epoch, more, stated, *_ = _HEADER.unpack(header)
        if (magic, version) != (_MAGIC, _VERSION):
            raise UnknownEpochError("not encrypted, or by a later version")
        if zeros.strip(b"\0") or more or stated != frame_bytes:
            raise ChunkCorruptError(key, "its header is not that of the encrypted frame")
        epoch_key = self._keys().get(epoch)
        if epoch_key is None:
            raise UnknownEpochError(f"epoch {epoch} is not among the keys")
        return _envelope(header, epoch_key, key)


def _envelope(header: bytes, epoch_key: bytes, key: ChunkKey) -> Envelope:
    *_, tag, salt, prefix = _HEADER.unpack(header)
    frame_key = _hkdf(_tenant_key(epoch_key, tag), salt, _FRAME_INFO)
    return Envelope(header, prefix, AESGCM(frame_key), header + key)
