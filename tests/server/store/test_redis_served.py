"""Redis: the way into it out of the URL and the settings, and how often it is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ServerMaker
from helpers.local_server import DEADLINE_MS, eventually
from helpers.prompts import LARGE, is_right, store
from helpers.redis_process import RedisProcess

from kvstore.client import ClientOptions
from kvstore.proto.errors import InvalidRequestError
from kvstore.server.settings.loading import show
from kvstore.server.settings.settings import load_config
from kvstore.tiers.redis_connection import SLICE_BYTES
from kvstore.tiers.redis_url import RedisUrl, parse_redis_url

PASSWORD = "p@ss/w:rd?&#%"


@pytest.fixture
def password(tmp_path: Path) -> str:
    path = tmp_path / "password"
    path.write_text(PASSWORD + "\n")
    return str(path)


def opened(*flags: str) -> RedisUrl:
    config = load_config(list(flags))
    assert config.redis_url is not None
    return parse_redis_url(config.redis_access(config.redis_url))


@pytest.mark.parametrize(
    "url", ["rediss://h:1/2", "rediss+cluster://a:1,b:2", "rediss+sentinel://[::1]:1/svc?db=3"]
)
def test_user_password_and_tls_files_go_into_every_kind_of_url(
    url: str, password: str, tmp_path: Path
) -> None:
    authority = str(tmp_path / "ca & co.pem")
    Path(authority).write_text("...")
    found = opened(
        *("--redis", url, "--redis-username", "me", "--redis-password-file", password),
        *("--redis-tls-ca", authority),
    )
    plain = parse_redis_url(url)
    assert (found.login.username, found.login.password) == ("me", PASSWORD)
    assert found.tls == (("ssl_ca_certs", authority),)
    assert (found.hosts, found.database, found.service) == (
        plain.hosts, plain.database, plain.service,
    )  # fmt: skip
    assert PASSWORD not in found.shown


def test_password_alone_is_the_default_users_and_a_url_alone_stays_as_it_is(password: str) -> None:
    found = opened("--redis", "redis://h", "--redis-password-file", password)
    assert (found.login.username, found.login.password) == ("", PASSWORD)
    url = "rediss://u:p@h:1/0?ssl_ca_certs=/ca"
    assert load_config(["--redis", url]).redis_access(url) == url


def test_password_shows_neither_in_the_settings_nor_in_a_refusal(password: str) -> None:
    flags = ["--redis", "redis://h", "--redis-password-file", password]
    assert PASSWORD not in show(load_config(flags)) + repr(load_config(flags))
    with pytest.raises(InvalidRequestError, match="leave one out") as caught:
        load_config(["--redis", "redis://u:other@h", "--redis-password-file", password])
    assert PASSWORD not in str(caught.value)
    assert "other" not in str(caught.value)


CHUNKS = 12
TOKENS = 128


def test_what_is_loaded_together_is_requested_once(
    make_server: ServerMaker, own_redis: RedisProcess
) -> None:
    own_redis.start()
    server = make_server(
        *("--tiers", "cpu,redis", "--redis", own_redis.url, "--codec", "redis=raw"),
        *("--cpu", "32MiB", "--redis-timeout-ms", "20000"),
    )
    client = server.connect(
        representation=LARGE, options=ClientOptions("grpc", TOKENS, DEADLINE_MS)
    )
    keys = store(client, 1, CHUNKS)
    assert eventually(
        lambda: all("redis" in {c.tier for c in chunk.copies} for chunk in client.stat(keys=keys))
    )
    server.leave_memory(keys)
    own_redis.client.config_resetstat()
    found = client.get_chunks(keys)
    assert len(found) == CHUNKS
    assert all(is_right(client, key, each) for key, each in zip(keys, found, strict=True))
    # Nothing was asked for in vain: a lookup's manifests, each frame's, and each slice once.
    parts = [name for name in own_redis.names() if not name.endswith(b":m")]
    slices = sum(-(-own_redis.client.strlen(name) // SLICE_BYTES) for name in parts)
    calls = own_redis.client.info("commandstats")["cmdstat_getrange"]["calls"]
    assert slices + CHUNKS <= calls <= slices + 2 * CHUNKS
