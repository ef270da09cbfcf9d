"""EngineCalls: a Client's calls for engines with pages, and for work layer by layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing

from kvstore.client.batches import MAX_OPEN_BATCHES, JoinedSink, batches
from kvstore.client.caller import Caller
from kvstore.client.chunk import Chunk, PlannedChunk
from kvstore.client.connection import countdown
from kvstore.client.decode import Layer, LayerReader, Room, given
from kvstore.client.layered_put import LayeredPut
from kvstore.client.levelled_get import Levelled, LevelledGet, beside
from kvstore.client.levels import PlanTerms
from kvstore.client.options import MAX_DEADLINE_MS
from kvstore.client.pages import PagedKV
from kvstore.client.rectangle import Rectangle
from kvstore.client.rectangle_room import RectangleRoom
from kvstore.client.session import Session
from kvstore.client.tensors import LayerTensors
from kvstore.client.transport import Put, PutTerms, ReadPlan, Transport
from kvstore.codecs.base import ChunkTensors
from kvstore.proto.errors import InvalidRequestError, LayoutMismatchError, LeaseExpiredError
from kvstore.proto.frame import FrameTemplate, raw_frame_bytes
from kvstore.proto.plans import NO_HINTS, Hints
from kvstore.proto.types import END_KINDS, Accuracy, ChunkKey, KVLayout, Stated

LAYERED_PUT_MS = 60_000
"""What a forward pass over a long prompt may take."""


class EngineCalls(Caller, ABC):
    """Pages and layers. Thread-safe."""

    @abstractmethod
    def put(
        self,
        chunks: Sequence[Chunk],
        *,
        durable: bool = False,
        hints: Hints = NO_HINTS,
        rectangle: Rectangle | None = None,
    ) -> list[Put]:
        """Store chunks."""

    def get_into(
        self,
        keys: Sequence[ChunkKey],
        room: Room,
        *,
        min_accuracy: Accuracy = Accuracy.exact,
        stated: list[Stated] | None = None,
        rectangle: Rectangle | None = None,
    ) -> list[ChunkTensors]:
        """Read like ``get``, into what *room* gives for each chunk once its layout is known.

        ``room(i, layout)`` returns tensors of that layout; a window or state that is not wanted
        has no layers there, and is neither read from shared memory or a file nor verified. It is
        called by several threads, in any order. With a *rectangle* the layouts are those of what
        one rank has.
        """
        return self._read_prefix(keys, self._room(room, rectangle), min_accuracy, stated)

    def _room(self, room: Room, rectangle: Rectangle | None) -> Room:
        if rectangle is None:
            return room
        return RectangleRoom(room, rectangle, self.representation)

    def get_pages(
        self,
        keys: Sequence[ChunkKey],
        paged: PagedKV,
        block_ids: Sequence[int],
        *,
        min_accuracy: Accuracy = Accuracy.exact,
    ) -> int:
        """Read the longest prefix of *keys* that is there in time straight into an engine's pages.

        *keys* are those of a request from its first token on, *block_ids* its blocks. Return
        how many chunks were read and verified. Slots of the chunks past them may have been
        written to and are not to be used; no other slot is touched.
        """
        room = paged.room_of(block_ids, len(keys), self.options.chunk_tokens)
        return len(self._read_prefix(keys, room, min_accuracy))

    def put_pages(
        self,
        keys: Sequence[ChunkKey],
        paged: PagedKV,
        block_ids: Sequence[int],
        token_count: int,
        *,
        durable: bool = False,
        hints: Hints = NO_HINTS,
    ) -> list[Put]:
        """Store the first *token_count* tokens of a request straight from an engine's pages.

        *keys* are its chunks' names, *block_ids* its blocks, both from its first token on.
        """
        chunks = paged.chunks(keys, block_ids, token_count, self.options.chunk_tokens)
        return self.put(chunks, durable=durable, hints=hints)

    def get_layers(
        self,
        keys: Sequence[ChunkKey],
        out: Sequence[LayerTensors] | None = None,
        *,
        min_accuracy: Accuracy = Accuracy.exact,
    ) -> Generator[Layer, None, None]:
        """Read like ``get``, and yield each layer of the model as soon as it is there, verified.

        A chunk that is late or proves wrong ends the prefix: the layers after it have fewer
        chunks, and when none is left no more layers come. So what was read is what the last of
        all layers has. The deadline is that of the whole get. Run the iterator to its end or
        close it: it keeps the chunks from eviction. No more than MAX_OPEN_BATCHES batches of chunks
        come, as each is a stream that stays open until the last layer.
        """
        check_out(keys, out)
        self._check_every_layer()
        transport = self._connected()
        layers = self._layers(transport, keys, given(out), min_accuracy)
        try:
            first = next(layers, None)
        except LeaseExpiredError:
            if not self._is_known(transport):
                self._disconnect(transport, tell_server=False)
            # Or a chunk was dropped between its place and our look: ask what is left.
            layers = self._layers(self._connected(), keys, given(out), min_accuracy)
            first = next(layers, None)
        with closing(layers):
            if first is not None:
                yield first
                yield from layers

    def _check_every_layer(self) -> None:
        """Raise LayoutMismatchError for models whose chunks differ in the layers they have."""
        for group in self.representation.layer_groups:
            if group.kind in END_KINDS:
                fix = "not every chunk has such layers: read these models' chunks whole, by get"
                raise LayoutMismatchError("kind", group.kind.name, fix)

    def _layers(
        self, transport: Transport, keys: Sequence[ChunkKey], room: Room, least: Accuracy
    ) -> Generator[Layer, None, None]:
        plan = ReadPlan(self._cut_digests(keys), 0, self.options.deadline_ms, least)
        with ExitStack() as stack:
            arriving = self._layers_arriving(stack, transport, plan)
            reading = LayerReader(self._reader, transport.session, keys, room)
            with closing(reading.layers(arriving)) as layers:
                yield from layers
        if reading.broken is not None:
            self._quarantine(transport, reading.broken)

    def get_levelled(
        self,
        keys: Sequence[ChunkKey],
        terms: PlanTerms,
        out: Sequence[LayerTensors] | Room | None = None,
        compute: Callable[[range], None] | None = None,
    ) -> Levelled:
        """Read the chunks of a prompt at the levels that the deadline in *terms* leaves time for.

        The controller of ``client/levels.py`` decides, with the bandwidth that this client has
        seen, which chunks the engine computes, and how much of the others is loaded. *compute*
        does that, in this thread and beside the loads: it is given some chunks after another, from
        the first on, while others come from the last one back. Without it the caller computes
        ``Levelled.to_compute`` afterwards. Chunks are written to *out*: one entry a key, or what
        returns it. Only layered codecs have levels; others come whole.

        Returns in time whatever happens to the store, once there was a session. Raises
        InvalidRequestError for keys of another namespace, and what *compute* raises.
        """
        if callable(out):
            return self._levelled(keys, terms, out, compute)
        check_out(keys, out)
        return self._levelled(keys, terms, given(out), compute)

    def _levelled(
        self,
        keys: Sequence[ChunkKey],
        terms: PlanTerms,
        room: Room,
        compute: Callable[[range], None] | None = None,
    ) -> Levelled:
        self._check_every_layer()
        if not keys:
            return Levelled((), ())
        self._digests(keys)
        layout = KVLayout.of(self.representation, self.options.chunk_tokens)

        def work(transport: Transport) -> Levelled:
            get = LevelledGet(transport, self._reader, keys, layout, self._meters)
            try:
                if compute is None:
                    return get.run(terms, room)
                return beside(get, terms, room, compute)
            finally:
                for key in get.damaged:
                    self._quarantine(transport, key)

        return self._with_session(work)

    def begin_put(
        self,
        chunks: Sequence[PlannedChunk],
        *,
        durable: bool = False,
        within_ms: int = LAYERED_PUT_MS,
        hints: Hints = NO_HINTS,
    ) -> LayeredPut:
        """Begin to store chunks whose layers come as the engine finishes them; see LayeredPut.

        All of it has to be over *within_ms*. Over gRPC a layer goes out when it is given, with
        other transports the frames wait in memory of this process until they are whole.
        """
        if not 1 <= within_ms <= MAX_DEADLINE_MS:
            raise InvalidRequestError("within_ms", within_ms, f"use 1 to {MAX_DEADLINE_MS}")
        transport = self._connected()
        limit = transport.session.terms.max_batch_chunks
        most = MAX_OPEN_BATCHES * limit
        if not 1 <= len(chunks) <= most:
            raise InvalidRequestError("chunks", len(chunks), f"give 1 to {most} in one put")
        templates = [self._template(transport.session, chunk) for chunk in chunks]
        layouts = [template.layout for template in templates]
        sink, left_ms = JoinedSink(limit), countdown(within_ms)
        try:
            for _, some in batches(templates, limit):
                sink.add(transport.begin_put(some, PutTerms(durable, left_ms(), hints)))
        except BaseException:
            sink.abandon()
            raise
        return LayeredPut(self.representation, layouts, sink)

    def _template(self, session: Session, chunk: PlannedChunk) -> FrameTemplate:
        self._digest(chunk.key)
        layout = KVLayout.of(self.representation, chunk.tokens)
        check_frame_bytes(session, layout)
        return FrameTemplate(
            chunk.key, chunk.parent, session.representation_digest, chunk.content, layout,
            chunk.position, chunk.prefill_flops,
        )  # fmt: skip


def check_frame_bytes(session: Session, layout: KVLayout) -> None:
    """Raise InvalidRequestError for a chunk longer than the server takes."""
    frame_bytes, limit = raw_frame_bytes(layout), session.terms.max_frame_bytes
    if frame_bytes > limit:
        raise InvalidRequestError(
            "frame_bytes", frame_bytes, f"the server takes {limit} at most; use shorter chunks"
        )


def check_out(keys: Sequence[ChunkKey], out: Sequence[LayerTensors] | None) -> None:
    """Raise InvalidRequestError when *out* has too few entries."""
    if out is not None and len(out) < len(keys):
        raise InvalidRequestError("out", len(out), f"give {len(keys)} entries")
