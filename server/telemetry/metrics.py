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
    "lookup_chunks": "chunks asked for in lookups",
    "lookup_ready_chunks": "chunks that lookups found ready",
    "lookup_ghost_chunks": "chunks that lookups asked for and that had been evicted",
    "unanswered_lookups": "lookups that a shared tier did not answer in time",
    "spared_questions": "lookups that did not ask a shared tier again what it just did not have",
    "get_chunks": "chunks delivered by gets",
    "get_bytes": "frame bytes delivered by gets",
    "get_missed_chunks": "chunks a get asked for and did not deliver",
    "get_late_chunks": "chunks not loaded by the deadline",
    "given_up_loads": "loads that ended, or did not begin, as nobody waited for them any more",
    "put_stored_chunks": "chunks stored by puts",
    "put_bytes": "frame bytes stored by puts",
    "put_existing_chunks": "chunks of puts that were there already",
    "put_refused_chunks": "chunks of puts refused for want of room or by policy",
    "put_states_left_out": "chunks of puts kept without their state (--state-admission)",
    "put_invalid_chunks": "frames of puts that failed a check",
    "put_shards": "shards of chunks that ranks put",
    "dropped_unfinished_chunks": "chunks that did not come in time, or not all of their shards",
    "announced_puts": "chunks that sessions announced to put",
    "waited_lookups": "lookups that waited for pending chunks",
    "refused_waits": "lookups that did not wait, as the most that may wait did",
    "promoted_chunks": "chunks copied up into CPU memory",
    "copied_chunks": "chunks copied down to a lower tier",
    "skipped_copies": "copies to a lower tier not made, its queue being full or the tier set aside",
    "prefetched_chunks": "chunks whose load began at a lookup, before a get asked for them",
    "prefetch_used_chunks": "prefetched chunks that a get then delivered",
    "left_copies": "copies dropped from an exclusive tier as their chunk came up to memory",
    "unworthy_copies": "victims not copied down, as no tier's admission wanted them",
    "over_budget_copies": "copies to a lower tier not made, its daily budget of writes being spent",
    "failed_copies": "copies to a lower tier that failed",
    "evicted_chunks": "chunks evicted from a tier",
    "evicted_for_quota_chunks": "chunks of those that went as their partition was over its quota",
    "expired_chunks": "copies dropped as the time to live of their chunk was up",
    "ignored_pins": "hints that asked to pin more than the limit of pins allows",
    "dropped_victims": "evicted chunks of which no tier kept a copy",
    "lossy_victims": "evicted exact chunks of which only lossy copies are left",
    "replaced_copies": "lossy copies that gave way to better ones",
    "lossless_instead": "copies kept without loss: not for the tier's codec, or of several prompts",
    "corrupt_chunks": "copies that failed verification and were quarantined",
    "unreadable_chunks": "copies of a removed codec, or that only servers with other codecs read",
    "scrubbed_chunks": "copies read and verified by scrubbing",
    "scrubbed_bytes": "frame bytes read by scrubbing",
    "scrub_passes": "passes of scrubbing that came to their end",
    "lost_chunks": "copies that a tier no longer had",
    "unusable_histories": "files of what was learned, damaged or of another version",
    "dropped_rows": "rows of the disk's index that were unusable at the start",
    "shed_calls": "calls refused at once, as too many of their kind waited",
    "expired_calls": "calls not begun, as they had waited past their deadline",
    "event_batches": "batches of events that were published",
    "event_restarts": "times that a reader of events fell behind what is kept, and began anew",
    "event_invalid_requests": "requests for missed events that were none",
    "event_cut_replays": "answers with missed events that were given up, as nobody read them",
    "stalled_calls": "calls ended as messages did not come, or were not taken",
    "expired_leases": "leases released because their time was up",
    "expired_sessions": "sessions closed because they fell silent",
    "revoked_sessions": "sessions closed because their key was revoked or their token had expired",
    "blend_resolves": "prompts resolved for blending",
    "blend_exact_chunks": "chunks of them that were there as the prompt has them",
    "blend_variant_chunks": "chunks of them for which variants were named",
    "blend_missing_chunks": "chunks of them for which nothing was named",
    "blend_let_through": "prompts for which a gate was open, trials left out",
    "blend_kept_out": "prompts for which the gate was closed",
    "blend_reports": "reports of blended requests taken in",
    "blend_refused_reports": "reports refused, as something in them cannot be",
    "blend_shadows": "reports with a full prefill that was compared",
    "blend_gate_changes": "times that a gate opened, closed or changed its ratio",
    "blend_gates_closed": "times that an open gate closed",
    "directory_questions": "questions to the node directory, of up to 512 keys each",
    "directory_unanswered": "questions that the node directory did not answer in time",
    "directory_words": "entries written to the node directory",
    "directory_dropped_words": "entries not written, as too many waited or Redis was full",
    "peer_finds": "lookups that asked other servers",
    "peer_found_chunks": "chunks that other servers said they have in memory",
    "peer_read_chunks": "chunks that came whole from other servers",
    "peer_read_bytes": "frame bytes that came from other servers",
    "peer_lent_chunks": "chunks of other servers that readers were sent to read there themselves",
    "peer_passed_chunks": "chunks of other servers that left memory after their first read",
    "peer_failures": "requests that another server did not answer in time",
    "peer_refusals": "requests that another server was too busy for, or we for it",
    "peer_lost_sessions": "sessions that another server did not know any more",
    "peer_invalid_answers": "answers of other servers that were none to what was asked",
    "peer_corrupt_chunks": "chunks of other servers whose bytes were wrong",
    "peer_asked_chunks": "chunks that other servers asked for",
    "peer_served_chunks": "chunks that other servers were sent",
    "peer_served_bytes": "frame bytes that other servers were sent",
    "peer_refused_requests": "requests of other servers refused, as their most were at work",
    "read_throughs": "gets served past a full CPU tier",
    "zmq_refused_connections": "readers of events hung up on, as there were too many",
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
