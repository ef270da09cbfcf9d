"""Settings of a server as its user gives them, and what is refused of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.settings.settings import load_config


def write(path: Path, text: str) -> str:
    """Write *text* to *path* and return it as an argument."""
    path.write_text(text)
    return str(path)


def refused(*argv: str) -> str:
    """Return why a server with these arguments does not start."""
    with pytest.raises(InvalidRequestError) as caught:
        load_config(argv)
    return str(caught.value)
