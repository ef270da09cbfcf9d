"""Identities and frames that the service refuses, and that nothing of them stays."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import numpy as np
import pytest
from contracts.chunks import make_representation
from helpers.bare_wire import Wire, reheaded
from helpers.local_server import DEADLINE_MS, LocalServer, open_session
from helpers.prompts import MEDIUM, SMALL, frame_of

from kvstore.client.connection import translate
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import kvstore_pb2_grpc
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    LayoutMismatchError,
    ModelError,
    QuotaExceededError,
    UnknownCodecError,
)
from kvstore.proto.frame import FLAG_RESTORED, parse_header
from kvstore.proto.messages import as_message
from kvstore.proto.types import Accuracy, ChunkKey

ServerMaker = Callable[..., LocalServer]


# --- identity


def _clear(field: str) -> Callable[[pb.Representation], None]:
    return lambda message: message.ClearField(field)


def _group(field: str, value: int) -> Callable[[pb.Representation], None]:
    return lambda message: setattr(message.layer_groups[0], field, value)


INCOMPLETE: list[tuple[Callable[[pb.Representation], None], str]] = [
    (_clear("model_id"), "model_id='': name the model"),
    (_clear("model_revision"), "model_revision='': give the commit"),
    (_clear("adapter_digest"), "adapter_digest='': give the LoRA's digest"),
    (_clear("quantization"), "quantization='': name the KV quantisation"),
    (_clear("tokenizer_digest"), "tokenizer_digest='': give a digest"),
    (_clear("layout_version"), "layout_version=0: use 1"),
    (_clear("layer_groups"), r"layer_groups=\(\): describe every layer"),
    (_clear("rope"), "rope=None: give the rope parameters"),
    (lambda message: setattr(message.rope, "scaling", ""), "rope.scaling='': name the rule"),
    (lambda message: message.layer_groups[0].ClearField("layer_ids"), r"layer_ids=\(\): name each"),
    (_group("kv_heads", 0), "kv_heads=0: give a positive count"),
    (_group("head_dim", 1 << 24), "head_dim=16777216: give a positive count"),
    (_group("window_tokens", 7), "window_tokens=7: positive for window layers"),
    (_group("kind", 99), "layer_groups='99 is not.*': use a kind and dtype we know"),
    (_group("dtype", 99), "layer_groups='99 is not.*': use a kind and dtype we know"),
]


def test_session_of_an_incomplete_identity_is_refused_by_the_name_of_the_field(
    server: LocalServer,
) -> None:
    connection = server.dial()

    def open_with(request: pb.OpenSessionRequest) -> None:
        connection.call("OpenSession", request, DEADLINE_MS, object)

    with server.unchanged():
        for change, message in INCOMPLETE:
            request = pb.OpenSessionRequest(representation=as_message(pb.Representation, SMALL))
            change(request.representation)
            with pytest.raises(ModelError, match=message):
                open_with(request)
        with pytest.raises(ModelError):
            open_with(pb.OpenSessionRequest())
        request = pb.OpenSessionRequest(representation=as_message(pb.Representation, SMALL))
        request.client = "x" * 129
        with pytest.raises(InvalidRequestError, match=r"client='xxx.*: give at most 128"):
            open_with(request)
    assert len(server.node.sessions) == 0


# --- frames


def _flipped(at: int, bits: int = 1) -> Callable[[Bytes], Bytes]:
    def flip(frame: Bytes) -> Bytes:
        frame[at] ^= bits
        return frame

    return flip


BAD_FRAMES: dict[str, tuple[Callable[[Bytes], Bytes], type[KVStoreError], str]] = {
    "flipped bit in the header": (
        _flipped(70), InvalidFrameError, "header checksum=.*: the header is damaged",
    ),
    "flipped bit in the segment table": (
        _flipped(250), InvalidFrameError, "header checksum=.*: the header is damaged",
    ),
    "flipped bit in the payload": (
        _flipped(-1), ChunkCorruptError, "layer 1 fails its checksum; it was dropped, put it again",
    ),
    "no frame at all": (
        lambda frame: np.zeros(500, np.uint8), InvalidFrameError, "magic=.*: expected b'KVFR'",
    ),
    "shorter than a header": (
        lambda frame: frame[:100], InvalidFrameError, "frame=100: a frame has at least 192 bytes",
    ),
    "version of the future": (
        _flipped(4, 3), InvalidFrameError, "version=2: this reader knows version 1",
    ),
    "codec of the future": (
        lambda frame: reheaded(frame, codec_id=99), UnknownCodecError, "codec=99: .* known: 0, 2",
    ),
    "key of another namespace": (
        lambda frame: reheaded(frame, key=ChunkKey(bytes(16) + parse_header(frame).key[16:])),
        ModelError, "key='0000.*: not in this session's namespace .*; open a session with",
    ),
    "layout of another model": (
        lambda frame: frame_of(parse_header(frame).key, make_representation(layers=3)),
        LayoutMismatchError, "layout=.*: this session's is KVLayout",
    ),
    "identity of another model": (
        lambda frame: reheaded(frame, representation=bytes(16)), InvalidRequestError,
        "representation='0000.*: the frame is of another model's KV",
    ),
    "restored from a lossy copy": (
        lambda frame: reheaded(frame, flags=FLAG_RESTORED), InvalidRequestError,
        "accuracy='exact': restored or lossy KV is never stored as an original",
    ),
    "lossy": (
        lambda frame: reheaded(frame, accuracy=Accuracy.bounded), InvalidRequestError,
        "accuracy='bounded': restored or lossy KV is never stored as an original",
    ),
    "cost that is no number": (
        lambda frame: reheaded(frame, prefill_flops=float("nan")), InvalidFrameError,
        "cost or bound=.*: must be finite",
    ),
}  # fmt: skip


def test_bad_frame_is_refused_with_its_reason_and_leaves_nothing(
    server: LocalServer, wire: Wire
) -> None:
    with server.unchanged():
        for what, (change, kind, message) in BAD_FRAMES.items():
            with pytest.raises(kind, match=message):
                wire.put_frame(change(frame_of(wire.key(), SMALL)))
            found = wire.call("Lookup", pb.LookupRequest(digests=wire.key()[16:]))
            assert (found.ready, found.pending) == (0, 0), what


def test_frame_over_the_server_s_limit_is_refused(make_server: ServerMaker) -> None:
    server = make_server("--max-frame-bytes", "64KiB")
    connection = server.dial()
    wire = Wire(connection, open_session(connection, MEDIUM))
    frame = frame_of(wire.key(), MEDIUM, 64)
    with server.unchanged(), pytest.raises(InvalidRequestError, match=r"frame_bytes=.* at most 65"):
        wire.put_frame(frame)


def test_message_over_grpc_s_limit_is_refused(server: LocalServer, wire: Wire) -> None:
    limit = [("grpc.max_send_message_length", 64 << 20)]
    with grpc.insecure_channel(server.address, options=limit) as channel:
        stub = kvstore_pb2_grpc.KVStoreStub(channel)
        session_id = wire.terms.session_id
        huge = pb.PutRequest(session_id=session_id, frame_bytes=1, data=bytes(3 << 20))
        with server.unchanged(), pytest.raises(grpc.RpcError) as caught:
            stub.Put(iter([huge]), timeout=30)
    error = translate(caught.value)
    assert isinstance(error, QuotaExceededError)
    assert "larger than max" in str(error)
