"""kvstore status, ping, sessions, events, scrub, drain, bench and codecs."""

from __future__ import annotations

import json
import socket
import threading
from itertools import count, islice

import numpy as np
import pytest
from conftest import ServerMaker
from helpers.disk_damage import flip_a_bit
from helpers.kvstore_command import Kvstore
from helpers.local_server import DEADLINE_MS, LocalServer
from helpers.prompts import SMALL, chunks_of, keys_of, store

from kvstore import __version__
from kvstore.cli import bench
from kvstore.cli import server as commands
from kvstore.cli.app import EXIT_NOT_HELD, EXIT_STORE, EXIT_USAGE, Shown, call, connected, show
from kvstore.cli.server import FAULTS, look_at, status_text, watch_status
from kvstore.client import Client, ClientOptions
from kvstore.client.server_state import ServerStatus, status_from_message
from kvstore.codecs.base import NAMES_BY_ID
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    DeadlineError,
    KVStoreError,
    ShuttingDownError,
    TierUnavailableError,
    UnknownCodecError,
)
from kvstore.server.telemetry.metrics import COUNTERS
from kvstore.tiers.disk import DiskTier


def used(server: LocalServer) -> None:
    client = server.connect("grpc")
    keys = store(client, 1, 6)
    client.lookup(keys=keys)
    client.lookup(keys=keys)


# --- status


def test_status_as_json_has_tiers_policies_ratios_and_counters(
    kvstore: Kvstore, make_server: ServerMaker
) -> None:
    server = make_server("--policy", "hit_density,disk=lru", "--tenant-quotas", "default=8MiB:1MiB")
    used(server)
    run = kvstore("status", server.address, "--json")
    assert run.status == 0
    status = json.loads(run.out)
    assert (status["state"], status["version"], status["sessions"]) == ("serving", __version__, 1)
    assert (status["hit_ratio"], status["ghosts"]) == (1.0, 0)
    assert status["counters"]["put_stored_chunks"] == 6
    cpu, disk = status["tiers"]
    assert (cpu["name"], cpu["chunks"], cpu["codec"], cpu["policy"]) == (
        "cpu", 6, "raw", "hit_density",
    )  # fmt: skip
    assert 0 < cpu["used_bytes"] < cpu["capacity_bytes"] <= 16 << 20
    assert (disk["state"], disk["reason"], disk["policy"]) == ("serving", "", "lru")
    partition = {one["name"]: one for one in cpu["partitions"]}["tenant default"]
    assert (partition["quota_bytes"], partition["guaranteed_bytes"]) == (8 << 20, 1 << 20)
    assert partition["used_bytes"] > 0


def test_status_is_one_screen_and_all_of_it_on_request(
    kvstore: Kvstore, server: LocalServer
) -> None:
    used(server)
    run = kvstore("status", server.address)
    lines = run.out.splitlines()
    assert (run.status, len(lines)) == (0, 7)
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"{server.address}: serving, version {__version__}, up ")
    assert lines[1].startswith("hit ratio 100.0%, ")
    assert lines[3] == "faults: none"
    assert lines[5].split()[0] == "cpu"
    assert "hit_density" in lines[5]
    everything = kvstore("status", server.address, "--all").out.splitlines()
    assert everything[4:7] == lines[4:7]
    assert set(COUNTERS) <= {line.split()[0] for line in everything}


def look(boot_id: int, uptime_s: float, **counters: int) -> ServerStatus:
    server = pb.Server(boot_id=boot_id)
    message = pb.StatusResponse(server=server, uptime_s=uptime_s, counters=counters)
    return status_from_message(message)


def test_rates_are_those_between_two_looks() -> None:
    first = look(1, 100.0, lookups=10, lookup_chunks=100, lookup_ready_chunks=50)
    then = look(1, 104.0, lookups=18, lookup_chunks=140, lookup_ready_chunks=80)
    rates = look_at("here", then, first)
    assert (rates["lookups_per_s"], rates["hit_ratio"], rates["counted_s"]) == (2.0, 0.75, 4.0)
    assert look_at("here", first)["lookups_per_s"] == 0.1
    again = look_at("here", look(2, 1.0, lookups=3), then)
    assert (again["lookups_per_s"], again["counted_s"]) == (3.0, 1.0), "it restarted"
    idle = look_at("here", then, then)
    assert (idle["lookups_per_s"], idle["hit_ratio"]) == (0.0, None)


