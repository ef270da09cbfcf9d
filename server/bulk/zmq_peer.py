"""A peer of the bulk channel: one connection, what of it is at work, and who let it in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.proto import bulk
from kvstore.server.bulk.bulk_work import GetWork, PutWork
from kvstore.server.sessions import Session

if TYPE_CHECKING:
    import zmq


METHODS: dict[type[bulk.Word], str] = {
    bulk.Attach: "Attach",
    bulk.Get: "Get",
    bulk.Credit: "Get",
    bulk.Cancel: "Get",
    bulk.Find: "Lookup",
    bulk.Put: "Put",
    bulk.Part: "Put",
    bulk.Finish: "Put",
}
"""What of the service each word is of, in the audit log."""


@dataclass(slots=True, eq=False)
class Peer:
    """``identity`` is ZeroMQ's name for it, ``origin`` the address that it came from."""

    identity: bytes
    session: Session
    origin: str = ""
    gets: dict[int, GetWork] = field(default_factory=dict)
    puts: dict[int, PutWork] = field(default_factory=dict)
    desk_work: dict[int, bulk.Word] = field(default_factory=dict)
    """What of it the desk for other servers has let in."""

    @property
    def requests(self) -> set[int]:
        """Requests that have not ended."""
        return self.gets.keys() | self.puts.keys() | self.desk_work.keys()


def origin_of(frame: zmq.Frame) -> str:
    """Return where a message came from, as far as ZeroMQ says so."""
    import zmq

    try:
        return f"zmq:{frame.get('Peer-Address')}"
    except (zmq.ZMQError, ValueError):
        return "zmq"
