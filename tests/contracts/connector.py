"""The suite that every Connector passes. Subclass ConnectorContract and say how to run one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from conftest import ProcessMaker
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.redis_process import free_port

from kvstore.client import Client, ClientOptions
from kvstore.client.engines.base import Connector
from kvstore.client.options import TransportName
from kvstore.proto.types import MIN_CHUNK_TOKENS, Model

_LONG_MS = 600_000


class ConnectorContract(ABC):
    """What client/engines/base.py promises an engine, seen from the engine."""

    vocabulary: ClassVar[int]
    chunk_tokens: ClassVar[int] = 64

    @abstractmethod
    def representation(self) -> Model:
        """Return the identity of the KV of the engine's model."""

    @abstractmethod
    def make_connector(self, client: Client) -> Connector:
        """Return a connector that stores durably."""

    @abstractmethod
    def generate(self, connector: Connector | None, prompt: list[int]) -> list[int]:
        """Return a few greedy tokens that follow *prompt*; None is the engine by itself."""

    @abstractmethod
    def generate_within(
        self, connector: Connector, prompt: list[int], deadline_ms: int
    ) -> list[int]:
        """Return the same of a request with a deadline."""

    # --- helpers

    def whole_hit(self, tokens: int) -> int:
        """Return what a stored prompt of so many tokens hits when it is asked again."""
        tail = tokens % self.chunk_tokens
        return tokens - 1 if not tail or tail >= MIN_CHUNK_TOKENS else tokens - tail

    def prompt(self, tokens: int, seed: int = 0) -> list[int]:
        """Return a prompt that shares no chunk with that of another seed."""
        ids = np.random.default_rng(seed).integers(3, self.vocabulary, tokens)
        return [3 + seed, *map(int, ids[1:])]

    def options(self, transport: TransportName = "auto", retry_after_ms: int = 1) -> ClientOptions:
        """Return options with the suite's chunk size."""
        return ClientOptions(
            transport, self.chunk_tokens, deadline_ms=DEADLINE_MS, retry_after_ms=retry_after_ms
        )

    def connect(self, server: LocalServer, transport: TransportName = "auto") -> Connector:
        """Return a connector with a client of its own."""
        client = server.connect(
            representation=self.representation(), options=self.options(transport)
        )
        return self.make_connector(client)

    def dial(self, address: str, options: ClientOptions) -> Connector:
        """Return a connector whose client the test closes."""
        return self.make_connector(Client(address, self.representation(), options))

    def hit_tokens(self, connector: Connector, prompt: list[int]) -> int:
        """Generate through *connector*, check the tokens and the counts, return the tokens hit."""
        before = connector.stats()
        assert self.generate(connector, prompt) == self.generate(None, prompt)
        after = connector.stats()
        hits = after.hit_tokens - before.hit_tokens
        assert hits + after.miss_tokens - before.miss_tokens == len(prompt)
        assert after.lookups == before.lookups + 1
        assert sum(after.hit_tokens_by_tier.values()) == after.hit_tokens
        return hits

    # --- hits

    @pytest.mark.parametrize("transport", ["shm", "grpc"])
    def test_another_client_hits_all_but_the_last_token(
        self, server: LocalServer, transport: TransportName
    ) -> None:
        prompt = self.prompt(3 * self.chunk_tokens)
        first = self.connect(server, transport)
        assert self.hit_tokens(first, prompt) == 0
        stats = first.stats()
        assert stats.stored_chunks >= 3
        assert (stats.load_errors, stats.store_errors) == ({}, {})
        other = self.connect(server, transport)
        hit = self.whole_hit(len(prompt))
        assert self.hit_tokens(other, prompt) == hit
        assert other.stats().hit_tokens_by_tier == {"cpu": hit}

    @pytest.mark.parametrize("tail", [MIN_CHUNK_TOKENS - 1, MIN_CHUNK_TOKENS, MIN_CHUNK_TOKENS + 9])
    def test_a_tail_is_hit_when_it_is_long_enough_to_be_stored(
        self, server: LocalServer, tail: int
    ) -> None:
        prompt = self.prompt(2 * self.chunk_tokens + tail)
        self.hit_tokens(self.connect(server), prompt)
        assert self.hit_tokens(self.connect(server), prompt) == self.whole_hit(len(prompt))

    def test_prompts_of_other_lengths_hit_the_chunks_they_share(self, server: LocalServer) -> None:
        prompt, size = self.prompt(4 * self.chunk_tokens), self.chunk_tokens
        connector = self.connect(server)
        for tokens, hit in [(3, 0), (3, 0), (2 * size, 0), (4 * size, 2 * size)]:
            assert self.hit_tokens(connector, prompt[:tokens]) == hit
        shorter = prompt[: 2 * size + MIN_CHUNK_TOKENS]
        assert self.hit_tokens(connector, shorter) == 2 * size
        assert connector.stats().load_errors == {}

    def test_one_other_token_ends_the_hit_before_its_chunk(self, server: LocalServer) -> None:
        prompt = self.prompt(3 * self.chunk_tokens)
        connector = self.connect(server)
        self.hit_tokens(connector, prompt)
        changed = list(prompt)
        changed[self.chunk_tokens + 5] ^= 1
        assert self.hit_tokens(connector, changed) == self.chunk_tokens
        assert self.hit_tokens(connector, [prompt[0] ^ 1, *prompt[1:]]) == 0

    # --- deadlines

    def test_a_request_with_a_deadline_that_leaves_time_hits_what_one_without_hits(
        self, server: LocalServer
    ) -> None:
        prompt = self.prompt(3 * self.chunk_tokens)
        self.hit_tokens(self.connect(server), prompt)
        other = self.connect(server)
        tokens = self.generate_within(other, prompt, DEADLINE_MS)
        assert tokens == self.generate(None, prompt)
        assert other.stats().hit_tokens == self.whole_hit(len(prompt))

    # --- the store fails, the engine does not

    def test_no_server_at_all_is_a_counted_miss(self) -> None:
        connector = self.dial(f"127.0.0.1:{free_port()}", self.options(retry_after_ms=_LONG_MS))
        with connector.client:
            prompt = self.prompt(2 * self.chunk_tokens)
            assert self.hit_tokens(connector, prompt) == 0
            tokens = self.generate_within(connector, prompt, 50)
            assert tokens == self.generate(None, prompt)
            stats = connector.stats()
        assert (stats.hit_tokens, stats.miss_tokens) == (0, 2 * len(prompt))
        assert stats.load_errors == {"TierUnavailableError": 2}
        assert set(stats.store_errors) == {"TierUnavailableError"}

    def test_a_killed_server_is_a_miss_and_a_restarted_one_hits_again(
        self, server_process: ProcessMaker, tmp_path: Path
    ) -> None:
        process = server_process("--cpu", "16MiB", "--disk", f"32MiB:{tmp_path / 'disk'}")
        process.start()
        prompt = self.prompt(3 * self.chunk_tokens)
        connector = self.dial(process.address, self.options())
        with connector.client:
            self.hit_tokens(connector, prompt)
            process.kill()
            assert self.hit_tokens(connector, prompt) == 0
            assert sum(connector.stats().load_errors.values()) == 1
            process.start()
            assert eventually(
                lambda: self.hit_tokens(connector, prompt) == self.whole_hit(len(prompt))
            )
            assert connector.stats().hit_tokens_by_tier["disk"] > 0

    def test_a_server_that_drains_still_gives_and_takes_nothing(self, server: LocalServer) -> None:
        prompt = self.prompt(2 * self.chunk_tokens)
        connector = self.connect(server)
        self.hit_tokens(connector, prompt)
        connector.client.drain()
        assert self.hit_tokens(connector, prompt) == self.whole_hit(len(prompt))
        self.hit_tokens(connector, self.prompt(2 * self.chunk_tokens, seed=1))
        assert set(connector.stats().store_errors) == {"ShuttingDownError"}
