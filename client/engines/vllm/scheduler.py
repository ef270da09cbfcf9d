"""The scheduler side of the vLLM connector: plans loads and stores without delaying requests.

A thread looks up a prompt from the moment its request arrives; vLLM retries until there is a
result. Reads vLLM's Request and SchedulerOutput by their fields, without importing vLLM.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvstore.client.engines.base import Connector
from kvstore.client.engines.identity import EPOCH_BYTES
from kvstore.client.engines.vllm import messages
from kvstore.client.engines.vllm.events import KVEvents
from kvstore.client.engines.vllm.identity import KVCacheShape
from kvstore.client.engines.vllm.lookup import (
    MAX_LOOKUP_CHUNKS,
    NOTHING,
    LookupWorker,
    LossyBlocks,
    PendingLookup,
    RequestHasher,
)
from kvstore.client.planning import LEAST_TOKENS, Deadline
from kvstore.proto.errors import KVStoreError
from kvstore.proto.plans import Hints
from kvstore.proto.types import ChainDigest

TOGETHER_S = 0.01
"""How long an idle engine waits for lookups before a step: if requests that arrive together are
computed in two steps, the first ones take a whole step longer."""
LATE_S = 0.005
"""How long past its deadline a lookup may take before it is a miss."""
RECENT_S = 10.0
"""Of requests that share a prefix within this time, one stores it."""
MAX_RECENT_CHUNKS = 16384
"""Limit of chunks tracked for that."""


@dataclass(slots=True)
class RequestTracker:
    """A request: its lookup, its load, and its stored prefix."""

    request: Any
    lookup: PendingLookup
    preemptions: int
    hints: Hints
    deadline: Deadline | None
    computed_tokens: int = 0
    """Tokens in the engine's own cache at the last ``matched_tokens``."""
    is_counted: bool = False
    is_loaded: bool = False
    is_checked: bool = False
    """Whether its tokens in the engine's own cache were checked for lossy blocks."""
    load: messages.LoadSpec | None = None  # to be sent with the next plan
    first_chunk: int = 0
    stop_token: int = 0
    """Of its last load."""
    stored: int | None = None  # chunks stored or being stored
    exact_tokens: int = sys.maxsize
    """Its leading tokens that are exact, as far as is known."""


