"""Lookups never hold up the engine, whatever the store does, and routers are told what it has."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.local_server import eventually
from helpers.prompts import tokens as prompt_tokens
from helpers.redis_process import free_port
from helpers.vllm_pages import BLOCK_TOKENS, CHUNK_TOKENS, SHAPE, representation
from helpers.vllm_stand_ins import FakeLora, FakeRequest, step

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


class Store:
    """What a desk asks: says what it is told to, when it is let to."""

    def __init__(self) -> None:
        self.says: int | None = 2
        self.asked = 0
        self.opened = threading.Event()
        self.opened.set()
        self.now_s = 100.0

    def find(self, digests: Sequence[ChainDigest]) -> LookupResult | None:
        self.opened.wait(20)
        self.asked += bool(digests)
        return None if self.says is None else LookupResult(self.says, self.says)


class Desk(LookupWorker):
    """One that asks a Store."""

    def __init__(self, store: Store) -> None:
        options = ClientOptions(chunk_tokens=64, retry_after_ms=round(1000 * RETRY_S))
        self._find = store.find  # type: ignore[assignment, method-assign]
        connector: Any = SimpleNamespace(
            client=SimpleNamespace(options=options), ask=lambda work, _: work()
        )
        super().__init__(connector, BOTH, clock=lambda: store.now_s)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def desk(store: Store, no_leaks: None) -> Iterator[LookupWorker]:
    made = Desk(store)
    assert eventually(lambda: not made._waiting)  # it opened a session
    yield made
    store.opened.set()
    made.close()


def answered(lookup: PendingLookup) -> int:
    assert eventually(lambda: lookup.result is not None)
    assert lookup.result is not None
    return lookup.result.ready


def raises(error: Exception) -> Callable[[], CacheIdentity]:
    def identify() -> CacheIdentity:
        raise error

    return identify


def test_what_has_no_name_is_a_miss_with_a_reason(desk: LookupWorker, store: Store) -> None:
    lookup = desk.submit(TOKENS, raises(ModelError("load_inplace", True, "no")))
    assert (answered(lookup), lookup.refusal, lookup.chain) == (0, "load_inplace", None)
    lookup = desk.submit(TOKENS, raises(FileNotFoundError("gone")))
    assert (answered(lookup), lookup.refusal) == (0, "lora_path")
    assert answered(desk.submit(TOKENS, CacheIdentity)) == 2


def test_a_prompt_that_cannot_be_named_is_a_miss_and_the_next_is_answered(
    desk: LookupWorker,
) -> None:
    """One user's request would else end the thread that all others wait for."""
    no_text = raises(UnicodeEncodeError("utf-8", "\ud800", 0, 1, "a salt that is no text"))
    negative, long = [-1] * 64, [2**32] * 64
    for tokens, identify in ((TOKENS, no_text), (negative, CacheIdentity), (long, CacheIdentity)):
        lookup = desk.submit(tokens, identify)
        assert (answered(lookup), lookup.refusal, lookup.chain) == (0, "error", None)
    assert answered(desk.submit(TOKENS, CacheIdentity)) == 2


def test_a_store_that_failed_is_asked_again_after_a_while_by_nobodys_wait(
    desk: LookupWorker, store: Store
) -> None:
    store.says = None
    assert answered(desk.submit(TOKENS, CacheIdentity)) == 0
    assert desk.is_down
    for _ in range(5):
        assert answered(desk.submit(TOKENS, CacheIdentity)) == 0
    assert store.asked == 1
    store.now_s += RETRY_S
    store.says = 3
    store.opened.clear()
    probing = desk.submit(TOKENS, CacheIdentity)
    assert answered(probing) == 0, "answered although the store has not said anything"
    assert desk.is_down
    store.opened.set()
    assert eventually(lambda: not desk.is_down)
    assert answered(desk.submit(TOKENS, CacheIdentity)) == 3


