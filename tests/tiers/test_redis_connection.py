"""The parser of what Redis answers, the addresses it may have, who is trusted, how far it is."""

from __future__ import annotations

import select
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from contracts.chunks import make_info, payload
from contracts.shelf import assert_holds, get, put
from helpers.credentials import Authority
from helpers.local_server import eventually
from helpers.redis_deployments import RedisCluster, SentinelSetup
from helpers.redis_process import RedisProcess, TlsFiles
from helpers.redis_relay import replying
from hypothesis import given
from hypothesis import strategies as st
from redis import exceptions as errors
from structlog.testing import capture_logs

from kvstore.proto.errors import InvalidRequestError, TierUnavailableError
from kvstore.server.cluster.directory import Directory
from kvstore.server.cluster.membership import NodeAddress
from kvstore.server.settings.values import Limits
from kvstore.server.telemetry.metrics import Counters
from kvstore.tiers.redis import RedisTier, check_health
from kvstore.tiers.redis_client import DIRECTORY_RIGHTS, TIER_RIGHTS, RedisClient
from kvstore.tiers.redis_connection import (
    FAR_S,
    FAR_WINDOW,
    WINDOW,
    ConnectionOptions,
    DeadlineSocket,
    LoadingError,
    RedisConnection,
    Reply,
    Server,
    SlotLostError,
    WrongTypeError,
    pack,
)
from kvstore.tiers.redis_url import MAX_HOSTS, Login, parse_redis_url, tls_context

