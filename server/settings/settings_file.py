"""The YAML file of settings: one ``name: value`` line each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import yaml
from pydantic import BaseModel

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.settings.values import format_size


def read_settings(path: Path) -> dict[str, object]:
    """Return the file's settings, unchecked. Raises InvalidRequestError naming the file."""
    try:
        content = yaml.safe_load(path.read_bytes())
    except OSError as error:
        fix = f"cannot read it: {error.strerror}; name a file that this user can read"
        raise InvalidRequestError("config", str(path), fix) from None
    except (yaml.YAMLError, ValueError) as error:
        # Not the parser's own words: they repeat the line, which may hold a password.
        mark = getattr(error, "problem_mark", None)
        where = f"; mistake at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InvalidRequestError("config", str(path), f"give YAML{where}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise InvalidRequestError("config", str(path), "give settings as `name: value` lines")
    return content


def format_settings(values: Mapping[str, object], notes: Mapping[str, str]) -> str:
    """Return *values*, scalars, as text that ``read_settings`` reads; *notes* end the lines."""
    lines = []
    for name, value in values.items():
        line = yaml.safe_dump({name: value}, width=1 << 20).rstrip()
        lines.append(f"{line}  # {notes[name]}" if name in notes else line)
    return "\n".join(lines) + "\n"


def show(config: BaseModel, origins: Mapping[str, str] | None = None) -> str:
    """Return *config* as YAML that ``--config`` reads, the Redis URL masked.

    With *origins* each line says where its value came from.
    """
    values: dict[str, object] = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if name == "redis_url" and value is not None:
            value = _masked(value)
        elif isinstance(value, tuple):
            value = ",".join(value)
        elif isinstance(value, BaseModel | Path):
            value = str(value)
        elif "SIZE" in field.metadata:
            value = format_size(value)
        values[name] = value
    if origins is None:
        return format_settings(values, {})
    return format_settings(values, dict.fromkeys(values, "default") | dict(origins))


def _masked(url: str) -> str:
    without_options = url.partition("?")[0]
    return re.sub("(?<=://).*@", "***@", without_options) + ("?***" if "?" in url else "")
