"""Every parser of bytes that others wrote: what may be fed to it, and what it may do with it.

A target returns, or raises an error that the project raises on purpose. ``SEEDS`` are inputs that
it takes, for fuzzers to begin with.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from contracts.chunks import make_frame, make_info
from golden.history_samples import packed, sections
from golden.samples import FOLDER
from google.protobuf.message import DecodeError
from helpers.prompts import SMALL
from helpers.redis_relay import replying
from redis.exceptions import RedisError
from simulation.network import NetworkSchedule

from kvstore.codecs.base import codec_by_id, empty_tensors
from kvstore.proto import bulk, unix_socket
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import as_bytes, checksum
from kvstore.proto.errors import ChunkCorruptError, KVStoreError
from kvstore.proto.frame import COMPONENT, FIXED_BYTES, check_frame, parse_header
from kvstore.proto.messages import as_message, unpack_info
from kvstore.server.settings.settings import load_config
from kvstore.server.store.saved_state import (
    unpack_gates,
    unpack_history,
    unpack_models,
    unpack_sections,
    unpack_variants,
)
from kvstore.tiers.disk_index import (
    IndexRow,
    owner_key,
    pack_owner,
    pack_row,
    unpack_owner,
    unpack_row,
)
from kvstore.tiers.encrypted import HEADER_BYTES, TAG_BYTES, KeyRing, UnknownKeyError, cells
from kvstore.tiers.redis_chunks import Manifest, parse_manifest

Target = Callable[[bytes], object]

_INFO, _FRAME = make_frame(1, tokens=16)
_KEYS = KeyRing(lambda: {1: bytes(32)}, bytes)
_GOLDEN = [
    np.fromfile(FOLDER / f"{name}-r1.frame", np.uint8)
    for name in ("raw", "lossless", "kivi-8", "kivi-4", "kivi-2")
]
_SECTIONS: list[tuple[str, Callable[[dict[str, bytes]], object]]] = [
    ("groups", unpack_history),
    ("chunks", unpack_history),
    ("models", unpack_models),
    ("gates", unpack_gates),
    ("variants", unpack_variants),
]
_MANIFEST = Manifest.of(make_info(3, 10_000), 4096, b"writer 1", 5)
_REQUESTS = {
    name.removesuffix("Request"): kind
    for name, kind in vars(pb).items()
    if name.endswith("Request")
}
_STREAMED = {"Get", "List", "Trace"}
_RESTING = {"Drain", "Clear"}
"""Not called: the one ends the server, the other takes a minute's deadline."""


def header(data: bytes) -> None:
    """A frame's header."""
    parse_header(as_bytes(data), takes_shards=True)


def frame(data: bytes) -> None:
    """A whole frame: *data* over the start of one that is right."""
    changed = _FRAME.copy()
    changed[: len(data)] = np.frombuffer(data[: len(changed)], np.uint8)
    check_frame(changed, _INFO.key)


def bulk_word(data: bytes) -> None:
    """A message of the bulk channel, and what servers read out of it."""
    _, payload_bytes = bulk.unpack_lengths(data[: bulk.LENGTHS.size].ljust(bulk.LENGTHS.size))
    message = bulk.parse(data[bulk.LENGTHS.size :], payload_bytes)
    bulk.error_of(message.failed)


def shm_request(data: bytes) -> None:
    """A packet on the Unix socket: a control message, or a call behind one."""
    request = unix_socket.Request.unpack(data[: unix_socket.HEADER_BYTES])
    unix_socket.unpack_call(request, data[unix_socket.HEADER_BYTES :])


def shm_answer(data: bytes) -> None:
    """A packet that the server answers with."""
    unix_socket.unpack_answer(data)


def shm_reply(data: bytes) -> None:
    """A control message that the server answers with, or its answer to a hello."""
    if len(data) > unix_socket.HEADER_BYTES:
        unix_socket.unpack_greeting(data)
    else:
        unix_socket.unpack_head(data, unix_socket.REPLY_KINDS)


