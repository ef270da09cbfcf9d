"""The gate file: its bytes, damaged ones, and when it is written."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.proto.buffers import as_bytes, checksum
from kvstore.proto.errors import InvalidFrameError
from kvstore.server.blending.gates import Gates, GateState
from kvstore.server.settings.values import MAX_RATIO, GateTerms
from kvstore.server.store.gate_file import (
    FILE_NAME,
    GateKeeper,
    SavedGate,
    pack_gates,
    unpack_gates,
)
from kvstore.server.telemetry.metrics import Counters

GOLDEN = Path(__file__).parents[2] / "golden" / "gates-v1.kvg"

GATES: list[SavedGate] = [
    ((b"s" * 16, "rag"), "meta/llama", GateState(True, 0.225, 0.97, 0.01, speedup=2.5)),
    ((b"t" * 16, ""), "qwén", GateState(True, 0.15, 0.99, 0.002)),
]


def gates() -> Gates:
    return Gates(GateTerms(), lambda: 0.5, Counters())


def told(saved: list[SavedGate]) -> list[tuple[bytes, str, str, float, float, float, float]]:
    return [
        (*name, model, gate.ratio, gate.agreement, gate.divergence, gate.speedup)
        for name, model, gate in saved
    ]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    found = unpack_gates(pack_gates(GATES))
    assert told(found) == told(GATES)
    assert all(gate.is_open and gate.is_calibrated for _, _, gate in found)
    assert unpack_gates(pack_gates([])) == []


def test_files_of_this_version_are_read_for_ever() -> None:
    assert pack_gates(GATES) == GOLDEN.read_bytes()
    assert told(unpack_gates(GOLDEN.read_bytes())) == told(GATES)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, len(pack_gates(GATES)) - 1), st.integers(1, 255))
def test_any_changed_byte_is_noticed(at: int, change: int) -> None:
    data = bytearray(pack_gates(GATES))
    data[at] ^= change
    with pytest.raises(InvalidFrameError):
        unpack_gates(bytes(data))


def resummed(body: bytes) -> bytes:
    return body + struct.pack("<Q", checksum(as_bytes(body)))


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200))
def test_rubbish_under_a_right_checksum_opens_no_gate_that_could_not_be(body: bytes) -> None:
    try:
        found = unpack_gates(resummed(b"KVGT\1\0\1\0" + body))
    except InvalidFrameError:
        return
    [(name, _, gate)] = found
    assert (len(name[0]), 0 <= gate.ratio <= MAX_RATIO) == (16, True)
    assert 0 <= gate.agreement <= 1


@pytest.mark.parametrize("value", [float("nan"), -1.0, 0.9], ids=["nan", "negative", "too much"])
def test_ratios_that_no_gate_has_are_refused(value: float) -> None:
    body = pack_gates(GATES)[:-8]
    with pytest.raises(InvalidFrameError):
        unpack_gates(resummed(body[:24] + struct.pack("<d", value) + body[32:]))


def test_it_is_written_when_a_gate_opens_and_not_before(tmp_path: Path) -> None:
    mine = gates()
    keeper = GateKeeper(mine, tmp_path)
    assert keeper.load() == 0
    assert not keeper.save_if_changed()
    (tmp_path / FILE_NAME).write_bytes(pack_gates(GATES))
    again = gates()
    reader = GateKeeper(again, tmp_path)
    assert reader.load() == 2
    assert [(view.tag, view.is_open) for view in again.views()] == [("rag", True), ("", True)]
    assert again.save()
    assert not reader.save_if_changed()


def test_a_damaged_file_is_none_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"rubbish" * 10)
    mine = gates()
    assert GateKeeper(mine, tmp_path).load() == 0
    assert mine.views() == []
