"""What settings say of one another: files that come in pairs, and who could reach an address."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from pydantic_core import PydanticCustomError

from kvstore.server.settings.values import (
    DIRECTORY,
    format_size,
    is_loopback,
    parse_endpoint,
    unresolved,
)
from kvstore.tiers.redis_url import parse_redis_url

if TYPE_CHECKING:  # it imports this module
    from kvstore.server.settings.settings import Settings

REDIS_FIX = (
    "give --redis redis://host:6379/0, redis+sentinel://host:26379/service or"
    " redis+cluster://host:6379,host:6379, with rediss for TLS"
)
TLS_FILES = {
    "redis_tls_ca": "ssl_ca_certs",
    "redis_tls_cert": "ssl_certfile",
    "redis_tls_key": "ssl_keyfile",
}
"""Settings of the files that open Redis, and the options of its URL that name them too."""
CONFLICT = "conflict"
_ANY_HOST = ("0.0.0.0", "::")  # noqa: S104 - compared with

Problems: TypeAlias = "Iterator[tuple[str, str]]"
"""Names of settings, and what to give instead."""


def check_together(config: Settings) -> None:
    """Raise an error of the type CONFLICT, with its ``problems``, for what does not go together.

    Its text has no values: one may hold a password.
    """
    found = [*_tiers(config), *_callers(config), *_addresses(config), *_events(config)]
    if found:
        text = "; ".join(f"{name}: {fix}" for name, fix in found)
        raise PydanticCustomError(CONFLICT, text, {"problems": found})


def _tiers(config: Settings) -> Problems:
    if config.cpu_slab_bytes > config.cpu_size:
        size = format_size(config.cpu_size)
        yield "limits", f"cpu_slab_bytes: a slab must fit the cpu tier of {size}"
    if config.redis_url is None:
        if "redis" in config.tiers or config.directory:
            fix = f"the redis tier and the directory need to know their Redis: {REDIS_FIX}"
            yield "redis_url", fix
    elif fix := _redis_access(config, config.redis_url):
        yield "redis_url", fix
    if DIRECTORY in (config.peers or ()) and not config.directory:
        fix = "they are found in the Redis: add --directory and --redis, or name their addresses"
        yield "peers", fix
    if (config.redis_tls_cert is None) != (config.redis_tls_key is None):
        yield "redis_tls_key", "give both --redis-tls-cert and --redis-tls-key, or neither"


def _redis_access(config: Settings, url: str) -> str:
    """Return what is wrong with *url* beside the other settings; empty when nothing is."""
    parsed = parse_redis_url(url)
    if config.redis_username and not config.redis_password_file:
        return "--redis-username needs --redis-password-file"
    if config.redis_password_file and (parsed.login.username or parsed.login.password):
        return "it names a user, and so does --redis-password-file; leave one out"
    if any(getattr(config, name) for name in TLS_FILES):
        if parsed.tls is None:
            return "files for TLS are given; write rediss:// for redis://"
        if any(name in TLS_FILES.values() for name, _ in parsed.tls):
            return "it names files for TLS, and so do --redis-tls-...; leave one out"
    return ""


def _callers(config: Settings) -> Problems:
    if (config.tls_cert is None) != (config.tls_key is None):
        yield "tls_key", "give both --tls-cert and --tls-key, or neither"
    if config.tls_client_ca and not config.tls_cert:
        yield "tls_client_ca", "callers show certificates over TLS only: give --tls-cert, too"
    if config.tls_crl and not config.tls_client_ca:
        yield "tls_crl", "it is about callers' certificates: give --tls-client-ca, too"
    if config.jwt_key and not config.jwt_audience:
        yield "jwt_audience", "say whom tokens are for, or those for others are taken too"
    if config.http_tls and not config.tls_cert:
        yield "http_tls", "TLS needs a certificate: give --tls-cert and --tls-key"


def _addresses(config: Settings) -> Problems:
    host, _ = parse_endpoint(config.listen)
    if config.directory and not config.advertise and host in _ANY_HOST:
        yield "listen", "other nodes need an address to reach this one by: give --advertise HOST"
        return
    proves = config.authenticates_callers
    is_guarded = {
        "listen": config.tls_cert and proves,
        "http": config.open_pages or (config.http_tls and proves),
        "health": config.open_pages,
    }
    for name, fix in _FIX_FOR_OTHERS.items():
        address = getattr(config, name)
        if address != "off" and not (config.insecure or is_guarded[name]):
            host, _ = parse_endpoint(address)
            if not is_loopback(host):
                yield name, unresolved(host) or fix


_OPEN_PAGE = "other hosts could read it in plain text; use 127.0.0.1, or add --open-pages"
_FIX_FOR_OTHERS = {
    "listen": "other hosts could connect without TLS, or without saying who they are; give"
    " --tls-cert and one of --auth-keys, --jwt-key and --tls-client-ca, listen on 127.0.0.1, or"
    " add --insecure on a network you trust",
    "http": f"{_OPEN_PAGE}, or --http-tls with a way to tell who calls",
    "health": _OPEN_PAGE,
}


def _events(config: Settings) -> Problems:
    for name in ("events", "events_replay"):
        address = getattr(config, name)
        if address == "off":
            continue
        if not config.limits.events_kept:
            yield name, "with --limits events_kept=0 there is nothing to publish"
        elif address.startswith("ipc:") or config.events_readers or config.insecure:
            continue
        elif not is_loopback(parse_endpoint(address)[0]):
            fix = "other hosts could read which chunks all tenants have; give --events-readers, or"
            yield name, f"{fix} use 127.0.0.1 or ipc:PATH"
        elif config.authenticates_callers:
            fix = "every process of this host could read which chunks all tenants have; give"
            yield name, f"{fix} --events-readers, or use ipc:PATH"
