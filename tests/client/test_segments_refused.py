"""What Resolve and ReportReuse refuse, by name, and answers that are none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers.documents import (
    DOCUMENT,
    HEAD,
    OTHER,
    OTHER_HEAD,
    TRIAL,
    prompt_of,
    put_prompt,
    report_of,
    shadowed,
)
from helpers.local_server import LocalServer
from helpers.prompts import tokens

from kvstore.client import Client
from kvstore.client.blend.plan import SegmentRange
from kvstore.client.segments import resolution_from_message, segments_to_messages
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError, KVStoreError


@pytest.fixture
def client(server: LocalServer) -> Client:
    return server.connect()


def ask(client: Client, request: pb.ResolveRequest) -> pb.ResolveResponse:
    """Ask what no client would."""
    request.session_id = client._link.connected().session.terms.session_id
    return client._link.call("Resolve", request, pb.ResolveResponse)


# --- what is refused

Change = Callable[[pb.ReportReuseRequest], object]


def _halves(value: float) -> bytes:
    return np.full(16, value, "<f2").tobytes()


BAD_REPORTS: dict[str, tuple[str, Change]] = {
    "unknown variant": ("chunks.digest", lambda r: setattr(r.chunks[0], "digest", b"x" * 16)),
    "short digest": ("chunks.digest", lambda r: setattr(r.chunks[0], "digest", b"x")),
    "deviations that do not fit": (
        "chunks.deviations", lambda r: setattr(r.chunks[0], "deviations", b"\0" * 30),
    ),
    "deviations that are no numbers": (
        "chunks.deviations", lambda r: setattr(r.chunks[0], "deviations", _halves(float("nan"))),
    ),
    "negative deviations": (
        "chunks.deviations", lambda r: setattr(r.chunks[0], "deviations", _halves(-2.0)),
    ),
    "endless deviations": (
        "chunks.deviations", lambda r: setattr(r.chunks[0], "deviations", _halves(float("inf"))),
    ),
    "bits that do not fit": ("chunks.selected", lambda r: setattr(r.chunks[0], "selected", b"\0")),
    "attention that does not fit": (
        "chunks.query_attention", lambda r: setattr(r.chunks[0], "query_attention", b"\0" * 15),
    ),
    "more attention than there is": (
        "chunks.context", lambda r: setattr(r.chunks[0], "intra_mass", 17.0),
    ),
    "attention that is no number": (
        "chunks.intra_mass", lambda r: setattr(r.chunks[0], "intra_mass", float("nan")),
    ),
    "context without a digest": (
        "context.content", lambda r: r.chunks[0].context.add(content=b"", tokens=16, mass=0.1),
    ),
    "context without tokens": (
        "context.tokens", lambda r: r.chunks[0].context.add(content=b"c" * 16, mass=0.1),
    ),
    "negative mass": (
        "context.mass",
        lambda r: r.chunks[0].context.add(content=b"c" * 16, tokens=16, mass=-0.1),
    ),
    "the same context twice": (
        "chunks.context",
        lambda r: [r.chunks[0].context.add(content=b"c" * 16, tokens=16) for _ in range(2)],
    ),
    "too much context": (
        "chunks.context",
        lambda r: [r.chunks[0].context.add(content=bytes([n]) * 16, tokens=16) for n in range(17)],
    ),
    "a ratio above 1": ("ratio", lambda r: setattr(r, "ratio", 1.5)),
    "a ratio that is no number": ("ratio", lambda r: setattr(r, "ratio", float("nan"))),
    "negative time": ("load_ms", lambda r: setattr(r, "load_ms", -1.0)),
    "endless time": ("full_ms", lambda r: setattr(r, "full_ms", float("inf"))),
    "divergence that is no number": (
        "shadow.divergence", lambda r: r.shadow.CopyFrom(shadowed(1.0, float("nan"))),
    ),
    "negative divergence": ("shadow.divergence", lambda r: r.shadow.CopyFrom(shadowed(1.0, -1.0))),
    "agreement above 1": ("shadow.agreement", lambda r: r.shadow.CopyFrom(shadowed(2.0))),
    "a comparison of nothing": (
        "shadow.tokens", lambda r: r.shadow.CopyFrom(pb.ShadowResult(agreement=1.0)),
    ),
    "a long tag": ("tag", lambda r: setattr(r, "tag", "x" * 65)),
    "lossy copies of no codec": ("tag", lambda r: setattr(r, "tag", "accuracy:approximate")),
    "lossy copies of an unknown codec": (
        "tag", lambda r: setattr(r, "tag", "accuracy:approximate:mp3"),
    ),
}  # fmt: skip


def test_reports_that_cannot_be_are_refused_by_name_and_change_nothing(
    server: LocalServer,
) -> None:
    client = server.connect()
    put_prompt(client, *prompt_of(HEAD, DOCUMENT))
    prompt, ranges = prompt_of(OTHER_HEAD, DOCUMENT)
    with client.find_segments(prompt, ranges, TRIAL) as resolved:
        for field, change in BAD_REPORTS.values():
            report = report_of(resolved)
            report.shadow.CopyFrom(shadowed())
            change(report)
            with pytest.raises(InvalidRequestError, match=rf"^{field}="):
                client.report_reuse(report)
    with client.find_segments(prompt, ranges, TRIAL) as resolved:
        assert [(one.priority, one.best.reports) for one in resolved.chunks()] == [(b"", 0)] * 2
        assert resolved.found.gate.shadows == 0
    assert server.counter("blend_refused_reports") == len(BAD_REPORTS)
    assert server.counter("blend_reports") == 0


Wrong = Callable[[pb.ResolveRequest], object]


def _cut_into_too_many(request: pb.ResolveRequest) -> None:
    request.segments[1].tokens.extend([16] * 1024)


BAD_QUESTIONS: dict[str, tuple[str, Wrong]] = {
    "nothing": ("segments", lambda r: r.ClearField("segments")),
    "segments over one another": ("segments", lambda r: setattr(r.segments[2], "start", 20)),
    "an end before its start": ("segments", lambda r: setattr(r.segments[0], "stop", 0)),
    "a truncated segment": ("segments.stop", lambda r: setattr(r.segments[2], "stop", 80)),
    "a segment that goes on": ("segments.stop", lambda r: setattr(r.segments[3], "stop", 110)),
    "fewer contents": (
        "segments.contents", lambda r: setattr(r.segments[1], "contents", b"c" * 16),
    ),
    "half a digest": ("digests", lambda r: setattr(r.segments[1], "contents", b"c" * 40)),
    "fewer chains": ("segments.contents", lambda r: setattr(r.segments[1], "chains", b"c" * 16)),
    "tiny chunks": ("segments.tokens", lambda r: r.segments[1].tokens.__setitem__(0, 3)),
    "too many chunks": (
        "segments.tokens", _cut_into_too_many,
    ),
    "too many segments": ("segments", lambda r: [r.segments.add() for _ in range(257)]),
    "too many variants": ("max_variants", lambda r: setattr(r, "max_variants", 6)),
    "the tag of lossy copies": ("tag", lambda r: setattr(r, "tag", "accuracy:approximate")),
    "a codec's lossy copies": ("tag", lambda r: setattr(r, "tag", "accuracy:approximate:kvt")),
    "a long tag": ("tag", lambda r: setattr(r, "tag", "x" * 65)),
    "a far deadline": ("deadline_ms", lambda r: setattr(r, "deadline_ms", 1 << 31)),
    "an unknown accuracy": ("min_accuracy", lambda r: setattr(r, "min_accuracy", 9)),
    "an engine that goes back": (
        "token_s", lambda r: r.prefill.CopyFrom(pb.Prefill(token_s=-1.0)),
    ),
}  # fmt: skip


def test_questions_that_cannot_be_are_refused_by_name(server: LocalServer) -> None:
    client = server.connect("grpc")
    prompt, ranges = prompt_of(HEAD, DOCUMENT, OTHER)
    segments = client.name_segments(prompt, ranges)
    with server.unchanged():
        for field, change in BAD_QUESTIONS.values():
            request = pb.ResolveRequest(segments=segments_to_messages(segments))
            change(request)
            with pytest.raises(InvalidRequestError, match=rf"^{field}="):
                ask(client, request)


def test_ranges_that_are_not_of_the_prompt_are_refused_before_anything_is_sent(
    client: Client,
) -> None:
    wrong = ([SegmentRange(0, 50)], [SegmentRange(10, 20), SegmentRange(15, 30)])
    for ranges in wrong:
        with pytest.raises(InvalidRequestError, match="segments"):
            client.find_segments(tokens(1, 40), ranges)
    with pytest.raises(InvalidRequestError, match="start below stop"):
        SegmentRange(5, 5)


def test_answers_that_do_not_fit_the_question_are_no_answers(client: Client) -> None:
    put_prompt(client, *prompt_of(HEAD, DOCUMENT))
    prompt, ranges = prompt_of(OTHER_HEAD, DOCUMENT)
    asked = client.name_segments(prompt, ranges)
    request = pb.ResolveRequest(segments=segments_to_messages(asked), trial=True)
    good = ask(client, request)

    def damaged(change: Callable[[pb.ResolveResponse], object]) -> pb.ResolveResponse:
        reply = pb.ResolveResponse()
        reply.CopyFrom(good)
        change(reply)
        return reply

    changes: list[Callable[[pb.ResolveResponse], object]] = [
        lambda r: r.segments.pop(),
        lambda r: r.segments[1].chunks.pop(),
        lambda r: setattr(r.segments[1].chunks[0], "exact", True),
        lambda r: setattr(r.segments[1].chunks[0], "priority", b"\0"),
        lambda r: setattr(r.segments[1].chunks[0].variants[0], "tier", 9),
        lambda r: setattr(r.segments[1].chunks[0].variants[0], "digest", b""),
        lambda r: setattr(r.segments[1].chunks[0].variants[0], "accuracy", 7),
        lambda r: setattr(r.segments[1], "ratio", float("nan")),
        lambda r: r.ClearField("rope"),
    ]
    assert resolution_from_message(good, asked)
    for change in changes:
        with pytest.raises(KVStoreError, match="damaged"):
            resolution_from_message(damaged(change), asked)
