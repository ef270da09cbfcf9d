"""The models of sessions: for codecs, and which model each namespace stands for."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from kvstore.codecs.base import EncodeTerms, Importance
from kvstore.proto.frame import FrameHeader
from kvstore.proto.types import ChunkKey, Model, Namespace
from kvstore.server.security.sessions import Session

MAX_IMPORTANCE_BYTES = 16 << 20
"""Of all chunks; those that were named longest ago are forgotten, and then coded evenly."""
OVERHEAD_BYTES = 256
"""What a chunk takes beside its bytes, so that very short ones are bounded, too."""

MAX_KNOWN_MODELS = 256
"""Beyond them the one seen longest ago is forgotten: its chunks are encoded without terms."""


class KnownModels:
    """What a frame does not say and its codec needs. Thread-safe.

    By representation digest the model; by chunk a byte for each token, how much it matters. Of
    these *limit_bytes* are kept, whatever became of the chunks: one may be encoded again, for
    another tier.
    """

    def __init__(self, limit_bytes: int = MAX_IMPORTANCE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._models: OrderedDict[bytes, Model] = OrderedDict()
        self._weights: OrderedDict[ChunkKey, bytes] = OrderedDict()
        self.weights_bytes = 0
        self._lock = threading.Lock()  # guards the three above

    def learn(self, digest: bytes, representation: Model) -> None:
        """Remember *representation*, whose digest is *digest*."""
        with self._lock:
            self._models[digest] = representation
            self._models.move_to_end(digest)
            if len(self._models) > MAX_KNOWN_MODELS:
                self._models.popitem(last=False)

    def note_importance(self, key: ChunkKey, weights: bytes) -> None:
        """Remember *weights* of the tokens of *key*, in place of earlier ones."""
        with self._lock:
            self._drop_importance(key)
            self._weights[key] = weights
            self.weights_bytes += len(weights) + OVERHEAD_BYTES
            while self.weights_bytes > self._limit_bytes:
                self._drop_importance(next(iter(self._weights)))

    def _drop_importance(self, key: ChunkKey) -> None:
        gone = self._weights.pop(key, None)
        if gone is not None:
            self.weights_bytes -= len(gone) + OVERHEAD_BYTES

    def importance(self, header: FrameHeader) -> Importance | None:
        """Return f32 (tokens,) for the chunk of *header*; None without as many weights."""
        weights = self._weights.get(header.key, b"")
        if len(weights) != header.layout.tokens:
            return None
        found: Importance = np.frombuffer(weights, np.uint8).astype(np.float32)
        return found

    def terms_of(self, header: FrameHeader) -> EncodeTerms | None:
        """Return the terms of the model that the frame of *header* is of; None if not known."""
        model = self._models.get(header.representation)
        if model is None:
            return None
        terms = EncodeTerms.of(model, self.importance(header), header.layout)
        return terms if len(terms.layer_ids) == header.layout.segment_count else None


MAX_SPACES = 256
"""Namespaces that are remembered. Of the tenant with the most the one goes first whose last session
opened longest ago."""

ABSENT = "none"
MAX_TEXT_CHARS = 120


@dataclass(frozen=True, slots=True)
class ModelNamespace:
    """A namespace, and the last session that opened in it."""

    namespace: Namespace
    tenant: str
    client: str
    representation: Model


class FieldDifference(NamedTuple):
    """A field in which two Representations differ, and what each has there."""

    field: str
    stored: str
    asked: str


class ModelRegistry:
    """The Representations of the latest sessions, by namespace. Thread-safe."""

    def __init__(self) -> None:
        self._spaces: OrderedDict[bytes, ModelNamespace] = OrderedDict()
        self._lock = threading.Lock()  # guards the dictionary

    def note(self, session: Session) -> None:
        """Take note of a session that was opened."""
        space = ModelNamespace(
            session.namespace, session.tenant, session.client, session.representation
        )
        with self._lock:
            self._spaces.pop(session.namespace, None)
            if len(self._spaces) >= MAX_SPACES:
                # No tenant's models push out those of a tenant that has fewer.
                counts = Counter(one.tenant for one in self._spaces.values())
                most = max(counts.values())
                oldest = next(n for n, one in self._spaces.items() if counts[one.tenant] == most)
                del self._spaces[oldest]
            self._spaces[session.namespace] = space

    def restore(self, spaces: Sequence[ModelNamespace]) -> None:
        """Take note of what an earlier run knew, before any session is opened."""
        with self._lock:
            self._spaces = OrderedDict((space.namespace, space) for space in spaces[-MAX_SPACES:])

    def of(self, namespace: Namespace) -> ModelNamespace | None:
        """Return what is known of a namespace."""
        with self._lock:
            return self._spaces.get(namespace)

    def all(self) -> list[ModelNamespace]:
        """Return all that are known, the latest first."""
        with self._lock:
            return list(reversed(self._spaces.values()))

    def others(self, asked: ModelNamespace) -> list[ModelNamespace]:
        """Return the other spaces of the tenant of *asked*, the latest first."""
        space, tenant = asked.namespace, asked.tenant
        return [one for one in self.all() if one.tenant == tenant and one.namespace != space]


def nearest(
    asked: ModelNamespace, others: Iterable[ModelNamespace]
) -> list[tuple[ModelNamespace, list[FieldDifference]]]:
    """Return in what *others* differ from *asked*, those that differ least first."""
    mine = asked.representation
    compared = [(space, differences(space.representation, mine)) for space in others]
    return sorted(compared, key=lambda pair: len(pair[1]))


def differences(stored: Model, asked: Model) -> list[FieldDifference]:
    """Return the fields in which two differ, as ``layer_groups[0].dtype``, in their order."""
    ones, others = dict(_leaves("", stored)), dict(_leaves("", asked))
    pairs = [(name, ones.get(name, ABSENT), others.get(name, ABSENT)) for name in ones | others]
    return [FieldDifference(*pair) for pair in pairs if pair[1] != pair[2]]


def _leaves(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the fields of *value*, of dataclasses within it too, by name as text."""
    if is_dataclass(value):
        for field in fields(value):
            inner = f"{name}.{field.name}" if name else field.name
            yield from _leaves(inner, getattr(value, field.name))
    elif isinstance(value, tuple) and value and is_dataclass(value[0]):
        for number, part in enumerate(value):
            yield from _leaves(f"{name}[{number}]", part)
    else:
        yield name, _text(value)


def _text(value: object) -> str:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, tuple) and value and all(isinstance(part, int) for part in value):
        first, last = int(value[0]), int(value[-1])
        text = f"{first} to {last}" if value == tuple(range(first, last + 1)) else str(value)
    else:
        text = str(value) if value != () else ABSENT
    return text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 3] + "..."
