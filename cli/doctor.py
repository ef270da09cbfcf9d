"""`kvstore doctor`: what would keep a server from doing well here, and what to do about it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence

from kvstore.cli.access import dial
from kvstore.cli.doctor_checks import CHECKS
from kvstore.cli.doctor_redis import check_directory
from kvstore.cli.finding import Finding, State
from kvstore.cli.status import DEADLINE_MS, ask_status
from kvstore.cli.tables import Grid, open_console
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import KVStoreError
from kvstore.server.settings.settings import Settings

_IDENTITY = ("model_revision", "adapter_digest", "quantization", "tokenizer_digest")


def examine(config: Settings, address: str) -> Iterator[Finding]:
    """Check this machine for *config*, then the server at *address* if one answers."""
    for check in CHECKS:
        yield from check(config)
    yield from check_server(address)


def check_server(address: str) -> Iterator[Finding]:
    """Whether a server answers, how its tiers are, and whether engines name chunks alike."""
    try:
        status = ask_status(address)
    except KVStoreError as error:
        yield Finding("server", "warn", str(error), "start kvstore-server, or give --address")
        return
    yield Finding("server", "ok", f"{status.state}, version {status.version}")
    for tier in status.tiers:
        state: State = "warn" if tier.reason else "ok"
        fix = "mend what the reason names; the tier comes back by itself" if tier.reason else ""
        yield Finding(f"tier {tier.name}", state, tier.reason or tier.state, fix)
    damaged = status.counters.get("corrupt_chunks", 0)
    if damaged:
        yield Finding("damage", "warn", f"{damaged} damaged copies", "look at the media")
    yield from check_directory(status)
    yield from _namespaces(address)


def _namespaces(address: str) -> Iterator[Finding]:
    connection = dial(address, DEADLINE_MS)
    try:
        request = pb.ExplainRequest(spaces=True)
        reply = connection.call("Explain", request, DEADLINE_MS, pb.ExplainResponse)
    except KVStoreError as error:
        yield Finding("engines", "ok", f"not shown here: {error}")
        return
    finally:
        connection.close()
    by_model: dict[str, list[pb.Representation]] = defaultdict(list)
    for space in reply.spaces:
        by_model[space.representation.model_id].append(space.representation)
    for model, kinds in by_model.items():
        fields = [name for name in _IDENTITY if len({getattr(k, name) for k in kinds}) > 1]
        if len(kinds) > 1 and not fields:
            fields = ["layers, data types or rope"]
        if fields:
            saw = f"{len(kinds)} identities, which share nothing: {', '.join(fields)} differ"
            fix = "give engines that should share the same values; kvstore explain --spaces"
            yield Finding(f"engines of {model}", "warn", saw, fix)
        else:
            yield Finding(f"engines of {model}", "ok", "one identity")


def findings_as_json(findings: Sequence[Finding]) -> str:
    """Return *findings* as JSON."""
    rows = [
        {"check": one.check, "state": one.state, "saw": one.saw, "fix": one.fix} for one in findings
    ]
    return json.dumps({"checks": rows, "failed": has_failed(findings)}, indent=2)


def has_failed(findings: Sequence[Finding]) -> bool:
    """Whether a server would not start, or not do its work, as things are."""
    return any(one.state == "fail" for one in findings)


def print_findings(findings: Sequence[Finding]) -> None:
    """Print *findings* as a table."""
    table = Grid("check", "state", "saw", "what to do", wraps=2)
    for one in findings:
        table.add_row(one.check, one.state, one.saw, one.fix)
    open_console().print(table)
