"""The codec of a tier: whose chunks go by which, what is chosen at the start, what models say."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from contracts.chunks import make_frame, make_representation
from helpers.coarse_codec import CoarseCodec, coarse_codec
from helpers.local_server import LocalServer, eventually
from helpers.prompts import MEDIUM, SMALL, assert_reads, keys_of, parts_of, store
from hypothesis import given
from hypothesis import strategies as st
from simulation.core import Core
from simulation.tiers import SimDisk, no_faults

from kvstore.client import Chunk, ClientOptions
from kvstore.client.options import TransportName
from kvstore.codecs.base import ChunkTensors, Codec, EncodeTerms, codec_by_name, empty_tensors
from kvstore.codecs.speed import CodecSpeed, make_sample
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidRequestError, UnknownCodecError
from kvstore.proto.frame import (
    FLAG_RESTORED,
    FrameHeader,
    FrameTemplate,
    FrameWriter,
    check_frame,
    raw_frame_bytes,
)
from kvstore.proto.keys import namespace, representation_digest
from kvstore.proto.types import (
    KEY_BYTES,
    Accuracy,
    ChunkKey,
    Component,
    DType,
    KVLayout,
    LayerGroup,
    LayerKind,
    Model,
    PutOutcome,
    RopeParameters,
    Stated,
)
from kvstore.server.index import known_models
from kvstore.server.index.known_models import (
    MAX_KNOWN_MODELS,
    OVERHEAD_BYTES,
    KnownModels,
    ModelNamespace,
    ModelRegistry,
    differences,
    nearest,
)
from kvstore.server.security.sessions import Session
from kvstore.server.tiering import codec_choice
from kvstore.server.tiering.codec_choice import (
    CALIBRATION_S,
    auto_codec,
    choose_codec,
    measure_codecs,
)
from kvstore.server.tiering.tier_slot import LOSSLESS, TierCodec, may_lose
from kvstore.tiers.base import DEFAULT_TENANT


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with coarse_codec():
        yield


def stored(encoder: TierCodec, frame: Bytes, tenant: str = "red") -> FrameHeader:
    return check_frame(encoder.encode(frame, tenant))


def frame_of(*components: Component) -> Bytes:
    layout = KVLayout(components)
    info, _ = make_frame(1)
    template = FrameTemplate(info.key, info.parent, bytes(16), bytes(16), layout)
    frame = np.zeros(raw_frame_bytes(layout), np.uint8)
    writer = FrameWriter(template, frame)
    for component in components:
        for _ in range(component.layers):
            writer.reserve(component.layer_bytes)[:] = 7
            writer.commit(component.layer_bytes)
    writer.finish(0, 1, Accuracy.exact)
    return frame


def test_a_tenant_may_have_a_codec_of_its_own() -> None:
    encoder = TierCodec("raw", {"blue": "coarse"})
    _, frame = make_frame(1)
    assert stored(encoder, frame, "red").accuracy is Accuracy.exact
    assert stored(encoder, frame, "blue").codec_id == CoarseCodec.codec_id
    assert encoder.encode(frame, "red") is frame
    assert not encoder.is_exact
    assert TierCodec("lossless", {"blue": "raw"}).is_exact


def test_only_floats_that_are_no_states_may_lose_anything() -> None:
    for kind, dtype, may in [
        (LayerKind.attention, DType.bfloat16, True),
        (LayerKind.window, DType.float16, True),
        (LayerKind.mla, DType.bfloat16, True),
        (LayerKind.attention, DType.float8_e4m3fn, False),
        (LayerKind.attention, DType.int8, False),
        (LayerKind.state, DType.bfloat16, False),
        (LayerKind.state, DType.float32, False),
    ]:
        component = Component(kind, dtype, 2, 1, 8, 16)
        assert may_lose(KVLayout((component,))) is may
        if not may:
            encoder = TierCodec("coarse")
            header = stored(encoder, frame_of(component))
            assert (header.codec_id, header.accuracy) == (
                codec_by_name(LOSSLESS).codec_id,
                Accuracy.exact,
            )


def test_terms_come_from_the_model_that_a_session_was_opened_for() -> None:
    models = KnownModels()
    told: list[EncodeTerms | None] = []

    def terms_of(header: FrameHeader) -> EncodeTerms | None:
        told.append(models.terms_of(header))
        return told[-1]

    encoder = TierCodec("coarse", {}, terms_of)
    representation = make_representation()
    _, frame = make_frame(1, representation=representation)
    assert stored(encoder, frame).accuracy is Accuracy.bounded
    models.learn(check_frame(frame).representation, make_representation(layers=5))
    assert stored(encoder, frame).accuracy is Accuracy.bounded
    models.learn(check_frame(frame).representation, representation)
    stored(encoder, frame)
    assert told.pop(0) is None
    assert told[0] is None, "terms of another number of layers are not given"
    assert told[1] is not None
    assert told[1].rope == representation.rope
    assert told[1].layer_ids == representation.layer_groups[0].layer_ids


def test_a_model_that_the_codec_refuses_is_kept_without_loss() -> None:
    models = KnownModels()
    representation = replace(make_representation(), rope=RopeParameters(13.0, 8))
    _, frame = make_frame(1, representation=representation)
    models.learn(check_frame(frame).representation, representation)
    header = stored(TierCodec("coarse", {}, models.terms_of), frame)
    assert (header.codec_id, header.accuracy) == (codec_by_name(LOSSLESS).codec_id, Accuracy.exact)


def test_a_frame_coded_with_loss_is_kept_as_it_is() -> None:
    for codec in ["coarse", "lossless"]:
        _, frame = make_frame(1)
        coarse = TierCodec("coarse").encode(frame, "red")
        assert TierCodec(codec).encode(coarse, "red") is coarse
        raw = stored(TierCodec("raw"), coarse)
        assert (raw.codec_id, raw.accuracy, raw.flags) == (0, Accuracy.bounded, FLAG_RESTORED)


def test_what_was_restored_says_by_which_codec_it_is_lossy_however_it_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CoarseCodec, "accuracy", Accuracy.approximate)
    _, frame = make_frame(1)
    for codec in ("coarse", "raw", "lossless", "raw", "lossless"):
        frame = TierCodec(codec).encode(frame, "red")
        assert check_frame(frame).stated == Stated(Accuracy.approximate, CoarseCodec.codec_id), (
            codec
        )


def test_frames_that_need_assets_are_not_for_everybody_to_read() -> None:
    assert TierCodec("raw", {"blue": "cachegen"}).needs_assets
    assert not TierCodec("kvq").needs_assets


ServerMaker = Callable[..., LocalServer]
PROBE = ChunkKey(b"p" * KEY_BYTES)
DISK_BYTES = 8 << 20


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Have the lossless codec measured to decode so many bytes a second."""

    def say(decode_bytes_per_s: float) -> None:
        measured = [speed("lossless", 1.5, decode_bytes_per_s)]
        monkeypatch.setattr(codec_choice, "measure_codecs", lambda *_: measured)

    return say


