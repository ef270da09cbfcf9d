"""Load limits of a server: connections, lookups a second, goodput in overload; fault recovery.

Callers are threads of one process, so figures include both sides. Overload uses gRPC, where callers
are other machines: the server gets half of the cores and the callers the rest. Goodput with shared
cores is reported too.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import numpy as np

from bench.lib import ROOT
from bench.lib.processes import child
from bench.lib.report import Report, timed
from bench.lib.workload import TINY, connect, make_chunks, serving
from kvstore.cli.demo.demo import ServerChild
from kvstore.client import Client
from kvstore.client.options import TransportName
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import QuotaExceededError
from kvstore.proto.messages import as_message
from kvstore.proto.types import ROOT as FIRST
from kvstore.proto.types import ChunkInfo, ChunkKey, Component, DType, KVLayout, LayerKind
from kvstore.tiers.disk import DiskTier, file_bytes_for

IDLE, ACTIVE, KEYS = 1000, 64, 32
STEADY_PER_S, STEADY_S = 1000, 6.0
PEAK_CALLERS, PEAK_S = 16, 4.0
HEAVY_KEYS = 1024
"""Keys of a lookup that costs the server far more than its caller."""
OVERLOAD, OVERLOADS, OVERLOAD_S = 3, 5, 3.0
DEADLINES_S = {"overload_goodput": 1.0, "overload_goodput_half_s": 0.5}
SHARED_KEY = "overload_goodput_shared"
"""Goodput within a second while callers share the server's cores."""
SERVICE = "/kvstore.v1.KVStore/"


class Caller:
    """A bare gRPC connection with a session, for idle sessions and for overload."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self._lookup = self._method("Lookup")
        message = pb.OpenSessionRequest(representation=as_message(pb.Representation, TINY))
        reply = self._method("OpenSession")(message.SerializeToString(), timeout=60)
        self._session_id = pb.OpenSessionResponse.FromString(reply).session_id

    def _method(self, name: str) -> Any:
        return self._channel.unary_unary(SERVICE + name, None, None)

    def prepare(self, keys: Sequence[ChunkKey]) -> None:
        """Prepare a lookup of *keys*."""
        request = pb.LookupRequest(session_id=self._session_id)
        request.digests = b"".join(key[16:] for key in keys)
        self._request = request.SerializeToString()

    def begin(self, timeout_s: float, done: Callable[[bool], None]) -> None:
        """Start the lookup; *done* gets whether the reply came in time."""
        call = self._lookup.future(self._request, timeout=timeout_s)
        call.add_done_callback(lambda call: done(call.code() is grpc.StatusCode.OK))

    def look_up(self) -> bool:
        """Return whether the lookup succeeded."""
        return _succeeds(self._lookup, self._request)

    def is_alive(self) -> bool:
        """Whether the session still exists."""
        request = pb.HeartbeatRequest(session_id=self._session_id).SerializeToString()
        return _succeeds(self._method("Heartbeat"), request)

    def close(self) -> None:
        self._channel.close()


def _succeeds(method: Any, request: bytes) -> bool:
    try:
        method(request, timeout=20)
    except grpc.RpcError:
        return False
    return True


def measure_load(report: Report, _: Path) -> None:
    """Add ``idle_connections``, ``lookups_per_s`` and ``lookup_p99_ms`` (the latter two also as
    ``grpc_...``), and the keys of DEADLINES_S and SHARED_KEY.
    """
    with ExitStack() as stack:
        flags = ["--tiers", "cpu", "--cpu", "256MiB", "--max-sessions", "2048"]
        flags += ["--limits", "session_ttl_ms=600000"]
        address, pid = stack.enter_context(serving(*flags))
        with connect(address, TINY, transport="grpc") as client:
            keys, chunks = make_chunks(client, HEAVY_KEYS, seed=1)
            client.put_chunks(chunks)
        with ThreadPoolExecutor(32) as threads:
            idle = list(threads.map(Caller, [address] * IDLE))
        for one in idle:
            stack.callback(one.close)
        gc.freeze()  # collections would stop all thousand callers, which share this process
        stack.callback(gc.unfreeze)
        _lookups(report, "", address, "shm", keys[:KEYS])
        _lookups(report, "grpc_", address, "grpc", keys[:KEYS])
        _overload(report, address, keys, pid)
        alive = sum(one.is_alive() for one in idle)
        report.add("idle_connections", alive, f"live sessions of {IDLE}", "1000")


def _lookups(
    report: Report, prefix: str, address: str, transport: TransportName, keys: Sequence[ChunkKey]
) -> None:
    small = {"transport": transport, "staging_bytes": 1 << 20, "copy_threads": 1}
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(address, TINY, **small)) for _ in range(ACTIVE)]
        calls = [partial(_is_found, client, keys) for client in clients]
        _closed(calls, 1.0)
        times = _steady(calls, STEADY_PER_S, STEADY_S)
        most = _closed(calls, PEAK_S)
    p99_ms = float(np.percentile(times, 99)) if times else float("nan")
    text = f"{KEYS} keys, {len(times) / STEADY_S:.0f}/s, {ACTIVE} connections beside {IDLE} idle"
    report.add(f"{prefix}lookup_p99_ms", p99_ms, text, "50 at most")
    report.add(f"{prefix}lookups_per_s", most, "the same, closed loop", "1000")


def _is_found(client: Client, keys: Sequence[ChunkKey]) -> bool:
    """Whether a lookup found all; an overloaded server may refuse it."""
    try:
        return client.lookup(keys=keys).ready == len(keys)
    except QuotaExceededError:
        return False


def _steady(calls: Sequence[Callable[[], bool]], per_s: float, length_s: float) -> list[float]:
    """Call at a fixed rate; return the ms from each due time to the reply."""
    times: list[float] = []
    started = time.perf_counter() + 0.1

    def work(number: int) -> None:
        for turn in range(int(per_s * length_s / len(calls))):
            due = started + (turn * len(calls) + number) / per_s
            time.sleep(max(0.0, due - time.perf_counter()))
            if calls[number]():
                times.append(1000 * (time.perf_counter() - due))

    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(work, range(len(calls))))
    return times


def _closed(calls: Sequence[Callable[[], bool]], length_s: float) -> float:
    """Call in closed loops; return successful calls a second."""
    stop = time.perf_counter() + length_s

    def work(call: Callable[[], bool]) -> int:
        good = 0
        while time.perf_counter() < stop:
            good += call()
        return good

    with ThreadPoolExecutor(len(calls)) as pool:
        return sum(pool.map(work, calls)) / length_s


def _overload(report: Report, address: str, keys: Sequence[ChunkKey], pid: int) -> None:
    """Add the keys of DEADLINES_S and SHARED_KEY; *pid* is the server's."""
    with ExitStack() as stack:
        callers = [Caller(address) for _ in range(PEAK_CALLERS)]
        for caller in callers:
            stack.callback(caller.close)
            caller.prepare(keys)
        with _cores_apart(pid):
            for key, deadline_s in DEADLINES_S.items():
                _goodput(report, key, callers, deadline_s)
        _goodput(report, SHARED_KEY, callers, 1.0)


