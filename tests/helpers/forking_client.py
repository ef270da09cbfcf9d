"""A program that uses a client on both sides of a fork; prints the errors as JSON.

``python tests/helpers/forking_client.py SCENARIO ADDRESS TRANSPORT``. It is its own process, as a
forked pytest would inherit the state of other tests.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, get_args

from helpers.prompts import SMALL, chunks_of, equal, tensors_of, tokens

from kvstore.client import AsyncClient, Chunk, Client, ClientOptions, PlannedChunk
from kvstore.client.connection import Connection
from kvstore.client.forks import GRACE_S
from kvstore.client.options import TransportName
from kvstore.codecs.base import ChunkTensors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import KVStoreError, LeaseExpiredError, QuotaExceededError
from kvstore.proto.types import ChunkKey

CHUNKS = 4
"""Chunks of a prompt."""
DEADLINE_MS = 20_000
STARTED_S = 60.0
SALT = " ".join(sys.argv[1:]).encode()
"""Salt of all keys, so that no run finds another's chunks."""
TINYLM = Path(__file__).parents[2] / "data" / "tinylm"


def options(transport: str) -> ClientOptions:
    assert transport in get_args(TransportName)
    return ClientOptions(transport, chunk_tokens=16, deadline_ms=DEADLINE_MS)  # type: ignore[arg-type]


def named(client: Client, seed: int) -> list[ChunkKey]:
    return client.keys(tokens(seed, CHUNKS * 16), (SALT,))


def prompt(client: Client, seed: int) -> tuple[list[ChunkKey], list[Chunk]]:
    keys = named(client, seed)
    return keys, chunks_of(client, keys)


def faults(keys: Sequence[ChunkKey], found: Sequence[ChunkTensors], what: str) -> list[str]:
    """Return the errors of the chunks that were read for *keys*."""
    errors = [
        f"{what}: chunk {number} is wrong"
        for number, (key, tensors) in enumerate(zip(keys, found, strict=False))
        if not equal(tensors, tensors_of(key, SMALL, 16))
    ]
    return errors + [f"{what}: {len(found)} of {len(keys)}"] * (len(found) != len(keys))


