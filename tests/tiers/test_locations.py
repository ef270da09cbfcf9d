"""Which frame is sealed where, and what is known of it; a row given again keeps nothing."""

from __future__ import annotations

from dataclasses import replace

from contracts.chunks import make_info, make_representation

from kvstore.proto.types import ChunkInfo, ChunkKey, KVLayout
from kvstore.proto.unix_socket import Place, Reach
from kvstore.tiers.locations import LocationTable


def place(info: ChunkInfo, number: int = 0) -> Place:
    return Place(number, Reach.memory, 0, 64 * info.size_bytes, info.size_bytes, number << 40)


def test_infos_come_back_as_they_were_sealed() -> None:
    table = LocationTable()
    infos = [make_info(seed, 100 + seed) for seed in range(200)]
    rows = [table.seal(info, place(info)) for info in infos]
    assert [table.info(row) for row in rows] == infos
    assert [table.info_of(info.key) for info in infos] == infos
    assert table.info_of(ChunkKey(bytes(32))) is None


def test_the_largest_values_of_every_field_are_kept() -> None:
    table = LocationTable()
    most = (1 << 64) - 1
    info = replace(make_info(1, most), codec_id=(1 << 16) - 1, prefill_flops=float(1 << 70))
    at = Place((1 << 32) - 1, Reach.peer, 255, most, most, most)
    assert table.info(table.seal(info, at)) == info
    assert table.location(info.key) == at


def test_a_row_is_given_again_with_nothing_of_the_old() -> None:
    table = LocationTable()
    old, new = make_info(1, 100), make_info(2, 7)
    row = table.seal(old, place(old))
    table.pop(old.key)
    assert table.info_of(old.key) is None
    assert table.seal(new, place(new)) == row
    assert table.info(row) == new


def test_more_layouts_than_are_shared_are_told_apart() -> None:
    table = LocationTable()
    representation = make_representation(1)
    infos = [
        replace(make_info(seed, 100), layout=KVLayout.of(representation, 16 + seed))
        for seed in range(1500)
    ]
    rows = [table.seal(info, place(info)) for info in infos]
    assert [table.info(row) for row in rows] == infos