@contextmanager
def _cores_apart(pid: int) -> Iterator[None]:
    """Give half of the cores to process *pid*, the rest to this one; a single core is shared."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    try:
        if half:
            _keep_to(cores[:half], pid)
            _keep_to(cores[half:], os.getpid())
        yield
    finally:
        for process in (pid, os.getpid()):
            _keep_to(cores, process)


def _keep_to(cores: Sequence[int], pid: int) -> None:
    """Pin all threads of a process to *cores*; new threads inherit it."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread), cores)


def _goodput(report: Report, key: str, callers: Sequence[Caller], deadline_s: float) -> None:
    """Alternate closed loops with three times their rate, as the speed of the machine varies."""
    calls = [caller.look_up for caller in callers]
    _closed(calls, 1.0)
    shares, times_as_many, peaks = [], [], [_closed(calls, OVERLOAD_S)]
    for _ in range(OVERLOADS):
        per_s, good_per_s = _flood(callers, OVERLOAD * peaks[-1], deadline_s)
        peaks.append(_closed(calls, OVERLOAD_S))
        beside = (peaks[-2] + peaks[-1]) / 2
        shares.append(good_per_s / beside)
        times_as_many.append(per_s / beside)
    text = (
        f"of {median(peaks):.0f} lookups/s of {HEAVY_KEYS} keys, at {median(times_as_many):.1f} "
        f"times as many, within {deadline_s:g} s; {min(shares):.2f} to {max(shares):.2f}"
    )
    report.add(key, median(shares), text, "reported" if key == SHARED_KEY else "0.8 at least")