def test_faults_curves_and_quotas_are_shown_where_there_are_any(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert set(FAULTS) <= set(COUNTERS)
    tier = pb.TierStatus(name="cpu", state="degraded", reason="slow", policy="marconi")
    tier.what_if.add(scale=2.0, hit_ratio=0.625)
    tier.partitions.add(name="tenant acme", used_bytes=1 << 20)
    counters = {"lookups": 1, "corrupt_chunks": 3}
    message = pb.StatusResponse(tiers=[tier], state="serving", counters=counters)
    found = look_at("here:1", status_from_message(message))
    show(Shown({}, status_text(found, everything=True)), as_json=False)
    out = capsys.readouterr().out
    assert "faults: tier cpu is degraded, corrupt_chunks 3\n" in out
    for word in ("marconi", "62.5%", "hits at 2x", "tenant acme", "degraded: slow"):
        assert word in out
    assert found["tiers"][0]["what_if"] == {"2": 0.625}


def test_watching_ends_with_the_key_that_interrupts(
    server: LocalServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def watched(*, as_json: bool) -> str:
        naps = iter([None, None, KeyboardInterrupt])

        def sleep(seconds: float) -> None:
            assert seconds == 0.5
            if (ends := next(naps)) is not None:
                raise ends

        watch_status(server.address, 0.5, everything=False, as_json=as_json, sleep=sleep)
        return capsys.readouterr().out

    rows = [json.loads(line) for line in watched(as_json=True).splitlines()]
    assert [row["state"] for row in rows] == ["serving"] * 3
    out = watched(as_json=False)
    assert out.count("(since the start)") == 1
    assert out.count("(last 0 s)") == 2, "one after another, as this is no terminal"


# --- ping and sessions


def test_ping_tells_a_server_that_serves_from_one_that_drains_or_is_not_there(
    kvstore: Kvstore, server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = kvstore("ping", server.address)
    assert (run.status, run.out.startswith(f"{server.address}: serving, ")) == (0, True)
    monkeypatch.setattr(DiskTier, "write_error", "slow")
    run = kvstore("ping", server.address, "--json")
    assert (run.status, json.loads(run.out)["degraded"]) == (1, ["disk"])
    monkeypatch.undo()
    server.node.sessions.drain()
    run = kvstore("ping", server.address)
    assert (run.status, ": draining, " in run.out) == (1, True)
    assert kvstore("ping", "127.0.0.1:1").status == 3


def test_a_server_that_is_late_with_one_thing_is_not_said_to_be_away(server: LocalServer) -> None:
    with pytest.raises(DeadlineError, match="late"), connected(server.address):
        raise DeadlineError("late")
    with pytest.raises(TierUnavailableError, match="tier 'redis'"), connected(server.address):
        raise TierUnavailableError("redis", "connection refused")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(KVStoreError, match="no kvstore-server responds"):
            call(address, "Status", 100)


def test_sessions_says_who_is_connected_for_which_model(
    kvstore: Kvstore, server: LocalServer
) -> None:
    assert kvstore("sessions", server.address).out == "no sessions\n"
    options = ClientOptions("grpc", 16, DEADLINE_MS, name="engine-7")
    with Client(server.address, SMALL, options) as client:
        keys = store(client, 1, 2)
        with client.lease(keys=keys):
            run = kvstore("sessions", server.address, "--json")
            (row,) = json.loads(run.out)["sessions"]
            text = kvstore("sessions", server.address).out
        namespace = client.namespace.hex()
    assert (row["client"], row["tenant"], row["owner"]) == ("engine-7", "default", "anybody")
    assert (row["model"], row["namespace"]) == (SMALL.model_id, namespace)
    assert (row["leases"], row["is_peer"]) == (1, False)
    assert 0 <= row["idle_s"] <= row["open_s"] < 60
    assert ("engine-7" in text, namespace in text) == (True, True)


# --- events


@pytest.mark.parametrize("named", [False, True])
def test_events_are_what_is_there_now_or_what_comes_and_goes(
    kvstore: Kvstore, server: LocalServer, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    client = server.connect("grpc")
    old = {key.hex() for key in store(client, 1, 3)}
    server.settled()
    at = ("--address", server.address, *(("--namespace", client.namespace.hex()[:8]) * named))
    run = kvstore("events", *at)
    assert run.status == 0
    assert {tuple(line.split()) for line in run.out.splitlines()} == {
        ("stored", tier, key) for key in old for tier in ("cpu", "disk")
    }
    find, done = commands._events, threading.Event()
    monkeypatch.setattr(commands, "_events", lambda *terms: islice(find(*terms), 4))

    def change() -> None:
        for seed in count(2):  # the follower may begin at any of them
            if done.wait(0.05):
                return
            client.delete(keys=store(client, seed, 1))

    thread = threading.Thread(target=change)
    thread.start()
    run = kvstore("events", "--follow", "--json", *at)
    done.set()
    thread.join()
    rows = [json.loads(line) for line in run.out.splitlines()]
    assert {row["key"] for row in rows}.isdisjoint(old)
    assert {row["event"] for row in rows} == {"stored", "removed"}


# --- scrub


def test_scrub_says_what_it_checked_and_fails_on_damage(
    kvstore: Kvstore, server: LocalServer
) -> None:
    keys = store(server.connect(), 1, 4)
    server.settled()
    status, out, _ = kvstore("scrub", server.address, "--json")
    assert (status, json.loads(out)["damaged_chunks"]) == (0, 0)
    flip_a_bit(server.config.disk[0].path, keys[1])
    status, out, _ = kvstore("scrub", server.address, "--tiers", "disk", "--json")
    assert status == 1
    assert (json.loads(out)["checked_chunks"], json.loads(out)["damaged_chunks"]) == (4, 1)
    status, out, _ = kvstore("scrub", server.address)
    assert (status, "3 of 3 chunks" in out) == (0, True)
    assert kvstore("scrub", server.address, "--rate", "much")[0] == 2


# --- bench and drain


def few(server: LocalServer, *more: str) -> tuple[str, ...]:
    return ("bench", "--address", server.address, "--chunks", "6", "--chunk-bytes", "20000", *more)


def test_all_that_was_put_comes_back_and_nothing_stays(
    server: LocalServer, kvstore: Kvstore
) -> None:
    for transport in ("auto", "grpc"):
        run = kvstore(*few(server, "--json", "--transport", transport))
        figures = json.loads(run.out)
        assert run.status == 0
        assert (figures["stored"], figures["right"], figures["held"]) == (6, 6, True)
        assert figures["put_s"] > 0 < figures["get_s"]
        assert server.settled().tiers[0][1].chunks == 0


def test_bytes_that_come_back_wrong_are_said(
    server: LocalServer, kvstore: Kvstore, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Client.get_chunks

    def wrong(self: Client, keys: list[bytes], out: list[list[list[list[np.ndarray]]]]) -> object:
        found = honest(self, keys, out)  # type: ignore[arg-type]
        out[2][0][0][1].view(np.uint16)[0, 0, 0] ^= 1
        return found

    monkeypatch.setattr(Client, "get_chunks", wrong)
    run = kvstore(*few(server))
    assert (run.status, "6 stored, 5 verified" in run.out) == (EXIT_NOT_HELD, True)


def test_what_cannot_be_run_is_refused_by_name(kvstore: Kvstore) -> None:
    for argv, named in (
        (("bench", "--chunks", "0"), "chunks"),
        (("bench", "--chunk-bytes", "3"), "chunk_bytes"),
        (("bench", "--transport", "pigeon"), "transport"),
        (("bench", "--chunks", "4096", "--chunk-bytes", 64 << 20), "chunks"),
        (("drain", "--within", "0"), "within"),
        (("codecs", "lossless:9", "raw"), "lossless:9"),
    ):
        run = kvstore(*argv)
        assert (run.status, run.out, named in run.err) == (EXIT_USAGE, "", True), argv


def test_a_drained_server_has_saved_all_and_takes_nothing(
    server: LocalServer, kvstore: Kvstore
) -> None:
    client = server.connect()
    keys = keys_of(client, 1, 3)
    client.put_chunks(chunks_of(client, keys))
    run = kvstore("drain", "--address", server.address)
    assert (run.status, "is on disk" in run.out) == (0, True)
    with pytest.raises(ShuttingDownError):
        client.put_chunks(chunks_of(client, keys_of(client, 2, 1)))
    assert client.lookup(keys=keys).ready == 3
    assert kvstore("drain", "--address", "127.0.0.1:1", "--within", "1").status == EXIT_STORE


# --- codecs


def test_the_figures_of_a_codec_are_printed_as_json_and_as_a_table(
    kvstore: Kvstore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = kvstore("codecs", "raw", "lossless", "--json")
    report = json.loads(run.out)
    assert (run.status, [row["codec"] for row in report["codecs"]]) == (0, ["raw", "lossless"])
    raw, packed = report["codecs"]
    assert (raw["accuracy"], raw["break_even_bytes_per_s"]) == ("exact", 0)
    assert packed["ratio"] > 1.2
    expected = packed["decode_bytes_per_s"] * (1 - 1 / packed["ratio"])
    assert packed["break_even_bytes_per_s"] == pytest.approx(expected, rel=1e-3)
    assert report["not_measured"] == {}
    monkeypatch.setattr(bench, "CODEC_BUDGET_S", 0.0)
    run = kvstore("codecs", "lossless", "raw")
    for word in ("lossless", "raw", "exact", "numpy", "even", "synthetic"):
        assert word in run.out


def test_a_codec_that_cannot_be_measured_is_named_with_the_reason(
    kvstore: Kvstore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str, *_: object) -> object:
        raise UnknownCodecError(name, "no tables for it")

    monkeypatch.setattr("kvstore.codecs.speed.measure", fail)
    run = kvstore("codecs", "--json")
    report = json.loads(run.out)
    assert (run.status, report["codecs"]) == (0, [])
    assert sorted(report["not_measured"]) == sorted(NAMES_BY_ID.values()), "as none is named"
    assert next(iter(report["not_measured"])) == "raw"
    assert "no tables" in report["not_measured"]["lossless"]
