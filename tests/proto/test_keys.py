from __future__ import annotations

import dataclasses
import struct
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from golden.samples import CHUNK_TOKENS, EXTRA, REPRESENTATION, SALT, TOKENS, template, vectors
from golden.strategies import representations
from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.keys import (
    chain_digests,
    chunk_spans,
    content_digest,
    encode_representation,
    namespace,
    representation_digest,
    tokens_le32,
)
from kvstore.proto.types import LayerGroup, Model, RopeParameters


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def field(data: bytes) -> bytes:
    return u32(len(data)) + data


def by_the_page(r: Model) -> bytes:
    """The canonical bytes, written again from the prose of docs/format.md."""
    out = b"kvstore.v1.representation" + u32(r.layout_version)
    for text in (
        r.model_id, r.model_revision, r.adapter_digest, r.quantization, r.tokenizer_digest,
    ):  # fmt: skip
        out += field(text.encode("utf-8"))
    out += struct.pack("<d", r.rope.theta) + u32(r.rope.rotary_dim)
    out += field(r.rope.scaling.encode("utf-8")) + u32(len(r.rope.factors))
    for name, value in r.rope.factors:
        out += field(name.encode("utf-8")) + struct.pack("<d", value)
    out += u32(len(r.layer_groups))
    for group in r.layer_groups:
        out += bytes([int(group.kind), int(group.dtype)])
        out += u32(group.kv_heads) + u32(group.head_dim) + u32(group.window_tokens)
        out += field(b"".join(map(u32, group.layer_ids)))
    return out


def digest_by_the_page(
    domain: bytes, parent: bytes, tokens: list[int], extras: list[bytes]
) -> bytes:
    body = field(domain) + field(parent) + field(b"".join(map(u32, tokens)))
    body += u32(len(extras)) + b"".join(map(field, extras))
    return blake3(body).digest()[:16]


def test_vectors_of_the_format_page_hold() -> None:
    plain, extra = chain_digests(TOKENS, CHUNK_TOKENS), chain_digests(TOKENS, CHUNK_TOKENS, EXTRA)
    second = tokens_le32(TOKENS[16:32])
    found = {
        "representation": encode_representation(REPRESENTATION),
        "representation_digest": representation_digest(REPRESENTATION),
        "salt_key": blake3(SALT, derive_key_context="kvstore v1 namespace salt").digest(),
        "namespace": namespace(SALT, REPRESENTATION),
        "tokens_0": tokens_le32(TOKENS[:16]),
        "chain_0": plain[0],
        "chain_1": plain[1],
        "chain_0_with_extras": extra[0],
        "chain_1_with_extras": extra[1],
        "content_1": content_digest(second),
        "content_1_with_extras": content_digest(second, EXTRA),
        "key_1": template().key,
    }
    assert len(plain) == len(extra) == 2
    page = vectors()
    assert {name: value.hex() for name, value in found.items()} == {
        name: page[name] for name in found
    }


@given(representations, st.binary(max_size=40))
def test_names_are_what_the_prose_of_the_page_says(representation: Model, salt: bytes) -> None:
    body = by_the_page(representation)
    assert encode_representation(representation) == body
    assert representation_digest(representation) == blake3(body).digest()[:16]
    key = blake3(salt, derive_key_context="kvstore v1 namespace salt").digest()
    assert namespace(salt, representation) == blake3(body, key=key).digest()[:16]


@given(
    st.lists(st.integers(0, (1 << 32) - 1), max_size=70),
    st.integers(16, 24),
    st.lists(st.binary(max_size=5), max_size=3),
)
def test_digests_are_what_the_prose_of_the_page_says(
    tokens: list[int], size: int, extras: list[bytes]
) -> None:
    expected: list[bytes] = []
    for start in range(0, len(tokens), size):
        piece = tokens[start : start + size]
        if len(piece) >= 16:
            parent = expected[-1] if expected else bytes(16)
            own = [] if expected else extras
            expected.append(digest_by_the_page(b"kvstore.v1.chain", parent, piece, own))
    assert chain_digests(tokens, size, extras) == expected
    assert content_digest(tokens_le32(tokens), extras) == digest_by_the_page(
        b"kvstore.v1.content", b"", tokens, extras
    )


