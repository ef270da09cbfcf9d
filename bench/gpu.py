"""The gpu tier against the limits of the same device: ``python -m bench.gpu [--json]``.

Without a CUDA device it says so and measures nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.report import Report, best_s, paired, parse_flags

LAYERS, HEADS, HEAD_DIM, TOKENS, BLOCK_TOKENS = 32, 8, 128, 256, 16
CHUNKS = 16
REPEATS = 10
MATRIX = 4096
"""Of the matrix products that stand for a layer's forward pass."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    only_json = parse_flags(argv, __doc__ or "")
    report = Report("gpu")
    if not has_cuda():
        print("skipped: no CUDA device")
        report.print(only_json=True)
        return 0
    bench = Bench.open()
    try:
        measure_get(bench, report)
        measure_upload(bench, report)
        measure_overlap(bench, report)
    finally:
        bench.tier.close()
    report.print(only_json=only_json)
    return 0


def has_cuda() -> bool:
    """Whether torch sees a CUDA device."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


@dataclass(slots=True)
class Bench:
    """A gpu tier with ``CHUNKS`` frames of an 8B-class model, and an engine's pages beside it."""

    tier: Any
    frames: list[Any]
    headers: list[Any]

    @classmethod
    def open(cls) -> Bench:
        """Fill a tier on the first CUDA device."""
        import torch

        from kvstore.proto.device import open_device
        from kvstore.tiers.gpu import GpuTier

        made = [make_frame(seed) for seed in range(CHUNKS)]
        room = 2 * sum(len(frame) for frame, _ in made)
        tier = GpuTier(room, open_device(torch.device("cuda", 0)))
        for frame, header in made:
            reservation = tier.reserve(header.info())
            tier.write(reservation, 0, frame)
            assert tier.seal(reservation)
        return cls(tier, [frame for frame, _ in made], [header for _, header in made])

    @property
    def total_bytes(self) -> int:
        """Bytes of all frames."""
        return sum(len(frame) for frame in self.frames)


def make_frame(seed: int) -> tuple[Any, Any]:
    """Return a raw frame of noise and its header."""
    from kvstore.codecs.raw import RawCodec
    from kvstore.proto.frame import FrameTemplate, raw_frame_bytes
    from kvstore.proto.types import (
        ROOT,
        ChunkKey,
        Component,
        DType,
        KVLayout,
        LayerKind,
    )

    component = Component(LayerKind.attention, DType.bfloat16, LAYERS, HEADS, HEAD_DIM, TOKENS)
    layout = KVLayout((component,))
    key = ChunkKey(seed.to_bytes(32, "little"))
    template = FrameTemplate(key, ROOT, bytes(16), bytes(16), layout)
    draw = np.random.default_rng(seed)
    shape = (LAYERS, 2, HEADS, TOKENS, HEAD_DIM)
    tensors = draw.integers(0, 1 << 16, shape, dtype=np.uint16)
    frame = np.empty(raw_frame_bytes(layout), np.uint8)
    return frame, RawCodec().encode(template, [list(map(list, tensors))], frame)


def synced(work: Callable[[], object]) -> Callable[[], None]:
    """Return *work* that ends when the device has ended it."""
    import torch

    def run() -> None:
        work()
        torch.cuda.synchronize()

    return run


def measure_get(bench: Bench, report: Report) -> None:
    """Frames of the tier into pages, verified, against one copy on the device."""
    import torch

    from kvstore.codecs.frame_kernels import open_kernels
    from kvstore.codecs.paged import FrameAt, Paged, Pages, check_sums

    device = torch.device("cuda", 0)
    blocks = CHUNKS * TOKENS // BLOCK_TOKENS
    shape = (LAYERS, 2, blocks, BLOCK_TOKENS, HEADS, HEAD_DIM)
    tensor = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    views = tensor.transpose(3, 4)
    pages = Pages(tuple(tuple(views[at, part] for part in range(2)) for at in range(LAYERS)))
    paged = Paged((pages,), [np.random.default_rng(1).permutation(blocks).tolist()])
    kernels = open_kernels(device)
    places = [bench.tier.locate(header.key).offset for header in bench.headers]
    frames = [
        FrameAt(offset, header, TOKENS * at)
        for at, (offset, header) in enumerate(zip(places, bench.headers, strict=True))
    ]
    arena = bench.tier.memory
    source = torch.empty(bench.total_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def get() -> None:
        for header, found in zip(
            bench.headers, kernels.scatter(arena, frames, paged)(), strict=True
        ):
            check_sums(header, found)

    get()
    ours, theirs = paired(synced(get), synced(lambda: target.copy_(source)), REPEATS)
    report.add(
        "gpu_get_vs_d2d", theirs / ours, f"{bench.total_bytes / ours / 1e9:.0f} GB/s verified",
        f"{bench.total_bytes / theirs / 1e9:.0f} GB/s copied on the device",
    )  # fmt: skip


def measure_upload(bench: Bench, report: Report) -> None:
    """Frames of registered memory into the tier, against plain pinned copies."""
    import torch

    memory = np.concatenate(bench.frames)
    end = bench.tier.device.register(memory)
    assert end is not None, "the device must take the benchmark's memory"
    infos = [header.info() for header in bench.headers]
    pinned = torch.from_numpy(memory).pin_memory()
    target = torch.empty(len(memory), dtype=torch.uint8, device="cuda:0")

    def upload() -> None:
        start = 0
        for info in infos:
            reservation = bench.tier.reserve(info)
            bench.tier.write(reservation, 0, memory[start : start + info.size_bytes])
            bench.tier.seal(reservation)  # answers that it is there, and frees the room
            start += info.size_bytes

    try:
        ours, theirs = paired(
            synced(upload), synced(lambda: target.copy_(pinned, non_blocking=True)), REPEATS
        )
    finally:
        end()
    report.add(
        "pinned_h2d_vs_memcpy_async", theirs / ours, f"{len(memory) / ours / 1e9:.1f} GB/s",
        f"{len(memory) / theirs / 1e9:.1f} GB/s by one cudaMemcpyAsync",
    )  # fmt: skip


def measure_overlap(bench: Bench, report: Report) -> None:
    """Layers loaded on the tier's kind of stream while a forward pass of equal length runs."""
    import torch

    device = torch.device("cuda", 0)
    layer_bytes = bench.total_bytes // LAYERS
    host = torch.empty((LAYERS, layer_bytes), dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    weights = torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device=device)
    stream = bench.tier.device.stream()

    def load() -> list[Any]:
        events = []
        for at in range(LAYERS):
            stream.copy(there[at], host[at])
            events.append(stream.record())
        return events

    def forward(products: int, events: Sequence[Any] = ()) -> None:
        for at in range(LAYERS):
            if events:
                events[at].event.wait(torch.cuda.current_stream())
            for _ in range(products):
                torch.mm(weights, weights)

    load_s = best_s(synced(load), REPEATS)
    product_s = best_s(synced(lambda: forward(1)), REPEATS)
    products = max(1, round(load_s / product_s))
    forward_s = best_s(synced(lambda: forward(products)), REPEATS)
    both_s = best_s(synced(lambda: forward(products, load())), REPEATS)
    hidden = 1 - (both_s - forward_s) / load_s
    report.add(
        "overlap_hidden_share", hidden, f"load {1e3 * load_s:.1f} ms, both {1e3 * both_s:.1f} ms",
        f"forward pass {1e3 * forward_s:.1f} ms",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
