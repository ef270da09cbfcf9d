"""Loads settings from the command line, the environment and a YAML file; builds error messages.

Nothing else in the project reads the environment.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvstore.proto import __version__
from kvstore.proto.errors import InvalidRequestError
from kvstore.server.settings.values import Limits, format_size, text_by_tier

SHORT_NAMES = {"cpu": "cpu_size", "redis": "redis_url", "socket": "socket_path"}
"""Aliases of settings, valid in all sources."""

REPLACED = {
    "cpu_codec": "frames in memory are raw",
    "disk_codec": "give --codec disk=CODEC",
    "redis_codec": "give --codec redis=CODEC",
    "disk_write": "give --write RULE, or --write disk=RULE for disk only",
    "redis_write": "give --write redis=RULE",
    "disk_write_budget": "give --write-budget disk=SIZE",
    "redis_write_budget": "give --write-budget redis=SIZE",
    "adapt_tenants": "use --policy hit_density",
    "zmq": "give bulk: the HOST:PORT of the bulk channel",
    "peer_port": "the port is that of bulk: HOST:PORT",
    "zmq_keys": "give events_keys for published events; the bulk channel keeps no key",
} | {name: f"give --limits {name}=VALUE" for name in Limits.model_fields}
"""Removed settings, and their replacements."""

CONFLICT = "conflict"
"""The type of an error whose ``problems`` are settings and fixes."""

Given: TypeAlias = tuple[str, object]
"""Source and value of a setting."""

ModelT = TypeVar("ModelT", bound=BaseModel)

_JOINED = ("limits", "codec", "write", "write_budget")
"""Settings with several parts: each part of a source overrides that of lower sources."""
_SHORT = {name: f"--{short}" for short, name in SHORT_NAMES.items()}
_PREFIX = "KVSTORE_"
# Kubernetes sets these in every pod of a namespace with a service whose name starts with kvstore.
_FROM_KUBERNETES = re.compile(r"KVSTORE(_.*)?_(SERVICE_(HOST|PORT.*)|PORT(_.*)?)")
_FROM_COMMANDS = {"KVSTORE_ADDRESS", "KVSTORE_TOKEN_FILE", "KVSTORE_CA"}
"""Read by the kvstore command only."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_GROUPS = {
    "tiers": "main settings",
    "gpu": "tiers",
    "codec": "storage",
    "tenant_quotas": "tenants",
    "socket_path": "addresses",
    "peers": "peers",
    "tls_client_ca": "authentication",
    "blend_contents": "blending",
    "max_frame_bytes": "limits",
    "log_format": "logs",
}
"""First setting of each group, in the order of the settings."""


def user_folder(variable: str, otherwise: str) -> Path:
    """Return the folder in an XDG *variable* if it is an absolute path, else *otherwise*."""
    value = os.environ.get(variable, "")
    return Path(value if os.path.isabs(value) else os.path.expanduser(otherwise))


def load(model: type[ModelT], argv: Sequence[str]) -> tuple[ModelT, dict[str, str]]:
    """Return the settings of all sources, and the source of each.

    Raises InvalidRequestError with a line for each invalid flag, file or value.
    """
    flags = _flags(model.model_fields, argv)
    upper = ((variable.upper(), variable, value) for variable, value in os.environ.items())
    environment = _by_full_name(
        (name.removeprefix(_PREFIX).lower(), variable, value)
        for name, variable, value in upper
        if name.startswith(_PREFIX)
        and name not in _FROM_COMMANDS
        and not _FROM_KUBERNETES.fullmatch(name)
    )
    path = str(flags.pop("config", environment.pop("config", ("", "")))[1])
    content = read_settings(Path(path)) if path else {}
    file = _by_full_name((name, name, value) for name, value in content.items())
    given: dict[str, Given] = {}
    values: dict[str, Any] = {}
    sources = ({n: (path, value) for n, (_, value) in file.items()}, environment, flags)
    for source in sources:
        given |= source
        for name, (_, value) in source.items():
            values[name] = [*values.get(name, []), value] if name in _JOINED else value
    try:
        return model.model_validate(values), {name: origin for name, (origin, _) in given.items()}
    except ValidationError as error:
        for name in _JOINED:
            parts = [source[name] for source in sources if name in source]
            if len(parts) > 1:  # any source may be the wrong one
                shown = [value for _, value in parts]
                given[name] = " and ".join(origin for origin, _ in parts), shown
        raise _refusal(error, given, model.model_fields) from None


