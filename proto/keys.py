"""The names of chunks. docs/format.md specifies them with test vectors.

All integers are little-endian; every variable-length field is preceded by its length as
uint32. Nothing here depends on the process: no builtin ``hash()``, no environment.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from numbers import Integral
from typing import cast

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import (
    DEFAULT_CHUNK_TOKENS,
    DIGEST_BYTES,
    KEY_BYTES,
    MAX_CHUNK_TOKENS,
    MIN_CHUNK_TOKENS,
    ROOT,
    ChainDigest,
    ChunkKey,
    Model,
    Namespace,
)

_SALT_CONTEXT = "kvstore v1 namespace salt"
_REPRESENTATION = b"kvstore.v1.representation"
_CHAIN = b"kvstore.v1.chain"
_CONTENT = b"kvstore.v1.content"
_U32 = struct.Struct("<I")
_FLAT = "give a flat sequence of integer token ids, one prompt at a time"
_BYTES = "give a sequence of bytes, such as [b'salt']"

_DIGEST = f"V{DIGEST_BYTES}"
"""numpy's dtype of a digest or namespace; a prompt has hundreds of keys."""


def _field(data: bytes) -> bytes:
    return _U32.pack(len(data)) + data


def _text(value: str) -> bytes:
    return _field(value.encode())


def encode_representation(representation: Model) -> bytes:
    """Return the canonical bytes of *representation*, the same on every machine."""
    it, rope = representation, representation.rope
    texts = (it.model_id, it.model_revision, it.adapter_digest, it.quantization)
    out = [_REPRESENTATION, _U32.pack(it.layout_version), *map(_text, texts)]
    out.append(_text(it.tokenizer_digest))
    out.append(struct.pack("<dI", rope.theta, rope.rotary_dim) + _text(rope.scaling))
    out.append(_U32.pack(len(rope.factors)))
    out += [_text(name) + struct.pack("<d", value) for name, value in rope.factors]
    out.append(_U32.pack(len(representation.layer_groups)))
    for group in representation.layer_groups:
        kinds = struct.pack("<BB", group.kind, group.dtype)
        out.append(kinds + struct.pack("<3I", group.kv_heads, group.head_dim, group.window_tokens))
        out.append(_field(struct.pack(f"<{len(group.layer_ids)}I", *group.layer_ids)))
    return b"".join(out)


def representation_digest(representation: Model) -> bytes:
    """Return the 16-byte digest of a Model, independent of the tenant."""
    return blake3(encode_representation(representation)).digest(length=DIGEST_BYTES)


def namespace(tenant_salt: bytes, representation: Model) -> Namespace:
    """Return blake3 of the Model, keyed by the tenant's salt.

    Without the salt, a key does not reveal its tenant or model, and nobody can name another
    tenant's chunks.
    """
    key = blake3(tenant_salt, derive_key_context=_SALT_CONTEXT).digest(length=32)
    body = encode_representation(representation)
    return Namespace(blake3(body, key=key).digest(length=DIGEST_BYTES))


def chunk_key(space: Namespace, digest: ChainDigest) -> ChunkKey:
    """Join a namespace and a chain digest to the 32-byte key of a chunk."""
    return ChunkKey(space + digest)


def tokens_le32(tokens: Sequence[int]) -> bytes:
    """Return token ids as little-endian uint32. Raises InvalidRequestError on a bad id."""
    try:
        ids = np.asarray(tokens)
    except (ValueError, TypeError, RuntimeError):  # ragged, or on a device
        raise InvalidRequestError("tokens", tokens, _FLAT) from None
    if ids.size == 0 and ids.ndim == 1:
        return b""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidRequestError("tokens", tokens, _FLAT)
    if int(ids.min()) < 0 or int(ids.max()) >= 1 << 32:
        raise InvalidRequestError("tokens", tokens, "token ids are in 0..2^32-1")
    return ids.astype("<u4", copy=False).tobytes()


def chain_digest(
    parent: ChainDigest, token_bytes: bytes | memoryview, extra: Sequence[bytes] = ()
) -> ChainDigest:
    """Name a chunk by its parent, its tokens and extra ids such as multimodal hashes."""
    return ChainDigest(_digest(_CHAIN, parent, token_bytes, extra))


def content_digest(token_bytes: bytes | memoryview, extra: Sequence[bytes] = ()) -> bytes:
    """Return the 16-byte digest of a chunk's tokens alone, by which blending finds chunks."""
    return _digest(_CONTENT, b"", token_bytes, extra)


