"""A server's status: asked for without a session, shown as tables or JSON."""

from __future__ import annotations

import json

from kvstore.cli.access import dial
from kvstore.cli.tables import Grid, open_console
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    DeadlineError,
    KVStoreError,
    PermissionDeniedError,
    TierUnavailableError,
)

DEADLINE_MS = 2000
HIDDEN = "sessions, leases, sizes and counters are hidden: they need the role admin"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def ask_status(address: str) -> pb.StatusResponse:
    """Return the state of the server at *address*. Raises KVStoreErrors within two seconds."""
    connection = dial(address, DEADLINE_MS)
    try:
        return connection.call("Status", pb.StatusRequest(), DEADLINE_MS, pb.StatusResponse)
    except (TierUnavailableError, DeadlineError) as error:
        reason = str(error).rpartition(": ")[2]  # the end of gRPC's report of all it tried
        raise KVStoreError(f"no kvstore-server answers at {address}: {reason}") from None
    finally:
        connection.close()


def is_hidden(reply: pb.StatusResponse) -> bool:
    """Whether the reply has no figures, as the caller has not the role admin."""
    return not reply.counters


def ask_figures(address: str) -> pb.StatusResponse:
    """Do what ``ask_status`` does. Raises PermissionDeniedError where the figures are hidden."""
    reply = ask_status(address)
    if is_hidden(reply):
        raise PermissionDeniedError(f"{address}: {HIDDEN}")
    return reply


def status_as_json(address: str, reply: pb.StatusResponse) -> str:
    """Return *reply* as JSON; what is hidden is null."""
    figures = ("capacity_bytes", "used_bytes", "chunks")
    fields = ("name", *figures, "codec", "state", "reason")
    hidden = is_hidden(reply)
    secret = figures if hidden else ()
    status = {
        "address": address,
        "version": reply.version,
        "state": reply.state,
        "uptime_s": reply.uptime_s,
        "sessions": None if hidden else reply.sessions,
        "leases": None if hidden else reply.leases,
        "socket_path": None if hidden else reply.socket_path,
        "tiers": [
            {name: None if name in secret else getattr(tier, name) for name in fields}
            for tier in reply.tiers
        ],
        "directory": _directory_as_dict(reply),
        "counters": None if hidden else dict(sorted(reply.counters.items())),
    }
    return json.dumps(status, indent=2)


def _directory_as_dict(reply: pb.StatusResponse) -> dict[str, object] | None:
    if not reply.HasField("directory"):
        return None
    one = reply.directory
    names = ("node_id", "incarnation", "grpc_address", "bulk_address")
    return {
        "node_id": one.node_id,
        "incarnation": one.incarnation,
        "standing": one.standing,
        "failure": one.failure,
        "announced": one.announced,
        "nodes": [{name: getattr(node, name) for name in names} for node in one.nodes],
    }


def print_status(address: str, reply: pb.StatusResponse) -> None:
    """Print *reply* as tables."""
    console = open_console()
    hidden = is_hidden(reply)
    held = "" if hidden else f", {reply.sessions} sessions, {reply.leases} leases"
    console.print(
        f"{address}: {reply.state}, version {reply.version}, up {reply.uptime_s:.0f} s{held}",
    )
    tiers = Grid("tier", "used", "of", "chunks", "codec", "state")
    for tier in reply.tiers:
        tiers.add_row(
            tier.name,
            "-" if hidden else readable_size(tier.used_bytes),
            "-" if hidden else readable_size(tier.capacity_bytes),
            "-" if hidden else str(tier.chunks),
            tier.codec,
            f"{tier.state}: {tier.reason}" if tier.reason else tier.state,
        )
    console.print(tiers)
    if reply.HasField("directory"):
        console.print(directory_line(reply.directory))
    if hidden:
        console.print(HIDDEN)
        return
    counters = Grid("counter", "since the start")
    for name, value in sorted(reply.counters.items()):
        counters.add_row(name, str(value))
    console.print(counters)


def directory_line(directory: pb.Directory) -> str:
    """Return how a server stands among other nodes, and whom it sees."""
    nodes = ", ".join(f"{node.node_id} at {node.grpc_address}" for node in directory.nodes)
    standing = {"taken": "another node has its id", "full": "the directory is full"}
    why = directory.failure or standing.get(directory.standing, directory.standing)
    is_up = directory.standing == "known" and not directory.failure
    state = f"{directory.announced} chunks named" if is_up else f"out of it: {why}"
    return f"directory: {directory.node_id}, {state}; sees {nodes or 'no other node'}"


def readable_size(size_bytes: int) -> str:
    """Return *size_bytes* to one decimal in the unit that suits it."""
    value, unit = float(size_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{size_bytes} B"
