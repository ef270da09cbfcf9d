"""Peers end under whoever waits for them: soon, with a miss, and the process lives on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from fake_peer import FakePeer, Message
from local_server import eventually
from prompts import MEDIUM, frame_of

from kvstore.proto.errors import TierUnavailableError
from kvstore.proto.types import ChunkKey
from kvstore.server.cluster.peers import Offer, Peers, PeersTerms
from kvstore.server.metrics import Counters

KEY = ChunkKey(bytes(31) + b"k")
FOREVER_MS = 600_000
PATIENCE_S = 60.0


@pytest.fixture
def fake() -> Iterator[FakePeer]:
    with closing(FakePeer({KEY: frame_of(KEY, MEDIUM, 64)})) as one:
        yield one


@pytest.fixture
def peers(fake: FakePeer) -> Peers:
    terms = PeersTerms(("127.0.0.1:1",), FOREVER_MS, failures=1)
    return Peers(terms, fake.dial, Counters(), time.monotonic)


def test_a_question_that_is_not_answered_ends_with_the_peers(fake: FakePeer, peers: Peers) -> None:
    peers.step()
    fake.lie = lambda message: []
    asked, found = fake.finds, list[dict[ChunkKey, Offer]]()
    asker = threading.Thread(target=lambda: found.append(peers.find([KEY])), daemon=True)
    asker.start()
    assert eventually(lambda: fake.finds > asked)
    peers.close()
    asker.join(PATIENCE_S)
    assert found == [{}]
    assert peers.find([KEY]) == {}
    peers.close()


def test_a_read_that_stands_still_ends_with_the_peers(fake: FakePeer, peers: Peers) -> None:
    peers.step()
    (offer,) = peers.find([KEY]).values()
    begun, out = threading.Event(), frame_of(KEY, MEDIUM, 64).copy()

    def keep_silent(message: Message) -> list[Message]:
        begun.set()
        return []

    fake.lie = keep_silent
    raised: list[Exception] = []

    def read() -> None:
        try:
            assert list(peers.read(offer.info, offer.peers, out, 0)) == []
        except TierUnavailableError as error:
            raised.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert begun.wait(PATIENCE_S)
    peers.close()
    reader.join(PATIENCE_S)
    assert not reader.is_alive()
    assert raised == []


def test_upkeep_that_waits_for_an_answer_ends_with_the_peers(fake: FakePeer, peers: Peers) -> None:
    fake.lie = lambda message: []
    peers.start("me", 5)
    assert eventually(lambda: fake.dials == 1)
    peers.close()
    assert peers._thread is not None
    peers._thread.join(PATIENCE_S)
    assert not peers._thread.is_alive()
    assert not any(peer.has_session for peer in peers.known())
