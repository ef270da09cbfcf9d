"""Events as bytes: the messages of vLLM's KV events, which prefix-aware routers read.

A message has three parts: the topic, its number as 8 bytes, big-endian, and an EventBatch in
MessagePack, as vllm/distributed/kv_events.py of vLLM 0.32 has them. What the store does not know
stays empty: the ids of tokens, adapters, extra keys.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvstore.proto.types import ROOT, Fidelity
from kvstore.server.telemetry.event_ring import Event

MEDIA = {"gpu": "GPU", "cpu": "CPU", "disk": "STORAGE"}
"""What vLLM calls the media of tiers."""
LOCAL = "LOCAL"
OWNER = "kvstore"


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Chunks in a row came to a medium, the first behind *parent_block_hash*."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    locality: str | None = None
    ownership: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Chunks left a medium."""

    block_hashes: list[bytes]
    medium: str | None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """What was known before is void."""


Word = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Words in order; *ts* is in seconds of the wall clock."""

    ts: float
    events: list[Word]
    data_parallel_rank: int | None = None


def words_of(events: Iterable[Event]) -> list[Word]:
    """Return *events* as words, those of a chain's next chunks in one.

    Block hashes are keys, of 32 bytes. A copy that is not exact counts as gone: who asks for
    exact does not find it.
    """
    words: list[Word] = []
    for event in events:
        medium = MEDIA[event.tier]
        last = words[-1] if words else None
        if event.tokens and event.fidelity is Fidelity.exact:
            parent = None if event.parent == ROOT else event.space + event.parent
            if (
                isinstance(last, BlockStored)
                and (last.medium, last.block_size) == (medium, event.tokens)
                and last.block_hashes[-1] == parent
            ):
                last.block_hashes.append(event.key)
            else:
                words.append(
                    BlockStored(
                        [event.key], parent, [], event.tokens, None, medium, None, LOCAL, OWNER
                    )
                )
        elif isinstance(last, BlockRemoved) and last.medium == medium:
            last.block_hashes.append(event.key)
        else:
            words.append(BlockRemoved([event.key], medium, LOCAL, OWNER))
    return words


def encode(ts: float, words: list[Word]) -> bytes:
    """Return the third part of a message."""
    return msgspec.msgpack.encode(EventBatch(ts, words))
