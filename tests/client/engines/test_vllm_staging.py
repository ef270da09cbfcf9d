"""Copies of an engine's pages: what was in the blocks, of every layer and packing, all of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.vllm_pages import (
    BLOCK_TOKENS,
    HEAD_DIM,
    HEADS,
    HYBRID,
    LATENT,
    SHAPE,
    SLIDING,
    compute,
    empty_pages,
    kv_of,
    representation,
    writer,
)

from kvstore.client.chunk import to_arrays
from kvstore.client.engines.vllm.blocks import (
    BLOCK_LAYOUTS,
    BlockGather,
    BlockLayout,
    EnginePages,
    Staged,
)
from kvstore.client.engines.vllm.identity import KVCacheShape, LayerRef
from kvstore.codecs.block_part import BlockPart, BlockStack, to_dense
from kvstore.codecs.raw import RawCodec
from kvstore.proto.errors import LayoutMismatchError
from kvstore.proto.frame import FLAG_UNSUMMED, FrameTemplate, raw_frame_bytes
from kvstore.proto.types import ROOT, ChunkKey, KVLayout

TOKENS = list(range(64))


@pytest.mark.parametrize("heads", [HEADS, HEADS + 1])
def test_a_copy_keeps_what_the_blocks_had(heads: int) -> None:
    """Of heads that lie among others too, which no single call can copy."""
    registered = {
        name: torch.zeros(48, heads, BLOCK_TOKENS, 2 * HEAD_DIM)[:, :HEADS]
        for name in empty_pages()
    }
    compute(registered, BLOCK_LAYOUTS[0], TOKENS, [5, 2])
    pages = EnginePages.of(SHAPE, registered, writer(BLOCK_LAYOUTS[0]))
    copied = BlockGather(pages, 2).take([[5, 2]])
    assert copied is not None
    for whole in registered.values():
        whole.zero_()
    assert torch.equal(tensor_of(copied, 0, 1), torch.stack([kv(token, 1) for token in TOKENS], 1))


def tensor_of(copied: Staged, component: int, layer: int) -> torch.Tensor:
    """Return the first part of one layer, (kv_heads, tokens, head_dim)."""
    part = copied.tensors[component][layer][0]
    assert isinstance(part, BlockPart)
    return torch.from_numpy(to_dense(part).view(np.float32))


def kv(position: int, layer: int) -> torch.Tensor:
    return kv_of(TOKENS[position], position, layer)[0]


def test_a_copy_has_the_last_blocks_of_a_window_each_from_the_table_of_its_layer() -> None:
    registered = empty_pages(shape=HYBRID)
    tables = [[0, 2], [0, 9], [5, 7]]
    compute(registered, BLOCK_LAYOUTS[0], TOKENS, tables, shape=HYBRID)
    copied = BlockGather(EnginePages.of(HYBRID, registered, writer(BLOCK_LAYOUTS[0])), 2).take(
        tables
    )
    assert copied is not None
    assert copied.has_windows
    for layer, number in ((0, 0), (1, 2)):
        expected = torch.stack([kv(token, number) for token in TOKENS[32:]], 1)
        assert torch.equal(tensor_of(copied, 0, layer), expected)
    assert tensor_of(copied, 1, 0).shape == (HEADS, 64, HEAD_DIM)


def test_a_window_that_the_engine_gave_up_is_left_out_of_a_copy() -> None:
    registered = empty_pages(shape=HYBRID)
    gather = BlockGather(EnginePages.of(HYBRID, registered, writer(BLOCK_LAYOUTS[0])), 2)
    copied = gather.take([[1, 2], [3, 0], [5, 7]])
    assert copied is not None
    assert not copied.has_windows
    assert len(copied.tensors) == 1
    copied = gather.take([[1, 2], [3, 4], [5, 7]])
    assert copied is not None, "the memory is used again"
    assert copied.has_windows


def test_where_one_window_of_two_is_gone_both_are_left_out() -> None:
    """A chunk has the windows of all layers or of none."""
    window, full = HYBRID.groups
    wide = replace(window, window_tokens=97, layers=(LayerRef("model.layers.3.attn", 3, 3),))
    shape = replace(HYBRID, groups=(window, wide, full))
    pages = EnginePages.of(shape, empty_pages(shape=shape), writer(BLOCK_LAYOUTS[0]))
    copied = BlockGather(pages, 2).take([[1, 2], [3, 4], [5, 7], [0, 9]])
    assert copied is not None
    assert not copied.has_windows
    assert len(copied.tensors) == 1


def test_of_layers_that_keep_windows_only_nothing_is_left_without_them() -> None:
    pages = EnginePages.of(SLIDING, empty_pages(shape=SLIDING), writer(BLOCK_LAYOUTS[0]))
    assert not BlockGather(pages, 2).take([[0, 7]])
    assert BlockGather(pages, 2).take([[3, 7]])


def noise(shape: KVCacheShape) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {name: torch.randn_like(pages) for name, pages in empty_pages(shape=shape).items()}


@pytest.mark.parametrize("flags", [0, FLAG_UNSUMMED])
@pytest.mark.parametrize("packing", BLOCK_LAYOUTS)
@pytest.mark.parametrize(("shape", "tables"), [
    (SHAPE, [[5, 2]]), (LATENT, [[4, 9]]), (HYBRID, [[1, 2], [3, 4], [5, 7]]), (SLIDING, [[6, 5]]),
], ids=["full", "latent", "hybrid", "sliding"])  # fmt: skip
def test_a_frame_of_a_copy_is_that_of_its_tensors(
    shape: KVCacheShape,
    tables: list[list[int]],
    packing: BlockLayout,
    flags: int,
) -> None:
    copied = BlockGather(EnginePages.of(shape, noise(shape), writer(packing)), 2).take(tables)
    assert copied is not None
    layout = KVLayout.of(representation(shape=shape), 64)
    template = FrameTemplate(
        ChunkKey(bytes(32)), ROOT, bytes(16), bytes(16), layout, 0, 0.0, flags
    )  # fmt: skip
    frames = np.full((2, raw_frame_bytes(layout)), 7, np.uint8)
    tensors = to_arrays(copied.tensors)
    RawCodec().encode(template, tensors, frames[0])
    dense = [[[to_dense(part) for part in parts] for parts in layers] for layers in tensors]
    RawCodec().encode(template, dense, frames[1])
    assert np.array_equal(*frames)


def test_blocks_of_no_whole_units_are_copied_too() -> None:
    registered = {
        name: torch.randn(8, HEADS, BLOCK_TOKENS, 2 * HEAD_DIM)[..., : HEAD_DIM + 8]
        for name in empty_pages()
    }
    thin = {name: pages[:, :1] for name, pages in registered.items()}
    shape = replace(SHAPE, groups=(replace(SHAPE.groups[0], kv_heads=1),))
    copied = BlockGather(EnginePages.of(shape, thin, writer(BLOCK_LAYOUTS[1])), 2).take([[5, 2]])
    assert copied is not None
    expected = thin[SHAPE.groups[0].layers[1].name][[5, 2], :, :, :HEAD_DIM].permute(1, 0, 2, 3)
    assert torch.equal(tensor_of(copied, 0, 1), expected.reshape(1, 64, HEAD_DIM))


def test_blocks_whose_heads_lie_behind_their_tokens_are_copied_as_they_lie() -> None:
    registered = {
        name: torch.randn(8, BLOCK_TOKENS, HEADS, 2 * HEAD_DIM).transpose(1, 2)
        for name in empty_pages()
    }
    copied = BlockGather(EnginePages.of(SHAPE, registered, writer(BLOCK_LAYOUTS[1])), 2).take(
        [[5, 2]]
    )
    assert copied is not None
    for layer, name in enumerate(sorted(registered)):
        expected = registered[name][[5, 2], :, :, :HEAD_DIM].permute(1, 0, 2, 3)
        assert torch.equal(tensor_of(copied, 0, layer), expected.reshape(HEADS, 64, HEAD_DIM))


@pytest.mark.parametrize("block", [-1, 48])
def test_a_block_that_the_pages_do_not_have_is_an_error(block: int) -> None:
    pages = EnginePages.of(SHAPE, empty_pages(), writer(BLOCK_LAYOUTS[0]))
    with pytest.raises(LayoutMismatchError, match="no such block"):
        BlockGather(pages, 2).take([[1, block]])


def test_layers_of_unlike_parts_are_no_stack() -> None:
    with pytest.raises(LayoutMismatchError, match="parts"):
        BlockStack([np.zeros((2, 1, 2, 32, 8)), np.zeros((2, 1, 2, 32, 4))])
