"""KV in GPU memory against the limits of the device; ``engines``: a real vLLM with stores.

Pages in vLLM's layout, the connector's stores and loads, and a server process on the same host.
Without a CUDA device, or vLLM, nothing is measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu import engines
from bench.lib.report import Report, gbps, paired, parser_of
from bench.lib.workload import SMALL, chunks_of, model_of, serving

LAYERS, HEADS, HEAD_DIM, TOKENS, BLOCK_TOKENS = 32, 8, 128, 256, 16
"""An 8B-class model: 32 MiB a chunk."""
CHUNKS = 96
"""24,576 tokens, 3 GiB."""
REPEATS = 5
FLAT_CHUNKS = 10_000
DEADLINE_MS = 60_000


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("part", nargs="?", default="copies", choices=("copies", "engines"))
    engines.add_flags(parser)
    flags, report = parser.parse_args(argv), Report("gpu")
    is_engine = flags.part == "engines"
    if not has_cuda() and not (is_engine and flags.device == "cpu"):
        print("skipped: no CUDA device")
    elif not is_engine:
        measure_all(report, "cuda", model_of("gpu", LAYERS), CHUNKS)
    elif find_spec("vllm") is None:
        print("skipped: no vLLM")
    else:
        engines.measure_engines(report, flags)
    report.print(only_json=flags.json or not report.rows)
    return 0


def has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def synced(work: Callable[[], object]) -> Callable[[], None]:
    import torch

    def run() -> None:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return run


@dataclass(slots=True)
class Engine:
    """Pages on *device* in the layout of vLLM's FlashAttention, and the connector's side.

    ``tables``: the blocks of each chunk, in random order.
    """

    pages: list[Any]
    tables: list[list[list[int]]]
    side: Any
    client: Any

    @classmethod
    @contextmanager
    def open(cls, address: str, model: Any, chunks: int, device: str) -> Iterator[Engine]:
        import torch

        from kvstore.client import ClientOptions
        from kvstore.client.cuda import CudaClient
        from kvstore.client.engines.base import Connector
        from kvstore.client.engines.vllm.blocks import side_by_side
        from kvstore.client.engines.vllm.device import DeviceSide, EngineDevicePages
        from kvstore.client.engines.vllm.identity import KVCacheShape, LayerGroupShape, LayerRef

        (group,) = model.layer_groups
        blocks = chunks * TOKENS // BLOCK_TOKENS + 1
        pages = [
            torch.zeros(
                (blocks, BLOCK_TOKENS, HEADS, 2 * HEAD_DIM), dtype=torch.bfloat16, device=device
            ).transpose(1, 2)
            for _ in group.layer_ids
        ]
        layers = tuple(LayerRef(f"layers.{at}.attn", at, 0) for at in group.layer_ids)
        kept = LayerGroupShape(group.kind, group.dtype, HEADS, HEAD_DIM, 0, layers)

        def write(parts: Any, whole: Any, slots: Any) -> None:
            for part, view in zip(parts, side_by_side(whole), strict=True):
                view[slots // BLOCK_TOKENS, :, slots % BLOCK_TOKENS] = part

        named = {layer.name: tensor for layer, tensor in zip(layers, pages, strict=True)}
        engine_pages = EngineDevicePages(
            KVCacheShape((kept,), BLOCK_TOKENS), named, lambda _: write
        )
        options = ClientOptions(chunk_tokens=TOKENS, deadline_ms=DEADLINE_MS)
        with CudaClient(address, model, options) as client:
            side = DeviceSide(engine_pages, Connector(client), 1 << 30)
            spec = np.random.default_rng(1).permutation(blocks - 1) + 1
            tables = [[list(map(int, some))] for some in np.split(spec, chunks)]
            try:
                yield cls(pages, tables, side, client)
            finally:
                side.close()

    def store(self) -> None:
        pending = list(self.tables)
        while pending:
            copies = self.side.copies(pending)
            del pending[: len(copies)]
            for at in range(0, len(copies), 2):
                for copy in copies[at : at + 2]:
                    copy.begin()
                for copy in copies[at : at + 2]:
                    copy.run()
                    copy.free()

    def load(self, keys: Sequence[Any]) -> int:
        """Load *keys* into the pages, as for a request; return how many were read."""
        from kvstore.client.engines.vllm.blocks import LoadJob
        from kvstore.client.engines.vllm.messages import LoadSpec
        from kvstore.proto.types import DIGEST_BYTES, ChainDigest

        spec = LoadSpec("", tuple(ChainDigest(key[DIGEST_BYTES:]) for key in keys), ())
        job = LoadJob(spec, self.tables, self.side.mark(), lambda: None, lambda: False)
        self.side.read(job)
        return job.read


def measure_all(report: Report, device: str, model: Any, chunks: int) -> None:
    total = chunks * chunk_bytes(model)
    capacity = f"{3 * total // (1 << 20) + 512}MiB"
    with (
        serving("--tiers", "cpu", "--cpu", capacity) as (address, _),
        Engine.open(address, model, chunks, device) as engine,
    ):
        keys = put(engine, chunks)
        measure_store(report, engine, total, device)
        measure_cpu_load(report, engine, keys, total, device)
    if device == "cuda":  # the gpu tier needs CUDA
        with (
            serving("--tiers", "gpu,cpu", "--cpu", capacity, "--gpu", capacity) as (address, _),
            Engine.open(address, model, chunks, device) as engine,
        ):
            measure_gpu(report, engine, chunks, total)
    with serving("--tiers", "cpu") as (address, _), Engine.open(address, SMALL, 16, device) as one:
        measure_growth(report, one)


def chunk_bytes(model: Any) -> int:
    return 2 * len(model.layer_groups[0].layer_ids) * HEADS * HEAD_DIM * TOKENS * 2


def put(engine: Engine, count: int) -> list[Any]:
    """Put *count* chunks of noise, a few at a time, and load them; return their keys."""
    keys, chunks = rolled(engine.client, count)
    for at in range(0, count, 8):
        engine.client.put_chunks(chunks[at : at + 8])
    assert engine.load(keys) == count
    check_pages(engine, chunks)
    return keys


def rolled(client: Any, count: int) -> tuple[list[Any], list[Any]]:
    """Return *count* chained chunks: the same noise, each rolled by one more value."""
    keys = client.keys(list(range(TOKENS * count)))
    shape = (len(client.model.layer_groups[0].layer_ids), 2, HEADS, TOKENS, HEAD_DIM)
    noise = np.random.default_rng(7).integers(0, 1 << 16, shape, np.uint16)
    turned = (np.roll(noise, number) for number in range(count))
    return keys, chunks_of(keys, [[list(map(list, one))] for one in turned])


def check_pages(engine: Engine, chunks: Sequence[Any]) -> None:
    import torch

    for (table,), chunk in zip(engine.tables, chunks, strict=True):
        for tensor, parts in zip(engine.pages, chunk.tensors[0], strict=True):
            found = tensor[table].movedim(1, 0).flatten(1, 2).cpu().view(torch.int16)
            wanted = torch.cat([torch.from_numpy(part.view("<i2")) for part in parts], -1)
            if not torch.equal(found, wanted):
                raise AssertionError("wrong bytes")


def copies_of(total: int, device: str, *, up: bool) -> Callable[[], None]:
    """Return plain copies of *total* bytes between pinned memory and the device."""
    import torch

    size = 32 << 20
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda")
    there = torch.empty(size, dtype=torch.uint8, device=device)
    to, of = (there, host) if up else (host, there)

    def copy() -> None:
        for _ in range(-(-total // size)):
            to.copy_(of, non_blocking=True)

    return copy


def add_rate(report: Report, key: str, total: int, ours: float, theirs: float) -> None:
    report.add(key, theirs / ours, gbps(total, ours), gbps(total, theirs))


def measure_store(report: Report, engine: Engine, total: int, device: str) -> None:
    """Compare gathering pages into registered host memory with cudaMemcpyAsync."""
    theirs = synced(copies_of(total, device, up=False))
    ours_s, theirs_s = paired(synced(engine.store), theirs, REPEATS)
    add_rate(report, "cpu_store_vs_memcpy", total, ours_s, theirs_s)


def measure_cpu_load(
    report: Report, engine: Engine, keys: Sequence[Any], total: int, device: str
) -> None:
    """Compare verified loads of a server's CPU memory into pages with cudaMemcpyAsync."""
    time.sleep(1.0)  # slabs are registered beside the first loads
    load = partial(engine.load, keys)
    ours_s, theirs_s = paired(synced(load), synced(copies_of(total, device, up=True)), REPEATS)
    add_rate(report, "cpu_load_vs_memcpy", total, ours_s, theirs_s)


