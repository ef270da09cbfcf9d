"""Pages as vLLM's own allocator lays them out for CUDA: ours are read by its FlashAttention.

The allocator, its views and the attention backends' code are vLLM's, on the CPU. What they write
with is no part of vLLM's build for CPUs, so that alone has a stand-in.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from contracts.chunks import make_frame, payload
from helpers.cpu_kernels import compile_kernels
from helpers.vllm_pages import Tables, representation
from helpers.vllm_stand_ins import engine_config
from vllm import _custom_ops
from vllm.v1.attention.backend import AttentionType, MLAAttentionImpl
from vllm.v1.attention.backends import flash_attn
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvstore.client.engines.vllm.blocks import NULL_BLOCK
from kvstore.client.engines.vllm.connector import block_writer
from kvstore.client.engines.vllm.device import EngineDevicePages
from kvstore.client.engines.vllm.identity import KVCacheShape, shape_of
from kvstore.codecs.frame_kernels import LaunchedKernels
from kvstore.codecs.paged import FrameAt, FrameKernels, HostKernels, Paged
from kvstore.proto.frame import parse_header

CPU = torch.device("cpu")
BLOCKS = 24
LATENT_RANK = 512
LATENT_DIM = 576
CHUNKS = 2


@dataclass(frozen=True)
class CacheModel:
    """What vLLM is told of a model's layers, and how."""

    specs: tuple[Any, ...]
    """Of each layer."""
    chunk_blocks: int = 4
    kernel_tokens: int | None = None
    """Of the kernels' blocks; None: those of the block tables."""
    cache_dtype: str = "auto"

    @property
    def names(self) -> list[str]:
        return [f"model.layers.{number}.self_attn.attn" for number in range(len(self.specs))]


def dense(
    block_tokens: int = 16, dtype: torch.dtype = torch.bfloat16, page_bytes: int | None = None
) -> Any:
    """Return vLLM's description of a layer; *page_bytes*: those of a block, with a gap behind."""
    return FullAttentionSpec(
        block_size=block_tokens, num_kv_heads=4, head_size=32, dtype=dtype,
        page_size_padded=page_bytes,
    )  # fmt: skip


def latent(block_tokens: int = 64) -> Any:
    return MLAAttentionSpec(
        block_size=block_tokens, num_kv_heads=1, head_size=LATENT_DIM, dtype=torch.bfloat16
    )


WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=4, head_size=32, dtype=torch.bfloat16, sliding_window=32
)
WHOLE = {
    "bf16": CacheModel((dense(),) * 3),
    "fp8": CacheModel((dense(dtype=torch.uint8),) * 3, cache_dtype="fp8"),
    "mla": CacheModel((latent(),) * 2, chunk_blocks=2),
    "hybrid": CacheModel((dense(), WINDOW, WINDOW) * 2),
}
SPLIT = {
    "bf16": CacheModel((dense(64),) * 3, chunk_blocks=2, kernel_tokens=16),
    "fp8": CacheModel((dense(64, torch.uint8),) * 3, 2, kernel_tokens=16, cache_dtype="fp8"),
    "mla": CacheModel((latent(256),) * 2, chunk_blocks=1, kernel_tokens=64),
}
SPLITTING = (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)
"""The layouts whose blocks vLLM cuts into those of the kernels, whatever a model is like."""
PADDED = CacheModel((dense(page_bytes=20480),) * 3)
PADDING = (*SPLITTING, KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)
CASES = [
    *((name, layout, WHOLE[name]) for layout in KVCacheLayout for name in WHOLE),
    *((f"{name}_by_4", layout, SPLIT[name]) for layout in SPLITTING for name in SPLIT),
    *(("padded", layout, PADDED) for layout in PADDING),
]
ALL_CASES = pytest.mark.parametrize(
    ("layout", "model"),
    [pytest.param(layout, model, id=f"{layout.name}-{name}") for name, layout, model in CASES],
)


# --- vLLM's side


def told(model: CacheModel, layout: KVCacheLayout) -> Any:
    """Return what vLLM's cache code and the connector read of a VllmConfig."""
    config = engine_config(
        "", cache_dtype=model.cache_dtype, get_total_num_hidden_layers=lambda: len(model.specs)
    )
    config.cache_config.get_resolved_kv_cache_layout = lambda: layout
    config.cache_config.num_gpu_blocks_override = BLOCKS
    config.cache_config.prefix_cache_retention_interval = None
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.attention_config = SimpleNamespace(hisparse_config=None)
    config.speculative_config = None
    return config


