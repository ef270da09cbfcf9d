"""Segments that are not prefixes: their stored chunks, leased while they are read."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

from kvstore.client.blend.plan import NamedChunk, NamedSegment
from kvstore.client.chunk import LayerTensors
from kvstore.client.chunk_reads import ChunkRequest, read_layers
from kvstore.client.decode import Layer, fresh, given
from kvstore.client.forks import FORKS
from kvstore.client.lookups import Held
from kvstore.client.server_link import LeftMs, ServerLink, batches, check_kind
from kvstore.client.transports.base import Transport
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.blend import (
    MAX_REQUESTED_CHUNKS,
    GateView,
    Resolution,
    ResolvedChunk,
    ResolvedSegment,
    ReuseReport,
    Variant,
    check_tag,
)
from kvstore.proto.errors import InvalidRequestError, KVStoreError, ModelError
from kvstore.proto.frame import FrameHeader
from kvstore.proto.keys import chunk_key
from kvstore.proto.messages import accuracy_number, as_message, as_value, engine_to_message
from kvstore.proto.plans import EngineTerms, PrefillModel
from kvstore.proto.row_mask import SkippedRows
from kvstore.proto.types import DIGEST_BYTES, Accuracy


@dataclass(frozen=True, slots=True)
class SegmentQuery:
    """How a prompt is resolved. ``tag``: the kind of prompt; each has its own gate.

    ``is_trial``: the engine answers from a full prefill and blends only for comparison; such a
    request passes a closed gate. ``max_variants`` of a chunk, 0: all, 5 at most. ``prefill``: with
    it, segments that are no faster to load and repair are left out. ``extra``: cache salt and
    multimodal hashes, as for ``keys``. ``weights``: a name of weights that changed in place.
    Raises InvalidRequestError.
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
        """The parts of a chunk's name beside its tokens."""
        return (self.weights, *self.extra) if self.weights else self.extra

    def __post_init__(self) -> None:
        check_tag(self.tag)
        if self.max_variants < 0:
            raise InvalidRequestError("max_variants", self.max_variants, "give a count, or 0")


@dataclass(frozen=True, slots=True)
class FoundChunk:
    """A chunk of the prompt, and the best stored chunk for it."""

    wanted: NamedChunk
    best: Variant
    is_exact: bool
    priority: bytes
    ratio: float


class SegmentMatch(Held):
    """The stored chunks of a prompt's segments; leave the ``with`` to release them. ``wanted`` are
    the segments of the whole prompt, including those between the given ranges, long ones cut;
    ``found.segments`` has one for each.
    """

    def __init__(
        self,
        wanted: Sequence[NamedSegment],
        found: Resolution,
        link: ServerLink,
        terms: SegmentQuery,
    ) -> None:
        super().__init__([one for one in (found.lease_id, *found.more_leases) if one], link.release)
        self.wanted = tuple(wanted)
        self.found = found
        self.terms = terms
        self.prompt_tokens = wanted[-1].stop if wanted else 0
        self._link = link

    def chunks(self) -> Iterator[FoundChunk]:
        """Yield the chunks with a stored variant, in order."""
        for wanted, here in zip(self.wanted, self.found.segments, strict=True):
            for chunk, one in zip(wanted.chunks, here.chunks, strict=True):
                if one.variants:
                    yield FoundChunk(chunk, one.variants[0], one.is_exact, one.priority, here.ratio)

    def layers(
        self,
        chunks: Sequence[FoundChunk],
        out: Sequence[LayerTensors] | None = None,
        skipped: SkippedRows | None = None,
    ) -> Generator[Layer, None, None]:
        """Read *chunks* layer by layer as ``Client.get_layers`` does, under this lease.

        A frame of other tokens or another position than promised ends them, as a lost one does.
        Rows of *skipped*, by index in *chunks*, are not needed: for raw frames they keep their
        contents in *out*, and transports that copy do not send them. Raises LeaseExpiredError after
        the release or past the lease's time.
        """
        FORKS.check(self._process, "the lease")
        transport, digests = self._link.connected(), [one.best.digest for one in chunks]
        space = transport.session.namespace
        request = ChunkRequest(
            [chunk_key(space, digest) for digest in digests],
            fresh if out is None else given(out),
            self.terms.min_accuracy,
            self._link.options.deadline_ms,
            # A read can name only one.
            self._leases if len(self._leases) == 1 else (),
            accepts=partial(_is_promised, chunks),
            skipped=skipped,
        )
        return read_layers(self._link, transport, request)

    def abandon(self) -> None:
        """Let the lease expire, without a call to a server that does not answer."""
        self._is_released = True


def find_segments(
    link: ServerLink, named: Sequence[NamedSegment], prompt_tokens: int, terms: SegmentQuery
) -> SegmentMatch:
    """See ``Client.find_segments``."""
    engine = EngineTerms(terms.prefill, prompt_tokens) if terms.prefill is not None else None
    request = pb.ResolveRequest(
        tag=terms.tag,
        trial=terms.is_trial,
        deadline_ms=link.options.deadline_ms,
        min_accuracy=accuracy_number(terms.min_accuracy),
        max_variants=terms.max_variants,
        prefill=engine_to_message(engine),
    )

    def work(transport: Transport, left_ms: LeftMs) -> SegmentMatch:
        request.session_id = transport.session.terms.session_id
        found = list[Resolution]()
        groups = segment_batches(named, _most(transport))
        try:
            for some in groups:
                del request.segments[:]
                request.segments.extend(segments_to_messages(some))
                reply = transport.calls.call("Resolve", request, left_ms(), pb.ResolveResponse)
                found.append(resolution_from_message(reply, some))
        except BaseException:
            link.release([one.lease_id for one in found if one.lease_id])
            raise
        wanted = [segment for some in groups for segment in some]
        return SegmentMatch(wanted, joined_resolutions(found), link, terms)

    resolved = link.run(work)
    found = resolved.found
    if found.rope != link.model.rope:
        resolved.release()
        raise ModelError("rope", found.rope, f"the client's model has {link.model.rope}")
    return resolved


