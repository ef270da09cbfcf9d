"""Peers that lie, hang or end: soon a miss or a clean error, and nobody else pays for it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from contracts.bad_puts import changed
from contracts.chunks import make_frame
from helpers import stream_messages as messages
from helpers.fake_peer import FakePeer, Message, asking, other
from helpers.local_server import eventually
from helpers.prompts import MEDIUM, frame_of
from helpers.stream_messages import Sent

from kvstore.proto.errors import DeadlineError, InvalidFrameError, TierUnavailableError
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.server.cluster.peer_connections import StreamLink
from kvstore.server.cluster.peers import PeerChunk, Peers
from kvstore.server.settings.values import Limits
from kvstore.server.telemetry.metrics import Counters

# --- one stream

SILENCE_S = 20.0
INFO_BYTES = 1000
Steps = Iterator[int]


@pytest.fixture
def read() -> Iterator[Callable[..., tuple[StreamLink, Steps]]]:
    """Begin a read from a peer that answers it with some words, then is silent or hangs up."""
    open_: list[FakePeer | StreamLink] = []
    info: ChunkInfo = replace(make_frame(1)[0], size_bytes=INFO_BYTES)

    def begin(
        *words: Sent, hangs_up: bool = False, within_s: float = SILENCE_S
    ) -> tuple[StreamLink, Steps]:
        def lie(message: Message) -> Iterator[Message]:
            yield from [message] if message[0].ready else words
            if hangs_up and not message[0].ready:
                raise TierUnavailableError("peer", "gone")

        peer = FakePeer({}, lie)
        link = StreamLink(peer.dial("", "", 1.0), time.monotonic)
        open_.extend((peer, link))
        link.connect(SILENCE_S)
        return link, link.read(info, np.zeros(INFO_BYTES, np.uint8), 0, within_s)

    yield begin
    while open_:
        open_.pop().close()


def part(offset: int, size_bytes: int, **fields: int) -> Sent:
    return changed((messages.part(1, INFO_BYTES, offset, 0, "cpu"), bytes(size_bytes)), **fields)


def test_parts_that_are_not_of_the_frame_are_refused(
    read: Callable[..., tuple[StreamLink, Steps]],
) -> None:
    for words in [
        [part(10, 500)],
        [part(0, 500), part(400, 500)],
        [part(0, 1001)],
        [part(0, 0)],
        [part(0, 500, frame_bytes=999)],
        [part(0, 500, index=1)],
        [(messages.part(2, INFO_BYTES, 0), bytes(500))],
        [part(0, 500), (messages.done(1, 1), b"")],
        [(messages.done(2, 1), b"")],
        [(messages.finish(1, 1), b"")],
    ]:
        with pytest.raises(InvalidFrameError):
            list(read(*words)[1])


def test_who_hangs_up_or_falls_silent_costs_no_more_than_the_silence(
    read: Callable[..., tuple[StreamLink, Steps]],
) -> None:
    link, steps = read(part(0, 500), hangs_up=True)
    with pytest.raises(TierUnavailableError):
        list(steps)
    assert not link.is_open
    link, steps = read(part(0, 500), within_s=0.05)
    with pytest.raises(DeadlineError):
        list(steps)
    assert not link.is_open


# --- peers that end under whoever waits for them

KEY = ChunkKey(bytes(31) + b"k")
PATIENCE_S = 60.0


@pytest.fixture
def fake() -> FakePeer:
    return FakePeer({KEY: frame_of(KEY, MEDIUM, 64)})


@pytest.fixture
def peers(fake: FakePeer) -> Iterator[Peers]:
    with asking(fake, limits=Limits(peer_timeout_ms=600_000, breaker_failures=1)) as peers:
        yield peers


def silent(message: Message) -> list[Message]:
    return []


def test_a_question_that_is_not_answered_ends_with_the_peers(fake: FakePeer, peers: Peers) -> None:
    peers.step()
    fake.lie = silent
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
    begun, ended = threading.Event(), list[object]()

    def keep_silent(message: Message) -> list[Message]:
        begun.set()
        return []

    fake.lie = keep_silent

    def read() -> None:
        ended.append(list(peers.read(offer, frame_of(KEY, MEDIUM, 64), 0)))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert begun.wait(PATIENCE_S)
    peers.close()
    reader.join(PATIENCE_S)
    assert ended == [[]], "without an error"


def test_upkeep_that_waits_for_an_answer_ends_with_the_peers(fake: FakePeer, peers: Peers) -> None:
    fake.lie = silent
    peers.start("me", 5)
    assert eventually(lambda: fake.dials == 1)
    peers.close()
    peers._thread.join(PATIENCE_S)
    assert not peers._thread.is_alive()
    assert not any(peer.session for peer in peers.known())


def test_a_silent_peer_takes_no_time_from_others_that_have_to_be_connected_too() -> None:
    counters, frames = Counters(), {KEY: frame_of(KEY, MEDIUM, 64)}
    fakes = [FakePeer(frames) for _ in range(3)]
    limits = Limits(peer_timeout_ms=450, breaker_failures=1)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        asking(*fakes, counters=counters, limits=limits) as peers,
    ):
        where = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        for peer, fake in zip(peers.known(), fakes, strict=True):
            told = fake.dial("", "", 1.0)
            peer.open_session(other(told, bulk_address=where) if fake is fakes[0] else told)
        first, *others = peers.known()
        assert set(peers.find([KEY])[KEY].peers) == set(others)
        assert [peer.is_up for peer in (first, *others)] == [False, True, True]
        assert counters["peer_failures"] == 1


def test_a_peer_for_which_no_time_is_left_is_not_blamed() -> None:
    now, counters = [100.0], Counters()

    def ticks() -> float:
        now[0] += 0.15  # of a timeout of 0.2: the first has its turn
        return now[0]

    limits = Limits(peer_timeout_ms=200, breaker_failures=1)
    fakes = [FakePeer({}) for _ in range(3)]
    with asking(*fakes, counters=counters, clock=ticks, limits=limits) as peers:
        for peer, fake in zip(peers.known(), fakes, strict=True):
            peer.open_session(fake.dial("", "", 1.0))
        assert peers.find([ChunkKey(bytes(32))]) == {}
        assert counters["peer_failures"] == 0
