"""The blocking client of one server."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias
from weakref import finalize, ref

from kvstore.client import chunk_reads, segments
from kvstore.client.blend.plan import NamedSegment, SegmentRange, name_segments
from kvstore.client.chunk import Chunk, LayerTensors, PlannedChunk, Shard
from kvstore.client.chunk_puts import LayeredPut, put_by_layers, put_whole
from kvstore.client.chunk_reads import ChunkRequest
from kvstore.client.connection import Until
from kvstore.client.deadline import Levelled, LevelledGet
from kvstore.client.decode import Layer, Target, fresh
from kvstore.client.forks import FORKS
from kvstore.client.kv import (
    KV,
    AnyKV,
    Hit,
    Prompt,
    StagedKV,
    batches_to_put,
    empty_kv,
    first_tokens,
    kv_of,
)
from kvstore.client.lookups import Lease, look_up, prefix_plan
from kvstore.client.options import (
    MAX_DEADLINE_MS,
    MAX_NAME_CHARS,
    ClientOptions,
    check_address,
    milliseconds,
)
from kvstore.client.planning import PlanTerms
from kvstore.client.server_link import LeftMs, ServerLink, check_kind, not_keys
from kvstore.client.server_state import (
    ChunkStat,
    EventStream,
    Place,
    ServerStatus,
    stat_from_message,
    status_from_message,
)
from kvstore.client.transports.base import Put, PutTerms, Transport
from kvstore.client.transports.shared_memory import ShmTransport
from kvstore.codecs.assets import ASSETS
from kvstore.codecs.base import ChunkTensors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.blend import GateView, ReuseReport
from kvstore.proto.errors import InvalidRequestError, check_text, is_whole
from kvstore.proto.frame import FrameHeader
from kvstore.proto.keys import chain_digests, chunk_key, page_digests
from kvstore.proto.messages import accuracy_number, engine_to_message
from kvstore.proto.plans import MAX_HANDOVER_MS, NO_HINTS, EngineTerms, Hints
from kvstore.proto.types import (
    Accuracy,
    ChunkKey,
    Match,
    Model,
    Namespace,
    Stated,
)

LAYERED_PUT_S = 60.0
"""Time for a forward pass over a long prompt."""
MAX_TTL_S = ((1 << 32) - 1) / 1000
MAX_PIN_S = 86_400.0
MAX_WAIT_S = MAX_HANDOVER_MS / 2000

Tokens: TypeAlias = Sequence[int] | None
Keys: TypeAlias = Sequence[ChunkKey] | None
"""The keys of a prompt's chunks; a call takes either tokens or keys."""


