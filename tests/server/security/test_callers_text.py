"""What callers say of themselves: text that has a shape, identities that have a size."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import ProcessMaker, ServerMaker
from helpers.local_server import DEADLINE_MS, LocalServer, open_session
from helpers.prompts import SMALL

from kvstore.cli.chunks import fetch_namespaces
from kvstore.client.connection import Connection
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.messages import as_message
from kvstore.proto.types import (
    MAX_FACTOR_CHARS,
    MAX_IDENTITY_CHARS,
    MAX_LAYER_GROUPS,
    MAX_LAYERS,
    MAX_ROPE_FACTORS,
)
from kvstore.server.api.service import MAX_CLIENT_CHARS
from kvstore.server.index.known_models import MAX_SPACES

SESSIONS = 1_000
MOST_GROWTH_BYTES = 32 << 20
WIDEST = "\N{MUSICAL SYMBOL G CLEF}"
"""Four bytes a character, in memory and on the wire."""
TEXTS = ("model_id", "model_revision", "adapter_digest", "quantization", "tokenizer_digest")


def make_longest() -> pb.Representation:
    kind = as_message(pb.Representation, SMALL)
    for name in TEXTS:
        setattr(kind, name, "x".ljust(MAX_IDENTITY_CHARS, WIDEST))
    kind.rope.scaling = "scaling".ljust(MAX_FACTOR_CHARS, WIDEST)
    del kind.rope.factors[:]
    for at in range(MAX_ROPE_FACTORS):
        kind.rope.factors.add(name=f"{at:04}".ljust(MAX_FACTOR_CHARS, "x"), value=at / 7)
    group = kind.layer_groups[0]
    del kind.layer_groups[:]
    for at in range(MAX_LAYER_GROUPS):
        group.layer_ids[:] = range(at, MAX_LAYERS, MAX_LAYER_GROUPS)
        group.kv_heads, group.head_dim = 1000 + at, 1000
        kind.layer_groups.append(group)
    return kind


_LONGEST = make_longest()


def longest(number: int) -> pb.Representation:
    """Return an identity with as much of everything as there may be, another for each *number*."""
    _LONGEST.model_id = f"{number:08}".ljust(MAX_IDENTITY_CHARS, WIDEST)
    return _LONGEST


GROUP = as_message(pb.Representation, SMALL).layer_groups[0]


def factors(*names: str) -> pb.Representation:
    return pb.Representation(rope=pb.Rope(factors=[pb.RopeFactor(name=name) for name in names]))


def groups(*layers: Iterable[int], **fields: Any) -> pb.Representation:
    """Return groups of these layers, which are like that of the small model but for *fields*."""
    found = pb.Representation(layer_groups=[GROUP] * len(layers))
    for group, ids in zip(found.layer_groups, layers, strict=True):
        group.layer_ids[:] = ids
        group.MergeFrom(pb.LayerGroup(**fields))
    return found


SPOILT: list[tuple[str, pb.Representation]] = [
    ("model_id", pb.Representation(model_id="m" * (MAX_IDENTITY_CHARS + 1))),
    ("model_id", pb.Representation(model_id="m" * 1_800_000)),
    ("model_id", pb.Representation(model_id=" ")),
    ("model_revision", pb.Representation(model_revision="m\n\x1b[2Jcleared")),
    ("tokenizer_digest", pb.Representation(tokenizer_digest="abc\u202edcba")),
    ("rope.scaling", pb.Representation(rope=pb.Rope(scaling="s" * (MAX_FACTOR_CHARS + 1)))),
    ("rope.factors", factors(*map("{:04}".format, range(MAX_ROPE_FACTORS + 1)))),
    ("rope.factors", factors("f" * (MAX_FACTOR_CHARS + 1))),
    ("rope.factors", factors("\u03b2")),
    ("layer_ids", groups(range(200_000))),
    ("layer_ids", groups([0, MAX_LAYERS])),
    ("layer_groups", groups(*([at] for at in range(20_000)))),
    ("layer_groups", groups([1], kind=99)),
]
"""What of an identity is refused by which name."""


def test_an_identity_of_no_shape_or_a_client_s_name_that_does_not_print_opens_no_session(
    server: LocalServer,
) -> None:
    asked: list[tuple[str, pb.OpenSessionRequest]] = [("rope", pb.OpenSessionRequest())]
    for field, change in SPOILT:
        request = pb.OpenSessionRequest(representation=as_message(pb.Representation, SMALL))
        request.representation.MergeFrom(change)
        asked.append((field, request))
    for name in ("c" * (MAX_CLIENT_CHARS + 1), "a\x1b[31mRED", "a\nFAKE", "\u2066"):
        kind = as_message(pb.Representation, SMALL)
        asked.append(("client", pb.OpenSessionRequest(representation=kind, client=name)))
    connection = server.dial()
    for field, request in asked:
        error = InvalidRequestError if field == "client" else ModelError
        with pytest.raises(error, match=field) as refused:
            connection.call("OpenSession", request, DEADLINE_MS, pb.OpenSessionResponse)
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 400
    assert len(server.node.sessions) == 0


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (kib,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))
    return 1024 * int(kib)


def miss(connection: Connection, number: int) -> int:
    """Open a session with a longest identity and miss a chunk in it; return its id."""
    client = "c".ljust(MAX_CLIENT_CHARS, WIDEST)
    opening = pb.OpenSessionRequest(representation=longest(number), client=client)
    terms = connection.call("OpenSession", opening, DEADLINE_MS, pb.OpenSessionResponse)
    look = pb.LookupRequest(session_id=terms.session_id, digests=bytes(16))
    connection.call("Lookup", look, DEADLINE_MS, pb.LookupResponse)
    return terms.session_id


def test_a_thousand_sessions_with_the_longest_identities_cost_32_mib_at_most(
    server_process: ProcessMaker,
) -> None:
    server = server_process("--cpu", "16MiB", "--tiers", "cpu")
    server.start()
    with closing(Connection(server.address, retry_after_ms=1)) as connection:
        for number in range(20):
            session_id = miss(connection, number)
            closing_it = pb.CloseSessionRequest(session_id=session_id)
            connection.call("CloseSession", closing_it, DEADLINE_MS, pb.CloseSessionResponse)
        before = resident_bytes(server.pid)
        for number in range(SESSIONS):
            miss(connection, number)
        grown = resident_bytes(server.pid) - before
    assert grown <= MOST_GROWTH_BYTES, f"{grown / (1 << 20):.1f} MiB"


@pytest.fixture
def crowded(make_server: ServerMaker) -> LocalServer:
    """A server that knows as many identities as it remembers, each the longest."""
    server = make_server()
    connection = server.dial()
    for number in range(MAX_SPACES):
        miss(connection, number)
    return server


def test_all_identities_are_listed_though_one_message_does_not_hold_them(
    crowded: LocalServer,
) -> None:
    reply = crowded.dial().call("Spaces", pb.SpacesRequest(), DEADLINE_MS, pb.SpacesResponse)
    assert 0 < len(reply.spaces) < MAX_SPACES
    assert len(reply.spaces) + reply.left == MAX_SPACES
    assert len({one.key_namespace for one in fetch_namespaces(crowded.address)}) == MAX_SPACES


def test_an_explanation_that_no_message_holds_is_cut_and_says_by_how_much(
    crowded: LocalServer,
) -> None:
    request = pb.ExplainRequest(recent=10_000)
    reply = crowded.dial().call("Explain", request, DEADLINE_MS, pb.ExplainResponse)
    assert 0 < len(reply.recent) < MAX_SPACES
    assert len(reply.recent) + reply.left_out == MAX_SPACES


def test_a_count_with_a_name_of_a_megabyte_leaves_nothing(server: LocalServer) -> None:
    ask = server.dial()
    counts = {"x" * 1_000_000: 1, "hits": 2}
    beat = pb.HeartbeatRequest(session_id=open_session(ask).session_id, counts=counts)
    ask.call("Heartbeat", beat, DEADLINE_MS, pb.HeartbeatResponse)
    reply = ask.call("Explain", pb.ExplainRequest(recent=1), DEADLINE_MS, pb.ExplainResponse)
    assert [dict(one.counts) for one in reply.engines] == [{"hits": 2}]