def planned(model: CacheModel, layout: KVCacheLayout) -> tuple[KVCacheShape, Any]:
    """Return our shape of *model*, and the KVCacheConfig that vLLM makes for it."""
    config = told(model, layout)
    groups = get_kv_cache_groups(config, dict(zip(model.names, model.specs, strict=True)))
    cache = get_kv_cache_config_from_groups(config, groups, 1 << 30)
    return shape_of(config, cache), cache


def allocated(model: CacheModel, layout: KVCacheLayout, cache: Any) -> dict[str, torch.Tensor]:
    """Return vLLM's pages of every layer, full of noise."""
    sizes = None
    if model.kernel_tokens is not None:
        sizes = [model.kernel_tokens] * len(cache.kv_cache_groups)
    pages = dict(allocate_kv_cache(cache, CPU, layout, sizes))
    room = buffer(pages)
    room.copy_(torch.from_numpy(payload(3, len(room))))
    return pages


def buffer(pages: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the bytes of the one buffer that all *pages* lie in."""
    storages = [one.untyped_storage() for one in pages.values()]
    assert len({storage.data_ptr() for storage in storages}) == 1
    return torch.empty(0, dtype=torch.uint8).set_(storages[0])


def cache_rows(
    keys: torch.Tensor, values: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slots: torch.Tensor, cache_dtype: str, *scales: Any,
) -> None:  # fmt: skip
    """Stand in for vLLM's kernel reshape_and_cache_flash: both caches are (blocks, tokens, heads,
    head_dim)."""
    for new, cache in ((keys, key_cache), (values, value_cache)):
        if cache_dtype == "fp8" and new.element_size() > 1:
            new = new.to(torch.float8_e4m3fn)
        at = slots // cache.shape[1], slots % cache.shape[1]
        cache[at] = new.view(cache.dtype)


def cache_latents(
    latents: torch.Tensor, rotated: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor,
    **_: Any,
) -> None:  # fmt: skip
    """Stand in for vLLM's kernel concat_and_cache_mla: the cache is (blocks, tokens, width)."""
    at = slots // cache.shape[1], slots % cache.shape[1]
    cache[at] = torch.cat([latents, rotated], 1)


@pytest.fixture(autouse=True)
def writing_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn, "reshape_and_cache_flash", cache_rows, raising=False)
    monkeypatch.setattr(_custom_ops, "concat_and_cache_mla", cache_latents)


def attention(model: CacheModel) -> Any:
    """Return an attention layer as far as the connector knows one, with vLLM's own writer."""
    spec = model.specs[0]
    backend = SimpleNamespace(
        attn_type=AttentionType.DECODER, head_size=spec.head_size, kv_cache_dtype=model.cache_dtype
    )
    update = partial(flash_attn.FlashAttentionImpl.do_kv_cache_update, backend)
    if isinstance(spec, MLAAttentionSpec):
        update = partial(MLAAttentionImpl.do_kv_cache_update, backend)
    one = torch.ones(1)
    return SimpleNamespace(
        impl=SimpleNamespace(do_kv_cache_update=update), kv_lora_rank=LATENT_RANK,
        kv_cache_dtype=model.cache_dtype, _k_scale=one, _v_scale=one, _k_scale_float=1.0,
        _v_scale_float=1.0,
    )  # fmt: skip


def write(
    model: CacheModel, parts: Sequence[torch.Tensor], pages: torch.Tensor, slots: Any
) -> None:
    """Have vLLM write the rows of *parts*, each (tokens, heads, head_dim), as they are."""
    layer = attention(model)
    if len(parts) == 2:
        layer.impl.do_kv_cache_update(layer, *parts, pages, slots)
    else:
        block_writer("", layer, torch.bfloat16)(parts, pages, slots)


# --- ours


def device_pages(
    shape: KVCacheShape, model: CacheModel, registered: dict[str, torch.Tensor]
) -> EngineDevicePages:
    """Return the connector's view of *registered*, which it finds out by having vLLM write."""
    layer = attention(model)
    return EngineDevicePages(
        shape, registered, lambda name: block_writer(name, layer, torch.bfloat16)
    )


def make_tables(shape: KVCacheShape, model: CacheModel) -> list[Tables]:
    """Return the block tables of each chunk: no block is in two, and a window has its end only."""
    ids = iter(np.random.default_rng(2).permutation(np.arange(1, BLOCKS)).tolist())
    ends = {
        layer.table: model.chunk_blocks - shape.kept_blocks(group, model.chunk_blocks)
        for group in shape.groups
        for layer in group.layers
    }
    return [
        [
            [NULL_BLOCK if at < ends[table] else next(ids) for at in range(model.chunk_blocks)]
            for table in range(shape.tables)
        ]
        for _ in range(CHUNKS)
    ]


