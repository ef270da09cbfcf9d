"""The JSON schema of a server's YAML file: for editors, and for the Helm chart's values."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kvstore.server.settings.values import Limits

_SIZE_PATTERN = "^[0-9]{1,18}\\s*([KkMmGgTt][Ii]?)?[Bb]?$"
_BOUNDS = {
    Ge: ("ge", "minimum"),
    Le: ("le", "maximum"),
    Gt: ("gt", "exclusiveMinimum"),
    Lt: ("lt", "exclusiveMaximum"),
}


def settings_schema(settings: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of a file that has some of *settings*, and nothing else.

    It knows names, types and bounds. What settings say of one another only the start checks.
    """
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Settings of kvstore-server",
        "type": "object",
        "additionalProperties": False,
        "properties": {name: _property(field) for name, field in settings.model_fields.items()},
    }


def _property(field: FieldInfo) -> dict[str, Any]:
    kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)]
    is_optional = len(kinds) < len(get_args(field.annotation))
    kind = kinds[0] if is_optional and kinds else field.annotation
    schema = _scalar(kind, field.metadata)
    if is_optional:
        if "enum" in schema:
            schema["enum"].append(None)
        else:
            types = schema["type"]
            schema["type"] = [*([types] if isinstance(types, str) else types), "null"]
    return {"description": " ".join((field.description or "").split())} | schema


def _scalar(kind: Any, metadata: list[Any]) -> dict[str, Any]:
    while hasattr(kind, "__metadata__"):  # an Annotated inside an optional
        kind, metadata = kind.__origin__, [*kind.__metadata__, *metadata]
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    if kind is bool:
        return {"type": "boolean"}
    if "SIZE" in metadata:
        return {"type": ["string", "integer"], "pattern": _SIZE_PATTERN}
    if kind in (int, float):
        # Those inside a FieldInfo too.
        flat = [one for field in metadata for one in getattr(field, "metadata", [field])]
        found = [(one, *_BOUNDS[type(one)]) for one in flat if type(one) in _BOUNDS]
        bounds = {name: getattr(one, attribute) for one, attribute, name in found}
        return {"type": "integer" if kind is int else "number"} | bounds
    if isinstance(kind, type) and issubclass(kind, Limits):
        limits = {name: _property(field) for name, field in kind.model_fields.items()}
        closed = {"additionalProperties": False, "properties": limits}
        return {"type": ["string", "object"]} | closed
    if get_origin(kind) is dict:
        return {"type": ["string", "object"]}
    if get_origin(kind) is tuple:
        return {"type": ["string", "array"], "items": {"type": "string"}}
    if kind is str:  # what YAML makes of a bare off
        takes_off = "HOST:PORT" in metadata or "PATH" in metadata
        return {"type": ["string", "boolean"]} if takes_off else {"type": "string"}
    return {"type": "string"}