def put_near(engine: Engine, chunks: Sequence[Any]) -> None:
    from kvstore.proto.plans import NO_HINTS

    pending = list(zip(engine.tables, chunks, strict=True))
    while pending:
        copies = engine.side.copies([table for table, _ in pending[:16]])
        some, pending = pending[: len(copies)], pending[len(copies) :]
        named = [chunk for _, chunk in some]
        engine.side.put_near(partial(list, named), copies, NO_HINTS)
        for copy in copies:
            copy.free()


def measure_gpu(report: Report, engine: Engine, count: int, total: int) -> None:
    """Compare verified loads from a server's gpu tier into pages with copies on the device."""
    import torch

    keys, chunks = rolled(engine.client, count)
    for (table,), chunk in zip(engine.tables, chunks, strict=True):
        for tensor, parts in zip(engine.pages, chunk.tensors[0], strict=True):
            rows = torch.cat([torch.from_numpy(part.view("<i2")) for part in parts], -1)
            blocks = rows.unflatten(1, (len(table), BLOCK_TOKENS)).movedim(0, 1)
            tensor.view(torch.int16)[table] = blocks.to(tensor.device)
    put_near(engine, chunks)
    for tensor in engine.pages:
        tensor.zero_()
    assert engine.load(keys) == count
    check_pages(engine, chunks)
    source = torch.empty(total, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    ours_s, theirs_s = paired(
        synced(partial(engine.load, keys)), synced(lambda: target.copy_(source)), REPEATS
    )
    add_rate(report, "gpu_load_vs_d2d", total, ours_s, theirs_s)


def measure_growth(report: Report, engine: Engine) -> None:

    def used_mb() -> float:
        import torch

        fields = Path("/proc/self/status").read_text().split()
        resident = int(fields[fields.index("VmRSS:") + 1]) / 1e3
        if not torch.cuda.is_available():
            return resident
        free, total = torch.cuda.mem_get_info()
        return resident + (total - free) / 1e6

    for _ in range(20):
        engine.store()
    before = used_mb()
    for _ in range(0, FLAT_CHUNKS, len(engine.tables)):
        engine.store()
    grown = max(0.0, used_mb() - before)
    report.add("pinned_growth_mb", grown, f"{FLAT_CHUNKS} chunks of 1 MiB")


if __name__ == "__main__":
    sys.exit(main())
