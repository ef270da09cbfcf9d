"""The command line of ``kvstore-server``: one flag for each setting."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import NoReturn, get_args

from pydantic.fields import FieldInfo

from kvstore import __version__
from kvstore.proto.errors import InvalidRequestError
from kvstore.server.settings.values import format_size

SHORT_NAMES = {"cpu": "cpu_size", "redis": "redis_url", "socket": "socket_path"}
"""Settings that have a second name, everywhere."""

REPLACED = {
    "adapt_tenants": "use --policy hit_density",
    "zmq": "give bulk: the HOST:PORT of the bulk channel",
    "peer_port": "the port is that of bulk: HOST:PORT",
    "zmq_keys": "give events_keys for published events; the bulk channel keeps no key",
}
"""Settings that are gone, and what to give instead."""

_SHORT = {name: f"--{short}" for short, name in SHORT_NAMES.items()}
_GROUPS = {
    "tls_cert": "trust",
    "tiers": "tiers",
    "listen": "addresses",
    "max_frame_bytes": "limits",
    "log_format": "logs",
}
"""First setting of each group, in the order of the settings."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidRequestError("flags", message, f"see {self.prog} --help")


def parse_flags(fields: Mapping[str, FieldInfo], argv: Sequence[str]) -> dict[str, str | bool]:
    """Return the settings named in *argv* as they were written, and ``config`` for the file.

    Raises InvalidRequestError on a flag that does not exist. ``--help`` and ``--version``
    print and raise SystemExit.
    """
    parser = _parser(fields)
    known, rest = parser.parse_known_args(list(argv))
    if rest:
        # Values are not repeated: one may be a password.
        named = (word.partition("=")[0] if word.startswith("-") else "***" for word in rest)
        raise InvalidRequestError("flags", " ".join(named), _fix(rest[0], parser))
    return vars(known)


def _fix(word: str, parser: argparse.ArgumentParser) -> str:
    """Return what to give in place of a *word* that is no flag."""
    named = word.partition("=")[0].lstrip("-")
    successor = REPLACED.get(named.replace("-", "_"))
    if successor is not None:
        return f"there is no such flag any more; {successor}"
    names = [flag.lstrip("-") for action in parser._actions for flag in action.option_strings]
    close = get_close_matches(named, names, n=1)
    meant = f"did you mean --{close[0]}? " if close else ""
    return f"{meant}see {parser.prog} --help"


def flag_of(name: str) -> str:
    """Return the flag of the setting *name*."""
    return _SHORT.get(name, "--" + name.replace("_", "-"))


def _parser(fields: Mapping[str, FieldInfo]) -> _Parser:
    parser = _Parser(
        "kvstore-server",
        description="Keep the KV cache of the engines on this node.",
        epilog="Each setting can also come from the environment (KVSTORE_CPU_SIZE=8GiB) or the"
        " YAML file (cpu_size: 8GiB). Flags win over the environment, which wins over the file.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=f"kvstore {__version__}")
    parser.add_argument(
        "--config", metavar="PATH", help="YAML file of settings (or KVSTORE_CONFIG)"
    )
    group = parser.add_argument_group()
    for name, field in fields.items():
        if name in _GROUPS:
            group = parser.add_argument_group(_GROUPS[name])
        names = dict.fromkeys((flag_of(name), "--" + name.replace("_", "-")))
        help_text = (field.description or "") + _default(field)
        if field.annotation is bool:
            group.add_argument(*names, dest=name, action="store_true", help=help_text)
        else:
            group.add_argument(*names, dest=name, metavar=_value_name(field), help=help_text)
    return parser


def _value_name(field: FieldInfo) -> str:
    named = [item for item in field.metadata if isinstance(item, str)]
    return named[0] if named else "|".join(map(str, get_args(field.annotation)))


def _default(field: FieldInfo) -> str:
    value = field.default
    if field.default_factory is not None or value is None or isinstance(value, bool):
        return ""
    if "SIZE" in field.metadata:
        value = format_size(value)
    return f" (default {','.join(value) if isinstance(value, tuple) else value})"