def report_reuse(link: ServerLink, report: ReuseReport) -> GateView:
    """See ``Client.report_reuse``."""
    check_kind("report", report, ReuseReport)

    def work(transport: Transport, left_ms: LeftMs) -> GateView:
        session_id, rest = transport.session.terms.session_id, ReuseReport(report.tag)
        for first, some in batches(report.chunks, _most(transport)):
            part = replace(rest if first else report, chunks=tuple(some))
            try:
                request = as_message(pb.ReportReuseRequest, part, session_id=session_id)
            except (TypeError, ValueError, AttributeError) as error:  # from protobuf
                raise InvalidRequestError("report", str(error), "see ReuseReport") from None
            reply = transport.calls.call("ReportReuse", request, left_ms(), pb.ReportReuseResponse)
        return as_value(GateView, reply.gate)

    return link.run(work)


def segments_to_messages(segments: Iterable[NamedSegment]) -> list[pb.PromptSegment]:
    """Return the protobuf form of *segments*."""
    return [
        as_message(
            pb.PromptSegment,
            one,
            chains=b"".join(chunk.digest for chunk in one.chunks),
            contents=b"".join(chunk.content for chunk in one.chunks),
            tokens=[chunk.tokens for chunk in one.chunks],
        )
        for one in segments
    ]


def resolution_from_message(
    message: pb.ResolveResponse, wanted: Sequence[NamedSegment]
) -> Resolution:
    """Return the resolution of the segments *wanted*. Raises KVStoreError if it is invalid."""
    names = tuple(message.tier_names)
    try:
        pairs = zip(message.segments, wanted, strict=True)
        segments = tuple(_segment(one, segment, names) for one, segment in pairs)
        return as_value(Resolution, message, segments=segments)
    except (ValueError, IndexError) as error:
        raise KVStoreError(f"the server's reply about segments is invalid: {error}") from None


def _segment(
    message: pb.ResolvedSegment, wanted: NamedSegment, names: Sequence[str]
) -> ResolvedSegment:
    chunks = []
    for one, chunk in zip(message.chunks, wanted.chunks, strict=True):
        if len(one.priority) not in (0, chunk.tokens):
            raise ValueError(f"{len(one.priority)} priorities for {chunk.tokens} tokens")
        variants = tuple(_variant(variant, names) for variant in one.variants)
        if one.exact and [variant.digest for variant in variants] != [chunk.digest]:
            raise ValueError("an exact chunk with another digest")
        if variants and not (one.exact or wanted.approximate):
            raise ValueError("variants that were not requested")
        chunks.append(ResolvedChunk(one.exact, variants, one.priority))
    if not 0 <= message.ratio <= 1:
        raise ValueError(f"ratio {message.ratio}")
    return ResolvedSegment(tuple(chunks), message.ratio, message.load_ms, message.recompute_ms)


def _variant(message: pb.Variant, names: Sequence[str]) -> Variant:
    if len(message.digest) != DIGEST_BYTES or len(message.parent) != DIGEST_BYTES:
        raise ValueError(f"a digest that is not {DIGEST_BYTES} bytes")
    return as_value(Variant, message, tier=names[message.tier])


def segment_batches(segments: Sequence[NamedSegment], limit: int) -> list[list[NamedSegment]]:
    """Return groups of at most *limit* chunks, in order; longer segments are cut."""
    groups: list[list[NamedSegment]] = [[]]
    space = limit
    for one in segments:
        start = one.start
        for first, some in batches(one.chunks, limit):
            is_last = first + len(some) == len(one.chunks)
            stop = one.stop if is_last else some[-1].stop
            if len(some) > space:
                groups.append([])
                space = limit
            groups[-1].append(replace(one, start=start, stop=stop, chunks=tuple(some)))
            space -= len(some)
            start = stop
    return groups


def joined_resolutions(found: Sequence[Resolution]) -> Resolution:
    """Return the resolution of a prompt from those of its several requests."""
    segments = tuple(segment for one in found for segment in one.segments)
    chunks = [chunk for segment in segments for chunk in segment.chunks]
    prefix = found[0].exact_prefix
    if prefix == sum(len(segment.chunks) for segment in found[0].segments):
        prefix += len(list(takewhile(lambda chunk: chunk.is_exact, chunks[prefix:])))
    lease_id, *more = [one.lease_id for one in found if one.lease_id] or [0]
    return replace(
        found[-1],
        segments=segments,
        exact_prefix=prefix,
        is_shadow=any(one.is_shadow for one in found),
        lease_id=lease_id,
        lease_ttl_ms=min((one.lease_ttl_ms for one in found if one.lease_id), default=0),
        more_leases=tuple(more),
    )


def _most(transport: Transport) -> int:
    return min(MAX_REQUESTED_CHUNKS, transport.session.terms.max_batch_chunks)


def _is_promised(chunks: Sequence[FoundChunk], place: int, header: FrameHeader) -> bool:
    """Whether a frame has the wanted tokens, computed at the position that the server stated."""
    one = chunks[place]
    if header.layout.tokens != one.wanted.tokens:
        return False
    if one.is_exact:  # its chain digest names the tokens
        return True
    return header.content == one.wanted.content and header.position == one.best.position
