"""Three nodes that read from each other's memory what Redis does not have."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from cluster.fleet import Fleet, running
from faults.oracle import fetched
from helpers.local_server import eventually
from helpers.networks import part, rejoin
from helpers.prompts import keys_of, store

CHUNKS = 6
SEEDS = count(1)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet that writes to Redis what is evicted, and nothing before."""
    flags = ("--peers", "directory", "--write", "redis=evict")
    with running(tmp_path_factory.mktemp("fleet"), *flags) as fleet:
        yield fleet


def put(fleet: Fleet, number: int) -> int:
    seed = next(SEEDS)
    with fleet.client(number) as client:
        store(client, seed, CHUNKS)
    return seed


def found(fleet: Fleet, number: int, seed: int) -> int:
    with fleet.client(number) as client:
        return fetched(client, keys_of(client, seed, CHUNKS))


def test_peer_that_is_cut_off_costs_its_chunks_and_no_more_until_it_is_back(fleet: Fleet) -> None:
    theirs, ours = put(fleet, 1), put(fleet, 2)
    assert eventually(lambda: found(fleet, 3, ours) == CHUNKS)
    part(fleet.hosts[0])
    try:
        assert found(fleet, 3, theirs) == 0
        assert found(fleet, 3, ours) == CHUNKS
        assert eventually(lambda: "node1" not in fleet.seen(3))
        assert found(fleet, 3, theirs) == 0
    finally:
        rejoin(fleet.hosts[0])
    assert eventually(lambda: found(fleet, 3, theirs) == CHUNKS)


def test_peer_that_was_restarted_is_not_believed_to_hold_what_it_did(fleet: Fleet) -> None:
    seed = put(fleet, 1)
    assert eventually(lambda: found(fleet, 2, seed) == CHUNKS)
    fleet.nodes[0].kill()
    fleet.nodes[0].start()
    assert eventually(fleet.is_whole)
    assert eventually(lambda: found(fleet, 3, seed) == CHUNKS), "the second node has it by now"
    fleet.nodes[1].kill()
    fleet.nodes[2].kill()
    fleet.nodes[1].start()
    fleet.nodes[2].start()
    assert eventually(fleet.is_whole)
    assert [found(fleet, number, seed) for number in (1, 2, 3)] == [0, 0, 0]
    fresh = put(fleet, 2)
    assert eventually(lambda: found(fleet, 1, fresh) == CHUNKS)
