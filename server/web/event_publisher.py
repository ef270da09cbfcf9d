"""The publisher: events over a ZeroMQ PUB socket, and replays of missed ones over a ROUTER.

Compatible with vLLM's ZmqEventPublisher: batches are numbered from 0, a reader requests those from
a number on with 8 bytes, big-endian, and the number -1 ends the answer. If some are no longer kept
the answer is an AllBlocksCleared, then the current chunks, then the kept batches.

An answer is sent as fast as it is read, without loss. The answer to a reader that stops is cut off
after a while, with the number -2 instead of -1; the reader then requests the batches after the last
that it received.

A message has three parts: the topic, its number as 8 bytes, big-endian, and an EventBatch in
MessagePack, as in vllm/distributed/kv_events.py of vLLM 0.32. Fields unknown to the store are
empty: token ids, adapters, extra keys.
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
"""vLLM's names for the media of tiers."""
LOCAL = "LOCAL"
OWNER = "kvstore"


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """A chain of chunks after *parent_block_hash* was stored on a medium."""

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
    """Chunks were removed from a medium."""

    block_hashes: list[bytes]
    medium: str | None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """All earlier events are void."""


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events in order; *ts* is in seconds of the wall clock."""

    ts: float
    events: list[BlockEvent]
    data_parallel_rank: int | None = None


def block_events(page: Page) -> list[BlockEvent]:
    """Return the events of *page*, with successive chunks of a chain in one.

    Block hashes are keys, of 32 bytes. A lossy copy counts as removed: a request for exact chunks
    does not find it.
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
"""Limit of batches kept for replay; the oldest are dropped."""
MAX_REPLAYS = 8
"""Concurrent replays; a further request is dropped, and the reader retries."""
MAX_REPLAY_WAIT_S = 10.0
"""An answer whose reader takes no batch for this time is cut off."""
MAX_CUTS = 64
"""Limit of pending notices of cut answers; beyond it the oldest are dropped."""
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
        """Number of the next batch."""
        self._replays: list[Iterator[bool]] = []
        self._cuts: deque[list[bytes]] = deque(maxlen=MAX_CUTS)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def tick(self) -> None:
        """Reload a changed or deleted file of readers. Called a few times a second."""
        if self._sockets.readers is not None:
            self._sockets.readers.refresh()

    def is_alive(self) -> bool:
        """Whether the thread that owns the sockets is alive."""
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
                # Round-robin: a long answer must not delay events.
                did = [step() for step in (self._publish, self._receive, self._go_on)]
                if not any(did):
                    self._sockets.wait(int(1000 * POLL_S))
        finally:
            self._sockets.close()

    def _publish(self) -> bool:
        """Publish one batch; return False when there is none."""
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
        """Receive one request for a replay; return False when there is none."""
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
        """Yield the kept batches from number *start* on; if some are dropped, begin anew."""
        while start < self._number:
            oldest = self._number - len(self._kept)
            if start < oldest:
                yield from self._anew(start, oldest - 1)
                start = oldest  # may be dropped by now too
            else:
                yield self._kept[start - oldest]
                start += 1

    def _anew(self, number: int, last: int) -> Iterator[Message]:
        """Yield the current chunks, under numbers *number* to *last*, which are no longer kept."""
        # The kept batches follow in order, so the last event of a chunk is the latest.
        reader = EventReader(self._log)
        while (page := reader.poll()) is not None:
            blocks = block_events(page)
            if blocks:
                yield self._message(min(number, last), blocks)
                number += 1
            if reader.is_level:
                return

    def _replay(self, reader: list[bytes], start: int) -> Iterator[bool]:
        """Answer a reader; yield after each attempt to send a message whether it was sent."""
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
        """Send the next message of each answer; return False when none could be sent."""
        steps = {replay: next(replay, None) for replay in self._replays}
        self._replays = [replay for replay, step in steps.items() if step is not None]
        for reader in list(self._cuts):
            if self._send(reader, _CUT_SHORT) is not False:
                self._cuts.remove(reader)
        return any(steps.values())

    def _send(self, reader: list[bytes], message: Message) -> bool | None:
        """Send *message* to a reader; return False if its queue is full, None if it is gone."""
        assert self._sockets.replay is not None
        try:
            self._sockets.replay.send_multipart((*reader, *message), zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            return False if isinstance(error, zmq.Again) else None
        return True


def open_publisher(
    config: Settings, log: EventLog, boot_id: int, counters: Counters
) -> EventPublisher:
    """Return a publisher of *log*. Raises InvalidRequestError for an unusable address."""
    readers, secret = None, b""
    if config.events_readers is not None:
        readers = WatchedFile((config.events_readers,), parse_readers, frozenset[bytes])
        secret = load_key(config.events_keys)
    refused = partial(counters.add, "zmq_refused_connections")
    sockets = EventSockets(config.events, config.events_replay, secret, readers, refused)
    publisher = EventPublisher(sockets, log, boot_id, counters, time.time, time.monotonic)
    public_key = zmq.curve_public(secret).decode() if secret else ""
    logger.info("publishing events", addresses=sockets.addresses, public_key=public_key)
    return publisher
