"""`kvstore doctor`: what would keep a server from doing well here, and what to do about it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import typer

from kvstore.cli.app import AsJson, command
from kvstore.cli.output import Grid, show
from kvstore.cli.selection import fetch_namespaces
from kvstore.cli.server import directory_line, fetch_status
from kvstore.proto.errors import KVStoreError

if TYPE_CHECKING:  # help is to load none of the product
    from kvstore.client.server_state import ServerStatus
    from kvstore.proto import kvstore_pb2 as pb
    from kvstore.server.settings.settings import Settings

_IDENTITY = ("model_revision", "adapter_digest", "quantization", "tokenizer_digest")

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; ``fix`` is empty when it is ok."""

    check: str
    state: State
    saw: str
    fix: str = ""


def judged(is_bad: bool, check: str, saw: str, fix: str, state: State = "warn") -> Finding:
    """Return the result of a check: *state* and how to fix it where it *is_bad*, else ok."""
    return Finding(check, state, saw, fix) if is_bad else Finding(check, "ok", saw)


@command(
    "doctor",
    exits="0 1 2 3",
    example="kvstore doctor --tiers cpu,disk",
    section="Look",
    as_server=True,
)
def doctor(address: str, context: typer.Context, as_json: AsJson = False) -> None:
    """Check this machine, and the server if it runs; takes kvstore-server's flags too.

    Give it the flags or the --config of that server. Exits with 1 when something fails.
    """
    from kvstore.cli.doctor_checks import CHECKS
    from kvstore.server.settings.settings import load_config

    config = load_config(context.args)
    found = [one for check in CHECKS for one in check(config)]
    found += check_server(address, config)
    table = Grid("check", "state", "finding", "fix", wraps=2)
    for one in found:
        table.add_row(one.check, one.state, one.saw, one.fix)
    failed = any(one.state == "fail" for one in found)
    data = {"checks": list(map(asdict, found)), "failed": failed}
    show(data, [table], as_json, held=not failed)


# --- the server


def check_server(address: str, config: Settings) -> Iterator[Finding]:
    """Whether a server answers, how its tiers are, and whether engines name chunks alike."""
    try:
        status = fetch_status(address)
    except KVStoreError as error:
        yield Finding("server", "warn", str(error), "start kvstore-server, or give --address")
        return
    yield Finding("server", "ok", f"{status.state}, version {status.version}")
    yield from check_settings(status, config)
    for tier in status.tiers:
        name, saw = f"tier {tier.name}", tier.reason or tier.state
        yield judged(bool(tier.reason), name, saw, "fix that; the tier recovers by itself")
    damaged = status.counters.get("corrupt_chunks", 0)
    if damaged:
        yield Finding("damage", "warn", f"{damaged} damaged copies", "look at the media")
    yield from check_directory(status)
    try:
        yield from _identities(fetch_namespaces(address))
    except KVStoreError as error:
        yield Finding("engines", "ok", f"not shown here: {error}")


def check_settings(status: ServerStatus, config: Settings) -> Iterator[Finding]:
    """Whether the server has the tiers that the machine was checked for."""
    disk_bytes = sum(folder.capacity_bytes for folder in config.disk)
    known = {"cpu": config.cpu_size, "disk": disk_bytes}
    theirs = {tier.name for tier in status.tiers}
    differ = sorted(theirs ^ set(config.tiers))
    differ += [
        tier.name
        for tier in status.tiers
        if tier.name in config.tiers and tier.capacity_bytes and known.get(tier.name)
        and not 0.8 < tier.capacity_bytes / known[tier.name] < 1.25
    ]  # fmt: skip
    if differ:
        saw = f"this machine was checked for other settings than the server's: {', '.join(differ)}"
        yield Finding("settings", "warn", saw, "give doctor the server's flags, or its --config")


def _identities(spaces: list[pb.KnownSpace]) -> Iterator[Finding]:
    by_model: dict[str, list[pb.Representation]] = defaultdict(list)
    for space in spaces:
        by_model[space.representation.model_id].append(space.representation)
    for model, kinds in by_model.items():
        name = f"engines of {model}"
        fields = [name for name in _IDENTITY if len({getattr(k, name) for k in kinds}) > 1]
        if len(kinds) == 1:
            yield Finding(name, "ok", "one identity")
            continue
        differ = ", ".join(fields) or "layers, data types or rope"
        saw = f"{len(kinds)} identities, which share nothing: {differ} differ"
        fix = "give engines that should share the same values; kvstore ls --spaces"
        yield Finding(name, "warn", saw, fix)


def check_directory(status: ServerStatus) -> Iterator[Finding]:
    """How the server stands among other nodes, if it is to be among them."""
    one = status.directory
    if one is None:
        return
    fixes = {
        "taken": "give each node a --node-id of its own",
        "unknown": "fix what the reason names; the server joins by itself",
        "full": "so many nodes need a Redis of another --redis-prefix",
    }
    fix = fixes.get(one.standing, fixes["unknown"] if one.failure else "")
    saw = directory_line(one).removeprefix("directory: ")
    yield Finding("directory", "warn" if fix else "ok", saw, fix)
