"""Which frame is sealed where, and what is known of it; a row given again keeps nothing."""

from __future__ import annotations

from dataclasses import replace

from contracts.chunks import make_info, make_representation

from kvstore.proto.types import ChunkInfo, KVLayout
from kvstore.proto.unix_socket import Place, Reach
from kvstore.tiers.locations import LocationTable


def place(info: ChunkInfo, number: int = 0) -> Place:
    return Place(number, Reach.memory, 0, 64 * info.size_bytes, info.size_bytes, number << 40)


def test_the_largest_values_of_every_field_are_kept() -> None:
    table = LocationTable()
    most = (1 << 64) - 1
    info = replace(make_info(1, most), codec_id=(1 << 16) - 1, prefill_flops=float(1 << 70))
    at = Place((1 << 32) - 1, Reach.peer, 255, most, most, most)
    assert table.info(table.seal(info, at)) == info
    assert table.location(info.key) == at


def test_more_layouts_than_are_shared_are_told_apart() -> None:
    table = LocationTable()
    representation = make_representation(1)
    infos = [
        replace(make_info(seed, 100), layout=KVLayout.of(representation, 16 + seed))
        for seed in range(1500)
    ]
    rows = [table.seal(info, place(info)) for info in infos]
    assert [table.info(row) for row in rows] == infos
