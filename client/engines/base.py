"""The Connector: what every engine's adapter shares, and the boundary where store errors end.

An adapter provides the prompt's tokens and buffers for tensors; keys, chunks and counters are
here. A store error becomes a counted miss and never reaches the engine.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import islice, takewhile
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

from kvstore.client import planning
from kvstore.client.chunk import Chunk, LayerTensors, parents
from kvstore.client.client import Client
from kvstore.client.decode import Target
from kvstore.client.engines.prefix import (
    About,
    AboutOf,
    Allowed,
    Prefix,
    Source,
    Span,
    exact_count,
    least_of,
)
from kvstore.client.forks import FORKS
from kvstore.client.server_state import ChunkStat
from kvstore.codecs.base import codec_name
from kvstore.proto.blend import ACCURACY_TAG, ReuseReport
from kvstore.proto.errors import KVStoreError
from kvstore.proto.keys import chunk_key, chunk_spans, content_digest, tokens_le32
from kvstore.proto.messages import REFUSED
from kvstore.proto.plans import NO_HINTS, Hints
from kvstore.proto.types import EXACT, Accuracy, ChainDigest, ChunkKey, Match, PutOutcome, Stated


@dataclass(frozen=True, slots=True)
class ConnectorStats:
    """Counters of a connector since its creation. Errors are counted by class name.

    ``lost_chunks`` were found by the lookup but not read: late, evicted or damaged;
    ``slow_chunks`` were faster to compute. ``lossy_hit_tokens`` start at the first lossy chunk;
    ``lossy_unstored_chunks`` were computed after one, and so not stored; ``gated_chunks`` were
    read but not used, because their codec's gate was shut.
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
    """Prompts without a full hit, by the reason their hit ended: see docs/engines.md."""


logger = logging.getLogger(__name__)

REPORT_EVERY_S = 10.0
"""How often a refusal's reason is sent: the server may start later, or restart."""
MAX_REASON_CHARS = 1024
"""Limit of a reason that is sent; the server keeps less."""
T = TypeVar("T")

_Read: TypeAlias = Callable[[Sequence[ChunkKey], Sequence[Span], int, Accuracy], Sequence[Stated]]
"""Reads the longest run of a load's chunks, starting at index int, from copies of at least that
accuracy; returns the ``Stated`` of each chunk read. The output buffers stay the same."""


