"""Chunks named as SGLang names its pages of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvstore.proto.keys import chunk_spans, tokens_le32
from kvstore.proto.types import DIGEST_BYTES, ChainDigest


def page_hash(before: bytes, token_bytes: bytes | memoryview) -> bytes:
    """Return SGLang's hash of a page of tokens, 32 bytes, of which the first 16 name a chunk.

    *before*: that of the page before, nothing for the first of a prompt.
    """
    return hashlib.sha256(before + bytes(token_bytes)).digest()


def page_digests(tokens: Sequence[int], chunk_tokens: int) -> list[ChainDigest]:
    """Return what ``keys.chain_digests`` does, as SGLang names pages of so many tokens."""
    digests, page, data = [], b"", tokens_le32(tokens)
    for start, stop in chunk_spans(len(data) // 4, chunk_tokens):
        page = page_hash(page, data[4 * start : 4 * stop])
        digests.append(ChainDigest(page[:DIGEST_BYTES]))
    return digests
