"""What a Connector counts, as its owner sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ConnectorStats:
    """What a connector did since its birth. Errors are counted by the name of their class.

    Of each prompt looked up, every token is a hit or a miss. ``lost_chunks`` were ready when
    asked for and not read: late, evicted or damaged; ``slow_chunks`` were sooner computed.
    ``lossy_hit_tokens``: hits from the first chunk of a lossy copy on; ``lossy_unstored_chunks``
    were computed behind such a one, and so not stored; ``gated_chunks`` came and were not used, for
    the gate of a codec was shut.
    """

    lookups: int
    hit_tokens: int
    miss_tokens: int
    lost_chunks: int
    stored_chunks: int
    existing_chunks: int
    refused_chunks: int
    hit_tokens_by_tier: Mapping[str, int]
    load_errors: Mapping[str, int]
    store_errors: Mapping[str, int]
    slow_chunks: int = 0
    lossy_hit_tokens: int = 0
    lossy_unstored_chunks: int = 0
    gated_chunks: int = 0
    misses: Mapping[str, int] = field(default_factory=dict)
    """Prompts that were no whole hit, by why their hit ended where it did: docs/engines.md."""
