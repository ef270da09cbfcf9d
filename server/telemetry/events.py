"""Events: chunks added to and removed from this node's own tiers, for subscribers; and outcomes:
the last fate of a chunk, for Explain.

Events follow vLLM's (vllm/distributed/kv_events.py): numbered, kept for a while for readers that
missed some, and hints only: acting on a wrong one ends in a miss.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from struct import Struct
from threading import Event as Flag
from threading import Lock
from time import sleep
from typing import NamedTuple

from kvstore.proto.types import (
    DIGEST_BYTES,
    ROOT,
    Accuracy,
    ChainDigest,
    ChunkInfo,
    ChunkKey,
    Namespace,
)

_ROW = Struct("<32s16sqqIBB")
"""Key, parent, number, own number, tokens, tier number, accuracy."""

_ACCURACIES = {accuracy.value: accuracy for accuracy in Accuracy}


class Event(NamedTuple):
    """A copy was added to *tier*, or removed: then *tokens* is 0.

    *number* counts all events, *own* those of the key's namespace, so that it reveals no activity
    of others. Both are 0 for copies listed as held.
    """

    key: ChunkKey
    tier: str
    tokens: int = 0
    parent: ChainDigest = ROOT
    accuracy: Accuracy = Accuracy.approximate
    number: int = 0
    own: int = 0

    @property
    def space(self) -> bytes:
        """The namespace of the chunk."""
        return self.key[:DIGEST_BYTES]


MAX_OUTCOMES = 16_384
"""Limit of remembered outcomes, the latest; about 6 MB."""
MAX_DETAIL_CHARS = 200
PAGE_EVENTS = 512
EVENT_READERS = 16
"""Each occupies a thread while it reads."""
EVENT_READERS_PER_TENANT = 4
POLL_S = 0.02
"""Largest delay of an event: events are batched meanwhile."""
MAX_SPACES = 4096
"""Limit of namespaces with separate numbers. A dropped one continues from the number of all, which
it then reveals."""


Held = Callable[[int, Namespace | None], tuple[list[Event], int]]
"""(first row, namespace) -> copies in some rows as events, and the next row, 0 at the end."""


class Page(NamedTuple):
    """*events* in order. *cleared*: earlier knowledge is void; *cursor*: where to resume, 0 while
    held copies are still being listed.
    """

    events: list[Event]
    cursor: int
    cleared: bool = False


class EventLog:
    """A ring buffer of the latest *size* events of *tiers*.

    Writers hold the catalog's lock. Readers need no lock: a row is written and read in one call of
    ``struct`` each and contains its number, so a late reader detects that it was overwritten.
    *held* lists the current copies; *on_restart* is called when a reader fell behind. 65,536 events
    take 4.6 MB, allocated at start; as objects 21 MB.
    """

    def __init__(
        self, tiers: Collection[str], size: int, held: Held, on_restart: Callable[[], object] = bool
    ) -> None:
        self.held = held
        self.on_restart = on_restart
        self.tiers = {tier: number for number, tier in enumerate(sorted(tiers))}
        """Tier numbers in rows."""
        self._names = list(self.tiers)
        self._size = size
        # Multiplication writes all pages now, rather than one by one later.
        self._rows = bytearray(b"\0") * (size * _ROW.size)
        self._counts: OrderedDict[bytes, int] = OrderedDict()
        self._least = 1  # start of the count of a namespace that is not in *_counts*
        self.last = 1
        """The number of the latest event; the first is 2, as no cursor may be 0."""
        self.ended = Flag()
        """Set when readers must stop because the server stops."""

    def stored(self, tier: str, infos: Sequence[ChunkInfo], put_info: object = None) -> None:
        """Record copies that became visible on *tier*."""
        for info in infos:
            self._note(tier, info.key, info.layout.tokens, info.parent, info.accuracy)

    def removed(self, tier: str, key: ChunkKey, *, is_last: bool) -> None:
        """Record a copy removed from *tier*."""
        self._note(tier, key, 0, ROOT, Accuracy.approximate)

    def _note(
        self, tier: str, key: ChunkKey, tokens: int, parent: ChainDigest, accuracy: Accuracy
    ) -> None:
        where = self.tiers.get(tier)
        if where is None:
            return
        number, space = self.last + 1, key[:DIGEST_BYTES]
        own = self._counts.get(space, self._least) + 1
        self._counts[space] = own
        if len(self._counts) > MAX_SPACES:
            self._counts.popitem(last=False)
            self._least = number
        at = number % self._size * _ROW.size
        _ROW.pack_into(self._rows, at, key, parent, number, own, tokens, where, accuracy)
        self.last = number

    def get(self, number: int) -> Event | None:
        """Return the event of *number*; None if it was overwritten or never written."""
        row = _ROW.unpack_from(self._rows, number % self._size * _ROW.size)
        key, parent, found, own, tokens, tier, accuracy = row
        if found != number or not found:  # a row that was never written has number 0
            return None
        return Event(key, self._names[tier], tokens, parent, _ACCURACIES[accuracy], number, own)

    def count(self, space: Namespace | None) -> int:
        """Return the own number of the latest event of *space*; the number of all for None."""
        return self.last if space is None else self._counts.get(space, self._least)

    def number_of(self, space: Namespace | None, own: int) -> int | None:
        """Return a position from event *own* of *space* to before its next; None if overwritten."""
        last = self.last
        if space is None:
            return own if last - self._size <= own <= last else None
        if own == self.count(space):
            return last
        for at in range(max(0, last - self._size) + 1, last + 1):
            event = self.get(at)
            if event is not None and event.space == space and event.own > own:
                return event.number - 1 if event.own == own + 1 else None
        return None


class EventReader:
    """A reader of the events of *space*, or of all. Not thread-safe.

    A reader without a position in the log begins with the held copies. Its position is set before
    they are listed, so changes meanwhile follow, perhaps twice.
    """

    def __init__(self, log: EventLog, space: Namespace | None = None) -> None:
        self._log = log
        self._space = space
        self._at: int | None = None
        self._row = 0
        self.cursor = 0
        """Position after the events read, once ``poll`` has nothing new."""

    def go_on(self, cursor: int) -> None:
        """Resume after the page of *cursor*, or begin with held copies if that is overwritten."""
        self._at = self._log.number_of(self._space, cursor) if cursor else None
        self.cursor = cursor

    @property
    def is_level(self) -> bool:
        """Whether all held copies were listed, so that only new events follow."""
        return self._at is not None and not self._row

    def poll(self) -> Page | None:
        """Return the next page; None when there is nothing new."""
        if self._at is None:
            # In this order: events between the two reads are listed again.
            self.cursor = self._log.count(self._space)
            self._at = self._log.last
            return self._listed(1, cleared=True)
        if self._row:
            return self._listed(self._row)
        return self._news(self._at)

    def _listed(self, row: int, *, cleared: bool = False) -> Page:
        events: list[Event] = []
        while row and not events:
            sleep(0)  # release the interpreter lock: this may scan all rows
            found, row = self._log.held(row, self._space)
            events = [one for one in found if one.tier in self._log.tiers]
        self._row = row
        return Page(events, 0 if row else self.cursor, cleared)

    def _news(self, at: int) -> Page | None:
        log, space = self._log, self._space
        while at < log.last:
            stop = min(log.last, at + PAGE_EVENTS)
            page = [event for event in map(log.get, range(at + 1, stop + 1)) if event is not None]
            if len(page) < stop - at:  # some are overwritten
                self._at = None
                log.on_restart()
                return self.poll()
            self._at = at = stop
            mine = [one for one in page if space is None or one.space == space]
            if mine:
                self.cursor = mine[-1].number if space is None else mine[-1].own
                return Page(mine, self.cursor)
        return None


class Fate(Enum):
    """The fate of a chunk; the value is the state in Explain."""

    refused = "refused"
    invalid = "invalid"
    evicted = "evicted"
    corrupt = "corrupt"
    unreadable = "unreadable"
    codec_removed = "codec_removed"
    lost = "lost"
    deleted = "deleted"
    expired = "expired"


class Outcome(NamedTuple):
    """*tier* is empty if none was involved, *at_s* is on the table's clock."""

    fate: Fate
    tier: str
    detail: str
    at_s: float


class Outcomes:
    """The last outcome of each of the latest chunks. Thread-safe; *clock* returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Ordered: a plain dictionary scans deleted entries to find its first one.
        self._by_key: OrderedDict[ChunkKey, Outcome] = OrderedDict()
        self._lock = Lock()  # guards the dictionary

    def note(self, key: ChunkKey, fate: Fate, tier: str = "", detail: str = "") -> None:
        """Record the outcome of a chunk, in place of an earlier one."""
        outcome = Outcome(fate, tier, detail[:MAX_DETAIL_CHARS], self._clock())
        with self._lock:
            self._by_key[key] = outcome
            self._by_key.move_to_end(key)
            if len(self._by_key) > MAX_OUTCOMES:
                self._by_key.popitem(last=False)

    def of(self, key: ChunkKey) -> Outcome | None:
        """Return the last outcome of a chunk; None if unknown."""
        with self._lock:
            return self._by_key.get(key)
