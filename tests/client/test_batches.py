"""Lists that are longer than what the server takes in one request."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import pytest
from conftest import ServerMaker
from contracts.layers import assert_layer, layers_of, planned
from helpers.local_server import LocalServer
from helpers.prompts import SMALL, assert_reads, is_right, keys_of, store

from kvstore.client import Client
from kvstore.client.planning import PlanTerms, PrefillModel
from kvstore.client.transports.base import Arrivals, Put, PutTerms, ReadPlan
from kvstore.codecs.base import empty_tensors
from kvstore.proto.errors import DeadlineError, InvalidRequestError, LeaseExpiredError
from kvstore.proto.plans import EngineTerms
from kvstore.proto.types import ChunkKey, KVLayout, PutOutcome

LIMIT, CHUNKS = 4, 11
"""Three batches, the last of three chunks."""


EVERY = pytest.mark.parametrize("client", ["shm", "tcp", "grpc"], indirect=True)
"""What is read differs by transport; calls about chunks do not."""


@pytest.fixture
def server(make_server: ServerMaker) -> LocalServer:
    return make_server("--bulk", "127.0.0.1:0", "--limits", f"max_batch_chunks={LIMIT}")


@EVERY
def test_a_prompt_of_several_batches_is_found_read_and_counted_whole(client: Client) -> None:
    keys = store(client, 1, CHUNKS)
    match = client.lookup(keys=[*keys, *keys_of(client, 2, 2)])
    assert (match.ready, match.pending, match.missing) == (CHUNKS, 0, 2)
    assert match.tiers == ("cpu",) * CHUNKS
    assert len(match.load_us) == CHUNKS
    assert_reads(client, keys)
    room = [empty_tensors(KVLayout.of(SMALL, 16)) for _ in keys]
    assert len(client.get_chunks(keys, room)) == CHUNKS
    assert all(is_right(client, *pair) for pair in zip(keys, room, strict=True))
    assert client.pin(keys=keys, ttl=60.0) == client.unpin(keys=keys) == CHUNKS
    assert len(client.stat(keys=keys)) == CHUNKS
    assert client.announce_puts(keys_of(client, 2, 9), within=60.0) == 9
    assert client.delete(keys=keys) == CHUNKS


def test_lookups_and_reads_end_at_the_first_batch_with_a_miss(
    server: LocalServer, client: Client
) -> None:
    keys = store(client, 1, CHUNKS)
    for deleted, ready, asked in ((keys[2 * LIMIT :], 2 * LIMIT, 3), (keys[5:6], 5, 2)):
        assert client.delete(keys=deleted) == len(deleted)
        before = server.counter("lookups")
        match = client.lookup(keys=keys)
        assert (match.ready, match.missing) == (ready, CHUNKS - ready)
        assert server.counter("lookups") == before + asked
        assert_reads(client, keys[:ready])
        assert len(client.get_chunks(keys)) == ready
        assert {len(one.tensors) for one in client.get_chunk_layers(keys)} == {ready}


@EVERY
def test_leases_of_all_batches_end_together(server: LocalServer, client: Client) -> None:
    keys = store(client, 1, CHUNKS)
    with client.lease(keys=[*keys, *keys_of(client, 2, 1)]) as lease:
        assert lease.keys == keys
        assert server.usage().leases == 3
        assert client.delete(keys=keys) == 0
        found = lease.get()
        assert len(found) == CHUNKS
        assert all(is_right(client, *pair) for pair in zip(keys, found, strict=True))
        for place, key in enumerate(keys):
            view = lease.view(place)
            if client.transport_name == "shm":
                assert view is not None
                assert is_right(client, key, view.tensors())
            else:
                assert view is None
    assert server.settled().leases == 0
    with pytest.raises(LeaseExpiredError):
        lease.get()


def test_a_batch_that_is_late_ends_what_was_read_before_it(
    server: LocalServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = store(client, 1, CHUNKS)
    transport = client._link.connected()
    plain, asked = transport.read, list[ReadPlan]()

    def late(plan: ReadPlan) -> AbstractContextManager[Arrivals]:
        asked.append(plan)
        if len(asked) == 3:
            raise DeadlineError("late")
        return plain(plan)

    monkeypatch.setattr(transport, "read", late)
    found = client.get_chunks(keys)
    assert len(found) == 2 * LIMIT
    assert all(is_right(client, *pair) for pair in zip(keys, found, strict=False))


def test_a_key_of_another_namespace_in_a_later_batch_changes_nothing(
    server: LocalServer, client: Client
) -> None:
    keys = store(client, 1, CHUNKS)
    wrong = [*keys, ChunkKey(bytes(32))]
    with server.unchanged():
        for call in (client.delete, client.get, client.lookup):
            with pytest.raises(InvalidRequestError, match="not in this client's namespace"):
                call(keys=wrong)


@EVERY
def test_layers_go_and_come_of_all_batches_together(server: LocalServer, client: Client) -> None:
    keys = keys_of(client, 1, CHUNKS)
    with client.put_chunk_layers(planned(client, keys)) as put:
        for number, parts in layers_of(client, keys).items():
            put.layer(number, parts)
    assert [one.outcome for one in put.results] == [PutOutcome.stored] * CHUNKS
    found = []
    for layer in client.get_chunk_layers(keys):
        assert len(layer.tensors) == CHUNKS
        assert_layer(client, keys, layer)
        found.append(layer.id)
    assert found == [0, 1]
    assert server.settled().leases == 0


def test_a_put_whose_time_is_up_sends_no_further_batch(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, given_ms = client._link.connected(), list[int]()

    def too_slow(chunks: list[object], terms: PutTerms) -> list[Put]:
        given_ms.append(terms.within_ms)
        time.sleep(0.31)
        return [Put(PutOutcome.stored)] * len(chunks)

    monkeypatch.setattr(transport, "put", too_slow)
    keys = keys_of(client, 1, CHUNKS)

    def put_all() -> None:
        with client.put_chunk_layers(planned(client, keys), timeout=0.3) as put:
            for number, parts in layers_of(client, keys).items():
                put.layer(number, parts)

    with pytest.raises(DeadlineError, match=r"deadline_ms=(300|[12]?\d?\d) passed"):
        put_all()
    assert len(given_ms) <= 1


def test_a_layered_put_has_a_limit_that_is_named(server: LocalServer, client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="chunks=33: give 1 to 32 in one put"):
        client.put_chunk_layers(planned(client, keys_of(client, 2, 33)))
    assert server.settled().open_puts == 0


@EVERY
def test_levels_are_read_of_all_batches(server: LocalServer, client: Client) -> None:
    keys = store(client, 1, CHUNKS)
    out = [empty_tensors(KVLayout.of(SMALL, 16)) for _ in keys]
    terms = PlanTerms(20.0, PrefillModel(0.0, 10.0))
    assert client.get_levelled(keys, terms, out).to_compute == ()
    assert all(is_right(client, *pair) for pair in zip(keys, out, strict=True))
    assert server.settled().leases == 0  # which a thread of the client's ends
    assert client.delete(keys=keys[6:7]) == 1
    assert client.get_levelled(keys, PlanTerms(10.0), out).to_compute[0] == 6
    assert server.settled().leases == 0


def test_a_plan_of_several_batches_loads_what_is_sooner_loaded(client: Client) -> None:
    keys = store(client, 1, CHUNKS)
    asked = [*keys, *keys_of(client, 2, 2)]
    slow = client.lookup(keys=asked, engine=EngineTerms(PrefillModel(0.0, 1.0))).plan
    assert slow is not None
    assert list(slow.loaded) == list(range(CHUNKS))
    assert slow.ranges[-1].stop == len(asked)
    assert slow.plan_ms < slow.recompute_ms == pytest.approx(16_000 * len(asked))
    fast = client.lookup(keys=asked, engine=EngineTerms(PrefillModel(0.0, 0.0))).plan
    assert fast is not None
    assert (list(fast.loaded), fast.plan_ms) == ([], fast.recompute_ms)