@contextmanager
def forked(work: Callable[[], list[str]], found: list[str]) -> Iterator[None]:
    """Run *work* in a child during the block; add its errors to *found*."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        result: list[str] | None = None
        try:
            result = work()
        finally:
            errors = [traceback.format_exc()] if result is None else result
            os.write(write, json.dumps(errors[:20]).encode())
            os._exit(0)
    os.close(write)
    yield
    with os.fdopen(read, "rb") as pipe:
        output = pipe.read()
    _, status = os.waitpid(child, 0)
    found += json.loads(output) if output else []
    found += [f"a child ended with status {status}"] * (status != 0)


class Both:
    """A client and an AsyncClient, made and used once before anything forks."""

    def __init__(self, address: str, transport: str) -> None:
        self.client = Client(address, SMALL, options(transport))
        self.other = AsyncClient(address, SMALL, options(transport))
        self.round_trip(range(1))

    def round_trip(self, seeds: Sequence[int]) -> list[str]:
        """Put, look up and get the prompts of *seeds* with both clients; return the errors."""
        ways: list[tuple[Any, Callable[[Any], Any], int]] = [
            (self.client, lambda done: done, 0), (self.other, asyncio.run, 500),
        ]  # fmt: skip
        found: list[str] = []
        for client, do, more in ways:
            for seed in (seed + more for seed in seeds):
                keys, chunks = prompt(self.client, seed)
                do(client.put_chunks(chunks))
                ready = do(client.lookup(keys=keys)).ready
                found += [f"{seed}: lookup found {ready}"] * (ready != CHUNKS)
                found += faults(keys, do(client.get_chunks(keys)), f"{seed}")
        return found


def twice(address: str, transport: str) -> list[str]:
    """Three processes put, look up and get; then a new client reads all."""
    both, found = Both(address, transport), list[str]()
    children = [partial(both.round_trip, range(start, start + 6)) for start in (10, 20)]
    with forked(children[0], found), forked(children[1], found):
        found += both.round_trip(range(30, 36))
    with Client(address, SMALL, options("grpc")) as fresh:
        for start in (10, 20, 30):
            for seed in [*range(start, start + 6), *range(start + 500, start + 506)]:
                keys = named(fresh, seed)
                found += faults(keys, fresh.get_chunks(keys), f"{seed} in the end")
    return found


def generations(address: str, transport: str) -> list[str]:
    """A grandchild, and children that close the client or exit normally."""
    both, found = Both(address, transport), list[str]()
    session_id = both.client._link.connected().session.terms.session_id

    def grandchild() -> list[str]:
        return both.round_trip(range(40, 42))

    def child() -> list[str]:
        found = both.round_trip(range(50, 52))
        with forked(grandchild, found):
            found += both.round_trip(range(60, 62))
        both.client.close()
        asyncio.run(both.other.close())
        return found

    def unused() -> list[str]:
        both.client.close()
        del both.other
        return []

    with forked(child, found), forked(unused, found):
        pass
    ending = os.fork()
    if not ending:
        both.round_trip(range(70, 71))
        sys.exit(0)  # runs the interpreter's shutdown
    status = os.waitpid(ending, 0)[1]
    found += [f"a child that ended by itself: {status}"] * (status != 0)
    found += both.round_trip(range(80, 82))
    now = both.client._link.connected().session
    if now.terms.session_id != session_id or now.heartbeat():
        found.append("the parent's session was ended")
    return found


class Beside:
    """Threads of the parent that run while it forks; ``found``: their errors."""

    def __init__(self, both: Both) -> None:
        self.both = both
        self.found: list[str] = []
        self.keys, chunks = prompt(both.client, 90)
        both.client.put_chunks(chunks)
        self.awaited, self.late = prompt(both.client, 91)
        both.client.announce_puts(self.awaited, within=60.0)
        self.is_following, self.has_event, self.stop = (threading.Event() for _ in range(3))
        works = (self.read, self.read, self.wait, self.follow)
        self.threads = [threading.Thread(target=self.tried, args=(work,)) for work in works]
        for thread in self.threads:
            thread.start()
        assert self.is_following.wait(STARTED_S)

    def tried(self, work: Callable[[], None]) -> None:
        try:
            work()
        except KVStoreError:
            self.found.append(traceback.format_exc())

    def read(self) -> None:
        while not self.stop.is_set():
            self.found += faults(self.keys, self.both.client.get_chunks(self.keys), "beside a fork")

    def wait(self) -> None:
        ready = self.both.other.sync.lookup(keys=self.awaited, wait=60.0).ready
        self.found += [f"the lookup that waited found {ready}"] * (ready != CHUNKS)

    def follow(self) -> None:
        with self.both.client.events() as stream:
            for page in stream:
                self.is_following.set()
                if any(event.key == self.awaited[0] for event in page.events):
                    self.has_event.set()
                    return

    def end(self) -> list[str]:
        self.stop.set()
        self.both.client.put_chunks(self.late)
        for thread in self.threads:
            thread.join(STARTED_S)
        return self.found + ["events were not received"] * (not self.has_event.is_set())


def busy(address: str, transport: str) -> list[str]:
    """The parent's threads read, wait for chunks and follow events during forks."""
    both, found = Both(address, transport), list[str]()
    beside = Beside(both)
    for start in (100, 110, 120):
        seeds = range(start, start + 2)
        with forked(partial(both.round_trip, seeds), found):
            pass
    return found + beside.end()


def held(address: str, transport: str) -> list[str]:
    """Leases and streams of the parent fail in a child and stay usable in the parent."""
    both, found = Both(address, transport), list[str]()
    client = both.client
    keys, chunks = prompt(client, 130)
    client.put_chunks(chunks)
    new_keys, new = prompt(client, 131)
    planned = [PlannedChunk(c.key, 16, parent=c.parent) for c in new]
    layer = [[chunk.tensors[0][0]] for chunk in new]
    lease, stream, put = client.lease(keys=keys), client.events(), client.put_chunk_layers(planned)
    next(stream)
    layers = client.get_chunk_layers(keys)
    next(layers)

    def child() -> list[str]:
        kept: list[str] = []
        tries: dict[str, Callable[[], Any]] = {
            "lease.get": lease.get,
            "lease.view": lambda: lease.view(0),
            "events": lambda: next(stream),
            "put.layer": lambda: put.layer(0, [parts[0] for parts in layer]),
            "put.commit": put.commit,
            "get_layers": lambda: next(layers),
        }
        for name, work in tries.items():
            try:
                work()
                kept.append(f"{name} worked in a child")
            except LeaseExpiredError:
                continue
        lease.release()
        stream.close()
        put.abandon()
        layers.close()
        return kept + both.round_trip(range(140, 141))

    with forked(child, found):
        pass
    found += faults(keys, lease.get(), "the parent's lease")
    lease.release()
    for number in (layer_id for group in SMALL.layer_groups for layer_id in group.layer_ids):
        put.layer(number, [chunk.tensors[0][number] for chunk in new])
    put.commit()
    found += faults(new_keys, client.get_chunks(new_keys), "the parent's put")
    next(stream)
    stream.close()
    with closing(layers):
        next(layers, None)
    return found


