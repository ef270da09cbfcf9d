"""Peers end under whoever waits for them: soon, with a miss, and the process lives on."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from helpers.fake_peer import FakePeer, Message, other
from helpers.local_server import eventually
from helpers.prompts import MEDIUM, frame_of

from kvstore.proto.errors import TierUnavailableError
from kvstore.proto.types import ChunkKey
from kvstore.server.cluster.peers import PeerChunk, Peers
from kvstore.server.settings.values import Limits
from kvstore.server.telemetry.metrics import Counters

KEY = ChunkKey(bytes(31) + b"k")
FOREVER_MS = 600_000
PATIENCE_S = 60.0


@pytest.fixture
def fake() -> Iterator[FakePeer]:
    with closing(FakePeer({KEY: frame_of(KEY, MEDIUM, 64)})) as one:
        yield one


@pytest.fixture
def peers(fake: FakePeer) -> Peers:
    terms = ("127.0.0.1:1",), Limits(peer_timeout_ms=FOREVER_MS, breaker_failures=1)
    return Peers(*terms, fake.dial, Counters(), time.monotonic)


def test_a_question_that_is_not_answered_ends_with_the_peers(fake: FakePeer, peers: Peers) -> None:
    peers.step()
    fake.lie = lambda message: []
    asked, found = fake.finds, list[dict[ChunkKey, PeerChunk]]()
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
            assert list(peers.read(offer, out, 0)) == []
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
    peers._thread.join(PATIENCE_S)
    assert not peers._thread.is_alive()
    assert not any(peer.session for peer in peers.known())


def test_a_silent_peer_takes_no_time_from_others_that_have_to_be_connected_too() -> None:
    counters = Counters()
    frames = {KEY: frame_of(KEY, MEDIUM, 64)}
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        closing(FakePeer(frames)) as second,
        closing(FakePeer(frames)) as third,
    ):
        terms = ("a:1", "b:1", "c:1"), Limits(peer_timeout_ms=450, breaker_failures=1)
        peers = Peers(*terms, second.dial, counters, time.monotonic)
        with closing(peers):
            first, *others = peers.known()
            let_in = [one.dial("", "", 1.0) for one in (second, third)]
            where = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
            for peer, said in zip(
                peers.known(), [other(let_in[0], bulk_address=where), *let_in], strict=True
            ):
                peer.open_session(said)
            assert set(peers.find([KEY])[KEY].peers) == set(others)
            assert [peer.is_up for peer in (first, *others)] == [False, True, True]
            assert counters["peer_failures"] == 1


def test_a_peer_for_which_no_time_is_left_is_not_blamed() -> None:
    now = [100.0]
    counters = Counters()

    def ticks() -> float:
        now[0] += 0.15  # of a timeout of 0.2: the first has its turn
        return now[0]

    with closing(FakePeer({})) as fake:
        terms = ("a:1", "b:1", "c:1"), Limits(peer_timeout_ms=200, breaker_failures=1)
        peers = Peers(*terms, fake.dial, counters, ticks)
        with closing(peers):
            for peer in peers.known():
                peer.open_session(fake.dial("", "", 1.0))
            assert peers.find([KEY]) == {}
            assert counters["peer_failures"] == 0