class Client:
    """Put, look up and get the KV of one Model. Thread-safe.

    Calls take a prompt's *tokens*, or the *keys* of its chunks. It connects at the first call, and
    again after the server restarted. Every method raises KVStoreErrors only and returns within its
    timeout, ``options.deadline_ms`` unless given, plus 50 ms a round trip. A session is opened
    within ``options.deadline_ms``. A miss is an answer: a Hit of 0 tokens, a Match of 0, a shorter
    list. Invalid arguments raise InvalidRequestError, and KV of another shape, dtype or device
    LayoutMismatchError, before anything is sent or written; a late server raises DeadlineError, an
    unreachable one TierUnavailableError.
    """

    shared_memory: ClassVar[type[ShmTransport]] = ShmTransport
    """The transport to a server on this host."""

    def __init__(self, address: str, model: Model, options: ClientOptions | None = None) -> None:
        check_address(address)
        check_kind("model", model, Model)
        check_kind("options", options, ClientOptions, or_none=True)
        self.model = model
        self.options = options or ClientOptions()
        if self.options.assets is not None:
            ASSETS.load_folder(Path(self.options.assets))
        shard = self.options.shard
        self._own = model if shard is None else shard.part_of(model)
        """The model of the KV that is put and got."""
        self.address = address
        self.counts: Callable[[], Mapping[str, int]] = dict
        """Returns the engine's counters, for ``kvstore explain``; each heartbeat reports them."""
        counts = partial(_counts, ref(self))  # the session's thread must not keep the client
        self._link = ServerLink(address, model, self.options, counts, self.shared_memory)
        _ = self._link.connection  # raises for unusable credentials
        self._end = self._ends()
        FORKS.watch(self._after_fork)

    def _ends(self) -> finalize[[], Self]:
        """Close a garbage-collected client; at exit of the process that is not needed."""
        end = finalize(self, self._link.drop)
        end.atexit = False
        return end

    def _after_fork(self) -> None:
        """In a child: leave the connection to the parent; the next call opens another."""
        self._end.detach()
        self._link = self._link.left()
        self._end = self._ends()

    def __reduce__(self) -> tuple[type[Self], tuple[str, Model, ClientOptions]]:
        """Reach another process as a new client of the same server."""
        return type(self), (self.address, self.model, self.options)

    def close(self) -> None:
        """End the session and close the connection. Idempotent."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the session

    @property
    def namespace(self) -> Namespace:
        """The first half of every key of this client; opens a session if there is none."""
        return self._link.connected().session.namespace

    @property
    def transport_name(self) -> str:
        """The transport of chunk bytes: ``shm``, ``tcp`` or ``grpc``."""
        return self._link.connected().name

    @property
    def boot_id(self) -> int:
        """The id of the server's start that the session belongs to."""
        return self._link.connected().session.terms.server.boot_id

    @property
    def is_connected(self) -> bool:
        """Whether there is a session, as last known; makes no call."""
        return self._link.transport is not None

    @property
    def is_shut(self) -> bool:
        """Whether calls fail at once, since the server did not answer the last one."""
        return self._link.connection.breaker.is_open

    @property
    def weighs(self) -> bool:
        """Whether the server of the open session uses ``Chunk.importance``."""
        transport = self._link.transport
        return transport is not None and transport.session.terms.weighs

    def end_if_hung(self) -> bool:
        """Whether the server hangs, not just is busy; if so, waiting calls fail now, as if it were
        late. Takes some 20 ms, or 250 ms without a session.
        """
        return self._link.end_if_hung()

    def send_counts(self) -> None:
        """Report ``counts`` now, as heartbeats do; opens a session if there is none."""
        self._link.run(lambda transport, _: transport.session.heartbeat())

    # --- prompts

    def keys(self, tokens: Sequence[int], extra: Sequence[bytes] = ()) -> list[ChunkKey]:
        """Name the chunks of a prompt. *extra*: cache salt, multimodal hashes, in order."""
        return self._names(self.namespace, tokens, extra)

    def _names(
        self, space: Namespace, tokens: Sequence[int], extra: Sequence[bytes] = ()
    ) -> list[ChunkKey]:
        size = self.options.chunk_tokens
        is_sglangs = self.options.sglang_names and not extra
        digests = page_digests(tokens, size) if is_sglangs else chain_digests(tokens, size, extra)
        return [chunk_key(space, digest) for digest in digests]

    def _named(
        self, tokens: Tokens, keys: Keys, left_ms: LeftMs | None = None
    ) -> Sequence[ChunkKey]:
        if (tokens is None) == (keys is None):
            raise InvalidRequestError("keys", keys, "give either tokens or keys")
        if tokens is not None:
            return self._names(self._link.connected(left_ms).session.namespace, tokens)
        if not isinstance(keys, Sequence):
            raise not_keys(keys)
        return keys

    def get(
        self,
        tokens: Tokens = None,
        *,
        keys: Keys = None,
        out: KV | None = None,
        start: int = 0,
        timeout: float | None = None,
        accuracy: Accuracy = Accuracy.exact,
    ) -> Hit:
        """Read the longest prefix of a prompt that arrives in time, verified.

        It is written to *out* (see KV), which has space for all tokens; do not use *out* past
        ``hit.tokens``. Without *out*, new tensors are returned. The caller has the first *start*
        tokens: chunks that end before are not read, and count as found. Below an exact *accuracy*
        any chunk may be restored from a lossy copy: put neither it nor anything computed from it.
        """
        left_ms = Until(self._deadline_ms(timeout)).left_ms
        prompt = self._prompt(tokens, keys, start, left_ms)
        fresh = empty_kv(self._own, prompt.stop) if out is None else None
        held = self._target(prompt, fresh if out is None else out)
        target = chunk_reads.target_in(prompt.keys, prompt.target(held))
        shard = self.options.shard
        request = ChunkRequest(prompt.keys, target, accuracy, left_ms(), shard=shard)
        if isinstance(held, StagedKV):
            request = request._replace(most=held.most, on_part=held.upload)
        found = chunk_reads.read_prefix(self._link, request)
        chunks = prompt.usable(len(found), self._own)
        reached = prompt.reached(chunks)
        kv = None if fresh is None else first_tokens(fresh, reached)
        return Hit(reached, chunks, tuple(one.tier for one in found[:chunks]), kv)

    def put(
        self,
        tokens: Sequence[int],
        kv: KV,
        *,
        start: int = 0,
        ttl: float | None = None,
        durable: bool = False,
        hints: Hints = NO_HINTS,
    ) -> list[Put]:
        """Store the KV of a prompt; return the outcome of each of its chunks.

        *kv* (see KV) covers all tokens. Chunks that end within the first *start* tokens are left
        out; so is a remainder of less than 16 tokens. Chunks expire after *ttl* seconds. With
        *durable* it returns once they would survive a power cut.
        """
        prompt = self._prompt(tokens, None, start)
        held = kv_of("kv", kv, self._own, prompt, is_target=False)
        if ttl is not None:
            hints = replace(hints, ttl_ms=milliseconds("ttl", ttl, MAX_TTL_S))
        put = partial(self.put_chunks, durable=durable, hints=hints)
        return list(chain.from_iterable(map(put, batches_to_put(self.model, prompt, held))))

    def lookup(
        self,
        tokens: Tokens = None,
        *,
        keys: Keys = None,
        accuracy: Accuracy = Accuracy.exact,
        engine: EngineTerms | None = None,
        wait: float = 0.0,
        timeout: float | None = None,
    ) -> Match:
        """Find the longest prefix that can be read now, in one round trip a batch.

        With *engine* the match has a ``plan``: which chunks to load and which to recompute, never
        slower than to recompute all. The call waits at most *wait* seconds for chunks that others
        are putting or have announced.
        """
        left_ms = Until(self._deadline_ms(timeout)).left_ms
        names = self._named(tokens, keys, left_ms)
        check_kind("engine", engine, EngineTerms, or_none=True)
        if engine is not None and not engine.prompt_tokens:
            count = len(names) * self.options.chunk_tokens if tokens is None else len(tokens)
            engine = replace(engine, prompt_tokens=count)
        request = pb.LookupRequest(
            min_accuracy=accuracy_number(accuracy),
            prefill=engine_to_message(engine),
            wait_ms=milliseconds("wait", wait, MAX_WAIT_S),
        )
        match = look_up(self._link, names, request, left_ms()).match
        if engine is not None and match.plan is None and names:
            plan = prefix_plan(match, self.options.chunk_tokens, len(names), engine)
            match = replace(match, plan=plan)
        return match

    def lease(
        self, tokens: Tokens = None, *, keys: Keys = None, accuracy: Accuracy = Accuracy.exact
    ) -> Lease:
        """Look a prompt up and keep its ready chunks, of *accuracy* or better, from eviction until
        the lease is released.
        """
        names = self._named(tokens, keys)
        request = pb.LookupRequest(lease=True, places=True, min_accuracy=accuracy_number(accuracy))
        found = look_up(self._link, names, request, self.options.deadline_ms)
        return Lease(self._link, names, found, accuracy, self)

    def get_layers(
        self,
        tokens: Tokens = None,
        *,
        keys: Keys = None,
        out: KV | None = None,
        start: int = 0,
        timeout: float | None = None,
        accuracy: Accuracy = Accuracy.exact,
    ) -> Generator[Layer, None, None]:
        """Read like ``get``, and yield each layer of the model as soon as it arrives, verified.

        A chunk that is late or wrong ends the prefix: later layers have fewer chunks, and the
        iterator ends when none is left. So only the chunks of the last layer are read completely.
        Run the iterator to its end or close it: it keeps the chunks from eviction. It reads at most
        MAX_OPEN_BATCHES batches of chunks, each a stream.
        """
        left_ms = Until(self._deadline_ms(timeout)).left_ms
        prompt = self._prompt(tokens, keys, start, left_ms)
        held = None if out is None else self._target(prompt, out)
        target = fresh if held is None else chunk_reads.target_in(prompt.keys, prompt.target(held))
        request = ChunkRequest(prompt.keys, target, accuracy, left_ms())
        layers = chunk_reads.read_layers_retried(self._link, request)
        return held.uploaded(layers) if isinstance(held, StagedKV) else layers

    def put_layers(
        self,
        tokens: Sequence[int],
        *,
        start: int = 0,
        durable: bool = False,
        timeout: float = LAYERED_PUT_S,
        hints: Hints = NO_HINTS,
    ) -> LayeredPut:
        """Begin to store the chunks of ``put`` layer by layer, as the engine finishes them; see
        LayeredPut. The whole put has to end within *timeout* seconds.
        """
        prompt = self._prompt(tokens, None, start)
        chunks = [
            PlannedChunk(key, stop - at, parent=parent, position=at)
            for key, parent, (at, stop) in prompt.chunks
        ]
        terms = PutTerms(durable, self._deadline_ms(timeout), hints)
        return put_by_layers(self._link, chunks, terms, prompt.spans)

    # --- chunks, for callers that cut and name them

    def get_chunks(
        self,
        keys: Sequence[ChunkKey],
        out: Sequence[LayerTensors] | Target | None = None,
        *,
        accuracy: Accuracy = Accuracy.exact,
        stated: list[Stated] | None = None,
        shard: Shard | None = None,
        timeout: float | None = None,
    ) -> list[ChunkTensors]:
        """Read the longest prefix of *keys* that arrives in time, verified.

        Tensors are returned as arrays of unsigned integers of the dtype's size, to be viewed as
        it, or written into *out*: one entry a key, numpy or torch, or ``out(i, layout)``, which
        returns tensors of that layout. Several threads call it, in any order; a window or state
        without layers there is neither read nor verified. *stated*, a list, is filled with the
        accuracy that the copy of each chunk states. With a *shard*, by default that of the options,
        tensors, layouts and *out* are one rank's part of each chunk.
        """
        target = chunk_reads.target_in(keys, out)
        check_kind("stated", stated, list, or_none=True)
        check_kind("shard", shard, Shard, or_none=True)
        timeout_ms, shard = self._deadline_ms(timeout), shard or self.options.shard
        request = ChunkRequest(keys, target, accuracy, timeout_ms, shard=shard)
        found = chunk_reads.read_prefix(self._link, request)
        if stated is not None:
            stated[:] = [one.header.stated for one in found]
        return list(map(attrgetter("tensors"), found))

    def put_chunks(
        self,
        chunks: Sequence[Chunk],
        *,
        durable: bool = False,
        hints: Hints = NO_HINTS,
        shard: Shard | None = None,
    ) -> list[Put]:
        """Store chunks; with *durable* return once they would survive a power cut.

        With a *shard*, by default that of the options, the tensors are one rank's: the outcome is
        ``pending`` until other ranks have put the rest of a chunk, and ``stored`` for the rank that
        completes it. Raises LayoutMismatchError or ModelError before anything is sent when a chunk
        is not of this client's Model.
        """
        shard = shard or self.options.shard
        return put_whole(self._link, chunks, shard, hints, durable=durable)

    def get_chunk_layers(
        self,
        keys: Sequence[ChunkKey],
        out: Sequence[LayerTensors] | None = None,
        *,
        accuracy: Accuracy = Accuracy.exact,
    ) -> Generator[Layer, None, None]:
        """Read like ``get_layers``, into *out* as ``get_chunks``."""
        target = chunk_reads.target_in(keys, out)
        request = ChunkRequest(keys, target, accuracy, self.options.deadline_ms)
        return chunk_reads.read_layers_retried(self._link, request)

    def put_chunk_layers(
        self,
        chunks: Sequence[PlannedChunk],
        *,
        durable: bool = False,
        timeout: float = LAYERED_PUT_S,
        hints: Hints = NO_HINTS,
    ) -> LayeredPut:
        """Begin to store *chunks* as ``put_layers``. Frames wait in memory until they are whole."""
        terms = PutTerms(durable, self._deadline_ms(timeout), hints)
        return put_by_layers(self._link, chunks, terms)

    def get_levelled(
        self,
        keys: Sequence[ChunkKey],
        terms: PlanTerms,
        out: Sequence[LayerTensors] | Target | None = None,
        compute: Callable[[range], None] | None = None,
    ) -> Levelled:
        """Read the chunks of a prompt at the levels that the deadline in *terms* leaves time for.

        ``client/planning.py`` decides by the measured bandwidth which chunks the engine computes,
        and how much of the others is loaded, into *out* as in ``get_chunks``. This thread passes
        *compute* chunks from the first on, while others are loaded from the last one back; without
        it the caller computes ``Levelled.to_compute`` afterwards. Once there is a session, it
        returns in time whatever the store does. Also raises any error of *compute* or *out*, and
        LayoutMismatchError.
        """
        target = chunk_reads.target_in(keys, out)
        check_kind("terms", terms, PlanTerms)
        return LevelledGet(self._link, keys, terms, target, compute).run()

    # --- segments that are no prefixes

    def name_segments(
        self, tokens: Sequence[int], ranges: Sequence[SegmentRange], extra: Sequence[bytes] = ()
    ) -> list[NamedSegment]:
        """Cut and name a prompt as ``find_segments`` does; put chunks under these names."""
        return name_segments(tokens, ranges, self.options.chunk_tokens, extra)

    def find_segments(
        self,
        tokens: Sequence[int],
        ranges: Sequence[SegmentRange],
        query: segments.SegmentQuery | None = None,
    ) -> segments.SegmentMatch:
        """Find stored chunks of a prompt whose documents, messages or tool results are *ranges*.

        Chunks stored from this very prefix are exact. Where *ranges* allow approximate ones, the
        match names chunks with the same tokens from other prompts, if the gate of this model and
        tag is open. All are kept from eviction until the match is released. Raises ModelError when
        the server rotates keys by other rope parameters.
        """
        check_kind("query", query, segments.SegmentQuery, or_none=True)
        query = query or segments.SegmentQuery()
        named = self.name_segments(tokens, ranges, query.names)
        return segments.find_segments(self._link, named, len(tokens), query)

    def report_reuse(self, report: ReuseReport) -> GateView:
        """Report the outcome of one blended request (``client/blend/gate.py``); return the gate."""
        return segments.report_reuse(self._link, report)

    # --- pins and deletes

    def pin(self, tokens: Tokens = None, *, keys: Keys = None, ttl: float) -> int:
        """Keep chunks from eviction for *ttl* seconds, a day at most; return how many exist."""
        request = pb.PinRequest(ttl_ms=milliseconds("ttl", ttl, MAX_PIN_S, least_s=0.001))
        replies = self._link.call_keys("Pin", request, self._named(tokens, keys), pb.PinResponse)
        return sum(reply.pinned for reply in replies)

    def unpin(self, tokens: Tokens = None, *, keys: Keys = None) -> int:
        """End pins; return how many there were."""
        names, request = self._named(tokens, keys), pb.UnpinRequest()
        replies = self._link.call_keys("Unpin", request, names, pb.UnpinResponse)
        return sum(reply.unpinned for reply in replies)

    def announce_puts(self, keys: Sequence[ChunkKey], *, within: float) -> int:
        """Announce that this client will put *keys* *within* seconds, ten minutes at most.

        Until then lookups count them as pending, and may wait for them. 0 revokes the announcement,
        as does the end of the session. Return how many it made pending: not those that exist, or
        that another client has announced.
        """
        request = pb.AnnouncePutsRequest(ttl_ms=milliseconds("within", within, MAX_TTL_S))
        replies = self._link.call_keys("AnnouncePuts", request, keys, pb.AnnouncePutsResponse)
        return sum(reply.pending for reply in replies)

    def delete(self, tokens: Tokens = None, *, keys: Keys = None) -> int:
        """Delete chunks on every tier; return how many. Chunks under a lease stay."""
        names, request = self._named(tokens, keys), pb.DeleteRequest()
        replies = self._link.call_keys("Delete", request, names, pb.DeleteResponse)
        return sum(reply.deleted for reply in replies)

    def clear(self, tier: str = "", *, dry_run: bool = False) -> int:
        """Delete every chunk of this client's namespace that is not being read, or only its copies
        on *tier*; return how many. With *dry_run* they are only counted.
        """
        check_text("tier", tier, MAX_NAME_CHARS)
        request = pb.ClearRequest(tier=tier, dry_run=dry_run, deadline_ms=self.options.deadline_ms)

        def work(transport: Transport, left_ms: LeftMs) -> int:
            request.session_id = transport.session.terms.session_id
            return self._link.call("Clear", request, pb.ClearResponse, left_ms()).deleted

        return self._link.run(work)

    # --- inspection

    def stat(
        self, tokens: Tokens = None, *, keys: Keys = None, ranks: bool = False
    ) -> list[ChunkStat]:
        """Return the state of those chunks that exist; with *ranks*, for 16 chunks at most, also
        how many others each tier would evict before.
        """
        request = pb.StatRequest(ranks=bool(ranks))
        replies = self._link.call_keys("Stat", request, self._named(tokens, keys), pb.StatResponse)
        return [stat_from_message(chunk) for reply in replies for chunk in reply.chunks]

    def list(
        self, limit: int = 0, *, after: bytes = b"", prefix: bytes = b""
    ) -> Sequence[ChunkStat]:
        """Return the chunks of this client's namespace, at most *limit* unless 0, sorted by digest:
        those past the digest *after*, for paging, and that begin with *prefix*.
        """
        if not is_whole(limit) or not 0 <= limit < 1 << 32:
            raise InvalidRequestError("limit", limit, "give 0 to 2^32-1")
        check_kind("after", after, bytes)
        check_kind("prefix", prefix, bytes)
        request = pb.ListRequest(limit=limit, after=after, prefix=prefix)
        return [stat_from_message(one) for one in chunk_reads.list_chunks(self._link, request)]

    def frame(
        self, key: ChunkKey, *, accuracy: Accuracy = Accuracy.exact
    ) -> tuple[FrameHeader, bytes] | None:
        """Return a chunk's frame as stored on a tier, completely verified; None without one.
        Reports a damaged one to the server, and raises ChunkCorruptError or InvalidFrameError.
        """
        return chunk_reads.read_frame(self._link, key, accuracy)

    def events(self, since: Place | None = None) -> EventStream:
        """Follow the chunks of this client's namespace that this node's own tiers gain and lose.

        Without *since*, or when events after it are no longer kept, a page is ``cleared`` and the
        current chunks come first. A server serves 4 streams a tenant.
        """
        check_kind("since", since, Place, or_none=True)
        return EventStream(self._link, since)

    def status(self) -> ServerStatus:
        """Return the server's state."""
        return status_from_message(self._link.call("Status", pb.StatusRequest(), pb.StatusResponse))

    def drain(self) -> bool:
        """Make the server refuse new work and flush what it holds; True if all was saved."""
        request = pb.DrainRequest(deadline_ms=self.options.deadline_ms)
        return self._link.call("Drain", request, pb.DrainResponse).clean

    # --- helpers

    def _deadline_ms(self, timeout: float | None) -> int:
        if timeout is None:
            return self.options.deadline_ms
        return milliseconds("timeout", timeout, MAX_DEADLINE_MS / 1000, least_s=0.001)

    def _prompt(
        self, tokens: Tokens, keys: Keys, start: int, left_ms: LeftMs | None = None
    ) -> Prompt:
        names = self._named(tokens, keys, left_ms)
        count = None if tokens is None else len(tokens)
        return Prompt(count, names, start, self.options.chunk_tokens)

    def _target(self, prompt: Prompt, out: Any) -> AnyKV:
        return kv_of("out", out, self._own, prompt, is_target=True)


def _counts(client: ref[Client]) -> Mapping[str, int]:
    found = client()
    return {} if found is None else found.counts()
