"""The InfoTable: what was noted comes back whole, and rows that are given again keep nothing."""

from __future__ import annotations

from dataclasses import replace

from contracts.chunks import make_info, make_representation

from kvstore.proto.info_table import InfoTable
from kvstore.proto.types import ChunkKey, KVLayout


def test_infos_come_back_as_they_were_noted() -> None:
    table = InfoTable()
    infos = [make_info(seed, 100 + seed) for seed in range(200)]
    rows = [table.note(info) for info in infos]
    assert [table.info(row) for row in rows] == infos
    assert [table.size_bytes(row) for row in rows] == [info.size_bytes for info in infos]
    assert [table.info_of(info.key) for info in infos] == infos
    assert table.info_of(ChunkKey(bytes(32))) is None


def test_the_largest_values_of_every_field_are_kept() -> None:
    table = InfoTable()
    info = replace(
        make_info(1, (1 << 64) - 1), codec_id=(1 << 16) - 1, prefill_flops=float(1 << 70)
    )
    assert table.info(table.note(info)) == info


def test_noting_a_key_again_replaces_what_was_there() -> None:
    table = InfoTable()
    old = make_info(1, 100)
    new = replace(make_info(2, 7), key=old.key)
    assert table.note(old) == table.note(new)
    assert table.info_of(old.key) == new
    assert len(table) == 1


def test_a_row_is_given_again_with_nothing_of_the_old() -> None:
    table = InfoTable()
    old, new = make_info(1, 100), make_info(2, 7)
    row = table.note(old)
    table.remove(row)
    assert table.info_of(old.key) is None
    assert table.note(new) == row
    assert table.info(row) == new


def test_more_layouts_than_are_shared_are_told_apart() -> None:
    table = InfoTable()
    representation = make_representation(1)
    infos = [
        replace(make_info(seed, 100), layout=KVLayout.of(representation, 16 + seed))
        for seed in range(1500)
    ]
    rows = [table.note(info) for info in infos]
    assert [table.info(row) for row in rows] == infos
