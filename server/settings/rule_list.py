"""A RuleList: a setting of several rules, also given as text with commas between them."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
TENANT_FIX = "use letters, digits and _.-, 128 at most"


def check_tenant_name(name: str) -> None:
    """Raise ValueError for what is no tenant's name."""
    if not TENANT_NAME.fullmatch(name):
        raise ValueError(f"no tenant's name: {TENANT_FIX}")


class RuleList(BaseModel):
    """``rules``, frozen, and nothing else; each kind of list says how one is written."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    rules: tuple[Any, ...] = ()

    @classmethod
    def texts(cls, value: str) -> list[str]:
        """Return the text of each rule in *value*."""
        return value.split(",")

    @classmethod
    def parsed(cls, text: str) -> dict[str, Any]:
        """Return the fields of the rule that *text* is. Raises ValueError."""
        raise NotImplementedError

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        return {"rules": [cls.parsed(text.strip()) for text in cls.texts(value) if text.strip()]}

    def __str__(self) -> str:
        return ",".join(map(str, self.rules))
