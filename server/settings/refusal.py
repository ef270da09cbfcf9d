"""Why a configuration was refused, as one error with a line for each wrong setting."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.settings.loading import REPLACED

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def refusal(
    error: ValidationError,
    values: Mapping[str, object],
    origins: Mapping[str, str],
    names: Collection[str],
) -> InvalidRequestError:
    """Return what *error* says of *values*, which came from *origins*; *names* are known.

    The Redis URL is never repeated, as a malformed one may hold its password anywhere; nor is
    what an unknown setting was given, which may be meant for that.
    """
    problems = []
    for item in error.errors(include_url=False):
        if item["type"] == "default_factory_not_called":
            continue  # the setting it derives from is refused already
        name = str(item["loc"][0])
        value = item["input"] if len(item["loc"]) > 1 else values.get(name, item["input"])
        is_secret = name == "redis_url" or item["type"] == "extra_forbidden"
        if is_secret and value is not None:
            value = "***"
        origin = f" (from {origins[name]})" if name in origins else ""
        field = ".".join(map(str, item["loc"]))
        if not _NAME.fullmatch(field):
            field = "***"
        problems.append((field, value, _fix(item, names) + origin))
    (field, value, fix), *others = problems
    rest = [str(InvalidRequestError(*problem)) for problem in others]
    return InvalidRequestError(field, value, "\n".join([fix, *rest]))


def _fix(item: ErrorDetails, names: Collection[str]) -> str:
    kind = item["type"]
    if kind == "value_error":
        return str(item["ctx"]["error"])
    if kind == "extra_forbidden":
        name = str(item["loc"][0])
        if name in REPLACED:
            return f"there is no such setting any more; {REPLACED[name]}"
        close = get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}?" if close else "kvstore-server --help lists them"
        return f"there is no such setting; {hint}"
    if kind.startswith("int_"):
        return "give a whole number"
    if kind.startswith("bool_"):
        return "give true or false"
    return item["msg"].replace("Input should be", "it must be")
