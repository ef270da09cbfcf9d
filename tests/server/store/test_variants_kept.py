"""What engines reported of variants: how much is kept, and what is known after a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from golden.history_samples import VARIANTS
from helpers.documents import (
    DOCUMENT,
    HEAD,
    OTHER_HEAD,
    TRIAL,
    make_content_index,
    prompt_of,
    put_prompt,
)
from helpers.local_server import LocalServer, eventually

from kvstore.client import Client
from kvstore.client.segments import FoundChunk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.types import DIGEST_BYTES, ROOT, ChunkKey
from kvstore.server.blending.content_index import (
    MAX_LEARNED,
    Measured,
    Named,
)
from kvstore.server.store.saved_state import FILE_NAME

ServerMaker = Callable[..., LocalServer]


def named(number: int) -> Named:
    key = ChunkKey(bytes(DIGEST_BYTES) + number.to_bytes(DIGEST_BYTES, "big"))
    return Named(key, ROOT, number.to_bytes(DIGEST_BYTES, "little"), 16, 0)


def test_what_is_learned_is_bounded_and_of_the_latest() -> None:
    index = make_content_index(MAX_LEARNED + 10)
    for number in range(1, MAX_LEARNED + 4):
        index.note(named(number))
        index.report(named(number).key, Measured(1.0, (), 0.0))
    found = index.learned()
    assert len(found) == MAX_LEARNED
    assert (found[0].key, found[-1].key) == (named(4).key, named(MAX_LEARNED + 3).key)
    index.forget(named(4).key)
    assert named(4).key not in {one.key for one in index.learned()}


def test_what_was_learned_waits_for_its_chunk_and_is_kept_meanwhile() -> None:
    index = make_content_index(10)
    known = VARIANTS[0]._replace(key=named(1).key)
    index.recall([known])
    assert index.learned() == [known]
    index.note(named(1))
    facts = index.facts(named(1).key)
    assert facts is not None
    assert (facts.impact, facts.reports, facts.is_measured) == (0.625, 2, True)
    assert index.learned() == [known]


# --- over a restart


def _reported(client: Client) -> list[FoundChunk]:
    put_prompt(client, *prompt_of(HEAD, DOCUMENT))
    with client.find_segments(*prompt_of(OTHER_HEAD, DOCUMENT), TRIAL) as resolved:
        report = pb.ReportReuseRequest(ratio=0.5)
        for one in resolved.chunks():
            told = report.chunks.add(digest=one.best.digest, intra_mass=one.asked.tokens / 2)
            told.context.add(content=b"c" * 16, tokens=16, mass=0.5)
        client.report_reuse(report)
    return _found(client)


def _found(client: Client) -> list[FoundChunk]:
    with client.find_segments(*prompt_of(OTHER_HEAD, DOCUMENT), TRIAL) as resolved:
        return list(resolved.chunks())


def _scores(found: list[FoundChunk]) -> list[tuple[float, float, int]]:
    return [(one.best.context_impact, one.best.overlap, one.best.reports) for one in found]


def test_variants_are_scored_after_a_restart_as_before(make_server: ServerMaker) -> None:
    server = make_server()
    before = _scores(_reported(server.connect()))
    assert all(reports == 1 and impact < 1 for impact, _, reports in before)
    server.settled()
    server.stop()
    client = make_server().connect()
    assert eventually(lambda: len(_found(client)) == 2)
    assert _scores(_found(client)) == before


def test_a_damaged_file_is_no_file(make_server: ServerMaker, tmp_path: Path) -> None:
    server = make_server()
    _reported(server.connect())
    server.settled()
    server.stop()
    path = tmp_path / "disk" / FILE_NAME
    path.write_bytes(path.read_bytes()[:-20])  # of its last section
    client = make_server().connect()
    assert eventually(lambda: len(_found(client)) == 2)
    assert [reports for _, _, reports in _scores(_found(client))] == [0, 0]
