"""What Resolve and ReportReuse refuse, by name, and answers that are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from kvstore.proto.messages import as_message


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


def test_reports_that_cannot_be_are_refused_by_name_and_change_nothing(
    server: LocalServer,
) -> None:
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
        with pytest.raises(KVStoreError, match="damaged"):
            resolution_from_message(reply, asked)
