"""Drives one of LMCache's L2 adapters; runs with LMCache's own interpreter, by path.

``lmcache_adapter.py ADAPTER COUNT FOLDER`` stores COUNT objects of 256 KiB, flips one bit of each
file in FOLDER, loads them again, and prints as JSON how many were stored, how many came back as
loaded, how many of those are not what was stored, and what FOLDER holds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from lmcache.cli.commands.bench.l2_adapter_bench.data import (
    create_l1_memory_desc,
    make_memory_objects,
    make_object_keys,
    wait_eventfd,
)
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

OBJECT_BYTES = 256 << 10
TIMEOUT_S = 60.0


def flip_a_bit_of_each_file(folder: Path) -> None:
    """Damage what is stored: the last bit of each file."""
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)


def main(spec: str, count: int, folder: Path) -> None:
    """Store, damage, load, and say what came of it."""
    config = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[spec]))
    buffer = torch.empty(2 * count * OBJECT_BYTES, dtype=torch.uint8)
    desc = create_l1_memory_desc(buffer, 1)
    adapter = create_l2_adapter(config.adapters[0], l1_memory_desc=desc)
    keys = make_object_keys(count)
    stored = make_memory_objects(buffer, count, OBJECT_BYTES, 0, 1)
    loaded = make_memory_objects(buffer, count, OBJECT_BYTES, count * OBJECT_BYTES, 128)
    task = adapter.submit_store_task(keys, stored)
    wait_eventfd(adapter.get_store_event_fd(), TIMEOUT_S)
    is_stored = adapter.pop_completed_store_tasks()[task].is_successful()
    held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    flip_a_bit_of_each_file(folder)
    task = adapter.submit_load_task(keys, loaded)
    wait_eventfd(adapter.get_load_event_fd(), TIMEOUT_S)
    bitmap = adapter.query_load_result(task)
    hits = 0 if bitmap is None else bitmap.popcount()
    pairs = zip(stored, loaded, strict=True)
    wrong = sum(not torch.equal(one.raw_data, other.raw_data) for one, other in pairs)
    adapter.close()
    answer = {"stored": is_stored, "loaded": hits, "wrong": wrong, "held_bytes": held}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
