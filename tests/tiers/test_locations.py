"""Which frame is sealed where, and what is known of it; a row given again keeps nothing."""

from __future__ import annotations

from dataclasses import replace

from contracts.chunks import make_info, make_representation

from kvstore.proto.types import ChunkKey, KVLayout
from kvstore.tiers.locations import LocationTable

INFOS = [make_info(seed, 100 + seed) for seed in range(6)]
ABSENT = ChunkKey(bytes(32))


def filled() -> LocationTable:
    table = LocationTable()
    for number, info in enumerate(INFOS):
        table.seal(info, 1 + number % 2, 64 * number)
    return table


def test_frames_are_found_where_they_were_sealed() -> None:
    table = filled()
    assert table.location(table.find(INFOS[3].key)) == (2, 192, 103)
    assert table.location(table.find(INFOS[5].key)) == (2, 320, 105)
    assert table.location(table.find(ABSENT))[0] == 0


def test_an_area_names_its_frames_in_order_of_sealing() -> None:
    table = filled()
    assert table.keys_in(1) == [info.key for info in INFOS[::2]]
    table.remove(table.find(INFOS[0].key))
    table.seal(INFOS[0], 1, 4096)
    assert table.keys_in(1) == [INFOS[2].key, INFOS[4].key, INFOS[0].key]
    assert table.infos() == [*INFOS[1:], INFOS[0]]
    assert table.keys_in(9) == []


def test_a_frame_that_was_removed_lies_nowhere() -> None:
    table = filled()
    table.remove(table.find(INFOS[1].key))
    assert table.location(table.find(INFOS[1].key))[0] == 0
    assert INFOS[1].key not in table.keys_in(2)
    assert len(table) == 5


def test_infos_come_back_as_they_were_sealed() -> None:
    table = LocationTable()
    infos = [make_info(seed, 100 + seed) for seed in range(200)]
    rows = [table.seal(info, 1, 0) for info in infos]
    assert [table.info(row) for row in rows] == infos
    assert [table.info_of(info.key) for info in infos] == infos
    assert table.info_of(ChunkKey(bytes(32))) is None


def test_the_largest_values_of_every_field_are_kept() -> None:
    table = LocationTable()
    info = replace(
        make_info(1, (1 << 64) - 1), codec_id=(1 << 16) - 1, prefill_flops=float(1 << 70)
    )
    assert table.info(table.seal(info, 1, 0)) == info


def test_a_row_is_given_again_with_nothing_of_the_old() -> None:
    table = LocationTable()
    old, new = make_info(1, 100), make_info(2, 7)
    row = table.seal(old, 1, 0)
    table.remove(row)
    assert table.info_of(old.key) is None
    assert table.seal(new, 1, 0) == row
    assert table.info(row) == new


def test_more_layouts_than_are_shared_are_told_apart() -> None:
    table = LocationTable()
    representation = make_representation(1)
    infos = [
        replace(make_info(seed, 100), layout=KVLayout.of(representation, 16 + seed))
        for seed in range(1500)
    ]
    rows = [table.seal(info, 1, 0) for info in infos]
    assert [table.info(row) for row in rows] == infos
