"""What the golden history file holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from contracts.chunks import make_representation
from golden.samples import FOLDER

from kvstore.proto.types import ChunkKey, Namespace
from kvstore.server.blending.content_index import Learned
from kvstore.server.blending.gates import GateState
from kvstore.server.blending.scores import Context
from kvstore.server.eviction.access_history import CHUNK, CLASS, COARSER, SavedHistory
from kvstore.server.index.known_models import ModelNamespace
from kvstore.server.store.saved_state import (
    SavedGate,
    pack_gates,
    pack_history,
    pack_models,
    pack_sections,
    pack_variants,
)

PATH = FOLDER / "history-v3.kvh"
OLDER = FOLDER / "history-v2.kvh"
"""Of a version that is not read any more."""

GATES: list[SavedGate] = [
    ((b"s" * 16, "rag"), GateState(True, 0.225, 0.97, 0.01, speedup=2.5, model="meta/llama")),
    ((b"t" * 16, ""), GateState(True, 0.15, 0.99, 0.002, model="qwén")),
]
VARIANTS = [
    Learned(ChunkKey(b"a" * 32), 0.625, -1.0, 0.5, 3.0, 2, (Context(b"c" * 16, 48, 1.5),)),
    Learned(ChunkKey(b"b" * 32), 1.0, 0.25, 0.0, 1.0, 1, ()),
]


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
    return SavedHistory([("default", ""), ("acme", "batch")], (1, 2), classes, chunks)


def models() -> list[ModelNamespace]:
    """Return two namespaces."""
    kinds = (make_representation(), replace(make_representation(), model_revision="f" * 40))
    names = (("default", "vllm 1"), ("acme", "ünïcode"))
    return [
        ModelNamespace(Namespace(bytes([number] * 16)), tenant, client, kind)
        for number, ((tenant, client), kind) in enumerate(zip(names, kinds, strict=True), 1)
    ]


def sections() -> dict[str, bytes]:
    """Return all of it as it lies in the file."""
    return {
        **pack_history(saved()),
        "models": pack_models(models()),
        "gates": pack_gates(GATES),
        "variants": pack_variants(VARIANTS),
    }


def packed() -> bytes:
    """Return the bytes of the file."""
    return pack_sections(sections())
