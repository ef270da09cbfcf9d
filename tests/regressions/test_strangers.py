"""Pain 11: whoever reaches a port runs code."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from conftest import ServerMaker
from helpers.bare_wire import wire_to
from helpers.local_server import LocalServer
from helpers.plain_engine import PlainEngine
from helpers.prompts import tokens

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError, KVStoreError
from kvstore.server.settings.settings import load_config

PROMPT = tokens(1, 64)


def pickled_mkdir(folder: Path) -> bytes:
    """What ``pickle.loads`` makes *folder* of: ``os.mkdir(folder)``, protocol 0."""
    return f"cposix\nmkdir\n(S'{folder}'\ntR.".encode()


def test_sglang_24618_no_bytes_of_a_stranger_are_unpickled(
    make_server: ServerMaker, tmp_path: Path
) -> None:
    """CVE-2025-32444, sglang#24618: ``pickle.loads`` on what came over a TCP socket of ZeroMQ ran
    whatever any host that reached it had written."""
    server = make_server("--bulk", "127.0.0.1:0", "--http", "127.0.0.1:0")
    engine = PlainEngine(server.connect("tcp"))
    assert engine.store(PROMPT) == 4
    bulk = server.node.bulk
    assert bulk is not None
    made = tmp_path / "made"
    payload = pickled_mkdir(made)
    bulk_port = int(bulk.address.rpartition(":")[2])
    for port in (server.node.port, server.node.http_port, bulk_port):
        with socket.create_connection(("127.0.0.1", port)) as link:
            link.sendall(payload)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.connect(str(server.config.socket_path_for(server.node.port)))
        link.sendall(payload)
    wire = wire_to(server)
    with pytest.raises(KVStoreError):
        wire.put(pb.PutRequest(frame_bytes=len(payload), data=payload))
    assert engine.load(PROMPT).stored_tokens == 64
    assert not made.exists()


@pytest.mark.parametrize(("path", "answer"), [("/run_script", "404"), ("/metrics", "405")])
def test_lmcache_5128_the_pages_take_nothing(
    make_server: ServerMaker, tmp_path: Path, path: str, answer: str
) -> None:
    """LMCache#5128: an HTTP endpoint ran the script that it was sent, without authentication, on
    all interfaces by default."""
    server = make_server("--http", "127.0.0.1:0")
    engine = PlainEngine(server.connect())
    assert engine.store(PROMPT) == 4
    made = tmp_path / "made"
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.node.http_port}{path}",
        f"import os; os.mkdir({str(made)!r})".encode(),
        method="POST",
    )
    with pytest.raises(urllib.error.HTTPError, match=answer) as caught:
        urllib.request.urlopen(request, timeout=20)
    caught.value.close()
    assert not made.exists()
    assert engine.load(PROMPT).stored_tokens == 64


def test_lmcache_5128_other_hosts_reach_nothing_unless_somebody_says_so(
    server: LocalServer,
) -> None:
    """The other half: by default only this host is listened to, and more has to be asked for."""
    assert load_config([]).listen.startswith("127.0.0.1:")
    assert load_config([]).http == "off"
    with pytest.raises(InvalidRequestError, match="listen"):
        load_config(["--listen", "0.0.0.0:7420"])
