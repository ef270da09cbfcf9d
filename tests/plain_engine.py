"""An engine of nothing but a connector, whose KV follows from the names of its chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from prompts import equal, tensors_of

from kvstore.client import Client
from kvstore.client.engines.base import Connector
from kvstore.client.engines.prefix import Allowed, Asked, Prefix, Span
from kvstore.client.prefill import Deadline, PrefillModel
from kvstore.client.tensors import LayerTensors
from kvstore.codecs.base import ChunkTensors, empty_tensors
from kvstore.proto.types import Accuracy, ChunkKey, KVLayout, Stated

Room: TypeAlias = Callable[[Sequence[Span]], Sequence[LayerTensors]]
"""Returns where the tensors of each span are to be written; asked once a load."""


class PlainConnector(Connector):
    """A connector with nothing of an engine but room for what is loaded."""

    def load_chunks(
        self,
        tokens: Sequence[int],
        room: Room,
        extra: Sequence[bytes] = (),
        allowed: Allowed | None = None,
        within: Deadline | None = None,
    ) -> Prefix:
        """Read the longest stored prefix of *tokens* into what *room* gives. Never raises.

        *extra* is what else names the prompt (cache salt, multimodal hashes), in order; *allowed*
        stands in for what the connector's ``accuracy`` allows. What lies in the room past
        ``stored_tokens`` is not to be used. A request *within* a deadline is no later than without
        the store: what loads too slowly is computed, by ``within.compute``, beside the loads, or
        behind what was read. Before ``learned`` has seen the engine compute, loads end with it.
        """
        of = self.allowed(self.least) if allowed is None else allowed
        rooms: list[LayerTensors] = []

        def read(
            keys: Sequence[ChunkKey], spans: Sequence[Span], first: int, least: Accuracy
        ) -> list[Stated]:
            rooms[:] = rooms or room(spans)
            if within is not None:
                tail_tokens = len(tokens) - spans[-1][1]
                return self._read_within(keys, rooms, first, least, within, tail_tokens)
            stated: list[Stated] = []
            self.client.get_chunks(keys[first:], rooms[first:], accuracy=least, stated=stated)
            return stated

        asked = Asked(len(tokens), False, within)
        return self.note_load(len(tokens), *self.attempt(tokens, read, extra, of, asked))


class PlainEngine:
    """Stores and loads prompts of whole chunks, as an engine does: nothing it calls may raise."""

    def __init__(self, client: Client, prefill: PrefillModel | None = None) -> None:
        self.client = client
        self.connector = PlainConnector(client, prefill=prefill)
        self._room: list[ChunkTensors] = []

    def store(self, prompt: Sequence[int]) -> int:
        """Store a prompt; return how many of its chunks were new."""

        def source(span: Span) -> LayerTensors:
            key = self.client.keys(prompt[: span[1]])[-1]
            return tensors_of(key, self.client.model, span[1] - span[0])

        return self.connector.store_chunks(prompt, source)

    def load(self, prompt: Sequence[int]) -> Prefix:
        """Load a prompt; fail unless every chunk that the prefix claims has its own bytes."""
        prefix = self.connector.load_chunks(prompt, self._make_room)
        size = self.client.options.chunk_tokens
        for at in range(prefix.stored_tokens // size):
            key = self.client.keys(prompt[: size * (at + 1)])[-1]
            right = tensors_of(key, self.client.model, size)
            assert equal(self._room[at], right), f"chunk {at} is not what was stored"
        return prefix

    def _make_room(self, spans: Sequence[Span]) -> Sequence[LayerTensors]:
        kind = self.client.model
        self._room = [empty_tensors(KVLayout.of(kind, stop - start)) for start, stop in spans]
        return self._room
