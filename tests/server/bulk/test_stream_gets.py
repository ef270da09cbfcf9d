"""Gets over a stream, by a reader with every message of its own making."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress

import pytest
from local_server import DEADLINE_MS, LocalServer, eventually, open_session
from prompts import MEDIUM, SMALL, assert_reads, frame_of, keys_of, store
from stream_caller import StreamCaller

from kvstore.client import Client, ClientOptions
from kvstore.proto import bulk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import QuotaExceededError, TierUnavailableError
from kvstore.proto.types import ChunkKey
from kvstore.server.bulk import tcp_server
from kvstore.server.bulk.tcp_transfers import FIRST_PART_BYTES

ServerMaker = Callable[..., LocalServer]


@pytest.fixture
def server(make_server: ServerMaker) -> LocalServer:
    return make_server("--bulk", "127.0.0.1:0", "--cpu", "64MiB")


@pytest.fixture
def terms(server: LocalServer) -> pb.OpenSessionResponse:
    return open_session(server.dial())


@pytest.fixture
def reader(terms: pb.OpenSessionResponse) -> Iterator[StreamCaller]:
    with closing(StreamCaller(terms)) as one:
        yield one


@pytest.fixture
def client(server: LocalServer) -> Client:
    """Another client of the server, which is to be served whatever the reader does."""
    return server.connect("tcp")


def get_word(terms: pb.OpenSessionResponse, **other: int) -> bulk.Get:
    return bulk.Get(1, terms.session_id, 0, DEADLINE_MS, 0)._replace(**other)


def digests_of(client: Client, seed: int, count: int) -> bytes:
    return b"".join(key[16:] for key in keys_of(client, seed, count))


def test_frames_come_in_order_and_end_with_their_number(
    client: Client, reader: StreamCaller, terms: pb.OpenSessionResponse
) -> None:
    keys = store(client, 1, 2)
    reader.say(get_word(terms), digests_of(client, 1, 2) + bytes(16))
    for number, key in enumerate(keys):
        frame = frame_of(key, SMALL).tobytes()
        word, payload = reader.hear()
        assert word == bulk.Part(1, len(frame), 0, number, bulk.tier_bytes("cpu"))
        # All but the chain of the chunk, which frame_of does not know, is the same.
        assert len(payload) == len(frame)
        assert payload[-1000:] == frame[-1000:]
    assert reader.hear() == (bulk.Done(1, 2), b"")


@pytest.mark.parametrize(
    ("changes", "digests", "message"),
    [
        ({"deadline_ms": 1 << 31}, bytes(16), "InvalidRequestError\0deadline_ms"),
        ({"lease_id": 5}, bytes(16), "LeaseExpiredError"),
        ({"flags": 64}, bytes(16), "InvalidRequestError\0flags=64: this server knows 15"),
        ({}, bytes(15), "InvalidRequestError\0digests=15"),
        ({}, bytes(16 * 4097), "InvalidRequestError\0digests=4097: at most 4096"),
        ({"flags": bulk.RANGES}, b"\xff" * 16, "InvalidRequestError\0ranges"),
    ],
)
def test_a_get_that_makes_no_sense_is_refused_and_leaves_nothing(
    server: LocalServer,
    reader: StreamCaller,
    terms: pb.OpenSessionResponse,
    changes: dict[str, int],
    digests: bytes,
    message: str,
) -> None:
    with server.unchanged():
        reader.say(get_word(terms, **changes), digests)
        assert reader.is_refused(message)
        reader.say(get_word(terms), bytes(16))
        assert reader.hear() == (bulk.Done(1, 0), b"")


def test_a_reader_cannot_ask_for_another_session(server: LocalServer, reader: StreamCaller) -> None:
    reader.say(get_word(open_session(server.dial())), bytes(16))
    assert reader.is_refused("UnauthenticatedError")


@pytest.fixture
def wide(server: LocalServer) -> tuple[pb.OpenSessionResponse, bytes]:
    """The terms of a session, and the names of 32 MiB of its chunks: more than sockets hold."""
    return wide_of(server)


def wide_of(server: LocalServer) -> tuple[pb.OpenSessionResponse, bytes]:
    options = ClientOptions("grpc", chunk_tokens=512, deadline_ms=DEADLINE_MS)
    client = server.connect("grpc", MEDIUM, options)
    keys = store(client, 1, 24)
    assert sum(len(frame_of(key, MEDIUM, 512)) for key in keys[:1]) > FIRST_PART_BYTES
    return open_session(server.dial(), MEDIUM), b"".join(key[16:] for key in keys)


def test_a_get_that_is_cancelled_ends_soon_and_the_stream_goes_on(
    server: LocalServer, wide: tuple[pb.OpenSessionResponse, bytes]
) -> None:
    terms, digests = wide
    with closing(StreamCaller(terms)) as reader:
        reader.say(get_word(terms), digests)
        reader.say(bulk.Cancel(1))
        parts = 0
        while isinstance((said := reader.hear()[0]), bulk.Part):
            parts += 1
        assert isinstance(said, bulk.Done)
        assert said.frames < 24
        reader.say(bulk.Cancel(1))  # of a get that has ended: it was on its way
        reader.say(get_word(terms, request=2), digests[:16])
        while isinstance((said := reader.hear()[0]), bulk.Part):
            assert said.request == 2
        assert said == bulk.Done(2, 1)
    assert server.settled().leases == 0


@pytest.mark.parametrize("word", [bulk.Cancel(2), bulk.Attached(1), bulk.Finish(1, 1)])
def test_who_says_anything_else_while_frames_come_is_hung_up_on(
    server: LocalServer, wide: tuple[pb.OpenSessionResponse, bytes], word: bulk.Word
) -> None:
    terms, digests = wide
    with closing(StreamCaller(terms)) as reader:
        reader.say(get_word(terms), digests)
        reader.say(word)
        with suppress(TierUnavailableError):  # what the sockets hold comes before
            while isinstance((said := reader.hear()[0]), bulk.Part):
                continue
            pytest.fail(f"it was answered: {said}")
    assert server.settled().leases == 0


def test_a_reader_that_takes_nothing_is_hung_up_on_and_others_are_served(
    server: LocalServer,
    client: Client,
    wide: tuple[pb.OpenSessionResponse, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bulk, "SILENCE_S", 0.5)
    terms, digests = wide
    with closing(StreamCaller(terms)) as mute:
        mute.say(get_word(terms), digests)
        assert eventually(lambda: server.usage().leases == 1)
        assert_reads(client, store(client, 1, 2))
        assert server.settled().leases == 0
        assert server.node.bulk is not None
        streams = server.node.bulk._streams
        assert eventually(
            lambda: all(one.session.session_id != terms.session_id for one in streams)
        )


def test_readers_that_take_nothing_hold_leases_and_no_thread_and_may_go_on(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "SILENCE_S", 60.0)
    server = make_server("--bulk", "127.0.0.1:0", "--workers", "2", "--cpu", "64MiB")
    terms, digests = wide_of(server)
    streams = server.node.bulk
    assert streams is not None
    with ExitStack() as stack:
        readers = [stack.enter_context(closing(StreamCaller(terms))) for _ in range(5)]
        begun: list[StreamCaller] = []
        for reader in readers:
            reader.say(get_word(terms, deadline_ms=60_000), digests)
            begun.append(reader)
            assert eventually(lambda: server.usage().leases == len(begun))
            assert eventually(lambda: streams._clients_served == 0)
        assert [one.sending is not None for one in streams._streams] == [True] * 5
        for reader in readers[:2]:
            sizes = []
            while isinstance((said := reader.hear())[0], bulk.Part):
                sizes.append(len(said[1]))
            assert said[0] == bulk.Done(1, 24)
            assert sum(sizes) == 24 * len(frame_of(ChunkKey(bytes(32)), MEDIUM, 512))
        assert server.usage().leases == 3
    assert eventually(lambda: server.usage().leases == 0)
    assert server.settled().leases == 0


def test_of_too_many_readers_that_take_nothing_the_last_loses_its_stream(
    server: LocalServer, wide: tuple[pb.OpenSessionResponse, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "MAX_WAITING_GETS", 2)
    terms, digests = wide
    bulk_server = server.node.bulk
    assert bulk_server is not None
    with ExitStack() as stack:
        for count in (1, 2, 2):
            reader = stack.enter_context(closing(StreamCaller(terms)))
            reader.say(get_word(terms, deadline_ms=60_000), digests)
            assert eventually(lambda: bulk_server._clients_served == 0)
            # Each is seen before the next one comes.
            assert eventually(lambda: len(bulk_server._streams) == count)  # noqa: B023
            assert eventually(lambda: server.usage().leases == count)  # noqa: B023
    assert server.settled().leases == 0


def test_a_reader_that_takes_nothing_loses_its_stream_with_its_lease_by_its_deadline(
    server: LocalServer, wide: tuple[pb.OpenSessionResponse, bytes]
) -> None:
    terms, digests = wide
    assert server.node.bulk is not None
    streams = server.node.bulk._streams
    with closing(StreamCaller(terms)) as mute:
        mute.say(get_word(terms, deadline_ms=500), digests)
        assert eventually(lambda: server.usage().leases == 1)
        assert eventually(lambda: not streams)
        assert server.settled().leases == 0


@pytest.mark.parametrize("word", [bulk.Attached(1), bulk.Done(1, 1), bulk.Failed(1)])
def test_the_server_s_own_words_are_hung_up_on(reader: StreamCaller, word: bulk.Word) -> None:
    reader.say(word, None if isinstance(word, bulk.Attached) else b"")
    assert reader.is_hung_up_on()


def test_beyond_the_loopback_bytes_are_encrypted(make_server: ServerMaker) -> None:
    server = make_server("--bulk", "0.0.0.0:0")
    options = ClientOptions("tcp", chunk_tokens=512, deadline_ms=DEADLINE_MS)
    client = server.connect("tcp", MEDIUM, options)
    terms = client._connected().session.terms
    assert terms.bulk_address.startswith("tcp://*:")
    assert terms.bulk_certificate
    assert_reads(client, store(client, 1, 3))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_death_of_the_thread_that_waits_fails_health(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = server.node.bulk
    assert plane is not None
    assert server.node.is_alive()

    def die(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(plane, "_sweep", die)
    assert eventually(lambda: not plane.is_alive())
    assert not server.node.is_alive()


def test_a_server_with_few_descriptors_has_few_streams(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.server.node.share_of", lambda share, taken, most: min(most, 20))
    server = make_server("--bulk", "127.0.0.1:0")
    terms = open_session(server.dial())
    callers = [StreamCaller(terms) for _ in range(10)]
    with pytest.raises(QuotaExceededError, match="client_streams=10"):
        StreamCaller(terms)
    for one in callers:
        one.close()
