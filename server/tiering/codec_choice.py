"""Chooses the codec of a tier at start, from the measured speeds of its link and the codecs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np
import structlog

from kvstore.codecs.base import codec_by_name, codec_class
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.speed import CodecSpeed, Sample, make_sample, measure
from kvstore.proto.errors import KVStoreError, TierFullError, TierUnavailableError
from kvstore.proto.frame import raw_frame_bytes
from kvstore.proto.types import KEY_BYTES, Accuracy, ChunkInfo, ChunkKey
from kvstore.server.settings.rules import auto_accuracy, is_auto
from kvstore.server.tiering.moves import Moves
from kvstore.server.tiering.tier_slot import LOSSLESS, TierCodec, TierSlot
from kvstore.tiers.base import DEFAULT_TENANT


def choose_codec(
    candidates: Iterable[CodecSpeed], link_bytes_per_s: float, least: Accuracy
) -> CodecSpeed | None:
    """Return the codec that loads fastest over the link; None if raw frames do.

    A candidate must beat raw frames even if its decoding does not overlap its load; of those, the
    fastest when decoding overlaps the next load wins, and of equals the smaller.
    """
    link = link_bytes_per_s
    fit = [c for c in candidates if c.accuracy >= least and link < c.break_even_bytes_per_s]
    return max(fit, key=lambda c: (c.load_bytes_per_s(link_bytes_per_s), c.ratio), default=None)


AUTO_CODECS = ("lossless", "kvq")
"""Candidates, as far as the operator allows their loss."""
CALIBRATION_S = 1.0
"""Time to measure one tier, without the first use of a compiled codec."""
LINK_SHARE = 0.3
QUEUE = "codec"

logger = structlog.get_logger(__name__)


def auto_codec(moves: Moves, slot: TierSlot, least: Accuracy, probe: ChunkKey) -> bool:
    """Measure, choose a codec for *slot* of at least accuracy *least*, and use it.

    *probe* is a key that no session uses. Raises nothing: a failed measurement keeps the default.
    """
    sample, clock = make_sample(), moves.clock
    layout, link = sample.template.layout, slot.bytes_per_s
    size_bytes = min(raw_frame_bytes(layout), slot.tier.max_frame_bytes)
    info = ChunkInfo(probe, sample.template.parent, layout, 0, size_bytes)
    try:
        link = _link_bytes_per_s(moves, slot, info) or link
    except (TierFullError, TierUnavailableError) as error:
        logger.warning("link not measured", tier=slot.name, error=str(error))
    # No codec decodes faster than raw frames are copied: on such links none is measured.
    copied = measure("raw", RawCodec(), sample, clock, 0.0).decode_bytes_per_s
    names = candidates(least) if link < copied else []
    speeds = measure_codecs(names, sample, clock, CALIBRATION_S * (1 - LINK_SHARE))
    chosen = choose_codec(speeds, link, least)
    name = "raw" if chosen is None else chosen.name
    slot.encoder.use(name, " (auto)")
    logger.info("codec chosen", tier=slot.name, codec=name, link_bytes_per_s=round(link))
    return True


def _link_bytes_per_s(moves: Moves, slot: TierSlot, info: ChunkInfo) -> float:
    """Return the speed of reading a frame just written; 0 if the medium lost it."""
    clock, fastest = moves.clock, 0.0
    end, frame = clock() + CALIBRATION_S * LINK_SHARE, np.zeros(info.size_bytes, np.uint8)
    is_there = moves.write(slot, slot.tier.reserve(info), frame)
    try:
        while is_there and (not fastest or clock() < end):
            begin = clock()
            is_there = slot.guarded(lambda: slot.tier.read(info.key, frame))
            if is_there:
                fastest = max(fastest, info.size_bytes / max(clock() - begin, 1e-9))
    finally:
        slot.guarded(lambda: slot.tier.delete(info.key))
    return fastest


def candidates(least: Accuracy) -> list[str]:
    """Return the names of AUTO_CODECS of at least accuracy *least*."""
    return [name for name in AUTO_CODECS if codec_class(name).accuracy >= least]


def measure_codecs(
    names: list[str], sample: Sample, clock: Callable[[], float], budget_s: float
) -> list[CodecSpeed]:
    """Measure codecs in turn, within *budget_s* in total; skip those that fail."""
    speeds = []
    for name in names:
        try:
            codec = codec_by_name(name)
            speeds.append(measure(name, codec, sample, clock, budget_s / len(names)))
        except KVStoreError as error:
            logger.debug("codec not measured", codec=name, error=str(error))
    return speeds


def _warm_up(encoder: TierCodec, clock: Callable[[], float]) -> bool:
    """Use a tier's codecs once, so that they are compiled before the first copy."""
    used = {} if encoder.is_exact else {LOSSLESS: codec_by_name(LOSSLESS)}
    used[encoder.name] = encoder.of_tenant(DEFAULT_TENANT)
    sample = make_sample()
    return all(bool(measure(name, one, sample, clock, 0.0)) for name, one in used.items())


def begin_choices(
    moves: Moves, names: Mapping[str, str], random_bytes: Callable[[int], bytes]
) -> None:
    """Begin to choose the codec of each tier that *names* sets to auto, and compile others.

    Runs in a separate queue, as some compile for seconds.
    """
    for slot in moves.tiers.lower:
        name = names[slot.name]
        work: Callable[[], bool] = partial(_warm_up, slot.encoder, moves.clock)
        if is_auto(name):
            probe = ChunkKey(random_bytes(KEY_BYTES))  # in a namespace that no session has
            work = partial(auto_codec, moves, slot, auto_accuracy(name), probe)
        if name != "raw":
            moves.work_queue.submit(QUEUE, slot.name.encode(), work)