def _by_full_name(given: Iterable[tuple[str, str, object]]) -> dict[str, Given]:
    """Return spellings and values by full name. Raises InvalidRequestError for duplicates."""
    found: dict[str, Given] = {}
    for name, spelling, value in given:
        full = SHORT_NAMES.get(name, name)
        if full in found:
            fix = f"is also given as {found[full][0]}; give one of them"
            raise InvalidRequestError(spelling, "***", fix)
        found[full] = spelling, value
    return found


def _flags(fields: Mapping[str, FieldInfo], argv: Sequence[str]) -> dict[str, Given]:
    """Return the settings in *argv* as written. Raises InvalidRequestError, SystemExit."""
    parser = _parser(fields, "--help-all" in argv)
    try:
        known, rest = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise InvalidRequestError("flags", str(error), f"see {parser.prog} --help") from None
    if rest:
        # Values are not shown: one may be a password.
        named = (word.partition("=")[0] if word.startswith("-") else "***" for word in rest)
        raise InvalidRequestError("flags", " ".join(named), _fix(rest[0], parser))
    # A repeated flag of rules adds to the earlier ones.
    return {
        name: (flag_of(name), ",".join(value) if isinstance(value, list) else value)
        for name, value in vars(known).items()
    }


def _fix(word: str, parser: argparse.ArgumentParser) -> str:
    named = word.partition("=")[0].lstrip("-")
    successor = REPLACED.get(named.replace("-", "_"))
    if successor is not None:
        return f"this flag was removed; {successor}"
    names = [flag.lstrip("-") for action in parser._actions for flag in action.option_strings]
    close = get_close_matches(named, names, n=1)
    meant = f"did you mean --{close[0]}? " if close else ""
    return f"{meant}see {parser.prog} --help"


def flag_of(name: str) -> str:
    """Return the flag of the setting *name*."""
    return _SHORT.get(name, "--" + name.replace("_", "-"))


