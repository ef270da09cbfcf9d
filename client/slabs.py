"""Slabs: the server's sealed memory, mapped read-only by a client of the same host."""

from __future__ import annotations

import mmap
import os
import socket
import threading

import numpy as np

from kvstore.client.frames import OpenFile
from kvstore.proto import unix_socket
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    TierUnavailableError,
)
from kvstore.proto.unix_socket import Place, Reach

_GENERATION_BYTES = 8
_MEMORY = int(Reach.memory)
_MAX_SLABS = 4096
_MAX_FILES = 256


class SlabMap:
    """One slab: its bytes, and the generations among them as words of eight bytes."""

    __slots__ = ("_size_bytes", "bytes", "data", "words")

    def __init__(self, memory: mmap.mmap) -> None:
        self.data: Bytes = np.frombuffer(memory, np.uint8)
        self.bytes = memoryview(memory)
        """The same as ``data``, for who compares a few of them."""
        self.words = self.bytes[: len(memory) // 8 * 8].cast("Q")
        self._size_bytes = len(memory)

    def check(self, place: Place) -> None:
        """Raise InvalidRequestError unless *place* lies within, LeaseExpiredError once reused."""
        offset = place.offset
        stop = offset + place.size_bytes
        if offset < _GENERATION_BYTES or offset & 7 or stop > self._size_bytes:
            raise InvalidRequestError("place", (offset, stop), f"slab has {self._size_bytes} bytes")
        self.confirm(offset, place.generation)

    def confirm(self, offset: int, generation: int) -> None:
        """Raise LeaseExpiredError unless the frame at *offset* is still of this *generation*."""
        if self.words[offset // 8 - 1] != generation:
            raise LeaseExpiredError("the chunk was replaced while it was read; look it up again")


class Slabs:
    """Maps of slabs by id, and files of the disk tier, asked for when first needed. Thread-safe.

    *link* is an attached connection to the server's Unix socket, with a timeout; it stays its
    owner's to close.
    """

    def __init__(self, link: socket.socket) -> None:
        self._socket = link
        self._slabs: dict[int, SlabMap] = {}
        self._files: dict[int, OpenFile] = {}
        # One question at a time on the socket; also guards the two above.
        self._lock = threading.Lock()

    def reach(self, place: Place) -> SlabMap:
        """Return the slab that *place* lies in, checked.

        Raises LeaseExpiredError when its memory was reused, InvalidRequestError for a place
        outside its slab, TierUnavailableError when the server does not give the slab.
        """
        if place.reach != _MEMORY:
            raise InvalidRequestError("reach", place.reach, "this client reads memory only")
        slab = self._slabs.get(place.number)
        if slab is None:
            slab = self.slab(place.number)
        slab.check(place)
        return slab

    def slab(self, slab_id: int) -> SlabMap:
        """Return a whole slab. Raises TierUnavailableError."""
        with self._lock:
            slab = self._slabs.get(slab_id)
            if slab is None:
                if len(self._slabs) >= _MAX_SLABS:
                    self._slabs.clear()
                slab = self._slabs[slab_id] = self._ask_slab(slab_id)
            return slab

    def file(self, extent: int) -> OpenFile:
        """Return a file of the disk tier, open for reading. Raises TierUnavailableError."""
        with self._lock:
            file = self._files.get(extent)
            if file is None:
                if len(self._files) >= _MAX_FILES:
                    self._files.clear()
                file = self._files[extent] = OpenFile(*self._ask(unix_socket.Op.extent, extent))
            return file

    def give(self, request: unix_socket.Request, descriptor: int) -> unix_socket.Reply:
        """Give the server a descriptor of ours; return its answer. Raises TierUnavailableError."""
        with self._lock:
            try:
                socket.send_fds(self._socket, [request.pack()], [descriptor])
                return unix_socket.unpack_reply(self._socket.recv(unix_socket.HEADER_BYTES))[0]
            except (OSError, InvalidRequestError) as error:
                self._socket.close()
                raise TierUnavailableError("shm", f"the server hung up: {error}") from None

    def _ask_slab(self, slab_id: int) -> SlabMap:
        descriptor, size_bytes = self._ask(unix_socket.Op.slab, slab_id)
        try:
            return SlabMap(mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ))
        finally:
            os.close(descriptor)

    def _ask(self, op: unix_socket.Op, number: int) -> tuple[int, int]:
        """Return a descriptor, ours to close, and its size."""
        try:
            self._socket.send(unix_socket.Request(op, number).pack())
            message, files, _, _ = socket.recv_fds(self._socket, unix_socket.HEADER_BYTES, 1)
        except OSError as error:
            # An answer that is only late must not be taken for that of the next question.
            self._socket.close()
            raise TierUnavailableError("shm", f"the server hung up: {error}") from None
        try:
            reply, size_bytes = unix_socket.unpack_reply(message)
            if reply is not unix_socket.Reply.ok or len(files) != 1:
                raise TierUnavailableError("shm", f"{op.name} {number}: {reply.name}")
        except KVStoreError:
            for descriptor in files:
                os.close(descriptor)
            raise
        return files[0], size_bytes

    def leave(self) -> None:
        """In a child, once the socket is closed: forget every map and file."""
        self._lock = threading.Lock()  # another thread may have had it
        self.close()

    def close(self) -> None:
        """Forget every map and file; views and frames that are held keep theirs. Idempotent."""
        with self._lock:
            self._slabs.clear()
            self._files.clear()
