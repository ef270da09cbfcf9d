"""The part of the Tier suite about reading: batches, as it comes, files, ahead."""

from __future__ import annotations

import os

import numpy as np
import pytest
from contracts.chunks import make_frame, make_info, make_representation, payload
from contracts.shelf import assert_holds, bytes_of, put

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    ChunkCorruptError,
    DeadlineError,
    InvalidFrameError,
    InvalidRequestError,
    PermissionDeniedError,
)
from kvstore.proto.frame import header_bytes
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.tiers.base import Tier

_BYTES = 20_011


class TierReads:
    """Holds for every tier, whether it does better than ``read`` or not."""

    def test_steps_tell_how_much_has_come_and_end_with_all_of_it(self, tier: Tier) -> None:
        for size in {1, _BYTES, min(1_200_003, tier.max_frame_bytes)}:
            info, data = make_info(size, size), payload(1, size)
            put(tier, info, data)
            out = np.zeros(size, np.uint8)
            steps = [0]

            def arriving(
                arrived: int, steps: list[int] = steps, out: Bytes = out, data: Bytes = data
            ) -> None:
                assert steps[-1] < arrived <= len(out)
                assert np.array_equal(out[:arrived], data[:arrived])
                steps.append(arrived)

            assert tier.read(info.key, out, 0, FrameVerifier(out, info.key, 64, arriving))
            assert steps[-1] == size

    def test_no_step_comes_of_an_absent_key(self, tier: Tier) -> None:
        out, key = np.full(64, 7, np.uint8), make_info(1, 64).key
        steps: list[int] = []
        assert not tier.read(key, out, 0, FrameVerifier(out, key, 64, steps.append))
        assert (out == 7).all()
        assert steps == []

    def test_who_follows_a_read_can_end_it_and_the_medium_is_not_to_blame(self, tier: Tier) -> None:
        info = make_info(1, min(1_200_003, tier.max_frame_bytes))
        put(tier, info, bytes_of(info))
        out = np.zeros(info.size_bytes, np.uint8)

        def arriving(_: int) -> None:
            raise DeadlineError("nobody waits for it any more")

        for _ in range(3):
            with pytest.raises(DeadlineError, match="nobody waits"):
                tier.read(info.key, out, 0, FrameVerifier(out, info.key, 64, arriving))
        assert_holds(tier, info, bytes_of(info))

    def test_a_checked_read_gets_the_frame_or_finds_what_is_wrong(self, tier: Tier) -> None:
        info, frame = make_frame(1, 256, representation=make_representation(3, 2, 128))
        if info.size_bytes > tier.max_frame_bytes:
            pytest.skip("larger than its frames")
        for flipped in (None, 0, 100, 300_000, -1):
            stored = frame.copy()
            if flipped is not None:
                stored[flipped] ^= 1
            assert put(tier, info, stored)
            out = np.zeros(len(frame), np.uint8)
            verifier = FrameVerifier(out, info.key, header_bytes(info.layout))
            assert tier.read(info.key, out, 0, verifier)
            if flipped is None:
                assert verifier.finish().info() == info
            else:
                with pytest.raises((ChunkCorruptError, InvalidFrameError)):
                    verifier.finish()
            assert np.array_equal(out, stored)
            tier.delete(info.key)

    def test_whatever_is_read_of_an_expected_row_comes_right(self, tier: Tier) -> None:
        infos = {seed: make_info(seed, _BYTES + 1000 * seed) for seed in range(4)}
        for info in infos.values():
            put(tier, info, bytes_of(info))
        infos[9] = make_info(9, _BYTES)
        for read in 2 * [[0, 1, 2, 3], [0, 2, 1, 3], [1, 1], [0, 9, 1], [0], []]:
            for at, seed in enumerate(read):
                rest = [infos[each].key for each in range(4)][at:]
                tier.expect(rest)
                if seed == 9:
                    assert not tier.read(infos[seed].key, np.empty(_BYTES, np.uint8))
                else:
                    assert_holds(tier, infos[seed], bytes_of(infos[seed]))
                    assert tier.read(infos[seed].key, np.empty(70, np.uint8), 5)
            tier.expect([])
        assert tier.find([infos[9].key, infos[0].key]) == [None, infos[0]]

    def test_reading_ahead_changes_nothing_that_can_be_seen(self, tier: Tier) -> None:
        infos = [make_info(seed, _BYTES) for seed in range(3)]
        for info in infos:
            put(tier, info, bytes_of(info))
        before = tier.stats()
        tier.prefetch([make_info(9, 1).key, *(info.key for info in infos)])
        tier.prefetch([])
        for info in infos:
            assert_holds(tier, info, bytes_of(info))
        assert tier.stats() == before

    def test_a_place_in_a_file_holds_the_frame_for_its_tenant_alone(self, tier: Tier) -> None:
        info = make_info(1, _BYTES)
        assert tier.file_place(info.key) is None
        reservation = tier.reserve(info, "a tenant")
        tier.write(reservation, bytes_of(info))
        tier.seal(reservation)
        place = tier.file_place(info.key)
        if place is None:
            with pytest.raises(InvalidRequestError):
                tier.extent_file(0, "a tenant")
            return
        with pytest.raises(PermissionDeniedError):
            tier.extent_file(place.number, "another")
        descriptor = tier.extent_file(place.number, "a tenant")
        assert os.pread(descriptor, place.size_bytes, place.offset) == bytes_of(info).tobytes()
        os.close(descriptor)

    def test_what_is_in_the_way_makes_room_when_it_goes(self, tier: Tier) -> None:
        size = min(tier.max_frame_bytes, tier.capacity_bytes // 24)
        infos = [make_info(seed, size) for seed in range(8)]
        for info in infos:
            put(tier, info, bytes_of(info))
        keys = tier.eviction_run(infos[3].key, 2 * size, "default")
        assert not keys or infos[3].key in keys
        assert set(keys) <= {info.key for info in infos}
        assert tier.eviction_run(make_info(99, 1).key, size, "default") == []
        for key in keys:
            assert tier.delete(key)
        if keys:
            wide = make_info(99, 2 * size)
            put(tier, wide, bytes_of(wide))
            assert_holds(tier, wide, bytes_of(wide))
