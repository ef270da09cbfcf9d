"""The models that sessions were opened for: what lossy codecs are told of their chunks."""

from __future__ import annotations

import threading

from kvstore.codecs.terms import EncodeTerms
from kvstore.proto.frame import FrameHeader
from kvstore.proto.types import Representation
from kvstore.server.sessions import Session

MAX_KNOWN_MODELS = 256
"""Beyond them the one seen longest ago is forgotten: its chunks are encoded without terms."""


class KnownModels:
    """Encode terms by representation digest. Thread-safe.

    A frame names its model by a digest only; whoever put it had a session that said the rest.
    """

    def __init__(self) -> None:
        self._terms: dict[bytes, EncodeTerms] = {}
        self._lock = threading.Lock()  # guards the dictionary

    def note(self, session: Session) -> None:
        """Remember the model of a session that was opened."""
        self.learn(session.representation_digest, session.representation)

    def learn(self, digest: bytes, representation: Representation) -> None:
        """Remember *representation*, whose digest is *digest*."""
        terms = EncodeTerms.of(representation)
        with self._lock:
            self._terms.pop(digest, None)
            self._terms[digest] = terms
            if len(self._terms) > MAX_KNOWN_MODELS:
                del self._terms[next(iter(self._terms))]

    def terms_of(self, header: FrameHeader) -> EncodeTerms | None:
        """Return the terms of the model that the frame of *header* is of; None if not known."""
        with self._lock:
            terms = self._terms.get(header.representation)
        fits = terms is not None and len(terms.layer_ids) == header.layout.segment_count
        return terms if fits else None
