"""The scheduler's half of the vLLM connector: what to load, what to store, and no request held up.

What is stored of a prompt is asked by a thread from the moment the request arrives; until it
knows, the engine is told to ask again, and waits only if it computes nothing, and a moment. Works
on vLLM's Request and SchedulerOutput by their fields, without importing vLLM.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvstore.client.engines.base import Connector
from kvstore.client.engines.identity import EPOCH_BYTES
from kvstore.client.engines.vllm_cost import deadline_ms_of, hints_of
from kvstore.client.engines.vllm_events import KVEvents
from kvstore.client.engines.vllm_lookup import (
    WAITERS,
    Fewer,
    LookupDesk,
    Ticket,
    Tracked,
    found_of,
)
from kvstore.client.engines.vllm_lossy import LossyBlocks
from kvstore.client.engines.vllm_names import RequestNames
from kvstore.client.engines.vllm_orders import (
    MISFITS,
    BlockTables,
    LoadOrder,
    StepOrders,
    StoreOrder,
    WorkerNews,
    taken_blocks,
)
from kvstore.client.engines.vllm_settings import BOTH, Role
from kvstore.client.engines.vllm_shape import EngineShape
from kvstore.client.prefill import LEAST_TOKENS, Deadline
from kvstore.proto.errors import KVStoreError
from kvstore.proto.keys import chunk_key
from kvstore.proto.plans import Hints
from kvstore.proto.types import ChainDigest, ChunkKey

IDLE_WAIT_S = 0.001
"""What an idle step waits for the answer to a lookup."""

TOGETHER_S = 0.01
"""What a step of an engine that computes nothing waits for answers before it begins: requests that
came together and are computed in two steps cost those that are done first a whole step more."""

LATE_S = 0.005
"""What an answer may take beyond the deadline of its lookup before it is taken for a miss."""

MAX_LOOKUP_CHUNKS = 4096
"""What is looked up of one prompt: as many as a server takes in one question."""

RECENT_S = 10.0
"""Requests that share a prefix and come together: one of them stores it."""

MAX_RECENT_CHUNKS = 16384
"""Chunks of which that is remembered."""


class VllmScheduler:
    """Decides for one engine. For the scheduler's thread.

    *lookups*: a connector of the whole model, to look up with: a chunk is a hit once every rank
    has put its part of it.
    """

    def __init__(
        self,
        lookups: Connector,
        shape: EngineShape,
        *,
        role: Role = BOTH,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        options = lookups.client.options
        self._lookups = lookups
        self._chunk_tokens = options.chunk_tokens
        self._block_tokens = shape.block_tokens
        self._continues, self._has_ends = shape.continues, shape.has_ends
        self._all_or_nothing = shape.has_ends or shape.tables > 1
        self._role = role
        self._clock = clock
        self._late_s = (options.deadline_ms + role.wait_ms) / 1000 + LATE_S
        self._names = RequestNames(sglang_names=options.sglang_names)
        self._epoch = b""
        self._tracked: dict[str, Tracked] = {}
        self._computing: set[str] = set()
        """Requests of the last step that are not finished."""
        self._patience_s = TOGETHER_S
        """What the next step may still wait, if there are none."""
        self._lossy = LossyBlocks(shape.block_tokens)
        self._recent: OrderedDict[ChainDigest, float] = OrderedDict()
        self.counted: Counter[str] = Counter()
        lookups.client.counts = lambda: {**lookups.counts(), **self.counted}
        self._reported: Counter[str] = Counter()
        self._refusal = ""
        self._is_waiting = False
        self._steps: deque[tuple[int, float]] = deque(maxlen=1 + role.steps_ahead)
        """Tokens of prompts that each of the last steps computes, and when it was scheduled."""
        self.events: KVEvents | None = None
        """Where others are told what is stored; None if nobody is."""
        self._desk = LookupDesk(
            self._find,
            self._chunk_tokens,
            options.retry_after_ms / 1000,
            clock,
            WAITERS if role.wait_ms else 1,
            self._withdraw if role.handover_ms else None,
        )

    def _find(self, digests: Sequence[ChainDigest]) -> int | None:
        """Return how many chunks are there, and announce the others. In a thread of the desk."""
        digests = digests[:MAX_LOOKUP_CHUNKS]
        ready = self._lookups.ask(partial(self._look, digests), None)
        found = found_of(ready)
        if ready is not None and self._role.handover_ms and found < len(digests):
            self._lookups.ask(partial(self._announce, digests[found:]), None)
        return ready

    def _look(self, digests: Sequence[ChainDigest]) -> int | None:
        keys = self._keys(digests)
        if not keys:
            return 0
        least = self._lookups.allowed(self._lookups.least).least
        match = self._lookups.client.lookup(
            keys=keys, accuracy=least, wait=self._role.wait_ms / 1000
        )
        worth = self._lookups.worth_loading(match, len(keys) * self._chunk_tokens)
        if worth == match.ready:
            return worth
        # A prefix of windows can be gone on from at its end only.
        return Fewer(0 if self._has_ends else worth, match.ready)

    def _announce(self, digests: Sequence[ChainDigest]) -> int | None:
        return self._lookups.client.announce_puts(
            self._keys(digests), within=self._role.handover_ms / 1000
        )

    def _withdraw(self, digests: Sequence[ChainDigest]) -> None:
        self._lookups.ask(
            lambda: self._lookups.client.announce_puts(self._keys(digests), within=0.0), None
        )

    def _keys(self, digests: Sequence[ChainDigest]) -> list[ChunkKey]:
        """Name chunks; asking for the namespace opens a session, even for none."""
        space = self._lookups.client.namespace
        return [chunk_key(space, digest) for digest in digests]

    # --- a request's way

    def arrived(self, request: Any) -> None:
        """Begin to look up *request*."""
        if self._refusal:
            self._miss(self._refusal)
        else:
            self._track(request)

    def _track(self, request: Any) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = Tracked(request, self._ask(request), request.num_preemptions)
            tracked.hints, tracked.within = self._hints(request), self._deadline(request)
            self._tracked[request.request_id] = tracked
        elif tracked.preemptions != request.num_preemptions:
            # Its blocks are gone; what was stored of it meanwhile may be loaded.
            tracked.ticket, tracked.preemptions = self._ask(request), request.num_preemptions
            tracked.is_loaded = tracked.is_looked_at = False
        return tracked

    def _hints(self, request: Any) -> Hints:
        handover_ms = self._role.handover_ms
        try:
            hints = hints_of(request)
            return hints if hints.handover_ms else replace(hints, handover_ms=handover_ms)
        except (*MISFITS, KVStoreError):  # what a user stated may not end the engine
            self.counted["bad_hints"] += 1
            return Hints(handover_ms=handover_ms)

    def _deadline(self, request: Any) -> Deadline | None:
        usual_ms = self._role.first_token_ms
        try:
            usual_ms = deadline_ms_of(request, usual_ms)
        except KVStoreError:
            self.counted["bad_hints"] += 1
        return Deadline(usual_ms / 1000) if usual_ms else None

    def _ask(self, request: Any) -> Ticket:
        identify = partial(self._names.identity, request, self._epoch)
        # A copy: the request's own list grows, and this one is read by the desk's thread.
        return self._desk.ask(list(request.all_token_ids), identify)

    def matched_tokens(self, request: Any, computed_tokens: int) -> int | None:
        """Return how many tokens past *computed_tokens* can be loaded; None: ask again.

        They are loaded beside the engine's work. All tokens of the prompt may be among them.
        """
        if self._refusal:
            return 0
        tracked = self._track(request)
        tracked.computed_tokens = computed_tokens
        whole_tokens = request.num_tokens // self._chunk_tokens * self._chunk_tokens
        is_unwanted = getattr(request, "skip_reading_prefix_cache", False) or not self._role.loads
        if tracked.is_loaded or is_unwanted or whole_tokens <= computed_tokens:
            return 0
        ticket = tracked.ticket
        if ticket.ready is None:
            self._await(ticket)
        if ticket.ready is None:
            if self._desk.is_down:
                # The desk may be asking whether the store is back: no request waits for that.
                return self._counted(tracked, 0, "down")
            if self._clock() - ticket.asked_s < self._late_s:
                return None
            return self._counted(tracked, 0, "late")
        stop = ticket.ready * self._chunk_tokens
        if self._has_ends and stop >= request.num_tokens:
            # vLLM computes the last token again, but by then gave up what only its window sees.
            stop = request.num_tokens - 1
        hit_tokens = max(0, stop - computed_tokens)
        absent = "slow" if isinstance(ticket.ready, Fewer) else "absent"
        reason = ticket.refusal or ("down" if self._desk.is_down else absent)
        if hit_tokens and not self._continues and request.num_tokens - stop > 1:
            hit_tokens, reason = 0, "prefill"
        return self._counted(tracked, hit_tokens, reason)

    def _await(self, ticket: Ticket) -> None:
        """Wait for an answer while there is nothing to compute, a moment for all of a step."""
        if self._computing or self._patience_s <= 0.0 or self._desk.is_down:
            return
        began = self._clock()
        self._desk.wait(min(self._patience_s, ticket.asked_s + self._late_s - began), ticket)
        self._patience_s -= self._clock() - began if ticket.ready is not None else self._patience_s

    def _miss(self, reason: str) -> None:
        self.counted[f"miss_{reason}"] += 1

    def _counted(self, tracked: Tracked, hit_tokens: int, reason: str) -> int:
        """Count the answer to a request once: it may be asked again when there is no room."""
        if not tracked.is_counted:
            tracked.is_counted = True
            self._tell_missing(tracked.ticket)
            self.counted["lookups"] += 1
            self.counted["hit_tokens"] += hit_tokens
            self.counted["prompt_tokens"] += tracked.request.num_tokens
            if not hit_tokens:
                self._miss(reason)
        return hit_tokens

    def _tell_missing(self, ticket: Ticket) -> None:
        """Tell of what the store was found not to have any more."""
        if self.events is None or ticket.refusal or self._desk.is_down:
            return
        if ticket.ready is not None and ticket.chain is not None:
            self.events.lost(ticket.chain.digests[ticket.found : MAX_LOOKUP_CHUNKS])

    def allocated(self, request: Any, loaded_tokens: int, tables: BlockTables) -> None:
        """Have the next *loaded_tokens* of *request* loaded into the blocks in its *tables*."""
        if not loaded_tokens:
            return
        tracked = self._track(request)
        start = tracked.computed_tokens
        stop = start + loaded_tokens
        size, block = self._chunk_tokens, self._block_tokens
        first = start // size
        chain = tracked.ticket.chain
        digests = () if chain is None else tuple(chain.digests[first : -(-stop // size)])
        blocks = slice(first * size // block, -(-stop // block))
        tracked.is_loaded, tracked.loaded_from, tracked.loaded_stop = True, first, stop
        terms = None
        if tracked.within is not None and not self._all_or_nothing:
            terms = self._lookups.terms(tracked.within, request.num_tokens - stop)
        tracked.load = LoadOrder(
            request.request_id,
            digests,
            tuple(tuple(table[blocks]) for table in tables),
            kept_blocks=(start - first * size) // block,
            all_or_nothing=self._all_or_nothing,
            terms=terms,
        )

    def finished(self, request: Any) -> None:
        """Forget *request*, and let nobody wait for what will not be stored of it."""
        self._computing.discard(request.request_id)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None:
            self._give_up(tracked)

    def _give_up(self, tracked: Tracked) -> None:
        """Take back what is announced of a request, but for what others have announced, too."""
        chain = tracked.ticket.chain
        left = [] if chain is None else chain.digests[tracked.stored or 0 : MAX_LOOKUP_CHUNKS]
        if left and self._role.handover_ms:
            tickets = [one.ticket for one in self._tracked.values() if one is not tracked]
            chains = [one.chain for one in tickets if one.chain is not None and not one.is_over]
            others = {digest for chain in chains for digest in chain.digests}
            left = [digest for digest in left if digest not in others]
        self._desk.give_up(tracked.ticket, left)

    def reset(self) -> None:
        """Never again load what was stored before, as the engine's weights may be others."""
        self._epoch = os.urandom(EPOCH_BYTES)
        for tracked in self._tracked.values():
            self._give_up(tracked)
            # What is under way is of both weights: it has no name.
            tracked.ticket = Ticket.spent()
        if self.events is not None:
            self.events.reset()

    # --- a step

    def orders(self, output: Any, tables_of: Callable[[str], BlockTables]) -> StepOrders:
        """Return what the workers have to do in the step of vLLM's SchedulerOutput *output*.

        *tables_of* returns the block tables of a request.
        """
        for request_id in getattr(output, "preempted_req_ids", None) or ():
            if request_id in self._tracked:  # announced again once it goes on
                self._give_up(self._tracked[request_id])
        self._learn_speed(output.num_scheduled_tokens)
        self._computing, self._patience_s = set(output.num_scheduled_tokens), TOGETHER_S
        is_idle = not output.total_num_scheduled_tokens
        if is_idle:
            self._desk.wait(IDLE_WAIT_S)
        loads = [one.load for one in self._tracked.values() if one.load is not None]
        for one in self._tracked.values():
            one.load = None
        stores = [
            order
            for request_id, tokens in output.num_scheduled_tokens.items()
            if (order := self._store_order(request_id, tokens, tables_of)) is not None
        ]
        taken: frozenset[int] | None = frozenset()
        if self._role.stores:
            taken = taken_blocks(output, loads, self._block_tokens)
        return StepOrders(tuple(loads), tuple(stores), is_idle, taken)

    def _learn_speed(self, tokens: Mapping[str, int]) -> None:
        """Learn from the step before, which took until now, if most of it were prompts."""
        now_s, steps = self._clock(), self._steps
        if len(steps) == steps.maxlen and steps[0][0]:
            # A step that was scheduled ahead ran once the next one had been scheduled.
            self._lookups.learned.observe(steps[0][0], now_s - steps[-1][1])
        prompts = sum(count for count in tokens.values() if count >= LEAST_TOKENS)
        steps.append((prompts if 2 * prompts > sum(tokens.values()) else 0, now_s))

    def _store_order(
        self, request_id: str, tokens: int, tables_of: Callable[[str], BlockTables]
    ) -> StoreOrder | None:
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return None
        request, size = tracked.request, self._chunk_tokens
        if not tracked.is_looked_at:
            self._look_at(tracked)
        # Tokens that are only guessed are not among the request's own.
        whole = min(request.num_computed_tokens + tokens, request.num_tokens) // size
        is_new = tracked.stored is None or whole > tracked.stored
        if not is_new or not self._may_store(tracked):  # most steps complete no chunk
            return None
        chain = tracked.ticket.chain
        assert chain is not None
        if tracked.stored is None:
            # What the lookup did not find is stored, even if this engine had it cached.
            tracked.stored = tracked.ticket.found
        first, tracked.stored = tracked.stored, max(tracked.stored, whole)
        chain.extend(request.all_token_ids, whole)
        whole = self._exact_of(tracked, first, whole)
        while first < whole and self._is_recent(chain.chunks[first].digest):
            first += 1
        if first >= whole:
            return None
        self._remember([chunk.digest for chunk in chain.chunks[first:whole]])
        if self.events is not None:
            self.events.ordered(request, chain.chunks[first:whole])
        blocks = slice(first * size // self._block_tokens, whole * size // self._block_tokens)
        tables = tuple(tuple(table[blocks]) for table in tables_of(request_id))
        chunks = tuple(chain.chunks[first:whole])
        return StoreOrder(request_id, chunks, tables, tracked.hints)

    def _look_at(self, tracked: Tracked) -> None:
        """Take note of what a request neither computed nor had loaded here, before its first step.

        What it had loaded ``learn`` was told of.
        """
        tracked.is_looked_at = True
        request = tracked.request
        held = tracked.computed_tokens if tracked.is_loaded else request.num_computed_tokens
        exact = self._lossy.exact_tokens(request, held)
        if exact < held:
            tracked.exact_tokens = min(tracked.exact_tokens, exact)

    def _exact_of(self, tracked: Tracked, first: int, whole: int) -> int:
        """Return the stop of the chunks from *first* to *whole* that are not behind a lossy block.

        Nobody is to wait for the others.
        """
        chain = tracked.ticket.chain
        stop = max(first, min(whole, tracked.exact_tokens // self._chunk_tokens))
        if stop < whole and chain is not None:
            self.counted["lossy_unstored_chunks"] += whole - stop
            self._desk.take_back(chain.digests[stop:whole])
        return stop

    def _is_recent(self, digest: ChainDigest) -> bool:
        return self._clock() - self._recent.get(digest, -math.inf) < RECENT_S

    def _remember(self, digests: Sequence[ChainDigest]) -> None:
        for digest in digests:
            self._recent.pop(digest, None)
            self._recent[digest] = self._clock()
        while len(self._recent) > MAX_RECENT_CHUNKS:
            self._recent.popitem(last=False)

    def _forget(self, digests: Sequence[ChainDigest]) -> None:
        """Have chunks that are not there stored by who computes them next."""
        for digest in digests:
            self._recent.pop(digest, None)

    def _may_store(self, tracked: Tracked) -> bool:
        is_possible = self._role.stores and not self._refusal and not self._desk.is_down
        return is_possible and tracked.ticket.chain is not None

    # --- news

    def learn(self, news: WorkerNews) -> None:
        """Take in what the workers have to say."""
        self._refusal = self._refusal or ("pages" if news.refusal else "")
        self._is_waiting = news.is_waiting
        if news.is_down:
            self._desk.note_down()
        self._desk.take_back(news.unstored)
        self._forget(news.unstored)
        if self.events is not None:
            self.events.stored(news.stored)
        for request_id, chunks in news.lossy_loads.items():
            self._learn_lossy(request_id, chunks)
        for request_id, chunks in news.short_loads.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            # With a deadline it is there, and was slow, unless a gate is shut.
            if tracked.within is None or request_id in news.gated_loads:
                # What could not be read is computed now, and stored in its place.
                read = tracked.loaded_from + chunks
                # One rank may say so a step after another that read less.
                tracked.stored = read if tracked.stored is None else min(tracked.stored, read)
                chain = tracked.ticket.chain
                lost = chain.digests[tracked.stored :] if chain is not None else []
                self._forget(lost)
                if self.events is not None:
                    self.events.lost(lost)

    def _learn_lossy(self, request_id: str, chunks: int) -> None:
        """Take in that only the first *chunks* of a request's load were read exactly."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return  # it was given up while it loaded, and vLLM keeps nothing of such a load
        exact = (tracked.loaded_from + chunks) * self._chunk_tokens
        tracked.exact_tokens = min(tracked.exact_tokens, exact)
        self._lossy.note(tracked.request, exact, tracked.loaded_stop)
        self.counted["lossy_hit_tokens"] += tracked.loaded_stop - exact

    @property
    def has_stores_waiting(self) -> bool:
        """Whether an engine with no request is to step on, for chunks that wait in its pages."""
        return self._is_waiting and not self._desk.is_down

    def refuse(self, reason: str) -> None:
        """Answer every request with a miss from now on, for *reason*."""
        self._refusal = reason

    def counts(self) -> dict[str, int]:
        """Return what was counted since the last call; ``counted`` has all of it."""
        new = self.counted - self._reported
        self._reported = self.counted.copy()
        return dict(new)

    def close(self) -> None:
        """End the desk and the client."""
        self._desk.close()
        self._lookups.client.close()
