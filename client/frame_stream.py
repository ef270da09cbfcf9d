"""A FrameStream: one TCP connection of a session, over which whole frames come and go."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import numpy as np
from xxhash import xxh3_64

from kvstore.client.connection import SLACK_S
from kvstore.client.session import SessionTerms
from kvstore.proto import bulk
from kvstore.proto.buffers import Bytes, as_bytes
from kvstore.proto.bulk_reading import Payload
from kvstore.proto.errors import (
    DeadlineError,
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    TierUnavailableError,
)
from kvstore.proto.stream_wire import StreamWire

T = TypeVar("T")

MAX_DIGESTS_BYTES = bulk.MAX_PAYLOAD_BYTES
"""Of one get: a server takes no more over a stream."""
_SKIP_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Entrance:
    """Where a server's streams are, ``tcp://host:port`` or empty, and the word that lets us in.

    ``certificate`` in DER: TLS with that one alone; empty: in plain text.
    """

    where: str
    certificate: bytes
    word: bulk.Attach | bulk.Guest

    @classmethod
    def of(cls, where: str, terms: SessionTerms) -> Entrance:
        """Return that of our own session's server."""
        word = bulk.Attach(0, terms.session_id, terms.attach_token)
        return cls(where, terms.stream_certificate, word)


class FrameStream:
    """Connected and attached at birth; one get or put at a time, used by one thread.

    What ZeroMQ would keep goes from the socket to its place, and from its place to the socket.
    Raises TierUnavailableError or DeadlineError when *entrance* does not let us in within
    *within_s* seconds, the server's own errors. A request that does not come to its end, or of
    which nothing comes for *silence_s*, leaves it of no use.
    """

    def __init__(
        self,
        entrance: Entrance,
        is_closing: Callable[[], bool],
        within_s: float,
        silence_s: float = math.inf,
    ) -> None:
        self._is_closing = is_closing
        self._silence_s = silence_s
        self._is_given_up = False
        self._requests = 0
        self._heard: tuple[bulk.Word, Payload | None] | None = None
        self._wire = _wire(entrance.where, entrance.certificate, within_s)
        try:
            deadline = time.monotonic() + within_s
            self.send(entrance.word, deadline)
            word, _ = self.receive(deadline)
            if not isinstance(word, bulk.Attached):
                raise InvalidRequestError("kind", type(word).__name__, "not an answer to attach")
        except KVStoreError:
            self.close()
            raise

    def next_request(self) -> int:
        """Return a number that no earlier request of this stream had."""
        self._requests += 1
        return self._requests

    def send(self, word: bulk.Word, deadline: float, payload: bytes | None = None) -> None:
        """Send a message. Raises as ``receive``."""
        self._by(deadline)
        self._try(deadline, lambda: self._wire.send(word, payload))

    def send_part(self, word: bulk.Part, pieces: Sequence[Bytes], deadline: float) -> None:
        """Send a part of what is put, from where it lies. Raises as ``receive``."""
        self._by(deadline)
        self._try(deadline, lambda: self._wire.send_pieces(word, pieces))

    def has_more(self) -> bool:
        """Whether there is a message to receive, or the server hung up."""
        return self._wire.has_more()

    def hear(self, deadline: float) -> None:
        """Wait for the next message, which ``receive`` will return. Raises as that."""
        self._heard = self.receive(deadline)

    def receive(self, deadline: float) -> tuple[bulk.Word, Payload | None]:
        """Return the next message; a part's payload is still to come.

        Raises DeadlineError, TierUnavailableError when the server hung up, InvalidRequestError for
        what is no message of ours, and InvalidFrameError for a part that nobody asked for.
        """
        if self._heard is not None:
            heard, self._heard = self._heard, None
            return heard
        self._by(deadline)
        word, size_bytes = self._try(deadline, self._wire.receive)
        if isinstance(word, bulk.Part):
            if word.request != self._requests:
                raise InvalidFrameError("request", word.request, f"{self._requests} was asked")
            return word, _Coming(self, size_bytes, deadline)
        payload = self._try(deadline, lambda: self._wire.take(size_bytes))
        if isinstance(word, bulk.Failed) and not word.request:  # of the session, not of a request
            raise bulk.unpack_failure(payload)
        return word, as_bytes(payload)

    def grant(self, request: int, credit_bytes: int, deadline: float) -> None:
        """Say nothing: the kernel's buffers are the credit."""

    def cancel(self, request: int, deadline: float) -> None:
        """Hang up: what is on its way cannot be called back."""
        raise TierUnavailableError("server", "a get was left before its end")

    def fill(self, out: Bytes, deadline: float) -> None:
        """Fill *out* with the next bytes of a part. Raises as ``receive``."""
        self._try(deadline, lambda: self._wire.fill(out))

    def fill_summed(self, out: Bytes, digest: xxh3_64, deadline: float) -> None:
        """Do the same, and add the bytes to *digest*."""
        self._try(deadline, lambda: self._wire.fill_summed(out, digest))

    def give_up(self) -> None:
        """Have whoever waits on this stream wait no more. For any thread."""
        self._is_given_up = True
        self._wire.hang_up()

    def is_broken(self) -> bool:
        """Whether the server hung up, said what nobody asked for, or is waited for no more."""
        return self._is_given_up or self._wire.fileno() < 0 or self._wire.has_more()

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._wire.close()

    def _by(self, deadline: float) -> None:
        left_s = max(0.001, deadline - time.monotonic())
        self._wire.patience(min(left_s, self._silence_s), deadline)

    def _try(self, deadline: float, call: Callable[[], T]) -> T:
        try:
            return call()
        except (DeadlineError, TierUnavailableError) as error:
            if self._is_closing():
                raise KVStoreError("the client is closed") from None
            if self._is_given_up:
                raise DeadlineError("the server hangs") from None
            # Its own deadline passes a little before ours: it hangs up in the midst of a frame.
            if time.monotonic() >= deadline - SLACK_S:
                raise DeadlineError("the server did not answer in time over TCP") from None
            raise error


class _Coming:
    """The payload of a part that is to be received."""

    def __init__(self, stream: FrameStream, size_bytes: int, deadline: float) -> None:
        self._stream = stream
        self._size_bytes = size_bytes
        self._deadline = deadline

    def __len__(self) -> int:
        return self._size_bytes

    def into(self, out: Bytes) -> None:
        """Receive the next bytes where they are to stay."""
        self._stream.fill(out, self._deadline)

    def summed(self, out: Bytes, digest: xxh3_64) -> None:
        """The same, and add them to *digest*."""
        self._stream.fill_summed(out, digest, self._deadline)

    def skip(self, size_bytes: int) -> None:
        """Receive so many for nobody."""
        while size_bytes:
            size = min(size_bytes, _SKIP_BYTES)
            self._stream.fill(np.empty(size, np.uint8), self._deadline)
            size_bytes -= size


def _wire(where: str, certificate: bytes, within_s: float) -> StreamWire:
    url = urlsplit(where)
    try:
        link = socket.create_connection((url.hostname or "", url.port or 0), within_s)
    except (OSError, ValueError) as error:
        raise TierUnavailableError("server", f"{where}: {error}") from None
    try:
        if certificate:
            from kvstore.proto.stream_tls import tls_to

            link = tls_to(certificate).wrap_socket(link)
        return StreamWire(
            link, where, time.monotonic, is_encrypted=bool(certificate), whose="server"
        )
    except (OSError, ValueError) as error:
        link.close()
        raise TierUnavailableError("server", f"{where}: {error}") from None
