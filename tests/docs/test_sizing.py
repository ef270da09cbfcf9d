"""The sizes in the sizing guide are what the store's own layout says, and what a replay hits."""

from __future__ import annotations

import re

from docs.blocks import ROOT

from kvstore.cli.simulate import Terms, make_blocks, read_trace, replay_blocks
from kvstore.proto.types import DType, KVLayout, LayerGroup, LayerKind, Model, RopeParameters

PAGE = (ROOT / "docs" / "sizing.md").read_text()
SHAPE = re.compile(r"(\d+) x (\d+) x (\d+)( latent)?")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if SHAPE.search(line)
]


def chunk_bytes(shape: str, element: str, tokens: int) -> int:
    found = SHAPE.fullmatch(shape)
    assert found is not None
    layers, heads, size = (int(found[number]) for number in (1, 2, 3))
    kind = LayerKind.mla if found[4] else LayerKind.attention
    group = LayerGroup(kind, DType[element], tuple(range(layers)), heads, size)
    rope = RopeParameters(10_000.0, 64)
    model = Model("m", "r", "none", "none", (group,), rope, "none")
    return KVLayout.of(model, tokens).raw_bytes


def test_a_row_has_the_sizes_of_its_shape() -> None:
    for name, shape, element, token, chunk, tokens in ROWS:
        chunk_size = chunk_bytes(shape, element, 256)
        assert float(token) == chunk_size / 256 / 1024, name
        assert chunk == f"{chunk_size / (1 << 20):.4g}", name
        assert int(tokens.replace(",", "")) == (64 << 30) * 256 // chunk_size, name
    assert len(ROWS) >= 6
    assert any("latent" in row[1] for row in ROWS)


def test_the_hits_are_those_of_the_command_above_them() -> None:
    command = re.search(r"simulate (\S+) --capacity (\S+)", PAGE)
    hits = re.search(r"\| tokens hit \|(.*)\|", PAGE)
    assert command is not None
    assert hits is not None
    trace = make_blocks(read_trace(ROOT / command[1]))
    outcomes = [replay_blocks(trace, Terms("hit_density", size)) for size in command[2].split(",")]
    found = [f"{one.token_hit_rate:.2%}".replace("%", " %") for one in outcomes]
    assert [cell.strip() for cell in hits[1].split("|")] == found


def test_the_worked_examples_add_up() -> None:
    kib = {row[0].partition(",")[0]: float(row[3]) for row in ROWS}
    assert round(800_000 * kib["Llama 3.1 8B"] / (1 << 20)) == 98
    assert (32 << 20) / kib["Llama 3.1 8B"] == 262_144
    assert round(50_000 * kib["Llama 3.1 70B"] / (1 << 20), 1) == 15.3
    assert round(12_000 * kib["Llama 3.1 8B"] * 1024 / 1e9, 1) == 1.6
