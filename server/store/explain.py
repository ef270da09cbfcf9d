"""The Explainer: why chunks are hits or misses, and the latest misses."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from heapq import nsmallest
from itertools import islice
from typing import NamedTuple, TypeAlias

from kvstore.proto.errors import printable
from kvstore.proto.messages import REFUSED
from kvstore.proto.types import DIGEST_BYTES, Accuracy, ChunkInfo, ChunkKey, Match, Namespace
from kvstore.server.index.known_models import FieldDifference, ModelNamespace, nearest
from kvstore.server.index.queries import ChunkStatus
from kvstore.server.security.sessions import Session
from kvstore.server.store.store import Store
from kvstore.server.telemetry.events import Fate, Outcome
from kvstore.server.tiering.admission import remember

MAX_SIMILAR = 3
"""Other models that an answer names."""

_SEARCHED = 32
"""Limit of other models searched, those that differ least first, and of chunks per model."""
_COUNTED = 6

MAX_MISSES = 1024
MAX_REPORTS = 256
"""Sessions whose engine counts are kept, including ended ones."""
MAX_COUNTS = 64
MAX_NAME_CHARS = 64
MAX_REASONS = 4
MAX_REASON_CHARS = 240
"""A longer reason is cut."""
_MAX_NAMED = 4
"""Differing fields of two identities named per chunk."""

Differing: TypeAlias = tuple[ModelNamespace, list[FieldDifference]]
"""Another namespace of the tenant, and its differences from the requested one."""


class ChunkFacts(NamedTuple):
    """The state of a chunk at ``at_s``. ``down``: holders with an open breaker, and the reason."""

    key: ChunkKey
    least: Accuracy
    at_s: float
    seen: ChunkStatus
    outcome: Outcome | None
    down: Mapping[str, str]


class Reason(NamedTuple):
    """One chunk: a state for scripts, a text for people, and the copies, nearest tier first."""

    key: ChunkKey
    state: str
    text: str
    copies: tuple[tuple[str, ChunkInfo], ...] = ()


class SimilarModel(NamedTuple):
    """Another model with chunks: its differing fields, and whether it has these tokens."""

    chunks: int
    space: ModelNamespace
    differing: Sequence[FieldDifference]
    has_tokens: bool


class Explanation(NamedTuple):
    """The reasons of a prompt's chunks, in order; the first ``hit_chunks`` are a hit."""

    hit_chunks: int
    reasons: Sequence[Reason]
    similar: Sequence[SimilarModel] = ()


class LoggedMiss(NamedTuple):
    """One lookup of *asked* chunks; *facts* describe the first missing one at that time."""

    session: Session
    facts: ChunkFacts
    asked: int
    ready: int
    pending: int


class Report(NamedTuple):
    """The counts of an engine since its start, as its client last reported."""

    at_s: float
    session: Session
    counts: Mapping[str, int]


