"""The YAML file of settings: one ``name: value`` line each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from kvstore.proto.errors import InvalidRequestError


def read_settings(path: Path) -> dict[str, object]:
    """Return the file's settings, unchecked. Raises InvalidRequestError naming the file."""
    try:
        content = yaml.safe_load(path.read_bytes())
    except OSError as error:
        fix = f"cannot read it: {error.strerror}; name a file that this user can read"
        raise InvalidRequestError("config", str(path), fix) from None
    except yaml.YAMLError as error:
        raise InvalidRequestError("config", str(path), f"give YAML: {error}") from None
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
