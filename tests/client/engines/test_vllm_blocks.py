"""How K and V lie in an engine's blocks is found out, and what is not understood is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from helpers.vllm_pages import (
    BLOCK_TOKENS,
    BLOCKS,
    HEAD_DIM,
    HEADS,
    LATENT,
    SHAPE,
    compute,
    empty_pages,
    holds,
    scrambled,
    writer,
)

from kvstore.client.engines.vllm.blocks import (
    BLOCK_LAYOUTS,
    BlockLayout,
    EnginePages,
    detect_block_layout,
    rows,
    with_heads,
)
from kvstore.proto.errors import LayoutMismatchError

TOKENS = list(range(64))


@pytest.mark.parametrize("packing", BLOCK_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packing_is_found_by_what_the_engine_writes(
    packing: BlockLayout, dtype: torch.dtype
) -> None:
    pages = torch.full((4, 2, 32, 16), 3.0, dtype=dtype)
    assert detect_block_layout(pages, 2, writer(packing)("a layer")) is packing
    assert bool((pages == 3.0).all()), "the engine's own pages were written to"


@pytest.mark.parametrize("kept", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_pages_of_bytes_have_the_elements_that_were_written_bit_for_bit(kept: torch.dtype) -> None:
    pages = torch.zeros((4, 2, 32, 16), dtype=torch.uint8)

    def write(parts: Sequence[torch.Tensor], pages: torch.Tensor, slots: torch.Tensor) -> None:
        assert {part.dtype for part in parts} == {kept}
        writer(BLOCK_LAYOUTS[0])("")([part.view(torch.uint8) for part in parts], pages, slots)

    assert detect_block_layout(pages, 2, write, kept) is BLOCK_LAYOUTS[0]


def test_a_packing_that_nobody_knows_is_refused() -> None:
    with pytest.raises(LayoutMismatchError, match="packs otherwise"):
        detect_block_layout(empty_pages()["model.layers.0.attn"], 2, scrambled("a layer"))


def test_a_backend_that_cannot_write_a_block_is_refused() -> None:
    def write(*_: object) -> None:
        raise NotImplementedError("no such kernel")

    with pytest.raises(LayoutMismatchError, match="no such kernel"):
        detect_block_layout(empty_pages()["model.layers.0.attn"], 2, write)


@pytest.mark.parametrize("packing", BLOCK_LAYOUTS)
def test_the_tensors_of_blocks_are_k_and_v_in_the_stores_order(packing: BlockLayout) -> None:
    registered = empty_pages()
    compute(registered, packing, TOKENS, [5, 2])
    pages = EnginePages.of(SHAPE, registered, writer(packing))
    keys, values = pages.groups[0][0].parts
    assert keys.shape == values.shape == (BLOCKS, HEADS, BLOCK_TOKENS, HEAD_DIM)
    assert holds(registered, packing, TOKENS, [5, 2])


def test_latents_are_one_part_and_lie_as_the_shape_says() -> None:
    registered = empty_pages(shape=LATENT)
    pages = EnginePages.of(LATENT, registered, writer(rows))
    (latents,) = pages.groups[0][0].parts
    assert latents.shape == (BLOCKS, 1, BLOCK_TOKENS, HEAD_DIM)
    with pytest.raises(LayoutMismatchError, match="packs otherwise"):
        EnginePages.of(LATENT, registered, scrambled)


def test_latents_of_an_older_engine_get_their_dimension_of_heads() -> None:
    registered = empty_pages(shape=LATENT)
    bare = {name: pages.squeeze(1) for name, pages in registered.items()}
    assert {pages.ndim for pages in bare.values()} == {3}
    pages = {name: with_heads(each) for name, each in bare.items()}
    assert all(pages[name].data_ptr() == each.data_ptr() for name, each in registered.items())
    EnginePages.of(LATENT, pages, writer(rows))
    assert {with_heads(each).ndim for each in registered.values()} == {4}


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
        EnginePages.of(SHAPE, registered, writer(BLOCK_LAYOUTS[0]))
