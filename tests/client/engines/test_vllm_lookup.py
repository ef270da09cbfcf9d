"""Lookups never hold up the engine, whatever the store does."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from helpers.local_server import eventually

from kvstore.client.engines.vllm.lookup import (
    MAX_WAITING_LOOKUPS,
    CacheIdentity,
    LookupResult,
    LookupWorker,
    PendingLookup,
)
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


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def desk(store: Store, no_leaks: None) -> Iterator[LookupWorker]:
    made = LookupWorker(store.find, 64, RETRY_S, lambda: store.now_s)
    assert eventually(lambda: not made._waiting)  # it opened a session
    yield made
    store.opened.set()
    made.close()


def answered(lookup: PendingLookup) -> int:
    assert eventually(lambda: lookup.result is not None)
    assert lookup.result is not None
    return lookup.result.ready


def test_a_lookup_is_answered_later_and_named_by_then(desk: LookupWorker, store: Store) -> None:
    store.opened.clear()
    lookup = desk.submit(TOKENS, CacheIdentity)
    assert lookup.result is None
    store.opened.set()
    assert answered(lookup) == 2
    assert lookup.chain is not None
    assert len(lookup.chain.digests) == 3


def test_a_prompt_below_one_chunk_is_not_asked_about(desk: LookupWorker, store: Store) -> None:
    assert answered(desk.submit(TOKENS[:63], CacheIdentity)) == 0
    assert store.asked == 0


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


@pytest.mark.parametrize(
    ("tokens", "identify"),
    [
        (TOKENS, lambda: CacheIdentity((b"salt:" + "\ud800".encode(),))),
        ([-1] * 64, CacheIdentity),
        ([2**32] * 64, CacheIdentity),
    ],
    ids=["salt that is no text", "negative token", "token of 33 bits"],
)
def test_a_prompt_that_cannot_be_named_is_a_miss_and_the_next_is_answered(
    desk: LookupWorker, tokens: list[int], identify: Callable[[], CacheIdentity]
) -> None:
    """One user's request would else end the thread that all others wait for."""
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


def test_who_has_nothing_to_do_waits_for_an_answer_only_if_one_is_due(desk: LookupWorker) -> None:
    desk.wait(60.0)
    lookup = desk.submit(TOKENS, CacheIdentity)
    assert answered(lookup) == 2
    desk.wait(60.0)


def test_who_waits_for_one_answer_gets_on_with_it_and_else_only_waits_its_time(
    desk: LookupWorker, store: Store
) -> None:
    lookup = desk.submit(TOKENS, CacheIdentity)
    desk.wait(60.0, lookup)
    assert lookup.found == 2
    store.opened.clear()
    unanswered = desk.submit(TOKENS, CacheIdentity)
    desk.wait(0.001, unanswered)
    assert unanswered.result is None


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
from kvstore.client.engines.vllm.lookup import CacheIdentity, LookupWorker
hangs = threading.Event()
desk = LookupWorker(lambda _: hangs.set() or threading.Event().wait(), 64, 1.0)
desk.submit(list(range(64)), CacheIdentity)
hangs.wait()
"""


def test_a_process_that_ends_without_close_does_not_wait_for_the_store() -> None:
    subprocess.run([sys.executable, "-c", HUNG], check=True, timeout=60)