def test_the_choice_is_used_shown_and_leaves_nothing_on_the_medium(
    say: Callable[[float], None],
) -> None:
    disk = SimDisk(DISK_BYTES, no_faults())
    with closing(Core([disk])) as core:
        say(1e15)
        assert auto_codec(core.moves, core.slot("disk"), Accuracy.exact, PROBE)
        encoder = core.slot("disk").encoder
        assert (encoder.name, encoder.codec_id) == ("lossless (auto)", 2)
        assert core.slot("disk").encoder.of_tenant("red").name == "lossless"
        say(1.0)
        auto_codec(core.moves, core.slot("disk"), Accuracy.exact, PROBE)
        assert core.slot("disk").encoder.name == "raw (auto)"
        assert (disk.stats().chunks, disk.stats().used_bytes) == (0, 0)
        assert len(core.catalog) == 0


@pytest.mark.parametrize("verb", ["reserve", "write", "seal", "read", "delete"])
def test_a_medium_that_fails_is_judged_by_the_first_guess(
    verb: str, say: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimDisk(DISK_BYTES, no_faults())
    with closing(Core([disk])) as core:
        usual = getattr(disk, verb)

        def fail(*args: object, **named: object) -> object:
            disk.faults.fail = 1.0
            try:
                return usual(*args, **named)
            finally:
                disk.faults.fail = 0.0

        monkeypatch.setattr(disk, verb, fail)
        say(1e15)
        assert auto_codec(core.moves, core.slot("disk"), Accuracy.exact, PROBE)
        assert core.slot("disk").encoder.name == "lossless (auto)"
        assert disk.stats().reservations == 0


def test_measuring_ends_in_time_whatever_the_clock_says_and_leaves_out_what_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def known(name: str) -> Codec:
        if name == "cachegen":
            raise UnknownCodecError(name, "no tables for it")
        return codec_by_name(name)

    monkeypatch.setattr(codec_choice, "codec_by_name", known)
    ticks, names = iter(range(10_000)), ["raw", "cachegen", "lossless"]
    speeds = measure_codecs(names, make_sample(), lambda: next(ticks) * 0.1, 0.5)
    assert [one.name for one in speeds] == ["raw", "lossless"]
    assert next(ticks) < 100
    assert CALIBRATION_S <= 1


def test_a_server_chooses_after_its_start_and_serves_meanwhile(make_server: ServerMaker) -> None:
    server = make_server("--codec", "disk=auto")
    client = server.connect()
    keys = store(client, 1, 4)
    assert_reads(client, keys)

    def is_chosen() -> bool:
        return server.node.store.tiers.slots["disk"].encoder.name.endswith(" (auto)")

    assert eventually(is_chosen)
    assert_reads(client, keys)
    server.settled()


def speed(name: str, ratio: float, decode_bytes_per_s: float) -> CodecSpeed:
    return CodecSpeed(name, "numpy", Accuracy.exact, ratio, 1e9, decode_bytes_per_s)


def test_a_slow_link_gets_the_ratio_and_a_fast_one_raw_frames() -> None:
    lossy = replace(speed("kvq", 5.2, 1.4e9), accuracy=Accuracy.bounded)
    offered = speed("lossless", 1.47, 3.4e9), speed("quick", 1.33, 6e9), lossy
    for link_gb, name in [(0.1, "lossless"), (1.0, "lossless"), (1.2, "quick"), (1.5, "raw")]:
        found = choose_codec(offered, link_gb * 1e9, Accuracy.exact)
        assert ("raw" if found is None else found.name) == name
    found = choose_codec(offered, 0.1e9, Accuracy.bounded)
    assert found is not None
    assert found.load_bytes_per_s(0.1e9) == pytest.approx(0.52e9)
    assert found.load_bytes_per_s(10e9) == found.decode_bytes_per_s
    for value in [0.0, -1.0, math.inf, math.nan]:
        with pytest.raises(InvalidRequestError, match="ratio"):
            speed("none", value, 1e9)


@given(
    st.floats(1e6, 1e11), st.lists(st.tuples(st.floats(0.5, 20), st.floats(0.01, 100)), max_size=6)
)
def test_the_choice_is_never_slower_than_raw_frames_even_for_one_chunk(
    link: float, figures: list[tuple[float, float]]
) -> None:
    offered = [speed(str(at), ratio, gb * 1e9) for at, (ratio, gb) in enumerate(figures)]
    found = choose_codec(offered, link, Accuracy.exact)
    if found is None:
        assert all(one.break_even_bytes_per_s <= link for one in offered)
        return
    serial_s = 1 / (link * found.ratio) + 1 / found.decode_bytes_per_s
    assert serial_s <= 1 / link * (1 + 1e-9)
    assert found.load_bytes_per_s(link) >= link * (1 - 1e-9)


(GROUP,) = SMALL.layer_groups


def session_of(kind: Model = SMALL, tenant: str = "default", number: int = 1) -> Session:
    space = namespace(tenant.encode(), kind)
    digest = representation_digest(kind)
    return Session(number, tenant, f"engine {number}", kind, space, digest, b"", 0.0)


def revision(number: int) -> Model:
    return replace(SMALL, model_revision=f"{number:040x}")


def of(spaces: ModelRegistry, one: Session) -> ModelNamespace:
    found = spaces.of(one.namespace)
    assert found is not None
    return found


def test_what_differs_is_named_with_both_values() -> None:
    groups = (replace(GROUP, dtype=DType.float16, layer_ids=tuple(range(32))),)
    rope = RopeParameters(10_000.0, 8, "linear", (("factor", 4.0),))
    for changes, found in (
        ({}, []),
        ({"adapter_digest": "sha256:5f"}, [("adapter_digest", "none", "sha256:5f")]),
        (
            {"layer_groups": groups},
            [
                ("layer_groups[0].dtype", "bfloat16", "float16"),
                ("layer_groups[0].layer_ids", "0 to 1", "0 to 31"),
            ],
        ),
        (
            {"rope": rope},
            [("rope.scaling", "default", "linear"), ("rope.factors", "none", "(('factor', 4.0),)")],
        ),
    ):
        assert differences(SMALL, replace(SMALL, **changes)) == found
    more = LayerGroup(LayerKind.attention, DType.float16, (2, 3), 2, 8)
    lacking = differences(SMALL, replace(SMALL, layer_groups=(GROUP, more)))
    assert {one.field.partition(".")[0] for one in lacking} == {"layer_groups[1]"}
    assert {one.stored for one in lacking} == {"none"}


def test_the_nearest_come_first_and_other_tenants_not_at_all() -> None:
    spaces = ModelRegistry()
    asked = session_of()
    far = replace(revision(2), adapter_digest="sha256:5f")
    for one in (session_of(far), session_of(revision(1)), session_of(revision(3), "acme"), asked):
        spaces.note(one)
    near = nearest(of(spaces, asked), spaces.others(of(spaces, asked)))
    assert [space.representation for space, _ in near] == [revision(1), far]
    assert [len(differing) for _, differing in near] == [1, 2]


def test_of_the_tenant_with_the_most_the_space_opened_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_models, "MAX_SPACES", 6)
    spaces = ModelRegistry()
    for number in range(2):
        spaces.note(session_of(revision(number), "acme"))
    for number in (*range(300), 297, 300):
        spaces.note(session_of(revision(number), "zeta", number))
    kept = [(space.tenant, space.representation) for space in spaces.all()]
    assert kept == [
        *(("zeta", revision(number)) for number in (300, 297, 299, 298)),
        *(("acme", revision(number)) for number in (1, 0)),
    ]
    assert spaces.of(session_of(revision(2), "zeta").namespace) is None


