"""A Stranger: a connection that has not authenticated yet. It is read, and never waited for."""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvstore.proto.stream_wire import word_bytes, word_of

if TYPE_CHECKING:
    import socket

    from kvstore.proto import bulk


class Stranger:
    """Owns *link*, over TLS with *tls*; *origin* is where it came from, *until* when it must end.

    Used by one thread at a time.
    """

    def __init__(
        self, link: socket.socket, tls: ssl.SSLContext | None, origin: str, until: float
    ) -> None:
        link.setblocking(False)
        self._shakes_hands = tls is not None
        self.link: socket.socket = link
        if tls is not None:
            self.link = tls.wrap_socket(link, server_side=True, do_handshake_on_connect=False)
        self.origin = origin
        self.until = until
        self.is_gone = False
        """Hung up on for another's sake; what was read of it before is nobody's."""
        self._begun = b""

    def word(self) -> bulk.Word | None:
        """Take in what came. Return the first word; None while it is not whole.

        Raises OSError when it hung up or TLS fails, InvalidRequestError for what is no word.
        """
        try:
            if self._shakes_hands:
                assert isinstance(self.link, ssl.SSLSocket)
                self.link.do_handshake()
                self._shakes_hands = False
            while (missing := word_bytes(self._begun) - len(self._begun)) > 0:
                data = self.link.recv(missing)
                if not data:
                    raise ConnectionError("hung up")
                self._begun += data
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        return word_of(self._begun)[0]


def least_welcome(strangers: Iterable[Stranger]) -> Stranger | None:
    """Return who goes when there is no room: of the origin with the most, who came first."""
    here = list(strangers)
    counts = Counter(one.origin for one in here)
    return max(here, key=lambda one: (counts[one.origin], -one.until), default=None)
