"""The suite that every Tier passes. Subclass TierContract and say how to make one."""

from __future__ import annotations

import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from threading import Barrier
from typing import ClassVar

import numpy as np
import pytest
from contracts.chunks import make_info, payload
from contracts.shelf import (
    Schedule,
    assert_absent,
    assert_counts,
    assert_holds,
    assert_holds_only,
    bytes_of,
    fill_up,
    put,
    shuffled_by_key,
)
from contracts.tier_reads import TierReads

from kvstore.proto.errors import InvalidRequestError, TierFullError
from kvstore.proto.types import ChunkInfo
from kvstore.tiers.base import Reservation, Tier

_THREADS = 8
_SOME_BYTES = 5_003
"""Of no round size, so that slack is never zero by chance."""


class TierContract(TierReads, ABC):
    """What tiers/base.py promises, sentence by sentence."""

    capacity_bytes: ClassVar[int] = 4 << 20
    """At least 2 MiB, and a size that the tier can use to the last byte."""

    @abstractmethod
    def make_tier(self, capacity_bytes: int, tmp_path: Path) -> Tier:
        """Return an empty tier. The suite closes it."""

    def reopen(self, tier: Tier, tmp_path: Path) -> Tier:
        """Close *tier* and return a new one over its medium, as a restart would find it."""
        tier.close()
        return self.make_tier(self.capacity_bytes, tmp_path)

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = self.make_tier(self.capacity_bytes, tmp_path)
        yield tier
        tier.close()

    @pytest.fixture
    def lasting(self, tier: Tier) -> Tier:
        if not tier.survives_restart:
            pytest.skip(f"tier {tier.name!r} survives no restart")
        return tier

    @pytest.fixture
    def hasty_threads(self) -> Iterator[None]:
        """Threads change places every few bytecodes, so that a missing lock shows."""
        usual = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        yield
        sys.setswitchinterval(usual)

    def test_a_frame_of_another_size_is_refused(self, tier: Tier) -> None:
        neighbour, info = make_info(1, _SOME_BYTES), make_info(2, _SOME_BYTES)
        put(tier, neighbour, payload(1, _SOME_BYTES))
        reservation = tier.reserve(info)
        for size in (0, _SOME_BYTES - 1, _SOME_BYTES + 1):
            with pytest.raises(InvalidRequestError, match="frame"):
                tier.write(reservation, payload(2, size))
        assert_holds(tier, neighbour, payload(1, _SOME_BYTES))
        tier.write(reservation, payload(2, _SOME_BYTES))
        assert tier.seal(reservation) is True
        assert_holds(tier, info, payload(2, _SOME_BYTES))

    def test_ranges_outside_the_frame_are_refused(self, tier: Tier) -> None:
        info = make_info(1, _SOME_BYTES)
        put(tier, info, payload(1, _SOME_BYTES))
        for offset, size in ((-1, 1), (0, _SOME_BYTES + 1), (_SOME_BYTES, 1), (1 << 62, 1)):
            out = np.full(size, 7, dtype=np.uint8)
            with pytest.raises(InvalidRequestError):
                tier.read(info.key, out, offset)
            assert (out == 7).all()

    def test_spent_reservation_changes_nothing_any_more(self, tier: Tier) -> None:
        for end in (tier.seal, tier.abort):
            spent = tier.reserve(make_info(1, _SOME_BYTES))
            tier.write(spent, payload(1, _SOME_BYTES))
            end(spent)
            tier.delete(spent.info.key)
            info = make_info(2, _SOME_BYTES)
            put(tier, info, bytes_of(info))
            with pytest.raises(InvalidRequestError, match="spent"):
                tier.write(spent, payload(3, _SOME_BYTES))
            with pytest.raises(InvalidRequestError, match="spent"):
                tier.seal(spent)
            with suppress(InvalidRequestError):
                tier.abort(spent)
            assert_holds_only(tier, [info])

    def test_chunks_can_be_deleted_during_a_scan(self, tier: Tier) -> None:
        infos = shuffled_by_key(8)
        for info in infos:
            put(tier, info, payload(1, info.size_bytes))
        assert [info for info in tier.scan() if tier.delete(info.key)] == infos
        assert_counts(tier, [], [])

    def test_full_tier_refuses_and_keeps_what_it_has(self, tier: Tier) -> None:
        size = min(tier.max_frame_bytes, self.capacity_bytes // 24)
        sealed, error = fill_up(tier, [make_info(seed, size) for seed in range(25)])
        assert error.tier == tier.name
        assert error.need_bytes >= size
        assert 0 <= error.free_bytes <= self.capacity_bytes - tier.stats().used_bytes
        assert len(sealed) >= 12
        assert_holds_only(tier, sealed)
        assert tier.delete(sealed[5].key)
        assert put(tier, make_info(99, size), payload(99, size))

    def test_largest_frame_fits_an_empty_tier_and_one_byte_more_does_not(self, tier: Tier) -> None:
        largest = tier.max_frame_bytes
        assert largest >= self.capacity_bytes // 16
        info, data = make_info(1, largest), payload(1, largest)
        with pytest.raises(TierFullError):
            tier.reserve(make_info(2, largest + 1))
        assert_counts(tier, [], [])
        for _ in range(2):
            assert put(tier, info, data)
            assert_holds(tier, info, data)
            assert tier.delete(info.key)
        assert_counts(tier, [], [])

    def test_room_freed_in_any_order_becomes_one_again(self, tier: Tier) -> None:
        size = self.capacity_bytes // 64
        infos = [make_info(seed, size + seed) for seed in range(24)]
        for info in infos:
            put(tier, info, payload(1, info.size_bytes))
        random.Random(5).shuffle(infos)
        for info in infos:
            assert tier.delete(info.key)
        largest = tier.max_frame_bytes
        assert put(tier, make_info(99, largest), payload(99, largest))
        assert_holds(tier, make_info(99, largest), payload(99, largest))

    def test_after_a_restart_there_is_what_was_sealed_durably_and_nothing_unsealed(
        self, lasting: Tier, tmp_path: Path
    ) -> None:
        infos, unsealed = shuffled_by_key(6), make_info(99, _SOME_BYTES)
        for info in infos:
            assert put(lasting, info, bytes_of(info), durable=True)
        lasting.write(lasting.reserve(unsealed), bytes_of(unsealed))
        with closing(self.reopen(lasting, tmp_path)) as again:
            assert list(again.scan()) == infos
            assert_absent(again, unsealed)
            assert_holds_only(again, infos)
            for info in infos:
                assert again.delete(info.key)
            largest = again.max_frame_bytes
            assert put(again, make_info(2, largest), payload(2, largest))

    def test_after_a_restart_there_is_what_was_flushed_and_nothing_deleted_before(
        self, lasting: Tier, tmp_path: Path
    ) -> None:
        infos = shuffled_by_key(6)
        for at, info in enumerate(infos):
            assert put(lasting, info, bytes_of(info), durable=at > 2)
        for info in infos[1::3]:
            assert lasting.delete(info.key)
        lasting.flush()
        kept = [info for at, info in enumerate(infos) if at % 3 != 1]
        with closing(self.reopen(lasting, tmp_path)) as again:
            assert list(again.scan()) == kept
            for info in infos[1::3]:
                assert_absent(again, info)
            assert_holds_only(again, kept)

    def test_restarted_tier_never_writes_over_what_it_found(
        self, lasting: Tier, tmp_path: Path
    ) -> None:
        size = self.capacity_bytes // 32
        infos = [make_info(seed, size + seed) for seed in range(16)]
        for info in infos:
            put(lasting, info, bytes_of(info), durable=True)
        for info in infos[::3]:
            lasting.delete(info.key)
        lasting.flush()
        kept = [info for at, info in enumerate(infos) if at % 3]
        with closing(self.reopen(lasting, tmp_path)) as again:
            fresh = [make_info(seed, size // 2 + seed) for seed in range(16, 80)]
            added, _ = fill_up(again, fresh)
            assert_holds_only(again, kept + added)

    @pytest.mark.usefixtures("hasty_threads")
    def test_threads_put_read_and_delete_distinct_keys(self, tier: Tier) -> None:
        def work(thread: int) -> list[ChunkInfo]:
            draw, held = random.Random(thread), dict[int, ChunkInfo]()
            for step in range(30):
                seed = 1_000 * thread + step
                info = make_info(seed, draw.randrange(1, 30_000))
                tier.abort(tier.reserve(info))
                assert put(tier, info, payload(seed, info.size_bytes))
                held[seed] = info
                for known, other in held.items():
                    assert_holds(tier, other, payload(known, other.size_bytes))
                if len(held) > 4:
                    assert tier.delete(held.pop(draw.choice(list(held))).key)
            return list(held.values())

        with ThreadPoolExecutor(_THREADS) as pool:
            held = [info for infos in pool.map(work, range(_THREADS)) for info in infos]
        assert {info.key for info in tier.scan()} == {info.key for info in held}
        assert_counts(tier, held, [])

    @pytest.mark.usefixtures("hasty_threads")
    def test_of_sixteen_writers_of_one_key_one_whole_version_stays(self, tier: Tier) -> None:
        barrier = Barrier(16, timeout=60)
        info = make_info(1, 50_001)

        def work(seed: int) -> bool:
            reservation = tier.reserve(info)
            tier.write(reservation, payload(seed, info.size_bytes))
            barrier.wait()
            return tier.seal(reservation)

        with ThreadPoolExecutor(16) as pool:
            won = list(pool.map(work, range(16)))
        assert won.count(True) == 1
        assert_holds(tier, info, payload(won.index(True), info.size_bytes))
        assert_counts(tier, [info], [])

    @pytest.mark.usefixtures("hasty_threads")
    def test_threads_racing_for_the_last_room_never_overfill(self, tier: Tier) -> None:
        size = min(tier.max_frame_bytes, self.capacity_bytes // 24)
        barrier = Barrier(_THREADS, timeout=60)

        def work(thread: int) -> list[Reservation]:
            barrier.wait()
            taken: list[Reservation] = []
            for step in range(25):
                try:
                    taken.append(tier.reserve(make_info(100 * thread + step, size)))
                except TierFullError:
                    break
            return taken

        with ThreadPoolExecutor(_THREADS) as pool:
            taken = [held for some in pool.map(work, range(_THREADS)) for held in some]
        assert 12 <= len(taken) <= 24
        assert_counts(tier, [], taken)
        for reservation in taken:
            tier.write(reservation, bytes_of(reservation.info))
            assert tier.seal(reservation)
        for reservation in taken:
            assert_holds(tier, reservation.info, bytes_of(reservation.info))

    def test_random_schedule_agrees_with_a_dict(self, tier: Tier) -> None:
        assert tier.stats().capacity_bytes == tier.capacity_bytes == self.capacity_bytes
        for seed in range(3):
            schedule = Schedule(tier, random.Random(seed))
            for _ in range(250):
                schedule.step()
                schedule.check_accounts()
            schedule.check_contents()
            tier.flush()
            schedule.check_contents()
            schedule.tear_down()
        tier.reserve(make_info(2, _SOME_BYTES))
        tier.close()
        tier.close()
