"""Three real servers of which one reads the others' memory: stopped, killed, started again."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from helpers.local_server import DEADLINE_MS, eventually
from helpers.prompts import MEDIUM, assert_reads, keys_of, store
from helpers.server_process import ServerProcess

from kvstore.client import Client, ClientOptions
from kvstore.proto.errors import TierUnavailableError
from kvstore.proto.types import ChunkKey

ProcessMaker = Callable[..., ServerProcess]
TIMEOUT_MS = 300
CHUNKS = 4


def started(server_process: ProcessMaker, *flags: str) -> ServerProcess:
    process = server_process(
        *("--tiers", "cpu", "--cpu", "32MiB", "--bulk", "127.0.0.1:0", "--workers", "4"),
        *("--limits", f"peer_timeout_ms={TIMEOUT_MS}", *flags),
    )
    process.start()
    return process


def client_of(process: ServerProcess) -> Client:
    options = ClientOptions("tcp", chunk_tokens=64, deadline_ms=DEADLINE_MS)
    return Client(process.address, MEDIUM, options)


def is_found(reader: Client, keys: list[ChunkKey]) -> bool:
    return reader.lookup(keys=keys).ready == len(keys)


def test_a_peer_that_is_stopped_or_killed_is_a_miss_in_time_and_a_hit_when_it_is_back(
    server_process: ProcessMaker,
) -> None:
    first, second = started(server_process), started(server_process)
    third = started(server_process, "--peers", f"{first.address},{second.address}")
    with client_of(first) as one, client_of(second) as other, client_of(third) as reader:
        # What each peer alone has: asked for until it was reached.
        for writer, seed in ((one, 1), (other, 2)):
            keys = store(writer, seed, CHUNKS)
            assert eventually(partial(is_found, reader, keys))
            assert_reads(reader, keys)
        ones, others = store(one, 3, CHUNKS), store(other, 4, CHUNKS)
        first.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        for seed in range(20):
            assert reader.lookup(keys=keys_of(reader, 100 + seed, 1)).ready == 0
        assert reader.lookup(keys=ones).ready == 0
        # A few wait for the peer that does not answer, until it is left alone.
        assert time.monotonic() - began < 8 * TIMEOUT_MS / 1000 + 5
        assert reader.lookup(keys=others).ready == CHUNKS
        assert_reads(reader, others)
        first.send_signal(signal.SIGCONT)
        assert eventually(partial(is_found, reader, ones))
        assert_reads(reader, ones)

        lost = store(other, 5, CHUNKS)
        assert reader.lookup(keys=lost).ready == CHUNKS
        other.close()  # gRPC would have the next client wait for this one's turn to try again
        second.kill()
        assert reader.get_chunks(lost) == []
        assert eventually(lambda: reader.lookup(keys=lost).ready == 0)
        second.start()
        with client_of(second) as again:

            def is_reached() -> bool:
                with suppress(TierUnavailableError):  # gRPC waits after what it was refused
                    return bool(again.namespace)
                return False

            assert eventually(is_reached)
            keys = store(again, 6, CHUNKS)
            assert eventually(partial(is_found, reader, keys))
            assert_reads(reader, keys)
