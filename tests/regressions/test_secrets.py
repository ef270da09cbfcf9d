"""Secrets that are no part of a URL: passwords of the chart's Redis with characters of any kind."""

from __future__ import annotations

import base64
import random
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import yaml
from chart.rendered import CHART, TOOLS, Helm, of_kind, settings
from helpers.redis_process import RedisProcess, free_port

from kvstore.proto.errors import KVStoreError
from kvstore.server.settings.settings import load_config
from kvstore.tiers.redis_client import RedisClient

START_S = 10.0
ODD = {
    "slash": "a/b", "hash": "a#b", "question mark": "a?b", "bracket": "[ab", "percent": "a%41b",
    "at": "a@b", "colon": "a:b", "blank": " a b ", "quote": 'a"b', "apostrophe": "a'b",
    "backslash": "a\\nb\\", "dollar": "$(id) $HOME `id`", "letters beyond ASCII": "pä日",
    "newline at its end": "ab\n", "CRLF at its end": "ab\r\n", "flag": "--port",
}  # fmt: skip


class BundledRedis:
    """The chart's own Redis and the settings of its server, as helm renders both."""

    def __init__(self, helm: Helm, folder: Path) -> None:
        rendered = helm.of_values(CHART / "ci" / "bundled-redis-values.yaml")
        (redis,) = [
            one
            for one in of_kind(rendered, "StatefulSet")
            if one["metadata"]["labels"]["app.kubernetes.io/component"] == "redis"
        ]
        (container,) = redis["spec"]["template"]["spec"]["containers"]
        assert container["command"] == ["sh", "-c"]
        (self.script,) = container["args"]
        self._settings = settings(rendered)
        self._folder = folder
        self.password = folder / "password"

    @contextmanager
    def started(self) -> Iterator[int]:
        """Run the container's script here; give the port that its Redis listens on."""
        port = free_port()
        script = self.script.replace("/tmp", str(self._folder))
        script = script.replace("/etc/redis-auth/password", str(self.password))
        options = f"--port {port} --bind 127.0.0.1"
        command = re.sub("exec valkey-server (.*)", rf"exec redis-server \1 {options}", script)
        process = subprocess.Popen(["sh", "-c", command], stdout=subprocess.DEVNULL)
        try:
            yield port
        finally:
            process.kill()
            process.wait()

    def access(self, port: int, *flags: str) -> Callable[[], RedisClient]:
        """Return what connects as the server would, with its settings and the secret by then."""
        assert self._settings["redis_url"] == "redis://x-kvstore-redis:6379/0"
        given = {
            "tiers": "cpu,redis",
            "redis_url": f"redis://127.0.0.1:{port}/0",
            "redis_password_file": str(self.password),
        }
        assert given.keys() <= self._settings.keys()
        path = self._folder / "kvstore.yaml"
        path.write_text(yaml.safe_dump(given))
        config = load_config(["--config", str(path), *flags])
        url = config.redis_url or ""
        return lambda: RedisClient("redis", config.redis_access(url), 5000, 1)


@pytest.fixture
def bundled(tmp_path: Path) -> BundledRedis:
    if not (TOOLS / "helm4").exists():
        pytest.skip("needs helm: make chart-tools brings it")
    return BundledRedis(Helm(TOOLS / "helm4"), tmp_path)


def answer(link: RedisClient, *command: bytes) -> object:
    (found,) = link.run(b"x", [list(command)])
    return found


def eventually_set(make: Callable[[], RedisClient]) -> object:
    """Write through a link as soon as its Redis has started."""
    deadline = time.monotonic() + START_S
    while True:
        with closing(make()) as link:
            try:
                return answer(link, b"SET", b"x", b"1")
            except KVStoreError as error:
                if "refused" not in str(error) or time.monotonic() > deadline:
                    raise
        time.sleep(0.01)


@pytest.mark.parametrize("what", ODD)
def test_langfuse_k8s_121_a_password_of_any_characters_opens_the_redis_of_the_chart(
    bundled: BundledRedis, what: str
) -> None:
    """sentry-kubernetes/charts#410, langfuse-k8s#121, harbor-helm#214, redis-py#1171: a password
    that was put into a URL, or a line of a configuration, as it stood was cut or changed there."""
    bundled.password.write_bytes(ODD[what].encode())
    with bundled.started() as port:
        connect = bundled.access(port)
        assert eventually_set(connect) == b"OK"
        bundled.password.write_text("another")
        with closing(connect()) as link, pytest.raises(KVStoreError, match="password"):
            answer(link, b"GET", b"x")


def test_redis_py_1171_a_thousand_random_passwords_are_the_same_on_both_sides(
    bundled: BundledRedis, own_redis: RedisProcess, tmp_path: Path
) -> None:
    """sentry-kubernetes/charts#410: of 1,000 passwords in base64, 380 broke the URL they were put
    into."""
    draw = random.Random(410)
    passwords = [base64.b64encode(draw.randbytes(24)).decode() for _ in range(1000)]
    assert sum("/" in one or "+" in one for one in passwords) > 500
    folder = tmp_path / "secrets"
    folder.mkdir()
    for number, password in enumerate(passwords):
        (folder / f"{number:04}").write_text(password)
    composing = bundled.script.partition("exec ")[0].replace("/tmp/redis.conf", '"$f.conf"')
    composing = composing.replace("/etc/redis-auth/password", '"$f"')
    subprocess.run(["sh", "-c", f"for f in {folder}/????; do\n{composing}\ndone"], check=True)
    own_redis.start()
    bundled.password.write_text("none yet")
    connect = bundled.access(own_redis.port, "--redis-username", "me")
    for number, password in enumerate(passwords):
        path = folder / f"{number:04}"
        line = path.with_suffix(".conf").read_text().splitlines()[0]
        (quoted,) = re.findall(r'requirepass "((?:\\x[0-9a-f]{2})+)"', line)
        assert bytes.fromhex(quoted.replace("\\x", "")).decode() == password
        own_redis.command("ACL", "SETUSER", "me", "on", "resetpass", f">{password}", "~*", "+@all")
        bundled.password.write_bytes(path.read_bytes())
        with closing(connect()) as link:
            assert answer(link, b"ACL", b"WHOAMI") == b"me"
