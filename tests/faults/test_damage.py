"""Row 3: bytes of a tier are changed behind its back, in every way files and values can be."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from conftest import ServerMaker
from faults.oracle import verified
from helpers.disk_damage import frames_in
from helpers.local_server import LocalServer
from helpers.prompts import store
from helpers.redis_process import RedisProcess

from kvstore.client import Client
from kvstore.proto.types import ChunkKey

CHUNKS = 4
PROMPTS = 8
KINDS = ("flip", "torn", "zeros", "cut", "swapped")


def spoil_file(path: Path, places: list[tuple[int, int]], draw: random.Random, kind: str) -> None:
    """Damage the first frame of *places*; for ``swapped`` the second too."""
    offset, size = places[0]
    with path.open("r+b") as file:
        if kind == "swapped":
            other, other_size = places[1]
            file.seek(offset)
            one = file.read(min(size, other_size))
            file.seek(other)
            two = file.read(min(size, other_size))
            file.seek(offset)
            file.write(two)
            file.seek(other)
            file.write(one)
            return
        at = offset + draw.randrange(size)
        length = {"flip": 1, "torn": size, "zeros": 512, "cut": size}[kind]
        length = min(length, offset + size - at)
        file.seek(at)
        old = file.read(length)
        new = bytes([old[0] ^ 1 << draw.randrange(8)]) if kind == "flip" else bytes(length)
        if new == old:  # zeros over zeros are no damage
            new = bytes(b ^ 0x40 for b in old)
        file.seek(at)
        file.write(new)


def refilled(client: Client, server: LocalServer, seeds: range) -> list[list[ChunkKey]]:
    prompts = [store(client, seed, CHUNKS) for seed in seeds]
    server.settled()
    return prompts


def test_no_edit_of_a_disk_file_is_ever_a_hit_and_each_is_counted(
    make_server: ServerMaker, tmp_path: Path, amount: Callable[[int, int], int]
) -> None:
    server = make_server()
    client = server.connect("grpc")
    draw = random.Random(3)
    done = 0
    while done < amount(30, 10_000):
        seeds = range(PROMPTS * done, PROMPTS * (done + 1))
        prompts = refilled(client, server, seeds)
        spoilt: set[ChunkKey] = set()
        for path in (tmp_path / "disk" / "extents").iterdir():
            wanted = {key for keys in prompts for key in keys}
            places = {k: p for k, p in frames_in(path).items() if k in wanted}
            chosen = draw.sample(sorted(places), min(len(places), 5))
            for key in chosen:
                kind = draw.choice(KINDS)
                fresh = [k for k in places if k not in spoilt and k != key]
                if key in spoilt or (kind == "swapped" and not fresh):
                    continue
                two = [key, draw.choice(fresh)] if kind == "swapped" else [key]
                spoil_file(path, [places[k] for k in two], draw, kind)
                spoilt.update(two)
        before = server.counter("corrupt_chunks")
        for keys in prompts:
            server.leave_memory(keys)
            good = next((i for i, key in enumerate(keys) if key in spoilt), len(keys))
            assert verified(client, keys) == good
            for key in keys[good:]:
                assert verified(client, [key]) == (key not in spoilt)
        assert server.counter("corrupt_chunks") - before == len(spoilt)
        done += len(spoilt)
        server.settled()
        for keys in prompts:
            client.delete(keys=keys)
        again = store(client, seeds[0], CHUNKS)
        assert verified(client, again) == CHUNKS
        client.delete(keys=again)


def redis_edits(redis: RedisProcess, draw: random.Random, count: int) -> None:
    """Damage so many values, each in one of the ways a value can be."""
    for name in draw.sample(redis.names(), count):
        value = redis.value(name)
        at = draw.randrange(len(value))
        kind = draw.choice(["flip", "cut", "longer", "zeros", "gone", "another"])
        if kind == "flip":
            redis.client.setrange(name, at, bytes([value[at] ^ 1 << draw.randrange(8)]))
        elif kind == "cut":
            redis.client.set(name, value[:at])
        elif kind == "longer":
            redis.client.append(name, b"\0" * (at + 1))
        elif kind == "zeros":
            redis.client.set(name, bytes(len(value)))
        elif kind == "gone":
            redis.client.delete(name)
        else:
            redis.client.set(name, redis.value(draw.choice(redis.names())))


def test_no_edit_of_a_value_in_redis_is_ever_wrong_bytes(
    make_server: ServerMaker, own_redis: RedisProcess, amount: Callable[[int, int], int]
) -> None:
    own_redis.start()
    server = make_server(
        *("--tiers", "cpu,redis", "--redis", own_redis.url, "--redis-timeout-ms", "20000")
    )
    client = server.connect("grpc")
    draw = random.Random(4)
    done = read = 0
    while done < amount(30, 10_000):
        prompts = refilled(client, server, range(PROMPTS * done, PROMPTS * (done + 1)))
        redis_edits(own_redis, draw, 15)
        done += 15
        for keys in prompts:
            server.leave_memory(keys)
            for key in keys:
                read += verified(client, [key])
        seed = PROMPTS * done + 7_000_000
        assert verified(client, store(client, seed, CHUNKS)) == CHUNKS
        own_redis.client.flushall()
        for keys in prompts:
            client.delete(keys=keys)
    assert read
    assert server.counter("corrupt_chunks") + server.counter("lost_chunks")
