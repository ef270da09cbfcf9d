"""Real vLLM engines over a tiny model: one with the store and one without, for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.lib.vllm import VERSION, EngineProcess, make_model
from helpers.server_process import ServerProcess
from real_vllm.prompts import CHUNK_TOKENS, EngineMaker

collect_ignore = ["test_cuda_layouts.py"] if VERSION == "0.26" else []
"""0.26 has no layouts to choose from."""

SMALL_CACHE = {"max_num_batched_tokens": 512, "num_gpu_blocks_override": 128}
"""Prefills of more than 512 tokens come in pieces, and eight long requests preempt each other."""


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    folder.chmod(0o700)
    return folder


@pytest.fixture(scope="session")
def model(home: Path) -> Path:
    make_model(home / "model")
    return home / "model"


@pytest.fixture(scope="session")
def store(home: Path) -> Iterator[ServerProcess]:
    """A server that can be killed and started again."""
    folder = home / "server"
    folder.mkdir(mode=0o700)
    flags = ("--cpu", "64MiB", "--disk", f"256MiB:{folder / 'disk'}", "--log-level", "error")
    process = ServerProcess(folder, *flags)
    process.start()
    yield process
    process.kill()


@pytest.fixture(scope="session")
def make_engine(home: Path, model: Path, store: ServerProcess) -> Iterator[EngineMaker]:
    """Start engines, with settings of the connector in *extra* or without a store."""
    made: list[EngineProcess] = []

    def make(extra: dict[str, Any] | None, **settings: Any) -> EngineProcess:
        if extra is not None:
            # The machine may be busy, and a late answer would be a miss.
            extra = {
                "address": store.address, "chunk_tokens": CHUNK_TOKENS, "durable": True,
                "lookup_deadline_ms": 5000, "deadline_ms": 5000, "retry_after_ms": 200, **extra,
            }  # fmt: skip
        log = home / f"engine{len(made)}.log"
        chosen = settings.pop("model", model)
        made.append(EngineProcess(chosen, log, extra, **{**SMALL_CACHE, **settings}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="session")
def oracle(make_engine: EngineMaker) -> EngineProcess:
    """The engine without a store."""
    return make_engine(None)


@pytest.fixture(scope="session")
def engine(make_engine: EngineMaker) -> EngineProcess:
    """The engine with one."""
    return make_engine({})
