"""KV events: publishes what the store holds of an engine's prompts, as vLLM does of its cache.

Routers (llm-d, NVIDIA Dynamo) use them to find which prefixes an engine has. Reads vLLM's Request
by its fields; vLLM's classes are passed in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.client.engines.vllm.messages import ChunkName
from kvstore.proto.types import ChainDigest

_WHERE = {"medium": "STORAGE", "locality": "REMOTE", "ownership": "kvstore"}
"""The location in events: the store is a tier behind the engine's own."""
MAX_PENDING_CHUNKS = 4096
"""Chunks being stored whose events are kept; beyond that the oldest are not published."""
MAX_PUBLISHED_CHUNKS = 32_768
"""Chunks published as stored; beyond that the oldest are published as removed."""
MAX_EVENTS = 65_536
"""Events queued for the engine's next step; chunks beyond that are not published."""


@dataclass(frozen=True, slots=True)
class EventMaker:
    """vLLM's event classes, and its encoding of hashes and extra keys.

    ``hashes`` returns the hashes of a request's blocks of the engine's size, ``extra_keys`` the
    extra keys of its block between two tokens. ``groups``: the KV cache groups that keep every
    block of a chunk, each with its kind of cache.
    """

    stored: Callable[..., Any]
    removed: Callable[..., Any]
    hashes: Callable[[Any], Sequence[Any]]
    extra_keys: Callable[[Any, int, int], Any]
    block_tokens: int
    groups: tuple[tuple[int, str | None], ...]


@dataclass(slots=True)
class _Pending:
    """A chunk that some ranks have yet to store."""

    events: list[Any]
    hashes: list[Any]
    ranks_left: int


class KVEvents:
    """The events of one engine of *ranks* ranks. For the scheduler's thread."""

    def __init__(self, make: EventMaker, chunk_tokens: int, ranks: int) -> None:
        self._make = make
        self._chunk_tokens = chunk_tokens
        self._ranks = ranks
        self._pending: OrderedDict[ChainDigest, _Pending] = OrderedDict()
        self._published: OrderedDict[ChainDigest, list[Any]] = OrderedDict()
        self._events: list[Any] = []

    def ordered(self, request: Any, chunks: Sequence[ChunkName]) -> None:
        """Record chunks of *request* that are about to be stored."""
        make, size, hashes = self._make, self._make.block_tokens, self._make.hashes(request)
        lora = getattr(request, "lora_request", None)
        for chunk in chunks:
            start, stop = chunk.position, chunk.position + self._chunk_tokens
            if stop // size > len(hashes) or chunk.digest in self._published:
                continue  # tokens that vLLM has not hashed cannot be published
            named = list(hashes[start // size : stop // size])
            extra = [make.extra_keys(request, at, at + size) for at in range(start, stop, size)]
            events = [
                make.stored(
                    block_hashes=named,
                    parent_block_hash=hashes[start // size - 1] if start else None,
                    token_ids=list(request.all_token_ids[start:stop]),
                    block_size=size,
                    lora_id=lora.lora_int_id if lora is not None else None,
                    lora_name=lora.lora_name if lora is not None else None,
                    extra_keys=extra if any(extra) else None,
                    session_id=getattr(request, "session_id", None),
                    group_idx=group,
                    kv_cache_spec_kind=kind,
                    **_WHERE,
                )
                for group, kind in make.groups
            ]
            if len(self._pending) >= MAX_PENDING_CHUNKS:
                self._pending.popitem(last=False)
            self._pending[chunk.digest] = _Pending(events, named, self._ranks)

    def stored(self, ranks: Mapping[ChainDigest, int]) -> None:
        """Publish chunks; *ranks*: how many ranks stored each since the last call."""
        for digest, count in ranks.items():
            chunk = self._pending.get(digest)
            if chunk is None:
                continue
            chunk.ranks_left -= count
            if chunk.ranks_left > 0:
                continue
            del self._pending[digest]
            if len(self._events) + len(chunk.events) <= MAX_EVENTS:
                self._events += chunk.events
                self._published[digest] = chunk.hashes
                while len(self._published) > MAX_PUBLISHED_CHUNKS:
                    self.lost([next(iter(self._published))])

    def lost(self, digests: Sequence[ChainDigest]) -> None:
        """Publish that chunks published as stored are no longer in the store."""
        for digest in digests:
            if (hashes := self._published.pop(digest, None)) is not None:
                self._events += [
                    self._make.removed(block_hashes=hashes, group_idx=group, **_WHERE)
                    for group, _ in self._make.groups
                ]

    def reset(self) -> None:
        """Publish all chunks as removed: the engine will not load them again."""
        self._pending.clear()
        self.lost(list(self._published))

    def take(self) -> list[Any]:
        """Return the events to publish since the last call, in order."""
        events, self._events = self._events, []
        return events