def work_of_child(client: Client, seed: int, result: Any) -> None:
    """The work of a process that multiprocessing started."""
    keys, chunks = prompt(client, seed)
    client.put_chunks(chunks)
    result.send(faults(keys, client.get_chunks(keys), f"{seed}"))


def methods(address: str, transport: str) -> list[str]:
    """A client is passed to processes of each multiprocessing start method."""
    both, found = Both(address, transport), list[str]()
    for seed, method in enumerate(("fork", "forkserver", "spawn"), 150):
        context: Any = multiprocessing.get_context(method)
        ours, theirs = context.Pipe()
        process = context.Process(target=work_of_child, args=(both.client, seed, theirs))
        process.start()
        found += both.round_trip(range(160, 161))
        found += ours.recv() if ours.poll(STARTED_S) else [f"{method}: no reply"]
        process.join()
        found += [f"{method}: {process.exitcode}"] * (process.exitcode != 0)
    return found


class Prompts:
    """A data set whose items the workers read from the store."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def __len__(self) -> int:
        return 24

    def __getitem__(self, seed: int) -> list[str]:
        keys = named(self.client, 200 + seed)
        return faults(keys, self.client.get_chunks(keys), f"item {seed}")


def loader(address: str, transport: str) -> list[str]:
    """A torch DataLoader with two workers, while the parent reads too."""
    from torch.utils.data import DataLoader

    both, found = Both(address, transport), list[str]()
    for seed in range(200, 224):
        both.client.put_chunks(prompt(both.client, seed)[1])
    data: Any = Prompts(both.client)
    batches: Any = DataLoader(data, batch_size=None, num_workers=2)
    for seed, item in enumerate(batches):
        found += item
        found += Prompts(both.client)[seed]
    return found


def make_engine(
    address: str, transport: str, **settings: Any
) -> tuple[Any, Any, Callable[[int], list[str]]]:
    """Return a transformers connector, its model, and a function that generates a prompt twice."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from kvstore.client.engines.transformers import TransformersConnector
    from kvstore.client.engines.transformers.identity import representation_of

    short: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    torch.set_num_threads(1)  # OpenMP's threads do not outlive a fork
    model: Any = AutoModelForCausalLM.from_pretrained(TINYLM, dtype="auto")
    representation = representation_of(model, AutoTokenizer.from_pretrained(TINYLM), "r1")
    engine = TransformersConnector(
        Client(address, representation, options(transport)), model, **settings
    )

    def run(seed: int) -> list[str]:
        ids = torch.tensor([tokens(seed, 64)]) % model.config.vocab_size
        plain = model.generate(ids, **short)
        hits = []
        for _ in range(2):
            generated = engine.generate(ids, GenerationConfig.from_dict(short), (SALT,))
            hits.append(generated.hit_tokens)
            if not torch.equal(generated.output.sequences, plain):
                return [f"{seed}: other tokens"]
        return [f"{seed}: hits {hits}"] * (hits[1] < 48)

    return engine, model, run


def connector(address: str, transport: str) -> list[str]:
    """Parent and child generate with one connector for transformers."""
    _, _, run = make_engine(address, transport)
    found = run(300)
    with forked(lambda: [*run(301), *run(300)], found):
        found += run(302)
    return found


