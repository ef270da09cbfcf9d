"""Lookups never hold up the engine, whatever the store does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from local_server import eventually

from kvstore.client.engines.vllm.lookup import MAX_WAITING_LOOKUPS, Identity, LookupDesk, Ticket
from kvstore.proto.errors import ModelError

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

    def find(self, digests: Sequence[bytes]) -> int | None:
        self.opened.wait(20)
        self.asked += bool(digests)
        return self.says


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def desk(store: Store, no_leaks: None) -> Iterator[LookupDesk]:
    made = LookupDesk(store.find, 64, RETRY_S, lambda: store.now_s)
    yield made
    store.opened.set()
    made.close()


def answered(ticket: Ticket) -> int | None:
    assert eventually(lambda: ticket.ready is not None)
    return ticket.ready


def test_a_ticket_is_answered_later_and_named_by_then(desk: LookupDesk, store: Store) -> None:
    store.opened.clear()
    ticket = desk.ask(TOKENS, Identity)
    assert ticket.ready is None
    store.opened.set()
    assert answered(ticket) == 2
    assert ticket.chain is not None
    assert len(ticket.chain.digests) == 3


def test_a_prompt_below_one_chunk_is_not_asked_about(desk: LookupDesk, store: Store) -> None:
    assert answered(desk.ask(TOKENS[:63], Identity)) == 0
    assert store.asked == 0


def raises(error: Exception) -> Callable[[], Identity]:
    def identify() -> Identity:
        raise error

    return identify


def test_what_has_no_name_is_a_miss_with_a_reason(desk: LookupDesk, store: Store) -> None:
    ticket = desk.ask(TOKENS, raises(ModelError("load_inplace", True, "no")))
    assert (answered(ticket), ticket.refusal, ticket.chain) == (0, "load_inplace", None)
    ticket = desk.ask(TOKENS, raises(FileNotFoundError("gone")))
    assert (answered(ticket), ticket.refusal) == (0, "lora_path")
    assert answered(desk.ask(TOKENS, Identity)) == 2


@pytest.mark.parametrize(
    ("tokens", "identify"),
    [
        (TOKENS, lambda: Identity((b"salt:" + "\ud800".encode(),))),
        ([-1] * 64, Identity),
        ([2**32] * 64, Identity),
    ],
    ids=["salt that is no text", "negative token", "token of 33 bits"],
)
def test_a_prompt_that_cannot_be_named_is_a_miss_and_the_next_is_answered(
    desk: LookupDesk, tokens: list[int], identify: Callable[[], Identity]
) -> None:
    """One user's request would else end the thread that all others wait for."""
    ticket = desk.ask(tokens, identify)
    assert (answered(ticket), ticket.refusal, ticket.chain) == (0, "error", None)
    assert answered(desk.ask(TOKENS, Identity)) == 2


def test_a_store_that_failed_is_asked_again_after_a_while_by_nobodys_wait(
    desk: LookupDesk, store: Store
) -> None:
    store.says = None
    assert answered(desk.ask(TOKENS, Identity)) == 0
    assert desk.is_down
    for _ in range(5):
        assert answered(desk.ask(TOKENS, Identity)) == 0
    assert store.asked == 1
    store.now_s += RETRY_S
    store.says = 3
    store.opened.clear()
    probing = desk.ask(TOKENS, Identity)
    assert answered(probing) == 0, "answered although the store has not said anything"
    assert desk.is_down
    store.opened.set()
    assert eventually(lambda: not desk.is_down)
    assert answered(desk.ask(TOKENS, Identity)) == 3


def test_waiting_tickets_are_bounded(desk: LookupDesk, store: Store) -> None:
    store.opened.clear()
    tickets = [desk.ask(TOKENS[:64], Identity) for _ in range(MAX_WAITING_LOOKUPS + 5)]
    assert [ticket.ready for ticket in tickets[-5:]] == [0] * 5
    assert tickets[-1].refusal == "queue"
    assert tickets[0].ready is None


def test_who_has_nothing_to_do_waits_for_an_answer_only_if_one_is_due(desk: LookupDesk) -> None:
    desk.wait(60.0)
    ticket = desk.ask(TOKENS, Identity)
    assert answered(ticket) == 2
    desk.wait(60.0)


def test_who_waits_for_one_answer_gets_on_with_it_and_else_only_waits_its_time(
    desk: LookupDesk, store: Store
) -> None:
    ticket = desk.ask(TOKENS, Identity)
    desk.wait(60.0, ticket)
    assert ticket.ready == 2
    store.opened.clear()
    unanswered = desk.ask(TOKENS, Identity)
    desk.wait(0.001, unanswered)
    assert unanswered.ready is None