def test_waiting_lookups_are_bounded(desk: LookupWorker, store: Store) -> None:
    store.opened.clear()
    lookups = [desk.submit(TOKENS[:64], CacheIdentity) for _ in range(MAX_WAITING_LOOKUPS + 5)]
    assert [answered(one) for one in lookups[-5:]] == [0] * 5
    assert lookups[-1].refusal == "queue"
    assert lookups[0].result is None


def test_after_close_a_lookup_is_a_miss_and_so_is_one_that_waited(
    desk: LookupWorker, store: Store
) -> None:
    store.opened.clear()
    waiting = [desk.submit(TOKENS, CacheIdentity) for _ in range(2)][-1]
    desk.close()
    assert answered(waiting) == 0
    assert answered(desk.submit(TOKENS, CacheIdentity)) == 0
    store.opened.set()
    assert eventually(lambda: not desk._waiting)


HUNG = """
import threading
from types import SimpleNamespace
from kvstore.client import ClientOptions
from kvstore.client.engines.vllm.lookup import CacheIdentity, LookupWorker
from kvstore.client.engines.vllm.messages import BOTH
hangs = threading.Event()
client = SimpleNamespace(options=ClientOptions(chunk_tokens=64))
ask = lambda work, _: hangs.set() or threading.Event().wait()
desk = LookupWorker(SimpleNamespace(client=client, ask=ask), BOTH)
desk.submit(list(range(64)), CacheIdentity)
hangs.wait()
"""


def test_a_process_that_ends_without_close_does_not_wait_for_the_store() -> None:
    subprocess.run([sys.executable, "-c", HUNG], check=True, timeout=60)


# --- what routers are told of the store's chunks


PROMPT = prompt_tokens(1, 3 * CHUNK_TOKENS)
BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS


