"""The codec of a tier: what frames become on their way there, for each tenant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from kvstore.codecs.asset_codec import AssetCodec
from kvstore.codecs.base import Codec, codec_by_name
from kvstore.codecs.floats import FLOAT_TYPES
from kvstore.codecs.kvq import KvqCodec
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.terms import EncodeTerms
from kvstore.codecs.transcode import max_transcoded_bytes, transcode
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    InvalidRequestError,
    LayoutMismatchError,
    RepresentationError,
    UnknownCodecError,
)
from kvstore.proto.frame import FrameHeader, parse_header
from kvstore.proto.types import Fidelity, KVLayout, LayerKind

TermsOf = Callable[[FrameHeader], EncodeTerms | None]
"""Returns what the server knows of the model that a frame is of."""

_CANNOT = (LayoutMismatchError, UnknownCodecError, RepresentationError, InvalidRequestError)


def no_terms(_: FrameHeader) -> EncodeTerms | None:
    """Know nothing of any model."""
    return None


def lossless_codec() -> Codec:
    """Return what takes the place of a lossy codec where that cannot be used."""
    return codec_by_name("zplane")


@dataclass(frozen=True, slots=True)
class NamedCodec:
    """A codec under the name that it was asked for by, such as ``kvq:2``."""

    name: str
    codec: Codec = field(compare=False)

    @classmethod
    def of(cls, name: str) -> NamedCodec:
        """Return the codec called *name*. Raises UnknownCodecError."""
        return cls(name, codec_by_name(name))


class TierCodec:
    """Encodes frames for one tier. Thread-safe; ``use`` may change the codec while it is at work.

    A lossy codec is given originals of floating point only: integers and fp8 have no precision
    to spare, and loss on top of loss has no bound. These go without loss, and so do recurrent
    states, which the codecs keep as they are beside keys and values.
    """

    def __init__(
        self,
        default: NamedCodec,
        by_tenant: Mapping[str, NamedCodec] | None = None,
        terms_of: TermsOf = no_terms,
    ) -> None:
        self._default = default
        self._by_tenant = dict(by_tenant or {})
        self._terms_of = terms_of

    @property
    def name(self) -> str:
        """What the tier's codec is called, such as ``kvq:2``."""
        return self._default.name

    @property
    def codec_id(self) -> int:
        """What frames call it."""
        return self._default.codec.codec_id

    def use(self, codec: NamedCodec) -> None:
        """Encode with *codec* from now on, for tenants without one of their own."""
        self._default = codec

    def of_tenant(self, tenant: str) -> Codec:
        """Return the codec for the chunks of *tenant*."""
        return self._by_tenant.get(tenant, self._default).codec

    @property
    def is_exact(self) -> bool:
        """Whether everybody's chunks come back bit for bit."""
        every = (self._default, *self._by_tenant.values())
        return all(one.codec.fidelity is Fidelity.exact for one in every)

    @property
    def needs_assets(self) -> bool:
        """Whether some of the frames can only be read by who has an asset of their model."""
        every = (self._default, *self._by_tenant.values())
        return any(isinstance(one.codec, AssetCodec) for one in every)

    def weighs(self, tenant: str) -> bool:
        """Whether the codec of *tenant* keeps tokens that matter more exactly than others."""
        codec = self.of_tenant(tenant)
        return isinstance(codec, KvqCodec) and codec.options.importance

    def is_other(self, header: FrameHeader, tenant: str) -> bool:
        """Whether a frame for *tenant* was kept without loss, as its codec could not take it."""
        codec = self.of_tenant(tenant)
        is_lossy = codec.fidelity is not Fidelity.exact
        return is_lossy and header.codec_id != codec.codec_id

    def encode(self, frame: Bytes, tenant: str, least: Fidelity = Fidelity.none) -> Bytes:
        """Return *frame* as this tier keeps it: the same bytes when it already is.

        What the codec cannot take is kept without loss, and so is what *least* says is to stay
        exact. Raises as ``transcode`` does.
        """
        header = parse_header(frame)
        codec = self.of_tenant(tenant)
        is_coded = header.codec_id != RawCodec.codec_id
        if header.fidelity is not Fidelity.exact and is_coded and not isinstance(codec, RawCodec):
            return frame  # coded with loss, once: as small as it gets
        if codec.fidelity is Fidelity.exact:
            return _transcoded(frame, header, codec, None)
        may_be_lossy = least is not Fidelity.exact and may_lose(header.layout)
        if header.fidelity is Fidelity.exact and may_be_lossy:
            try:
                return _transcoded(frame, header, codec, self._terms_of(header))
            except _CANNOT:
                pass  # of this model: no tables for it, or no embedding that the codec knows
        return _transcoded(frame, header, lossless_codec(), None)


def may_lose(layout: KVLayout) -> bool:
    """Whether a lossy codec may be given chunks of *layout*: some have floats beside states."""
    return any(
        component.dtype in FLOAT_TYPES and component.kind is not LayerKind.state
        for component in layout.components
    )


def _transcoded(
    frame: Bytes, header: FrameHeader, codec: Codec, terms: EncodeTerms | None
) -> Bytes:
    if header.codec_id == codec.codec_id:
        return frame
    scratch = np.empty(max_transcoded_bytes(header.layout, codec), np.uint8)
    return scratch[: transcode(frame, codec, scratch, terms).frame_bytes]