def redis_manifest(data: bytes) -> None:
    """The manifest of a chunk in Redis."""
    parse_manifest(data, _INFO.key)


def redis_reply(data: bytes) -> None:
    """What a Redis says."""
    replying(data).read_replies(1, 1 << 20)


def lmdb_row(data: bytes) -> None:
    """A value of the disk's index."""
    unpack_row(_INFO.key, data)


def lmdb_owner(data: bytes) -> None:
    """A row that says whose an extent is."""
    unpack_owner(owner_key(1), data)


def peer_wanted(data: bytes) -> None:
    """The chunks that another server asks about."""
    bulk.keys_of(pb.FindRequest(key_namespace=data[:16], digests=data[16:]), 64)


def peer_found(data: bytes) -> None:
    """What another server answers of them."""
    bulk.found_infos([_INFO.key, _INFO.key], pb.FindResponse(rows=[data]))


def saved_state(data: bytes) -> None:
    """What a server learned before: the file, and one section under a right checksum."""
    if data[:4] == b"KVHS":
        unpack_sections(data)
    elif data:
        name, unpack = _SECTIONS[data[0] % len(_SECTIONS)]
        unpack({**sections(), name: data[1:]})


def at_rest(data: bytes) -> None:
    """What lies encrypted on a medium: the header, and a cell behind it."""
    if len(data) <= HEADER_BYTES + TAG_BYTES:
        raise ChunkCorruptError(_INFO.key, "there is no cell")
    size = len(data) - HEADER_BYTES - TAG_BYTES
    (cell,) = cells(size)
    try:
        envelope = _KEYS.cipher_for(data[:HEADER_BYTES], _INFO.key, size)
    except UnknownKeyError as error:
        raise ChunkCorruptError(_INFO.key, str(error)) from None
    if not envelope.open(cell, as_bytes(data[HEADER_BYTES:]), np.empty(size, np.uint8)):
        raise ChunkCorruptError(_INFO.key, "it does not open")


def _at_rest_seed() -> bytes:
    text = as_bytes(b"a frame")
    envelope, (cell,) = _KEYS.new(_INFO.key, len(text), "acme"), cells(len(text))
    room = np.empty(len(text) + TAG_BYTES, np.uint8)
    envelope.seal(cell, text, room)
    return envelope.header + room.tobytes()


def codec(data: bytes) -> None:
    """A layer of a frame of some codec: *data* over its start, and all checksums set right."""
    if len(data) < 2:
        raise ChunkCorruptError(_INFO.key, "there is no layer")
    frame = _GOLDEN[data[0] % len(_GOLDEN)].copy()
    header = parse_header(frame)
    index = data[1] % len(header.segments)
    layer = header.segment(frame, index)
    start = as_bytes(data[2:])[: len(layer)]
    layer[: len(start)] = start
    at = FIXED_BYTES + COMPONENT.size * len(header.layout.components) + 32 * index + 24
    frame[at : at + 8] = as_bytes(checksum(layer).to_bytes(8, "little"))
    frame[FIXED_BYTES - 8 : FIXED_BYTES] = 0
    found = checksum(frame[: header.header_bytes])
    frame[FIXED_BYTES - 8 : FIXED_BYTES] = as_bytes(found.to_bytes(8, "little"))
    check_frame(frame)
    read_by = codec_by_id(header.codec_id)
    read_by.check_header(header)
    read_by.decode_into(header, frame, empty_tensors(header.layout))


def chunk_info(data: bytes) -> None:
    """A chunk's description as rows and manifests hold it."""
    unpack_info(data)


