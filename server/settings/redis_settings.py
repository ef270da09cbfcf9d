"""Settings of the way into Redis: who this server is there, over which TLS, under which names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

from pydantic import BaseModel, Field, ValidationInfo, field_validator

from kvstore.server.settings.security_settings import OwnFile
from kvstore.tiers.redis_url import DEFAULT_PREFIX, parse_redis_url

MAX_PASSWORD_BYTES = 4096
_TLS_FILES = {
    "redis_tls_ca": "ssl_ca_certs",
    "redis_tls_cert": "ssl_certfile",
    "redis_tls_key": "ssl_keyfile",
}


class RedisSettings(BaseModel):
    """The part of a server's configuration that opens Redis; its URL is beside the tiers."""

    redis_username: Annotated[str | None, Field(pattern=r"^[!-~]{1,128}$"), "NAME"] = Field(
        default=None, description="user of Redis, where --redis names none"
    )
    redis_password_file: OwnFile = Field(
        default=None, description="file with the user's password, read at the start"
    )
    redis_tls_ca: OwnFile = Field(
        default=None, description="who signs the certificates of Redis, in PEM; with rediss://"
    )
    redis_tls_cert: OwnFile = Field(
        default=None, description="certificate to show Redis, where it asks for one, in PEM"
    )
    redis_tls_key: OwnFile = Field(
        default=None, validate_default=True, description="its private key, in PEM"
    )
    redis_prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9:_.-]{1,64}$"), "TEXT"] = Field(
        default=DEFAULT_PREFIX,
        description="what all names in Redis begin with; alike on all nodes that share",
    )

    @field_validator("redis_password_file")
    @classmethod
    def _check_password(cls, path: Path | None) -> Path | None:
        if path is not None:
            _read_password(path)
        return path

    @field_validator("redis_tls_key")
    @classmethod
    def _check_redis_pair(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        if "redis_tls_cert" in info.data and (path is None) != (
            info.data["redis_tls_cert"] is None
        ):
            raise ValueError("give both --redis-tls-cert and --redis-tls-key, or neither")
        return path

    def redis_access(self, url: str) -> str:
        """Return *url* with the user, the password and the TLS files of these settings.

        It holds secrets: RedisClient masks them.
        """
        scheme, _, rest = url.partition("://")
        place, _, query = rest.partition("?")
        if self.redis_password_file is not None:
            name = quote(self.redis_username or "", safe="")
            place = f"{name}:{quote(_read_password(self.redis_password_file), safe='')}@{place}"
        files = {option: getattr(self, name) for name, option in _TLS_FILES.items()}
        options = [query, urlencode({name: path for name, path in files.items() if path})]
        query = "&".join(filter(None, options))
        return f"{scheme}://{place}" + (f"?{query}" if query else "")


def check_access(url: str, settings: Mapping[str, Any]) -> None:
    """Check that a well-formed *url* goes with the other *settings*. Raises ValueError."""
    parsed = parse_redis_url(url)
    password, username = settings.get("redis_password_file"), settings.get("redis_username")
    if username and not password:
        raise ValueError("--redis-username needs --redis-password-file")
    if password and (parsed.login.username or parsed.login.password):
        raise ValueError("it names a user, and so does --redis-password-file; leave one out")
    if any(settings.get(name) for name in _TLS_FILES):
        if parsed.tls is None:
            raise ValueError("files for TLS are given; write rediss:// for redis://")
        if any(name in _TLS_FILES.values() for name, _ in parsed.tls):
            raise ValueError("it names files for TLS, and so do --redis-tls-...; leave one out")


def _read_password(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(MAX_PASSWORD_BYTES + 1)
    try:
        text = data.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        text = ""
    if not text or len(data) > MAX_PASSWORD_BYTES or "\n" in text:
        raise ValueError(f"put one line of text into it, of {MAX_PASSWORD_BYTES} bytes at most")
    return text
