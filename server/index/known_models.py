"""The models of sessions: for codecs, and by namespace."""

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
"""Limit of token weights; the oldest are dropped, and their chunks encoded without weights."""
OVERHEAD_BYTES = 256
"""Overhead counted per chunk, to bound very short ones too."""

MAX_KNOWN_MODELS = 256
"""Beyond it the least recently seen model is dropped: its chunks are encoded without terms."""


class KnownModels:
    """Codec inputs that a frame does not contain. Thread-safe.

    Models by representation digest, and by chunk a weight of one byte for each token. At most
    *limit_bytes* of weights are kept, also for absent chunks: one may be encoded again, for another
    tier.
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
        """Set the *weights* of the tokens of *key*."""
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
        """Return f32 (tokens,) for the chunk of *header*; None unless there are as many weights."""
        weights = self._weights.get(header.key, b"")
        if len(weights) != header.layout.tokens:
            return None
        found: Importance = np.frombuffer(weights, np.uint8).astype(np.float32)
        return found

    def terms_of(self, header: FrameHeader) -> EncodeTerms | None:
        """Return the terms of the model of a frame with *header*; None if not known."""
        model = self._models.get(header.representation)
        if model is None:
            return None
        terms = EncodeTerms.of(model, self.importance(header), header.layout)
        return terms if len(terms.layer_ids) == header.layout.segment_count else None


MAX_SPACES = 256
"""Limit of remembered namespaces. Beyond it the least recently opened one of the tenant with the
most is dropped."""

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
    """A field in which two models differ, and both values."""

    field: str
    stored: str
    asked: str


class ModelRegistry:
    """The models of the latest sessions, by namespace. Thread-safe."""

    def __init__(self) -> None:
        self._spaces: OrderedDict[bytes, ModelNamespace] = OrderedDict()
        self._lock = threading.Lock()  # guards the dictionary

    def note(self, session: Session) -> None:
        """Record the namespace of a new session."""
        space = ModelNamespace(
            session.namespace, session.tenant, session.client, session.representation
        )
        with self._lock:
            self._spaces.pop(session.namespace, None)
            if len(self._spaces) >= MAX_SPACES:
                # A tenant's models never displace those of a tenant with fewer.
                counts = Counter(one.tenant for one in self._spaces.values())
                most = max(counts.values())
                oldest = next(n for n, one in self._spaces.items() if counts[one.tenant] == most)
                del self._spaces[oldest]
            self._spaces[session.namespace] = space

    def restore(self, spaces: Sequence[ModelNamespace]) -> None:
        """Restore the namespaces of an earlier run, before any session is opened."""
        with self._lock:
            self._spaces = OrderedDict((space.namespace, space) for space in spaces[-MAX_SPACES:])

    def of(self, namespace: Namespace) -> ModelNamespace | None:
        """Return the model of a namespace, if known."""
        with self._lock:
            return self._spaces.get(namespace)

    def all(self) -> list[ModelNamespace]:
        """Return all namespaces, the latest first."""
        with self._lock:
            return list(reversed(self._spaces.values()))

    def others(self, asked: ModelNamespace) -> list[ModelNamespace]:
        """Return the other namespaces of the tenant of *asked*, the latest first."""
        space, tenant = asked.namespace, asked.tenant
        return [one for one in self.all() if one.tenant == tenant and one.namespace != space]


def nearest(
    asked: ModelNamespace, others: Iterable[ModelNamespace]
) -> list[tuple[ModelNamespace, list[FieldDifference]]]:
    """Return the differences of *others* from *asked*, the nearest first."""
    mine = asked.representation
    compared = [(space, differences(space.representation, mine)) for space in others]
    return sorted(compared, key=lambda pair: len(pair[1]))


def differences(stored: Model, asked: Model) -> list[FieldDifference]:
    """Return the fields in which two models differ, such as ``layer_groups[0].dtype``, in order."""
    ones, others = dict(_leaves("", stored)), dict(_leaves("", asked))
    pairs = [(name, ones.get(name, ABSENT), others.get(name, ABSENT)) for name in ones | others]
    return [FieldDifference(*pair) for pair in pairs if pair[1] != pair[2]]


def _leaves(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the fields of *value* and of nested dataclasses as (name, text)."""
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
