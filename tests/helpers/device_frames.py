"""Frames in guarded memory and pages full of noise, on the CPU in place of a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from contracts.chunks import payload
from contracts.codec import Tensors, all_zero, filled
from helpers.cpu_kernels import guarded

from kvstore.codecs.paged import FrameAt, Paged, Pages
from kvstore.proto.buffers import Bytes
from kvstore.proto.device import Device
from kvstore.proto.errors import InvalidFrameError, UnknownCodecError
from kvstore.proto.frame import FrameHeader, parse_header
from kvstore.proto.types import ChunkKey, Component
from kvstore.server import wiring
from kvstore.server.settings import settings as config_module
from kvstore.server.settings.rules import GpuConfig
from kvstore.tiers.gpu import GpuTier

CPU = torch.device("cpu")
BLOCK_TOKENS, FIRST_TOKEN = 16, 11


@dataclass(frozen=True, slots=True)
class Place:
    """Consecutive frames in memory, and the pages for their tokens."""

    memory: torch.Tensor
    frames: list[FrameAt]
    paged: Paged

    @classmethod
    def of(cls, frames: Sequence[Bytes], device: torch.device = CPU) -> Place:
        """Return a Place on *device*, equal for frames of one layout."""
        headers = [parse_header(frame) for frame in frames]
        sizes = [-(-len(frame) // 64) * 64 for frame in frames]
        total = sum(sizes)
        memory = guarded(total)
        tokens = max(component.tokens for component in headers[0].layout.components)
        at, places = 0, []
        for number, (frame, size) in enumerate(zip(frames, sizes, strict=True)):
            memory[at : at + size] = torch.from_numpy(payload(number, size))
            memory[at : at + len(frame)] = torch.from_numpy(frame.copy())
            places.append(FrameAt(at, headers[number], FIRST_TOKEN + number * tokens))
            at += size
        count = -(-(FIRST_TOKEN + len(frames) * tokens) // BLOCK_TOKENS)
        ids = random.Random(1).sample(range(count + 2), count)
        pages = tuple(_pages(c, count + 2, device) for c in headers[0].layout.components)
        return cls(memory.to(device), places, Paged(pages, [ids]))

    def contents(self) -> list[bytes]:
        """Return the bytes of the pages."""
        views = [view for pages in self.paged.pages for parts in pages.views for view in parts]
        return [view.contiguous().view(torch.uint8).cpu().numpy().tobytes() for view in views]

    def write(self, frame: FrameAt, tensors: Tensors) -> None:
        """Write *tensors* to the slots of *frame*'s tokens, one token at a time."""
        for pages, layers in zip(self.paged.pages, tensors, strict=True):
            for views, parts in zip(pages.views, layers, strict=True):
                for view, part in zip(views, parts, strict=True):
                    rows = torch.from_numpy(part.view(np.uint8))
                    for token in range(part.shape[1]):
                        block, slot = divmod(frame.first_token + token, BLOCK_TOKENS)
                        page = view.view(torch.uint8)[self.paged.tables[0][block]]
                        page[:, slot] = rows[:, token]


def _pages(component: Component, blocks: int, device: torch.device) -> Pages:
    shape = (component.layers, component.parts, blocks, BLOCK_TOKENS, component.kv_heads)
    count = int(np.prod(shape)) * component.head_dim * component.dtype.item_bytes
    raw = torch.from_numpy(payload(7, count)).to(device)
    data = raw.view(getattr(torch, component.dtype.name)).view(*shape, component.head_dim)
    data = data.transpose(-3, -2)
    return Pages(tuple(tuple(parts) for parts in data))


def decoded(frame: Bytes, decode: Callable[[FrameHeader, Bytes, Tensors], None]) -> Tensors:
    """Return the tensors of *frame* that *decode* fills."""
    header = parse_header(frame)
    out = filled(header.layout, all_zero)
    decode(header, frame, out)
    return out


def is_refused(call: Callable[[], object]) -> bool:
    """Whether *call* raises that a frame is invalid."""
    try:
        call()
    except (InvalidFrameError, UnknownCodecError):
        return True
    return False


def use_device(monkeypatch: pytest.MonkeyPatch, folder: Path, device: Device) -> None:
    """Make servers that start from now on put their gpu tier on *device*."""

    def open_tier(config: GpuConfig) -> GpuTier:
        return GpuTier(config.capacity_bytes, device, 4096)

    monkeypatch.setattr(config_module, "_CUDA_CONTROL", folder)
    monkeypatch.setattr(wiring, "open_gpu_tier", open_tier)


def frame_on_device(gpu: GpuTier, key: ChunkKey) -> torch.Tensor:
    """Return a view of a sealed frame's bytes, to read or to damage."""
    place = gpu.locate(key)
    assert place is not None
    return gpu.memory[place.offset : place.offset + place.size_bytes]