def inside(address: str, transport: str) -> list[str]:
    """A child generates with a connector while threads of the parent are inside it: one copies to
    the host, and one reads the weights.
    """
    from kvstore.proto.device import HostDevice, Stream

    copies, reads, go = (threading.Event() for _ in range(3))

    def wait(thread: str, is_inside: threading.Event) -> None:
        if threading.current_thread().name == thread:
            is_inside.set()
            go.wait(STARTED_S)

    class SlowDevice(HostDevice):
        def current_stream(self) -> Stream:
            wait("copies", copies)
            return super().current_stream()

    engine, model, run = make_engine(address, transport, device=SlowDevice())
    parameters, found = model.parameters, list[str]()

    def slow_parameters(*args: Any) -> Any:
        wait("reads", reads)
        return parameters(*args)

    def child() -> list[str]:
        signal.alarm(int(STARTED_S) // 2)
        return run(311)

    model.parameters = slow_parameters
    works = {"copies": (run, 310, copies), "reads": (engine.load, [[1, 2, 3]], reads)}
    threads = []
    for name, (work, argument, is_inside) in works.items():
        threads.append(threading.Thread(target=work, args=(argument,), name=name))
        threads[-1].start()
        assert is_inside.wait(STARTED_S)
    with forked(child, found):
        go.set()
        for thread in threads:
            thread.join(STARTED_S)
    return found + run(312)


def dropped(address: str, transport: str) -> list[str]:
    """More clients are made and dropped than the server has sessions."""
    for seed in range(300):
        client = Client(address, SMALL, options(transport))
        assert client.namespace, seed
        del client
    until = time.monotonic() + STARTED_S
    while True:
        threads = sum(thread.name.startswith("kvstore") for thread in threading.enumerate())
        descriptors = len(os.listdir("/proc/self/fd"))
        if threads < 8 and descriptors < 64:
            return []
        if time.monotonic() > until:
            return [f"{threads} threads and {descriptors} descriptors stay"]
        time.sleep(0.02)


def kept(address: str, transport: str) -> list[str]:
    """One process keeps more clients than the server has sessions; another process reads."""
    clients, refusals = list[Client](), set[str]()
    for _ in range(300):
        clients.append(Client(address, SMALL, options(transport)))
        try:
            assert clients[-1].namespace
        except QuotaExceededError as error:
            refusals.add(str(error))
    context: Any = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work_of_child, args=(clients[0], 450, theirs))
    process.start()
    found = list(ours.recv()) if ours.poll(STARTED_S) else ["no reply from the other process"]
    process.join()
    for client in clients:
        client.close()
    words = ("one process with", "close some", "max_sessions=256")
    is_explained = refusals and all(word in one for one in refusals for word in words)
    return found + [f"refusals: {refusals}"] * (not is_explained)


def followed(address: str, transport: str) -> list[str]:
    """The process forks while it follows events, a stream that never ends."""
    client = Client(address, SMALL, options(transport))
    took_s = []
    with client.events() as stream:
        next(stream)
        for seed in range(410, 413):
            began = time.monotonic()
            child = os.fork() or os._exit(0)
            took_s.append(time.monotonic() - began)
            os.waitpid(child, 0)
            keys, chunks = prompt(client, seed)
            client.put_chunks(chunks)
            while not any(event.key == keys[0] for event in next(stream).events):
                pass
    return [f"forks took {took_s} s"] * (min(took_s) >= GRACE_S)


def late(address: str, transport: str) -> list[str]:
    """A fork waits for a call to a silent server; a lookup meanwhile has 300 ms."""
    limits = ClientOptions(transport, chunk_tokens=16, deadline_ms=300)  # type: ignore[arg-type]
    client = Client(address, SMALL, limits)
    keys = named(client, 400)
    client.lookup(keys=keys)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        other = Connection(f"127.0.0.1:{silent.getsockname()[1]}", 1)
        status = partial(other.call, "Status", pb.StatusRequest(), 2000, object)
        waiting = threading.Thread(target=lambda: suppressed(status))
        forking = threading.Thread(target=lambda: os.waitpid(os.fork() or os._exit(0), 0))
        for thread in (waiting, forking):
            thread.start()
            time.sleep(0.2)
        began = time.monotonic()
        suppressed(partial(client.lookup, keys=keys))
        took_s = time.monotonic() - began
        forks_still = forking.is_alive()
        for thread in (waiting, forking):
            thread.join()
    found = [] if forks_still else ["the fork ended before the lookup"]
    found += [f"a lookup of 300 ms took {took_s:.2f} s"] * (took_s > 0.8)
    return found + [f"then {left} were found" for left in [client.lookup(keys=keys).ready] if left]


def suppressed(work: Callable[[], Any]) -> None:
    with suppress(KVStoreError):
        work()


if __name__ == "__main__":
    scenario: Callable[[str, str], list[str]] = globals()[sys.argv[1]]
    print(json.dumps(scenario(*sys.argv[2:4])), flush=True)
    os._exit(0)  # closes all that is open
