"""Identities and frames that the service refuses, and that nothing of them stays."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import numpy as np
import pytest
from contracts.chunks import make_representation
from helpers.bare_wire import Wire, reheaded, wire_to
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
from kvstore.proto.types import Accuracy, ChunkKey, PutOutcome

ServerMaker = Callable[..., LocalServer]


@pytest.fixture
def wire(server: LocalServer) -> Wire:
    return wire_to(server)


# --- identity


def _clear(*fields: str) -> Callable[[pb.Representation], None]:
    def change(message: pb.Representation) -> None:
        for field in fields:
            message.ClearField(field)

    return change


def _group(field: str, value: int) -> Callable[[pb.Representation], None]:
    return lambda message: setattr(message.layer_groups[0], field, value)


def _no_layers(message: pb.Representation) -> None:
    message.layer_groups[0].ClearField("layer_ids")


def _no_scaling(message: pb.Representation) -> None:
    message.rope.scaling = ""


INCOMPLETE: dict[str, tuple[Callable[[pb.Representation], None], str]] = {
    "model_id": (_clear("model_id"), "model_id='': name the model"),
    "model_revision": (_clear("model_revision"), "model_revision='': give the commit"),
    "adapter_digest": (_clear("adapter_digest"), "adapter_digest='': give the LoRA's digest"),
    "quantization": (_clear("quantization"), "quantization='': name the KV quantisation"),
    "tokenizer_digest": (_clear("tokenizer_digest"), "tokenizer_digest='': give a digest"),
    "layout_version": (_clear("layout_version"), "layout_version=0: use 1"),
    "layer_groups": (_clear("layer_groups"), r"layer_groups=\(\): describe every layer"),
    "rope": (_clear("rope"), "rope=None: give the rope parameters"),
    "rope.scaling": (_no_scaling, "rope.scaling='': name the rule"),
    "layer_ids": (_no_layers, r"layer_ids=\(\): name each layer"),
    "kv_heads": (_group("kv_heads", 0), "kv_heads=0: give a positive count"),
    "head_dim": (_group("head_dim", 1 << 24), "head_dim=16777216: give a positive count"),
    "window_tokens": (_group("window_tokens", 7), "window_tokens=7: positive for window layers"),
    "kind": (_group("kind", 99), "layer_groups='99 is not.*': use a kind and dtype we know"),
    "dtype": (_group("dtype", 99), "layer_groups='99 is not.*': use a kind and dtype we know"),
}


@pytest.mark.parametrize("field", INCOMPLETE)
def test_session_of_an_incomplete_identity_is_refused_by_the_name_of_the_field(
    server: LocalServer, field: str
) -> None:
    change, message = INCOMPLETE[field]
    request = pb.OpenSessionRequest(representation=as_message(pb.Representation, SMALL))
    change(request.representation)
    connection = server.dial()
    with server.unchanged(), pytest.raises(ModelError, match=message):
        connection.call("OpenSession", request, DEADLINE_MS, object)
    assert len(server.node.sessions) == 0


def test_session_of_no_identity_at_all_is_refused(server: LocalServer) -> None:
    with pytest.raises(ModelError):
        server.dial().call("OpenSession", pb.OpenSessionRequest(), DEADLINE_MS, object)


def test_client_name_has_a_limit(server: LocalServer) -> None:
    request = pb.OpenSessionRequest(
        representation=as_message(pb.Representation, SMALL), client="x" * 129
    )
    with pytest.raises(InvalidRequestError, match=r"client='xxx.*: give at most 128"):
        server.dial().call("OpenSession", request, DEADLINE_MS, object)


# --- frames


def _flipped(at: int) -> Callable[[Bytes], Bytes]:
    def flip(frame: Bytes) -> Bytes:
        frame[at] ^= 1
        return frame

    return flip


def _of_another_model(frame: Bytes) -> Bytes:
    key = parse_header(frame).key
    return frame_of(key, make_representation(layers=3))


def _of_another_version(frame: Bytes) -> Bytes:
    frame[4] = 2
    return frame


def _in_another_namespace(frame: Bytes) -> Bytes:
    key = parse_header(frame).key
    return reheaded(frame, key=ChunkKey(bytes(16) + key[16:]))


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
        _of_another_version, InvalidFrameError, "version=2: this reader knows version 1",
    ),
    "codec of the future": (
        lambda frame: reheaded(frame, codec_id=99), UnknownCodecError, "codec=99: .* known: 0, 2",
    ),
    "key of another namespace": (
        _in_another_namespace, ModelError,
        "key='0000.*: not in this session's namespace .*; open a session with",
    ),
    "layout of another model": (
        _of_another_model, LayoutMismatchError, "layout=.*: this session's is KVLayout",
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


@pytest.mark.parametrize("what", BAD_FRAMES)
def test_bad_frame_is_refused_with_its_reason_and_leaves_nothing(
    server: LocalServer, wire: Wire, what: str
) -> None:
    change, kind, message = BAD_FRAMES[what]
    frame = change(frame_of(wire.key(), SMALL))
    with server.unchanged(), pytest.raises(kind, match=message):
        wire.put_frame(frame)
    assert wire.call("Lookup", pb.LookupRequest(digests=wire.key()[16:])).ready == 0


def test_key_can_be_put_after_a_bad_frame_of_it(server: LocalServer, wire: Wire) -> None:
    frame = frame_of(wire.key(), SMALL)
    bad = frame.copy()
    bad[-1] ^= 1
    with pytest.raises(ChunkCorruptError):
        wire.put_frame(bad)
    assert wire.put_frame(frame).outcomes == bytes([PutOutcome.stored])
    assert wire.put_frame(bad).outcomes == bytes([PutOutcome.exists])
    assert server.counter("put_invalid_chunks") == 1


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
