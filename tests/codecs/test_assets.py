from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codecs.assets import (
    MAX_ASSETS,
    MAX_EDITION,
    MAX_TABLES,
    SUFFIX,
    Asset,
    AssetKind,
    AssetRegistry,
    asset_name,
    pack_asset,
    parse_asset,
    read_asset,
)
from kvstore.proto.buffers import checksum
from kvstore.proto.errors import InvalidRequestError, ModelError, UnknownCodecError

MODEL, OTHER = bytes(range(16)), bytes(range(16, 32))
TABLES: dict[str, np.ndarray[Any, Any]] = {
    "widths": np.linspace(0, 1, 6, dtype="<f4").reshape(1, 2, 3),
    "models": np.arange(7, dtype=np.uint8),
    "rows": np.arange(12, dtype="<u2").reshape(3, 4),
    "basis": np.ones((2, 2, 2, 2), "<f2"),
}


def packed(kind: AssetKind = AssetKind.cachegen, model: bytes = MODEL, edition: int = 1) -> bytes:
    return pack_asset(kind, model, edition, TABLES)


def asset(kind: AssetKind = AssetKind.cachegen, model: bytes = MODEL, edition: int = 1) -> Asset:
    return parse_asset(packed(kind, model, edition))


def signed(data: bytearray) -> bytes:
    """Return *data* with the checksum that it now needs."""
    data[-8:] = struct.pack("<Q", checksum(bytes(data[:-8])))
    return bytes(data)


def changed(at: int, value: bytes) -> bytes:
    data = bytearray(packed())
    data[at : at + len(value)] = value
    return signed(data)


def test_what_was_packed_is_read() -> None:
    found = asset(AssetKind.kvtc, OTHER, 7)
    assert (found.kind, found.representation, found.edition) == (AssetKind.kvtc, OTHER, 7)
    assert found.digest == blake3(packed(AssetKind.kvtc, OTHER, 7)).digest(length=16)
    assert set(found.tables) == set(TABLES)
    for name, table in TABLES.items():
        assert found.table(name, table.dtype.str, table.shape).tobytes() == table.tobytes()
        assert not found.tables[name].flags.writeable
    backwards = dict(reversed(TABLES.items()))
    assert pack_asset(AssetKind.cachegen, MODEL, 1, backwards) == packed()
    assert pack_asset(AssetKind.cachegen, MODEL, 2, TABLES) != packed()


@settings(deadline=None)
@given(at=st.integers(0, len(packed()) - 1), mask=st.integers(1, 255))
def test_no_changed_missing_or_added_byte_goes_unseen(at: int, mask: int) -> None:
    data = bytearray(packed())
    data[at] ^= mask
    with pytest.raises(InvalidRequestError, match="asset"):
        parse_asset(bytes(data))
    for size in [0, 3, 4, 63, 64, 71, 200, len(packed()) - 1]:
        with pytest.raises(InvalidRequestError, match=r"^asset="):
            parse_asset(packed()[:size])
    with pytest.raises(InvalidRequestError, match="its header states"):
        parse_asset(packed() + b"\0")


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_a_change_under_a_right_checksum_is_refused_or_stays_inside(data: st.DataObject) -> None:
    body = bytearray(packed())
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 9))] = data.draw(st.integers(0, 255))
    try:
        found = parse_asset(signed(body))
    except InvalidRequestError:
        return
    assert sum(table.nbytes for table in found.tables.values()) < len(body)


def test_an_asset_that_contradicts_itself_or_is_newer_is_refused_by_name() -> None:
    for at, value, message in [
        (0, b"KVFR", "starts with"),
        (4, b"\2\0", "version=2: this reader supports 1"),
        (6, b"\xff\0", "made by a newer version"),
        (8, b"\0\0\0\0", "asset tables=0"),
        (8, struct.pack("<I", MAX_TABLES + 1), "asset tables=65"),
        (8, b"\5\0\0\0", "asset table"),
        (12, b"\0\0\0\0", "made by a newer version"),
        (16, struct.pack("<Q", 1 << 40), "its header states"),
        (64, b"\xff", "unknown here"),
        (64 + 16, b"\4", "unknown here"),
        (64 + 17, b"\0", "unknown here"),
        (64 + 17, b"\5", "unknown here"),
        (64 + 24, struct.pack("<4I", *[1 << 31] * 4), "outside the asset"),
        (64 + 36, struct.pack("<I", 200), "outside the asset"),
        (64 * 2 + 28, struct.pack("<I", 2), "unknown here"),
        (64 + 24, struct.pack("<I", 0), "outside the asset"),
        (64 + 40, struct.pack("<Q", 0), "outside the asset"),
        (64 + 40, struct.pack("<Q", 1 << 63), "outside the asset"),
        (64 * 2, b"basis\0\0", "a name occurs twice"),
    ]:
        with pytest.raises(InvalidRequestError, match=message):
            parse_asset(changed(at, value))


