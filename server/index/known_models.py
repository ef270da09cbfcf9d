"""The models that sessions were opened for: what lossy codecs are told of their chunks."""

from __future__ import annotations

import threading
from collections import OrderedDict

from kvstore.codecs.terms import EncodeTerms
from kvstore.proto.frame import FrameHeader
from kvstore.proto.types import Representation
from kvstore.server.index.importance import ImportanceTable
from kvstore.server.security.sessions import Session

MAX_KNOWN_MODELS = 256
"""Beyond them the one seen longest ago is forgotten: its chunks are encoded without terms."""


class KnownModels:
    """Encode terms by representation digest. Thread-safe.

    A frame names its model by a digest only; whoever put it had a session that said the rest.
    """

    def __init__(self) -> None:
        self.importance = ImportanceTable()
        """What was said of the tokens of chunks."""
        self._models: OrderedDict[bytes, Representation] = OrderedDict()
        self._lock = threading.Lock()  # guards the dictionary

    def note(self, session: Session) -> None:
        """Remember the model of a session that was opened."""
        self.learn(session.representation_digest, session.representation)

    def learn(self, digest: bytes, representation: Representation) -> None:
        """Remember *representation*, whose digest is *digest*."""
        with self._lock:
            self._models.pop(digest, None)
            self._models[digest] = representation
            if len(self._models) > MAX_KNOWN_MODELS:
                self._models.popitem(last=False)

    def terms_of(self, header: FrameHeader) -> EncodeTerms | None:
        """Return the terms of the model that the frame of *header* is of; None if not known."""
        with self._lock:
            model = self._models.get(header.representation)
        if model is None:
            return None
        terms = EncodeTerms.of(model, self.importance.of(header), header.layout)
        return terms if len(terms.layer_ids) == header.layout.segment_count else None
