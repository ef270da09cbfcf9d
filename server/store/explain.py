"""Why chunks are hits or misses: the Explainer, and the MissLog with the latest misses."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import islice
from typing import NamedTuple, TypeAlias

from kvstore.proto.errors import printable
from kvstore.proto.messages import REFUSED
from kvstore.proto.types import DIGEST_BYTES, ChunkInfo, ChunkKey, Fidelity, Match, Namespace
from kvstore.server.index.known_models import FieldDifference, ModelNamespace, nearest
from kvstore.server.index.queries import ChunkStatus
from kvstore.server.security.sessions import Session
from kvstore.server.store.store import Store
from kvstore.server.telemetry.events import Fate, Outcome
from kvstore.server.tiering.admission import remember

MAX_SIMILAR = 3
"""Other Representations that an answer names."""

_SEARCHED = 32
"""Of the others, those that differ least are searched for so many of a prompt's chunks."""

_COUNTED = 6

MAX_MISSES = 1024
MAX_REPORTS = 256
"""Sessions whose engine's counts are remembered, those that ended included."""

MAX_COUNTS = 64
MAX_NAME_CHARS = 64

MAX_REASONS = 4
MAX_REASON_CHARS = 240
"""Of one of them; a longer one is cut."""

_MAX_NAMED = 4
"""Fields in which two identities differ, named for each chunk."""

Copies: TypeAlias = tuple[tuple[str, ChunkInfo], ...]
"""Tiers and what lies there, in the order in which they are read."""

Others: TypeAlias = Sequence[tuple[ModelNamespace, Sequence[FieldDifference]]]
"""Spaces, and in what each differs from the one that was asked for."""


class ChunkFacts(NamedTuple):
    """What was known of one chunk at ``at_s``, by which it is a hit or none; no words yet.

    ``down`` has the tiers with a copy that were left alone, and why.
    """

    key: ChunkKey
    least: Fidelity
    at_s: float
    seen: ChunkStatus
    outcome: Outcome | None
    down: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Reason:
    """One chunk: a word for scripts, a sentence for people, and its copies."""

    key: ChunkKey
    state: str
    text: str
    copies: Copies = ()


@dataclass(frozen=True, slots=True)
class SimilarModel:
    """Another Representation with chunks: in what it differs, and whether it has these tokens."""

    chunks: int
    space: ModelNamespace
    differing: Sequence[FieldDifference]
    has_tokens: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reasons of a prompt's chunks, in order; the first ``hit_chunks`` are a hit."""

    hit_chunks: int
    reasons: Sequence[Reason]
    similar: Sequence[SimilarModel] = ()


class LoggedMiss(NamedTuple):
    """One lookup of *asked* chunks. *facts* were known then of the first that was not found."""

    at_s: float
    session: Session
    facts: ChunkFacts
    asked: int
    ready: int
    pending: int


class Report(NamedTuple):
    """What an engine counted since its birth, as its client last reported."""

    at_s: float
    session: Session
    counts: Mapping[str, int]


