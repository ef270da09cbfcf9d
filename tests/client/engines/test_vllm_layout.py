"""How K and V lie in an engine's blocks is found out, and what is not understood is refused."""

from __future__ import annotations

import pytest
import torch
from vllm_pages import (
    BLOCK_TOKENS,
    SHAPE,
    compute,
    empty_pages,
    holds,
    representation,
    scrambled,
    writer,
)

from kvstore.client.engines.vllm_layout import (
    PACKINGS,
    EnginePages,
    Packing,
    PageCopy,
    find_packing,
    in_model_order,
)
from kvstore.proto.errors import LayoutMismatchError

TOKENS = list(range(64))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packing_is_found_by_what_the_engine_writes(packing: Packing, dtype: torch.dtype) -> None:
    pages = torch.full((4, 2, 32, 16), 3.0, dtype=dtype)
    assert find_packing(pages, writer(packing)) is packing
    assert bool((pages == 3.0).all()), "the engine's own pages were written to"


def test_a_packing_that_nobody_knows_is_refused() -> None:
    with pytest.raises(LayoutMismatchError, match="packs otherwise"):
        find_packing(empty_pages()["model.layers.0.attn"], scrambled)


def test_a_backend_that_cannot_write_a_block_is_refused() -> None:
    def write(*_: torch.Tensor) -> None:
        raise NotImplementedError("no such kernel")

    with pytest.raises(LayoutMismatchError, match="no such kernel"):
        find_packing(empty_pages()["model.layers.0.attn"], write)


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_tensors_of_blocks_are_k_and_v_in_the_stores_order(packing: Packing) -> None:
    registered = empty_pages()
    compute(registered, packing, TOKENS, [5, 2])
    pages = EnginePages.of(representation(), SHAPE, registered, writer(packing))
    ((layer, *_),) = pages.room([5, 2])
    keys, values = layer
    assert keys.shape == values.shape == (SHAPE.kv_heads, 64, SHAPE.head_dim)
    assert holds(registered, packing, TOKENS, [5, 2])


def test_a_copy_keeps_what_the_blocks_had() -> None:
    packing = PACKINGS[0]
    registered = empty_pages()
    compute(registered, packing, TOKENS, [5, 2])
    pages = EnginePages.of(representation(), SHAPE, registered, writer(packing))
    copied = PageCopy(pages, 2)
    copied.take([5, 2])
    for whole in registered.values():
        whole.zero_()
    copied.give([7, 9], 0)
    assert holds(registered, packing, TOKENS, [7, 9])
    copied.give([11], 1)
    assert torch.equal(registered["model.layers.1.attn"][11], registered["model.layers.1.attn"][9])
    assert not any(bool(whole[[0, 5, 2]].any()) for whole in registered.values())


def test_layers_come_in_the_models_order_and_their_names_must_say_it() -> None:
    names = ["model.layers.10.attn", *(f"model.layers.{n}.attn" for n in range(10))]
    assert in_model_order(names)[-1] == "model.layers.10.attn"
    for wrong in (["layers.1"], ["layers.0", "draft.layers.0"], ["layers.0.1", "x"], ["attn"]):
        with pytest.raises(LayoutMismatchError):
            in_model_order(wrong)


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
    registered = {f"layers.{number}": pages for number in range(3)}
    with pytest.raises(LayoutMismatchError):
        EnginePages.of(representation(), SHAPE, registered, writer(PACKINGS[0]))
