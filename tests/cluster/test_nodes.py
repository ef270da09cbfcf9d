"""Three nodes and a three-master Redis Cluster: sharing, partitions, restarts, a lost master."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from cluster.fleet import PREFIX, Fleet, holders, running
from faults.oracle import fetched
from helpers.local_server import eventually
from helpers.networks import part, probed, rejoin
from helpers.prompts import keys_of, store

from kvstore.proto.types import ChunkKey
from kvstore.server.cluster.directory import Directory
from kvstore.tiers.redis_chunks import KeyNames

CHUNKS = 3
SEEDS = count(1)


@pytest.fixture(scope="module")
def running_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture
def fleet(running_fleet: Fleet) -> Fleet:
    """The fleet, in which every node sees the others."""
    assert eventually(running_fleet.is_whole)
    return running_fleet


@pytest.fixture
def observer(fleet: Fleet) -> Iterator[Directory]:
    with fleet.observer() as directory:
        assert eventually(lambda: len(directory.report().nodes) == 3)
        yield directory


def gets(fleet: Fleet, number: int, seed: int) -> bool:
    """Whether node *number* has a whole prompt, whose bytes are right."""
    with fleet.client(number) as client:
        return fetched(client, keys_of(client, seed, CHUNKS)) == CHUNKS


def put(fleet: Fleet, number: int, chunks: int = CHUNKS) -> int:
    """Put a new prompt at node *number*; return its seed."""
    seed = next(SEEDS)
    with fleet.client(number) as client:
        store(client, seed, chunks)
    return seed


def keys(fleet: Fleet, seed: int, chunks: int = CHUNKS) -> list[ChunkKey]:
    with fleet.client(2) as client:
        return keys_of(client, seed, chunks)


def manifest(key: ChunkKey) -> bytes:
    return KeyNames(PREFIX).manifest(key)


def test_prefix_put_on_one_node_is_hit_on_another_and_its_holders_are_known(
    fleet: Fleet, observer: Directory
) -> None:
    seed = put(fleet, 1)
    assert eventually(lambda: gets(fleet, 2, seed))
    # reading it brought it into the second node's memory
    assert eventually(lambda: holders(observer, keys(fleet, seed)) == [{"node1", "node2"}] * CHUNKS)
    with fleet.client(1) as client:
        named = keys(fleet, seed)
        # a chunk that is just being copied is not deleted
        assert eventually(lambda: client.delete(keys=named) > 0 or not client.stat(keys=named))
    assert eventually(lambda: not any("node1" in one for one in holders(observer, named)))


def test_node_cut_off_serves_its_own_and_is_nobody_to_others_until_it_is_back(
    fleet: Fleet, observer: Directory
) -> None:
    common = put(fleet, 1)
    assert eventually(lambda: gets(fleet, 2, common))
    assert eventually(lambda: gets(fleet, 3, common))
    part(fleet.hosts[0])
    try:
        assert eventually(lambda: fleet.seen(2) == {"node3", "observer"})
        assert eventually(
            lambda: holders(observer, keys(fleet, common)) == [{"node2", "node3"}] * CHUNKS
        )
        alone = next(SEEDS)
        host, address = fleet.hosts[0], fleet.address(1)
        assert probed(host, address, str(alone), f"{alone},{common}") == [CHUNKS, CHUNKS]
        together = put(fleet, 2)
        assert eventually(lambda: gets(fleet, 3, together))
        assert not gets(fleet, 3, alone)
    finally:
        rejoin(fleet.hosts[0])
    assert eventually(fleet.is_whole)
    assert eventually(lambda: gets(fleet, 1, together))
    assert eventually(lambda: all("node1" in one for one in holders(observer, keys(fleet, alone))))


def test_node_restarted_while_it_was_cut_off_is_not_taken_for_who_it_was(
    fleet: Fleet, observer: Directory
) -> None:
    seed = put(fleet, 3)
    named = keys(fleet, seed)
    assert eventually(lambda: holders(observer, named) == [{"node3"}] * CHUNKS)
    old = observer.holders(named, 1.0)[named[0]][0].incarnation
    part(fleet.hosts[2])
    try:
        fleet.nodes[2].kill()
        fleet.nodes[2].start()
        assert eventually(lambda: holders(observer, named) == [set()] * CHUNKS)
    finally:
        rejoin(fleet.hosts[2])
    assert eventually(fleet.is_whole)
    assert holders(observer, named) == [set()] * CHUNKS
    assert old not in {node.incarnation for node in observer.report().nodes}
    assert eventually(lambda: gets(fleet, 3, seed)), "out of Redis"
    assert eventually(lambda: holders(observer, named) == [{"node3"}] * CHUNKS)


def test_rolling_restart_keeps_what_is_shared_and_every_node_comes_back_by_its_name(
    fleet: Fleet, observer: Directory
) -> None:
    seed = put(fleet, 1)
    assert eventually(lambda: gets(fleet, 2, seed))
    before = {node.node_id: node.incarnation for node in observer.report().nodes}
    for number, node in enumerate(fleet.nodes, 1):
        node.terminate()
        other = number % 3 + 1
        assert eventually(lambda other=other, n=number: f"node{n}" not in fleet.seen(other))  # type: ignore[misc]
        assert gets(fleet, other, seed)
        node.start()
        assert eventually(fleet.is_whole)
        assert eventually(lambda number=number: gets(fleet, number, seed))  # type: ignore[misc]
        assert fleet.standing(number) == "known"
    assert eventually(lambda: len(observer.report().nodes) == 3)
    after = {node.node_id: node.incarnation for node in observer.report().nodes}
    assert all(after[name] != before[name] for name in before)


def test_lost_master_costs_its_slots_and_not_the_directory(
    fleet: Fleet, observer: Directory
) -> None:
    chunks = 24
    seed = put(fleet, 1, chunks)
    named = keys(fleet, seed, chunks)
    assert eventually(lambda: holders(observer, named) == [{"node1"}] * chunks)
    gone = fleet.redis.nodes[1]
    lost = [fleet.redis.holder_of(manifest(key)) is gone for key in named]
    assert any(lost)
    gone.stop()
    try:
        assert eventually(lambda: 0 < len(observer.holders(named, 1.0)) < chunks)
        assert eventually(fleet.is_whole)
        assert observer.report().standing == "known"
        with fleet.client(1) as client:
            assert fetched(client, named) == chunks, "out of its own memory"
        with fleet.client(2) as client:
            assert fetched(client, named) == lost.index(True), "up to the first that is lost"
        other = put(fleet, 3)
        assert gets(fleet, 3, other)
    finally:
        gone.start()
        fleet.grant()
    assert eventually(fleet.redis.is_formed)
    assert eventually(fleet.is_whole)
    later = put(fleet, 1)
    assert eventually(lambda: gets(fleet, 2, later))
