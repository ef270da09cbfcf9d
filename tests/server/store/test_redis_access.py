"""The way into Redis, out of the URL and the settings beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.settings.loading import show
from kvstore.server.settings.settings import load_config
from kvstore.tiers.redis_url import RedisUrl, parse_redis_url

PASSWORD = "p@ss/w:rd?&#%"


@pytest.fixture
def password(tmp_path: Path) -> str:
    path = tmp_path / "password"
    path.write_text(PASSWORD + "\n")
    return str(path)


@pytest.fixture
def authority(tmp_path: Path) -> str:
    path = tmp_path / "ca & co.pem"
    path.write_text("...")
    return str(path)


def opened(*flags: str) -> RedisUrl:
    config = load_config(list(flags))
    assert config.redis_url is not None
    return parse_redis_url(config.redis_access(config.redis_url))


@pytest.mark.parametrize(
    "url", ["rediss://h:1/2", "rediss+cluster://a:1,b:2", "rediss+sentinel://[::1]:1/svc?db=3"]
)
def test_user_password_and_tls_files_go_into_every_kind_of_url(
    url: str, password: str, authority: str
) -> None:
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


def test_password_alone_is_the_default_users(password: str) -> None:
    found = opened("--redis", "redis://h", "--redis-password-file", password)
    assert (found.login.username, found.login.password) == ("", PASSWORD)


def test_url_alone_stays_as_it_is() -> None:
    url = "rediss://u:p@h:1/0?ssl_ca_certs=/ca"
    config = load_config(["--redis", url])
    assert config.redis_access(url) == url


def test_password_shows_neither_in_the_settings_nor_in_a_refusal(password: str) -> None:
    flags = ["--redis", "redis://h", "--redis-password-file", password]
    assert PASSWORD not in show(load_config(flags)) + repr(load_config(flags))
    with pytest.raises(InvalidRequestError, match="leave one out") as caught:
        load_config(["--redis", "redis://u:other@h", "--redis-password-file", password])
    assert PASSWORD not in str(caught.value)
    assert "other" not in str(caught.value)