def test_a_table_of_another_type_or_shape_is_refused_by_name() -> None:
    found = asset()
    assert found.table("rows", "<u2", (-1, 4)).shape == (3, 4)
    for dtype, shape in [("<u2", (4, 3)), ("<u2", (-1,)), ("<f4", (3, 4)), ("<u2", (3, 4, 1))]:
        with pytest.raises(InvalidRequestError, match="asset table rows"):
            found.table("rows", dtype, shape)
    with pytest.raises(InvalidRequestError, match="'absent': cachegen needs this table"):
        found.table("absent", "<u2", (1,))


def test_what_no_reader_would_take_is_not_packed() -> None:
    for model, edition, tables, message in [
        (b"short", 1, TABLES, "representation="),
        (MODEL, 0, TABLES, "edition=0"),
        (MODEL, MAX_EDITION + 1, TABLES, "edition="),
        (MODEL, 1, {}, "tables=0"),
        (MODEL, 1, {f"t{i}": TABLES["models"] for i in range(MAX_TABLES + 1)}, "tables=65"),
        (MODEL, 1, {"a name too long for it": TABLES["models"]}, "short name"),
        (MODEL, 1, {"x": np.zeros(3, "<f8")}, "short name"),
        (MODEL, 1, {"x": np.zeros((2, 0), "<f4")}, "none empty"),
        (MODEL, 1, {"x": np.zeros((1,) * 5, "<f4")}, "one to four"),
    ]:
        with pytest.raises(InvalidRequestError, match=message):
            pack_asset(AssetKind.cachegen, model, edition, tables)


# --- files and the registry


def write(folder: Path, *assets: Asset) -> None:
    for each in assets:
        name = asset_name(each)
        (folder / name).write_bytes(packed(each.kind, each.representation, each.edition))


def test_a_folder_is_read_whole_and_the_newest_edition_encodes(tmp_path: Path) -> None:
    first, second, foreign = asset(), asset(edition=2), asset(model=OTHER)
    write(tmp_path, second, first, foreign)
    (tmp_path / "README").write_text("no asset")
    registry = AssetRegistry()
    assert registry.load_folder(tmp_path) == 3
    assert registry.load_folder(tmp_path) == 3
    assert registry.for_model(AssetKind.cachegen, MODEL).edition == 2
    assert registry.for_model(AssetKind.cachegen, OTHER).digest == foreign.digest
    for each in (first, second):
        assert registry.named(AssetKind.cachegen, each.digest, MODEL).edition == each.edition


def test_what_is_not_on_the_shelf_or_has_no_place_there_is_refused_by_name() -> None:
    registry = AssetRegistry()
    registry.add(asset())
    with pytest.raises(UnknownCodecError, match=f"cachegen for model {OTHER.hex()}.*calibrate"):
        registry.for_model(AssetKind.cachegen, OTHER)
    with pytest.raises(UnknownCodecError, match="kvtc for model"):
        registry.for_model(AssetKind.kvtc, MODEL)
    with pytest.raises(UnknownCodecError, match=f"cachegen with asset {OTHER.hex()}"):
        registry.named(AssetKind.cachegen, OTHER, MODEL)
    with pytest.raises(UnknownCodecError, match="kvtc with asset"):
        registry.named(AssetKind.kvtc, asset().digest, MODEL)
    with pytest.raises(ModelError, match=r"asset\.representation"):
        registry.named(AssetKind.cachegen, asset().digest, OTHER)
    other = parse_asset(pack_asset(AssetKind.cachegen, MODEL, 1, {"x": TABLES["models"]}))
    with pytest.raises(InvalidRequestError, match=r"edition 1.*remove one"):
        registry.add(other)
    for edition in range(2, MAX_ASSETS + 1):
        registry.add(asset(edition=edition))
    with pytest.raises(InvalidRequestError, match=f"assets={MAX_ASSETS}"):
        registry.add(asset(edition=MAX_ASSETS + 1))
    registry.add(asset(edition=3))


def test_a_damaged_file_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / f"mine{SUFFIX}").write_bytes(packed()[:-1])
    with pytest.raises(InvalidRequestError, match=r"mine\.kvasset"):
        AssetRegistry().load_folder(tmp_path)
    with pytest.raises(InvalidRequestError, match="absent"):
        read_asset(tmp_path / "absent")
    with pytest.raises(InvalidRequestError, match="give a folder that exists"):
        AssetRegistry().load_folder(tmp_path / "absent")