CHUNK_TOKENS = 64
IMPORTANT = (3, 40)
"""As many as get a quarter of the step."""


def numbers() -> ChunkTensors:
    out = empty_tensors(KVLayout.of(MEDIUM, CHUNK_TOKENS))
    draw = np.random.default_rng(0)
    for part in parts_of(out):
        part[...] = draw.normal(0, 1, part.shape).astype(np.float32).view(np.uint32) >> 16
    return out


def errors(one: ChunkTensors, other: ChunkTensors) -> np.ndarray:
    """Return each token's root mean square error."""
    pairs = zip(parts_of(one), parts_of(other), strict=True)
    squares = [
        ((a.astype(np.uint32) << 16).view("f4") - (b.astype(np.uint32) << 16).view("f4")) ** 2
        for a, b in pairs
    ]
    found: np.ndarray = np.sqrt(np.concatenate(squares).mean((0, 2)))
    return found


def weights() -> np.ndarray:
    found = np.full(CHUNK_TOKENS, 0.5, np.float32)
    found[list(IMPORTANT)] = 9
    found[10] = 0
    return found


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_tokens_that_were_said_to_matter_are_kept_more_exactly(
    make_server: ServerMaker, transport: TransportName
) -> None:
    server = make_server("--codec", "disk=kvq:1,importance")
    options = ClientOptions(transport, chunk_tokens=CHUNK_TOKENS, deadline_ms=20_000)
    client = server.connect(representation=MEDIUM, options=options)
    told, silent = keys_of(client, 1, 1)[0], keys_of(client, 2, 1)[0]
    tensors = numbers()
    chunk = Chunk(told, tensors, position=CHUNK_TOKENS, importance=weights())
    puts = client.put_chunks([chunk, replace(chunk, key=silent, importance=None)])
    assert {put.outcome for put in puts} == {PutOutcome.stored}
    server.settled()
    server.leave_memory([told, silent])
    weighed, plain = (
        errors(client.get_chunks([key], accuracy=Accuracy.bounded)[0], tensors)
        for key in (told, silent)
    )
    assert (weighed[list(IMPORTANT)] < 0.5 * plain[list(IMPORTANT)]).all()
    assert weighed[10] > 1.5 * plain[10]


