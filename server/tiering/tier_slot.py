"""A TierSlot: one tier with its codec, policy, breaker and speed; and Tiers, all of a server's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.asset_codec import AssetCodec
from kvstore.codecs.base import Codec, codec_by_name
from kvstore.codecs.floats import FLOAT_TYPES
from kvstore.codecs.kvq import KvqCodec
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.terms import EncodeTerms
from kvstore.codecs.transcode import max_transcoded_bytes, transcode
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    ChunkCorruptError,
    DeadlineError,
    InvalidFrameError,
    InvalidRequestError,
    LayoutMismatchError,
    RepresentationError,
    TierUnavailableError,
    UnknownCodecError,
)
from kvstore.proto.frame import FrameHeader, check_frame, header_bytes, parse_header
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.types import ChunkInfo, ChunkKey, Fidelity, KVLayout, LayerKind
from kvstore.server.eviction.policy import EvictionPolicy
from kvstore.server.tiering.admission import TierAdmission
from kvstore.server.tiering.breaker import Breaker
from kvstore.tiers.base import DEFAULT_TENANT, Tier
from kvstore.tiers.cpu import CpuTier

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


if TYPE_CHECKING:  # the tier's file loads torch
    from kvstore.server.telemetry.tracing import Tracing
    from kvstore.tiers.gpu import GpuTier

PEER_TIER = "peer"

_EWMA_WEIGHT = 0.2
_MAX_LOAD_US = (1 << 32) - 1
_FIRST_GUESS_BYTES_PER_S = {"gpu": 10e9, "cpu": 10e9, "disk": 1e9, "peer": 1e9, "redis": 0.5e9}
_ROUND_TRIP_S = {"gpu": 20e-6, "cpu": 0.0, "disk": 100e-6, "peer": 500e-6, "redis": 500e-6}


@dataclass(slots=True)
class Rate:
    """Bytes per second of loads from a tier, as an exponentially weighted mean."""

    bytes_per_s: float
    round_trip_s: float

    def observe(self, size_bytes: int, seconds: float) -> None:
        """Take note of one load."""
        if seconds > 0:
            step = size_bytes / seconds - self.bytes_per_s
            self.bytes_per_s += _EWMA_WEIGHT * step

    def load_us(self, sizes: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Estimated microseconds to load each of *sizes* bytes."""
        seconds = self.round_trip_s + sizes / self.bytes_per_s
        return np.minimum(1e6 * seconds, _MAX_LOAD_US).astype(np.uint32)


@dataclass(frozen=True, slots=True)
class SpaceRequest:
    """What is asked of a slot: room for a frame, by when, leaving how much free."""

    info: ChunkInfo
    tenant: str
    deadline: float
    headroom_bytes: int = 0
    category: str = ""