def _digest(
    domain: bytes, parent: bytes, token_bytes: bytes | memoryview, extra: Sequence[bytes]
) -> bytes:
    parts = [_field(domain), _field(parent), _U32.pack(len(token_bytes)), bytes(token_bytes)]
    parts.append(_U32.pack(len(extra)))
    if not isinstance(extra, Sequence) or not all(isinstance(one, bytes) for one in extra):
        raise InvalidRequestError("extra", extra, _BYTES)
    parts += map(_field, extra)
    return blake3(b"".join(parts)).digest(length=DIGEST_BYTES)


def check_chunk_tokens(chunk_tokens: int) -> None:
    """Raise InvalidRequestError for an invalid chunk size."""
    fix = f"use {MIN_CHUNK_TOKENS} to {MAX_CHUNK_TOKENS}"
    if not isinstance(chunk_tokens, Integral):
        raise InvalidRequestError("chunk_tokens", chunk_tokens, f"{fix}, a whole number")
    if not MIN_CHUNK_TOKENS <= chunk_tokens <= MAX_CHUNK_TOKENS:
        raise InvalidRequestError("chunk_tokens", chunk_tokens, fix)


def chunk_spans(
    token_count: int, chunk_tokens: int = DEFAULT_CHUNK_TOKENS
) -> list[tuple[int, int]]:
    """Cut *token_count* tokens into (start, stop) spans; a last one below 16 is left out."""
    check_chunk_tokens(chunk_tokens)
    starts = range(0, token_count, chunk_tokens)
    spans = [(start, min(start + chunk_tokens, token_count)) for start in starts]
    if spans and spans[-1][1] - spans[-1][0] < MIN_CHUNK_TOKENS:
        spans.pop()
    return spans


def chain_digests(
    tokens: Sequence[int],
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    extra: Sequence[bytes] = (),
) -> list[ChainDigest]:
    """Return the digest of each chunk of a prompt, in order, as ``chunk_spans`` cuts it.

    *extra* (cache salt, multimodal hashes) enters the first chunk and so the whole chain.
    """
    digests: list[ChainDigest] = []
    parent, data = ROOT, memoryview(tokens_le32(tokens))
    for start, stop in chunk_spans(len(data) // 4, chunk_tokens):
        piece = data[4 * start : 4 * stop]
        parent = chain_digest(parent, piece, () if digests else extra)
        digests.append(parent)
    return digests


def split_digests(packed: bytes, limit: int) -> list[ChainDigest]:
    """Unpack at most *limit* digests. Raises InvalidRequestError on a ragged or long field."""
    return cast("list[ChainDigest]", _digests(packed, limit).tolist())


def _digests(packed: bytes, limit: int) -> NDArray[np.void]:
    count, rest = divmod(len(packed), DIGEST_BYTES)
    if rest:
        raise InvalidRequestError("digests", len(packed), f"give {DIGEST_BYTES} bytes per chunk")
    if count > limit:
        raise InvalidRequestError("digests", count, f"at most {limit} chunks in one batch")
    return np.frombuffer(packed, _DIGEST)


def keys_of_digests(packed: bytes, space: Namespace, limit: int) -> list[ChunkKey]:
    """Unpack at most *limit* digests into keys of the namespace *space*.

    Raises InvalidRequestError as ``split_digests`` does.
    """
    digests = _digests(packed, limit)
    halves = np.empty((len(digests), 2), _DIGEST)
    halves[:, 0], halves[:, 1] = np.void(space), digests
    return cast("list[ChunkKey]", halves.view(f"V{KEY_BYTES}").ravel().tolist())


def page_hash(before: bytes, token_bytes: bytes | memoryview) -> bytes:
    """Return SGLang's 32-byte hash of a page of tokens; its first 16 bytes name a chunk.

    *before*: the hash of the previous page, empty for the first of a prompt.
    """
    return hashlib.sha256(before + bytes(token_bytes)).digest()


def page_digests(tokens: Sequence[int], chunk_tokens: int) -> list[ChainDigest]:
    """Return the digests of a prompt's chunks as SGLang names pages of *chunk_tokens* tokens."""
    digests, page, data = [], b"", tokens_le32(tokens)
    for start, stop in chunk_spans(len(data) // 4, chunk_tokens):
        page = page_hash(page, data[4 * start : 4 * stop])
        digests.append(ChainDigest(page[:DIGEST_BYTES]))
    return digests
