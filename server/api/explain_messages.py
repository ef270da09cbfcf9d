"""Explain on the wire: who may ask what, and the messages of the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvstore.codecs.base import codec_name
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import wire
from kvstore.proto.blend_wire import gate_to_message
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import DIGEST_BYTES, ChunkKey, Fidelity, Match, Namespace
from kvstore.server.api.validation import Checks, fidelity, fitting
from kvstore.server.index.model_registry import ModelNamespace
from kvstore.server.security.sessions import Session, SessionTable
from kvstore.server.store.explain import Explainer, Reason, SimilarModel
from kvstore.server.store.miss_log import LoggedMiss, MissLog, Report
from kvstore.server.store.store import Store
from kvstore.server.telemetry.request_trace import check_local

LIST_BYTES = 1 << 18
"""Of a reply, for each list but that of chunks: what is further down is left out."""


class ExplainDesk:
    """Answers Explain, and is told of what it will have to explain. Thread-safe."""

    def __init__(self, store: Store, sessions: SessionTable, checks: Checks) -> None:
        moves = store.moves
        self._catalog = store.catalog
        self._gates = store.blends.gates
        self._sessions = sessions
        self._checks = checks
        self._clock: Callable[[], float] = checks.clock
        self._explainer = Explainer(
            store.catalog, moves.tiers.sources, moves.catalog.outcomes, moves.clock,
            store.states, store.spaces,
        )  # fmt: skip
        self._log = MissLog(checks.clock)
        sessions.on_open.append(self._explainer.spaces.note)

    def looked_up(
        self, session: Session, keys: Sequence[ChunkKey], match: Match, least: Fidelity
    ) -> None:
        """Record a lookup and what it found; the reason is put into words when it is shown."""
        if match.ready < len(keys):
            facts = self._explainer.facts(keys[match.ready], least)
            self._log.note(session, len(keys), match, facts)

    def heard(self, request: pb.HeartbeatRequest, session: Session) -> None:
        """Take note of what an engine counted."""
        self._log.report(session, request.counts)

    def answer(self, request: pb.ExplainRequest, peer: str, stamp: pb.Server) -> pb.ExplainResponse:
        """Answer *peer*. Raises PermissionDeniedError without a session from another host."""
        space = self._space(request, peer)
        reply = pb.ExplainResponse(server=stamp)
        if request.digests:
            limit = max(self._checks.limits.max_batch_chunks, wire.MAX_EXPLAINED)
            keys = wire.keys_of_digests(request.digests, space, limit)
            found = self._explainer.explain(space, keys, fidelity(request.min_fidelity))
            reply.hit_chunks = found.hit_chunks
            reply.chunks.extend(fitting(map(_reason, found.reasons), wire.MESSAGE_BYTES))
            reply.near.extend(fitting(map(_similar, found.similar), LIST_BYTES))
            reply.left_out += len(found.reasons) + len(found.similar)
            reply.left_out -= len(reply.chunks) + len(reply.near)
        if request.recent:
            self._add_recent(request.recent, reply)
        if request.spaces:
            spaces = self._explainer.spaces.all()
            reply.spaces.extend(fitting(map(self._known, spaces), 2 * LIST_BYTES))
            reply.left_out += len(spaces) - len(reply.spaces)
        return reply

    def _add_recent(self, count: int, reply: pb.ExplainResponse) -> None:
        misses, reports, gates = self._log.misses(count), self._log.reports(), self._gates.views()
        reply.recent.extend(fitting(self._misses(misses), LIST_BYTES))
        reply.engines.extend(fitting(map(self._report, reports), LIST_BYTES))
        reply.gates.extend(fitting(map(gate_to_message, gates), LIST_BYTES))
        reply.left_out += len(misses) + len(reports) + len(gates)
        reply.left_out -= len(reply.recent) + len(reply.engines) + len(reply.gates)

    def _space(self, request: pb.ExplainRequest, peer: str) -> Namespace:
        if request.session_id:
            if request.recent or request.spaces:
                fix = "ask for recent misses and spaces without a session, on the server's host"
                raise InvalidRequestError("session_id", request.session_id, fix)
            return self._sessions.get(request.session_id).namespace
        check_local(peer, "Explain without a session")
        if request.digests and len(request.key_namespace) != DIGEST_BYTES:
            raise InvalidRequestError(
                "key_namespace", request.key_namespace.hex(), f"give {DIGEST_BYTES} bytes"
            )
        return Namespace(request.key_namespace)

    def _known(self, space: ModelNamespace) -> pb.KnownSpace:
        return _space_message(space, self._catalog.queries.count_in(space.namespace))

    def _misses(self, misses: Sequence[LoggedMiss]) -> Iterator[pb.Miss]:
        for miss in misses:
            others = self._explainer.others_with(miss.session.namespace, miss.facts.key)
            reason = self._explainer.of_miss(miss.facts, others)
            yield pb.Miss(
                ago_s=self._clock() - miss.at_s,
                client=miss.session.client,
                model_id=miss.session.representation.model_id,
                chunks=miss.asked,
                ready=miss.ready,
                pending=miss.pending,
                state=reason.state,
                reason=reason.text,
            )

    def _report(self, report: Report) -> pb.EngineReport:
        return pb.EngineReport(
            ago_s=self._clock() - report.at_s,
            client=report.session.client,
            model_id=report.session.representation.model_id,
            counts=dict(report.counts),
        )


def _reason(reason: Reason) -> pb.ChunkReason:
    return pb.ChunkReason(
        digest=reason.key[DIGEST_BYTES:],
        state=reason.state,
        reason=reason.text,
        copies=[
            pb.Copy(
                tier=tier,
                codec=codec_name(info.codec_id),
                size_bytes=info.size_bytes,
                fidelity=info.fidelity,
            )
            for tier, info in reason.copies
        ],
    )


def _similar(similar: SimilarModel) -> pb.KnownSpace:
    message = _space_message(similar.space, similar.chunks)
    message.same_tokens = similar.has_tokens
    message.differences.extend(
        pb.Difference(field=one.field, stored=one.stored, asked=one.asked)
        for one in similar.differing
    )
    return message


def _space_message(space: ModelNamespace, chunks: int) -> pb.KnownSpace:
    return pb.KnownSpace(
        key_namespace=space.namespace,
        representation=wire.representation_to_message(space.representation),
        client=space.client,
        chunks=chunks,
    )
