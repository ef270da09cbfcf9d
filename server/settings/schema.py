"""The JSON schema of a server's YAML file: for editors, and for the Helm chart's values."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kvstore.server.settings.values import Limits

_BOUNDS = {"enum", "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}


def settings_schema(settings: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of a file that has some of *settings*, and nothing else.

    It knows names, types and bounds. What settings say of one another only the start checks.
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
    """Return what pydantic *found*, with the text that values of several parts may be."""
    about = {"description": " ".join((field.description or "").split())}
    if field.annotation is Limits:
        return about | _object(Limits) | {"type": ["string", "object"]}
    one, *null = found.get("anyOf", [found])  # of an optional one
    kind = one.get("type", "string")
    types = kind if isinstance(kind, list) else [kind]
    if kind in ("array", "object"):
        types = ["string", kind]
    elif {"HOST:PORT", "PATH"} & {*map(str, field.metadata)} and not null and "format" not in one:
        types = ["string", "boolean"]  # what YAML makes of a bare off
    types = [*types, *(option["type"] for option in null)]
    items = {"items": {"type": "string"}} if kind == "array" else {}
    bounds = {key: value for key, value in one.items() if key in _BOUNDS}
    return about | {"type": types if len(types) > 1 else types[0]} | items | bounds
