"""A TierSlot: one tier with its codec, policy, breaker and speed; and Tiers, all of a server's."""

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
"""Returns what the server knows of the model that a frame is of."""

LOSSLESS = "lossless"
"""What takes the place of a lossy codec where that cannot be used."""

_CANNOT = (LayoutMismatchError, UnknownCodecError, ModelError, InvalidRequestError)


class TierCodec:
    """Encodes frames for one tier. Thread-safe; ``use`` may change the codec while it is at work.

    Codecs are by name, such as ``kvq:2``. A lossy one is given originals of floating point only:
    integers and fp8 have no precision to spare, and loss on top of loss has no bound. These go
    without loss, and so do recurrent states. Raises UnknownCodecError.
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
        """Encode for tenants without a codec of their own with this one, *note* behind its name."""
        self._default, self.name = codec_by_name(name), name + note
        self.codec_id = self._default.codec_id
        codecs = [self._default, *self._by_tenant.values()]
        self.is_exact = all(codec.accuracy is Accuracy.exact for codec in codecs)
        """Whether everybody's chunks come back bit for bit."""
        self.needs_assets = any(isinstance(codec, AssetCodec) for codec in codecs)
        """Whether some of the frames can only be read by who has an asset of their model."""

    def of_tenant(self, tenant: str) -> Codec:
        """Return the codec for the chunks of *tenant*."""
        return self._by_tenant.get(tenant, self._default)

    def weighs(self, tenant: str) -> bool:
        """Whether the codec of *tenant* keeps tokens that matter more exactly than others."""
        codec = self.of_tenant(tenant)
        return isinstance(codec, KvqCodec) and codec.options.importance

    def encode(self, frame: Bytes, tenant: str, least: Accuracy = Accuracy.approximate) -> Bytes:
        """Return *frame* as this tier keeps it: the same bytes when it already is.

        What the codec cannot take stays without loss, and so does all where *least* is exact.
        Raises as ``transcode`` does.
        """
        header = parse_header(frame)
        codec = self.of_tenant(tenant)
        is_coded = header.codec_id != RawCodec.codec_id
        if header.accuracy is not Accuracy.exact and is_coded and not isinstance(codec, RawCodec):
            return frame  # coded with loss, once: as small as it gets
        if codec.accuracy is Accuracy.exact:
            return _transcoded(frame, header, codec, None)
        may_be_lossy = least is not Accuracy.exact and may_lose(header.layout)
        if header.accuracy is Accuracy.exact and may_be_lossy:
            try:
                return _transcoded(frame, header, codec, self._terms_of(header))
            except _CANNOT:
                pass  # of this model: no tables for it, or no embedding that the codec knows
        return _transcoded(frame, header, codec_by_name(LOSSLESS), None)


def may_lose(layout: KVLayout) -> bool:
    """Whether a lossy codec may be given chunks of *layout*: some have floats beside states."""
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
    """Room for a frame on a slot, by when, leaving how much free."""

    info: ChunkInfo
    tenant: str
    deadline: float
    headroom_bytes: int = 0
    category: str = ""
    is_original: bool = False
    """Whether a lossy copy on the slot gives way to it."""


@dataclass(slots=True, eq=False)
class TierSlot:
    """One tier and what is needed to use it.

    Calls go through the breaker: TierUnavailableError counts as a failure of the medium, any
    other answer as a success. *clock* returns monotonic seconds.
    """

    tier: Tier
    encoder: TierCodec
    policy: EvictionPolicy
    breaker: Breaker
    clock: Callable[[], float]
    admission: TierAdmission | None = None
    """Which copies it is given; None for what the store's limits say."""
    is_exclusive: bool = False
    """Whether a copy goes once its chunk has come up to memory."""
    decode_s_per_byte: float = 0.0
    """Of decoding its frames for CPU memory, a mean; 0 before the first, and for raw ones."""
    name: str = field(init=False)
    """The tier's, kept here as it is read often."""
    bytes_per_s: float = field(init=False)
    """Of loads from it, an exponentially weighted mean."""
    round_trip_s: float = field(init=False)
    has_quotas: bool = field(init=False)
    """Whether its policy keeps tenants and categories to shares of it."""
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

        Raises ChunkCorruptError for bytes that are not the frame, whatever is wrong with them,
        and DeadlineError between parts of its first half once *is_cancelled*.
        """
        started = self.clock()

        def arriving(size_bytes: int) -> None:
            if 2 * size_bytes < len(out) and is_cancelled():  # else it is better done
                raise DeadlineError(f"load from {self.name}: nobody waits for it any more")

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
        """Why it is left alone or takes nothing; empty while it serves."""
        return self.breaker.reason or self.tier.write_error

    def note_load(self, size_bytes: int, seconds: float) -> None:
        """Take note of one load."""
        if seconds > 0:
            self.bytes_per_s += _EWMA_WEIGHT * (size_bytes / seconds - self.bytes_per_s)

    def note_decode(self, size_bytes: int, seconds: float) -> None:
        """Take note of a frame of so many stored bytes that was decoded."""
        if seconds > 0:
            before = self.decode_s_per_byte or seconds / size_bytes
            self.decode_s_per_byte = before + _EWMA_WEIGHT * (seconds / size_bytes - before)

    def fetch_s(self, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Estimated seconds until each of *sizes* stored bytes has come."""
        return self.round_trip_s + sizes / self.bytes_per_s

    def load_s(self, size_bytes: int) -> float:
        """Estimated seconds until so many stored bytes are in memory, decoded."""
        return self.round_trip_s + size_bytes * (1 / self.bytes_per_s + self.decode_s_per_byte)

    def guarded(self, work: Callable[[], bool], what: str = "use") -> bool:
        """Run *work*, *what* in traces, on the medium; the breaker counts how it went."""
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


class Tiers:
    """The *slots* of a server, given from the fastest to the slowest.

    One of them is CPU memory, which frames are served from; only GPU memory is faster.
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
        """In the order in which frames are looked for: first where they are served."""
        self.lower = tuple(s for s in slots if s not in (cpu, gpu) and not s.tier.read_only)
        """Those below CPU memory that can be written, fastest first."""
        local = (s for s in self.lower if s.tier.survives_restart and not s.tier.shared)
        self.file_backed = next(
            (s for s in local if s.tier.shares_files and not s.encoder.needs_assets), None
        )
        """The slot whose frames lie in files that a reader on this host may open."""

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
