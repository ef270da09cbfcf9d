"""Lookups never hold up the engine, whatever the store does, and routers are told what it has."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.local_server import eventually
from helpers.prompts import tokens as prompt_tokens
from helpers.redis_process import free_port
from helpers.vllm_pages import BLOCK_TOKENS, CHUNK_TOKENS, SHAPE, representation
from helpers.vllm_stand_ins import FakeRequest, step
from typing_extensions import override

from kvstore.client import Client, ClientOptions
from kvstore.client.engines.base import Connector
from kvstore.client.engines.vllm import events as vllm_events
from kvstore.client.engines.vllm.events import EventMaker, KVEvents
from kvstore.client.engines.vllm.lookup import (
    MAX_WAITING_LOOKUPS,
    CacheIdentity,
    ChunkChain,
    LookupResult,
    LookupWorker,
    PendingLookup,
)
from kvstore.client.engines.vllm.messages import BOTH, ChunkName, WorkerReport
from kvstore.client.engines.vllm.scheduler import VllmScheduler
from kvstore.proto.errors import ModelError
from kvstore.proto.types import ChainDigest

TOKENS = list(range(200))
RETRY_S = 10.0


class Desk(LookupWorker):
    """Asks a store that says what it is told to, when it is let to."""

    def __init__(self) -> None:
        self.says: int | None = 2
        self.asked = 0
        self.opened = threading.Event()
        self.opened.set()
        self.now_s = 100.0
        options = ClientOptions(chunk_tokens=64, retry_after_ms=round(1000 * RETRY_S))
        connector: Any = SimpleNamespace(
            client=SimpleNamespace(options=options), guard=lambda work, _: work()
        )
        super().__init__(connector, BOTH, clock=lambda: self.now_s)

    @override
    def _find(self, digests: Sequence[ChainDigest]) -> Any:
        self.opened.wait(20)
        self.asked += bool(digests)
        return None if self.says is None else LookupResult(self.says, self.says)


@pytest.fixture
def desk(no_leaks: None) -> Iterator[Desk]:
    made = Desk()
    assert eventually(lambda: not made._waiting)  # it opened a session
    yield made
    made.opened.set()
    made.close()


def answered(lookup: PendingLookup) -> int:
    assert eventually(lambda: lookup.result is not None)
    assert lookup.result is not None
    return lookup.result.ready


def raises(error: Exception) -> Callable[[], CacheIdentity]:
    def identify() -> CacheIdentity:
        raise error

    return identify


@pytest.mark.parametrize(
    ("tokens", "identify", "reason"),
    [
        (TOKENS, raises(ModelError("load_inplace", True, "no")), "load_inplace"),
        (TOKENS, raises(FileNotFoundError("gone")), "lora_path"),
        (TOKENS, raises(UnicodeEncodeError("utf-8", "\ud800", 0, 1, "no text")), "error"),
        ([-1] * 64, CacheIdentity, "error"),
        ([2**32] * 64, CacheIdentity, "error"),
    ],
    ids=["an adapter", "a file that is gone", "a salt", "a negative token", "a long token"],
)
def test_what_has_no_name_is_a_miss_with_a_reason_and_the_next_is_answered(
    desk: Desk, tokens: list[int], identify: Callable[[], CacheIdentity], reason: str
) -> None:
    """One user's request would else end the thread that all others wait for."""
    lookup = desk.submit(tokens, identify)
    assert (answered(lookup), lookup.refusal, lookup.chain) == (0, reason, None)
    assert answered(desk.submit(TOKENS, CacheIdentity)) == 2


def test_a_store_that_failed_is_asked_again_after_a_while_by_nobodys_wait(desk: Desk) -> None:
    desk.says = None
    assert answered(desk.submit(TOKENS, CacheIdentity)) == 0
    assert desk.is_down
    for _ in range(5):
        assert answered(desk.submit(TOKENS, CacheIdentity)) == 0
    assert desk.asked == 1
    desk.now_s += RETRY_S
    desk.says = 3
    desk.opened.clear()
    probing = desk.submit(TOKENS, CacheIdentity)
    assert answered(probing) == 0, "answered although the store has not said anything"
    assert desk.is_down
    desk.opened.set()
    assert eventually(lambda: not desk.is_down)
    assert answered(desk.submit(TOKENS, CacheIdentity)) == 3


def test_waiting_lookups_are_bounded(desk: Desk) -> None:
    desk.opened.clear()
    lookups = [desk.submit(TOKENS[:64], CacheIdentity) for _ in range(MAX_WAITING_LOOKUPS + 5)]
    assert [answered(one) for one in lookups[-5:]] == [0] * 5
    assert lookups[-1].refusal == "queue"
    assert lookups[0].result is None