class Connector:
    """Loads prefixes from a store and stores computed KV. Thread-safe.

    With *durable* a store returns once its chunks would survive a power cut. *token_flops* is the
    engine's approximate cost of one token. A load ends where computing the rest is faster, by the
    store's load estimates and the engine's prefill speed: *prefill*, or what ``learned`` has
    measured; until then everything available is loaded.

    *accuracy* selects the copies to read: ``exact``; ``bounded``, whose codec states a maximum
    error; or ``approximate``, any copy while the gate of its model and codec is open. KV computed
    after a lossy copy is never stored: it would be taken for exact.

    An unresponsive server costs one load or store the client's deadline; following ones cost
    nothing until ``retry_after_ms`` have passed.
    """

    def __init__(
        self,
        client: Client,
        *,
        durable: bool = False,
        token_flops: float = 0.0,
        prefill: planning.PrefillModel | None = None,
        accuracy: str = "exact",
    ) -> None:
        self.client = client
        self.least = least_of(accuracy)  # the least accuracy read
        self._prefill = prefill
        self.learned = planning.PrefillMeter()
        self.durable = durable
        self._token_flops = token_flops
        self._counts: Counter[str] = Counter()
        by_name = ("hit_tokens_by_tier", "misses", "load_errors", "store_errors")
        self._named = {name: Counter[str]() for name in by_name}
        self._is_failing = False
        self._at_once: int | None = None  # chunks that a Source can hold at once; None: no limit
        self._is_closed = threading.Event()
        # Guards _counts, _named and _is_failing; held for counting only.
        self._lock = threading.Lock()
        client.counts = self.counts
        FORKS.watch(self._after_fork)

    def _after_fork(self) -> None:
        """In a child, count from 0: the parent reports its own counts."""
        self._lock = threading.Lock()  # another thread may have held it
        self.learned = planning.PrefillMeter()  # its lock, too
        for counts in (self._counts, *self._named.values()):
            counts.clear()

    def _read_within(
        self,
        keys: Sequence[ChunkKey],
        outs: Sequence[LayerTensors],
        first: int,
        least: Accuracy,
        within: planning.Deadline,
        tail_tokens: int,
    ) -> list[Stated]:
        def computing(chunks: range) -> None:
            assert within.compute is not None
            within.compute(chunks)
            within.computed = chunks.stop

        terms = self.terms(within, tail_tokens, least)
        is_beside = terms.prefill is not None and within.compute is not None and not first
        found = self.client.get_levelled(
            keys[first:], terms, outs[first:], computing if is_beside else None
        )
        # Chunks after a damaged one are useless, wherever it is.
        computed = 0 if first else within.computed
        rest = zip(found.levels[computed:], found.stated[computed:], strict=True)
        read = [stated for level, stated in takewhile(lambda one: one[0] >= 0, rest)]
        return [EXACT] * computed + read

    def terms(
        self, within: planning.Deadline, tail_tokens: int, least: Accuracy = Accuracy.exact
    ) -> planning.PlanTerms:
        """Return the terms of a load within a deadline."""
        left_s = max(within.left_s, planning.LEAST_LEFT_S)
        prefill = self._prefill or self.learned.model()
        # The engine always computes the last token.
        return planning.PlanTerms(left_s, prefill, least=least, tail_tokens=max(1, tail_tokens))

    def attempt(
        self,
        tokens: Sequence[int],
        read: _Read,
        extra: Sequence[bytes],
        allowed: Allowed,
        whole: bool = False,
        within: planning.Deadline | None = None,
    ) -> tuple[Prefix, str]:
        """Return the prefix of *tokens* loaded by *read*, uncounted, and why it ends. Never raises.

        *extra* also identifies the prompt (cache salt, multimodal hashes), in order. *whole*: a
        partial hit is useless. *within* a deadline a request is no later than without the store:
        chunks that load too slowly are computed, by ``within.compute`` beside the loads, or after
        them. Until ``learned`` has measured the engine, loads stop at the deadline.
        """

        def load() -> tuple[Prefix, str]:
            keys = self.client.keys(tokens[:-1] if whole else tokens, extra)
            if not keys:
                return Prefix(), "short"
            return self._load(keys, len(tokens), read, allowed, whole, within)

        return self.guard(load, (Prefix(), "error"))

    def note_load(self, tokens: int, prefix: Prefix, reason: str, lost_chunks: int = 0) -> Prefix:
        """Count *prefix*, loaded for a prompt of *tokens* tokens, and return it."""
        with self._lock:
            self._counts["lookups"] += 1
            self._named["misses"].update([reason] if reason else ())
            self._counts["hit_tokens"] += prefix.hit_tokens
            self._counts["lossy_hit_tokens"] += max(0, prefix.hit_tokens - prefix.exact_tokens)
            self._counts["miss_tokens"] += tokens - prefix.hit_tokens
            self._counts["lost_chunks"] += lost_chunks
            self._named["hit_tokens_by_tier"].update(prefix.tier_tokens)
        return prefix

    def _load(
        self,
        keys: Sequence[ChunkKey],
        tokens: int,
        read: _Read,
        allowed: Allowed,
        whole: bool,
        within: planning.Deadline | None,
    ) -> tuple[Prefix, str]:
        timeout = None
        if within is not None:
            most_s = self.client.options.deadline_ms / 1000
            timeout = min(max(planning.LEAST_LOOKUP_MS / 1000, within.left_s), most_s)
        match = self.client.lookup(keys=keys, accuracy=allowed.least, timeout=timeout)
        reason = "" if match.ready == len(keys) else "pending" if match.pending else "absent"
        every = self._spans(tokens - whole)
        shared = every[match.shared - 1][1] if match.shared else 0
        count = self.worth_loading(match, tokens) if within is None else match.ready
        if whole and count < match.ready:
            count = 0
        if count < match.ready:
            reason = "slow"
            self._count("slow_chunks", match.ready - count)
        if not count:
            return Prefix(shared_tokens=shared), reason
        keys, spans = keys[:count], every[:count]
        loaded = read(keys, spans, 0, allowed.least)
        stated = self._usable(loaded, allowed, lambda at: read(keys, spans, at, Accuracy.bounded))
        first = within.computed if within is not None else 0
        found = len(stated)
        missing = count + first - max(found, len(loaded))
        if missing:
            reason = "lost" if within is None else "slow"
            self._count(f"{reason}_chunks", missing)
        if found < len(loaded):
            reason = "gate"
        unbounded = [one for one in stated if one.accuracy is Accuracy.approximate]
        prefix = replace(
            Prefix.of(spans[first:found], match.tiers[first:found], tokens, shared),
            # Chunks that the engine computed meanwhile are stored already.
            stored_tokens=spans[found - 1][1] if found else 0,
            lossy_tokens=sum(stop - start for start, stop in spans[exact_count(stated) : found]),
            codecs=frozenset(codec_name(one.codec_id) for one in unbounded),
        )
        return prefix, reason

    def _count(self, name: str, count: int) -> None:
        with self._lock:
            self._counts[name] += count

    def _usable(
        self, loaded: Sequence[Stated], allowed: Allowed, again: Callable[[int], Sequence[Stated]]
    ) -> Sequence[Stated]:
        """Return the chunks before the first with a shut gate, then those that *again* reads from
        there on: slower tiers may hold bounded copies."""
        count = allowed.count(loaded)
        if count == len(loaded):
            return loaded
        usable = [*loaded[:count], *self.guard(lambda: list(again(count)), list[Stated]())]
        self._count("gated_chunks", max(0, len(loaded) - len(usable)))
        return usable

    def allowed(self, least: Accuracy) -> Allowed:
        """Return the copies of at least *least* that may be read: approximate ones of codecs whose
        gate is open on the server now. Never raises."""
        if least is not Accuracy.approximate:
            return Allowed(least)
        query, shut = ReuseReport(ACCURACY_TAG), tuple[str, ...]()
        codecs = self.guard(lambda: self.client.report_reuse(query).codecs, shut)
        return Allowed(least if codecs else Accuracy.bounded, frozenset(codecs))

    def worth_loading(self, match: Match, token_count: int) -> int:
        """Return how many chunks of *match* to load for a prompt of *token_count* tokens."""
        prefill = self._prefill or self.learned.model(planning.DOUBT)
        if prefill is None:
            return match.ready
        spans = self._spans(token_count)[: match.ready]
        return planning.chunks_worth_loading(match.load_us, spans, token_count, prefill)

    def store_chunks(
        self,
        tokens: Sequence[int],
        source: Source,
        from_token: int = 0,
        extra: Sequence[bytes] = (),
        about: AboutOf | None = None,
    ) -> int:
        """Store the chunks of *tokens* that end after *from_token*; return how many were new.

        Never raises. *from_token* is how many tokens the store already holds. *about* returns a
        chunk's layout, for models that keep windows or states, and its tokens' importance.
        """

        def chunks() -> Iterator[Chunk]:
            keys = self.client.keys(tokens, extra)
            named = zip(self._spans(len(tokens)), keys, parents(keys), strict=True)
            for (start, stop), key, parent in named:
                if stop > from_token:
                    info = about((start, stop)) if about else About()
                    yield Chunk(
                        key,
                        source((start, stop)),
                        parent=parent,
                        position=start,
                        prefill_flops=self._token_flops * (stop - start),
                        content=content_digest(tokens_le32(tokens[start:stop]), extra),
                        layout=info.layout,
                        importance=info.importance,
                    )

        made, stored = chunks(), 0
        while outcomes := self.write_each(lambda: list(islice(made, self._at_once))):
            stored += outcomes.count(PutOutcome.stored)
        return stored

    # --- for engines that look up, load and store at different times, by digests they keep

    def guard(self, work: Callable[[], T], otherwise: T, *, is_store: bool = False) -> T:
        """Return the result of *work*, a call to the store. Never raises: a failure is counted as
        a load or store error, and the result is *otherwise*."""
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - no fault of the store may fail a request
            name = type(error).__name__
            with self._lock:
                self._named["store_errors" if is_store else "load_errors"][name] += 1
                is_news, self._is_failing = not self._is_failing, True
            if is_news:
                # As text: a record that kept the error would keep the buffers of its frames.
                logger.warning("continuing without the store: %s: %s", name, str(error))
            return otherwise
        self._is_failing = False
        return result

    def stored(self, digests: Sequence[ChainDigest]) -> set[bytes]:
        """Return those of *digests* with an exact copy, prefix or not. Never raises."""
        found = self.guard(lambda: self.client.stat(keys=self.keys_of(digests)), list[ChunkStat]())
        exact = Accuracy.exact
        return {one.digest for one in found if any(c.accuracy == exact for c in one.copies)}

    def read(self, digests: Sequence[ChainDigest], out: Sequence[LayerTensors]) -> int:
        """Read the longest prefix of *digests* into *out*; return its chunk count. Never raises."""
        count = self.guard(lambda: len(self.client.get_chunks(self.keys_of(digests), out)), 0)
        self._count("lost_chunks", len(digests) - count)
        return count

    def read_into(
        self,
        digests: Sequence[ChainDigest],
        target: Target,
        stated: list[Stated] | None = None,
        terms: planning.PlanTerms | None = None,
    ) -> int:
        """Like ``read``, into the buffers that *target* returns for a chunk's layout; may raise.

        *stated* receives the ``Stated`` of each chunk used, then of each chunk read but not used
        because a gate was shut; without it only exact copies are read. With *terms*, read as far
        as their deadline allows.
        """
        allowed = self.allowed(Accuracy.exact if stated is None else self.least)
        until = None if terms is None else planning.Deadline(terms.deadline_s)
        loaded: Sequence[Stated] = ()
        usable: Sequence[Stated] = ()

        def get(first: int, least: Accuracy) -> list[Stated]:
            keys, found = self.keys_of(digests[first:]), list[Stated]()
            place: Target = lambda at, layout: target(first + at, layout)  # noqa: E731
            if terms is None or until is None or self.client.options.shard is not None:
                self.client.get_chunks(keys, place, accuracy=least, stated=found)
                return found
            left_s = max(until.left_s, planning.LEAST_LEFT_S)
            left = replace(terms, deadline_s=left_s, least=least)
            levelled = self.client.get_levelled(keys, left, place)
            return list(levelled.stated[: next(iter(levelled.to_compute), len(keys))])

        try:
            loaded = get(0, allowed.least)
            usable = self._usable(loaded, allowed, lambda first: get(first, Accuracy.bounded))
        finally:
            name = "lost_chunks" if terms is None else "slow_chunks"
            self._count(name, len(digests) - max(len(loaded), len(usable)))
        if stated is not None:
            stated += [*usable, *loaded[len(usable) :]]
        return len(usable)

    def keys_of(self, digests: Sequence[ChainDigest]) -> list[ChunkKey]:
        """Return the chunks' keys; opens a session if there is none, even for no chunks."""
        space = self.client.namespace
        return [chunk_key(space, digest) for digest in digests]

    def note_unstored(self, tokens: int, exact_tokens: int) -> None:
        """Count the chunks of a prompt of *tokens* tokens that end after *exact_tokens*."""
        behind = [stop for _, stop in self._spans(tokens) if stop > exact_tokens]
        self._count("lossy_unstored_chunks", len(behind))

    def write_each(
        self, chunks: Callable[[], Sequence[Chunk]], hints: Hints = NO_HINTS
    ) -> list[PutOutcome]:
        """Put the chunks that *chunks* returns; return each one's outcome, or [] on failure."""

        def put() -> list[PutOutcome]:
            puts = self.client.put_chunks(chunks(), durable=self.durable, hints=hints)
            return [one.outcome for one in puts]

        outcomes = self.guard(put, list[PutOutcome](), is_store=True)
        with self._lock:
            self._counts.update(outcome.name for outcome in outcomes)
        return outcomes

    def _spans(self, token_count: int) -> list[Span]:
        return chunk_spans(token_count, self.client.options.chunk_tokens)

    def report_refusal(self, reason: str) -> None:
        """Report to the server, also one that starts later, why this engine runs without it."""
        self._count(f"{REFUSED}{' '.join(reason[:MAX_REASON_CHARS].split())}", 1)

        def report() -> None:
            while True:
                with suppress(KVStoreError):
                    self.client.send_counts()
                if self._is_closed.wait(REPORT_EVERY_S):
                    return

        threading.Thread(target=report, name="kvstore-refused", daemon=True).start()

    def close(self) -> None:
        """Close the client and stop refusal reports. Idempotent."""
        self._is_closed.set()
        self.client.close()

    def counts(self) -> dict[str, int]:
        """Return the counters sent to the server, by name: counts, misses, errors, a refusal."""
        with self._lock:
            kinds = {"miss": "misses", "load": "load_errors", "store": "store_errors"}
            named = {
                f"{kind}_{name}": count
                for kind, of in kinds.items()
                for name, count in self._named[of].items()
            }
            return {**self._counts, **named}

    def clear(self) -> None:
        """Delete every chunk of this model. Never raises."""
        self.guard(self.client.clear, 0, is_store=True)

    def stats(self) -> ConnectorStats:
        """Return a snapshot of the counters."""
        with self._lock:
            found: dict[str, Any] = {f.name: self._counts[f.name] for f in fields(ConnectorStats)}
            outcomes = {"stored": "stored", "existing": "exists", "refused": "refused"}
            found |= {f"{name}_chunks": self._counts[one] for name, one in outcomes.items()}
            found |= {name: dict(counts) for name, counts in self._named.items()}
        return ConnectorStats(**found)


class DaemonThreads:
    """*count* daemon threads that run submitted work in order. Thread-safe. A ThreadPoolExecutor
    would finish all queued work before the process exits: each item may wait for the store.
    """

    def __init__(self, name: str, count: int = 1) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._is_closed = False
        self._lock = threading.Lock()  # guards the field above: queued work is run or cancelled
        self._count = count
        for _ in range(count):
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue *work*; after ``close`` return a cancelled future. Never raises."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                future.cancel()
            else:
                self._queue.put((future, work))
        return future

    def close(self) -> None:
        """Cancel queued work, and end the threads after their current item. Idempotent."""
        with self._lock:
            self._is_closed = True
        with suppress(Empty):
            while True:
                if (waiting := self._queue.get_nowait()) is not None:
                    waiting[0].cancel()
        for _ in range(self._count):
            self._queue.put(None)

    def _run(self) -> None:
        while (submitted := self._queue.get()) is not None:
            future, work = submitted
            future.set_running_or_notify_cancel()
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised again by result()
                future.set_exception(error)
            del submitted, future, work  # an idle thread keeps nothing alive
