"""A process of Mooncake Store; runs by path in Mooncake's environment.

``segment``: provides memory to the store until its input ends. ``client``: answers each line with
the seconds of one put and one get of an object, by the zero-copy calls on registered memory. Every
get is compared with the put.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time

from mooncake.store import MooncakeDistributedStore

LOCAL_BUFFER_BYTES = 64 << 20


def join(port: int, metadata: str, master: str, segment_bytes: int) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    result = store.setup(
        f"127.0.0.1:{port}", metadata, segment_bytes, LOCAL_BUFFER_BYTES, "tcp", "", master
    )
    if result:
        raise SystemExit(f"setup returned {result}")
    return store


def reply(values: dict[str, float]) -> None:
    print(json.dumps(values), flush=True)


def rounds(store: MooncakeDistributedStore, size: int) -> None:
    source = bytearray(os.urandom(size))
    target = bytearray(size)
    places = [ctypes.addressof((ctypes.c_char * size).from_buffer(b)) for b in (source, target)]
    for place in places:
        if store.register_buffer(place, size):
            raise SystemExit("register_buffer failed")
    reply({"ready": 1})
    for number, _ in enumerate(sys.stdin):
        key = f"bench-{number}"
        target[:] = bytes(size)
        started = time.perf_counter()
        put = store.put_from(key, places[0], size)
        between = time.perf_counter()
        got = store.get_into(key, places[1], size)
        ended = time.perf_counter()
        if put or got != size or target != source:
            raise SystemExit(f"put returned {put}, get {got}")
        reply({"store_s": between - started, "load_s": ended - between})


def main(task: str, port: str, metadata: str, master: str, size: str) -> None:
    """Run *task*; *size* is the segment's or the object's, in bytes."""
    if task == "segment":
        store = join(int(port), metadata, master, int(size))
        reply({"ready": 1})
        sys.stdin.read()
    else:
        store = join(int(port), metadata, master, 0)
        rounds(store, int(size))
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
