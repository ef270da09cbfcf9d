"""TierSlot: a tier with its codec, policy, breaker and speed; Tiers: all slots of a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.asset_codec import AssetCodec
from kvstore.codecs.base import Codec, EncodeTerms, codec_by_name
from kvstore.codecs.floats import FLOAT_TYPES
from kvstore.codecs.kvq import KvqCodec
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.transcode import max_transcoded_bytes, transcode
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    ChunkCorruptError,
    DeadlineError,
    InvalidFrameError,
    InvalidRequestError,
    LayoutMismatchError,
    ModelError,
    TierUnavailableError,
    UnknownCodecError,
)
from kvstore.proto.frame import FrameHeader, check_frame, header_bytes, parse_header
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.types import Accuracy, ChunkInfo, ChunkKey, KVLayout, LayerKind
from kvstore.server.eviction.policy import EvictionPolicy
from kvstore.server.eviction.quotas import PartitionedEviction
from kvstore.server.tiering.admission import TierAdmission
from kvstore.server.tiering.breaker import Breaker
from kvstore.tiers.base import Tier
from kvstore.tiers.cpu import CpuTier

if TYPE_CHECKING:  # the tier's file loads torch
    from kvstore.server.telemetry.tracing import Tracing
    from kvstore.tiers.gpu import GpuTier

TermsOf = Callable[[FrameHeader], EncodeTerms | None]
"""Returns the encode terms of a frame's model, if known."""

LOSSLESS = "lossless"
"""Used where a lossy codec cannot be."""

_CANNOT = (LayoutMismatchError, UnknownCodecError, ModelError, InvalidRequestError)


class TierCodec:
    """Encodes frames for one tier. Thread-safe; ``use`` may change the codec at any time.

    Codecs are given by name, such as ``kvq:2``. A lossy one encodes floating-point originals only:
    integers and fp8 have no precision to spare, and repeated loss has no bound. Other chunks, and
    recurrent states, are encoded without loss. Raises UnknownCodecError.
    """

    def __init__(
        self,
        name: str,
        by_tenant: Mapping[str, str] | None = None,
        terms_of: TermsOf = lambda _: None,
    ) -> None:
        self._by_tenant = {who: codec_by_name(one) for who, one in (by_tenant or {}).items()}
        self._terms_of = terms_of
        self.use(name)

    def use(self, name: str, note: str = "") -> None:
        """Set the codec of tenants without their own; append *note* to its displayed name."""
        self._default, self.name = codec_by_name(name), name + note
        self.codec_id = self._default.codec_id
        codecs = [self._default, *self._by_tenant.values()]
        self.is_exact = all(codec.accuracy is Accuracy.exact for codec in codecs)
        """Whether the chunks of all tenants are restored bit for bit."""
        self.needs_assets = any(isinstance(codec, AssetCodec) for codec in codecs)
        """Whether decoding some frames needs an asset of their model."""

    def of_tenant(self, tenant: str) -> Codec:
        """Return the codec for the chunks of *tenant*."""
        return self._by_tenant.get(tenant, self._default)

    def weighs(self, tenant: str) -> bool:
        """Whether the codec of *tenant* gives important tokens more precision."""
        codec = self.of_tenant(tenant)
        return isinstance(codec, KvqCodec) and codec.options.importance

    def encode(self, frame: Bytes, tenant: str, least: Accuracy = Accuracy.approximate) -> Bytes:
        """Return *frame* encoded for this tier; the same bytes if it already is.

        Frames that the codec cannot encode stay lossless, and all do if *least* is exact. Raises
        as ``transcode`` does.
        """
        header = parse_header(frame)
        codec = self.of_tenant(tenant)
        is_coded = header.codec_id != RawCodec.codec_id
        if header.accuracy is not Accuracy.exact and is_coded and not isinstance(codec, RawCodec):
            return frame  # already lossy: not encoded again
        if codec.accuracy is Accuracy.exact:
            return _transcoded(frame, header, codec, None)
        may_be_lossy = least is not Accuracy.exact and may_lose(header.layout)
        if header.accuracy is Accuracy.exact and may_be_lossy:
            try:
                return _transcoded(frame, header, codec, self._terms_of(header))
            except _CANNOT:
                pass  # no tables for this model, or a position embedding unknown to the codec
        return _transcoded(frame, header, codec_by_name(LOSSLESS), None)