class VllmScheduler:
    """Plans one engine's loads and stores. For the scheduler's thread."""

    def __init__(
        self,
        lookups: Connector,
        shape: KVCacheShape,
        *,
        role: messages.Role = messages.BOTH,
        refusal: str = "",
        has_hashes: bool = True,
    ) -> None:
        """*lookups* is for the whole model: a chunk is a hit once every rank has put its part. With
        a *refusal* every request is a miss counted under it, and nothing is looked up.
        *has_hashes*: see RequestHasher."""
        options = lookups.client.options
        self._lookups = lookups
        self.chunk_tokens = options.chunk_tokens
        self._shape = shape
        role = messages.Role(loads=False, stores=False) if refusal else role
        self._role = role
        self._clock = time.monotonic
        self._late_s = (options.deadline_ms + role.wait_ms) / 1000 + LATE_S
        self._hasher = RequestHasher(sglang_names=options.sglang_names, has_hashes=has_hashes)
        self._epoch = b""
        self._tracked: dict[str, RequestTracker] = {}
        self._computing: set[str] = set()  # requests of the last step that are not finished
        self._wait_left_s = TOGETHER_S  # for lookups before the next step, while none runs
        self._lossy = LossyBlocks(shape.block_tokens)
        self._recent: OrderedDict[ChainDigest, float] = OrderedDict()
        self.counted: Counter[str] = Counter()
        lookups.client.counts = lambda: {**lookups.counts(), **self.counted}
        self._refusal = refusal
        self._is_waiting = False
        self._steps: deque[tuple[int, float]] = deque(maxlen=1 + role.steps_ahead)
        """Prompt tokens of each of the last steps, and when it was scheduled."""
        self.events: KVEvents | None = None
        """None if KV events are off."""
        self._desk = LookupWorker(lookups, role, has_ends=shape.has_ends)

    # --- requests

    def on_new_request(self, request: Any) -> None:
        """Start to look up *request*."""
        if not self._refusal:
            self._track(request)
            return
        self.counted.update(["lookups", f"miss_{self._refusal}"])
        self.counted["prompt_tokens"] += request.num_tokens

    def _track(self, request: Any) -> RequestTracker:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            of = (request, self._look_up(request), request.num_preemptions)
            tracked = RequestTracker(*of, *self._stated_of(request))
            self._tracked[request.request_id] = tracked
        elif tracked.preemptions != request.num_preemptions:
            # Its blocks are gone; chunks stored since then may be loaded.
            tracked.lookup, tracked.preemptions = self._look_up(request), request.num_preemptions
            tracked.is_loaded = tracked.is_checked = False
        return tracked

    def _stated_of(self, request: Any) -> tuple[Hints, Deadline | None]:
        """Return a request's hints and deadline; invalid ones are counted and ignored."""
        handover_ms, within_ms = self._role.handover_ms, self._role.first_token_ms
        try:
            hints, within_ms = messages.stated_of(request, within_ms)
        except (*messages.INCOMPATIBLE, KVStoreError):
            self.counted["bad_hints"] += 1
            hints = Hints()
        hints = hints if hints.handover_ms else replace(hints, handover_ms=handover_ms)
        return hints, Deadline(within_ms / 1000) if within_ms else None

    def _look_up(self, request: Any) -> PendingLookup:
        identify = partial(self._hasher.identity, request, self._epoch)
        # A copy: the request's own list grows, and another thread reads this one.
        return self._desk.submit(list(request.all_token_ids), identify)

    def matched_tokens(self, request: Any, computed_tokens: int) -> int | None:
        """Return how many tokens past *computed_tokens* can be loaded, perhaps all of the prompt;
        None: not known yet."""
        if self._refusal:
            return 0
        tracked = self._track(request)
        tracked.computed_tokens = computed_tokens
        whole_tokens = request.num_tokens // self.chunk_tokens * self.chunk_tokens
        is_unwanted = getattr(request, "skip_reading_prefix_cache", False) or not self._role.loads
        if tracked.is_loaded or is_unwanted or whole_tokens <= computed_tokens:
            return 0
        lookup = tracked.lookup
        if lookup.result is None:
            self._await(lookup)
        result = lookup.result
        if result is None:
            # No request waits for a retry of the store.
            if not self._desk.is_down and self._clock() - lookup.began_s < self._late_s:
                return None
            return self._counted(tracked, 0, "down" if self._desk.is_down else "late")
        stop = result.ready * self.chunk_tokens
        if self._shape.has_ends and stop >= request.num_tokens:
            # vLLM recomputes the last token, but has freed the block only its window covers.
            stop = request.num_tokens - 1
        hit_tokens = max(0, stop - computed_tokens)
        absent = "slow" if result.ready < result.found else "absent"
        reason = lookup.refusal or ("down" if self._desk.is_down else absent)
        if hit_tokens and not self._shape.continues and request.num_tokens - stop > 1:
            hit_tokens, reason = 0, "prefill"
        return self._counted(tracked, hit_tokens, reason)

    def _await(self, lookup: PendingLookup) -> None:
        """Wait for a lookup if the engine is idle, briefly for all lookups of a step."""
        if self._computing or self._wait_left_s <= 0.0 or self._desk.is_down:
            return
        began = self._clock()
        self._desk.wait(lookup, min(self._wait_left_s, lookup.began_s + self._late_s - began))
        is_over = lookup.result is not None
        self._wait_left_s -= self._clock() - began if is_over else self._wait_left_s

    def _counted(self, tracked: RequestTracker, hit_tokens: int, reason: str) -> int:
        """Count a request's result once: vLLM calls again if it has no free blocks."""
        if not tracked.is_counted:
            tracked.is_counted = True
            lookup = tracked.lookup
            is_known = lookup.result is not None and not lookup.refusal and not self._desk.is_down
            if self.events is not None and is_known:
                self.events.lost(lookup.digests[lookup.found : MAX_LOOKUP_CHUNKS])
            self.counted["lookups"] += 1
            self.counted["hit_tokens"] += hit_tokens
            self.counted["prompt_tokens"] += tracked.request.num_tokens
            if not hit_tokens:
                self.counted[f"miss_{reason}"] += 1
        return hit_tokens

    def on_alloc(self, request: Any, loaded_tokens: int, tables: messages.BlockTables) -> None:
        """Plan a load of the next *loaded_tokens* of *request* into the blocks in its *tables*."""
        tracked = self._track(request)
        start, size, block = tracked.computed_tokens, self.chunk_tokens, self._shape.block_tokens
        stop, first = start + loaded_tokens, start // size
        tracked.is_loaded, tracked.first_chunk, tracked.stop_token = True, first, stop
        blocks = slice(first * size // block, -(-stop // block))
        terms = None
        if tracked.deadline is not None and not self._shape.all_or_nothing:
            terms = self._lookups.terms(tracked.deadline, request.num_tokens - stop)
        tracked.load = messages.LoadSpec(
            request.request_id,
            tuple(tracked.lookup.digests[first : -(-stop // size)]),
            tuple(tuple(table[blocks]) for table in tables),
            kept_blocks=(start - first * size) // block,
            all_or_nothing=self._shape.all_or_nothing,
            terms=terms,
        )

    def finished(self, request: Any) -> None:
        """Drop *request*, and withdraw announcements of chunks it will not store."""
        self._computing.discard(request.request_id)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None:
            self._withdraw(tracked)

    def _withdraw(self, tracked: RequestTracker) -> None:
        """Withdraw a request's announcements, except chunks that others have announced, too."""
        tracked.lookup.is_over = True
        left = tracked.lookup.digests[tracked.stored or 0 : MAX_LOOKUP_CHUNKS]
        if left and self._role.handover_ms:
            lookups = [one.lookup for one in self._tracked.values() if not one.lookup.is_over]
            others = {digest for one in lookups for digest in one.digests}
            self._desk.withdraw([digest for digest in left if digest not in others])

    def reset(self) -> None:
        """Stop loading earlier chunks: the engine's weights may have changed."""
        self._epoch = os.urandom(EPOCH_BYTES)
        for tracked in self._tracked.values():
            self._withdraw(tracked)
            # Requests in progress are of both weights: their KV has no name.
            tracked.lookup = PendingLookup(0.0, NOTHING)
        if self.events is not None:
            self.events.reset()

    # --- a step

    def build_plan(
        self, output: Any, tables_of: Callable[[str], messages.BlockTables]
    ) -> messages.StepPlan:
        """Return the workers' plan for the step of vLLM's SchedulerOutput *output*.

        *tables_of* returns a request's block tables. *output* is ignored if the engine was refused
        at startup; if its pages are refused later, its loads are still planned, and fail.
        """
        if self._refusal and not self._tracked:
            return messages.StepPlan()
        for request_id in getattr(output, "preempted_req_ids", None) or ():
            if request_id in self._tracked:  # announced again once it resumes
                self._withdraw(self._tracked[request_id])
        self._learn_speed(output.num_scheduled_tokens)
        self._computing, self._wait_left_s = set(output.num_scheduled_tokens), TOGETHER_S
        loads = [one.load for one in self._tracked.values() if one.load is not None]
        for one in self._tracked.values():
            one.load = None
        stores = [
            spec
            for request_id, tokens in output.num_scheduled_tokens.items()
            if (spec := self._save_spec(request_id, tokens, tables_of)) is not None
        ]
        size, is_idle = self._shape.block_tokens, not output.total_num_scheduled_tokens
        taken = messages.taken_blocks(output, loads, size) if self._role.stores else frozenset()
        return messages.StepPlan(tuple(loads), tuple(stores), is_idle, taken)

    def _learn_speed(self, tokens: Mapping[str, int]) -> None:
        """Measure prefill speed by the last completed step, if most of its tokens were prompts."""
        now_s, steps = self._clock(), self._steps
        if len(steps) == steps.maxlen and steps[0][0]:
            # A step that was scheduled ahead ran once the next one had been scheduled.
            self._lookups.learned.observe(steps[0][0], now_s - steps[-1][1])
        prompts = sum(count for count in tokens.values() if count >= LEAST_TOKENS)
        steps.append((prompts if 2 * prompts > sum(tokens.values()) else 0, now_s))

    def _save_spec(
        self, request_id: str, tokens: int, tables_of: Callable[[str], messages.BlockTables]
    ) -> messages.SaveSpec | None:
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return None
        request, size, block = tracked.request, self.chunk_tokens, self._shape.block_tokens
        if not tracked.is_checked:
            self._check_lossy(tracked)
        # Excludes speculative tokens, which are not the request's own.
        whole = min(request.num_computed_tokens + tokens, request.num_tokens) // size
        if tracked.stored is not None and whole <= tracked.stored:
            return None  # most steps complete no chunk
        chain = tracked.lookup.chain
        if not self._role.stores or self._refusal or self._desk.is_down or chain is None:
            return None
        if tracked.stored is None:
            # Chunks that the lookup did not find are stored, even if this engine had them cached.
            tracked.stored = tracked.lookup.found
        first, tracked.stored = tracked.stored, max(tracked.stored, whole)
        chain.extend(request.all_token_ids, whole)
        whole = self._exact_of(tracked, first, whole)
        old_s = self._clock() - RECENT_S
        while first < whole and self._recent.get(chain.chunks[first].digest, old_s) > old_s:
            first += 1
        if first >= whole:
            return None
        chunks = tuple(chain.chunks[first:whole])
        self._remember(chunk.digest for chunk in chunks)
        if self.events is not None:
            self.events.ordered(request, chunks)
        blocks = slice(first * size // block, whole * size // block)
        tables = tuple(tuple(table[blocks]) for table in tables_of(request_id))
        return messages.SaveSpec(chunks, tables, tracked.hints)

    def _check_lossy(self, tracked: RequestTracker) -> None:
        """Record the exact tokens that the request found in the engine's own cache."""
        tracked.is_checked = True
        request = tracked.request
        held = tracked.computed_tokens if tracked.is_loaded else request.num_computed_tokens
        exact = self._lossy.exact_tokens(request, held)
        if exact < held:
            tracked.exact_tokens = min(tracked.exact_tokens, exact)

    def _exact_of(self, tracked: RequestTracker, first: int, whole: int) -> int:
        """Return the end of the chunks before the first lossy block."""
        stop = max(first, min(whole, tracked.exact_tokens // self.chunk_tokens))
        if stop < whole:
            self.counted["lossy_unstored_chunks"] += whole - stop
            self._desk.withdraw(tracked.lookup.digests[stop:whole])
        return stop

    def _remember(self, digests: Iterable[ChainDigest]) -> None:
        for digest in digests:
            self._recent[digest] = self._clock()
            self._recent.move_to_end(digest)
        while len(self._recent) > MAX_RECENT_CHUNKS:
            self._recent.popitem(last=False)

    def _forget(self, digests: Iterable[ChainDigest]) -> None:
        """Let the next request that computes these missing chunks store them."""
        for digest in digests:
            self._recent.pop(digest, None)

    # --- reports

    def on_report(self, report: messages.WorkerReport) -> None:
        """Process the workers' report."""
        self._refusal = self._refusal or ("pages" if report.refusal else "")
        self._is_waiting = report.is_waiting
        if report.is_down:
            self._desk.record_failure()
        self._desk.withdraw([*report.unstored])
        self._forget(report.unstored)
        if self.events is not None:
            self.events.stored(report.stored)
        for request_id, chunks in report.lossy_loads.items():
            if (tracked := self._tracked.get(request_id)) is not None:  # else vLLM keeps none of it
                exact = (tracked.first_chunk + chunks) * self.chunk_tokens
                tracked.exact_tokens = min(tracked.exact_tokens, exact)
                self._lossy.note(tracked.request, exact, tracked.stop_token)
                self.counted["lossy_hit_tokens"] += tracked.stop_token - exact
        for request_id, chunks in report.short_loads.items():
            tracked = self._tracked.get(request_id)
            # With a deadline the chunk was slow, not lost, unless a gate is shut.
            if tracked and (tracked.deadline is None or request_id in report.gated_loads):
                # Chunks that could not be read are recomputed and stored again. One rank may report
                # a step after another that read fewer.
                read = tracked.first_chunk + chunks
                tracked.stored = read if tracked.stored is None else min(tracked.stored, read)
                lost = tracked.lookup.digests[tracked.stored :]
                self._forget(lost)
                if self.events is not None:
                    self.events.lost(lost)

    @property
    def has_stores_waiting(self) -> bool:
        """Whether to run idle steps, for chunks that wait in the engine's pages."""
        return self._is_waiting and not self._desk.is_down

    def close(self) -> None:
        """Stop the lookups and close the client."""
        self._desk.close()
        self._lookups.close()