def config(data: bytes) -> None:
    """The YAML file of settings."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kvstore.yaml"
        path.write_bytes(data)
        load_config(["--config", str(path)])


class Rpc:
    """Messages to a service without a network: the first byte says which method."""

    def __init__(self) -> None:
        self._schedule = NetworkSchedule(0)
        self._schedule.world.faults.end()
        self._names = sorted(
            name
            for name in _REQUESTS
            if hasattr(self._schedule.service, name) and name not in _RESTING
        )
        self._session_id = 0

    def __call__(self, data: bytes) -> None:
        """Call a method with what follows."""
        if not data:
            return
        service: Any = self._schedule.service
        name = self._names[data[0] % len(self._names)]
        request: Any = _REQUESTS[name].FromString(data[1:])
        if "session_id" in request.DESCRIPTOR.fields_by_name:
            request.session_id = self._session()
        context = _LocalContext()
        if name == "Put":
            service.Put(iter([request]), context)
        elif name in _STREAMED and name != "Trace":
            list(getattr(service, name)(request, context))
        else:
            getattr(service, name)(request, context)

    def _session(self) -> int:
        try:
            self._schedule.world.sessions.get(self._session_id)
        except KVStoreError:
            message = pb.OpenSessionRequest(representation=as_message(pb.Representation, SMALL))
            reply = self._schedule.service.OpenSession(message, None)
            self._session_id = reply.session_id
        return self._session_id


class _LocalContext:
    """What the service asks of gRPC's context."""

    def peer(self) -> str:
        """Return a caller on this host."""
        return "ipv4:127.0.0.1:1"


EXPECTED = (KVStoreError, RedisError, DecodeError)
"""What a parser may raise."""

TARGETS: dict[str, Target] = {
    "header": header,
    "frame": frame,
    "codec": codec,
    "rpc": Rpc(),
    "bulk_word": bulk_word,
    "shm_request": shm_request,
    "shm_answer": shm_answer,
    "shm_reply": shm_reply,
    "redis_manifest": redis_manifest,
    "redis_reply": redis_reply,
    "lmdb_row": lmdb_row,
    "lmdb_owner": lmdb_owner,
    "chunk_info": chunk_info,
    "config": config,
    "peer_wanted": peer_wanted,
    "peer_found": peer_found,
    "saved_state": saved_state,
    "at_rest": at_rest,
}

_LOOKUP = pb.LookupRequest(digests=bytes(32), lease=True)
SEEDS: dict[str, list[bytes]] = {
    "header": [_FRAME.tobytes()],
    "frame": [_FRAME[:600].tobytes()],
    "codec": [
        bytes([number, 0]) + parse_header(one).segment(one, 0)[:64].tobytes()
        for number, one in enumerate(_GOLDEN)
    ],
    "rpc": [bytes([number]) + _LOOKUP.SerializeToString() for number in range(64)],
    "bulk_word": [
        bulk.pack(pb.StreamMessage(request=1, failed=pb.StreamError(name="DeadlineError")))
    ],
    "shm_request": [unix_socket.pack_call("Lookup", _LOOKUP)],
    "shm_answer": [*unix_socket.pack_answer(pb.ReleaseResponse(released=1))],
    "shm_reply": [unix_socket.pack_reply(unix_socket.Reply.ok, 7)],
    "redis_manifest": [_MANIFEST.raw],
    "redis_reply": [b"*2\r\n$3\r\nabc\r\n:1\r\n"],
    "lmdb_row": [pack_row(IndexRow(_INFO, 1, 0, 7))],
    "lmdb_owner": [pack_owner(1, "default")[1]],
    "chunk_info": [],
    "config": [b"cpu_size: 8GiB\ntiers: cpu,disk\n"],
    "peer_wanted": [_INFO.key * 2],
    "peer_found": [bulk.found_rows([_INFO]).rows[0]],
    "saved_state": [
        packed(),
        *(bytes([number]) + sections()[name] for number, (name, _) in enumerate(_SECTIONS)),
    ],
    "at_rest": [_at_rest_seed()],
}


def try_target(name: str, data: bytes) -> bool:
    """Feed *data* to a target; return whether it was taken. Any other error goes through."""
    try:
        TARGETS[name](data)
    except EXPECTED:
        return False
    return True