def may_lose(layout: KVLayout) -> bool:
    """Whether a lossy codec may encode *layout*: a component other than states has floats."""
    kinds = ((c.dtype, c.kind) for c in layout.components)
    return any(dtype in FLOAT_TYPES and kind is not LayerKind.state for dtype, kind in kinds)


def _transcoded(
    frame: Bytes, header: FrameHeader, codec: Codec, terms: EncodeTerms | None
) -> Bytes:
    if header.codec_id == codec.codec_id:
        return frame
    scratch = np.empty(max_transcoded_bytes(header.layout, codec), np.uint8)
    return scratch[: transcode(frame, codec, scratch, terms).frame_bytes]


PEER_TIER = "peer"

_EWMA_WEIGHT = 0.2
_FIRST_GUESS_BYTES_PER_S = {"gpu": 10e9, "cpu": 10e9, "disk": 1e9, "peer": 1e9, "redis": 0.5e9}
_ROUND_TRIP_S = {"gpu": 20e-6, "cpu": 0.0, "disk": 100e-6, "peer": 500e-6, "redis": 500e-6}


@dataclass(frozen=True, slots=True)
class SpaceRequest:
    """Request for space for a frame on a slot, with a deadline and headroom to leave free."""

    info: ChunkInfo
    tenant: str
    deadline: float
    headroom_bytes: int = 0
    category: str = ""
    is_original: bool = False
    """Whether it replaces a lossy copy on the slot."""


