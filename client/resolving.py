"""Resolving: a Client's calls for blending, and what it was told, under a lease."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from kvstore.client.batches import batches, joined_resolutions, segment_batches
from kvstore.client.blend.segments import (
    NamedChunk,
    NamedSegment,
    SegmentRange,
    name_segments,
    resolution_from_message,
    segments_to_messages,
)
from kvstore.client.caller import Caller
from kvstore.client.connection import countdown
from kvstore.client.decode import Layer, LayerReader, given
from kvstore.client.forks import FORKS
from kvstore.client.tensors import LayerTensors
from kvstore.client.transport import ReadPlan, Transport
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import messages
from kvstore.proto.blend import (
    MAX_ASKED_CHUNKS,
    GateView,
    Resolution,
    ResolvedSegment,
    Variant,
    check_tag,
)
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.frame import FrameHeader
from kvstore.proto.messages import accuracy_number, engine_to_message
from kvstore.proto.plans import EngineTerms, PrefillModel
from kvstore.proto.row_mask import SkippedRows
from kvstore.proto.types import Accuracy, ChunkKey


@dataclass(frozen=True, slots=True)
class ResolveTerms:
    """How a prompt is resolved. ``tag``: what kind of prompt it is; gates are one for each.

    ``is_trial``: the engine answers from a full prefill and blends beside it; such a request is
    let through a closed gate. ``max_variants`` of a chunk, 0: all, 5 at most. ``prefill``: with
    it, what is no faster to load and repair is left out. ``extra``: cache salt and multimodal
    hashes, as for ``keys``. ``weights``: a name of weights that changed in place. Raises
    InvalidRequestError.
    """

    tag: str = ""
    is_trial: bool = False
    min_accuracy: Accuracy = Accuracy.exact
    max_variants: int = 0
    prefill: PrefillModel | None = None
    extra: tuple[bytes, ...] = ()
    weights: bytes = b""

    @property
    def names(self) -> tuple[bytes, ...]:
        """What chunks are named by beside their tokens."""
        return (self.weights, *self.extra) if self.weights else self.extra

    def __post_init__(self) -> None:
        check_tag(self.tag)
        if self.max_variants < 0:
            raise InvalidRequestError("max_variants", self.max_variants, "a count, or 0")


@dataclass(frozen=True, slots=True)
class FoundChunk:
    """A chunk of the prompt and the best there is in its stead."""

    asked: NamedChunk
    best: Variant
    is_exact: bool
    priority: bytes
    ratio: float


class Resolved:
    """What there is of a prompt's segments; leave the ``with`` to release it.

    ``asked`` are the segments of the whole prompt, those between the ranges that were given
    included, long ones cut; ``found.segments`` has one for each. ``prompt_tokens`` counts the
    prompt.
    """

    def __init__(
        self,
        asked: Sequence[NamedSegment],
        found: Resolution,
        client: Resolving,
        terms: ResolveTerms,
    ) -> None:
        self.asked = tuple(asked)
        self.found = found
        self.terms = terms
        self.prompt_tokens = asked[-1].stop if asked else 0
        self._client = client
        self._leases = [one for one in (found.lease_id, *found.more_leases) if one]
        self._is_released = not self._leases
        self._process = FORKS.process

    def chunks(self) -> Iterator[FoundChunk]:
        """Yield the chunks that something is there of, in order."""
        segments: Iterator[tuple[NamedSegment, ResolvedSegment]]
        segments = zip(self.asked, self.found.segments, strict=True)
        for asked, told in segments:
            for chunk, one in zip(asked.chunks, told.chunks, strict=True):
                if one.variants:
                    yield FoundChunk(chunk, one.variants[0], one.is_exact, one.priority, told.ratio)

    def layers(
        self,
        chunks: Sequence[FoundChunk],
        out: Sequence[LayerTensors] | None = None,
        skipped: SkippedRows | None = None,
    ) -> Generator[Layer, None, None]:
        """Read *chunks* layer by layer as ``Client.get_layers`` does, under this lease.

        A frame that is not of the tokens or the position that were promised ends them, as one
        that is lost does. Rows of *skipped*, by a chunk's place in *chunks*, need not come: where
        frames are raw they stay as they were in *out*, and are not sent by a transport that
        copies. Raises LeaseExpiredError after the release or past the lease's time.
        """
        FORKS.check(self._process, "the lease")
        return self._client._resolved_layers(self, chunks, out, skipped)

    def release(self) -> None:
        """End the lease. Idempotent; a child leaves it to the parent."""
        if not self._is_released:
            self._is_released = True
            if self._process is not FORKS.process:
                return
            self._client._release(self._leases)

    def abandon(self) -> None:
        """Have the lease end by its time: of a server that does not answer nothing is asked."""
        self._is_released = True

    def __enter__(self) -> Resolved:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Resolving(Caller):
    """Segments that are no prefixes. Thread-safe."""

    def name_segments(
        self, tokens: Sequence[int], ranges: Sequence[SegmentRange], extra: Sequence[bytes] = ()
    ) -> list[NamedSegment]:
        """Cut and name a prompt as ``resolve`` does: what is to be found later is put like this."""
        return name_segments(tokens, ranges, self.options.chunk_tokens, extra)

    def resolve(
        self,
        tokens: Sequence[int],
        ranges: Sequence[SegmentRange],
        terms: ResolveTerms | None = None,
    ) -> Resolved:
        """Ask what there is of a prompt whose documents, messages or tools' answers are *ranges*.

        Chunks that are here as this very prompt has them are exact; for others of *ranges* that
        are approximate, chunks with the same tokens from other prompts are named, if the gate of
        this model and tag is open. One round trip for MAX_ASKED_CHUNKS chunks; what is named is
        kept from eviction until the answer is released. Only digests are sent. Raises
        ModelError when the server turns keys by other rope parameters.
        """
        terms = terms or ResolveTerms()
        named = self.name_segments(tokens, ranges, terms.names)
        engine = EngineTerms(terms.prefill, len(tokens)) if terms.prefill is not None else None
        request = pb.ResolveRequest(
            tag=terms.tag,
            trial=terms.is_trial,
            deadline_ms=self.options.deadline_ms,
            min_accuracy=accuracy_number(terms.min_accuracy),
            max_variants=terms.max_variants,
            prefill=engine_to_message(engine),
        )

        def work(transport: Transport) -> Resolved:
            request.session_id = transport.session.terms.session_id
            left_ms, found = countdown(self.options.deadline_ms), list[Resolution]()
            groups = segment_batches(named, _most(transport))
            try:
                for some in groups:
                    del request.segments[:]
                    request.segments.extend(segments_to_messages(some))
                    reply = transport.calls.call("Resolve", request, left_ms(), pb.ResolveResponse)
                    found.append(resolution_from_message(reply, some))
            except BaseException:
                self._release([one.lease_id for one in found if one.lease_id])
                raise
            asked = [segment for some in groups for segment in some]
            return Resolved(asked, joined_resolutions(found), self, terms)

        resolved = self._with_session(work)
        found = resolved.found
        if found.rope != self.representation.rope:
            resolved.release()
            raise ModelError("rope", found.rope, f"ours is {self.representation.rope}")
        return resolved

    def report_reuse(self, report: pb.ReportReuseRequest) -> GateView:
        """Tell the server what one blended request was worth; see ``client/blend/gate.py``.

        Return the gate as it is then. Raises InvalidRequestError that names what cannot be.
        """

        def work(transport: Transport) -> GateView:
            left_ms = countdown(self.options.deadline_ms)
            for part in _parts(report, _most(transport)):
                part.session_id = transport.session.terms.session_id
                reply = transport.calls.call("ReportReuse", part, left_ms(), pb.ReportReuseResponse)
            return messages.as_value(GateView, reply.gate)

        return self._with_session(work)

    def _resolved_layers(
        self,
        resolved: Resolved,
        chunks: Sequence[FoundChunk],
        out: Sequence[LayerTensors] | None,
        skipped: SkippedRows | None = None,
    ) -> Generator[Layer, None, None]:
        digests = [one.best.digest for one in chunks]
        keys = [ChunkKey(self.namespace + digest) for digest in digests]
        found, least = resolved.found, resolved.terms.min_accuracy
        lease_id = 0 if found.more_leases else found.lease_id  # one cannot name several
        transport = self._connected()
        plan = ReadPlan(digests, lease_id, self.options.deadline_ms, least, skipped=skipped)
        with ExitStack() as stack:
            arriving = self._layers_arriving(stack, transport, plan)
            accepts = partial(_is_promised, chunks)
            reading = LayerReader(
                self._reader, transport.session, keys, given(out), accepts, skipped
            )
            with closing(reading.layers(arriving)) as layers:
                yield from layers
        if reading.broken is not None:
            self._quarantine(transport, reading.broken)


def _most(transport: Transport) -> int:
    """Return how many chunks one Resolve or report may be about."""
    return min(MAX_ASKED_CHUNKS, transport.session.terms.max_batch_chunks)


def _parts(report: pb.ReportReuseRequest, limit: int) -> Iterator[pb.ReportReuseRequest]:
    """Cut a report; what is not said of its chunks is in the first part alone."""
    if len(report.chunks) <= limit:
        yield report
        return
    for first, some in batches(list(report.chunks), limit):
        part = pb.ReportReuseRequest(tag=report.tag)
        if not first:
            part.CopyFrom(report)
            del part.chunks[:]
        part.chunks.extend(some)
        yield part


def _is_promised(chunks: Sequence[FoundChunk], place: int, header: FrameHeader) -> bool:
    """Whether a frame holds the tokens that were asked for, computed where the server says."""
    one = chunks[place]
    if header.layout.tokens != one.asked.tokens:
        return False
    if one.is_exact:  # its chain digest names the tokens
        return True
    return header.content == one.asked.content and header.position == one.best.position