@pytest.mark.parametrize(
    ("flags", "is_told"),
    [
        (("--codec", "disk=kvq:1"), False),
        (("--tenant-codecs", f"{DEFAULT_TENANT}/disk=kvq:1,importance"), True),
        (("--tenant-codecs", "acme/disk=kvq:1,importance"), False),
    ],
    ids=["nobody's", "the tenant's", "another's"],
)
def test_what_matters_is_said_where_a_codec_asks_alone(
    make_server: ServerMaker, flags: tuple[str, str], is_told: bool
) -> None:
    server = make_server(*flags)
    options = ClientOptions("shm", chunk_tokens=CHUNK_TOKENS)
    client = server.connect(representation=MEDIUM, options=options)
    assert not client.weighs  # no session yet
    client.put_chunks([Chunk(keys_of(client, 1, 1)[0], numbers(), importance=weights())])
    assert client.weighs is is_told
    assert bool(server.node.store.models.weights_bytes) is is_told


def test_importance_that_is_not_the_chunks_is_refused_before_anything_is_sent_and_after(
    server: LocalServer,
) -> None:
    options = ClientOptions("shm", chunk_tokens=CHUNK_TOKENS)
    client = server.connect(representation=MEDIUM, options=options)
    key = keys_of(client, 1, 1)[0]
    bad: list[Any] = [
        np.ones(CHUNK_TOKENS - 1, np.float32),
        np.ones(CHUNK_TOKENS, np.float64),
        np.full(CHUNK_TOKENS, np.nan, np.float32),
        np.full(CHUNK_TOKENS, -1, np.float32),
    ]
    for wrong in bad:
        with pytest.raises(InvalidRequestError, match="importance"):
            client.put_chunks([Chunk(key, numbers(), importance=wrong)])
    assert client.lookup(keys=[key]).ready == 0
    for weights in ([], [b""], [b"1", b"2"], [bytes(8193)]):
        with pytest.raises(InvalidRequestError, match="weights"):
            client._link.call_keys(
                "Weigh", pb.WeighRequest(weights=weights), [key], pb.WeighResponse
            )


def test_no_more_is_kept_than_the_limit_and_the_oldest_goes() -> None:
    table = KnownModels(3 * (OVERHEAD_BYTES + 10))
    keys = [ChunkKey(bytes([i]) * 32) for i in range(5)]
    for key in keys:
        table.note_importance(key, bytes(10))
        table.note_importance(key, bytes(10))
    assert table.weights_bytes == 3 * (OVERHEAD_BYTES + 10)
    assert set(table._weights) == set(keys[2:])


def test_the_model_seen_longest_ago_is_forgotten_first() -> None:
    models = KnownModels()
    representation = make_representation()
    _, frame = make_frame(1)
    header = check_frame(frame)
    models.learn(header.representation, representation)
    for number in range(MAX_KNOWN_MODELS - 1):
        models.learn(number.to_bytes(16, "little"), representation)
    assert models.terms_of(header) is not None
    models.learn(header.representation, representation)
    models.learn(b"another model...", representation)
    assert models.terms_of(header) is not None, "it was seen again"
    assert models.terms_of(replace(header, representation=bytes(16))) is None