@given(st.integers(-1, 5000), st.integers(16, 8192))
def test_spans_follow_each_other_and_leave_out_less_than_sixteen(count: int, size: int) -> None:
    spans = chunk_spans(count, size)
    edges = [0, *(stop for _, stop in spans)]
    assert chunk_spans(count) == chunk_spans(count, 256)
    assert [start for start, _ in spans] == edges[:-1]
    assert 0 <= max(count, 0) - edges[-1] < 16
    assert all(stop - start == size for start, stop in spans[:-1])
    assert all(16 <= stop - start <= size for start, stop in spans)


def test_every_field_of_a_representation_enters_its_name() -> None:
    """As ``by_the_page`` writes them: a field that is added has to be added there."""
    parts = {
        Model: "model_id model_revision adapter_digest quantization layer_groups rope "
        "tokenizer_digest layout_version",
        RopeParameters: "theta rotary_dim scaling factors",
        LayerGroup: "kind dtype layer_ids kv_heads head_dim window_tokens",
    }
    for part, names in parts.items():
        assert {field.name for field in dataclasses.fields(part)} == set(names.split())


def test_chunk_sizes_outside_the_limits_are_refused() -> None:
    others: list[Any] = [256.0, "256", None]
    for other in others:
        with pytest.raises(InvalidRequestError, match=r"chunk_tokens=.*, a whole number"):
            chain_digests(range(300), other)
    for size in [-1, 0, 15, 8193]:
        with pytest.raises(InvalidRequestError, match=f"chunk_tokens={size}: use 16 to 8192"):
            chunk_spans(100, size)
        with pytest.raises(InvalidRequestError, match="chunk_tokens"):
            chain_digests(range(100), size)


def test_bad_token_ids_are_refused() -> None:
    bad: list[Any] = [
        [-1], [1 << 32], [1 << 64], [0, 1 << 63], [1.0], ["7"], [True], [[1, 2]], [[1, 2], [3]],
        [[]], "12", None, {"input_ids": [1, 2]}, np.zeros((2, 2), np.int64),
        np.array([1 << 32], np.uint64), np.array([-1], np.int8),
    ]  # fmt: skip
    for tokens in bad:
        with pytest.raises(InvalidRequestError, match="tokens="):
            tokens_le32(tokens)


def test_extras_that_are_no_bytes_are_refused() -> None:
    bad: list[Any] = ["salt", b"salt", ["salt"], [7], [b"a", None]]
    for extra in bad:
        for name in (partial(chain_digests, range(16), 16), partial(content_digest, b"")):
            with pytest.raises(InvalidRequestError, match=r"extra=.*: give a sequence of bytes"):
                name(extra)


def test_identity_with_half_a_surrogate_pair_is_refused_by_its_field() -> None:
    model = REPRESENTATION
    for field in ("model_id", "model_revision", "adapter_digest", "tokenizer_digest"):
        with pytest.raises(ModelError, match=f"{field}="):
            replace(model, **{field: "a\ud800"})  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="scaling="):
        replace(model.rope, scaling="\ud800")
    with pytest.raises(ModelError, match="factors="):
        replace(model.rope, factors=(("\ud800", 1.0),))


def test_token_ids_of_any_integer_type_have_the_same_bytes() -> None:
    for dtype in ["int32", "int64", "uint32", ">u4", ">i8", "uint64"]:
        ids = [0, 1, 77, (1 << 31) - 1]
        assert tokens_le32(np.array(ids, dtype)) == struct.pack("<4I", *ids)  # type: ignore[arg-type]
        assert tokens_le32(np.repeat(np.array(ids, dtype), 2)[::2]) == tokens_le32(ids)  # type: ignore[arg-type]