def _parser(fields: Mapping[str, FieldInfo], shows_all: bool) -> argparse.ArgumentParser:
    """Return the parser of all flags; its help lists the first group only unless *shows_all*."""
    limits = ", ".join(f"{name} ({text})" for name, text in Limits().texts().items())
    rest = f"Limits are {limits}." if shows_all else "--help-all lists every setting."
    parser = argparse.ArgumentParser(
        "kvstore-server",
        description="Serve the KV cache of the engines on this node.",
        epilog="Each setting can also come from the environment (KVSTORE_CPU_SIZE=8GiB) or the"
        " YAML file (cpu_size: 8GiB). Flags override the environment, which overrides the file."
        f" {rest}",
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--help-all", action="help", help="show every setting and exit")
    parser.add_argument("--version", action="version", version=f"kvstore {__version__}")
    parser.add_argument(
        "--config", metavar="PATH", help="YAML file of settings (or KVSTORE_CONFIG)"
    )
    group = parser.add_argument_group()
    for name, field in fields.items():
        if name in _GROUPS:
            group = parser.add_argument_group(_GROUPS[name])
        names = dict.fromkeys((flag_of(name), "--" + name.replace("_", "-")))
        is_shown = shows_all or group.title == _GROUPS["tiers"]
        text = f"{field.description}{_default(field)}" if is_shown else argparse.SUPPRESS
        if field.annotation is bool:
            group.add_argument(*names, dest=name, action="store_true", help=text)
        else:
            kinds = (one for one in field.metadata if isinstance(one, str))
            kind = next(kinds, "|".join(map(str, get_args(field.annotation))))
            action = "append" if "=" in kind else "store"
            group.add_argument(*names, dest=name, metavar=kind, help=text, action=action)
    return parser


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None or isinstance(field.default, bool | Limits):
        return ""
    value = as_written(field.default, field)
    return "" if value is None else f" (default {value})"


def _refusal(
    error: ValidationError, given: Mapping[str, Given], known: Mapping[str, FieldInfo]
) -> InvalidRequestError:
    """Return the message of *error* for the values *given*.

    It never shows the Redis URL, as a malformed one may contain its password anywhere, nor the
    value of an unknown setting, which may be a misspelt one.
    """
    problems: list[tuple[str, object, str]] = []
    for item in error.errors(include_url=False):
        if item["type"] == CONFLICT:
            together = item["ctx"]["problems"]
            found = [(name, known[name].default, fix) for name, fix in together]
        else:
            names = [part for part in item["loc"] if isinstance(part, str)]
            found = [(".".join(names), item["input"], _fix_of(item, known))]
        for field, value, fix in found:
            name, _, inner = field.partition(".")
            origin, written = given.get(name, ("", value))
            shown = value if inner else written
            if shown is not None and (name == "redis_url" or item["type"] == "extra_forbidden"):
                shown = "***"
            fix += f" (from {origin})" if origin else ""
            problems.append((field if _NAME.fullmatch(field) else "***", shown, fix))
    (field, value, fix), *others = problems
    rest = [str(InvalidRequestError(*problem)) for problem in others]
    return InvalidRequestError(field, value, "\n".join([fix, *rest]))


_CHARACTERS = re.compile(r"\^\[(.+)\]\{1,(\d+)\}\$")
"""The form of the patterns of settings."""


def _fix_of(item: ErrorDetails, known: Mapping[str, FieldInfo]) -> str:
    kind = item["type"]
    if kind == "value_error":
        return str(item["ctx"]["error"])
    if kind == "extra_forbidden":
        name = str(item["loc"][0])
        if name in REPLACED:
            return f"this setting was removed; {REPLACED[name]}"
        kind = "limit" if name == "limits" else "setting"
        known = Limits.model_fields if name == "limits" else known
        close = get_close_matches(str(item["loc"][-1]), known, n=1)
        hint = f"did you mean {close[0]}?" if close else "kvstore-server --help lists them"
        return f"there is no such {kind}; {hint}"
    if kind.startswith("int_"):
        return "give a whole number"
    if kind.startswith("bool_"):
        return "give true or false"
    if kind == "string_pattern_mismatch":
        return _CHARACTERS.sub(r"give 1 to \2 of the characters \1", item["ctx"]["pattern"])
    return item["msg"].replace("Input should be", "it must be")


def read_settings(path: Path) -> dict[str, object]:
    """Return the file's settings, unchecked. Raises InvalidRequestError naming the file."""
    try:
        content = yaml.safe_load(path.read_bytes())
    except OSError as error:
        fix = f"cannot read it: {error.strerror}; name a file that this user can read"
        raise InvalidRequestError("config", str(path), fix) from None
    except (yaml.YAMLError, ValueError) as error:
        # Not the parser's message: it contains the line, which may hold a password.
        mark = getattr(error, "problem_mark", None)
        where = f"; mistake at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InvalidRequestError("config", str(path), f"give YAML{where}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise InvalidRequestError("config", str(path), "give settings as `name: value` lines")
    return content


def show(config: BaseModel, origins: Mapping[str, str] | None = None) -> str:
    """Return *config*, with the sources, as YAML for ``--config``; the Redis URL is masked."""
    lines = []
    for name, field in type(config).model_fields.items():
        shown = as_written(getattr(config, name), field)
        if name == "redis_url" and shown is not None:
            place, mark, _ = str(shown).partition("?")
            shown = re.sub("(?<=://).*@", "***@", place) + (mark and "?***")
        line = yaml.safe_dump({name: shown}, width=1 << 20).rstrip()
        lines.append(line if origins is None else f"{line}  # {origins.get(name, 'default')}")
    return "\n".join(lines) + "\n"


def as_written(value: object, field: FieldInfo) -> object:
    """Return the *value* of a setting as a YAML scalar that parses back."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or None
    if isinstance(value, Mapping):
        return text_by_tier(value)
    if isinstance(value, int) and "SIZE" in field.metadata:
        return format_size(value)
    return str(value) if isinstance(value, BaseModel | Path) else value


# --- the schema of the YAML file

_BOUNDS = {"enum", "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}


def settings_schema(settings: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a file with some of *settings*, and nothing else.

    It covers names, types and bounds. Conflicts between settings are only checked at start.
    """
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Settings of kvstore-server",
    } | _object(settings)


def _object(model: type[BaseModel]) -> dict[str, Any]:
    found = model.model_json_schema()["properties"]
    properties = {name: _property(found[name], one) for name, one in model.model_fields.items()}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _property(found: dict[str, Any], field: FieldInfo) -> dict[str, Any]:
    """Return the schema that pydantic *found*, plus the text form of values of several parts."""
    about = {"description": " ".join((field.description or "").split())}
    if field.annotation is Limits:
        return about | _object(Limits) | {"type": ["string", "object"]}
    one, *null = found.get("anyOf", [found])  # an optional setting has two
    kind = one.get("type", "string")
    types = kind if isinstance(kind, list) else [kind]
    if kind in ("array", "object"):
        types = ["string", kind]
    elif {"HOST:PORT", "PATH"} & {*map(str, field.metadata)} and not null and "format" not in one:
        types = ["string", "boolean"]  # YAML parses a bare off as a boolean
    types = [*types, *(option["type"] for option in null)]
    items = {"items": {"type": "string"}} if kind == "array" else {}
    bounds = {key: value for key, value in one.items() if key in _BOUNDS}
    return about | {"type": types if len(types) > 1 else types[0]} | items | bounds