@dataclass(slots=True, eq=False)
class TierSlot:
    """One tier and what is needed to use it.

    Calls go through the breaker: TierUnavailableError counts as a failure of the medium, any
    other answer as a success. *clock* returns monotonic seconds.
    """

    tier: Tier
    codec: Codec
    policy: EvictionPolicy
    breaker: Breaker
    clock: Callable[[], float]
    encoder: TierCodec = None  # type: ignore[assignment] # filled in at birth
    """What encodes frames for it; without one, *codec* does."""
    admission: TierAdmission | None = None
    """Which copies it is given; None for what the store's limits say."""
    is_exclusive: bool = False
    """Whether a copy goes once its chunk has come up to memory."""
    decode_bytes_per_s: float = 0.0
    """Mean speed of decoding its frames for CPU memory; 0 before the first, and for raw ones."""
    name: str = field(init=False)
    """The tier's, which is asked for often."""
    rate: Rate = field(init=False)
    tracing: Tracing | None = None

    def __post_init__(self) -> None:
        self.encoder = self.encoder or TierCodec(NamedCodec(self.codec.name, self.codec))
        self.name = name = self.tier.name
        self.rate = Rate(_FIRST_GUESS_BYTES_PER_S.get(name, 1e9), _ROUND_TRIP_S.get(name, 1e-3))

    @property
    def reason(self) -> str:
        """Why it is left alone, or takes nothing; empty while it serves."""
        return self.breaker.reason or self.tier.write_error

    def read_verified(
        self,
        info: ChunkInfo,
        out: Bytes,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> FrameHeader | None:
        """Fill *out* with the frame of *info* and verify it; None when the tier lost it.

        Raises ChunkCorruptError for bytes that are not the frame, whatever is wrong with them,
        and DeadlineError between parts of its first half once *is_given_up*.
        """
        started = self.clock()

        def arriving(size_bytes: int) -> None:
            if 2 * size_bytes < len(out) and is_given_up():  # else it is better done
                raise DeadlineError(f"load from {self.name}: nobody waits for it any more")

        verifier = FrameVerifier(out, info.key, header_bytes(info.layout), arriving)
        if not self.guarded(lambda: self.tier.read(info.key, out, 0, verifier), "read"):
            return None
        try:
            header = verifier.finish()
        except InvalidFrameError as error:
            raise ChunkCorruptError(info.key, str(error)) from None
        if header.fidelity < info.fidelity:
            raise ChunkCorruptError(
                info.key, f"is {header.fidelity.name}, not {info.fidelity.name}"
            )
        self.rate.observe(len(out), self.clock() - started)
        return header

    def note_decode(self, size_bytes: int, seconds: float) -> None:
        """Take note of a frame of so many stored bytes that was decoded."""
        if seconds > 0:
            before = self.decode_bytes_per_s or size_bytes / seconds
            self.decode_bytes_per_s = before + _EWMA_WEIGHT * (size_bytes / seconds - before)

    def decode_s(self, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Estimated seconds to decode each of *sizes* stored bytes."""
        if not self.decode_bytes_per_s:
            return np.zeros(len(sizes))
        return sizes / self.decode_bytes_per_s

    def load_s(self, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Estimated seconds until each of *sizes* stored bytes is in memory, decoded."""
        return self.rate.round_trip_s + sizes / self.rate.bytes_per_s + self.decode_s(sizes)

    def guarded(self, work: Callable[[], bool], what: str = "use") -> bool:
        """Run *work* on the medium and let the breaker know how it went.

        *what* is its name in traces.
        """
        if not self.breaker.allows():
            raise TierUnavailableError(self.name, f"left alone for now: {self.breaker.reason}")
        try:
            done = work() if self.tracing is None else self.tracing.on_tier(self.name, what, work)
        except TierUnavailableError as error:
            if not error.is_partial:
                self.breaker.fail(str(error))
            raise
        self.breaker.succeed()
        return done

    def encode_for(
        self, frame: Bytes, tenant: str = DEFAULT_TENANT, least: Fidelity = Fidelity.none
    ) -> Bytes:
        """Return *frame* under this slot's codec: the same bytes when it already is.

        An exact one stays so where *least* is.
        """
        return self.encoder.encode(frame, tenant, least)

    def fidelity_for(self, tenant: str) -> Fidelity:
        """Return what becomes at least of an exact chunk of *tenant* here."""
        return self.encoder.of_tenant(tenant).fidelity


@dataclass(frozen=True, slots=True)
class Tiers:
    """The slots of a server by name, ordered from the fastest to the slowest.

    One of them is CPU memory, which frames are served from; only GPU memory is faster.
    """

    slots: Mapping[str, TierSlot]
    cpu: TierSlot
    cpu_tier: CpuTier
    gpu: TierSlot | None
    gpu_tier: GpuTier | None
    file_backed: TierSlot | None
    """The slot whose frames lie in files that a reader on this host may open."""
    remote: TierSlot | None
    """The memory of other servers."""
    sources: tuple[TierSlot, ...]
    """In the order in which frames are looked for: first where they are served."""
    lower: tuple[TierSlot, ...]
    """Those below CPU memory that can be written, fastest first."""

    @classmethod
    def of(cls, slots: Sequence[TierSlot]) -> Tiers:
        """Return *slots*, which are in this order, by what they are for."""
        cpu = next(slot for slot in slots if isinstance(slot.tier, CpuTier))
        gpu = None if slots[0] is cpu else slots[0]
        lower = tuple(s for s in slots if s not in (cpu, gpu) and not s.tier.read_only)
        local = (s for s in lower if s.tier.survives_restart and not s.tier.shared)
        return cls(
            {slot.name: slot for slot in slots},
            cpu,
            cast("CpuTier", cpu.tier),
            gpu,
            cast("GpuTier", gpu.tier) if gpu else None,
            next((s for s in local if s.tier.shares_files and not s.encoder.needs_assets), None),
            next((s for s in slots if s.name == PEER_TIER), None),
            (cpu, *(slot for slot in slots if slot is not cpu)),
            lower,
        )

    def below(self, slot: TierSlot) -> tuple[TierSlot, ...]:
        """Return the slots below *slot* that can be written, fastest first."""
        if slot is self.gpu:
            return (self.cpu, *self.lower)
        return self.lower if slot is self.cpu else self.lower[self.lower.index(slot) + 1 :]


def verify(frame: Bytes, key: ChunkKey) -> FrameHeader:
    """Check a frame read for *key*. Raises ChunkCorruptError, whatever is wrong with it."""
    try:
        return check_frame(frame, key)
    except (InvalidFrameError, UnknownCodecError) as error:
        raise ChunkCorruptError(key, str(error)) from None
