"""The SpotTable: which frame is sealed where."""

from __future__ import annotations

from contracts.chunks import make_info

from kvstore.proto.types import ChunkKey
from kvstore.tiers.spot_table import SpotTable

INFOS = [make_info(seed, 100 + seed) for seed in range(6)]
ABSENT = ChunkKey(bytes(32))


def filled() -> SpotTable:
    table = SpotTable()
    for number, info in enumerate(INFOS):
        table.seal(info, 1 + number % 2, 64 * number)
    return table


def test_frames_are_found_where_they_were_sealed() -> None:
    table = filled()
    spots = table.spots([INFOS[3].key, ABSENT, INFOS[0].key])
    assert spots.areas.tolist() == [2, 0, 1]
    assert spots.starts.tolist()[::2] == [192, 0]
    assert spots.sizes.tolist()[::2] == [103, 100]
    assert table.spot(table.find(INFOS[5].key)) == (2, 320, 105)
    assert table.spot(table.find(ABSENT))[0] == 0


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
    assert table.spots([INFOS[1].key]).areas.tolist() == [0]
    assert INFOS[1].key not in table.keys_in(2)
    assert len(table) == 5
