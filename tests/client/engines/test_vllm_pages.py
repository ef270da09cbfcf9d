"""How K and V lie in an engine's blocks is found out, and copies of its pages hold all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.vllm_pages import (
    BLOCK_TOKENS,
    BLOCKS,
    HEAD_DIM,
    HEADS,
    HYBRID,
    LATENT,
    SHAPE,
    SLIDING,
    Tables,
    compute,
    empty_pages,
    kv_of,
    representation,
    scrambled,
    writer,
)

from kvstore.client.chunk import to_arrays
from kvstore.client.engines.vllm.blocks import (
    BLOCK_LAYOUTS,
    BlockGather,
    BlockLayout,
    EnginePages,
    Staged,
    detect_block_layout,
    rows,
    with_heads,
)
from kvstore.client.engines.vllm.identity import KVCacheShape, LayerRef
from kvstore.codecs.block_part import BlockPart, BlockStack, to_dense
from kvstore.codecs.raw import RawCodec
from kvstore.proto.errors import LayoutMismatchError
from kvstore.proto.frame import FLAG_UNSUMMED, FrameTemplate, raw_frame_bytes
from kvstore.proto.types import ROOT, ChunkKey, KVLayout

TOKENS = list(range(64))


# --- which layout it is


@pytest.mark.parametrize("packing", BLOCK_LAYOUTS)
def test_a_packing_is_found_by_what_the_engine_writes(packing: BlockLayout) -> None:
    pages = torch.full((4, 2, 32, 16), 3.0, dtype=torch.bfloat16)
    assert detect_block_layout(pages, 2, writer(packing)("a layer")) is packing
    assert bool((pages == 3.0).all()), "the engine's own pages were written to"


@pytest.mark.parametrize("kept", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_pages_of_bytes_have_the_elements_that_were_written_bit_for_bit(kept: torch.dtype) -> None:
    pages = torch.zeros((4, 2, 32, 16), dtype=torch.uint8)

    def write(parts: Sequence[torch.Tensor], pages: torch.Tensor, slots: torch.Tensor) -> None:
        assert {part.dtype for part in parts} == {kept}
        writer(BLOCK_LAYOUTS[0])("")([part.view(torch.uint8) for part in parts], pages, slots)

    assert detect_block_layout(pages, 2, write, kept) is BLOCK_LAYOUTS[0]


def test_a_packing_that_nobody_knows_and_a_backend_that_cannot_write_are_refused() -> None:
    def fails(*_: object) -> None:
        raise NotImplementedError("no such kernel")

    pages = empty_pages()["model.layers.0.attn"]
    for write, words in ((scrambled("a layer"), "unknown layout"), (fails, "no such kernel")):
        with pytest.raises(LayoutMismatchError, match=words):
            detect_block_layout(pages, 2, write)


def test_latents_are_one_part_and_lie_as_the_shape_says() -> None:
    pages = EnginePages(LATENT, empty_pages(shape=LATENT), writer(rows))
    (latents,) = pages.groups[0].parts[0]
    assert latents.shape == (BLOCKS, 1, BLOCK_TOKENS, HEAD_DIM)
    with pytest.raises(LayoutMismatchError, match="unknown layout"):
        EnginePages(LATENT, empty_pages(shape=LATENT), scrambled)


def test_latents_of_an_older_engine_get_their_dimension_of_heads() -> None:
    registered = empty_pages(shape=LATENT)
    bare = {name: pages.squeeze(1) for name, pages in registered.items()}
    assert {pages.ndim for pages in bare.values()} == {3}
    pages = {name: with_heads(each) for name, each in bare.items()}
    assert all(pages[name].data_ptr() == each.data_ptr() for name, each in registered.items())
    EnginePages(LATENT, pages, writer(rows))
    assert {with_heads(each).ndim for each in registered.values()} == {4}


def test_pages_of_another_shape_device_or_type_are_refused() -> None:
    for pages in (
        torch.zeros(4, 2, 16, 16),
        torch.zeros(4, 2, BLOCK_TOKENS, 8),
        torch.zeros(4, 4, BLOCK_TOKENS, 16),
        torch.zeros(4, 2, BLOCK_TOKENS, 16, device="meta"),
        torch.zeros(4, 2, BLOCK_TOKENS, 16, dtype=torch.bfloat16),
    ):
        registered = {f"model.layers.{number}.attn": pages for number in range(3)}
        with pytest.raises(LayoutMismatchError):
            EnginePages(SHAPE, registered, writer(BLOCK_LAYOUTS[0]))


# --- copies


def copied(
    tables: Tables, shape: KVCacheShape = SHAPE, pages: dict[str, torch.Tensor] | None = None,
    packing: BlockLayout = BLOCK_LAYOUTS[0],
) -> Staged | None:  # fmt: skip
    """Return a copy of the chunk in the blocks of *tables*."""
    registered = empty_pages(shape=shape) if pages is None else pages
    return BlockGather(EnginePages(shape, registered, writer(packing)), 2).take(tables)


def tensor_of(found: Staged | None, component: int, layer: int) -> torch.Tensor:
    """Return the first part of one layer, (kv_heads, tokens, head_dim)."""
    assert found is not None
    part = found.tensors[component][layer][0]
    assert isinstance(part, BlockPart)
    return torch.from_numpy(to_dense(part).view(np.float32))


def keys_of(layer: int, first: int = 0) -> torch.Tensor:
    return torch.stack([kv_of(TOKENS[at], at, layer)[0] for at in range(first, 64)], 1)


@pytest.mark.parametrize("heads", [HEADS, HEADS + 1])
def test_a_copy_keeps_what_the_blocks_had(heads: int) -> None:
    """Of heads that lie among others too, which no single call can copy."""
    registered = {
        name: torch.zeros(48, heads, BLOCK_TOKENS, 2 * HEAD_DIM)[:, :HEADS]
        for name in empty_pages()
    }
    compute(registered, BLOCK_LAYOUTS[0], TOKENS, [5, 2])
    found = copied([[5, 2]], pages=registered)
    for whole in registered.values():
        whole.zero_()
    assert torch.equal(tensor_of(found, 0, 1), keys_of(1))


def test_a_copy_has_the_last_blocks_of_a_window_each_from_the_table_of_its_layer() -> None:
    registered = empty_pages(shape=HYBRID)
    tables = [[0, 2], [0, 9], [5, 7]]
    compute(registered, BLOCK_LAYOUTS[0], TOKENS, tables, shape=HYBRID)
    found = copied(tables, HYBRID, registered)
    assert found is not None
    assert found.has_windows
    for layer, number in ((0, 0), (1, 2)):
        assert torch.equal(tensor_of(found, 0, layer), keys_of(number, 32))
    assert tensor_of(found, 1, 0).shape == (HEADS, 64, HEAD_DIM)


def test_a_window_that_the_engine_gave_up_is_left_out_of_a_copy_with_the_others() -> None:
    """A chunk has the windows of all layers or of none; where it has nothing else it is none."""
    pages = EnginePages(HYBRID, empty_pages(shape=HYBRID), writer(BLOCK_LAYOUTS[0]))
    gather = BlockGather(pages, 2)
    window, full = HYBRID.groups
    wide = replace(window, window_tokens=97, layers=(LayerRef("model.layers.3.attn", 3, 3),))
    shape = replace(HYBRID, groups=(window, wide, full))
    for found in (
        gather.take([[1, 2], [3, 0], [5, 7]]),
        copied([[1, 2], [3, 4], [5, 7], [0, 9]], shape),
    ):
        assert found is not None
        assert not found.has_windows
        assert len(found.tensors) == 1
    again = gather.take([[1, 2], [3, 4], [5, 7]])
    assert again is not None, "the memory is used again"
    assert again.has_windows
    assert not copied([[0, 7]], SLIDING)
    assert copied([[3, 7]], SLIDING)


@pytest.mark.parametrize(
    ("shape", "tables", "packing", "flags"),
    [
        *((SHAPE, [[5, 2]], packing, 0) for packing in BLOCK_LAYOUTS),
        (SHAPE, [[5, 2]], BLOCK_LAYOUTS[0], FLAG_UNSUMMED),
        (LATENT, [[4, 9]], BLOCK_LAYOUTS[0], 0),
        (HYBRID, [[1, 2], [3, 4], [5, 7]], BLOCK_LAYOUTS[1], FLAG_UNSUMMED),
        (SLIDING, [[6, 5]], BLOCK_LAYOUTS[0], 0),
    ],
)
def test_a_frame_of_a_copy_is_that_of_its_tensors(
    shape: KVCacheShape, tables: Tables, packing: BlockLayout, flags: int
) -> None:
    torch.manual_seed(3)
    noise = {name: torch.randn_like(pages) for name, pages in empty_pages(shape=shape).items()}
    found = copied(tables, shape, noise, packing)
    assert found is not None
    layout = KVLayout.of(representation(shape=shape), 64)
    template = FrameTemplate(
        ChunkKey(bytes(32)), ROOT, bytes(16), bytes(16), layout, 0, 0.0, flags
    )  # fmt: skip
    frames = np.full((2, raw_frame_bytes(layout)), 7, np.uint8)
    tensors = to_arrays(found.tensors)
    RawCodec().encode(template, tensors, frames[0])
    dense = [[[to_dense(part) for part in parts] for parts in layers] for layers in tensors]
    RawCodec().encode(template, dense, frames[1])
    assert np.array_equal(*frames)


def test_blocks_whose_heads_lie_behind_their_tokens_are_copied_as_they_lie() -> None:
    registered = {
        name: torch.randn(8, BLOCK_TOKENS, HEADS, 2 * HEAD_DIM).transpose(1, 2)
        for name in empty_pages()
    }
    found = copied([[5, 2]], pages=registered, packing=BLOCK_LAYOUTS[1])
    for layer, name in enumerate(sorted(registered)):
        expected = registered[name][[5, 2], :, :, :HEAD_DIM].permute(1, 0, 2, 3)
        assert torch.equal(tensor_of(found, 0, layer), expected.reshape(HEADS, 64, HEAD_DIM))


@pytest.mark.parametrize("block", [-1, 48])
def test_a_block_that_the_pages_do_not_have_is_an_error(block: int) -> None:
    with pytest.raises(LayoutMismatchError, match="no such block"):
        copied([[1, block]])


def test_layers_of_unlike_parts_are_no_stack() -> None:
    with pytest.raises(LayoutMismatchError, match="parts"):
        BlockStack([np.zeros((2, 1, 2, 32, 8)), np.zeros((2, 1, 2, 32, 4))])