class Explainer:
    """Explains the chunks of *store*; keeps a bounded number of misses and engine counts, in memory
    only. Thread-safe; *clock* is that of the catalog's outcomes.
    """

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._states = store.states
        self._catalog = store.catalog
        self._slots = {slot.name: slot for slot in store.tiers.sources}
        """In read order."""
        self._clock = clock
        self.spaces = store.spaces
        """Including those of earlier sessions."""
        self._misses: deque[LoggedMiss] = deque(maxlen=MAX_MISSES)
        self._reports: OrderedDict[int, Report] = OrderedDict()
        # Guards both; held for appends and copies of lists only.
        self._lock = threading.Lock()

    def report(self, session: Session, counts: Mapping[str, int]) -> None:
        """Record the counts of an engine; counts beyond the limits are dropped, reasons last.

        Raises nothing: a heartbeat that fails would end the session.
        """
        reasons = {name for name in counts if name.startswith(REFUSED)}
        named = (n for n in counts if len(n) <= MAX_NAME_CHARS and n not in reasons)
        fit = nsmallest(MAX_REASONS, reasons)
        fit += nsmallest(MAX_COUNTS - len(fit), named)
        report = Report(self._clock(), session, {_cut(name): counts[name] for name in fit})
        if fit:
            with self._lock:
                remember(self._reports, session.session_id, report, MAX_REPORTS)

    def misses(self, count: int) -> list[LoggedMiss]:
        """Return the last *count* misses, the latest first."""
        with self._lock:
            latest = list(self._misses)
        return latest[::-1][:count]

    def reports(self) -> list[Report]:
        """Return the counts of engines, the latest first."""
        with self._lock:
            return list(reversed(self._reports.values()))

    def record_lookup(
        self, session: Session, keys: Sequence[ChunkKey], match: Match, least: Accuracy
    ) -> None:
        """Record a lookup that missed; its reason is derived when the record is read."""
        if match.ready < len(keys):
            facts = self.facts(keys[match.ready], least)
            miss = LoggedMiss(session, facts, len(keys), match.ready, match.pending)
            with self._lock:
                self._misses.append(miss)

    def explain(
        self, space: Namespace, keys: Sequence[ChunkKey], least: Accuracy = Accuracy.exact
    ) -> Explanation:
        """Explain for each chunk of a prompt, all in *space*, why it is a hit or a miss."""
        asked, others = self.spaces.of(space), list[Differing]()
        if asked is not None:
            others = nearest(asked, self.spaces.others(asked))[:_SEARCHED]
        reasons = [self.reason(self.facts(key, least), others) for key in keys]
        first = next((at for at, one in enumerate(reasons) if one.state != "ready"), len(keys))
        hits = min(first, len(self._catalog.held(next(iter(self._slots)), keys, least)))
        for at in range(hits, first):
            text = "cached, but no prefix up to it or longer has the state or window to resume"
            if self._states is not None and self._states.has_turned_away(keys[at]):
                text += "; its state was not admitted (--state-admission)"
            reasons[at] = reasons[at]._replace(state="no_end", text=text)
        for at in range(first + 1, len(keys)):
            if reasons[at].state == "ready":
                text = f"cached, but the earlier chunk {first} is not"
                reasons[at] = reasons[at]._replace(state="behind", text=text)
        return Explanation(hits, reasons, self._similar(others, keys) if first < len(keys) else ())

    def of_miss(self, miss: LoggedMiss) -> Reason:
        """Explain a past miss, adding what is known only now."""
        key = miss.facts.key
        found = self.reason(miss.facts, (), "before")
        if found.state == "ready":
            text = "cached, but no prefix up to it or longer was ready in time"
            return found._replace(state="no_end", text=text)
        asked = self.spaces.of(miss.session.namespace)
        if found.state == "unknown" and asked is not None:
            # Comparing two identities takes longer than looking up a chunk.
            having = (other for other in self.spaces.others(asked) if self._has(other, key))
            found = self._elsewhere(key, nearest(asked, islice(having, MAX_SIMILAR))) or found
        if self.reason(self.facts(key), ()).state != "ready":
            return found
        return found._replace(text=f"{found.text}; stored since")

    def facts(self, key: ChunkKey, least: Accuracy = Accuracy.exact) -> ChunkFacts:
        """Return the current facts of a chunk; takes a few microseconds."""
        seen = self._catalog.queries.status(key)
        outcome = None if seen.copies else self._catalog.outcomes.of(key)
        down = {
            name: slot.breaker.reason
            for name, slot in self._slots.items()
            if name in seen.copies and slot.breaker.is_open
        }
        return ChunkFacts(key, least, self._clock(), seen, outcome, down)

    def reason(self, facts: ChunkFacts, others: Sequence[Differing], ago: str = "ago") -> Reason:
        """Explain why a chunk can be read, or not; *others*: other models of its tenant."""
        key, seen, outcome = facts.key, facts.seen, facts.outcome
        copies = tuple((name, seen.copies[name]) for name in self._slots if name in seen.copies)
        if seen.is_expired:
            return Reason(key, "expired", "its TTL has expired; put it again", copies)
        fit = [name for name, info in copies if info.accuracy >= facts.least]
        up = [name for name in fit if name not in facts.down]
        if up:
            return Reason(key, "ready", f"on {up[0]}", copies)
        if fit:
            text = f"on {fit[0]}, which is degraded: {facts.down[fit[0]]}"
            return Reason(key, "tier_down", text, copies)
        if copies:
            best, least = max(info.accuracy for _, info in copies).name, facts.least.name
            text = f"only copies of accuracy {best} are left; {least} was requested"
            return Reason(key, "lossy", text, copies)
        if seen.is_pending:
            return Reason(key, "pending", "being put")
        if seen.is_announced:
            return Reason(key, "pending", "announced: a session will put it")
        if outcome is not None:
            passed_s = max(0.0, facts.at_s - outcome.at_s)
            where = f" from {outcome.tier}" if outcome.tier else ""
            text = _SENTENCES[outcome.fate].format(where=where, ago=f"{passed_s:.0f} s {ago}")
            text += f": {outcome.detail}" if outcome.detail else ""
            return Reason(key, outcome.fate.value, text)
        if (named := self._elsewhere(key, others)) is not None:
            return named
        if seen.is_evicted:
            return Reason(key, "evicted", "evicted; the reason is no longer kept")
        return Reason(key, "unknown", "never stored here, or no longer remembered")

    # --- other identities

    def _similar(self, others: Sequence[Differing], keys: Sequence[ChunkKey]) -> list[SimilarModel]:
        found = [(*one, any(self._has(one[0], key) for key in keys[:_SEARCHED])) for one in others]
        found.sort(key=lambda one: not one[2])
        # Counting scans the whole index, so only few are counted.
        count_in = self._catalog.queries.count_in
        counted = [(count_in(one[0].namespace), *one) for one in found[:_COUNTED]]
        return [SimilarModel(*one) for one in counted if one[0]][:MAX_SIMILAR]

    def _elsewhere(self, key: ChunkKey, others: Sequence[Differing]) -> Reason | None:
        for other, named in others:
            if self._has(other, key):
                known = [f"{d.field}: stored {d.stored}, requested {d.asked}" for d in named]
                more = [f"{len(known) - _MAX_NAMED} more"] if len(known) > _MAX_NAMED else []
                text = "stored under another identity: " + "; ".join(known[:_MAX_NAMED] + more)
                return Reason(key, "other_identity", text)
        return None

    def _has(self, space: ModelNamespace, key: ChunkKey) -> bool:
        return bool(self._catalog.holders(ChunkKey(space.namespace + key[DIGEST_BYTES:])))


def _cut(name: str) -> str:
    if len(name) > MAX_REASON_CHARS:
        name = f"{name[: MAX_REASON_CHARS - 3]}..."
    return printable(name)


_SENTENCES = {
    Fate.refused: "refused {ago}",
    Fate.invalid: "its frame failed a check {ago}",
    Fate.evicted: "evicted{where} {ago}",
    Fate.corrupt: "failed verification and dropped{where} {ago}",
    Fate.unreadable: "dropped{where} {ago} (readable only by servers with other codecs)",
    Fate.codec_removed: "dropped{where} {ago} (its codec was removed from kvstore)",
    Fate.lost: "lost{where}, detected {ago}",
    Fate.deleted: "deleted {ago}, by request or because a client found it damaged",
    Fate.expired: "dropped{where} {ago} (its TTL expired)",
}