class MissLog:
    """Bounded and in memory only. Thread-safe; *clock* returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._misses: deque[LoggedMiss] = deque(maxlen=MAX_MISSES)
        self._reports: OrderedDict[int, Report] = OrderedDict()
        # Guards both; held for appends and copies of lists only.
        self._lock = threading.Lock()

    def note(self, session: Session, asked: int, match: Match, facts: ChunkFacts) -> None:
        """Take note of a lookup that found less than *asked* chunks."""
        miss = LoggedMiss(self._clock(), session, facts, asked, match.ready, match.pending)
        with self._lock:
            self._misses.append(miss)

    def report(self, session: Session, counts: Mapping[str, int]) -> None:
        """Take note of what an engine counted; what is over the limits is left out, reasons last.

        A heartbeat may not fail for it: the session would end.
        """
        reasons = {name for name in counts if name.startswith(REFUSED)}
        named = (n for n in counts if len(n) <= MAX_NAME_CHARS and n not in reasons)
        fit = nsmallest(MAX_REASONS, reasons)
        fit += nsmallest(MAX_COUNTS - len(fit), named)
        kept = {_cut(name): counts[name] for name in fit}
        if not kept:
            return
        with self._lock:
            report = Report(self._clock(), session, kept)
            remember(self._reports, session.session_id, report, MAX_REPORTS)

    def misses(self, count: int) -> list[LoggedMiss]:
        """Return the last *count* misses, the latest first."""
        with self._lock:
            latest = list(self._misses)
        return latest[::-1][:count]

    def reports(self) -> list[Report]:
        """Return what engines counted, the latest first."""
        with self._lock:
            return list(reversed(self._reports.values()))


class Explainer:
    """Explains the chunks of *store*. Thread-safe; *clock* is that of the catalog's outcomes."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._states = store.states
        self._catalog = store.catalog
        self._slots = {slot.name: slot for slot in store.tiers.sources}
        """In the order in which they are read."""
        self._clock = clock
        self.spaces = store.spaces
        """Those of earlier sessions too."""
        self.log = MissLog(clock)

    def record_lookup(
        self, session: Session, keys: Sequence[ChunkKey], match: Match, least: Fidelity
    ) -> None:
        """Record a lookup that found less than it asked for; its reason is made when it is read."""
        if match.ready < len(keys):
            self.log.note(session, len(keys), match, self.facts(keys[match.ready], least))

    def explain(
        self, space: Namespace, keys: Sequence[ChunkKey], least: Fidelity = Fidelity.exact
    ) -> Explanation:
        """Say of each of a prompt's chunks, all of *space*, why it is a hit or none."""
        others = self.others(space)
        reasons = [self.reason(self.facts(key, least), others) for key in keys]
        first = next((at for at, one in enumerate(reasons) if one.state != "ready"), len(keys))
        hits = min(first, len(self._catalog.held([next(iter(self._slots))], keys, least)[0]))
        for at in range(hits, first):
            text = "here, but no prefix that ends here or further has all that the model needs"
            if self._states is not None and self._states.has_turned_away(keys[at]):
                text += "; its state was not kept, by --state-admission"
            reasons[at] = replace(reasons[at], state="no_end", text=text)
        for at in range(first + 1, len(keys)):
            if reasons[at].state == "ready":
                text = f"here, but chunk {first} before it is not"
                reasons[at] = replace(reasons[at], state="behind", text=text)
        return Explanation(hits, reasons, self._similar(others, keys) if first < len(keys) else ())

    def others(self, space: Namespace) -> Others:
        """Return the other spaces of its tenant, those that differ least first."""
        asked = self.spaces.of(space)
        return nearest(asked, self.spaces.others(asked))[:_SEARCHED] if asked is not None else ()

    def others_with(self, space: Namespace, key: ChunkKey) -> Others:
        """Return a few other spaces of its tenant that have the chunk of the same tokens.

        To compare two identities takes longer than to look for a chunk.
        """
        asked = self.spaces.of(space)
        if asked is None:
            return ()
        found = (other for other in self.spaces.others(asked) if self._has(other, key))
        return nearest(asked, islice(found, MAX_SIMILAR))

    def of_miss(self, miss: ChunkFacts, others: Others) -> Reason:
        """Say why a lookup did not find a chunk then, with what can be said of it only now."""
        found = self.reason(miss, (), "before")
        if found.state == "ready":
            text = "here, but of no use: no prefix that ends here or further was ready in time"
            return replace(found, state="no_end", text=text)
        if found.state == "unknown":
            named = self._elsewhere(miss.key, others)
            found = named or found
        if self.reason(self.facts(miss.key), ()).state != "ready":
            return found
        return replace(found, text=f"{found.text}; stored since")

    def facts(self, key: ChunkKey, least: Fidelity = Fidelity.exact) -> ChunkFacts:
        """Return what is known of a chunk now, in some microseconds."""
        seen = self._catalog.queries.status(key)
        outcome = None if seen.copies else self._catalog.outcomes.of(key)
        down = {
            name: slot.breaker.reason
            for name, slot in self._slots.items()
            if name in seen.copies and slot.breaker.is_open
        }
        return ChunkFacts(key, least, self._clock(), seen, outcome, down)

    def reason(self, facts: ChunkFacts, others: Others, ago: str = "ago") -> Reason:
        """Say of one chunk why it can be read, or why not; *others* are those of its space."""
        key, seen, outcome = facts.key, facts.seen, facts.outcome
        order = [name for name in self._slots if name in seen.copies]
        copies = tuple((name, seen.copies[name]) for name in order)
        if seen.is_expired:
            return Reason(key, "expired", "its time to live is up; put it again", copies)
        if copies:
            return self._of_copies(facts, copies)
        if seen.is_pending:
            return Reason(key, "pending", "it is being put")
        if seen.is_announced:
            return Reason(key, "pending", "announced: a session is about to put it")
        if outcome is not None:
            passed_s = max(0.0, facts.at_s - outcome.at_s)
            where = f" from {outcome.tier}" if outcome.tier else ""
            text = _SENTENCES[outcome.fate].format(where=where, ago=f"{passed_s:.0f} s {ago}")
            text += f": {outcome.detail}" if outcome.detail else ""
            return Reason(key, outcome.fate.value, text)
        named = self._elsewhere(key, others)
        if named is not None:
            return named
        if seen.is_evicted:
            return Reason(key, "evicted", "evicted, longer ago than reasons are kept")
        return Reason(key, "unknown", "never stored here, or forgotten since")

    def _of_copies(self, facts: ChunkFacts, copies: Copies) -> Reason:
        key, least = facts.key, facts.least
        fit = [name for name, info in copies if info.fidelity >= least]
        if not fit:
            best = max(info.fidelity for _, info in copies)
            text = f"only copies of fidelity {best.name} are left, and {least.name} was asked for"
            return Reason(key, "lossy", text, copies)
        up = [name for name in fit if name not in facts.down]
        if not up:
            text = f"on {fit[0]}, which is left alone: {facts.down[fit[0]]}"
            return Reason(key, "tier_down", text, copies)
        return Reason(key, "ready", f"on {up[0]}", copies)

    # --- other identities

    def _similar(self, others: Others, keys: Sequence[ChunkKey]) -> list[SimilarModel]:
        """Return a few other spaces that have chunks, those with these tokens first."""
        found = [
            (other, differing, any(self._has(other, key) for key in keys[:_SEARCHED]))
            for other, differing in others
        ]
        found.sort(key=lambda one: not one[2])
        # Counting goes through the whole index, so few are counted.
        count_in = self._catalog.queries.count_in
        counted = [(count_in(one[0].namespace), *one) for one in found[:_COUNTED]]
        return [SimilarModel(*one) for one in counted if one[0]][:MAX_SIMILAR]

    def _elsewhere(self, key: ChunkKey, others: Others) -> Reason | None:
        """Return the reason of a chunk that one of *others* has; None where none has it."""
        named = next((differing for other, differing in others if self._has(other, key)), None)
        if named is None:
            return None
        parts = [f"{d.field}: {d.stored} stored, {d.asked} asked" for d in named[:_MAX_NAMED]]
        if len(named) > _MAX_NAMED:
            parts.append(f"{len(named) - _MAX_NAMED} more")
        return Reason(key, "other_identity", "stored under another identity: " + "; ".join(parts))

    def _has(self, space: ModelNamespace, key: ChunkKey) -> bool:
        """Whether *space* has the chunk of the same tokens."""
        return bool(self._catalog.holders(ChunkKey(space.namespace + key[DIGEST_BYTES:])))


def _cut(name: str) -> str:
    if len(name) > MAX_REASON_CHARS:
        name = f"{name[: MAX_REASON_CHARS - 3]}..."
    return printable(name)


_SENTENCES = {
    Fate.refused: "refused {ago}",
    Fate.invalid: "its frame failed a check {ago}",
    Fate.evicted: "evicted{where} {ago}",
    Fate.corrupt: "found damaged and dropped{where} {ago}",
    Fate.unreadable: "dropped{where} {ago}, as only a server with other codecs can read it",
    Fate.codec_removed: "dropped{where} {ago}, as its codec was removed from kvstore",
    Fate.lost: "gone{where} without our doing, found out {ago}",
    Fate.deleted: "deleted {ago}, by request or because a client found it damaged",
    Fate.expired: "dropped{where} {ago}, as its time to live was up",
}
