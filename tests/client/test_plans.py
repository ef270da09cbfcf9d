"""Plans through the client, on every way that calls go."""

from __future__ import annotations

import asyncio

import pytest
from helpers.local_server import DEADLINE_MS, LocalServer
from helpers.prompts import SMALL, chunks_of, keys_of, tokens

from kvstore.client import AsyncClient, Client, ClientOptions
from kvstore.client.options import TransportName
from kvstore.client.planning import PrefillModel
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.plans import EngineTerms

SLOW_ENGINE = PrefillModel(0.1, 0.01)
FAST_ENGINE = PrefillModel(0.0, 1e-12)


@pytest.fixture(params=["shm", "grpc"])
def client(server: LocalServer, request: pytest.FixtureRequest) -> Client:
    return server.connect(request.param)


def test_a_lookup_that_tells_the_engine_s_speed_has_a_plan(client: Client) -> None:
    keys = keys_of(client, 1, 6)
    client.put_chunks(chunks_of(client, keys[:4]))
    assert client.lookup(keys=keys).plan is None
    plan = client.lookup(keys=keys, engine=EngineTerms(SLOW_ENGINE, 100)).plan
    assert plan is not None
    assert [(one.first, one.stop, one.load) for one in plan.ranges] == [(0, 4, True), (4, 6, False)]
    assert plan.loaded == [0, 1, 2, 3]
    assert plan.plan_ms < plan.recompute_ms == pytest.approx(1000 * SLOW_ENGINE.seconds(100, 0))


def test_an_engine_faster_than_any_tier_is_told_to_compute(client: Client) -> None:
    keys = keys_of(client, 1, 4)
    client.put_chunks(chunks_of(client, keys))
    plan = client.lookup(keys=keys, engine=EngineTerms(FAST_ENGINE)).plan
    assert plan is not None
    assert plan.loaded == []
    assert plan.plan_ms == plan.recompute_ms


def test_a_prompt_s_length_that_cannot_be_is_refused(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="prompt_tokens"):
        client.lookup(keys=keys_of(client, 1, 1), engine=EngineTerms(FAST_ENGINE, -1))


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_plans_are_the_same_awaited(server: LocalServer, transport: TransportName) -> None:
    options = ClientOptions(transport, chunk_tokens=16, deadline_ms=DEADLINE_MS)

    async def work() -> None:
        async with AsyncClient(server.address, SMALL, options) as client:
            keys = await client.keys(tokens(1, 64))
            await client.put_chunks(chunks_of(client.sync, keys))
            match = await client.lookup(keys=keys, engine=EngineTerms(SLOW_ENGINE, 70))
            assert match.plan is not None
            assert match.plan.loaded == [0, 1, 2, 3]

    asyncio.run(work())
