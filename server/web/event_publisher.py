"""The publisher: events over a zmq PUB socket, and to who missed some again over a ROUTER.

As vLLM's ZmqEventPublisher does, so that its readers read ours: batches are numbered from 0, a
reader requests those from a number on with 8 bytes, big-endian, and the number -1 ends the answer.
Where some are not kept any more the answer is to forget all, then what is here, then what is kept.

An answer goes no faster than it is read: nothing of it is lost in between. A reader that stops
loses its place after a while: the number -2 comes instead of -1, and it requests again what follows
the last that it got.

A message has three parts: the topic, its number as 8 bytes, big-endian, and an EventBatch in
MessagePack, as vllm/distributed/kv_events.py of vLLM 0.32 has them. What the store does not know
stays empty: the ids of tokens, adapters, extra keys.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

import msgspec
import structlog
import zmq

from kvstore.proto.types import ROOT, Accuracy
from kvstore.server.security.key_files import WatchedFile
from kvstore.server.settings.settings import Settings
from kvstore.server.telemetry.events import POLL_S, EventLog, EventReader, Page
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.web.event_sockets import EventSockets, load_key, parse_readers

MEDIA = {"gpu": "GPU", "cpu": "CPU", "disk": "STORAGE"}
"""What vLLM calls the media of tiers."""
LOCAL = "LOCAL"
OWNER = "kvstore"


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Chunks in a row came to a medium, the first behind *parent_block_hash*."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    locality: str | None = None
    ownership: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Chunks left a medium."""

    block_hashes: list[bytes]
    medium: str | None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """What was known before is void."""


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events in order; *ts* is in seconds of the wall clock."""

    ts: float
    events: list[BlockEvent]
    data_parallel_rank: int | None = None


def block_events(page: Page) -> list[BlockEvent]:
    """Return the events of *page*, those of a chain's next chunks in one.

    Block hashes are keys, of 32 bytes. A copy that is not exact counts as gone: a request for
    exact does not find it.
    """
    blocks: list[BlockEvent] = [AllBlocksCleared()] if page.cleared else []
    for event in page.events:
        medium, tokens = MEDIA[event.tier], event.tokens
        last = blocks[-1] if blocks else None
        if tokens and event.accuracy is Accuracy.exact:
            parent = None if event.parent == ROOT else event.space + event.parent
            link = (medium, tokens, parent)
            if (
                isinstance(last, BlockStored)
                and (last.medium, last.block_size, last.block_hashes[-1]) == link
            ):
                last.block_hashes.append(event.key)
            else:
                new = BlockStored([event.key], parent, [], tokens, None, medium, None, LOCAL, OWNER)
                blocks.append(new)
        elif isinstance(last, BlockRemoved) and last.medium == medium:
            last.block_hashes.append(event.key)
        else:
            blocks.append(BlockRemoved([event.key], medium, LOCAL, OWNER))
    return blocks


def encode(ts: float, blocks: list[BlockEvent]) -> bytes:
    """Return the third part of a message."""
    return msgspec.msgpack.encode(EventBatch(ts, blocks))


KEPT_BATCHES = 10_000
KEPT_BATCH_BYTES = 64 << 20
"""Of batches that can be asked for again; the oldest go first."""
MAX_REPLAYS = 8
"""Answered side by side; a request beyond that is not answered, and comes again."""
MAX_REPLAY_WAIT_S = 10.0
"""Without a batch taken, until an answer is cut short."""
MAX_CUTS = 64
"""Readers of such answers to which that is still to be sent; of more it is not to the oldest."""
END = (-1).to_bytes(8, "big", signed=True)
CUT = (-2).to_bytes(8, "big", signed=True)
_JOIN_WITHIN_S = 2.0

Message = tuple[bytes, bytes, bytes]
"""Topic, number, batch."""
_LAST: Message = (b"", END, b"")
_CUT_SHORT: Message = (b"", CUT, b"")

logger = structlog.get_logger(__name__)


class EventPublisher:
    """Publishes all events of *log* until ``close``; *boot_id* is in the topic.

    One thread owns the sockets. *wall_clock* returns seconds since 1970, *clock* monotonic ones.
    """

    def __init__(
        self,
        sockets: EventSockets,
        log: EventLog,
        boot_id: int,
        counters: Counters,
        wall_clock: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._sockets = sockets
        self.addresses = sockets.addresses
        self._log = log
        self._reader = EventReader(log)
        self.topic = b"kvstore@%016x" % boot_id
        self._counters = counters
        self._wall_clock = wall_clock
        self._clock = clock
        self._kept: deque[Message] = deque()
        self._kept_bytes = 0
        self._number = 0
        """Of the next batch."""
        self._replays: list[Iterator[bool]] = []
        self._cuts: deque[list[bytes]] = deque(maxlen=MAX_CUTS)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def tick(self) -> None:
        """Take in a file of readers that was replaced or deleted. Called a few times a second."""
        if self._sockets.readers is not None:
            self._sockets.readers.refresh()

    def is_alive(self) -> bool:
        """Whether the thread that owns the sockets lives."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop publishing and close the sockets. Idempotent."""
        self._closed = True
        self._thread.join(_JOIN_WITHIN_S)

    # --- the sockets' thread

    def _run(self) -> None:
        try:
            while not self._closed:
                self._sockets.admit()
                # Each has its turn: a long answer keeps no event waiting.
                did = [step() for step in (self._publish, self._receive, self._go_on)]
                if not any(did):
                    self._sockets.wait(int(1000 * POLL_S))
        finally:
            self._sockets.close()

    def _publish(self) -> bool:
        """Publish one batch; False when there is nothing new."""
        page = self._reader.poll()
        if page is None:
            return False
        blocks = block_events(page)
        if not blocks:
            return True
        message = self._message(self._number, blocks)
        self._number += 1
        self._kept.append(message)
        self._kept_bytes += len(message[2])
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BATCH_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[2])
        self._counters.add("event_batches")
        if self._sockets.pub is not None:
            self._sockets.pub.send_multipart(message, copy=False)
        return True

    def _message(self, number: int, blocks: list[BlockEvent]) -> Message:
        return self.topic, number.to_bytes(8, "big"), encode(self._wall_clock(), blocks)

    def _receive(self) -> bool:
        """Take one request for a replay; False when there is none."""
        if self._sockets.replay is None:
            return False
        try:
            frames = self._sockets.replay.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            self._counters.add("event_invalid_requests")
        elif len(self._replays) < MAX_REPLAYS:
            self._replays.append(self._replay(frames[:2], int.from_bytes(frames[2], "big")))
        return True

    def _answer(self, start: int) -> Iterator[Message]:
        """Yield what is kept from number *start* on, or, without all of it, begin anew."""
        while start < self._number:
            oldest = self._number - len(self._kept)
            if start < oldest:
                yield from self._anew(start, oldest - 1)
                start = oldest  # may be dropped by now, too
            else:
                yield self._kept[start - oldest]
                start += 1

    def _anew(self, number: int, last: int) -> Iterator[Message]:
        """Yield what is here, under numbers from *number* to *last* that are not kept any more."""
        # What is kept of the past follows in its order: the latest word on a chunk is the last.
        reader = EventReader(self._log)
        while (page := reader.poll()) is not None:
            blocks = block_events(page)
            if blocks:
                yield self._message(min(number, last), blocks)
                number += 1
            if reader.is_level:
                return

    def _replay(self, reader: list[bytes], start: int) -> Iterator[bool]:
        """Answer a reader; yield for each message, until it is sent, whether it was."""
        for message in chain(self._answer(start), [_LAST]):
            waiting_since = self._clock()
            while (is_sent := self._send(reader, message)) is False:
                if self._clock() - waiting_since >= MAX_REPLAY_WAIT_S:
                    self._counters.add("event_cut_replays")
                    self._cuts.append(reader)
                    return
                yield False
            if is_sent is None:
                return
            yield True

    def _go_on(self) -> bool:
        """Send the next message of each answer; False when none of them could go on."""
        steps = {replay: next(replay, None) for replay in self._replays}
        self._replays = [replay for replay, step in steps.items() if step is not None]
        for reader in list(self._cuts):
            if self._send(reader, _CUT_SHORT) is not False:
                self._cuts.remove(reader)
        return any(steps.values())

    def _send(self, reader: list[bytes], message: Message) -> bool | None:
        """Send *message* to a reader; False when it has too many to read, None when it is gone."""
        assert self._sockets.replay is not None
        try:
            self._sockets.replay.send_multipart((*reader, *message), zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            return False if isinstance(error, zmq.Again) else None
        return True


def open_publisher(
    config: Settings, log: EventLog, boot_id: int, counters: Counters
) -> EventPublisher:
    """Return what publishes *log*. Raises InvalidRequestError for what cannot be bound."""
    readers, secret = None, b""
    if config.events_readers is not None:
        readers = WatchedFile((config.events_readers,), parse_readers, frozenset[bytes])
        secret = load_key(config.events_keys)
    refused = partial(counters.add, "zmq_refused_connections")
    sockets = EventSockets(config.events, config.events_replay, secret, readers, refused)
    publisher = EventPublisher(sockets, log, boot_id, counters, time.time, time.monotonic)
    public_key = zmq.curve_public(secret).decode() if secret else ""
    logger.info("events are published", addresses=sockets.addresses, public_key=public_key)
    return publisher
