"""How K and V lie in an engine's blocks is found out, and what is not understood is refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from vllm_pages import (
    BLOCK_TOKENS,
    HEAD_DIM,
    HEADS,
    HYBRID,
    LATENT,
    SHAPE,
    SLIDING,
    compute,
    empty_pages,
    holds,
    kv_of,
    scrambled,
    writer,
)

from kvstore.client.engines.vllm_layout import (
    PACKINGS,
    EnginePages,
    Packing,
    PageCopy,
    find_packing,
    rows,
)
from kvstore.codecs.block_part import BlockPart, to_dense
from kvstore.proto.errors import LayoutMismatchError

TOKENS = list(range(64))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packing_is_found_by_what_the_engine_writes(packing: Packing, dtype: torch.dtype) -> None:
    pages = torch.full((4, 2, 32, 16), 3.0, dtype=dtype)
    assert find_packing(pages, 2, writer(packing)("a layer")) is packing
    assert bool((pages == 3.0).all()), "the engine's own pages were written to"


@pytest.mark.parametrize("kept", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_pages_of_bytes_have_the_elements_that_were_written_bit_for_bit(kept: torch.dtype) -> None:
    pages = torch.zeros((4, 2, 32, 16), dtype=torch.uint8)

    def write(parts: Sequence[torch.Tensor], pages: torch.Tensor, slots: torch.Tensor) -> None:
        assert {part.dtype for part in parts} == {kept}
        writer(PACKINGS[0])("")([part.view(torch.uint8) for part in parts], pages, slots)

    assert find_packing(pages, 2, write, kept) is PACKINGS[0]


def test_a_packing_that_nobody_knows_is_refused() -> None:
    with pytest.raises(LayoutMismatchError, match="packs otherwise"):
        find_packing(empty_pages()["model.layers.0.attn"], 2, scrambled("a layer"))


def test_a_backend_that_cannot_write_a_block_is_refused() -> None:
    def write(*_: object) -> None:
        raise NotImplementedError("no such kernel")

    with pytest.raises(LayoutMismatchError, match="no such kernel"):
        find_packing(empty_pages()["model.layers.0.attn"], 2, write)


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_tensors_of_blocks_are_k_and_v_in_the_stores_order(packing: Packing) -> None:
    registered = empty_pages()
    compute(registered, packing, TOKENS, [5, 2])
    pages = EnginePages.of(SHAPE, registered, writer(packing))
    keys, values = pages.groups[0][0].blocks([5, 2])
    assert keys.shape == values.shape == (HEADS, 64, HEAD_DIM)
    assert holds(registered, packing, TOKENS, [5, 2])


def test_a_copy_keeps_what_the_blocks_had() -> None:
    registered = empty_pages()
    compute(registered, PACKINGS[0], TOKENS, [5, 2])
    pages = EnginePages.of(SHAPE, registered, writer(PACKINGS[0]))
    copied = PageCopy(pages, 2)
    assert copied.take([[5, 2]])
    for whole in registered.values():
        whole.zero_()
    assert torch.equal(tensor_of(copied, 0, 1), torch.stack([kv(token, 1) for token in TOKENS], 1))


def tensor_of(copied: PageCopy, component: int, layer: int) -> torch.Tensor:
    """Return the first part of one layer, (kv_heads, tokens, head_dim)."""
    part = copied.tensors[component][layer][0]
    assert isinstance(part, BlockPart)
    return torch.from_numpy(to_dense(part).view(np.float32))


def kv(position: int, layer: int) -> torch.Tensor:
    return kv_of(TOKENS[position], position, layer)[0]


def test_a_copy_has_the_last_blocks_of_a_window_each_from_the_table_of_its_layer() -> None:
    registered = empty_pages(shape=HYBRID)
    tables = [[0, 2], [0, 9], [5, 7]]
    compute(registered, PACKINGS[0], TOKENS, tables, shape=HYBRID)
    copied = PageCopy(EnginePages.of(HYBRID, registered, writer(PACKINGS[0])), 2)
    assert copied.take(tables)
    assert copied.has_windows
    for layer, number in ((0, 0), (1, 2)):
        expected = torch.stack([kv(token, number) for token in TOKENS[32:]], 1)
        assert torch.equal(tensor_of(copied, 0, layer), expected)
    assert tensor_of(copied, 1, 0).shape == (HEADS, 64, HEAD_DIM)


def test_a_window_that_the_engine_gave_up_is_left_out_of_a_copy() -> None:
    registered = empty_pages(shape=HYBRID)
    copied = PageCopy(EnginePages.of(HYBRID, registered, writer(PACKINGS[0])), 2)
    assert copied.take([[1, 2], [3, 0], [5, 7]])
    assert not copied.has_windows
    assert len(copied.tensors) == 1
    assert copied.take([[1, 2], [3, 4], [5, 7]]), "the memory is used again"
    assert copied.has_windows


def test_of_layers_that_keep_windows_only_nothing_is_left_without_them() -> None:
    pages = EnginePages.of(SLIDING, empty_pages(shape=SLIDING), writer(PACKINGS[0]))
    assert not PageCopy(pages, 2).take([[0, 7]])
    assert PageCopy(pages, 2).take([[3, 7]])


def test_latents_are_one_part_and_lie_as_the_shape_says() -> None:
    registered = empty_pages(shape=LATENT)
    pages = EnginePages.of(LATENT, registered, writer(rows))
    (latents,) = pages.groups[0][0].blocks([3])
    assert latents.shape == (1, BLOCK_TOKENS, HEAD_DIM)
    with pytest.raises(LayoutMismatchError, match="packs otherwise"):
        EnginePages.of(LATENT, registered, scrambled)


@pytest.mark.parametrize(
    "pages",
    [
        torch.zeros(4, 2, 16, 16),
        torch.zeros(4, 2, BLOCK_TOKENS, 8),
        torch.zeros(4, 4, BLOCK_TOKENS, 16),
        torch.zeros(4, 2, BLOCK_TOKENS, 16, device="meta"),
        torch.zeros(4, 2, BLOCK_TOKENS, 16, dtype=torch.bfloat16),
    ],
)
def test_pages_of_another_shape_device_or_type_are_refused(pages: torch.Tensor) -> None:
    registered = {f"model.layers.{number}.attn": pages for number in range(3)}
    with pytest.raises(LayoutMismatchError):
        EnginePages.of(SHAPE, registered, writer(PACKINGS[0]))