def test_after_close_a_lookup_is_a_miss_and_so_is_one_that_waited(desk: Desk) -> None:
    desk.opened.clear()
    waiting = [desk.submit(TOKENS, CacheIdentity) for _ in range(2)][-1]
    desk.close()
    assert answered(waiting) == 0
    assert answered(desk.submit(TOKENS, CacheIdentity)) == 0
    desk.opened.set()
    assert eventually(lambda: not desk._waiting)


HUNG = """
import threading
from types import SimpleNamespace
from kvstore.client import ClientOptions
from kvstore.client.engines.vllm.lookup import CacheIdentity, LookupWorker
from kvstore.client.engines.vllm.messages import BOTH
hangs = threading.Event()
client = SimpleNamespace(options=ClientOptions(chunk_tokens=64))
guard = lambda work, _: hangs.set() or threading.Event().wait()
desk = LookupWorker(SimpleNamespace(client=client, guard=guard), BOTH)
desk.submit(list(range(64)), CacheIdentity)
hangs.wait()
"""


def test_a_process_that_ends_without_close_does_not_wait_for_the_store() -> None:
    subprocess.run([sys.executable, "-c", HUNG], check=True, timeout=60)


# --- what routers are told of the store's chunks


PROMPT = prompt_tokens(1, 3 * CHUNK_TOKENS)
BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS


