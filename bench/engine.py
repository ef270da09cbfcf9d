"""What an engine does with a store: pages filled in place, and layers before the rest.

Every figure is a ratio inside this run. The pages are block-major and token-major, as paged
attention has them, and blocks are in no order; torch copies the same bytes with ``index_copy_``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench.report import Report, best_s, paired, parse_flags
from bench.workload import MODEL, chunk_bytes, connect, make_chunks, serving
from kvstore.client import Chunk, Client, ClientOptions, PagedCache
from kvstore.codecs.base import empty_tensors
from kvstore.proto.types import ChunkKey, KVLayout

CHUNKS = 16
BLOCK_TOKENS = 16
REPEATS = 9
TOKENS = 256


class Pages:
    """The engine's side: a tensor a layer, in an order that its attention kernel likes."""

    def __init__(self, axes: str) -> None:
        count = CHUNKS * TOKENS // BLOCK_TOKENS
        sizes = {"block": 2 * count, "kv": 2, "token": BLOCK_TOKENS, "head": 8, "dim": 128}
        names = axes.split()
        shape = [sizes[name] for name in names]
        layers = len(MODEL.layer_groups[0].layer_ids)
        self.tensors = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(layers)]
        self.kv = PagedCache(MODEL, self.tensors, axes)
        self.ids = np.random.default_rng(1).permutation(2 * count)[:count].tolist()
        self.order = [["kv", "head", "block", "token", "dim"].index(name) for name in names]


def bench_pages(client: Client, report: Report) -> None:
    """Scatter and gather through shared memory against plain copies."""
    keys, chunks = make_chunks(client, CHUNKS, 1)
    client.put_chunks(chunks)
    ready = [_views(chunk) for chunk in chunks]
    size = chunk_bytes(chunks)
    for name, axes in (("nhd", "block kv token head dim"), ("hnd", "block kv head token dim")):
        pages = Pages(axes)
        get_s, plain_s = paired(
            partial(_get, client, keys, pages), partial(_index_copy, pages, ready), REPEATS
        )
        report.add(
            f"pages_get_{name}_vs_torch", plain_s / get_s,
            f"get_pages {size / get_s / 1e9:.2f} GB/s", f"torch {size / plain_s / 1e9:.2f} GB/s",
        )  # fmt: skip
        put_s, back_s = _bench_put(client, pages)
        report.add(
            f"pages_put_{name}_vs_torch", back_s / put_s,
            f"put_pages {size / put_s / 1e9:.2f} GB/s", f"torch {size / back_s / 1e9:.2f} GB/s",
        )  # fmt: skip


def _get(client: Client, keys: Sequence[ChunkKey], pages: Pages) -> None:
    assert client.get(keys=keys, out=pages.kv[pages.ids]).chunks == CHUNKS


def _bench_put(client: Client, pages: Pages) -> tuple[float, float]:
    """Seconds of a put, and of what torch does of it: blocks to contiguous tensors."""
    tokens = list(range(CHUNKS * TOKENS))
    put = partial(client.put, tokens, pages.kv[pages.ids])
    put_s = back_s = float("inf")
    for _ in range(REPEATS):
        put_s = min(put_s, best_s(put, 1))
        back_s = min(back_s, best_s(partial(_index_select, pages), 1))
        client.delete(tokens)
    return put_s, back_s


def _views(chunk: Chunk) -> list[torch.Tensor]:
    """K and V of each layer as one torch tensor (parts, heads, blocks, tokens, dim)."""
    blocks = TOKENS // BLOCK_TOKENS
    return [
        torch.from_numpy(np.stack([np.asarray(part) for part in parts]).view(np.int16)).view(
            2, 8, blocks, BLOCK_TOKENS, 128
        )
        for parts in chunk.tensors[0]
    ]


def _index_copy(pages: Pages, chunks: Sequence[Sequence[torch.Tensor]]) -> None:
    blocks = TOKENS // BLOCK_TOKENS
    for number, layers in enumerate(chunks):
        ids = torch.tensor(pages.ids[number * blocks : (number + 1) * blocks])
        for tensor, layer in zip(pages.tensors, layers, strict=True):
            tensor.view(torch.int16).index_copy_(0, ids, layer.permute(pages.order))


