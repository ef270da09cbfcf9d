"""Reads of a client: prefixes whole or layer by layer, a batch of the server's size at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from contextvars import ContextVar
from dataclasses import replace
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np

from kvstore.client.chunk import LayerTensors, Shard
from kvstore.client.connection import Until
from kvstore.client.decode import (
    Decoded,
    Layer,
    LayerReader,
    Target,
    TooLossyError,
    Wanted,
    check_header,
    fresh,
    given,
)
from kvstore.client.frames import Arrival, FrameAssembler
from kvstore.client.server_link import (
    MAX_OPEN_BATCHES,
    LeftMs,
    ServerLink,
    digest_batches,
    not_keys,
    packed,
)
from kvstore.client.transports.base import ReadPlan, Transport, arrival_of
from kvstore.client.transports.base import read_layers as transport_layers
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    ChunkCorruptError,
    DeadlineError,
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    LayoutMismatchError,
    TierUnavailableError,
)
from kvstore.proto.frame import MAX_FRAME_BYTES, FrameHeader, check_frame
from kvstore.proto.messages import accuracy_number
from kvstore.proto.row_mask import SkippedRows
from kvstore.proto.types import DIGEST_BYTES, END_KINDS, Accuracy, ChunkKey, KVLayout


class ChunkRequest(NamedTuple):
    """What to read into *target*: the *shard* of chunks of *accuracy* or better.

    Each batch is under its own of *leases*; without them the call takes its own, for *most* chunks
    at a time, and passes *on_part* the total after each. Layer by layer, *accepts* decides by a
    chunk's index and header whether its frame is the wanted one, and *skipped* rows need not be
    sent.
    """

    keys: Sequence[ChunkKey]
    target: Target
    accuracy: Accuracy
    deadline_ms: int
    leases: Sequence[int] = ()
    shard: Shard | None = None
    accepts: Callable[[int, FrameHeader], bool] | None = None
    skipped: SkippedRows | None = None
    most: int = 0
    on_part: Callable[[int], None] | None = None


def read_prefix(link: ServerLink, request: ChunkRequest) -> list[Decoded]:
    """Read the longest prefix of the requested chunks, verified."""

    tries = count()

    def work(transport: Transport, left_ms: LeftMs) -> list[Decoded]:
        is_first = not next(tries)
        session, keys, leases = transport.session, request.keys, request.leases
        limit, digests = session.terms.max_batch_chunks, packed(keys, session.namespace)
        most = request.most or max(1, len(keys))
        found: list[Decoded] = []
        while True:
            first = len(found)
            # A batch ends where its part of *most* chunks does: the next part reuses its memory.
            stop = min(first + limit, first - first % most + most)
            some, lease_id = keys[first:stop], leases[first // limit] if leases else 0
            wanted = Wanted(session, some, request.target, request.accuracy, first, request.shard)
            some_digests = digests[DIGEST_BYTES * first : DIGEST_BYTES * stop]
            try:
                plan = ReadPlan(
                    some_digests, lease_id, left_ms(), request.accuracy, direct=wanted.direct,
                    no_lease=is_first,
                )  # fmt: skip
                with transport.read(plan) as arriving:
                    part, broken = link.reader.read(wanted, arriving.frames)
            except (DeadlineError, TierUnavailableError):
                if not found:
                    raise
                break
            if broken is not None:
                link.quarantine(transport, broken, left_ms)
            if request.on_part is not None and part:
                part = [one._replace(tensors=()) for one in part]  # their memory is reused
                check_not_stopped(STOPPED.get())
                request.on_part(len(found) + len(part))
            found += part
            if len(part) < len(some) or stop >= len(keys):
                break
        return found

    if request.leases:  # lost with their session, so no retry
        left_ms = Until(request.deadline_ms).left_ms
        return work(link.connected(left_ms), left_ms)
    return link.run(work, request.deadline_ms)


def target_in(keys: Sequence[ChunkKey], out: Sequence[LayerTensors] | Target | None) -> Target:
    """Return the target of each chunk of *keys*: in *out*, or new arrays. It raises once the call
    is cancelled.

    Raises InvalidRequestError for too few entries, and for keys that are not a list.
    """
    if not isinstance(keys, Sequence):
        raise not_keys(keys)
    if out is not None and not callable(out):
        if not isinstance(out, Sequence):
            fix = "give tensors for each key, or a function"
            raise InvalidRequestError("out", type(out).__name__, fix)
        if len(out) < len(keys):
            raise InvalidRequestError("out", len(out), f"give {len(keys)} entries")
        out = given(out)
    target, stopped = fresh if out is None else out, STOPPED.get()
    if stopped is None:
        return target

    def place(index: int, layout: KVLayout) -> Any:
        check_not_stopped(stopped)
        return target(index, layout)

    return place


STOPPED: ContextVar[threading.Event | None] = ContextVar("STOPPED", default=None)
"""Present while a call runs for asyncio: once the event is set, nothing more is written."""


def check_not_stopped(stopped: threading.Event | None) -> None:
    """Raise KVStoreError once the call is cancelled."""
    if stopped is not None and stopped.is_set():
        raise KVStoreError("the call was cancelled")


def read_layers(
    link: ServerLink, transport: Transport, request: ChunkRequest
) -> Generator[Layer, None, None]:
    """Yield the layers of *request*, each once it is verified."""
    wanted = Wanted(transport.session, request.keys, request.target, request.accuracy)
    with ExitStack() as stack:
        arriving = _layers_arriving(stack, transport, request)
        reading = LayerReader(link.reader, wanted, request.accepts, request.skipped)
        with closing(reading.layers(arriving)) as layers:
            yield from layers
    if reading.broken is not None:  # a new deadline: the caller's own work took time
        link.quarantine(transport, reading.broken, Until(request.deadline_ms).left_ms)


def _layers_arriving(
    stack: ExitStack, transport: Transport, request: ChunkRequest
) -> Iterator[Arrival]:
    """Yield the frames of up to MAX_OPEN_BATCHES batches. Each batch is a stream, which *stack*
    ends.
    """
    session, left_ms = transport.session, Until(request.deadline_ms).left_ms
    limit, keys = session.terms.max_batch_chunks, request.keys
    digests = packed(keys, session.namespace)
    # Rows are named by chunk index over the whole read, so several batches fetch all rows.
    skipped = request.skipped if len(keys) <= limit else None
    (lease_id,) = request.leases or (0,)
    for first, some in islice(digest_batches(digests, limit), MAX_OPEN_BATCHES):
        plan = ReadPlan(some, lease_id, left_ms(), request.accuracy, skipped=skipped)
        count = 0
        for arrived in stack.enter_context(transport_layers(transport, plan)):
            count += 1
            yield replace(arrived, index=first + arrived.index) if first else arrived
        if count < limit:
            return


def read_layers_retried(link: ServerLink, request: ChunkRequest) -> Generator[Layer, None, None]:
    """Do the same; retry once if a lease is lost before the first layer arrives."""
    check_by_layers(link)

    def begin(
        transport: Transport, left_ms: LeftMs
    ) -> tuple[Layer | None, Generator[Layer, None, None]]:
        layers = read_layers(link, transport, request._replace(deadline_ms=left_ms()))
        return next(layers, None), layers

    first, layers = link.run(begin, request.deadline_ms)
    with closing(layers):
        if first is not None:
            yield first
            yield from layers


def check_by_layers(link: ServerLink) -> None:
    """Raise LayoutMismatchError for models whose chunks differ in the layers they have, and for a
    client of a shard.
    """
    if link.options.shard is not None:
        fix = "layered gets read whole chunks only: use get"
        raise LayoutMismatchError("shard", link.options.shard, fix)
    for group in link.model.layer_groups:
        if group.kind in END_KINDS:
            fix = "not every chunk of such a model has these layers: use get"
            raise LayoutMismatchError("kind", group.kind.name, fix)


def read_frame(
    link: ServerLink, key: ChunkKey, accuracy: Accuracy
) -> tuple[FrameHeader, bytes] | None:
    """See ``Client.frame``."""

    def work(transport: Transport, left_ms: LeftMs) -> tuple[FrameHeader, bytes] | None:
        session, deadline_ms = transport.session, left_ms()
        request = pb.GetRequest(
            session_id=session.terms.session_id,
            digests=packed([key], session.namespace),
            deadline_ms=deadline_ms,
            min_accuracy=accuracy_number(accuracy),
        )
        with closing(link.connection.stream("Get", request, deadline_ms)) as replies:
            found = next(FrameAssembler(MAX_FRAME_BYTES).frames(map(arrival_of, replies)), None)
            next(replies, None)  # its end: else the server logs a call that was cancelled
        if found is None:
            return None
        data = np.asarray(found.data)
        try:
            header = check_header(session, key, data, len(data), accuracy)
            check_frame(data, key)
            return header, data.tobytes()
        except TooLossyError:
            return None
        except (ChunkCorruptError, InvalidFrameError):
            link.quarantine(transport, key, left_ms)
            raise

    return link.run(work)


def list_chunks(link: ServerLink, request: pb.ListRequest) -> Sequence[pb.ChunkStat]:
    """See ``Client.list``."""

    def work(transport: Transport, left_ms: LeftMs) -> Sequence[pb.ChunkStat]:
        request.session_id = transport.session.terms.session_id
        with closing(link.connection.stream("List", request, left_ms())) as pages:
            chunks = (chunk for page in pages for chunk in page.chunks)
            found = list(islice(chunks, request.limit or None))
            next(pages, None)  # its end, as above
            return found

    return link.run(work)
