"""Redis URLs: one server, the master that Sentinels name, or a Cluster."""

from __future__ import annotations

import re
import ssl
from typing import Literal, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from kvstore.proto.errors import InvalidRequestError

Mode = Literal["single", "sentinel", "cluster"]
HostPort = tuple[str, int]

MAX_HOSTS = 64
"""Hosts in one URL."""
DEFAULT_PREFIX = "kvs:1:"
"""Default prefix of all names."""

_MODES: dict[str, tuple[Mode, int]] = {
    "": ("single", 6379),
    "sentinel": ("sentinel", 26379),
    "cluster": ("cluster", 6379),
}
"""Mode and default port by the suffix of the scheme."""
_TLS_OPTIONS = {
    "ssl_cert_reqs", "ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile",
    "ssl_check_hostname",
}  # fmt: skip
_OPTIONS = _TLS_OPTIONS | {"db", "sentinel_username", "sentinel_password"}
_FIX = (
    "give redis://user:password@host:port/db, redis+sentinel://host:port,host:port/service?db=0"
    " or redis+cluster://host:port,host:port, with rediss for TLS, the password"
    f" percent-encoded and no other options than {', '.join(sorted(_OPTIONS))}"
)
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_.-]+))(?::([0-9]{1,5}))?")


class Login(NamedTuple):
    """Credentials for a server; empty if it requires none."""

    username: str = ""
    password: str = ""


class RedisUrl(NamedTuple):
    """A checked address: ``hosts`` are the server, the Sentinels or some nodes of the Cluster.
    ``tls`` is None for plain text, else its options. ``shown`` is the URL without credentials.
    """

    mode: Mode
    hosts: tuple[HostPort, ...]
    database: int
    service: str
    login: Login
    sentinel_login: Login
    tls: tuple[tuple[str, str], ...] | None
    shown: str


def parse_redis_url(url: str) -> RedisUrl:
    """Parse *url*. Raises InvalidRequestError, which never quotes it, as a badly escaped password
    may be anywhere in it.
    """
    refusal = InvalidRequestError("redis url", "(not shown)", _FIX)
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise refusal from None
    protocol, _, suffix = parts.scheme.partition("+")
    mode, port = _MODES.get(suffix, ("single", 0))
    user_info, _, host_list = parts.netloc.rpartition("@")
    username, _, password = user_info.partition(":")
    matches = [_HOST.fullmatch(text) for text in host_list.split(",")]
    hosts = tuple((match[1] or match[2], int(match[3] or port)) for match in matches if match)
    options = dict(pairs)
    path = parts.path.removeprefix("/")
    service = path if mode == "sentinel" else ""
    database = options.get("db", "") or ("" if service else path)
    tls = {name: value for name, value in options.items() if name in _TLS_OPTIONS}
    is_right = (
        protocol in ("redis", "rediss"),
        suffix in _MODES and "#" not in url,
        len(options) == len(pairs) and _OPTIONS.issuperset(options),
        len(hosts) == len(matches) and all(0 < number < 1 << 16 for _, number in hosts),
        len(hosts) <= (1 if mode == "single" else MAX_HOSTS),
        re.fullmatch(r"[A-Za-z0-9_.-]{1,128}" if mode == "sentinel" else "", service),
        re.fullmatch(r"0*" if mode == "cluster" else r"[0-9]{0,9}", database),
        not tls or protocol == "rediss",
    )
    if not all(is_right):
        raise refusal
    shown = ",".join(f"[{host}]:{at}" if ":" in host else f"{host}:{at}" for host, at in hosts)
    place = f"/{service}?db={int(database or 0)}" if service else parts.path
    return RedisUrl(
        mode,
        hosts,
        int(database or 0),
        service,
        Login(unquote(username), unquote(password)),
        Login(options.get("sentinel_username", ""), options.get("sentinel_password", "")),
        tuple(tls.items()) if protocol == "rediss" else None,
        f"{parts.scheme}://{shown}{place}",
    )


def tls_context(options: tuple[tuple[str, str], ...]) -> ssl.SSLContext:
    """Return the context of the URL's TLS *options*. Raises InvalidRequestError for invalid values
    and unreadable files.
    """
    given = dict(options)
    requirement = given.get("ssl_cert_reqs", "required")
    check = given.get("ssl_check_hostname", "true").lower()
    if requirement not in ("required", "none") or check not in ("true", "false"):
        fix = "ssl_cert_reqs is required or none, ssl_check_hostname is true or false"
        raise InvalidRequestError("redis url", f"{requirement}, {check}", fix)
    try:
        context = ssl.create_default_context(
            cafile=given.get("ssl_ca_certs"), capath=given.get("ssl_ca_path")
        )
        if "ssl_certfile" in given:
            context.load_cert_chain(given["ssl_certfile"], given.get("ssl_keyfile"))
    except (OSError, ValueError) as error:
        fix = "name files of certificates in PEM that this user can read"
        raise InvalidRequestError("redis url", str(error), fix) from None
    context.check_hostname = check == "true" and requirement == "required"
    if requirement == "none":
        context.verify_mode = ssl.CERT_NONE
    return context
