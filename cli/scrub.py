"""`kvstore scrub`: has a server verify what its tiers hold, and follows it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence

from kvstore.cli.access import dial
from kvstore.cli.status import DEADLINE_MS
from kvstore.client.connection import Connection
from kvstore.proto import kvstore_pb2 as pb

EVERY_S = 0.5


def run_scrub(
    address: str,
    tiers: Sequence[str],
    bytes_per_s: int,
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[pb.ScrubResponse]:
    """Begin a pass, or join the one that runs; yield how far it is until it ends."""
    connection = dial(address, DEADLINE_MS)
    try:
        request = pb.ScrubRequest(begin=True, tiers=tiers, bytes_per_s=bytes_per_s)
        reply = _ask(connection, request)
        yield reply
        while reply.running:
            wait(EVERY_S)
            reply = _ask(connection, pb.ScrubRequest())
            yield reply
    finally:
        connection.close()


def _ask(connection: Connection, request: pb.ScrubRequest) -> pb.ScrubResponse:
    return connection.call("Scrub", request, DEADLINE_MS, pb.ScrubResponse)


def scrub_as_json(reply: pb.ScrubResponse) -> str:
    """Return how a pass ended, as JSON."""
    names = (
        "total_chunks", "checked_chunks", "checked_bytes", "damaged_chunks", "unread_chunks",
        "passes",
    )  # fmt: skip
    return json.dumps({name: getattr(reply, name) for name in names})


def scrub_line(reply: pb.ScrubResponse) -> str:
    """Return one line of how far a pass is."""
    return (
        f"{reply.checked_chunks} of {reply.total_chunks} chunks, "
        f"{reply.checked_bytes / 2**20:.1f} MiB: {reply.damaged_chunks} damaged, "
        f"{reply.unread_chunks} not read"
    )
