"""Clients, a network and one server, drawn from one seed: messages get lost, late, twice or cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from contracts.chunks import make_representation
from helpers.prompts import frame_of
from helpers.shards import shard_frame, shard_of
from simulation.core import BREAKER_RETRY_S
from simulation.world import World

from kvstore.codecs.base import codec_by_name
from kvstore.codecs.transcode import transcode
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import KVStoreError
from kvstore.proto.frame import FrameTemplate, check_frame
from kvstore.proto.keys import chunk_key, representation_digest
from kvstore.proto.messages import as_message
from kvstore.proto.types import (
    DIGEST_BYTES,
    ROOT,
    Accuracy,
    ChainDigest,
    ChunkKey,
    KVLayout,
    Namespace,
)
from kvstore.server.api.grpc_server import servicer_of
from kvstore.server.api.service import Backend, Identity
from kvstore.server.api.validation import Checks
from kvstore.server.store.scrub import Scrub

REPRESENTATION = make_representation(layers=2, kv_heads=2, head_dim=4)
LAYOUT = KVLayout.of(REPRESENTATION, 16)
CLIENTS = 3
KEYS = 8
STEPS = 60
_NO_CONTEXT: Any = None
_PIECE_BYTES = 600
"""Of a frame that is sent in several messages; the first has its header."""
_WEIGHTS = {
    "put": 10, "put_rank": 10, "get": 12, "lease": 6, "release": 4, "delete": 2, "heartbeat": 6,
    "damaged": 2, "open": 2, "scrub": 1, "spoil": 3, "wait": 8, "work": 14, "tick": 5, "crash": 1,
}  # fmt: skip


@dataclass(slots=True)
class Client:
    """What one engine knows: its session, and the leases it was told of."""

    session_id: int = 0
    space: Namespace = field(default_factory=lambda: Namespace(bytes(16)))
    leases: list[int] | None = None


@dataclass(slots=True)
class Frames:
    """What the chunk of one key is, whole and as two ranks put it."""

    whole: Bytes
    ranks: tuple[Bytes, Bytes]


class NetworkSchedule:
    """Run with ``run``; it raises AssertionError at the first thing that must not be.

    Each step is one message of a client, or something that happens to the server. A message may
    be lost before the server or its answer behind it, be delivered twice, late and out of order,
    or be cut in the middle.
    """

    def __init__(self, seed: int, steps: int = STEPS) -> None:
        self.world = World(seed)
        self.draw = self.world.draw
        self.counts: Counter[str] = Counter()
        self._steps = steps
        self._late: list[Callable[[], object]] = []
        self._clients = [Client() for _ in range(CLIENTS)]
        self._frames: dict[ChunkKey, Frames] = {}
        self._start()

    def _start(self) -> None:
        world = self.world
        checks = Checks(64, 1 << 16, 1000, world.clock)
        identity = Identity(1, "simulated", "", 0.0)
        tiers = [slot.name for slot in world.slots]
        self._scrub = Scrub(world.store.moves, tiers, 0)
        backend = Backend(world.store, world.sessions, checks, identity, scrub=self._scrub)
        self.service = servicer_of(backend)

    # --- the schedule

    def run(self) -> Counter[str]:
        """Take every step, and check after each; return how often what happened."""
        for name in self.draw.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=self._steps):
            self.counts[name] += 1
            self._step(name)
            self._check()
        self._end()
        return self.counts

    def _step(self, name: str) -> None:
        if name in ("wait", "work", "tick", "crash", "scrub", "spoil"):
            getattr(self, name)()
            return
        client = self.draw.choice(self._clients)
        if not client.session_id:
            name = "open"
        work = getattr(self, name)
        self._send(lambda: work(client))

    def _send(self, call: Callable[[], object]) -> None:
        """Deliver a message as networks do."""
        fate = self.draw.random()
        if fate < 0.06:
            self.counts["lost"] += 1
        elif fate < 0.14:
            self.counts["late"] += 1
            self._late.append(call)
        else:
            for _ in range(2 if fate < 0.2 else 1):
                self._answered(call)
        if self._late and self.draw.random() < 0.3:
            self._answered(self._late.pop(self.draw.randrange(len(self._late))))

    def _answered(self, call: Callable[[], object]) -> None:
        try:
            call()
        except KVStoreError as error:
            self.counts[type(error).__name__] += 1

    # --- messages

    def open(self, client: Client, arrives: float = 0.9) -> None:
        request = pb.OpenSessionRequest(
            representation=as_message(pb.Representation, REPRESENTATION)
        )
        reply = self.service.OpenSession(request, _NO_CONTEXT)
        if self.draw.random() < arrives:  # else the answer is lost
            client.session_id = reply.session_id
            client.space = Namespace(reply.key_namespace)
            client.leases = []

    def _key(self, client: Client, number: int | None = None) -> ChunkKey:
        number = self.draw.randrange(KEYS) if number is None else number
        key = chunk_key(client.space, ChainDigest(bytes([number + 1]) * DIGEST_BYTES))
        if key not in self._frames:
            whole = frame_of(key, REPRESENTATION)
            template = FrameTemplate(
                key, ROOT, representation_digest(REPRESENTATION), bytes(DIGEST_BYTES), LAYOUT
            )
            ranks = [
                shard_frame(template, REPRESENTATION, shard_of(LAYOUT, (0, 2), heads))
                for heads in ((0, 1), (1, 2))
            ]
            self._frames[key] = Frames(whole, (ranks[0], ranks[1]))
        return key

    def put(self, client: Client) -> None:
        keys = [self._key(client) for _ in range(self.draw.randrange(1, 4))]
        self._upload(client, [self._frames[key].whole for key in keys])

    def put_rank(self, client: Client) -> None:
        rank = self.draw.randrange(2)
        keys = [self._key(client) for _ in range(self.draw.randrange(1, 3))]
        self._upload(client, [self._frames[key].ranks[rank] for key in keys])

    def _upload(self, client: Client, frames: list[Bytes]) -> None:
        messages = list(self._pieces(client.session_id, frames))
        if self.draw.random() < 0.1:  # the connection is cut
            del messages[self.draw.randrange(len(messages)) :]
            self.counts["cut puts"] += 1
        if self.draw.random() < 0.05 and messages:
            place = self.draw.choice(messages)
            turned = bytearray(place.data)
            turned[self.draw.randrange(len(turned))] ^= 1 << self.draw.randrange(8)
            place.data = bytes(turned)
            self.counts["damaged puts"] += 1
        reply = self.service.Put(iter(messages), _NO_CONTEXT)
        self.counts["stored"] += len(reply.outcomes)

    def _pieces(self, session_id: int, frames: list[Bytes]) -> Iterator[pb.PutRequest]:
        durable = self.world.disk is not None and self.draw.random() < 0.2
        for number, frame in enumerate(frames):
            for start in range(0, len(frame), _PIECE_BYTES):
                yield pb.PutRequest(
                    session_id=session_id,
                    frame_bytes=0 if start else len(frame),
                    data=frame[start : start + _PIECE_BYTES].tobytes(),
                    durable=durable and number == start == 0,
                )

    def get(self, client: Client) -> None:
        numbers = self.draw.sample(range(KEYS), self.draw.randrange(1, 5))
        keys = [self._key(client, number) for number in numbers]
        self._read(client, keys, self.draw.randrange(1, 8) if self.draw.random() < 0.2 else -1)

    def _read(self, client: Client, keys: list[ChunkKey], stop: int) -> None:
        """Get *keys*, going away after message *stop*; verify every frame that came whole."""
        request = pb.GetRequest(
            session_id=client.session_id, digests=b"".join(key[DIGEST_BYTES:] for key in keys)
        )
        arrived: dict[int, bytearray] = {}
        whole: dict[int, int] = {}
        stream = self.service.Get(request, _NO_CONTEXT)
        for count, message in enumerate(stream):
            part = message.part
            if message.HasField("part"):
                arrived.setdefault(message.index, bytearray())[part.offset :] = part.data
                whole[message.index] = part.frame_bytes or whole.get(message.index, 0)
            if count == stop:  # the reader goes away
                self.counts["cut gets"] += 1
                break
        stream.close()
        for index, data in arrived.items():
            if len(data) == whole[index]:
                self._check_frame(keys[index], np.frombuffer(bytes(data), np.uint8))

    def _check_frame(self, key: ChunkKey, frame: Bytes) -> None:
        header = check_frame(frame, key)
        assert header.accuracy is Accuracy.exact
        mine = self._frames[key].whole
        if header.codec_id:  # read past a full memory, as it lay on its tier
            raw = np.zeros(len(mine), np.uint8)
            transcode(frame, codec_by_name("raw"), raw)
            frame = raw
        start = check_frame(mine, key).header_bytes
        assert np.array_equal(frame[start:], mine[start:]), f"wrong bytes for {key.hex()}"
        self.counts["verified"] += 1

    def lease(self, client: Client) -> None:
        keys = [self._key(client, number) for number in range(KEYS)]
        request = pb.LookupRequest(
            session_id=client.session_id, lease=True,
            digests=b"".join(key[DIGEST_BYTES:] for key in keys),
        )  # fmt: skip
        reply = self.service.Lookup(request, _NO_CONTEXT)
        if reply.lease_id and client.leases is not None and self.draw.random() < 0.9:
            client.leases.append(reply.lease_id)

    def release(self, client: Client) -> None:
        request = pb.ReleaseRequest(session_id=client.session_id, lease_ids=client.leases or [])
        self.service.Release(request, _NO_CONTEXT)
        client.leases = []

    def delete(self, client: Client, *, if_damaged: bool = False) -> None:
        request = pb.DeleteRequest(
            session_id=client.session_id, digests=self._key(client)[DIGEST_BYTES:],
            if_damaged=if_damaged,
        )  # fmt: skip
        self.service.Delete(request, _NO_CONTEXT)

    def damaged(self, client: Client) -> None:
        self.delete(client, if_damaged=True)

    def heartbeat(self, client: Client) -> None:
        self.service.Heartbeat(pb.HeartbeatRequest(session_id=client.session_id), _NO_CONTEXT)

    # --- the server

    def wait(self) -> None:
        self.world.clock.advance(self.draw.choice((0.01, 0.1, 0.4, 1.1)))

    def work(self) -> None:
        for _ in range(self.draw.randrange(1, 4)):
            self.world.work_queue.step(self.draw.choice([None, *self.world.work_queue.depth()]))

    def tick(self) -> None:
        self.world.store.tick()
        self.world.sessions.expire()

    def scrub(self) -> None:
        self._answered(lambda: self._scrub.run_pass([s.name for s in self.world.slots], 0))

    def spoil(self) -> None:
        if self.world.plan.spoils and self.world.lower:
            tier = self.draw.choice(self.world.lower)
            if tier.medium.chunks:
                key = self.draw.choice(list(tier.medium.chunks))
                tier.flip(key, self.draw.randrange(8 * 4096))

    def crash(self) -> None:
        if self.draw.random() < 0.3:
            self.world.restart()
            self._start()

    # --- what must hold

    def _check(self) -> None:
        world = self.world
        assert not world.work_queue.surprises, world.work_queue.surprises
        cpu = world.cpu.stats()
        assert cpu.used_bytes <= cpu.capacity_bytes
        for tier in world.lower:
            stats = tier.stats()
            assert stats.used_bytes <= stats.capacity_bytes
            assert stats.reservations == 0

    def _end(self) -> None:
        """Without faults everything is given back, and everything works."""
        world = self.world
        world.faults.end()
        self._late.clear()
        world.clock.advance(30.0 + BREAKER_RETRY_S)
        world.sessions.expire()
        for _ in range(3):
            world.store.tick()
            world.settle()
        assert len(world.sessions) == 0
        assert world.catalog.leases.pins.total() == len(world.catalog.leases) == 0
        assert world.catalog.in_flight.writers.total() == len(world.store.writes) == 0
        assert world.cpu.stats().reservations == 0
        client = Client()
        self.open(client, arrives=1.0)
        for number in range(KEYS):
            self._key(client, number)
        key = self._key(client, 0)
        whole = self._frames[key].whole
        before = self.counts["verified"]
        for _ in range(2):  # a first put may find a copy that is damaged, as a read then shows
            self.service.Put(self._pieces(client.session_id, [whole]), _NO_CONTEXT)
            self._read(client, [key], stop=-1)
        assert self.counts["verified"] > before, "a chunk that was put is not there"
        world.close()
