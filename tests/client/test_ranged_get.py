"""Gets of a pipeline stage over a network: only its own layers come, where chunks lie raw."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from local_server import LocalServer
from prompts import chunks_of, equal, frame_of, keys_of, outcomes, tensors_of
from shards import WIDE, shard_of, slices

from kvstore.client import Rectangle
from kvstore.client.ranged_get import RangedGet, SparseFrame, layer_spans
from kvstore.client.transport import Arrival
from kvstore.codecs.base import ChunkTensors, empty_tensors
from kvstore.codecs.shards import cut
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import as_bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.frame import parse_header, raw_frame_bytes
from kvstore.proto.types import ChunkKey, KVLayout, PutOutcome

LAYOUT = KVLayout.of(WIDE, 16)
STAGE = shard_of(LAYOUT, (1, 2))
KEYS = [ChunkKey(bytes([number]) * 32) for number in range(3)]
FRAMES = [frame_of(key, WIDE) for key in KEYS]


def reply(index: int, offset: int, data: bytes, frame_bytes: int | None = None) -> Arrival:
    size = len(FRAMES[0]) if frame_bytes is None else frame_bytes
    return Arrival(index, "cpu", size, as_bytes(data), offset=offset)


def replies(index: int, cut_bytes: int = 500) -> list[Arrival]:
    """Return what a server sends of one chunk."""
    return [
        reply(index, at, FRAMES[index][at : min(at + cut_bytes, span.stop)].tobytes())
        for span in layer_spans(STAGE)
        for at in range(span.start, span.stop, cut_bytes)
    ]


def test_header_and_layers_are_put_where_they_belong() -> None:
    ranged = RangedGet(STAGE, 3)
    sent = [one for index in range(3) for one in replies(index)]
    found = list(ranged.frames(iter(sent)))
    assert (len(found), ranged.read, ranged.is_over) == (3, 3, True)
    for key, (tier, frame) in zip(KEYS, found, strict=True):
        out = empty_tensors(STAGE.layout)
        cut(parse_header(frame), frame, STAGE, out)
        assert equal(out, slices(tensors_of(key, WIDE, 16), STAGE))
        assert (tier, len(frame)) == ("cpu", raw_frame_bytes(LAYOUT))


def test_what_was_not_asked_for_cannot_be_read() -> None:
    ranged = RangedGet(STAGE, 1)
    ((_, frame),) = ranged.frames(iter(replies(0)))
    with pytest.raises(InvalidFrameError, match="not asked for"):
        frame[len(frame) - 10 : len(frame)]
    with pytest.raises(InvalidFrameError):
        SparseFrame(layer_spans(STAGE), 100).add(400, np.zeros(10, np.uint8))


@pytest.mark.parametrize(
    ("sent", "read", "is_over"),
    [
        ([*replies(0), *replies(2)], 1, True),
        ([*replies(0), *replies(1)[:-1]], 1, True),
        ([*replies(0)[:-1], *replies(1)], 0, True),
        ([*replies(0), reply(1, 0, b"x", 77)], 1, False),
        ([], 0, True),
    ],
    ids=["missing", "short", "first_short", "other_size", "nothing"],
)
def test_the_prefix_ends_at_the_first_chunk_that_is_not_whole(
    sent: list[Arrival], read: int, is_over: bool
) -> None:
    ranged = RangedGet(STAGE, 3)
    assert len(list(ranged.frames(iter(sent)))) == ranged.read == read
    assert ranged.is_over == is_over


def test_a_header_of_another_kind_has_its_chunk_read_whole() -> None:
    spoilt = replies(0)
    spoilt[0] = replace(spoilt[0], data=np.zeros(len(spoilt[0].data), np.uint8))
    ranged = RangedGet(STAGE, 1)
    assert list(ranged.frames(iter(spoilt))) == []
    assert not ranged.is_over


def smooth() -> ChunkTensors:
    """Return tensors that zplane makes smaller, so that the server sends what lies on its disk."""
    out = empty_tensors(LAYOUT)
    for number, parts in enumerate(out[0]):
        for part in parts:
            part[...] = number
    return out


@pytest.mark.parametrize("codec", ["raw", "zplane"])
def test_a_stage_is_sent_its_own_layers_where_chunks_lie_raw(tmp_path: Path, codec: str) -> None:
    server = LocalServer(tmp_path, "--codec", f"disk={codec}")
    try:
        writer, reader = (server.connect("grpc", WIDE) for _ in range(2))
        keys = keys_of(writer, 1, 3)
        chunks = [replace(chunk, tensors=smooth()) for chunk in chunks_of(writer, keys)]
        assert outcomes(writer, chunks) == [PutOutcome.stored] * 3
        server.settled()
        connection = reader._connected().session.connection
        next_of, sent = connection.next_of, list[int]()

        def counted(call: object) -> pb.GetResponse | None:
            reply: pb.GetResponse | None = next_of(call)
            sent.append(0 if reply is None else len(reply.part.data))
            return reply

        connection.next_of = counted  # type: ignore[method-assign]
        found = reader.get(keys, rectangle=Rectangle((1, 2)))
        assert len(found) == 3
        assert all(equal(one, slices(smooth(), STAGE)) for one in found)
        headers_and_layers = 3 * (384 + 2048)
        assert (sum(sent) == headers_and_layers) == (codec == "raw")
        reader.delete(keys[1:2])
        assert len(reader.get(keys, rectangle=Rectangle((1, 2)))) == 1
    finally:
        server.close()
