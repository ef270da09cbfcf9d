from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict

import pytest

from kvstore.codecs.base import Registry


def test_a_registered_class_is_loaded_by_name() -> None:
    registry: Registry[object] = Registry("thing")
    registry.register("ordered", "collections:OrderedDict")
    assert registry.load("ordered") is OrderedDict
    assert "ordered" in registry
    assert "other" not in registry


def test_names_come_in_order() -> None:
    registry: Registry[object] = Registry("thing")
    for name in ("b", "c", "a"):
        registry.register(name, "collections:deque")
    assert list(registry) == ["a", "b", "c"]


def test_an_unknown_name_is_refused_and_the_known_ones_named() -> None:
    registry: Registry[object] = Registry("thing")
    registry.register("b", "collections:deque")
    registry.register("a", "collections:deque")
    with pytest.raises(LookupError, match="unknown thing 'x'; known: a, b"):
        registry.load("x")


def test_a_name_is_given_once() -> None:
    registry: Registry[object] = Registry("thing")
    registry.register("a", "collections:deque")
    with pytest.raises(ValueError, match="thing 'a' is already registered"):
        registry.register("a", "collections:OrderedDict")


def test_a_module_is_imported_only_when_its_name_is_asked_for() -> None:
    script = (
        "import sys\n"
        "from kvstore.codecs.base import Registry\n"
        "r = Registry('thing')\n"
        "r.register('zip', 'zipapp:create_archive')\n"
        "before = 'zipapp' in sys.modules\n"
        "r.load('zip')\n"
        "print(before, 'zipapp' in sys.modules)"
    )
    path = f"import sys; sys.path[:0] = {sys.path!r}\n"
    run = subprocess.run(
        [sys.executable, "-c", path + script], check=True, capture_output=True, text=True
    )
    assert run.stdout.split() == ["False", "True"]
