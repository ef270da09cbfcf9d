"""`kvstore drain`: a server told to take nothing new and to save what it holds."""

from __future__ import annotations

from kvstore.cli.access import dial
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError

MAX_DEADLINE_S = 3600.0


def ask_drain(address: str, deadline_s: float) -> bool:
    """Drain the server at *address*; return whether all that was in memory is saved.

    Raises InvalidRequestError, KVStoreErrors of the server.
    """
    if not 0 < deadline_s <= MAX_DEADLINE_S:
        raise InvalidRequestError(
            "within", deadline_s, f"give more than 0, {MAX_DEADLINE_S:g} s at most"
        )
    deadline_ms = max(1, round(deadline_s * 1000))
    connection = dial(address, deadline_ms)
    try:
        request = pb.DrainRequest(deadline_ms=deadline_ms)
        return connection.call("Drain", request, deadline_ms, pb.DrainResponse).clean
    finally:
        connection.close()
