"""What is found by content, rows left out of it, and what is refused, against a real server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import ServerMaker
from contracts.layers import damage
from helpers.documents import (
    DOCUMENT,
    HEAD,
    OTHER,
    OTHER_HEAD,
    TRIAL,
    keys_of,
    kinds,
    prompt_of,
    put_prompt,
    read,
    report_of,
    shadowed,
)
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import MEDIUM, SMALL, equal, tensors_of, tokens

from kvstore.client import Client, ClientOptions
from kvstore.client.blend.plan import SegmentRange
from kvstore.client.decode import Layer
from kvstore.client.forks import FORKS
from kvstore.client.lookups import Held
from kvstore.client.options import TransportName
from kvstore.client.segments import (
    FoundChunk,
    SegmentMatch,
    SegmentQuery,
    resolution_from_message,
    segments_to_messages,
)
from kvstore.client.transports.base import ReadPlan, read_layers
from kvstore.codecs.base import ChunkTensors, empty_tensors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.blend import ContextMass, ReuseReport
from kvstore.proto.errors import InvalidRequestError, KVStoreError
from kvstore.proto.messages import as_message
from kvstore.proto.plans import PrefillModel
from kvstore.proto.row_mask import SkippedRows
from kvstore.proto.types import ChunkKey, KVLayout, LayerKind, Model
from kvstore.server.blending.gates import TRIALS

BOTH = pytest.mark.parametrize("client", ["shm", "grpc"], indirect=True)
"""By the Unix socket and through gRPC."""


# --- what is found


@BOTH
def test_documents_are_found_behind_another_head_and_come_byte_by_byte(client: Client) -> None:
    _, first, second, _ = put_prompt(client, *prompt_of(HEAD, DOCUMENT, OTHER))
    prompt, ranges = prompt_of(OTHER_HEAD, OTHER, DOCUMENT)
    with client.find_segments(prompt, ranges, TRIAL) as resolved:
        variant = ["variant", "variant"]
        assert kinds(resolved) == [["none", "none"], variant, variant, []]
        wanted = [*keys_of(client, second), *keys_of(client, first)]
        sizes = [one.wanted.tokens for one in resolved.chunks()]
        assert sizes == [16, 16, 16, 24]  # the last 8 tokens joined the chunk before them
        for key, size, found in zip(wanted, sizes, read(resolved), strict=True):
            assert equal(found, tensors_of(key, client.model, size))
        for one, stored in zip(list(resolved.chunks())[2:], first.chunks, strict=True):
            best = one.best
            assert (best.position, best.parent) == (stored.start, stored.parent)
            assert (best.digest, best.tier, best.load_ms > 0) == (stored.digest, "cpu", True)
        assert resolved.found.layer_order == (0, 1)
        assert resolved.found.rope == client.model.rope


def test_the_prompt_itself_and_a_shared_head_are_exact_and_need_no_gate(client: Client) -> None:
    prompt, ranges = prompt_of(HEAD, DOCUMENT, OTHER)
    segments = put_prompt(client, prompt, ranges)
    with client.find_segments(prompt, ranges) as resolved:
        assert kinds(resolved) == [["exact"], ["exact"] * 2, ["exact"] * 2, []]
        assert resolved.found.exact_prefix == 5
        assert not resolved.found.is_shadow
        keys = [key for segment in segments for key in keys_of(client, segment)]
        for key, one, found in zip(keys, resolved.chunks(), read(resolved), strict=True):
            assert one.best.position == one.wanted.start
            assert equal(found, tensors_of(key, client.model, one.wanted.tokens))
    with client.find_segments(*prompt_of(HEAD, OTHER, DOCUMENT), TRIAL) as resolved:
        assert kinds(resolved)[:2] == [["exact"], ["variant", "variant"]]
        assert resolved.found.exact_prefix == 1


def test_models_whose_chunks_are_of_one_prefix_only_are_refused(server: LocalServer) -> None:
    group = replace(SMALL.layer_groups[0], kind=LayerKind.window, window_tokens=8)
    client = server.connect("auto", replace(SMALL, layer_groups=(group,)))
    with pytest.raises(InvalidRequestError, match=r"window layers.*use Lookup"):
        client.find_segments(*prompt_of(OTHER_HEAD, DOCUMENT), TRIAL)


def test_the_variant_with_most_of_its_context_comes_first_and_one_that_began_its_prompt_last(
    client: Client,
) -> None:
    """That carries the attention sink of its prompt, wherever it is put."""
    put_prompt(client, *prompt_of(DOCUMENT))
    asked = prompt_of(OTHER_HEAD, OTHER, DOCUMENT)
    with client.find_segments(*asked, TRIAL) as resolved:
        assert resolved.found.segments[2].chunks[0].variants[0].position == 0
    put_prompt(client, *prompt_of(HEAD, DOCUMENT))
    put_prompt(client, *prompt_of(HEAD, OTHER, DOCUMENT))
    with client.find_segments(*asked, TRIAL) as resolved:
        found = resolved.found.segments[2].chunks[0].variants
        assert [one.position for one in found] == [48, 16, 0]
        assert found[0].overlap == pytest.approx(32 / 48)
        assert found[0].fix_overhead < found[1].fix_overhead
    with client.find_segments(*asked, replace(TRIAL, max_variants=1)) as resolved:
        assert [one.position for one in resolved.found.segments[2].chunks[0].variants] == [48]


def test_what_is_no_faster_to_load_and_repair_is_left_out(client: Client) -> None:
    put_prompt(client, *prompt_of(HEAD, DOCUMENT))
    prompt, ranges = prompt_of(OTHER_HEAD, DOCUMENT)
    fast, slow = PrefillModel(0.0, 1e-12), PrefillModel(0.0, 1.0)
    with client.find_segments(prompt, ranges, replace(TRIAL, prefill=fast)) as resolved:
        assert kinds(resolved)[1] == ["none", "none"]
    with client.find_segments(prompt, ranges, replace(TRIAL, prefill=slow)) as resolved:
        assert kinds(resolved)[1] == ["variant", "variant"]
        segment = resolved.found.segments[1]
        assert segment.recompute_ms == pytest.approx(40_000)
        assert 0 < segment.load_ms < 1000


# --- leases, evictions, restarts


@BOTH
def test_what_is_named_stays_until_it_is_released(server: LocalServer, client: Client) -> None:
    segments = put_prompt(client, *prompt_of(HEAD, DOCUMENT))
    keys = keys_of(client, segments[1])
    with client.find_segments(*prompt_of(OTHER_HEAD, DOCUMENT), TRIAL) as resolved:
        assert client.delete(keys=keys) == 0
        assert len(read(resolved)) == 2
    server.settled()
    assert client.delete(keys=keys) == 2


def test_contents_can_be_left_out_altogether(make_server: ServerMaker) -> None:
    client = make_server("--blend-contents", "0").connect()
    put_prompt(client, *prompt_of(HEAD, DOCUMENT))
    with client.find_segments(*prompt_of(OTHER_HEAD, DOCUMENT), TRIAL) as resolved:
        assert list(resolved.chunks()) == []


def test_documents_are_found_after_a_restart(make_server: ServerMaker) -> None:
    server = make_server()
    put_prompt(server.connect(), *prompt_of(HEAD, DOCUMENT))
    assert server.stop()
    client = make_server().connect()

    def is_found() -> bool:
        with client.find_segments(*prompt_of(OTHER_HEAD, DOCUMENT), TRIAL) as resolved:
            return kinds(resolved)[1] == ["variant", "variant"]

    assert eventually(is_found)


# --- reports and the gate


def test_the_more_attention_left_a_chunk_the_more_of_it_is_recomputed(client: Client) -> None:
    put_prompt(client, *prompt_of(HEAD, DOCUMENT))
    question = (*prompt_of(OTHER_HEAD, DOCUMENT), TRIAL)
    ratios = []
    for _ in range(2):
        with client.find_segments(*question) as resolved:
            ratios.append(resolved.found.segments[1].ratio)
            report = report_of(resolved)
            seen = [
                replace(
                    one,
                    context=(ContextMass(b"c" * 16, 16, 0.9 * asked.wanted.tokens),),
                    intra_mass=0.1 * asked.wanted.tokens,
                )
                for one, asked in zip(report.chunks, resolved.chunks(), strict=True)
            ]
            client.report_reuse(replace(report, chunks=tuple(seen)))
    assert ratios[1] > ratios[0]


def test_reports_are_what_priorities_come_from(client: Client) -> None:
    put_prompt(client, *prompt_of(HEAD, DOCUMENT))
    prompt, ranges = prompt_of(OTHER_HEAD, DOCUMENT)
    with client.find_segments(prompt, ranges, TRIAL) as resolved:
        assert [one.priority for one in resolved.chunks()] == [b"", b""]
        client.report_reuse(report_of(resolved))
    with client.find_segments(prompt, ranges, TRIAL) as resolved:
        for one in resolved.chunks():
            assert list(one.priority) == sorted(one.priority)
            assert (one.priority[0], one.priority[-1]) == (0, 255)
            assert one.best.reports == 1
            assert one.best.deviation == pytest.approx((one.wanted.tokens - 1) / 2)


def test_good_trials_open_the_gate_of_their_tag_alone(server: LocalServer) -> None:
    client = server.connect()
    put_prompt(client, *prompt_of(HEAD, DOCUMENT))
    prompt, ranges = prompt_of(OTHER_HEAD, DOCUMENT)
    trial = SegmentQuery(tag="rag", is_trial=True)
    with client.find_segments(prompt, ranges, trial) as resolved:
        assert resolved.found.is_shadow
    for _ in range(TRIALS):
        gate = client.report_reuse(ReuseReport("rag", ratio=0.3, shadow=shadowed()))
    assert (gate.is_open, gate.is_calibrated, gate.tag) == (True, True, "rag")
    with client.find_segments(prompt, ranges, SegmentQuery(tag="rag")) as resolved:
        assert kinds(resolved)[1] == ["variant", "variant"]
        assert resolved.found.gate.is_open
    exact_only = [replace(one, approximate=False) for one in ranges]
    with client.find_segments(prompt, exact_only, trial) as resolved:
        assert kinds(resolved)[1] == ["none", "none"]
    with client.find_segments(prompt, ranges, SegmentQuery(tag="chat")) as resolved:
        assert kinds(resolved)[1] == ["none", "none"]
        assert (resolved.found.lease_id, resolved.found.gate.is_open) == (0, False)
        assert "calibrate" in resolved.found.gate.why
    status = server.dial().call("Status", pb.StatusRequest(), 2000, pb.StatusResponse)
    shown = {one.tag: one for one in status.gates}
    assert {one.model for one in status.gates} == {SMALL.model_id}
    assert [(name, one.open) for name, one in sorted(shown.items())] == [
        ("chat", False), ("rag", True)
    ]  # fmt: skip
    counts = {name: (one.let_through, one.kept_out) for name, one in shown.items()}
    assert counts == {"rag": (1, 0), "chat": (0, 1)}
    assert (server.counter("blend_let_through"), server.counter("blend_kept_out")) == (1, 1)
    assert server.counter("blend_shadows") == TRIALS


def test_a_lease_is_released_once_and_only_by_the_process_that_took_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released: list[Sequence[int]] = []
    with Held([7], lambda leases, _: released.append(leases)) as held:
        held.release()
    assert released == [[7]]
    parents = Held([8], lambda leases, _: released.append(leases))
    monkeypatch.setattr(FORKS, "process", bytes(8))
    parents.release()
    assert released == [[7]]


def ask(client: Client, request: pb.ResolveRequest) -> pb.ResolveResponse:
    """Ask what no client would."""
    request.session_id = client._link.connected().session.terms.session_id
    return client._link.call("Resolve", request, pb.ResolveResponse)


def report_as_is(client: Client, request: pb.ReportReuseRequest) -> None:
    """Report what no client would."""
    request.session_id = client._link.connected().session.terms.session_id
    client._link.call("ReportReuse", request, pb.ReportReuseResponse)


# --- what is refused


def change(message: Any, path: str, value: object) -> None:
    """Set what *path* names, as ``chunks.0.digest``; have a function change it; None clears it."""
    *steps, last = path.split(".")
    for step in steps:
        message = message[int(step)] if step.isdecimal() else getattr(message, step)
    if callable(value):
        value(getattr(message, last))
    elif value is None:
        message.ClearField(last)
    else:
        setattr(message, last, value)


def halves(value: float) -> bytes:
    return np.full(16, value, "<f2").tobytes()


def context(count: int = 1, **fields: Any) -> Callable[[Any], object]:
    """Add *count* contexts, which differ unless *fields* name them."""

    def add(contexts: Any) -> None:
        for number in range(count):
            contexts.add(**{"content": bytes([number]) * 16, "tokens": 16, **fields})

    return add


def shadow(*terms: float) -> Callable[[Any], object]:
    agreement, divergence = (*terms, 0.0)[:2]
    wrong = pb.ShadowResult(divergence=divergence, agreement=agreement, tokens=64)
    return lambda found: found.CopyFrom(wrong)


NAN, INF = float("nan"), float("inf")
BAD_REPORTS: list[tuple[str, str, object]] = [
    ("chunks.digest", "chunks.0.digest", b"x" * 16),
    ("chunks.digest", "chunks.0.digest", b"x"),
    ("chunks.deviations", "chunks.0.deviations", bytes(30)),
    ("chunks.deviations", "chunks.0.deviations", halves(NAN)),
    ("chunks.deviations", "chunks.0.deviations", halves(-2.0)),
    ("chunks.deviations", "chunks.0.deviations", halves(INF)),
    ("chunks.selected", "chunks.0.selected", bytes(1)),
    ("chunks.query_attention", "chunks.0.query_attention", bytes(15)),
    ("chunks.context", "chunks.0.intra_mass", 17.0),
    ("chunks.intra_mass", "chunks.0.intra_mass", NAN),
    ("context.content", "chunks.0.context", context(content=b"", mass=0.1)),
    ("context.tokens", "chunks.0.context", context(tokens=0, mass=0.1)),
    ("context.mass", "chunks.0.context", context(mass=-0.1)),
    ("chunks.context", "chunks.0.context", context(2, content=b"c" * 16)),
    ("chunks.context", "chunks.0.context", context(17)),
    ("ratio", "ratio", 1.5),
    ("ratio", "ratio", NAN),
    ("load_ms", "load_ms", -1.0),
    ("full_ms", "full_ms", INF),
    ("shadow.divergence", "shadow", shadow(1.0, NAN)),
    ("shadow.divergence", "shadow", shadow(1.0, -1.0)),
    ("shadow.agreement", "shadow", shadow(2.0)),
    ("shadow.tokens", "shadow.tokens", 0),
    ("tag", "tag", "x" * 65),
    ("tag", "tag", "accuracy:approximate"),
    ("tag", "tag", "accuracy:approximate:mp3"),
]
"""The field that an error names, what is changed, and to what."""


def test_reports_that_cannot_be_are_refused_by_name_and_change_nothing(server: LocalServer) -> None:
    client = server.connect()
    put_prompt(client, *prompt_of(HEAD, DOCUMENT))
    prompt, ranges = prompt_of(OTHER_HEAD, DOCUMENT)
    with client.find_segments(prompt, ranges, TRIAL) as resolved:
        for field, path, value in BAD_REPORTS:
            report = as_message(pb.ReportReuseRequest, report_of(resolved, shadowed()))
            change(report, path, value)
            with pytest.raises(InvalidRequestError, match=rf"^{field}="):
                report_as_is(client, report)
    with client.find_segments(prompt, ranges, TRIAL) as resolved:
        assert [(one.priority, one.best.reports) for one in resolved.chunks()] == [(b"", 0)] * 2
        assert resolved.found.gate.shadows == 0
    assert server.counter("blend_refused_reports") == len(BAD_REPORTS)
    assert server.counter("blend_reports") == 0


BAD_QUESTIONS: list[tuple[str, str, object]] = [
    ("segments", "segments", None),
    ("segments", "segments.2.start", 20),
    ("segments", "segments.0.stop", 0),
    ("segments.stop", "segments.2.stop", 80),
    ("segments.stop", "segments.3.stop", 110),
    ("segments.contents", "segments.1.contents", b"c" * 16),
    ("digests", "segments.1.contents", b"c" * 40),
    ("segments.contents", "segments.1.chains", b"c" * 16),
    ("segments.tokens", "segments.1.tokens", lambda found: found.__setitem__(0, 3)),
    ("segments.tokens", "segments.1.tokens", lambda found: found.extend([16] * 1024)),
    ("segments", "segments", lambda found: [found.add() for _ in range(257)]),
    ("max_variants", "max_variants", 6),
    ("tag", "tag", "accuracy:approximate"),
    ("tag", "tag", "accuracy:approximate:kvtc"),
    ("tag", "tag", "x" * 65),
    ("deadline_ms", "deadline_ms", 1 << 31),
    ("min_accuracy", "min_accuracy", 9),
    ("token_s", "prefill.token_s", -1.0),
]


def test_questions_that_cannot_be_are_refused_by_name(server: LocalServer) -> None:
    client = server.connect("grpc")
    prompt, ranges = prompt_of(HEAD, DOCUMENT, OTHER)
    segments = client.name_segments(prompt, ranges)
    with server.unchanged():
        for field, path, value in BAD_QUESTIONS:
            request = pb.ResolveRequest(segments=segments_to_messages(segments))
            change(request, path, value)
            with pytest.raises(InvalidRequestError, match=rf"^{field}="):
                ask(client, request)


def test_ranges_beyond_the_prompt_are_refused_before_anything_is_sent(
    client: Client,
) -> None:
    wrong = ([SegmentRange(0, 50)], [SegmentRange(10, 20), SegmentRange(15, 30)])
    for ranges in wrong:
        with pytest.raises(InvalidRequestError, match="segments"):
            client.find_segments(tokens(1, 40), ranges)
    with pytest.raises(InvalidRequestError, match="start < stop"):
        SegmentRange(5, 5)


def test_answers_that_do_not_fit_the_question_are_no_answers(client: Client) -> None:
    put_prompt(client, *prompt_of(HEAD, DOCUMENT))
    prompt, ranges = prompt_of(OTHER_HEAD, DOCUMENT)
    asked = client.name_segments(prompt, ranges)
    request = pb.ResolveRequest(segments=segments_to_messages(asked), trial=True)
    good = ask(client, request)

    damage: list[tuple[str, object]] = [
        ("segments", lambda found: found.pop()),
        ("segments.1.chunks", lambda found: found.pop()),
        ("segments.1.chunks.0.exact", True),
        ("segments.1.chunks.0.priority", bytes(1)),
        ("segments.1.chunks.0.variants.0.tier", 9),
        ("segments.1.chunks.0.variants.0.digest", b""),
        ("segments.1.chunks.0.variants.0.accuracy", 7),
        ("segments.1.ratio", NAN),
        ("rope", None),
    ]
    assert resolution_from_message(good, asked)
    for path, value in damage:
        reply = pb.ResolveResponse()
        reply.CopyFrom(good)
        change(reply, path, value)
        with pytest.raises(KVStoreError, match="invalid"):
            resolution_from_message(reply, asked)


EVERY = pytest.mark.parametrize("reader", ["shm", "grpc", "tcp"], indirect=True)
"""Over every transport."""
RUBBISH = 0xBEEF
SKIPPED = SkippedRows.of({0: [1, 2, 3], 1: range(16), 3: [0, 15]})
"""Of four chunks: some rows, all, none and two."""


@pytest.fixture
def server(make_server: ServerMaker) -> LocalServer:
    return make_server("--bulk", "127.0.0.1:0")


@pytest.fixture
def reader(server: LocalServer, request: pytest.FixtureRequest) -> Client:
    name: TransportName = getattr(request, "param", "tcp")
    options = ClientOptions(name, chunk_tokens=16, deadline_ms=DEADLINE_MS)
    reader = server.connect(name, MEDIUM, options)
    assert reader.transport_name == name
    return reader


def _resolved(reader: Client) -> SegmentMatch:
    put_prompt(reader, *prompt_of(HEAD, DOCUMENT, OTHER))
    return reader.find_segments(*prompt_of(OTHER_HEAD, DOCUMENT, OTHER), TRIAL)


def _rooms(chunks: Sequence[FoundChunk], model: Model) -> list[ChunkTensors]:
    rooms: list[ChunkTensors] = [
        empty_tensors(KVLayout.of(model, one.wanted.tokens)) for one in chunks
    ]
    for room in rooms:
        for parts in room[0]:
            for part in parts:
                part[...] = RUBBISH
    return rooms


def _read(
    resolved: SegmentMatch, reader: Client, skipped: SkippedRows | None
) -> tuple[list[FoundChunk], list[ChunkTensors], list[Layer]]:
    chunks = list(resolved.chunks())
    rooms = _rooms(chunks, reader.model)
    return chunks, rooms, list(resolved.layers(chunks, rooms, skipped))


def _assert_right(
    reader: Client, chunk: FoundChunk, room: ChunkTensors, kept: Sequence[int]
) -> None:
    """Fail unless *kept* rows are those that were put and the others as they were."""
    key = ChunkKey(reader.namespace + chunk.best.digest)
    wanted = tensors_of(key, reader.model, chunk.wanted.tokens)
    others = [row for row in range(chunk.wanted.tokens) if row not in kept]
    for layer, right in zip(room[0], wanted[0], strict=True):
        for part, values in zip(layer, right, strict=True):
            assert np.array_equal(part[:, kept], values[:, kept])
            assert (part[:, others] == RUBBISH).all()


@EVERY
def test_rows_that_are_left_out_are_not_sent_and_stay_as_they_were_and_the_others_are_right(
    reader: Client, server: LocalServer
) -> None:
    with _resolved(reader) as resolved:
        before = server.counter("get_bytes")
        _read(resolved, reader, None)
        whole = server.counter("get_bytes") - before
        chunks, rooms, layers = _read(resolved, reader, SKIPPED)
        cut = server.counter("get_bytes") - before - whole
        assert [one.wanted.tokens for one in chunks] == [16, 24, 16, 16]
        assert [layer.id for layer in layers] == [0, 1, 2, 3]
        assert {len(layer.tensors) for layer in layers} == {4}
        for place, (chunk, room) in enumerate(zip(chunks, rooms, strict=True)):
            kept = SKIPPED.kept(place, chunk.wanted.tokens)
            rows = range(chunk.wanted.tokens) if kept is None else kept.tolist()
            _assert_right(reader, chunk, room, list(rows))
    assert server.settled().leases == 0
    row_bytes = 4 * 2 * 4 * 64 * 2  # layers, parts, heads, their width, an item
    saved = (3 + 16 + 2) * row_bytes - 3 * 4 * 8  # of which are sums
    assert whole - cut == (0 if reader.transport_name == "shm" else saved)


@EVERY
def test_a_damaged_chunk_ends_a_prefix_and_is_dropped(reader: Client, server: LocalServer) -> None:
    """The damage is in a row that nobody wants: the layer proves wrong all the same."""
    with _resolved(reader) as resolved:
        key = ChunkKey(reader.namespace + list(resolved.chunks())[3].best.digest)
    damage(server, key)
    with _resolved(reader) as resolved:
        chunks, rooms, layers = _read(resolved, reader, SkippedRows.of({3: [15]}))
        counts = [len(layer.tensors) for layer in layers]
        assert set(counts) <= {3, 4}  # the layers behind it are on their way meanwhile
        assert counts[-1] == 3
        _assert_right(reader, chunks[2], rooms[2], list(range(16)))
    if reader.transport_name == "shm":  # found by the reader, who holds it: the next one drops it
        assert reader.get_chunks([key]) == []
    assert reader.lookup(keys=[key]).ready == 0


def test_rows_that_cannot_be_are_refused_by_name(server: LocalServer, reader: Client) -> None:
    with _resolved(reader) as resolved:
        digests = b"".join(chunk.best.digest for chunk in resolved.chunks())
    transport = reader._link.connected()
    with server.unchanged():
        for data in (b"x", SkippedRows.of({4: [1]}).pack(), bytes(12)):
            request = transport.request(ReadPlan(digests, 0, DEADLINE_MS), pb.VIA_STREAM)
            request.layer_major, request.skip_rows = True, data
            with pytest.raises(InvalidRequestError, match="skip_rows="):
                list(transport.session.connection.stream("Get", request, DEADLINE_MS))
        request = transport.request(ReadPlan(digests, 0, DEADLINE_MS), pb.VIA_STREAM)
        request.skip_rows = SKIPPED.pack()
        with pytest.raises(InvalidRequestError, match="with layer_major only"):
            list(transport.session.connection.stream("Get", request, DEADLINE_MS))
        beyond = ReadPlan(digests, 0, DEADLINE_MS, skipped=SkippedRows.of({4: [1]}))
        with (
            pytest.raises(InvalidRequestError, match="skip_rows="),
            read_layers(transport, beyond) as arriving,
        ):
            list(arriving)
