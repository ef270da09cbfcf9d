"""A real Redis Cluster, and a master with a replica and a Sentinel, on the loopback."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from helpers.local_server import eventually
from helpers.redis_process import RedisProcess, TlsFiles

from kvstore.tiers.redis_connection import ConnectionOptions, Server, pack
from kvstore.tiers.redis_url import tls_context

_BUS_OFFSET = 10_000
SERVICE = "kvstore"


def _cluster_port() -> int:
    """Return a free port whose bus port is free too."""
    for port in range(21_000, 31_000):
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + _BUS_OFFSET))
            except OSError:
                continue
            return port
    raise RuntimeError("no free ports for a Redis Cluster")


class RedisCluster:
    """Three masters with a third of the slots each, and no replicas until one is added."""

    def __init__(self, folder: Path, tls: TlsFiles | None = None, host: str = "127.0.0.1") -> None:
        """*host*: an address of this machine for clients, besides the loopback."""
        self._folder = folder
        self._tls = tls
        self._host = host
        bound = () if host == "127.0.0.1" else ("--bind", "127.0.0.1", host)
        self._options = (
            *(*bound, "--protected-mode", "no"),
            *("--cluster-announce-ip", host),
            *(("--tls-cluster", "yes") if tls else ()),
            *("--cluster-enabled", "yes", "--cluster-node-timeout", "500"),
            *("--cluster-require-full-coverage", "no"),
            *("--repl-diskless-sync-delay", "0", "--cluster-replica-validity-factor", "0"),
        )
        self.nodes: list[RedisProcess] = []
        for _ in range(3):
            self._add()
        self._cli("create", *(f"{host}:{node.port}" for node in self.nodes))
        assert eventually(self.is_formed), "the Cluster did not form"

    @property
    def url(self) -> str:
        return _url("cluster", self.nodes[:3], "", self._tls, self._host)

    def _add(self) -> RedisProcess:
        port = _cluster_port()
        folder = self._folder / str(port)
        folder.mkdir(parents=True)
        node = RedisProcess(folder, *self._options, port=port, tls=self._tls)
        node.start()
        self.nodes.append(node)
        return node

    def _cli(self, *words: str) -> None:
        program = shutil.which("redis-cli")
        assert program is not None, "redis-cli is not on PATH: `make test` installs it"
        tls = ["--tls", "--cacert", str(self._tls.ca)] if self._tls else []
        command = [program, *tls, "--cluster", *words, "--cluster-yes"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)

    def is_formed(self) -> bool:
        """Whether every node knows all others, and all slots have a master."""
        known = b"cluster_known_nodes:%d\r" % len(self.nodes)
        states = [raw_reply(node, "CLUSTER", "INFO") for node in self.nodes]
        return all(b"cluster_state:ok" in state and known in state for state in states)

    def add_replica(self, master: RedisProcess) -> RedisProcess:
        """Start a replica of *master* and wait until it is synchronised."""
        replica = self._add()
        raw_reply(replica, "CLUSTER", "MEET", self._host, str(master.port))
        name = raw_reply(master, "CLUSTER", "MYID")
        assert eventually(lambda: name in raw_reply(replica, "CLUSTER", "NODES"))
        raw_reply(replica, "CLUSTER", "REPLICATE", name)
        assert eventually(lambda: _is_synchronised(replica) and self.is_formed())
        return replica

    def move_slot(self, name: bytes, target: RedisProcess) -> None:
        """Give the slot of *name*, in which there is nothing, to another master."""
        slot = str(raw_reply(target, "CLUSTER", "KEYSLOT", name))
        target_id = raw_reply(target, "CLUSTER", "MYID")
        for node in (target, self.holder_of(name)):
            raw_reply(node, "CLUSTER", "SETSLOT", slot, "NODE", target_id)

    def holder_of(self, name: bytes) -> RedisProcess:
        """Return the master that holds the slot of *name*."""
        slot = raw_reply(self.nodes[0], "CLUSTER", "KEYSLOT", name)
        (port,) = (
            row[2][1]
            for row in raw_reply(self.nodes[0], "CLUSTER", "SLOTS")
            if row[0] <= slot <= row[1]
        )
        return next(node for node in self.nodes if node.port == port)

    def reset(self) -> None:
        for node in self.nodes:
            node.client.flushall()

    def names(self) -> list[bytes]:
        return sorted(name for node in self.nodes for name in node.names())

    def stop(self) -> None:
        _stop(self.nodes)


class SentinelSetup:
    """A master, its replica and one Sentinel that watches them."""

    def __init__(self, folder: Path, tls: TlsFiles | None = None) -> None:
        folders = [folder / name for name in ("master", "replica", "sentinel")]
        for place in folders:
            place.mkdir(parents=True)
        quick = ("--repl-diskless-sync-delay", "0")
        self.master = RedisProcess(folders[0], *quick, tls=tls)
        self.master.start()
        primary = ("127.0.0.1", str(self.master.port))
        follow = ("--replicaof", " ".join(primary))
        self.replica = RedisProcess(folders[1], *quick, *follow, tls=tls)
        self.replica.start()
        assert eventually(lambda: _is_synchronised(self.replica))
        settings = folders[2] / "sentinel.conf"
        settings.write_text(
            f"sentinel monitor {SERVICE} {' '.join(primary)} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} 400\n"
            f"sentinel failover-timeout {SERVICE} 4000\n"
        )
        self.sentinel = RedisProcess(folders[2], watching=settings, tls=tls)
        self.sentinel.start()
        assert eventually(lambda: b"slave" in repr(self._ask("REPLICAS")).encode())
        self.url = _url("sentinel", [self.sentinel], f"/{SERVICE}?db=0", tls)

    def _ask(self, question: str) -> Any:
        return raw_reply(self.sentinel, "SENTINEL", question, SERVICE)

    def master_port(self) -> int:
        return int(self._ask("GET-MASTER-ADDR-BY-NAME")[1])

    def reset(self) -> None:
        self.master.client.flushall()

    def stop(self) -> None:
        _stop([self.sentinel, self.replica, self.master])


def _url(
    kind: str,
    nodes: Sequence[RedisProcess],
    path: str,
    tls: TlsFiles | None,
    host: str = "127.0.0.1",
) -> str:
    hosts = ",".join(f"{host}:{node.port}" for node in nodes)
    if tls is None:
        return f"redis+{kind}://{hosts}{path}"
    return f"rediss+{kind}://{hosts}{path}{'&' if '?' in path else '?'}ssl_ca_certs={tls.ca}"


def raw_reply(node: RedisProcess, *words: str | bytes) -> Any:
    """Return the raw reply to one command."""
    context = tls_context((("ssl_ca_certs", str(node.tls.ca)),)) if node.tls else None
    address, options = ("127.0.0.1", node.port), ConnectionOptions(10.0, 1, tls=context)
    deadline = time.monotonic() + 10
    with (
        closing(Server(address, options, time.monotonic)) as server,
        server.connection(deadline) as link,
    ):
        link.send(pack([word.encode() if isinstance(word, str) else word for word in words]))
        (reply,) = link.read_replies(1, 1 << 20)
    if isinstance(reply, Exception):
        raise reply
    return reply


def _is_synchronised(replica: RedisProcess) -> bool:
    return replica.client.info("replication").get("master_link_status") == "up"


def _stop(nodes: Sequence[RedisProcess]) -> None:
    for node in nodes:
        node.client.close()
        node.stop()
