"""Counters of the server. All series exist at 0 from the start."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_TENANTS = 64
"""Tenants counted separately; all further ones are counted together."""
OTHERS = "others"

TIMED = ("Lookup", "Get", "Put", "Reserve", "Commit", "Release")
"""Calls in the latency histogram: those that an engine's requests wait for."""
BOUNDS_S = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
    10.0,
)  # fmt: skip
"""Upper bounds of the histogram buckets, in seconds; the last bucket has no bound."""


class Finds(NamedTuple):
    """Chunks of lookups: by first tier that had them, and by tenant requested and found."""

    tiers: dict[str, int]
    asked: dict[str, int]
    ready: dict[str, int]


@dataclass(frozen=True, slots=True)
class Times:
    """Calls of one method: counts by bucket of BOUNDS_S, and the sum of their seconds."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    total_s: float = 0.0


COUNTERS: Mapping[str, str] = {
    "lookups": "lookups answered",
    "lookup_chunks": "chunks requested in lookups",
    "lookup_ready_chunks": "chunks that lookups found",
    "lookup_ghost_chunks": "chunks requested in lookups after their eviction",
    "unanswered_lookups": "lookups that a shared tier did not answer in time",
    "spared_questions": "queries of a shared tier avoided by the negative cache",
    "get_chunks": "chunks delivered by gets",
    "get_bytes": "frame bytes delivered by gets",
    "get_missed_chunks": "chunks requested by gets and not delivered",
    "get_late_chunks": "chunks not loaded by the deadline",
    "given_up_loads": "loads cancelled because no caller waited for them",
    "put_stored_chunks": "chunks stored by puts",
    "put_bytes": "frame bytes stored by puts",
    "put_existing_chunks": "chunks of puts that already existed",
    "put_refused_chunks": "chunks of puts refused for lack of space or by policy",
    "put_states_left_out": "chunks of puts stored without their state (--state-admission)",
    "put_invalid_chunks": "frames of puts that failed a check",
    "put_shards": "shards of chunks put by ranks",
    "dropped_unfinished_chunks": "chunks dropped because they or a shard did not arrive in time",
    "announced_puts": "chunks announced by sessions",
    "waited_lookups": "lookups that waited for pending chunks",
    "refused_waits": "lookups that did not wait, at the limit of waiting lookups",
    "promoted_chunks": "chunks promoted to CPU or GPU memory",
    "copied_chunks": "chunks copied to a lower tier",
    "skipped_copies": "copies to a lower tier skipped: its queue was full or the tier degraded",
    "prefetched_chunks": "chunks prefetched after a lookup",
    "prefetch_used_chunks": "prefetched chunks later delivered by a get",
    "left_copies": "copies dropped from an exclusive tier after promotion to memory",
    "unworthy_copies": "victims not copied to a lower tier because no tier admitted them",
    "over_budget_copies": "copies to a lower tier skipped because its daily write budget was spent",
    "failed_copies": "copies to a lower tier that failed",
    "evicted_chunks": "chunks evicted from a tier",
    "evicted_for_quota_chunks": "chunks evicted because their partition exceeded its quota",
    "expired_chunks": "copies dropped because their chunk's TTL expired",
    "ignored_pins": "pin hints ignored at the limit of pins",
    "dropped_victims": "evicted chunks without a copy on another tier",
    "lossy_victims": "evicted exact chunks with only lossy copies left",
    "replaced_copies": "lossy copies replaced by better ones",
    "lossless_instead": "lossless copies on a lossy tier: unsupported by its codec, or shared",
    "corrupt_chunks": "copies that failed verification and were quarantined",
    "unreadable_chunks": "copies of a removed codec, or readable only by servers with other codecs",
    "scrubbed_chunks": "copies read and verified by scrubbing",
    "scrubbed_bytes": "frame bytes read by scrubbing",
    "scrub_passes": "completed scrub passes",
    "lost_chunks": "copies that a tier had lost",
    "unusable_histories": "history files that were damaged or of another version",
    "dropped_rows": "unusable rows of the disk index at start",
    "shed_calls": "calls refused at once because their queue was full",
    "expired_calls": "calls not begun because they waited past their deadline",
    "event_batches": "published batches of events",
    "event_restarts": "times a reader of events fell behind the kept events and restarted",
    "event_invalid_requests": "invalid requests for missed events",
    "event_cut_replays": "replays of events cut off because their reader stalled",
    "stalled_calls": "calls ended because messages did not arrive or were not read",
    "expired_leases": "leases that expired",
    "expired_sessions": "sessions closed because they were idle",
    "revoked_sessions": "sessions closed because their key was revoked or their token had expired",
    "blend_resolves": "prompts resolved for blending",
    "blend_exact_chunks": "resolved chunks that existed with the prompt's own prefix",
    "blend_variant_chunks": "resolved chunks with variants",
    "blend_missing_chunks": "resolved chunks without any match",
    "blend_let_through": "prompts admitted by an open gate, except trials",
    "blend_kept_out": "prompts rejected by a closed gate",
    "blend_reports": "accepted reports of blended requests",
    "blend_refused_reports": "refused invalid reports",
    "blend_shadows": "reports with a comparison to full prefill",
    "blend_gate_changes": "times a gate opened, closed or changed its ratio",
    "blend_gates_closed": "times an open gate closed",
    "directory_questions": "queries to the node directory, of up to 512 keys each",
    "directory_unanswered": "queries that the node directory did not answer in time",
    "directory_words": "entries written to the node directory",
    "directory_dropped_words": "directory entries not written: the queue or Redis was full",
    "peer_finds": "lookups that queried peers",
    "peer_found_chunks": "chunks that peers reported in memory",
    "peer_read_chunks": "chunks read completely from peers",
    "peer_read_bytes": "frame bytes read from peers",
    "peer_lent_chunks": "chunks that clients read directly from peers",
    "peer_passed_chunks": "chunks of peers dropped from memory after their first read",
    "peer_failures": "requests that a peer did not answer in time",
    "peer_refusals": "requests refused because a peer or this server was busy",
    "peer_lost_sessions": "sessions that a peer had closed",
    "peer_invalid_answers": "invalid answers of peers",
    "peer_corrupt_chunks": "chunks of peers that failed verification",
    "peer_asked_chunks": "chunks requested by peers",
    "peer_served_chunks": "chunks sent to peers",
    "peer_served_bytes": "frame bytes sent to peers",
    "peer_refused_requests": "requests of peers refused at the limit",
    "read_throughs": "chunks delivered past a full CPU tier",
    "zmq_refused_connections": "connections of event readers closed at the limit",
}
"""Counter names and what they count; exported as ``kvstore_<name>_total``."""


class Counters:
    """Named and labelled counts. Thread-safe; each result is a consistent snapshot."""

    def __init__(self) -> None:
        self._values = dict.fromkeys(COUNTERS, 0)
        self._moved: dict[tuple[str, str], tuple[int, int]] = {}
        self._finds = Finds(Counter(), Counter(), Counter())
        self._calls = {name: [0] * (len(BOUNDS_S) + 1) for name in TIMED}
        self._calls_s = dict.fromkeys(TIMED, 0.0)
        self._lock = threading.Lock()  # guards all of them

    def add(self, name: str, step: int = 1) -> None:
        """Add *step* to *name*."""
        with self._lock:
            self._values[name] += step

    def note_move(self, source: str, target: str, size_bytes: int) -> None:
        """Record the copy of a chunk of *size_bytes* from one tier to another."""
        with self._lock:
            chunks, moved_bytes = self._moved.get((source, target), (0, 0))
            self._moved[source, target] = chunks + 1, moved_bytes + size_bytes

    def note_lookup(
        self, tenant: str, asked: int, sources: NDArray[np.uint8], names: Sequence[str]
    ) -> None:
        """Record a lookup of *asked* chunks; *sources* index the tiers *names* of those found."""
        by_tier = np.bincount(sources).tolist()
        counts = self._finds
        with self._lock:
            if tenant not in counts.asked and len(counts.asked) >= MAX_TENANTS:
                tenant = OTHERS
            counts.asked[tenant] += asked
            counts.ready[tenant] += len(sources)
            for name, count in zip(names, by_tier, strict=False):
                if count:
                    counts.tiers[name] += count

    def note_call(self, method: str, took_s: float) -> None:
        """Record the duration of a call of *method*."""
        name = method.rpartition("/")[2]
        counts = self._calls.get(name)
        if counts is not None:
            at = bisect_left(BOUNDS_S, took_s)
            with self._lock:
                counts[at] += 1
                self._calls_s[name] += took_s

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def snapshot(self) -> dict[str, int]:
        """Return the named counts."""
        with self._lock:
            return dict(self._values)

    def moves(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Return chunks and bytes copied, by source and target."""
        with self._lock:
            return dict(self._moved)

    def finds(self) -> Finds:
        """Return the counts of lookups."""
        with self._lock:
            return Finds(*map(dict, self._finds))

    def times(self) -> dict[str, Times]:
        """Return the durations of each method of TIMED."""
        with self._lock:
            return {
                name: Times(tuple(counts), self._calls_s[name])
                for name, counts in self._calls.items()
            }


Gauge = tuple[str, str, str | Mapping[str, str], float]
"""Name, help text, value of the ``tier`` label (empty for none) or all labels, value."""
