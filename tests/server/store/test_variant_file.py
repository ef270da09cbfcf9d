"""The variant file: its bytes, damaged ones, and what is known after a restart."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from documents import DOCUMENT, HEAD, OTHER_HEAD, TRIAL, prompt_of, put_prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from local_server import LocalServer, eventually

from kvstore.client import Client
from kvstore.client.resolving import FoundChunk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import as_bytes, checksum
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.types import DIGEST_BYTES, ROOT, ChunkKey
from kvstore.server.blending.content_index import (
    MAX_LEARNED,
    ContentIndex,
    Learned,
    Measured,
    Named,
)
from kvstore.server.blending.scores import Context
from kvstore.server.store.variant_file import FILE_NAME, pack_variants, unpack_variants

ServerMaker = Callable[..., LocalServer]
GOLDEN = Path(__file__).parents[2] / "golden" / "variants-v1.kvv"

ROWS = [
    Learned(ChunkKey(b"a" * 32), 0.625, -1.0, 0.5, 3.0, 2, (Context(b"c" * 16, 48, 1.5),)),
    Learned(ChunkKey(b"b" * 32), 1.0, 0.25, 0.0, 1.0, 1, ()),
]


def test_what_is_written_is_read() -> None:
    assert unpack_variants(pack_variants(ROWS)) == ROWS
    assert unpack_variants(pack_variants([])) == []


def test_files_of_this_version_are_read_for_ever() -> None:
    assert pack_variants(ROWS) == GOLDEN.read_bytes()
    assert unpack_variants(GOLDEN.read_bytes()) == ROWS


@settings(max_examples=50, deadline=None)
@given(st.integers(0, len(pack_variants(ROWS)) - 1), st.integers(1, 255))
def test_any_changed_byte_is_noticed(at: int, change: int) -> None:
    data = bytearray(pack_variants(ROWS))
    data[at] ^= change
    with pytest.raises(InvalidFrameError):
        unpack_variants(bytes(data))


def resummed(body: bytes) -> bytes:
    return body + struct.pack("<Q", checksum(as_bytes(body)))


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=40, max_size=200))
def test_rubbish_under_a_right_checksum_says_nothing_that_could_not_be(body: bytes) -> None:
    try:
        found = unpack_variants(resummed(b"KVVR\1\0\1\0" + body))
    except InvalidFrameError:
        return
    (one,) = found
    assert 0 <= one.impact <= 1
    assert 0 <= one.overlap <= 1
    assert one.deviation == -1 or one.deviation >= 0
    assert all(mass.mass >= 0 and mass.tokens > 0 for mass in one.context)


@pytest.mark.parametrize("at", [40, 44, 48, 52], ids=["impact", "deviation", "overlap", "uses"])
def test_numbers_that_are_none_are_refused(at: int) -> None:
    body = pack_variants(ROWS)[:-8]
    with pytest.raises(InvalidFrameError):
        unpack_variants(resummed(body[:at] + struct.pack("<f", float("nan")) + body[at + 4 :]))


# --- in the index


def named(number: int) -> Named:
    key = ChunkKey(bytes(DIGEST_BYTES) + number.to_bytes(DIGEST_BYTES, "big"))
    return Named(key, ROOT, number.to_bytes(DIGEST_BYTES, "little"), 16, 0)


def test_what_is_learned_is_bounded_and_of_the_latest() -> None:
    index = ContentIndex(MAX_LEARNED + 10)
    for number in range(1, MAX_LEARNED + 4):
        index.note(named(number))
        index.report(named(number).key, Measured(1.0, (), 0.0))
    found = index.learned()
    assert len(found) == MAX_LEARNED
    assert (found[0].key, found[-1].key) == (named(4).key, named(MAX_LEARNED + 3).key)
    index.forget(named(4).key)
    assert len(index.learned()) == MAX_LEARNED - 1


def test_what_was_learned_waits_for_its_chunk_and_is_kept_meanwhile() -> None:
    index = ContentIndex(10)
    known = ROWS[0]._replace(key=named(1).key)
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
    with client.resolve(*prompt_of(OTHER_HEAD, DOCUMENT), TRIAL) as resolved:
        report = pb.ReportReuseRequest(ratio=0.5)
        for one in resolved.chunks():
            told = report.chunks.add(digest=one.best.digest, intra_mass=one.asked.tokens / 2)
            told.context.add(content=b"c" * 16, tokens=16, mass=0.5)
        client.report_reuse(report)
    return _found(client)


def _found(client: Client) -> list[FoundChunk]:
    with client.resolve(*prompt_of(OTHER_HEAD, DOCUMENT), TRIAL) as resolved:
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
    path.write_bytes(path.read_bytes()[:-20])
    client = make_server().connect()
    assert eventually(lambda: len(_found(client)) == 2)
    assert [reports for _, _, reports in _scores(_found(client))] == [0, 0]
