"""What the golden history file holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from contracts.chunks import make_representation
from golden.samples import FOLDER

from kvstore.proto.types import Namespace
from kvstore.server.index.known_models import ModelNamespace
from kvstore.server.index.saved_history import CHUNK, CLASS, COARSER, HistoryState, SavedHistory

PATH = FOLDER / "history-v1.kvh"
PATH_V2 = FOLDER / "history-v2.kvh"


def saved() -> SavedHistory:
    """Return two groups, three classes and four chunks, every field with something in it."""
    classes = np.zeros(3, CLASS)
    classes["code"] = (COARSER | 4, 100, 1_300)
    classes["asked"] = np.arange(120).reshape(3, 40)
    classes["forgotten"] = np.arange(120).reshape(3, 40) / 2
    chunks = np.zeros(4, CHUNK)
    chunks["key"] = [np.void(bytes(16) + bytes([1] * 15) + bytes([n + 1])) for n in range(4)]
    chunks["age_s"] = (1_000.5, 30.25, 0.0, 2.0**20)
    chunks["flops"] = (0.0, 1e12, 2.5e15, 7.0)
    chunks["left_s"] = (0.0, 60.0, 0.0, 0.5)
    chunks["chunks"] = (1, 64, 65_535, 9)
    chunks["hits"] = (1, 2, 255, 3)
    chunks["turns"] = (0, 4, 255, 1)
    chunks["own"] = (0, 7, 59, 12)
    chunks["priority"] = (0, 90, 0, 1)
    groups = [("default", ""), ("acme", "batch")]
    return SavedHistory(groups, HistoryState((1, 2), classes, chunks))


def with_spaces() -> SavedHistory:
    """Return the same and two namespaces."""
    kinds = (make_representation(), replace(make_representation(), model_revision="f" * 40))
    names = (("default", "vllm 1"), ("acme", "ünïcode"))
    spaces = [
        ModelNamespace(Namespace(bytes([number] * 16)), tenant, client, kind)
        for number, ((tenant, client), kind) in enumerate(zip(names, kinds, strict=True), 1)
    ]
    return replace(saved(), spaces=tuple(spaces))
