"""What surrounds a process: proxies in its environment, addresses, standard streams, signals."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from conftest import ProcessMaker
from helpers.credentials import KeyRing
from helpers.local_server import DEADLINE_MS, eventually
from helpers.prompts import SMALL, assert_reads, store

from kvstore.client import Access, Client, ClientOptions
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import UnauthenticatedError
from kvstore.proto.kvstore_pb2_grpc import KVStoreStub

WAIT_S = 60
SOURCES = Path(__file__).resolve().parents[2] / "src"
STATUS = (
    "import sys; from kvstore.cli.__main__ import main; main(['status', '--address', sys.argv[1]])"
)


def test_grpc_9989_a_proxy_in_the_environment_does_not_cut_anybody_off(
    server_process: ProcessMaker,
) -> None:
    """grpc#9989, #11896, #15942, #29718: gRPC sent even calls to the loopback to the proxy that
    ``http_proxy`` names, for the browsers of the host, and nothing answered any more."""
    server = server_process("--cpu", "16MiB", "--tiers", "cpu")
    server.start()
    nowhere = dict.fromkeys(
        ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"), "http://127.0.0.1:9"
    )
    named = subprocess.run(
        [sys.executable, "-c", STATUS, server.address],
        env={**os.environ, "PYTHONPATH": str(SOURCES), **nowhere, "no_proxy": ""},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (named.returncode, named.stderr) == (0, "")
    assert "serving" in named.stdout


@pytest.fixture
def on_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6")


def spawn(*flags: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """Start a server whose standard output is read here, or goes to *stdout*."""
    return subprocess.Popen(
        [sys.executable, "-m", "kvstore.server", "--socket", "off", "--cpu", "16MiB", *flags],
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_lmcache_4267_an_address_is_printed_as_clients_take_it(on_ipv6: None) -> None:
    """LMCache#4267, faup#70: the port of an IPv6 address could not be told from its end."""
    server = spawn("--tiers", "cpu", "--listen", "[::1]:0")
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        found = re.search(r"listening on (\[::1\]:\d+) ", line)
        assert found, line
        options = ClientOptions("grpc", chunk_tokens=16, deadline_ms=DEADLINE_MS)
        with Client(found[1], SMALL, options) as client:
            assert_reads(client, store(client, 1, 2))
        server.terminate()
        assert server.wait(WAIT_S) == 0
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize("flags", [(), ("--insecure",)], ids=["closed", "open"])
def test_lmcache_4267_a_name_that_does_not_resolve_is_said_so(flags: tuple[str, ...]) -> None:
    """The other half: of a misspelt name it was said that TLS was missing, or the port taken."""
    server = spawn("--tiers", "cpu", "--listen", "nosuch.invalid:7431", *flags)
    out, errors = server.communicate(timeout=WAIT_S)
    assert (server.returncode, out) == (2, "")
    assert "'nosuch.invalid' does not resolve" in errors
    assert "TLS" not in errors
    assert "taken" not in errors


def test_readers_of_the_output_may_go() -> None:
    """``kvstore-server | head -1``, and a log whose reader ended: BrokenPipeError as status 1 or in
    the calls that were to be logged."""
    server = spawn("--tiers", "cpu", "--listen", "127.0.0.1:0")
    assert server.stdout is not None
    assert server.stderr is not None
    line = server.stdout.readline()
    server.stdout.close()
    found = re.search(r"listening on (\S+) ", line)
    assert found, line
    server.stderr.close()
    nameless = pb.OpenSessionRequest(client="x" * 200)
    with grpc.insecure_channel(found[1]) as channel:
        for _ in range(2):  # each is logged
            with pytest.raises(grpc.RpcError) as refused:
                KVStoreStub(channel).OpenSession(nameless, timeout=DEADLINE_MS / 1000)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    server.terminate()
    assert server.wait(WAIT_S) == 0


def test_a_broken_pipe_is_no_failure_of_the_server() -> None:
    """The same with a log that is read: it has no traceback."""
    server = spawn("--tiers", "cpu", "--listen", "127.0.0.1:0", "--log-level", "error")
    assert server.stdout is not None
    assert server.stderr is not None
    server.stdout.readline()
    server.stdout.close()
    server.terminate()
    assert (server.wait(WAIT_S), server.stderr.read()) == (0, "")
    server.stderr.close()


def test_a_hangup_ends_no_server(server_process: ProcessMaker, tmp_path: Path) -> None:
    """SIGHUP has daemons read their settings again: here it ended the server undrained."""
    ring = KeyRing(tmp_path / "keys")
    first = ring.make("acme")
    server = server_process("--tiers", "cpu", "--cpu", "16MiB", "--auth-keys", str(ring.path))
    server.start()
    second = ring.make("acme")
    server.send_signal(signal.SIGHUP)

    def serves(token: str, seed: int) -> bool:
        access = Access(token=token)
        options = ClientOptions("grpc", chunk_tokens=16, deadline_ms=DEADLINE_MS, access=access)
        try:
            with Client(server.address, SMALL, options) as client:
                assert_reads(client, store(client, seed, 2))
        except UnauthenticatedError:
            return False
        return True

    assert serves(first, 1)
    assert eventually(lambda: serves(second, 2))
    server.send_signal(signal.SIGHUP)
    assert server.terminate() == 0
    assert "stopped clean=" in server.output