@dataclass(slots=True, eq=False)
class TierSlot:
    """One tier with its codec, policy, breaker and statistics.

    Calls go through the breaker: TierUnavailableError counts as a failure of the medium, a return
    as a success. *clock* returns monotonic seconds.
    """

    tier: Tier
    encoder: TierCodec
    policy: EvictionPolicy
    breaker: Breaker
    clock: Callable[[], float]
    admission: TierAdmission | None = None
    """Which copies it stores; None: the default of Placement."""
    is_exclusive: bool = False
    """Whether a copy is dropped once its chunk is promoted to memory."""
    decode_s_per_byte: float = 0.0
    """Moving average of decoding into CPU memory; 0 before the first, and for raw frames."""
    name: str = field(init=False)
    """The tier's name, cached."""
    bytes_per_s: float = field(init=False)
    """Exponentially weighted moving average of loads."""
    round_trip_s: float = field(init=False)
    has_quotas: bool = field(init=False)
    """Whether its policy enforces quotas of tenants and categories."""
    tracing: Tracing | None = None

    def __post_init__(self) -> None:
        self.name = name = self.tier.name
        self.has_quotas = isinstance(self.policy, PartitionedEviction)
        self.bytes_per_s = _FIRST_GUESS_BYTES_PER_S.get(name, 1e9)
        self.round_trip_s = _ROUND_TRIP_S.get(name, 1e-3)

    def read_verified(
        self, info: ChunkInfo, out: Bytes, is_cancelled: Callable[[], bool] = lambda: False
    ) -> FrameHeader | None:
        """Fill *out* with the frame of *info* and verify it; None when the tier lost it.

        Raises ChunkCorruptError for any other bytes, and DeadlineError between parts of its first
        half once *is_cancelled*.
        """
        started = self.clock()

        def arriving(size_bytes: int) -> None:
            if 2 * size_bytes < len(out) and is_cancelled():  # past half, finish it
                raise DeadlineError(f"load from {self.name}: cancelled")

        verifier = FrameVerifier(out, info.key, header_bytes(info.layout), arriving)
        if not self.guarded(lambda: self.tier.read(info.key, out, 0, verifier), "read"):
            return None
        try:
            header = verifier.finish()
        except InvalidFrameError as error:
            raise ChunkCorruptError(info.key, str(error)) from None
        if header.accuracy < info.accuracy:
            why = f"is {header.accuracy.name}, not {info.accuracy.name}"
            raise ChunkCorruptError(info.key, why)
        self.note_load(len(out), self.clock() - started)
        return header

    @property
    def reason(self) -> str:
        """Why it is not used or takes no writes; empty while it serves."""
        return self.breaker.reason or self.tier.write_error

    def note_load(self, size_bytes: int, seconds: float) -> None:
        """Record one load."""
        if seconds > 0:
            self.bytes_per_s += _EWMA_WEIGHT * (size_bytes / seconds - self.bytes_per_s)

    def note_decode(self, size_bytes: int, seconds: float) -> None:
        """Record the decoding of a frame of *size_bytes* stored bytes."""
        if seconds > 0:
            before = self.decode_s_per_byte or seconds / size_bytes
            self.decode_s_per_byte = before + _EWMA_WEIGHT * (seconds / size_bytes - before)

    def fetch_s(self, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Estimated seconds to load each of *sizes* stored bytes."""
        return self.round_trip_s + sizes / self.bytes_per_s

    def load_s(self, size_bytes: int) -> float:
        """Estimated seconds to load and decode *size_bytes* stored bytes."""
        return self.round_trip_s + size_bytes * (1 / self.bytes_per_s + self.decode_s_per_byte)

    def guarded(self, work: Callable[[], bool], what: str = "use") -> bool:
        """Run *work* on the medium through the breaker; traces name it *what*."""
        if not self.breaker.allows():
            raise TierUnavailableError(self.name, f"unavailable: {self.breaker.reason}")
        try:
            done = work() if self.tracing is None else self.tracing.on_tier(self.name, what, work)
        except TierUnavailableError as error:
            if not error.is_partial:
                self.breaker.fail(str(error))
            raise
        self.breaker.succeed()
        return done


class Tiers:
    """The *slots* of a server, fastest first.

    One of them is CPU memory, which serves frames; only GPU memory is faster.
    """

    def __init__(self, slots: Sequence[TierSlot]) -> None:
        self.slots: Mapping[str, TierSlot] = {slot.name: slot for slot in slots}
        self.cpu = cpu = next(slot for slot in slots if isinstance(slot.tier, CpuTier))
        self.cpu_tier = cast("CpuTier", cpu.tier)
        self.gpu = gpu = None if slots[0] is cpu else slots[0]
        self.gpu_tier = cast("GpuTier", gpu.tier) if gpu else None
        self.remote = self.slots.get(PEER_TIER)
        """The memory of other servers."""
        self.sources = (cpu, *(slot for slot in slots if slot is not cpu))
        """In read order: CPU memory first."""
        self.lower = tuple(s for s in slots if s not in (cpu, gpu) and not s.tier.read_only)
        """Writable slots below CPU memory, fastest first."""
        local = (s for s in self.lower if s.tier.survives_restart and not s.tier.shared)
        self.file_backed = next(
            (s for s in local if s.tier.shares_files and not s.encoder.needs_assets), None
        )
        """The slot whose frames are in files that readers on this host can open."""

    def below(self, slot: TierSlot) -> tuple[TierSlot, ...]:
        """Return the writable slots below *slot*, fastest first."""
        if slot is self.gpu:
            return (self.cpu, *self.lower)
        return self.lower if slot is self.cpu else self.lower[self.lower.index(slot) + 1 :]


def verify(frame: Bytes, key: ChunkKey) -> FrameHeader:
    """Check a frame read for *key*. Raises ChunkCorruptError for any fault."""
    try:
        return check_frame(frame, key)
    except (InvalidFrameError, UnknownCodecError) as error:
        raise ChunkCorruptError(key, str(error)) from None