def _index_select(pages: Pages) -> None:
    blocks = TOKENS // BLOCK_TOKENS
    back = np.argsort(pages.order).tolist()
    for number in range(CHUNKS):
        ids = torch.tensor(pages.ids[number * blocks : (number + 1) * blocks])
        for tensor in pages.tensors:
            tensor.view(torch.int16)[ids].permute(back).contiguous()


def bench_layers(client: Client, keys: Sequence[ChunkKey], name: str, report: Report) -> None:
    """Time to the first layer, and to all of them, against a whole get."""
    out = [empty_tensors(KVLayout.of(MODEL, TOKENS)) for _ in keys]
    first_s = layered_s = whole_s = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        layers = iter(client.get_chunk_layers(keys, out))
        assert len(next(layers).tensors) == len(keys)
        first_s = min(first_s, time.perf_counter() - started)
        assert [len(layer.tensors) for layer in layers] == [len(keys)] * 7
        layered_s = min(layered_s, time.perf_counter() - started)
        whole_s = min(whole_s, best_s(lambda: client.get_chunks(keys, out), 1))
    report.add(
        f"first_layer_{name}_vs_get", first_s / whole_s, f"{1e3 * first_s:.2f} ms",
        f"get {1e3 * whole_s:.2f} ms; 1 of 8 layers is 0.125",
    )  # fmt: skip
    report.add(
        f"all_layers_{name}_vs_get", layered_s / whole_s, f"{1e3 * layered_s:.2f} ms",
        f"get {1e3 * whole_s:.2f} ms",
    )  # fmt: skip


def bench_disk(
    client: Client,
    keys: Sequence[ChunkKey],
    name: str,
    flood: Callable[[int], None],
    report: Report,
) -> None:
    """The same where every chunk has to come from disk first."""
    out = [empty_tensors(KVLayout.of(MODEL, TOKENS)) for _ in keys]
    first_s = whole_s = float("inf")
    for number in range(3):
        flood(2 * number)
        assert set(client.lookup(keys=keys).tiers) == {"disk"}
        started = time.perf_counter()
        layers = iter(client.get_chunk_layers(keys, out))
        next(layers)
        first_s = min(first_s, time.perf_counter() - started)
        assert len(list(layers)) == 7
        flood(2 * number + 1)
        whole_s = min(whole_s, best_s(lambda: client.get_chunks(keys, out), 1))
    report.add(
        f"first_layer_{name}_vs_get", first_s / whole_s, f"{1e3 * first_s:.2f} ms",
        f"get {1e3 * whole_s:.2f} ms",
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run everything and print it."""
    only_json = parse_flags(argv, __doc__ or "")
    torch.set_num_threads(1)  # its threads wait for each other where cores are shared
    report = Report("engine")
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        disk = Path(folder) / "disk"
        flags = ("--cpu", "300MiB", "--disk", f"3GiB:{disk}")
        with serving(*flags, disk=disk) as (address, _), connect(address, MODEL) as client:
            options = ClientOptions(deadline_ms=20_000, copy_threads=1)
            with Client(address, MODEL, options) as alone:
                bench_pages(alone, report)
            keys, chunks = make_chunks(client, CHUNKS, 2)
            client.put_chunks(chunks, durable=True)

            def flood(number: int) -> None:
                news, more = make_chunks(client, 40, 100 + number)
                client.put_chunks(more)
                client.delete(keys=news)

            options = ClientOptions(transport="grpc", deadline_ms=20_000)
            with Client(address, MODEL, options) as far:
                bench_layers(client, keys, "shm", report)
                bench_layers(far, keys, "grpc", report)
                bench_disk(client, keys, "shm_disk", flood, report)
                bench_disk(far, keys, "grpc_disk", flood, report)
    report.print(only_json=only_json)


if __name__ == "__main__":
    main()
