"""Names of the chunks of a vLLM request: its tokens, and everything else its KV depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvstore.client.engines.identity import adapter_files, files_digest
from kvstore.client.engines.vllm_orders import NamedChunk
from kvstore.client.page_names import page_hash
from kvstore.proto.errors import ModelError
from kvstore.proto.keys import chain_digest, content_digest, tokens_le32
from kvstore.proto.types import DIGEST_BYTES, ROOT, ChainDigest

MAX_ADAPTERS = 4096
"""LoRA adapters of one engine whose requests are stored."""

_Marks: TypeAlias = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class Feature:
    """An image or the like in a prompt: its hash, and the tokens whose embeddings it is."""

    name: bytes
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Identity:
    """What names the KV of a request beside its tokens.

    ``first`` enters the first chunk and with it the whole chain; a feature enters the chunks
    that it reaches into, so that what is before it is shared. ``is_sglangs``: there is neither,
    and chunks are named as SGLang names pages.
    """

    first: tuple[bytes, ...] = ()
    features: tuple[Feature, ...] = ()
    is_sglangs: bool = False

    def within(self, start: int, stop: int) -> list[bytes]:
        """Return what enters the chunk of tokens *start* to *stop*."""
        reaching = [one for one in self.features if one.start < stop and one.stop > start]
        named = [b"mm:%d:%d:" % (one.start, one.stop) + one.name for one in reaching]
        return [*(self.first if start == 0 else ()), *named]


class RequestNames:
    """Identities of the requests of one engine. For one thread, which may wait for files.

    *sglang_names*: as in ClientOptions.
    """

    def __init__(self, *, sglang_names: bool = False) -> None:
        self._sglang_names = sglang_names
        # What each adapter was when it was first seen: its files' marks, and its digest.
        self._adapters: dict[tuple[int, str], tuple[_Marks, bytes]] = {}

    def identity(self, request: Any, epoch: bytes) -> Identity:
        """Return the identity of vLLM's *request*. Raises ModelError if it has none.

        *epoch* separates what was computed before the engine's caches were reset.
        """
        if getattr(request, "prompt_embeds", None) is not None:
            raise ModelError("prompt_embeds", "given", "such prompts are not stored")
        if getattr(request, "resumable", False):
            raise ModelError("resumable", True, "a stream takes tokens back")
        first = [b"epoch:" + epoch] if epoch else []
        salt = getattr(request, "cache_salt", None)
        if salt:
            first.append(b"salt:" + salt.encode())
        lora = getattr(request, "lora_request", None)
        if lora is not None:
            first.append(b"lora:" + self._adapter(lora))
        features = tuple(map(_feature, getattr(request, "mm_features", None) or ()))
        is_plain = not first and not features
        return Identity(tuple(first), features, is_plain and self._sglang_names)

    def _adapter(self, lora: Any) -> bytes:
        """Return the digest of an adapter, which the engine may have loaded long ago."""
        if lora.load_inplace:
            raise ModelError("load_inplace", True, "use another lora_int_id")
        files = adapter_files(lora.lora_path)
        marks = tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
        named = (lora.lora_int_id, lora.lora_path)
        if named not in self._adapters:
            if len(self._adapters) >= MAX_ADAPTERS:
                raise ModelError("lora_int_id", lora.lora_int_id, "too many adapters")
            self._adapters[named] = (marks, files_digest(files))
        first_marks, digest = self._adapters[named]
        if marks != first_marks:
            # Nobody can tell whether the engine has the old weights or the new ones.
            raise ModelError("lora_path", lora.lora_path, "its files have changed")
        return digest


def _feature(feature: Any) -> Feature:
    if not feature.identifier:
        raise ModelError("mm_features", feature.identifier, "an input without a hash")
    place = feature.mm_position
    return Feature(feature.identifier.encode(), place.offset, place.offset + place.length)


class ChunkChain:
    """The names of a request's whole chunks, extended as its tokens grow. Not thread-safe."""

    def __init__(self, identity: Identity, chunk_tokens: int) -> None:
        self.chunks: list[NamedChunk] = []
        self._identity = identity
        self._chunk_tokens = chunk_tokens
        self._page = b""

    def extend(self, tokens: Sequence[int], count: int) -> None:
        """Name the first *count* chunks of *tokens*, which begin with those named before."""
        size = self._chunk_tokens
        for number in range(len(self.chunks), count):
            start = number * size
            data = tokens_le32(tokens[start : start + size])
            extra = self._identity.within(start, start + size)
            parent = self.chunks[-1].digest if self.chunks else ROOT
            if self._identity.is_sglangs:
                self._page = page_hash(self._page, data)
                digest = ChainDigest(self._page[:DIGEST_BYTES])
            else:
                digest = chain_digest(parent, data, extra)
            self.chunks.append(NamedChunk(digest, parent, content_digest(data, extra), start))

    @property
    def digests(self) -> list[ChainDigest]:
        """The digest of each chunk."""
        return [chunk.digest for chunk in self.chunks]
