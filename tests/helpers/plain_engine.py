"""An engine that is only a connector; its KV is derived from chunk keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from helpers.prompts import equal, tensors_of

from kvstore.client import Client
from kvstore.client.chunk import LayerTensors
from kvstore.client.engines.base import Connector
from kvstore.client.engines.prefix import Allowed, Prefix, Source, Span
from kvstore.client.planning import PrefillModel
from kvstore.codecs.base import ChunkTensors, empty_tensors
from kvstore.proto.types import Accuracy, ChunkKey, KVLayout, Stated


class PlainEngine:
    """Stores and loads prompts of whole chunks, as an engine does; no call may raise."""

    def __init__(self, client: Client, prefill: PrefillModel | None = None, **terms: Any) -> None:
        """*terms*: arguments of Connector."""
        self.client = client
        self.connector = Connector(client, prefill=prefill, **terms)
        self._out: list[ChunkTensors] = []

    def store(self, prompt: Sequence[int]) -> int:
        """Store a prompt; return how many of its chunks were new."""
        return self.connector.store_chunks(prompt, self.source(prompt))

    def source(self, prompt: Sequence[int]) -> Source:
        """Return a function that computes the chunks of a prompt."""

        def source(span: Span) -> LayerTensors:
            key = self.client.keys(prompt[: span[1]])[-1]
            return tensors_of(key, self.client.model, span[1] - span[0])

        return source

    def load(self, prompt: Sequence[int]) -> Prefix:
        """Load a prompt; fail unless every chunk of the prefix has correct bytes."""
        prefix = load_prompt(self.connector, prompt, self.allocate)
        size = self.client.options.chunk_tokens
        for at in range(prefix.stored_tokens // size):
            key = self.client.keys(prompt[: size * (at + 1)])[-1]
            expected = tensors_of(key, self.client.model, size)
            assert equal(self._out[at], expected), f"chunk {at} is not what was stored"
        return prefix

    def allocate(self, spans: Sequence[Span]) -> Sequence[LayerTensors]:
        kind = self.client.model
        self._out = [empty_tensors(KVLayout.of(kind, stop - start)) for start, stop in spans]
        return self._out


def load_prompt(
    connector: Connector, prompt: Sequence[int],
    allocate: Callable[[Sequence[Span]], Sequence[LayerTensors]], extra: Sequence[bytes] = (),
    allowed: Allowed | None = None,
) -> Prefix:  # fmt: skip
    """Load a prompt into buffers of *allocate*; *allowed* overrides the connector's setting."""
    outs: list[LayerTensors] = []

    def read(
        keys: Sequence[ChunkKey], spans: Sequence[Span], first: int, least: Accuracy
    ) -> list[Stated]:
        outs[:] = outs or allocate(spans)
        stated: list[Stated] = []
        connector.client.get_chunks(keys[first:], outs[first:], accuracy=least, stated=stated)
        return stated

    of = allowed or connector.allowed(connector.least)
    found = connector.attempt(prompt, read, extra, of)
    return connector.note_load(len(prompt), *found)
