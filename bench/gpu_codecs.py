"""kvq decoded on a CUDA device into pages: ``python -m bench.gpu_codecs [--json]``.

Values are decoded bytes a second over those of one copy on the device. Without a CUDA device it
says so and measures nothing. Checksums are not computed; bench.gpu has those.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.gpu import BLOCK_TOKENS, HEAD_DIM, HEADS, LAYERS, REPEATS, TOKENS, has_cuda, synced
from bench.report import Report, paired, parse_flags

BATCHES = (1, 8, 32)
CODECS = ("kvq:1", "kvq:3")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    only_json = parse_flags(argv, __doc__ or "")
    report = Report("gpu_codecs")
    if not has_cuda():
        print("skipped: no CUDA device")
        report.print(only_json=True)
        return 0
    import torch

    from kvstore.codecs.kvq_kernels import open_kvq_kernels

    device = torch.device("cuda", 0)
    kernels = open_kvq_kernels(device)
    for name in CODECS:
        frame = make_frame(name, (LAYERS, HEADS, HEAD_DIM, TOKENS))
        for chunks in BATCHES:
            case = Case.of(frame, chunks, device)
            measure(name, case, kernels, synced, report)
    report.print(only_json=only_json)
    return 0


def make_frame(name: str, shape: tuple[int, int, int, int]) -> Any:
    """Return a frame of numbers with outlier channels: *shape* is layers, heads, dim, tokens."""
    from kvstore.codecs.base import codec_by_name
    from kvstore.codecs.terms import EncodeTerms
    from kvstore.proto.frame import FrameTemplate
    from kvstore.proto.types import (
        ROOT,
        ChunkKey,
        Component,
        DType,
        KVLayout,
        LayerKind,
        RopeParameters,
    )

    layers, heads, dim, tokens = shape
    layout = KVLayout((Component(LayerKind.attention, DType.bfloat16, *shape),))
    draw = np.random.default_rng(0)
    scale = np.where(draw.random((layers, 2, heads, 1, dim)) < 0.03, 20, 1)
    numbers = draw.standard_normal((layers, 2, heads, tokens, dim)) * scale
    tensors = (numbers.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    codec = codec_by_name(name)
    template = FrameTemplate(ChunkKey(bytes(32)), ROOT, bytes(16), bytes(16), layout)
    frame = np.empty(codec.max_frame_bytes(layout), np.uint8)
    terms = EncodeTerms(rope=RopeParameters(10_000.0, dim))
    header = codec.encode(template, [list(map(list, tensors))], frame, terms)
    return frame[: header.frame_bytes]


@dataclass(frozen=True, slots=True)
class Case:
    """Copies of one frame in a device's memory, and pages for the tokens of all."""

    memory: Any
    frames: list[Any]
    paged: Any
    decoded_bytes: int

    @classmethod
    def of(cls, frame: Any, chunks: int, device: Any) -> Case:
        """Lay out *chunks* copies of *frame* on *device*."""
        import torch

        from kvstore.codecs.paged import FrameAt, Paged, Pages
        from kvstore.proto.frame import parse_header

        header = parse_header(frame)
        (component,) = header.layout.components
        room = -(-len(frame) // 256) * 256
        memory = torch.zeros(chunks * room, dtype=torch.uint8, device=device)
        for at in range(chunks):
            memory[at * room : at * room + len(frame)] = torch.from_numpy(frame)
        frames = [FrameAt(at * room, header, at * component.tokens) for at in range(chunks)]
        blocks = -(-chunks * component.tokens // BLOCK_TOKENS)
        shape = (component.layers, 2, blocks, BLOCK_TOKENS, component.kv_heads, component.head_dim)
        views = torch.zeros(shape, dtype=torch.bfloat16, device=device).transpose(3, 4)
        pages = Pages(tuple(tuple(parts) for parts in views))
        ids = np.random.default_rng(1).permutation(blocks).tolist()
        size = chunks * component.layers * component.layer_bytes
        return cls(memory, frames, Paged((pages,), [ids]), size)


def measure(
    name: str,
    case: Case,
    kernels: Any,
    ended: Callable[[Callable[[], object]], Any],
    report: Report,
) -> None:
    """Decode *case* and copy as many bytes, in turns; *ended* makes a call wait for the device."""
    import torch

    source = torch.empty(case.decoded_bytes, dtype=torch.uint8, device=case.memory.device)
    target = torch.empty_like(source)

    def decode() -> None:
        kernels.decode(case.memory, case.frames, case.paged)()

    decode()
    ours, theirs = paired(ended(decode), ended(lambda: target.copy_(source)), REPEATS)
    key = f"{name.replace(':', '')}_decode_x{len(case.frames)}_vs_d2d"
    report.add(
        key, theirs / ours, f"{case.decoded_bytes / ours / 1e9:.0f} GB/s decoded",
        f"{case.decoded_bytes / theirs / 1e9:.0f} GB/s copied on the device",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