def events(ranks: int = 1, groups: Any = ((0, "full_attention"),)) -> KVEvents:
    """vLLM's classes are stood in for by namespaces; the hash of block 3 is "h3"."""

    def hashes(request: Any) -> list[str]:
        return [f"h{number}" for number in range(request.num_tokens // BLOCK_TOKENS)]

    def extra_keys(request: Any, start: int, stop: int) -> Any:
        return (request.cache_salt,) if request.cache_salt and not start else None

    stored, removed = (partial(SimpleNamespace, kind=kind) for kind in ("stored", "removed"))
    make = EventMaker(stored, removed, hashes, extra_keys, BLOCK_TOKENS, groups)
    return KVEvents(make, CHUNK_TOKENS, ranks)


def chunks(count: int = 3) -> list[ChunkName]:
    chain = ChunkChain(CacheIdentity(), CHUNK_TOKENS)
    chain.extend(PROMPT, count)
    return chain.chunks


def by_one_rank(named: Sequence[ChunkName]) -> Counter[ChainDigest]:
    return Counter(chunk.digest for chunk in named)


def store(told: KVEvents, count: int = 3, tokens: int = len(PROMPT), **fields: Any) -> None:
    """Have PROMPT's chunks ordered, and the first *count* of them stored by a rank."""
    told.ordered(FakeRequest("a", PROMPT[:tokens], **fields), chunks())
    told.stored(by_one_rank(chunks(count)))


def said(told: KVEvents) -> list[tuple[str, str, int]]:
    """Return what is told since the last call: of which first block, and of which group."""
    return [(one.kind, one.block_hashes[0], one.group_idx) for one in told.take()]


FIRST, SECOND, THIRD = ("h0", f"h{BLOCKS}", f"h{2 * BLOCKS}")


def test_a_chunk_is_told_of_once_it_is_stored_with_the_hashes_of_its_blocks() -> None:
    told = events()
    store(told, 0, cache_salt="alice")
    assert told.take() == []
    told.stored(by_one_rank(chunks(2)))
    first, second = told.take()
    assert first.block_hashes == [f"h{n}" for n in range(BLOCKS)]
    assert first.parent_block_hash is None
    assert first.token_ids == PROMPT[:CHUNK_TOKENS]
    assert first.extra_keys == [("alice",), *[None] * (BLOCKS - 1)]
    assert second.block_hashes == [f"h{n}" for n in range(BLOCKS, 2 * BLOCKS)]
    assert second.parent_block_hash == f"h{BLOCKS - 1}"
    assert second.token_ids == PROMPT[CHUNK_TOKENS : 2 * CHUNK_TOKENS]
    assert second.extra_keys is None
    assert (first.block_size, first.group_idx) == (BLOCK_TOKENS, 0)
    assert first.kv_cache_spec_kind == "full_attention"
    assert (first.medium, first.locality, first.ownership) == ("STORAGE", "REMOTE", "kvstore")
    assert told.take() == []


def test_an_adapter_is_named_as_vllm_names_it() -> None:
    told = events()
    store(told, 1, lora_request=SimpleNamespace(lora_int_id=7, lora_name="one"))
    (event,) = told.take()
    assert (event.lora_id, event.lora_name) == (7, "one")


def test_of_several_ranks_the_last_one_counts_whenever_it_comes() -> None:
    told = events(ranks=2)
    store(told)
    assert told.take() == []
    one, two = (WorkerReport(stored=by_one_rank(chunks(count))) for count in (1, 2))
    told.stored(one.joined(WorkerReport()).stored)
    assert said(told) == [("stored", FIRST, 0)]
    assert list(two.joined(one).stored.values()) == [2, 1]


def test_a_chunk_that_was_lost_is_told_of_as_removed_once() -> None:
    told = events(groups=((0, "full_attention"), (2, None)))
    store(told, 2)
    assert said(told) == [("stored", first, group) for first in (FIRST, SECOND) for group in (0, 2)]
    for _ in range(2):
        told.lost([chunk.digest for chunk in chunks()[1:]])
    removed = told.take()
    assert [(one.kind, one.group_idx) for one in removed] == [("removed", 0), ("removed", 2)]
    assert removed[0].block_hashes == [f"h{n}" for n in range(BLOCKS, 2 * BLOCKS)]
    store(told)
    assert said(told) == [("stored", first, group) for first in (SECOND, THIRD) for group in (0, 2)]


def test_tokens_that_vllm_has_not_hashed_are_not_told_of() -> None:
    told = events()
    store(told, tokens=CHUNK_TOKENS + BLOCK_TOKENS)
    assert said(told) == [("stored", FIRST, 0)]


def test_after_a_reset_all_is_removed_and_nothing_under_way_is_told_of() -> None:
    told = events()
    store(told, 1)
    told.take()
    told.reset()
    assert said(told) == [("removed", FIRST, 0)]
    told.stored(by_one_rank(chunks()))
    assert told.take() == []


def test_every_table_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_events, "MAX_PENDING_CHUNKS", 2)
    monkeypatch.setattr(vllm_events, "MAX_PUBLISHED_CHUNKS", 1)
    told = events()
    store(told)
    assert said(told) == [("stored", SECOND, 0), ("stored", THIRD, 0), ("removed", SECOND, 0)]
    monkeypatch.setattr(vllm_events, "MAX_EVENTS", 0)
    store(told)
    assert told.take() == []


# --- the scheduler


@pytest.fixture
def scheduler(no_leaks: None) -> Iterator[VllmScheduler]:
    options = ClientOptions(chunk_tokens=CHUNK_TOKENS, deadline_ms=2000, retry_after_ms=1)
    client = Client(f"127.0.0.1:{free_port()}", representation(), options)
    made = VllmScheduler(Connector(client), SHAPE)
    assert eventually(lambda: made._desk.is_down)
    made.events = events()
    yield made
    made.close()


def is_answered(scheduler: VllmScheduler, request: FakeRequest) -> bool:
    return scheduler.matched_tokens(request, 0) is not None


def finds(scheduler: VllmScheduler, chunks_ready: int) -> None:
    """Have the store answer, and with that many chunks."""
    found = LookupResult(chunks_ready, chunks_ready)
    scheduler._desk._find = lambda _: found  # type: ignore[method-assign, assignment]

    def is_up() -> bool:
        scheduler.matched_tokens(FakeRequest("up", PROMPT), 0)
        scheduler.finished(FakeRequest("up", PROMPT))
        return not scheduler._desk.is_down

    assert eventually(is_up)


def test_the_scheduler_tells_what_was_stored_and_what_a_lookup_missed(
    scheduler: VllmScheduler,
) -> None:
    finds(scheduler, 0)
    request = FakeRequest("a", PROMPT)
    assert eventually(lambda: is_answered(scheduler, request))
    tables = [list(range(len(PROMPT) // BLOCK_TOKENS))]
    (spec,) = scheduler.build_plan(step(a=len(PROMPT)), lambda _: tables).stores
    scheduler.on_report(WorkerReport(stored=by_one_rank(spec.chunks)))
    assert scheduler.events is not None
    assert said(scheduler.events) == [("stored", first, 0) for first in (FIRST, SECOND, THIRD)]
    scheduler.finished(request)
    finds(scheduler, 1)
    again = FakeRequest("b", PROMPT)
    assert eventually(lambda: is_answered(scheduler, again))
    assert said(scheduler.events) == [("removed", SECOND, 0), ("removed", THIRD, 0)]


def test_a_load_that_came_short_is_told_of(scheduler: VllmScheduler) -> None:
    finds(scheduler, 3)
    request = FakeRequest("a", PROMPT)
    assert scheduler.events is not None
    store(scheduler.events)
    scheduler.events.take()
    assert eventually(lambda: scheduler.matched_tokens(request, 0) == len(PROMPT))
    scheduler.on_alloc(request, len(PROMPT), [list(range(len(PROMPT) // BLOCK_TOKENS))])
    scheduler.on_report(WorkerReport({"a": 2}))
    assert said(scheduler.events) == [("removed", THIRD, 0)]
