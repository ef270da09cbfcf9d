"""The suite that every Transport passes. Subclass TransportContract and say which it is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
from conftest import ServerMaker
from contracts.chunks import make_representation
from contracts.ends import EndsContract
from contracts.layers import LayersContract, assert_layer, damage, flip
from contracts.parallel import Connect, ParallelContract
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import (
    MEDIUM,
    SMALL,
    assert_reads,
    chunks_of,
    equal,
    is_right,
    keys_of,
    outcomes,
    parts_of,
    store,
    tensors_of,
)

from kvstore.client import Chunk, Client, ClientOptions
from kvstore.client.chunk import to_torch
from kvstore.client.options import TransportName
from kvstore.client.session import Session
from kvstore.client.transports.base import ReadPlan, Transport
from kvstore.codecs.base import empty_tensors
from kvstore.proto.errors import InvalidRequestError, LayoutMismatchError, LeaseExpiredError
from kvstore.proto.types import DIGEST_BYTES, DType, KVLayout, Model, PutOutcome


class TransportContract(LayersContract, EndsContract, ParallelContract):
    """What client/transports/base.py promises, seen through a Client and a real server."""

    transport: ClassVar[type[Transport]]

    @pytest.fixture
    def connect(self, server: LocalServer) -> Connect:
        """Connect to the server over this transport."""

        def connect(representation: Model = SMALL, options: ClientOptions | None = None) -> Client:
            client = server.connect(self.name(), representation, options)
            assert client.transport_name == self.name()
            return client

        return connect

    def name(self) -> TransportName:
        """The transport's name, as options take it."""
        name = self.transport.name
        assert name in ("shm", "tcp", "grpc")
        return name  # type: ignore[return-value]

    def options(self, chunk_tokens: int = 16, staging_bytes: int = 1 << 20) -> ClientOptions:
        """Options for other chunks or less staging memory."""
        return ClientOptions(
            self.name(), chunk_tokens, deadline_ms=DEADLINE_MS, staging_bytes=staging_bytes
        )

    @pytest.fixture
    def client(self, connect: Connect) -> Client:
        return connect()

    @pytest.fixture
    def bare(self, server: LocalServer) -> Iterator[Transport]:
        """The transport by itself, with a session of its own."""
        session = Session(server.dial(), SMALL, self.options())
        transport = self.transport(session)
        yield transport
        transport.close()
        session.close()

    # --- what is put comes back

    def test_what_is_put_comes_back_bit_for_bit_in_every_dtype(self, connect: Connect) -> None:
        for dtype in DType:
            client = connect(make_representation(dtype=dtype))
            keys = store(client, 1, 3)
            assert_reads(client, keys)
            assert client.get_chunks(keys[:1])[0][0][0][0].dtype.itemsize == dtype.item_bytes

    @pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float8_e4m3fn], ids=lambda d: d.name)
    def test_torch_tensors_of_any_strides_are_put_and_filled(
        self, connect: Connect, dtype: DType
    ) -> None:
        client = connect(make_representation(dtype=dtype))
        (key,) = keys_of(client, 1, 1)
        right = tensors_of(key, client.model, 16)

        def strided(part: torch.Tensor) -> torch.Tensor:
            # (kv_heads, tokens, head_dim) as every other row of an engine's (tokens, heads, dim).
            wide = torch.zeros(32, 2, 8, dtype=part.dtype)
            wide[::2] = part.transpose(0, 1)
            return wide[::2].transpose(0, 1)

        given = [
            [[strided(to_torch(p, dtype)) for p in parts] for parts in layers] for layers in right
        ]
        assert not given[0][0][0].is_contiguous()
        assert outcomes(client, [Chunk(key, given)]) == [PutOutcome.stored]
        assert equal(client.get_chunks([key])[0], right)
        room = [
            [[strided(torch.zeros_like(p)) for p in parts] for parts in layers] for layers in given
        ]
        assert len(client.get_chunks([key], [room])) == 1
        for got, want in zip(parts_of(room), parts_of(given), strict=True):  # type: ignore[arg-type]
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))  # type: ignore[call-overload]

    def test_batch_larger_than_the_staging_memory_is_put_whole_and_in_order(
        self, connect: Connect
    ) -> None:
        client = connect(MEDIUM, self.options(chunk_tokens=64, staging_bytes=1 << 20))
        keys = store(client, 1, 24)
        assert_reads(client, keys)

    def test_frames_of_several_messages_come_back(self, connect: Connect) -> None:
        client = connect(MEDIUM, self.options(chunk_tokens=300))
        assert_reads(client, store(client, 1, 3))

    def test_many_chunks_come_in_the_order_they_are_asked_for(self, client: Client) -> None:
        keys = store(client, 1, 200)
        assert_reads(client, keys)
        random.Random(1).shuffle(keys)
        assert_reads(client, keys)

    def test_caller_s_buffers_are_filled_and_returned(self, client: Client) -> None:
        keys = store(client, 1, 4)
        room = [empty_tensors(KVLayout.of(SMALL, 16)) for _ in keys]
        found = client.get_chunks(keys, room)
        assert len(found) == 4
        for one, own in zip(found, room, strict=True):
            assert parts_of(one)[0] is parts_of(own)[0]
        assert all(is_right(client, key, own) for key, own in zip(keys, room, strict=True))
        wrong = [empty_tensors(KVLayout.of(SMALL, 17)) for _ in keys]
        with pytest.raises(LayoutMismatchError, match=r"shape=\(2, 17, 8\): give \(2, 16, 8\)"):
            client.get_chunks(keys, wrong)
        with pytest.raises(InvalidRequestError, match="out=3: give 4 entries"):
            client.get_chunks(keys, wrong[:3])

    # --- what is not there

    def test_get_ends_at_the_first_missing_chunk(self, client: Client, server: LocalServer) -> None:
        with server.unchanged():
            assert client.get_chunks([]) == []
            assert client.get_chunks(keys_of(client, 9, 3)) == []
            assert list(client.get_layers([])) == []
            assert list(client.get_chunk_layers(keys_of(client, 9, 3))) == []
            with client.lease(keys=keys_of(client, 1, 3)) as lease:
                assert lease.get() == []
                assert server.usage().leases == 0
        keys = store(client, 1, 5)
        assert client.delete(keys=[keys[3]]) == 1
        assert_reads(client, keys[:3])
        assert len(client.get_chunks(keys)) == 3
        assert client.get_chunks([keys[3]]) == []

    def test_damaged_chunk_is_a_miss_and_can_be_put_again(
        self, client: Client, server: LocalServer
    ) -> None:
        keys = store(client, 1, 3)
        damage(server, keys[1])
        assert len(client.get_chunks(keys)) == 1
        assert client.lookup(keys=keys).ready == 1
        assert outcomes(client, chunks_of(client, keys)) == [
            PutOutcome.exists, PutOutcome.stored, PutOutcome.exists
        ]  # fmt: skip
        assert_reads(client, keys)

    def test_a_damaged_copy_goes_and_a_sound_one_below_it_stays(
        self, client: Client, server: LocalServer
    ) -> None:
        keys = store(client, 1, 3)
        server.settled()
        flip(server, keys[1])
        assert len(client.get_chunks(keys)) == 1
        assert client.lookup(keys=keys).tiers == ("cpu", "disk", "cpu")
        assert_reads(client, keys)

    # --- putting twice

    def test_second_put_of_a_key_is_answered_exists_and_changes_nothing(
        self, client: Client, server: LocalServer
    ) -> None:
        keys = store(client, 1, 3)
        with server.unchanged():
            again = outcomes(client, chunks_of(client, keys, version=1))
        assert again == [PutOutcome.exists] * 3
        assert_reads(client, keys)
        other = keys_of(client, 2, 1)
        twice = [*chunks_of(client, other), *chunks_of(client, other, version=1)]
        assert outcomes(client, twice) == [PutOutcome.stored, PutOutcome.exists]
        assert_reads(client, other)

    # --- leases

    def test_lease_keeps_its_chunks_readable_until_it_is_released(
        self, client: Client, server: LocalServer
    ) -> None:
        keys = store(client, 1, 3)
        with client.lease(keys=[*keys, *keys_of(client, 2, 1)]) as lease:
            assert (lease.match.ready, lease.match.missing) == (3, 1)
            assert lease.keys == keys
            assert client.delete(keys=keys) == 0
            found = lease.get()
            assert [is_right(client, *pair) for pair in zip(keys, found, strict=True)] == [True] * 3
            assert server.usage().leases >= 1
            lease.keys.append(store(client, 3, 1)[0])
            with pytest.raises(InvalidRequestError, match="not under lease"):
                lease.get()
        assert server.settled().leases == 0
        with pytest.raises(LeaseExpiredError, match="call lookup again"):
            lease.get()
        assert client.delete(keys=keys) == 3

    def test_get_under_an_expired_lease_says_so(self, make_server: ServerMaker) -> None:
        server = make_server("--lease-ttl-ms", "20")
        client = server.connect(self.name())
        keys = store(client, 1, 2)
        with client.lease(keys=keys) as lease:
            assert lease.match.lease_ttl_ms == 20
            assert eventually(lambda: server.counter("expired_leases") == 1)
            with pytest.raises(LeaseExpiredError, match="expired"):
                lease.get()

    def test_chunks_arrive_in_order_with_their_tier_and_a_get_that_is_given_up_leaves_no_lease(
        self, bare: Transport, client: Client, server: LocalServer
    ) -> None:
        keys = store(client, 1, 50)
        digests = b"".join(key[DIGEST_BYTES:] for key in keys)
        for read in (0, 1, 5) * 5:
            with bare.read(ReadPlan(digests, 0, DEADLINE_MS)) as arriving:
                for index in range(read):
                    arrived = next(arriving.frames)
                    assert (arrived.index, arrived.tier) == (index, "cpu")
        for _ in range(100):
            assert len(client.get_chunks([*keys[:3], *keys_of(client, 2, 1)])) == 3
        assert server.settled().leases == 0
        assert server.counter("expired_leases") == 0

    # --- room

    def test_put_into_a_tier_full_of_leases_is_refused_with_a_reason(
        self, make_server: ServerMaker
    ) -> None:
        server = make_server("--tiers", "cpu", "--cpu", "4MiB")
        client = server.connect(self.name(), MEDIUM, self.options(chunk_tokens=64))
        leases = []
        for seed in range(100):
            (key,) = keys_of(client, seed, 1)
            (put,) = client.put_chunks(chunks_of(client, [key]))
            if put.outcome is PutOutcome.refused:
                break
            leases.append(client.lease(keys=[key]))
        assert 8 <= len(leases) < 16
        assert "tier 'cpu' needs" in put.reason
        assert server.counter("put_refused_chunks") >= 1
        for lease in leases:
            assert_reads(client, lease.keys)
            lease.release()
        assert outcomes(client, chunks_of(client, keys_of(client, 1000, 1))) == [PutOutcome.stored]

    def test_more_than_memory_holds_comes_back_from_disk_whole_and_by_layers(
        self, server: LocalServer, connect: Connect
    ) -> None:
        client = connect(MEDIUM, self.options(chunk_tokens=64))
        prompts = [store(client, seed, 8) for seed in range(12)]
        assert server.counter("evicted_chunks") > 0
        assert client.lookup(keys=prompts[0]).tiers == ("disk",) * 8
        for keys in prompts:
            layers = list(client.get_chunk_layers(keys))
            assert [len(layer.tensors) for layer in layers] == [8] * 4
            for layer in layers:
                assert_layer(client, keys, layer)
        for keys in prompts * 2:  # who reads files in place has them promoted the second time
            assert_reads(client, keys)
        assert eventually(lambda: server.counter("promoted_chunks") > 0)
        assert server.settled().tiers[0][1].reservations == 0

    def test_durable_put_is_on_disk_when_it_is_answered(self, client: Client) -> None:
        keys = keys_of(client, 1, 4)
        chunks = chunks_of(client, keys)
        client.put_chunks(chunks[:2])
        answers = [put.outcome for put in client.put_chunks(chunks, durable=True)]
        assert answers == [PutOutcome.exists] * 2 + [PutOutcome.stored] * 2
        held = client.stat(keys=keys)
        assert ["disk" in [copy.tier for copy in chunk.copies] for chunk in held] == [True] * 4

    def test_durable_put_without_a_disk_is_refused_and_says_what_to_do(
        self, make_server: ServerMaker
    ) -> None:
        server = make_server("--tiers", "cpu")
        client = server.connect(self.name())
        chunks = chunks_of(client, keys_of(client, 1, 2))
        with pytest.raises(InvalidRequestError, match="durable=True: start the server with a disk"):
            client.put_chunks(chunks, durable=True)
        assert server.settled().open_puts == 0

    def test_threads_that_share_a_client_do_not_disturb_each_other(self, client: Client) -> None:
        shared = store(client, 99, 6)

        def work(seed: int) -> None:
            for turn in range(5):
                keys = store(client, 100 * (seed + 1) + turn, 4)
                assert_reads(client, keys)
                assert_reads(client, shared)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))

    def test_closing_a_client_releases_everything_it_had(
        self, server: LocalServer, connect: Connect
    ) -> None:
        client = connect()
        keys = store(client, 1, 3)
        client.lease(keys=keys)
        assert server.usage().leases == 1
        client.close()
        client.close()
        assert server.settled().leases == 0
        assert eventually(lambda: len(server.node.sessions) == 0)
