"""Three servers on hosts of their own and the Redis Cluster that they share, all of it real."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from helpers.local_server import eventually
from helpers.networks import GATEWAY, address_of, hosts_apart
from helpers.prompts import SMALL
from helpers.redis_deployments import RedisCluster
from helpers.redis_process import TlsFiles
from helpers.server_process import ServerProcess

from kvstore.cli.server import fetch_status
from kvstore.client import Client, ClientOptions
from kvstore.client.server_state import ServerStatus
from kvstore.proto.types import ChunkKey
from kvstore.server.cluster.directory import Directory
from kvstore.server.cluster.membership import NodeAddress
from kvstore.server.settings.values import Limits
from kvstore.server.telemetry.metrics import Counters
from kvstore.tiers.redis_client import DIRECTORY_RIGHTS, TIER_RIGHTS, RedisClient

PREFIX = "fleet:"
PASSWORD = "between us"
TTL_MS = 1500
_PORT = 7420
_COMMON = (
    *("--tiers", "cpu,redis", "--cpu", "16MiB", "--socket", "off", "--insecure"),
    *("--directory", "--limits", f"directory_ttl_ms={TTL_MS}", "--redis-prefix", PREFIX),
    *("--redis-timeout-ms", "500", "--limits", "breaker_retry_ms=200", "--log-level", "warning"),
)


class Fleet:
    """Nodes 1 to 3 of ``hosts``, each in a network namespace, before one Redis Cluster.

    Redis speaks TLS alone, to a user with the rights that the documentation names.
    """

    hosts = ("kvhost1", "kvhost2", "kvhost3")

    def __init__(self, folder: Path, flags: Sequence[str]) -> None:
        tls = TlsFiles.make(folder, GATEWAY)
        self.redis = RedisCluster(folder, tls, GATEWAY)
        self.grant()
        self.url = self.redis.url.replace("://", f"://kvstore:{PASSWORD.replace(' ', '%20')}@")
        password = folder / "password"
        password.write_text(PASSWORD + "\n")
        access = (
            *("--redis", self.redis.url.partition("?")[0], "--redis-tls-ca", str(tls.ca)),
            *("--redis-username", "kvstore", "--redis-password-file", str(password)),
        )
        self.nodes = [
            self._node(folder / host, number, (*_COMMON, *access, *flags))
            for number, host in enumerate(self.hosts, 1)
        ]
        self._folder = folder

    def _node(self, folder: Path, number: int, flags: Sequence[str]) -> ServerProcess:
        folder.mkdir(mode=0o700)
        host = address_of(number)
        own = (
            *("--listen", f"{host}:{_PORT}", "--advertise", host, "--node-id", f"node{number}"),
            *("--bulk", f"{host}:7421"),
        )
        process = ServerProcess(folder, *flags, *own)
        process.launcher = ["ip", "netns", "exec", self.hosts[number - 1]]
        return process

    def grant(self) -> None:
        """Let the fleet's user in on every master."""
        words = [f"+{word}" for word in (*TIER_RIGHTS, *DIRECTORY_RIGHTS, "cluster|slots")]
        user = ("kvstore", "reset", "on", f">{PASSWORD}", f"~{PREFIX}*")
        for node in self.redis.nodes:
            node.command("ACL", "SETUSER", *user, *words)

    def address(self, number: int) -> str:
        """Return where node *number* listens."""
        return f"{address_of(number)}:{_PORT}"

    def client(self, number: int) -> Client:
        """Return a client of node *number*, from this side of the bridge."""
        return Client(self.address(number), SMALL, ClientOptions("grpc", 16, 5000))

    def status(self, number: int) -> ServerStatus:
        """Return the status of node *number*."""
        return fetch_status(self.address(number))

    def standing(self, number: int) -> str:
        """Return how node *number* stands in the directory; empty outside of it."""
        directory = self.status(number).directory
        return directory.standing if directory else ""

    def seen(self, number: int) -> set[str]:
        """Return whom node *number* sees in the directory."""
        directory = self.status(number).directory
        return {node.node_id for node in directory.nodes} if directory else set()

    def is_whole(self) -> bool:
        """Whether every node sees both others."""
        names = {"node1", "node2", "node3"}
        return all(self.seen(number) >= names - {f"node{number}"} for number in (1, 2, 3))

    def start(self) -> None:
        """Start all nodes and wait until they know each other."""
        for node in self.nodes:
            node.start()
        assert eventually(self.is_whole)

    def stop(self) -> None:
        """Kill everything."""
        for node in self.nodes:
            node.kill()
        self.redis.stop()

    @contextmanager
    def observer(self) -> Iterator[Directory]:
        """Take part in the directory as a node that serves nothing."""
        link = RedisClient("redis", self.url, 500, 4)
        me = NodeAddress("observer", time.time_ns(), "", f"{GATEWAY}:1")
        limits = Limits(directory_ttl_ms=TTL_MS, breaker_retry_ms=200)
        directory = Directory(link, me, PREFIX, limits, Counters())
        directory.start()
        try:
            yield directory
        finally:
            directory.close()


def holders(directory: Directory, keys: Sequence[ChunkKey]) -> list[set[str]]:
    """Return the names of those who hold each of *keys*."""
    found = directory.holders(list(keys), 1.0)
    return [{node.node_id for node in found.get(key, ())} for key in keys]


@contextmanager
def running(folder: Path, *flags: str) -> Iterator[Fleet]:
    """Start a fleet whose servers have further *flags*; skip where no namespaces may be made."""
    with ExitStack() as stack:
        stack.enter_context(hosts_apart(Fleet.hosts))
        fleet = Fleet(folder, flags)
        stack.callback(fleet.stop)
        fleet.start()
        yield fleet