def make_frames(shape: KVCacheShape, model: CacheModel) -> tuple[torch.Tensor, list[FrameAt]]:
    """Return memory with the raw frame of each chunk in it."""
    tokens = model.chunk_blocks * shape.block_tokens
    of_model = representation(shape=shape)
    made = [make_frame(seed, tokens, representation=of_model)[1] for seed in range(CHUNKS)]
    room = -(-len(made[0]) // 64) * 64
    memory = np.zeros(CHUNKS * room, np.uint8)
    frames = []
    for at, frame in enumerate(made):
        memory[at * room : at * room + len(frame)] = frame
        frames.append(FrameAt(at * room, parse_header(frame), at * tokens))
    return torch.from_numpy(memory), frames


def kept_slots(
    shape: KVCacheShape, ids: Sequence[int], first_token: int, skipped_blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which rows of a chunk's component, from *first_token* on, belong in which slots."""
    rows, slots = [], []
    for at, block in enumerate(ids):
        for place in range(shape.block_tokens):
            row = at * shape.block_tokens + place - first_token
            if row >= 0 and block != NULL_BLOCK and at >= skipped_blocks:
                rows.append(row)
                slots.append(block * shape.block_tokens + place)
    return torch.tensor(rows, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64)


@dataclass(frozen=True)
class Rows:
    """Rows of one layer in one frame that belong in its pages."""

    name: str
    parts: list[torch.Tensor]
    """Each (tokens, heads, head_dim), a view of the frame's memory."""
    which: torch.Tensor
    slots: torch.Tensor


def all_rows(
    shape: KVCacheShape, memory: torch.Tensor, frames: Sequence[FrameAt], chunks: list[Tables],
    kept_blocks: int,
) -> Iterator[Rows]:  # fmt: skip
    """Yield the rows of each layer in each frame; the first *kept_blocks* of all are left out."""
    for number, (frame, tables) in enumerate(zip(frames, chunks, strict=True)):
        components = frame.header.layout.components
        offsets = [starts for _, starts in frame.part_offsets()]
        for group, part, starts in zip(shape.groups, components, offsets, strict=True):
            dtype = torch.uint8 if part.dtype.item_bytes == 1 else torch.bfloat16
            views = [
                memory[start : start + part.part_bytes].view(dtype).view(part.shape).transpose(0, 1)
                for start in starts
            ]
            for at, layer in enumerate(group.layers):
                skipped = 0 if number else kept_blocks
                found = kept_slots(shape, tables[layer.table], part.first_token, skipped)
                yield Rows(layer.name, views[at * part.parts : (at + 1) * part.parts], *found)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> LaunchedKernels:
    """The CUDA source, compiled for the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return LaunchedKernels(CPU, compile_kernels(tmp_path_factory.mktemp("kernels")))


@pytest.fixture(params=["torch", "cuda source"])
def kernels(request: pytest.FixtureRequest) -> FrameKernels:
    if request.param == "torch":
        return HostKernels()
    found: LaunchedKernels = request.getfixturevalue("compiled")
    return found


@ALL_CASES
@pytest.mark.parametrize("kept_blocks", [0, 1], ids=["all", "all_but_kept"])
def test_frames_lie_in_pages_where_vllm_writes_them_and_come_back_and_nothing_else_changes(
    kernels: FrameKernels, layout: KVCacheLayout, model: CacheModel, kept_blocks: int
) -> None:
    shape, cache = planned(model, layout)
    registered, right = (allocated(model, layout, cache) for _ in range(2))
    pages = device_pages(shape, model, registered)
    assert torch.equal(buffer(registered), buffer(right)), "probing leaves pages as they are"
    memory, frames = make_frames(shape, model)
    chunks = make_tables(shape, model)
    for rows in all_rows(shape, memory, frames, chunks, kept_blocks):
        write(model, [part[rows.which] for part in rows.parts], right[rows.name], rows.slots)
    paged = Paged(pages.of(frames[0].header.layout), pages.tables(chunks, kept_blocks))
    sums = kernels.scatter(memory, frames, paged)()
    assert sums == [frame.header.segments["checksum"].tolist() for frame in frames]
    assert torch.equal(buffer(registered), buffer(right))

    back = memory.bitwise_not()
    wanted = back.clone()
    both = (all_rows(shape, whole, frames, chunks, kept_blocks) for whole in (wanted, memory))
    for theirs, ours in zip(*both, strict=True):
        for to, of in zip(theirs.parts, ours.parts, strict=True):
            to[ours.which] = of[ours.which]
    kernels.move(back, frames, paged, to_pages=False)
    assert torch.equal(back, wanted)