_REPLIES = st.recursive(
    st.none() | st.integers(-(1 << 62), 1 << 62) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


def _said(reply: Reply) -> bytes:
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    assert isinstance(reply, list)
    return b"*%d\r\n" % len(reply) + b"".join(map(_said, reply))


def _depth(reply: Reply) -> int:
    return 1 + max(map(_depth, reply), default=0) if isinstance(reply, list) else 0


def read_replies(count: int, *pieces: bytes) -> list[Reply]:
    """Read *count* replies that come in *pieces*, after which the server hangs up."""
    return replying(*pieces).read_replies(count, 1 << 22)


@given(
    st.lists(_REPLIES.filter(lambda reply: _depth(reply) <= 6), min_size=1, max_size=3), st.data()
)
def test_replies_are_read_however_they_are_cut_and_not_before_they_are_whole(
    replies: list[Reply], data: st.DataObject
) -> None:
    said = b"".join(map(_said, replies))
    cuts = sorted(data.draw(st.lists(st.integers(1, len(said) - 1), max_size=4, unique=True)))
    pieces = [said[start:stop] for start, stop in pairwise([0, *cuts, len(said)])]
    assert read_replies(len(replies), *pieces) == replies
    with pytest.raises(errors.ConnectionError):
        read_replies(len(replies), *pieces[:-1], pieces[-1][:-1])
    with pytest.raises(errors.InvalidResponse, match="more replies than commands"):
        read_replies(len(replies), *pieces[:-1], pieces[-1] + b"+")


def test_more_than_the_limit_is_refused_however_it_comes() -> None:
    with pytest.raises(errors.InvalidResponse, match="exceeds its size limit"):
        read_replies(1, b"*100000\r\n", *[b"$1000\r\n" + bytes(1000) + b"\r\n"] * 5000)


BEYOND = [
    b"$9223372036854775807\r\n", b"$%b\r\n" % (b"9" * 5000), b"$\r\n", b"*1\r\n" * 4000,
    b":one\r\n", b"$2\r\nabc\r\n", b"HTTP/1.1 400\r\n", b"\0\r\n", b"-MOVED nowhere\r\n",
]  # fmt: skip


def test_replies_beyond_the_protocol_or_its_limits_are_refused() -> None:
    for said in BEYOND:
        with pytest.raises(errors.InvalidResponse):
            read_replies(1, said)


def test_what_is_announced_takes_no_memory_before_it_comes() -> None:
    for said in (b"$9000000\r\n", b"*2147483647\r\n", b"+" + b"x" * 30_000):
        with pytest.raises(errors.ConnectionError):
            read_replies(1, said)
        tracemalloc.start()
        try:
            with pytest.raises(errors.InvalidResponse):
                read_replies(1, said, *[b"$1000\r\n" + bytes(1000) + b"\r\n"] * 5000)
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()


def test_errors_are_known_by_their_first_word() -> None:
    lines: list[tuple[bytes, type, str]] = [
        (b"-WRONGTYPE Operation", WrongTypeError, "Operation"),
        (b"-LOADING Redis", LoadingError, "Redis"),
        (b"-OOM command not allowed", errors.OutOfMemoryError, "command not allowed"),
        (b"-NOPERM this user", errors.NoPermissionError, "this user"),
        (b"-WRONGPASS invalid", errors.AuthenticationError, "invalid"),
        (b"-READONLY You", errors.ReadOnlyError, "You"),
        (b"-MOVED 1 127.0.0.1:7000", errors.MovedError, "1 127.0.0.1:7000"),
        (b"-ASK 1 127.0.0.1:7000", errors.AskError, "1 127.0.0.1:7000"),
        (b"-CLUSTERDOWN The cluster is down", errors.ClusterDownError, "The cluster is down"),
        (b"-CLUSTERDOWN Hash slot not served", SlotLostError, "CLUSTERDOWN Hash slot not served"),
        (b"-ERR unknown", errors.ResponseError, "unknown"),
        (b"-", errors.ResponseError, ""),
        (b"-\xff", errors.ResponseError, "\ufffd"),
    ]
    for line, kind, text in lines:
        try:
            (error,) = read_replies(1, line + b"\r\n")
        except errors.AuthenticationError as refused:  # nothing comes after it
            error = refused
        assert type(error) is kind
        assert str(error) == text


@pytest.mark.parametrize("room_bytes", [0, 100])
def test_an_error_in_place_of_a_value_is_read_whole_however_it_comes(room_bytes: int) -> None:
    kinds: dict[bytes, type[Exception]] = {
        b"-ASK 3999 127.0.0.1:7001\r\n": errors.AskError,
        b"-MOVED 3999 127.0.0.1:7001\r\n": errors.MovedError,
        b"-MOVED nowhere\r\n": errors.ResponseError,
    }
    for line, cut in [(each, cut) for each in kinds for cut in range(1, len(each))]:
        connection = replying(line[:cut], line[cut:])
        with pytest.raises(kinds[line]) as raised:
            connection.receive(b"$100\r\n", memoryview(bytearray(room_bytes)))
        assert getattr(raised.value, "port", 7001) == 7001


def test_an_error_that_breaks_off_is_a_lost_connection() -> None:
    for line in (b"-MOVED 39", b"-" + b"x" * 50):
        with pytest.raises(errors.ConnectionError):
            replying(line).receive(b"$100\r\n", memoryview(bytearray(0)))


def test_commands_are_packed_with_views_as_they_are() -> None:
    view = memoryview(b"payload")
    packed = pack((b"SET", b"name", view, b"EX", 60))
    assert packed[1] is view
    assert b"".join(packed) == (
        b"*5\r\n$3\r\nSET\r\n$4\r\nname\r\n$7\r\npayload\r\n$2\r\nEX\r\n$2\r\n60\r\n"
    )
    assert pack((b"PING",)) == [b"*1\r\n$4\r\nPING\r\n"]


def test_urls_name_one_server_a_service_of_sentinels_or_a_cluster() -> None:
    one = parse_redis_url("redis://u:p%40ss@[::1]:7000/3")
    assert (one.mode, one.hosts, one.database) == ("single", (("::1", 7000),), 3)
    assert (one.login.username, one.login.password, one.tls) == ("u", "p@ss", None)
    assert one.shown == "redis://[::1]:7000/3"
    watched = parse_redis_url("rediss+sentinel://:p@a,b:5/main?db=2&sentinel_password=q%2Fr")
    assert (watched.mode, watched.service, watched.database) == ("sentinel", "main", 2)
    assert watched.hosts == (("a", 26379), ("b", 5))
    assert watched.sentinel_login.password == "q/r"
    assert watched.tls == ()
    assert (watched.login.password, watched.sentinel_login.password) == ("p", "q/r")
    assert watched.shown == "rediss+sentinel://a:26379,b:5/main?db=2"
    spread = parse_redis_url("redis+cluster://a:1,b")
    assert (spread.mode, spread.hosts) == ("cluster", (("a", 1), ("b", 6379)))


def test_urls_that_name_nothing_are_refused() -> None:
    for url in (
        "redis://a,b",
        "redis://a:0",
        "redis://a:65536",
        "redis://a:1:2",
        "redis://a?db=1&db=2",
        "redis://a?ssl_ca_certs=/x",
        "redis+cluster://a/1",
        "redis+cluster://a?db=1",
        "redis+cluster://a,,b",
        "redis+cluster://" + ",".join(["a"] * (MAX_HOSTS + 1)),
        "redis+sentinel://a",
        "redis+sentinel://a/",
        "redis+sentinel://a/x y",
        "redis+sentinel://a/main/2",
        "redis+other://a",
        "sentinel://a/main",
    ):
        with pytest.raises(InvalidRequestError, match="give redis://"):
            parse_redis_url(url)


def test_options_of_tls_that_cannot_be_used_are_refused() -> None:
    for option in (
        ("ssl_cert_reqs", "optional"),
        ("ssl_check_hostname", "maybe"),
        ("ssl_ca_certs", "/nowhere/at/all"),
        ("ssl_certfile", "/nowhere/at/all"),
    ):
        with pytest.raises(InvalidRequestError, match="redis url"):
            tls_context((option,))


def test_a_server_that_is_far_has_more_on_its_way_and_one_that_proves_near_has_not(
    redis: RedisProcess,
) -> None:
    seconds, wait_s = 0.0, 2 * FAR_S

    def clock() -> float:
        nonlocal seconds
        seconds += wait_s
        return seconds

    with closing(Server(("127.0.0.1", redis.port), ConnectionOptions(1.0, 4), clock)) as server:

        def ping() -> None:
            with server.connection(1.0) as connection:
                connection.send(pack((b"PING",)))
                assert connection.read_replies(1, 99) == [b"PONG"]

        ping()
        assert server.window == FAR_WINDOW
        wait_s = 0.0
        ping()
        wait_s = 2 * FAR_S  # it waited for a processor
        ping()
        assert server.window == WINDOW


@pytest.mark.parametrize(("late_s", "is_taken"), [(0.05, True), (0.5, False)])
def test_what_came_in_time_is_read_only_a_little_after_the_deadline(
    redis: RedisProcess, late_s: float, is_taken: bool
) -> None:
    now = 0.0
    options = ConnectionOptions(1.0, 1)
    connection = RedisConnection(("127.0.0.1", redis.port), options, lambda: now)
    connection.open(1.0)
    connection.send(pack((b"PING",)))
    assert select.select([connection.link], [], [], 5)[0]
    now = 1.0 + late_s
    if is_taken:
        assert connection.read_replies(1, 100) == [b"PONG"]
    else:
        with pytest.raises(errors.TimeoutError):
            connection.read_replies(1, 100)
    connection.disconnect()  # type: ignore[no-untyped-call]


@pytest.fixture
def full_port() -> Iterator[int]:
    """A port whose queue is full: to connect to it takes forever."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        time.sleep(0.05)
        yield listener.getsockname()[1]


def resolve_to(monkeypatch: pytest.MonkeyPatch, *ports: int) -> None:
    """Let every name have one address for each of *ports*."""
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", port))
        for port in ports
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


def assert_answers() -> None:
    """Fail unless a connection to the name that ``resolve_to`` resolves opens and answers."""
    connection = RedisConnection(("redis", 1), ConnectionOptions(1.0, 1), time.monotonic)
    connection.open(time.monotonic() + 1.0)
    connection.send(pack((b"PING",)))
    assert connection.read_replies(1, 100) == [b"PONG"]
    connection.disconnect()  # type: ignore[no-untyped-call]


def test_all_addresses_of_a_host_together_have_the_time_of_one_call(
    monkeypatch: pytest.MonkeyPatch, full_port: int
) -> None:
    resolve_to(monkeypatch, *[full_port] * 5)
    connection = RedisConnection(("redis", 1), ConnectionOptions(0.3, 1), time.monotonic)
    started = time.monotonic()
    with pytest.raises(errors.TimeoutError):
        connection.open(started + 0.3)
    assert 0.2 < time.monotonic() - started < 0.8


def test_address_that_does_not_answer_leaves_time_for_the_next(
    redis: RedisProcess, monkeypatch: pytest.MonkeyPatch, full_port: int
) -> None:
    resolve_to(monkeypatch, full_port, redis.port)
    assert_answers()


def test_an_address_of_a_family_that_the_host_lacks_is_passed_over(
    redis: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_to(monkeypatch, redis.port)
    (known,) = socket.getaddrinfo("redis", 1)
    found = [(socket.AF_APPLETALK, *known[1:]), known]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert_answers()


def test_a_server_that_resets_the_handshake_leaves_no_socket_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[DeadlineSocket] = []
    connect = RedisConnection._connect

    def noted(connection: RedisConnection) -> DeadlineSocket:
        opened.append(connect(connection))
        return opened[-1]

    def reset() -> None:
        far, _ = listener.accept()
        with far:
            far.recv(1)  # the rest is unread, so that closing resets

    monkeypatch.setattr(RedisConnection, "_connect", noted)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        options = ConnectionOptions(1.0, 1, Login("", "secret"))
        server = Server(listener.getsockname(), options, time.monotonic)
        thread = threading.Thread(target=reset)
        thread.start()
        with pytest.raises(ConnectionResetError), server.connection(time.monotonic() + 1.0):
            pass
        thread.join()
    assert [link.fileno() for link in opened] == [-1]


RedisTierMaker = Callable[..., RedisTier]

PREFIX = "team:kv:"
PASSWORD = "p@ss/w:rd"
RIGHTS = [f"+{word}" for word in (*TIER_RIGHTS, *DIRECTORY_RIGHTS, "cluster|slots")]


class Single:
    """One server, as the other deployments are made."""

    def __init__(self, folder: Path, tls: TlsFiles) -> None:
        self.nodes = [RedisProcess(folder, tls=tls)]
        self.nodes[0].start()
        self.url = self.nodes[0].url
        self.reset = self.nodes[0].reset

    def stop(self) -> None:
        self.nodes[0].client.close()
        self.nodes[0].stop()


Deployment = Single | SentinelSetup | RedisCluster
KINDS: dict[str, Callable[[Path, TlsFiles], Deployment]] = {
    "single": Single,
    "sentinel": SentinelSetup,
    "cluster": RedisCluster,
}


@pytest.fixture(scope="module", params=sorted(KINDS))
def deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """A deployment of each kind that speaks TLS alone and has a user with few rights."""
    folder = tmp_path_factory.mktemp(request.param)
    made = KINDS[request.param](folder, TlsFiles.make(folder))
    for node in servers(made):
        grant(node, RIGHTS)
    yield made
    made.stop()


def servers(deployment: Deployment) -> list[RedisProcess]:
    if isinstance(deployment, SentinelSetup):
        return [deployment.master, deployment.replica]
    return deployment.nodes


def grant(node: RedisProcess, rights: list[str]) -> None:
    words = ["ACL", "SETUSER", "kvstore", "reset", "on", f">{PASSWORD}", f"~{PREFIX}*", *rights]
    node.command(*words)


def as_user(url: str, password: str = "p%40ss%2Fw%3Ard") -> str:
    return url.replace("://", f"://kvstore:{password}@", 1)


def failure_of(tier: RedisTier) -> str:
    with pytest.raises(TierUnavailableError) as caught:
        tier.find([make_info(1, 1).key])
    return str(caught.value)


def test_user_with_few_rights_and_a_prefix_of_its_own_keeps_chunks_over_tls(
    deployment: Deployment, open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(as_user(deployment.url), prefix=PREFIX)
    infos = [make_info(seed, 10_000) for seed in range(8)]
    for info in infos:
        assert put(tier, info, payload(1, info.size_bytes))
    other = open_redis_tier(as_user(deployment.url), prefix=PREFIX)
    assert other.find([info.key for info in infos]) == infos
    assert_holds(other, infos[3], payload(1, 10_000))
    assert {info.key for info in other.scan()} == {info.key for info in infos}
    assert other.delete(infos[0].key)
    assert get(tier, infos[0]) is None
    elsewhere = open_redis_tier(as_user(deployment.url), prefix="other:")
    assert "NoPermissionError" in failure_of(elsewhere)
    assert "--redis-prefix" in failure_of(elsewhere)


def test_a_strange_certificate_a_wrong_password_and_plain_text_are_refused(
    deployment: Deployment, open_redis_tier: RedisTierMaker, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path)
    url = deployment.url.rpartition("ssl_ca_certs=")[0] + f"ssl_ca_certs={stranger.path}"
    tier = open_redis_tier(as_user(url), prefix=PREFIX)
    failure = failure_of(tier)
    assert "CERTIFICATE_VERIFY_FAILED" in failure
    assert "--redis-tls-ca" in failure
    assert "p%40ss" not in failure
    failure = failure_of(open_redis_tier(as_user(deployment.url, "guessed"), prefix=PREFIX))
    assert "check the user and its password" in failure
    assert "guessed" not in failure
    url = deployment.url.replace("rediss", "redis").partition("?ssl")[0].partition("&ssl")[0]
    assert failure_of(open_redis_tier(as_user(url), prefix=PREFIX))


def test_certificate_that_expired_is_refused_as_such(
    tmp_path: Path, open_redis_tier: RedisTierMaker
) -> None:
    authority = Authority(tmp_path)
    good, old = (
        authority.issue(name, hosts=["127.0.0.1"], days=days)
        for name, days in (("good", 1), ("old", -1))
    )
    redis = RedisProcess(tmp_path, tls=TlsFiles(authority.path, *good))
    redis.start()
    try:
        redis.command("CONFIG", "SET", "tls-cert-file", str(old[0]), "tls-key-file", str(old[1]))
        failure = failure_of(open_redis_tier(redis.url))
    finally:
        redis.stop()
        redis.client.close()
    assert "certificate has expired" in failure
    assert "that its certificates are valid" in failure


def put_and_delete(tier: RedisTier) -> None:
    info = make_info(50, 10_000)
    put(tier, info, payload(1, 10_000))
    tier.delete(info.key)


def test_forbidden_command_is_named_with_what_mends_it(
    deployment: Deployment, open_redis_tier: RedisTierMaker
) -> None:
    try:
        for word in ("set", "eval", "scan"):
            for node in servers(deployment):
                grant(node, [right for right in RIGHTS if right != f"+{word}"])
            tier = open_redis_tier(as_user(deployment.url), prefix=PREFIX)
            with pytest.raises(TierUnavailableError, match=rf"'{word}'.*\+{word}[, ]"):
                put_and_delete(tier)
    finally:
        for node in servers(deployment):
            grant(node, RIGHTS)


@contextmanager
def directories(url: str, count: int) -> Iterator[list[Directory]]:
    """Open directories of nodes that see each other."""
    made = []
    for number in range(1, count + 1):
        me = NodeAddress(f"n{number}", number, "", f"10.0.0.{number}:1")
        link = RedisClient("redis", as_user(url), 5000, 2)
        limits = Limits(directory_ttl_ms=800, breaker_failures=9)
        made.append(Directory(link, me, PREFIX, limits, Counters()))
        made[-1].start()
    try:
        for one in made:
            assert eventually(lambda one=one: len(one.report().nodes) == count - 1)  # type: ignore[misc]
        yield made
    finally:
        for one in made:
            one.close()


def test_node_directory_works_for_such_a_user(deployment: Deployment) -> None:
    keys = [make_info(seed, 1).key for seed in range(40)]
    with directories(deployment.url, 2) as (first, second):
        first.announce(keys)
        assert eventually(lambda: len(second.holders(keys, 5.0)) == 40)
        assert second.holders(keys, 5.0)[keys[7]] == (first.me,)
        first.withdraw(keys[:20])
        assert eventually(lambda: set(second.holders(keys, 5.0)) == set(keys[20:]))


@pytest.mark.parametrize("deployment", ["cluster"], indirect=True)
def test_master_of_a_tls_cluster_that_is_down_costs_its_slots_alone_and_is_named(
    deployment: RedisCluster, open_redis_tier: RedisTierMaker
) -> None:
    deployment.reset()
    tier = open_redis_tier(as_user(deployment.url), prefix=PREFIX, timeout_ms=2000)
    infos = [make_info(seed, 5000) for seed in range(12)]
    keys = [info.key for info in infos]
    for info in infos:
        assert put(tier, info, payload(1, 5000))
    gone = deployment.nodes[1]
    held = {name for name in gone.names() if name.endswith(b":m")}
    lost = {info.key for info in infos if manifest(info.key.hex()) in held}
    assert lost
    with directories(deployment.url, 2) as (first, second):
        first.announce(keys)
        assert eventually(lambda: len(second.holders(keys, 5.0)) == 12)
        gone.stop()
        found = tier.find(keys)
        assert {info.key for info in found if info} == set(keys) - lost
        assert eventually(lambda: 0 < len(second.holders(keys, 5.0)) < 12)
        assert eventually(
            lambda: [one.node_id for one in second.report().nodes] == [first.me.node_id]
        )
        link = RedisClient("redis", as_user(deployment.url), 2000, 1)
        seen = list(check_health(link))
        link.close()
        assert [f":{gone.port} does not answer; its slots miss" in one.saw for one in seen] == [
            True
        ]
        gone.start()
        grant(gone, RIGHTS)
        assert eventually(deployment.is_formed)
        assert eventually(lambda: len(second.holders(keys, 5.0)) == 12), "the rest is said again"


def manifest(key: str) -> bytes:
    return f"{PREFIX}{{{key}}}:m".encode()


def test_full_redis_that_evicts_nothing_is_warned_of_at_the_start(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    redis.client.config_set("maxmemory", redis.client.info("memory")["used_memory"])
    with capture_logs() as logs:
        open_redis_tier(redis.url)
    (warning,) = logs
    assert "is full" in warning["event"]
    assert "allkeys-lru" in warning["fix"]
    redis.client.config_set("maxmemory-policy", "allkeys-lru")
    with capture_logs() as calm:
        open_redis_tier(redis.url)
    assert calm == []
