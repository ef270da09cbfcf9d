"""What settings say of one another: files that come in pairs, and who could reach an address."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

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
_ANY_HOST = ("0.0.0.0", "::")  # noqa: S104 - compared with

Problem: TypeAlias = tuple[str, object, str]
"""The name of a setting, its value, and what to give instead."""


class ConflictError(ValueError):
    """Settings that do not go together. Its text has no values: one may hold a password."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(f"{name}: {fix}" for name, _, fix in problems))
        self.problems = tuple(problems)


def check_together(settings: Settings) -> None:
    """Raise ConflictError for settings that do not go together."""
    found = [*_tiers(settings), *_callers(settings), *_addresses(settings), *_events(settings)]
    if found:
        raise ConflictError([(name, getattr(settings, name), fix) for name, fix in found])


def _tiers(settings: Settings) -> Iterator[tuple[str, str]]:
    if settings.cpu_slab_bytes > settings.cpu_size:
        fix = f"a slab must fit the cpu tier of {format_size(settings.cpu_size)}"
        yield "limits", f"cpu_slab_bytes: {fix}"
    if settings.redis_url is None:
        if "redis" in settings.tiers or settings.directory:
            fix = f"the redis tier and the directory need to know their Redis: {REDIS_FIX}"
            yield "redis_url", fix
    elif fix := _redis_access(settings, settings.redis_url):
        yield "redis_url", fix
    if DIRECTORY in (settings.peers or ()) and not settings.directory:
        fix = "they are found in the Redis: add --directory and --redis, or name their addresses"
        yield "peers", fix
    if (settings.redis_tls_cert is None) != (settings.redis_tls_key is None):
        yield "redis_tls_key", "give both --redis-tls-cert and --redis-tls-key, or neither"


def _redis_access(settings: Settings, url: str) -> str:
    """Return what is wrong with *url* beside the other settings; empty when nothing is."""
    parsed = parse_redis_url(url)
    if settings.redis_username and not settings.redis_password_file:
        return "--redis-username needs --redis-password-file"
    if settings.redis_password_file and (parsed.login.username or parsed.login.password):
        return "it names a user, and so does --redis-password-file; leave one out"
    if any(getattr(settings, name) for name in TLS_FILES):
        if parsed.tls is None:
            return "files for TLS are given; write rediss:// for redis://"
        if any(name in TLS_FILES.values() for name, _ in parsed.tls):
            return "it names files for TLS, and so do --redis-tls-...; leave one out"
    return ""


def _callers(settings: Settings) -> Iterator[tuple[str, str]]:
    if (settings.tls_cert is None) != (settings.tls_key is None):
        yield "tls_key", "give both --tls-cert and --tls-key, or neither"
    if settings.tls_client_ca and not settings.tls_cert:
        fix = "callers show certificates over TLS only: give --tls-cert, too"
        yield "tls_client_ca", fix
    if settings.tls_crl and not settings.tls_client_ca:
        yield "tls_crl", "it is about callers' certificates: give --tls-client-ca, too"
    if settings.jwt_key and not settings.jwt_audience:
        yield "jwt_audience", "say whom tokens are for, or those for others are taken too"
    if settings.http_tls and not settings.tls_cert:
        yield "http_tls", "TLS needs a certificate: give --tls-cert and --tls-key"


def _addresses(settings: Settings) -> Iterator[tuple[str, str]]:
    host, _ = settings.listen_address
    if settings.directory and not settings.advertise and host in _ANY_HOST:
        yield "listen", "other nodes need an address to reach this one by: give --advertise HOST"
        return
    for name in ("listen", "http", "health"):
        address = getattr(settings, name)
        if address == "off" or settings.insecure:
            continue
        host, _ = parse_endpoint(address)
        if not is_loopback(host) and (fix := _fix_for_others(settings, name)):
            yield name, unresolved(host) or fix


def _fix_for_others(settings: Settings, name: str) -> str:
    """Return what to do before an address may be open to other hosts; empty when it may be."""
    if name != "listen":
        is_guarded = name == "http" and settings.http_tls and settings.authenticates_callers
        if settings.open_pages or is_guarded:
            return ""
        more = ", or --http-tls with a way to tell who calls" if name == "http" else ""
        return f"other hosts could read it in plain text; use 127.0.0.1, or add --open-pages{more}"
    if settings.tls_cert and settings.authenticates_callers:
        return ""
    return (
        "other hosts could connect without TLS, or without saying who they are; give --tls-cert"
        " and one of --auth-keys, --jwt-key and --tls-client-ca, listen on 127.0.0.1, or add"
        " --insecure on a network you trust"
    )


def _events(settings: Settings) -> Iterator[tuple[str, str]]:
    for name in ("events", "events_replay"):
        address = getattr(settings, name)
        if address == "off":
            continue
        if not settings.limits.events_kept:
            yield name, "with --limits events_kept=0 there is nothing to publish"
        elif address.startswith("ipc:") or settings.events_readers or settings.insecure:
            continue
        elif not is_loopback(parse_endpoint(address)[0]):
            fix = "other hosts could read which chunks all tenants have; give --events-readers, or"
            yield name, f"{fix} use 127.0.0.1 or ipc:PATH"
        elif settings.authenticates_callers:
            fix = "every process of this host could read which chunks all tenants have; give"
            yield name, f"{fix} --events-readers, or use ipc:PATH"