def maker(groups: tuple[tuple[int, str | None], ...] = ((0, "full_attention"),)) -> EventMaker:
    """vLLM's classes are stood in for by namespaces; the hash of block 3 is "h3"."""

    def hashes(request: Any) -> list[str]:
        return [f"h{number}" for number in range(request.num_tokens // BLOCK_TOKENS)]

    def extra_keys(request: Any, start: int, stop: int) -> Any:
        return (request.cache_salt,) if request.cache_salt and not start else None

    def stored(**fields: Any) -> Any:
        return SimpleNamespace(kind="stored", **fields)

    def removed(**fields: Any) -> Any:
        return SimpleNamespace(kind="removed", **fields)

    return EventMaker(stored, removed, hashes, extra_keys, BLOCK_TOKENS, groups)


def events(ranks: int = 1, **how: Any) -> KVEvents:
    return KVEvents(maker(**how), CHUNK_TOKENS, ranks)


def chunks(count: int = 3) -> list[ChunkName]:
    chain = ChunkChain(CacheIdentity(), CHUNK_TOKENS)
    chain.extend(PROMPT, count)
    return chain.chunks


def by_one_rank(named: Sequence[ChunkName]) -> Counter[ChainDigest]:
    return Counter(chunk.digest for chunk in named)


def test_a_chunk_is_told_of_once_it_is_stored_with_the_hashes_of_its_blocks() -> None:
    told = events()
    request = FakeRequest("a", PROMPT, cache_salt="alice")
    told.ordered(request, chunks())
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
    lora = FakeLora("adapters/one", 7)
    lora.lora_name = "one"  # type: ignore[attr-defined]
    told.ordered(FakeRequest("a", PROMPT, lora_request=lora), chunks(1))
    told.stored(by_one_rank(chunks(1)))
    (event,) = told.take()
    assert (event.lora_id, event.lora_name) == (7, "one")


def test_of_several_ranks_the_last_one_counts_whenever_it_comes() -> None:
    told = events(ranks=2)
    told.ordered(FakeRequest("a", PROMPT), chunks())
    told.stored(by_one_rank(chunks()))
    assert told.take() == []
    both = WorkerReport(stored=by_one_rank(chunks(1))).joined(WorkerReport())
    told.stored(both.stored)
    assert [event.block_hashes[0] for event in told.take()] == ["h0"]
    at_once = WorkerReport(stored=by_one_rank(chunks(2)))
    joined = at_once.joined(WorkerReport(stored=by_one_rank(chunks(1))))
    assert list(joined.stored.values()) == [2, 1]


def test_a_chunk_that_was_lost_is_told_of_as_removed_once() -> None:
    told = events(groups=((0, "full_attention"), (2, None)))
    told.ordered(FakeRequest("a", PROMPT), chunks())
    told.stored(by_one_rank(chunks(2)))
    assert [event.group_idx for event in told.take()] == [0, 2, 0, 2]
    for _ in range(2):
        told.lost([chunk.digest for chunk in chunks()[1:]])
    removed = told.take()
    assert [(event.kind, event.group_idx) for event in removed] == [("removed", 0), ("removed", 2)]
    assert removed[0].block_hashes == [f"h{n}" for n in range(BLOCKS, 2 * BLOCKS)]
    told.ordered(FakeRequest("a", PROMPT), chunks())
    told.stored(by_one_rank(chunks()))
    assert [event.block_hashes[0] for event in told.take()] == [
        f"h{BLOCKS}", f"h{BLOCKS}", f"h{2 * BLOCKS}", f"h{2 * BLOCKS}",
    ]  # fmt: skip


def test_tokens_that_vllm_has_not_hashed_are_not_told_of() -> None:
    told = events()
    told.ordered(FakeRequest("a", PROMPT[: CHUNK_TOKENS + BLOCK_TOKENS]), chunks())
    told.stored(by_one_rank(chunks()))
    assert len(told.take()) == 1


def test_after_a_reset_all_is_removed_and_nothing_under_way_is_told_of() -> None:
    told = events()
    told.ordered(FakeRequest("a", PROMPT), chunks())
    told.stored(by_one_rank(chunks(1)))
    told.take()
    told.reset()
    assert [event.kind for event in told.take()] == ["removed"]
    told.stored(by_one_rank(chunks()))
    assert told.take() == []


def test_every_table_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_events, "MAX_PENDING_CHUNKS", 2)
    monkeypatch.setattr(vllm_events, "MAX_PUBLISHED_CHUNKS", 1)
    told = events()
    told.ordered(FakeRequest("a", PROMPT), chunks())
    told.stored(by_one_rank(chunks()))
    found = [(event.kind, event.block_hashes[0]) for event in told.take()]
    first, second = f"h{BLOCKS}", f"h{2 * BLOCKS}"
    assert found == [("stored", first), ("stored", second), ("removed", first)]
    monkeypatch.setattr(vllm_events, "MAX_EVENTS", 0)
    told.ordered(FakeRequest("a", PROMPT), chunks())
    told.stored(by_one_rank(chunks()))
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
    assert [event.kind for event in scheduler.events.take()] == ["stored"] * 3
    scheduler.finished(request)
    finds(scheduler, 1)
    again = FakeRequest("b", PROMPT)
    assert eventually(lambda: is_answered(scheduler, again))
    told = scheduler.events.take()
    assert [(event.kind, event.block_hashes[0]) for event in told] == [
        ("removed", f"h{BLOCKS}"), ("removed", f"h{2 * BLOCKS}"),
    ]  # fmt: skip


def test_a_load_that_came_short_is_told_of(scheduler: VllmScheduler) -> None:
    finds(scheduler, 3)
    request = FakeRequest("a", PROMPT)
    assert scheduler.events is not None
    scheduler.events.ordered(request, chunks())
    scheduler.events.stored(by_one_rank(chunks()))
    scheduler.events.take()
    assert eventually(lambda: scheduler.matched_tokens(request, 0) == len(PROMPT))
    scheduler.on_alloc(request, len(PROMPT), [list(range(len(PROMPT) // BLOCK_TOKENS))])
    scheduler.on_report(WorkerReport({"a": 2}))
    assert [event.block_hashes[0] for event in scheduler.events.take()] == [f"h{2 * BLOCKS}"]