def _flood(callers: Sequence[Caller], rate: float, deadline_s: float) -> tuple[float, float]:
    """Call at *rate* without waiting; return calls and good replies a second.

    Replies count until the last call: later ones are not under overload.
    """
    sent, good, started = int(rate * OVERLOAD_S), [0], time.perf_counter()

    def done(is_good: bool) -> None:
        good[0] += is_good

    for turn in range(sent):
        time.sleep(max(0.0, started + turn / rate - time.perf_counter()))
        callers[turn % len(callers)].begin(deadline_s, done)
    length_s, replies = time.perf_counter() - started, good[0]
    time.sleep(deadline_s)
    return sent / length_s, replies / length_s


# --- faults: the soak, restarts with a full disk, and killed clients

MINUTES, DEATHS = 10.0, 5
FRAME_BYTES, HELD_CHUNKS = 256 << 10, 8192
SOAK_KEYS = (
    "wrong_bytes", "verified_reads", "memory_slope_percent_per_h", "get_deadline_overrun_ms",
)  # fmt: skip


def measure_faults(report: Report, folder: Path) -> None:
    """Add the soak's figures, ``restart_s_per_10gb`` and ``client_death_reclaim_s``."""
    _soak(report)
    _restart(report, folder)
    _deaths(report, folder)


def _soak(report: Report) -> None:
    soak = (sys.executable, "tests/faults/soak.py", "--minutes", str(MINUTES), "--seed", "1")
    done = subprocess.run(
        ["env", "PYTHONPATH=src:tests", *soak],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60 * MINUTES + 300,
    )  # fmt: skip
    try:
        figures = json.loads(done.stdout.splitlines()[-1])["soak"]
    except (ValueError, IndexError, KeyError):
        report.skip(SOAK_KEYS, f"the soak exited with {done.returncode}: {done.stderr[-200:]}")
        return
    text = f"{MINUTES:g} min, {figures['faults']} faults, {figures['client_kills']} kills"
    for key in SOAK_KEYS:
        report.add(key, figures[key], text)


def _restart(report: Report, folder: Path) -> None:
    """Time the start of a server with a full disk tier, minus that with an empty one."""
    size = HELD_CHUNKS * (FRAME_BYTES + 4096) + (64 << 20)
    times = []
    for name, chunks in (("none", 0), ("full", HELD_CHUNKS)):
        place = folder / name
        place.mkdir()
        _fill(place / "disk", size, chunks)
        flags = ["--tiers", "cpu,disk", "--cpu", "64MiB", "--disk", f"{size}:{place / 'disk'}"]
        server, starts = ServerChild(place, flags), []
        for _ in range(3):
            starts.append(timed(server.start))
            assert f"recovered_chunks={chunks}" in server.greeting
            server.kill()
        times.append(min(starts))
    text = f"{HELD_CHUNKS} chunks of 256 KiB recovered, beyond an empty start of {times[0]:.2f} s"
    each = (times[1] - times[0]) * 10e9 / (HELD_CHUNKS * FRAME_BYTES)
    report.add("restart_s_per_10gb", each, text, "5 at most")


def _fill(path: Path, size_bytes: int, chunks: int) -> None:
    """Seal chunks without writing bytes: a start reads none."""
    tier = DiskTier((path, size_bytes), file_bytes=file_bytes_for(size_bytes, 64 << 20))
    layout = KVLayout((Component(LayerKind.attention, DType.bfloat16, 1, 1, 8, 256),))
    for number in range(chunks):
        key = ChunkKey(os.urandom(32))
        reservation = tier.reserve(ChunkInfo(key, FIRST, layout, 0, FRAME_BYTES))
        tier.seal(reservation, durable=number == chunks - 1)
    tier.close()


HOLD = """
import sys, time
from bench.lib.workload import TINY, connect, keys_of

client = connect(sys.argv[1], TINY, transport="shm")
leases = [client.lease(keys=keys_of(client, 8, 1)) for _ in range(50)]
assert len(leases[0].get()) == 8
print("holding", flush=True)
time.sleep(600)
"""


def _deaths(report: Report, folder: Path) -> None:
    slowest = 0.0
    with (
        ServerChild(folder, ["--tiers", "cpu", "--cpu", "64MiB"]) as server,
        connect(server.address, TINY, transport="grpc") as client,
    ):
        client.put_chunks(make_chunks(client, 8, seed=1)[1])
        for _ in range(DEATHS):
            with child(sys.executable, "-c", HOLD, server.address) as (pid, line):
                assert line == "holding\n"
                os.kill(pid, signal.SIGKILL)
                started = time.perf_counter()
                while client.status().leases:
                    time.sleep(0.002)
                slowest = max(slowest, time.perf_counter() - started)
    text = f"the slowest of {DEATHS} killed clients with 50 leases each"
    report.add("client_death_reclaim_s", slowest, text, "2 at most")
